// From the view and the data: what is drawn. Nothing here touches the page.

/** The place of the last step that is not after `step`; the first where all are. */
export function placeOf(steps, step) {
  let place = 0;
  for (let at = 0; at < steps.length && steps[at] <= step; at++) place = at;
  return place;
}

/** The place of the first step that is not before `step`, the last where all are: an alarm of `step` is seen there. */
export function placeSince(steps, step) {
  const place = steps.findIndex((known) => known >= step);
  return place < 0 ? steps.length - 1 : place;
}

function union(lists) {
  return [...new Set(lists.flat())].sort((a, b) => a - b);
}

/** The value of a cell; NaN where the frame has no such cell. */
export function cell(frame, layer, head) {
  return frame && layer < frame.rows && head < frame.columns ? frame.values[layer * frame.columns + head] : NaN;
}

/** Layers of a run in order, `{number, path, heads}`; heads is null where the run does not say. */
function layersOf(record, frame) {
  const layers = new Map((record?.layers ?? []).map((layer) => [layer.number, layer]));
  for (let layer = 0; layer < (frame?.rows ?? 0); layer++) {
    if (layers.has(layer)) continue;
    const measured = Array.from({ length: frame.columns }, (_, head) => cell(frame, layer, head)).some(Number.isFinite);
    if (measured || !record) layers.set(layer, { number: layer, path: "", heads: null });
  }
  return [...layers.values()].sort((a, b) => a.number - b.number);
}

/** Whether a layer has a head of this number. */
export function exists(run, layer, head) {
  return layer.heads === null ? !run.record || !Number.isNaN(cell(run.frame, layer.number, head)) : head < layer.heads;
}

/** The alarms that a run's heads are under at the step that is shown. */
export function alarmsNow(run) {
  return run.alarms.filter(({ since, until }) => since <= run.step && (until === null || run.step < until));
}

/** What the map shows of a head: its value, or its change since the baseline. */
export function shown(run, view, layer, head) {
  const value = cell(run.frame, layer, head);
  return view === "change" ? value - cell(run.baseFrame, layer, head) : value;
}

function extentOf(numbers) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of numbers) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}

function* cells(runs, view) {
  for (const run of runs) {
    if (!run.frame) continue;
    for (let layer = 0; layer < run.frame.rows; layer++) {
      for (let head = 0; head < run.frame.columns; head++) yield shown(run, view, layer, head);
    }
  }
}

/** Which kinds of cells without a plain colour there are, for the key below the map. */
function kindsOf(runs, view) {
  const kinds = new Set();
  for (const run of runs.filter(({ none }) => !none)) {
    if (run.warnings.some((warning) => warning.step === run.step)) kinds.add("warned");
    for (const alarm of alarmsNow(run)) kinds.add(alarm.severity === "watch" ? "watched" : "alarmed");
    const columns = columnsOf(run);
    for (const layer of run.frame ? run.layers : []) {
      for (let head = 0; head < columns; head++) {
        if (!exists(run, layer, head)) kinds.add("absent");
        else if (Number.isNaN(shown(run, view, layer.number, head))) kinds.add("unmeasured");
        else if (!Number.isFinite(shown(run, view, layer.number, head))) kinds.add("infinite");
      }
    }
  }
  return kinds;
}

/** As many columns as the layer with the most heads has. */
export function columnsOf(run) {
  return Math.max(1, run.frame?.columns ?? 0, ...run.layers.map((layer) => layer.heads ?? 0));
}

function range(state, runs, limits) {
  const now = () => extentOf(cells(runs, state.view)) ?? [0, 1];
  if (state.view === "change") {
    const whole = Math.max(...runs.map((run) => run.summary?.change ?? 0), 0);
    const most = state.range === "step" || !whole ? Math.max(...now().map(Math.abs)) : whole;
    return [-most, most];
  }
  if (state.range === "step") return now();
  const [low, high] = extentOf(runs.flatMap((run) => run.summary?.extent ?? [])) ?? now();
  return state.range === "run" ? [low, high] : [limits[0] ?? low, limits[1] ?? Math.max(high, limits[0] ?? high)];
}

/**
 * Everything that the page needs.
 *
 * @param {object} state - A view that fits the data.
 * @param {Data} data - Asked for what is missing; what has not come yet is null here.
 */
