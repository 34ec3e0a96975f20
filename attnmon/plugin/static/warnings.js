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
  refill(select, JSON.stringify(values), () => [el("option", { value: "" }, first), ...values.map(([value, name]) => el("option", { value }, name))]);
  select.value = chosen;
}

/** The list. `onFilter(change)` when a filter is set, `onShow(warning)` when one is chosen. */
export class Warnings {
  #count = el("span", { class: "count" });
  #rule = el("select", { "aria-label": "Only warnings of this rule" });
  #severity = el("select", { "aria-label": "Only warnings of this severity" });
  #text = el("input", { type: "search", placeholder: "Filter by text", "aria-label": "Only warnings that contain this text" });
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
      this.#list,
      this.#more,
    );
  }

  draw({ warnings, state, several }) {
    this.#again = () => this.draw({ warnings, state, several });
    const rules = new Map(warnings.map(({ rule, title }) => [rule, title]));
    options(this.#rule, state.rule, "Every rule", [...rules].sort());
    const kinds = new Set(warnings.map((warning) => warning.severity));
    options(this.#severity, state.severity, "Every severity", [...kinds].sort().map((kind) => [kind, severity(kind).word]));
    if (this.#text.value !== state.text) this.#text.value = state.text;
    const found = filtered(warnings, state);
    this.#count.textContent = found.length === warnings.length ? `${warnings.length}` : `${found.length} of ${warnings.length}`;
    const list = found.slice(0, this.#shown);
    this.#more.hidden = found.length <= this.#shown;
    refill(this.#list, JSON.stringify([list.map(({ run, step, rule }) => [run, step, rule]), several, warnings.length]), () =>
      list.length ? list.map((warning) => this.#item(warning, several)) : [el("li", { class: "nothing" }, warnings.length ? "No warning passes the filters." : "No warnings.")],
    );
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
      el("details", {}, el("summary", {}, "What to try"), el("p", {}, `${warning.remedy}.`)),
    );
  }
}
