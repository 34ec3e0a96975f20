// What the tab shows, as plain data and as the text of a link.

export const MOST_RUNS = 4;
export const MOST_HEADS = 8;

export const VIEWS = ["value", "change"];
export const RANGES = ["limits", "run", "step"];

/** The view of a tab that was just opened. A step or base of null is the newest and the first. */
export function initial() {
  return {
    runs: [],
    prefix: "",
    quantity: "",
    step: null,
    view: "value",
    base: null,
    range: "limits",
    heads: [],
    rule: "",
    severity: "",
    text: "",
  };
}

/** A view as text; what is as in a new tab is left out. */
export function encode(state) {
  const fields = new URLSearchParams();
  for (const run of state.runs) fields.append("run", run);
  for (const key of ["prefix", "quantity", "view", "range", "rule", "severity", "text"]) {
    if (state[key] !== initial()[key]) fields.set(key, state[key]);
  }
  for (const key of ["step", "base"]) {
    if (state[key] !== null) fields.set(key, String(state[key]));
  }
  if (state.heads.length) fields.set("heads", state.heads.map(({ layer, head }) => `${layer}.${head}`).join("_"));
  return fields.toString();
}

/** The view of a text, whatever the text is: what can't be read is as in a new tab. */
export function decode(text) {
  const state = initial();
  const fields = new URLSearchParams(text);
  state.runs = [...new Set(fields.getAll("run"))]; // cut to what can be shown in fitted()
  for (const key of ["prefix", "quantity", "rule", "severity", "text"]) state[key] = fields.get(key) ?? "";
  if (VIEWS.includes(fields.get("view"))) state.view = fields.get("view");
  if (RANGES.includes(fields.get("range"))) state.range = fields.get("range");
  for (const key of ["step", "base"]) {
    if (/^-?\d{1,15}$/.test(fields.get(key) ?? "")) state[key] = Number(fields.get(key));
  }
  for (const pair of (fields.get("heads") ?? "").split("_")) {
    const found = /^(\d{1,6})\.(\d{1,6})$/.exec(pair);
    if (found && state.heads.length < MOST_HEADS) state.heads.push({ layer: Number(found[1]), head: Number(found[2]) });
  }
  return state;
}

/** The runs that can be shown. */
export function runsOf(catalogue) {
  return catalogue.runs.filter(({ tags }) => tags.some(({ kind }) => kind === "heads")).map(({ run }) => run);
}

/** What of a link can't be shown, in words. */
export function unmet(text, catalogue) {
  const fields = new URLSearchParams(text);
  const asked = [...new Set(fields.getAll("run"))];
  const known = runsOf(catalogue);
  const there = asked.filter((run) => known.includes(run));
  const lines = asked.filter((run) => !known.includes(run)).map((run) => `The link names the run ${run}, which is not here.`);
  if (there.length > MOST_RUNS) lines.push(`The link names ${there.length} runs, of which the first ${MOST_RUNS} are shown.`);
  const state = fitted(decode(text), catalogue);
  for (const name of ["prefix", "quantity"]) {
    const wanted = fields.get(name);
    if (wanted && wanted !== state[name]) lines.push(`The link names the ${name === "prefix" ? "data" : name} ${wanted}, which is not here.`);
  }
  return lines;
}

/** Whether two heads are the same. */
export function sameHead(a, b) {
  return a.layer === b.layer && a.head === b.head;
}

/**
 * The view, made to fit the data: runs that are there, a prefix and a quantity that they have.
 *
 * @param {object} state - A view.
 * @param {object} catalogue - `{runs: [{run, tags}]}`.
 */
export function fitted(state, catalogue) {
  const known = catalogue.runs.filter(({ tags }) => tags.some(({ kind }) => kind === "heads"));
  const names = known.map(({ run }) => run);
  let runs = state.runs.filter((run) => names.includes(run)).slice(0, MOST_RUNS);
  if (!runs.length) runs = names.slice(0, 1);
  const tags = known
    .filter(({ run }) => runs.includes(run))
    .flatMap((entry) => entry.tags)
    .filter(({ kind }) => kind === "heads");
  const prefixes = [...new Set(tags.map(({ prefix }) => prefix))];
  const prefix = prefixes.includes(state.prefix) ? state.prefix : (prefixes[0] ?? "");
  const quantities = tags.filter((tag) => tag.prefix === prefix).map((tag) => tag.quantity);
  const usual = quantities.includes("entropy_normalized") ? "entropy_normalized" : (quantities[0] ?? "");
  return { ...state, runs, prefix, quantity: quantities.includes(state.quantity) ? state.quantity : usual };
}