export function derive(state, data) {
  const problems = [];
  const runs = state.runs.map((name, place) => {
    const tag = data.tag(name, state.prefix, state.quantity);
    const about = data.run(name, state.prefix);
    const run = {
      name,
      place,
      tag,
      record: about.value?.record ?? null,
      warnings: about.value?.warnings ?? [],
      alarms: about.value?.alarms ?? [],
      // What is known of the warnings: all, "off" without rules, "part", or why none is
      known: about.value ? { true: "all", false: "off", null: "part" }[about.value.watched] : about.error ? "error" : "loading",
      restarts: about.value?.restarts ?? [],
      error: tag ? (about.error ?? null) : "This run has no such quantity.",
      steps: [],
      none: "", // what is said in place of the map, where no sample has a figure
    };
    for (const text of about.value?.problems ?? []) problems.push({ run: name, tag: "", text });
    if (about.error) problems.push({ run: name, tag: "", text: `warnings: ${about.error}` });
    if (!tag) return run;
    const summary = data.summary(name, tag);
    run.error = summary.error ?? run.error;
    run.summary = summary.value;
    run.steps = summary.value?.steps ?? [];
    if (summary.value?.extent === null) run.none = noFigures(state.quantity);
    for (const text of summary.value?.problems ?? []) problems.push({ run: name, tag: tag.tag, text });
    return run;
  });

  const steps = union(runs.map((run) => run.steps));
  const place = steps.length ? (state.step === null ? steps.length - 1 : placeSince(steps, state.step)) : 0;
  const step = steps[place] ?? null;
  const listed = runs.every((run) => run.summary || run.error);
  for (const run of runs) {
    if (!run.steps.length || step < run.steps[0]) continue; // not begun at this step
    run.index = placeOf(run.steps, step);
    run.step = run.steps[run.index];
    run.wallTime = run.summary.wall_times[run.index];
    const frame = data.frame(run.name, run.tag, run.steps, run.index);
    run.error = failure(frame) ?? run.error;
    run.frame = frame.value ?? null;
    run.waiting = !run.frame && !run.error;
    if (state.view === "change") {
      const base = state.base === null ? 0 : placeOf(run.steps, state.base);
      run.base = run.steps[base];
      const baseFrame = data.frame(run.name, run.tag, run.steps, base);
      run.error = failure(baseFrame) ?? run.error;
      run.baseFrame = baseFrame.value ?? null;
      run.waiting ||= !run.baseFrame && !run.error;
      run.summary = data.summary(run.name, run.tag, run.base).value ?? run.summary;
    }
  }
  for (const run of runs) run.layers = layersOf(run.record, run.frame);
  const legend = entries(state, data, runs, problems);
  const about = runs.find((run) => run.tag)?.tag ?? { title: state.quantity, unit: "", limits: [null, null] };
  return {
    runs,
    steps,
    place,
    step,
    moved: listed && steps.length && state.step !== null && step !== state.step ? movedFrom(state.step, step, runs) : "",
    about,
    problems: grouped([...problems, ...data.catalogue.problems]),
    range: range(state, runs, about.limits),
    coloured: coloured(runs, state.view),
    none: noFigures(state.quantity),
    kinds: kindsOf(runs, state.view),
    prefixes: [...new Set(state.runs.flatMap((run) => allTags(data, run).map((tag) => tag.prefix)))],
    quantities: quantitiesOf(state, data),
    legend: legend.map(({ line, ...entry }) => entry),
    lines: legend.map(({ line }) => line).filter(Boolean).sort((a, b) => a.dash - b.dash), // run by run
    levels: levels(runs, state.quantity),
    warnings: runs.flatMap((run) => run.warnings.map((warning) => ({ ...warning, run: run.name, state: stateOf(warning, run) }))),
    known: runs.map(({ name, known }) => ({ name, known })),
  };
}

/** Why another step is shown than was asked for. */
export function movedFrom(asked, step, runs) {
  const dropped = runs.some((run) => typeof run.summary?.kept === "number");
  return `${dropped ? `The sample of step ${asked} is not kept` : `There is no sample of step ${asked}`}: this is step ${step}.`;
}

function noFigures(quantity) {
  const why = whyNone(quantity);
  return `No figures of this quantity${why && `: ${why}`}.`;
}

/** Whether there is something to colour, as far as is known. */
function coloured(runs, view) {
  return runs.some((run) => run.summary ? run.summary[view === "change" ? "change" : "extent"] !== null : !run.error);
}

