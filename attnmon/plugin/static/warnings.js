// The list of warnings.

import { severity } from "./colours.js";
import { el, refill } from "./dom.js";

const PAGE = 100;

/** Warnings that pass the filters, the newest first. */
export function filtered(warnings, { rule, severity: kind, text }) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return warnings
    .filter((warning) => {
      const all = [warning.title, warning.rule, warning.severity, warning.summary, warning.run, `step ${warning.step}`].join(" ").toLowerCase();
      return (!rule || warning.rule === rule) && (!kind || warning.severity === kind) && words.every((word) => all.includes(word));
    })
    .sort((a, b) => b.step - a.step);
}

function options(select, chosen, first, values) {
  // A link may name one that is not there: it filters all the same, and can be seen to
  if (chosen && !values.some(([value]) => value === chosen)) values = [...values, [chosen, `${chosen} (no such warning)`]];
  refill(select, JSON.stringify(values), () => [el("option", { value: "" }, first), ...values.map(([value, name]) => el("option", { value }, name))]);
  select.value = chosen;
}

const UNKNOWN = {
  off: "No alert rules watched this data, so there are no warnings of it.",
  part: "Not all records of warnings could be read: there may be more than are listed.",
  error: "The warnings could not be read.",
  loading: "Loading the warnings ...",
};

/** What is not known of the warnings, as lines. */
function unknowns(known, several) {
  return known.filter((run) => run.known in UNKNOWN).map((run) => (several ? `${run.name}: ` : "") + UNKNOWN[run.known]);
}

/** The list. `onFilter(change)` when a filter is set, `onShow(warning)` when one is chosen. */
export class Warnings {
  #count = el("span", { class: "count" });
  #rule = el("select", { "aria-label": "Only warnings of this rule" });
  #severity = el("select", { "aria-label": "Only warnings of this severity" });
  #text = el("input", { type: "search", placeholder: "Filter by text", "aria-label": "Only warnings that contain this text" });
  #notes = el("div", { class: "notes" });
  #list = el("ol", { class: "warnings" });
  #more = el("button", { type: "button", class: "plain" }, "Show more");
  #shown = PAGE;
  #onShow;
  #again = () => {};

  constructor({ onFilter, onShow }) {
    this.#onShow = onShow;
    this.#rule.addEventListener("change", () => onFilter({ rule: this.#rule.value }));
    this.#severity.addEventListener("change", () => onFilter({ severity: this.#severity.value }));
    this.#text.addEventListener("input", () => onFilter({ text: this.#text.value }));
    this.#more.addEventListener("click", () => {
      this.#shown += PAGE;
      this.#again();
    });
    this.node = el(
      "section",
      { class: "panel", "aria-labelledby": "warnings-title" },
      el("header", {}, el("h2", { id: "warnings-title" }, "Warnings"), this.#count, el("span", { class: "filters" }, this.#severity, this.#rule, this.#text)),
      this.#notes,
      this.#list,
      this.#more,
    );
  }

  draw({ warnings, known, state, several }) {
    this.#again = () => this.draw({ warnings, known, state, several });
    const rules = new Map(warnings.map(({ rule, title }) => [rule, title]));
    options(this.#rule, state.rule, "Every rule", [...rules].sort());
    const kinds = new Set(warnings.map((warning) => warning.severity));
    options(this.#severity, state.severity, "Every severity", [...kinds].sort().map((kind) => [kind, severity(kind).word]));
    if (this.#text.value !== state.text) this.#text.value = state.text;
    const found = filtered(warnings, state);
    const notes = unknowns(known, several);
    refill(this.#notes, JSON.stringify(notes), () => notes.map((text) => el("p", {}, text)));
    this.#count.textContent = found.length === warnings.length ? `${warnings.length}` : `${found.length} of ${warnings.length}`;
    this.#count.hidden = !warnings.length && notes.length > 0; // not none, but not known
    const list = found.slice(0, this.#shown);
    this.#more.hidden = found.length <= this.#shown;
    refill(this.#list, JSON.stringify([list.map(({ run, step, rule, state: now }) => [run, step, rule, now]), several, warnings.length, notes]), () =>
      list.length ? list.map((warning) => this.#item(warning, several)) : this.#nothing(warnings, known),
    );
  }

  #nothing(warnings, known) {
    if (warnings.length) return [el("li", { class: "nothing" }, "No warning passes the filters.")];
    return known.every((run) => run.known === "all") ? [el("li", { class: "nothing" }, "No warnings.")] : [];
  }

  #item(warning, several) {
    const mark = severity(warning.severity);
    return el(
      "li",
      {},
      el(
        "button",
        { type: "button", class: "jump", title: "Show this step and these heads", on: { click: () => this.#onShow(warning) } },
        el("span", { class: `mark ${warning.severity}`, "aria-hidden": "true" }, mark.glyph),
        el("span", { class: "jump-title" }, `${mark.word}: ${warning.title}`),
        el("span", { class: "jump-step" }, `step ${warning.step}${several ? `, ${warning.run}` : ""}`),
      ),
      el("p", {}, warning.summary),
      warning.state && el("p", { class: "state" }, `${warning.state[0].toUpperCase()}${warning.state.slice(1)}.`),
      el("details", {}, el("summary", {}, "What to try"), el("p", {}, `${warning.remedy}.`)),
    );
  }
}
