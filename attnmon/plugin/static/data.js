// What the server was asked and has answered.
//
// An answer is only ever kept under the question it belongs to, and the screen is drawn from the present choice: a late
// answer can't take the place of a newer one. Each question carries the stamp of its tag's data: when TensorBoard has
// read more, the stamp is another one, the question is asked anew, and the old answer is shown until the new one is there.

const AHEAD = 24; // samples asked for in one go, after the one that is shown ...
const BEHIND = 7; // ... and before it
const MOST_FRAMES = 6000; // kept; 48 x 32 heads take 6 KB each
const MOST_AGAIN = 5; // times in a row that the list is asked for anew because of a sample that is no longer kept

/** A float32 array from base64. */
function floats(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer); // little-endian, as every browser's machine is
}

function keyOf(route, question) {
  return `${route}?${new URLSearchParams(question)}`;
}

/** What is known of a run's quantity at a step: `{value}`, `{error}`, or neither while it is being loaded. */
export class Data {
  #answers = new Map();
  #frames = new Map();
  #asking = new Set(); // runs' tags whose frames are on their way
  #again = new Map(); // ... and those whose list is asked for anew: `{stamp, count, waiting}`
  #base;
  #changed;

  catalogue = null;
  error = null;

  /**
   * @param {URL} base - Where the routes are.
   * @param {function} changed - Called when there is something new to draw.
   */
  constructor(base, changed) {
    this.#base = base;
    this.#changed = changed;
  }

  /** Asks again what there is; what failed is tried again. */
  async reload() {
    this.#again.clear();
    for (const answers of [this.#answers, this.#frames]) {
      for (const [key, answer] of answers) if (answer.error) answers.delete(key);
    }
    await this.#list();
    this.#changed();
  }

  async #list() {
    const asked = (this.asked = (this.asked ?? 0) + 1);
    try {
      const catalogue = await this.#fetch("catalogue", {});
      if (asked === this.asked) [this.catalogue, this.error] = [catalogue, null];
    } catch (error) {
      if (asked === this.asked) this.error = error.message;
    }
  }

  /** A run's tags of one prefix. */
  tags(run, prefix) {
    const entry = this.catalogue?.runs.find((known) => known.run === run);
    return (entry?.tags ?? []).filter((tag) => tag.prefix === prefix);
  }

  /** A run's tag of a quantity; undefined if it has none. */
  tag(run, prefix, quantity) {
    return this.tags(run, prefix).find((tag) => tag.kind === "heads" && tag.quantity === quantity);
  }

  /** What the run is like, and its warnings: `{record, warnings, problems}`. */
  run(run, prefix) {
    return this.#ask("run", { run, prefix }, this.#stamp(run, prefix, ["run", "warnings"]));
  }

  /** Steps, times, extent and, given a baseline, the largest change: see the route. */
  summary(run, tag, baseline) {
    const question = { run, tag: tag.tag };
    if (baseline !== undefined) question.baseline = baseline;
    return this.#ask("summary", question, tag.stamp);
  }