/** Problems as lines: one for all tags of a run that have the same. */
export function grouped(problems) {
  const lines = new Map();
  for (const { run, tag, text } of problems) {
    const key = JSON.stringify([run, text]);
    if (!lines.has(key)) lines.set(key, { run, text, tags: new Set() });
    if (tag) lines.get(key).tags.add(tag);
  }
  return [...lines.values()].map(({ run, text, tags }) => {
    const names = [...tags].sort();
    const some = names.slice(0, 3).join(", ") + (names.length > 3 ? ", ..." : "");
    const where = names.length > 1 ? ` (${names.length} tags: ${some})` : names.length ? `, ${some}` : "";
    return `${run}${where}: ${text}`;
  });
}

/** What has become of the heads that a warning names. */
function stateOf(warning, run) {
  const alarms = run.alarms.filter(({ rule, since }) => rule === warning.rule && since === warning.step);
  const count = (some) => some.reduce((sum, { heads }) => sum + Object.values(heads).flat().length, 0);
  const over = alarms.filter(({ until }) => until !== null);
  const [all, recovered] = [count(alarms), count(over)];
  if (!all) return "";
  if (!recovered) return all === 1 ? "still under alarm" : `all ${all} heads still under alarm`;
  const last = Math.max(...over.map(({ until }) => until));
  if (all === 1) return `recovered at step ${last}`;
  if (recovered === all) return over.length === 1 ? `all ${all} heads recovered at step ${last}` : `all ${all} heads recovered, the last at step ${last}`;
  return `${recovered} of ${all} heads recovered${over.length === 1 ? " at" : ", the last at"} step ${last}; ${all - recovered} still under alarm`;
}

/** Whether a run has a head of this number at some step; true while that is not known. */
function has(run, { layer, head }) {
  if (!run.summary) return !run.error;
  const own = run.record?.layers.find(({ number }) => number === layer);
  const [rows, columns] = run.summary.shape;
  return layer < rows && head < columns && (!own || head < own.heads || Number.isFinite(cell(run.frame, layer, head)));
}

/** Whether some run has a head of this number at some step; true while that is not known. */
export function someHas(runs, head) {
  return runs.some((run) => has(run, head));
}

/** Whether there is a figure among these. */
export function measured(values) {
  return values.some((value) => Number.isFinite(value));
}

const FEWEST = { active_share: "at least 64", score_spread: "at least 8" }; // visible keys of a row that has a figure

/** Why a quantity has no figures at all, "" where that is not known. */
export function whyNone(quantity) {
  const top = /^(?:separability|precision|f_score|radius|distance)\w*@(\d+)$/.exec(quantity);
  const keys = FEWEST[quantity] ?? (top ? `more than ${top[1]}` : "");
  return keys && `only rows that see ${keys} keys have one`;
}

function failure(frame) {
  return frame.error ?? (frame.missing ? "TensorBoard no longer keeps this sample." : null);
}

function allTags(data, run) {
  return (data.catalogue.runs.find((known) => known.run === run)?.tags ?? []).filter((tag) => tag.kind === "heads");
}

function quantitiesOf(state, data) {
  const found = new Map();
  for (const run of state.runs) {
    for (const tag of allTags(data, run)) {
      if (tag.prefix === state.prefix && !found.has(tag.quantity)) found.set(tag.quantity, tag);
    }
  }
  return [...found.values()];
}

/** By head and run: what the legend names, and the line where it has come. A run that lacks a head has none of it. */
function entries(state, data, runs, problems) {
  const found = runs.map((run) => (run.tag && state.heads.length ? data.series(run.name, run.tag, state.heads).value : null));
  found.forEach((series, place) => problems.push(...(series?.problems ?? []).map((problem) => ({ run: runs[place].name, ...problem }))));
  return state.heads.flatMap(({ layer, head }, colour) =>
    runs.flatMap((run, place) => {
      if (!has(run, { layer, head })) return [];
      const line = found[place] && { ...found[place].heads[colour], run: run.name, dash: run.place, colour, steps: found[place].steps };
      const none = Boolean(line) && !measured(line.values);
      if (none && run.record && !run.record.layers.some(({ number }) => number === layer)) return [];
      return [{ layer, head, run: run.name, dash: run.place, colour, none, line }];
    }),
  );
}

function levels(runs, quantity) {
  const found = new Map();
  for (const run of runs) {
    for (const level of run.record?.levels ?? []) {
      if (level.quantity === quantity) found.set(`${level.rule} ${level.limit}`, level);
    }
  }
  return [...found.values()];
}
