// What the server was asked and has answered.
//
// An answer is only ever kept under the question it belongs to, and the screen is drawn from the present choice: a late
// answer can't take the place of a newer one. Each question carries the stamp of its tag's data: when TensorBoard has
// read more, the stamp is another one, the question is asked anew, and the old answer is shown until the new one is there.

const AHEAD = 24; // samples asked for in one go, after the one that is shown ...
const BEHIND = 7; // ... and before it
const MOST_FRAMES = 6000; // kept; 48 x 32 heads take 6 KB each

/** A float32 array from base64. */
function floats(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer); // little-endian, as every browser's machine is
}

/** What is known of a run's quantity at a step: `{value}`, `{error}`, or neither while it is being loaded. */
export class Data {
  #answers = new Map();
  #frames = new Map();
  #asking = new Set(); // runs' tags whose frames are on their way
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
    for (const answers of [this.#answers, this.#frames]) {
      for (const [key, answer] of answers) if (answer.error) answers.delete(key);
    }
    const asked = (this.asked = (this.asked ?? 0) + 1);
    try {
      const catalogue = await this.#fetch("catalogue", {});
      if (asked === this.asked) [this.catalogue, this.error] = [catalogue, null];
    } catch (error) {
      if (asked === this.asked) this.error = error.message;
    }
    this.#changed();
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

  /** Lines of heads: `{steps, heads: [{layer, head, values, marks}]}`. */
  series(run, tag, heads) {
    const question = {
      run,
      prefix: tag.prefix,
      tag: tag.tag,
      quantity: tag.quantity,
      heads: heads.map(({ layer, head }) => `${layer}.${head}`).join(","),
    };
    const stamp = [tag.stamp, this.#stamp(run, tag.prefix, ["warnings"])];
    return this.#ask("series", question, stamp, (answer) => ({
      ...answer,
      heads: answer.heads.map((head) => ({ ...head, values: floats(head.data), data: null })),
    }));
  }

  /**
   * One sample: `{value: {rows, columns, values}}`, or `{missing: true}` where it is no longer kept.
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
    return this.#frames.get(place + steps[index]) ?? {};
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
    const key = `${route}?${new URLSearchParams(question)}`;
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