  /** Lines of heads, with the limits that each has of its own: `{steps, heads: [{..., values, marks, limits}], problems}`. */
  series(run, tag, heads) {
    const question = {
      run,
      prefix: tag.prefix,
      tag: tag.tag,
      quantity: tag.quantity,
      heads: heads.map(({ layer, head }) => `${layer}.${head}`).join(","),
    };
    const stamp = [tag.stamp, this.#stamp(run, tag.prefix, ["warnings", "limits"])];
    return this.#ask("series", question, stamp, (answer) => ({
      ...answer,
      heads: answer.heads.map((head, place) => ({
        ...head,
        values: floats(head.data),
        limits: answer.limits.map((limit) => ({ ...limit, values: floats(limit.heads[place]), heads: null })),
        data: null,
      })),
    }));
  }

  /**
   * One sample: `{value: {rows, columns, values}}`, or `{missing: true}` where it is no longer kept: TensorBoard has read
   * more since it told which there are. Then it is asked for the list anew, a few times at most.
   *
   * Its neighbours are asked for with it, so that the slider finds them here.
   */
  frame(run, tag, steps, index) {
    const place = `${run}\n${tag.tag}\n`;
    const stamp = JSON.stringify(tag.stamp);
    const fresh = (at) => this.#frames.get(place + steps[at])?.stamp === stamp;
    const wanted = [];
    for (let at = Math.max(0, index - BEHIND); at <= Math.min(steps.length - 1, index + AHEAD); at++) {
      if (!fresh(at)) wanted.push(steps[at]);
    }
    const near = Math.min(steps.length - 1, index + AHEAD / 2); // ask ahead of time, while the slider moves on
    if (wanted.length && (!fresh(index) || !fresh(near)) && !this.#asking.has(place)) this.#askFrames(run, tag, wanted);
    const found = this.#frames.get(place + steps[index]) ?? {};
    if (found.value) this.#again.delete(place);
    return found.missing && this.#listAgain(run, tag, place, stamp) ? {} : found;
  }

  /** Whether the list of samples is on its way. */
  #listAgain(run, tag, place, stamp) {
    if (this.#answers.get(keyOf("summary", { run, tag: tag.tag }))?.asked) return true;
    const last = this.#again.get(place) ?? { count: 0 };
    if (last.waiting || last.stamp === stamp || last.count >= MOST_AGAIN) return Boolean(last.waiting);
    const entry = { stamp, count: last.count + 1, waiting: true };
    this.#again.set(place, entry);
    this.#list().then(() => {
      entry.waiting = false;
      this.#changed();
    });
    return true;
  }

  async #askFrames(run, tag, steps) {
    const place = `${run}\n${tag.tag}\n`;
    const stamp = JSON.stringify(tag.stamp);
    this.#asking.add(place);
    try {
      const answer = await this.#fetch("frames", { run, tag: tag.tag, steps: steps.join(",") });
      for (const { step, shape, data } of answer.frames) {
        this.#keepFrame(place + step, { stamp, value: { rows: shape[0], columns: shape[1], values: floats(data) } });
      }
      for (const step of answer.missing) this.#keepFrame(place + step, { stamp, missing: true });
    } catch (error) {
      for (const step of steps) this.#keepFrame(place + step, { stamp, error: error.message });
    }
    this.#asking.delete(place);
    this.#changed();
  }

  #keepFrame(key, frame) {
    this.#frames.delete(key);
    this.#frames.set(key, frame);
    for (const oldest of this.#frames.keys()) {
      if (this.#frames.size <= MOST_FRAMES) break;
      this.#frames.delete(oldest);
    }
  }

  #stamp(run, prefix, kinds) {
    return this.tags(run, prefix).filter(({ kind }) => kinds.includes(kind)).map(({ stamp }) => stamp);
  }

  #ask(route, question, stamp, decode = (answer) => answer) {
    const key = keyOf(route, question);
    const now = JSON.stringify(stamp);
    const entry = this.#answers.get(key) ?? {};
    this.#answers.set(key, entry);
    if (entry.stamp !== now && entry.asked !== now) {
      entry.asked = now;
      this.#fetch(route, question).then(
        (answer) => this.#keep(entry, now, { value: decode(answer), error: null }),
        (error) => this.#keep(entry, now, { error: error.message }),
      );
    }
    return entry;
  }

  #keep(entry, stamp, result) {
    if (entry.asked !== stamp) return; // the question has been asked again since
    Object.assign(entry, result, { stamp, asked: null });
    this.#changed();
  }

  async #fetch(route, question) {
    const url = new URL(route, this.#base);
    url.search = new URLSearchParams(question);
    let response;
    try {
      response = await fetch(url, { credentials: "same-origin" });
    } catch {
      throw new Error("TensorBoard does not answer.");
    }
    if (!response.ok) throw new Error((await response.text()).slice(0, 500) || `TensorBoard answers ${response.status}.`);
    return response.json();
  }
}
