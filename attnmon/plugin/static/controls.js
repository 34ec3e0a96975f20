// What is chosen at the top: runs, quantity, step, scale.

import { gradient } from "./colours.js";
import { el, number, refill, signed, withUnit } from "./dom.js";
import { MOST_RUNS } from "./state.js";

function choice(label, select) {
  return el("label", { class: "choice" }, el("span", {}, label), select);
}

function radio(name, value, words, onChange) {
  const input = el("input", { type: "radio", name, value, on: { change: () => onChange(value) } });
  return { input, node: el("label", {}, input, el("span", {}, words)) };
}

/** Runs, quantity, view, scale. `set(change)` changes the view. */
export class Controls {
  #runs = el("div", { class: "run-list" });
  #runFilter = el("input", { type: "search", placeholder: "Filter runs", "aria-label": "Only runs whose name contains this text" });
  #runsName = el("summary", {});
  #prefix = el("select");
  #prefixChoice = choice("Data", this.#prefix);
  #quantity = el("select");
  #range = el("select");
  #views;
  #base = el("span", { class: "base" });
  #known = [];
  #chosen = [];
  #set;

  constructor({ set, reload, copyLink }) {
    this.#set = set;
    const picker = el("details", { class: "picker" }, this.#runsName, el("div", { class: "pop" }, this.#runFilter, this.#runs));
    picker.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !picker.open) return;
      picker.open = false;
      this.#runsName.focus();
    });
    document.addEventListener("pointerdown", (event) => {
      if (!picker.contains(event.target)) picker.open = false;
    });
    this.#runFilter.addEventListener("input", () => this.#drawRuns());
    this.#prefix.addEventListener("change", () => set({ prefix: this.#prefix.value }));
    this.#quantity.addEventListener("change", () => set({ quantity: this.#quantity.value }));
    this.#range.addEventListener("change", () => set({ range: this.#range.value }));
    this.#views = [
      radio("view", "value", "Value", (view) => set({ view })),
      radio("view", "change", "Change since baseline", (view) => set({ view })),
    ];
    this.node = el(
      "div",
      { class: "controls" },
      el("div", { class: "choice" }, el("span", {}, "Runs"), picker),
      this.#prefixChoice,
      choice("Quantity", this.#quantity),
      el(
        "div",
        { class: "choice", role: "radiogroup", "aria-label": "Show" },
        el("span", {}, "Show"),
        el("div", { class: "views" }, ...this.#views.map(({ node }) => node), this.#base),
      ),
      choice("Colour scale", this.#range),
      el("span", { class: "actions" }, reload, copyLink),
    );
  }

  draw({ state, view, catalogue }) {
    this.#known = catalogue.runs.filter(({ tags }) => tags.some(({ kind }) => kind === "heads")).map(({ run }) => run);
    this.#chosen = state.runs;
    this.#runsName.textContent = state.runs.length === 1 ? state.runs[0] : `${state.runs.length} runs`;
    this.#runsName.setAttribute("aria-label", `Runs: ${state.runs.join(", ")}`);
    this.#drawRuns();
    refill(this.#prefix, JSON.stringify(view.prefixes), () => view.prefixes.map((name) => el("option", { value: name }, name)));
    this.#prefix.value = state.prefix;
    this.#prefixChoice.hidden = view.prefixes.length < 2;
    refill(this.#quantity, JSON.stringify(view.quantities.map(({ quantity, title }) => [quantity, title])), () =>
      view.quantities.map(({ quantity, title }) => el("option", { value: quantity }, title)),
    );
    this.#quantity.value = state.quantity;
    for (const { input } of this.#views) input.checked = input.value === state.view;
    this.#drawRange(state, view);
    this.#drawBase(state, view);
  }

  #drawRuns() {
    const words = this.#runFilter.value.toLowerCase();
    const full = this.#chosen.length >= MOST_RUNS;
    refill(this.#runs, JSON.stringify([this.#known, this.#chosen, words]), () => [
      ...this.#known
        .filter((run) => run.toLowerCase().includes(words) || this.#chosen.includes(run))
        .map((run) => {
          const checked = this.#chosen.includes(run);
          const only = checked && this.#chosen.length === 1;
          const box = el("input", { type: "checkbox", checked, disabled: only || (full && !checked), value: run });
          box.addEventListener("change", () => {
            this.#set({ runs: this.#known.filter((name) => (name === run ? box.checked : this.#chosen.includes(name))) });
          });
          return el("label", {}, box, el("span", {}, run));
        }),
      el("p", { class: "hint" }, `Up to ${MOST_RUNS} runs are shown beside each other.`),
    ]);
  }

  #drawRange(state, { about }) {
    const [low, high] = about.limits;
    const fixed = low !== null || high !== null;
    const ends = `${low === null ? "least" : number(low)} to ${high === null ? "largest" : number(high)}`;
    const names = state.view === "change" ? [["run", "Whole run"], ["step", "This step"]] : [
      ...(fixed ? [["limits", `Fixed: ${ends}`]] : []),
      ["run", "Whole run"],
      ["step", "This step"],
    ];
    refill(this.#range, JSON.stringify(names), () => names.map(([value, name]) => el("option", { value }, name)));
    this.#range.value = names.some(([value]) => value === state.range) ? state.range : names[0][0];
  }

  #drawBase(state, { runs, step }) {
    this.#base.hidden = state.view !== "change";
    const bases = [...new Set(runs.map((run) => run.base).filter((base) => base !== undefined))];
    const words = state.base === null ? "the first sample" : `step ${bases.join(", ") || state.base}`;
    refill(this.#base, JSON.stringify([words, step]), () => [
      el("span", {}, `since ${words}`),
      el("button", { type: "button", disabled: step === null, on: { click: () => this.#set({ base: step }) } }, "Set to this step"),
      el("button", { type: "button", disabled: state.base === null, on: { click: () => this.#set({ base: null }) } }, "Reset"),
    ]);
  }
}

const PACE = 220; // milliseconds a sample while playing

/** Slider, play, newest. */
export class Stepper {
  #slider = el("input", { type: "range", min: "0", step: "1", "aria-label": "Step" });
  #play = el("button", { type: "button", class: "play" });
  #back = el("button", { type: "button", "aria-label": "Previous sample" }, "‹");
  #next = el("button", { type: "button", "aria-label": "Next sample" }, "›");
  #newest = el("button", { type: "button", title: "Follow the newest sample" }, "Newest");
  #words = el("output", { class: "step-words" });
  #timer = null;
  #view = null;
  #set;

  constructor({ set }) {
    this.#set = set;
    this.#slider.addEventListener("input", () => {
      this.#stop();
      this.#go(Number(this.#slider.value));
    });
    this.#play.addEventListener("click", () => (this.#timer ? this.#stop() : this.#start()));
    this.#back.addEventListener("click", () => this.move(-1));
    this.#next.addEventListener("click", () => this.move(1));
    this.#newest.addEventListener("click", () => {
      this.#stop();
      this.#set({ step: null });
    });
    this.node = el("div", { class: "stepper" }, this.#play, this.#back, this.#next, this.#slider, this.#newest, this.#words);
    this.#drawPlay();
  }

  /** One sample back or forth. */
  move(by) {
    this.#stop();
    this.#go(this.#view.place + by);
  }

  draw({ state, view }) {
    this.#view = view;
    const { steps, place, step } = view;
    const focused = document.activeElement;
    this.#slider.max = String(Math.max(0, steps.length - 1));
    this.#slider.value = String(place);
    this.#slider.disabled = this.#play.disabled = steps.length < 2;
    this.#back.disabled = place === 0;
    this.#next.disabled = place >= steps.length - 1;
    if (focused?.disabled && this.node.contains(focused)) this.#slider.focus(); // or it is lost
    this.#newest.setAttribute("aria-pressed", String(state.step === null));
    const time = view.runs.length === 1 && view.runs[0].wallTime ? new Date(view.runs[0].wallTime * 1000).toLocaleString() : "";
    const words = step === null ? "" : `step ${step} · sample ${place + 1} of ${steps.length}`;
    this.#slider.setAttribute("aria-valuetext", words);
    this.#words.textContent = time ? `${words} · ${time}` : words;
  }

  #go(place) {
    const { steps } = this.#view;
    if (steps.length) this.#set({ step: steps[Math.min(steps.length - 1, Math.max(0, place))] });
  }

  #start() {
    if (this.#view.place >= this.#view.steps.length - 1) this.#go(0);
    this.#timer = setInterval(() => {
      const { runs, place, steps } = this.#view;
      if (place >= steps.length - 1) this.#stop();
      else if (!runs.some((run) => run.waiting)) this.#go(place + 1);
    }, PACE);
    this.#drawPlay();
  }

  #stop() {
    clearInterval(this.#timer);
    this.#timer = null;
    this.#drawPlay();
  }

  #drawPlay() {
    this.#play.textContent = this.#timer ? "❚❚" : "▶";
    this.#play.setAttribute("aria-label", this.#timer ? "Pause" : "Play");
  }
}

/** The colour bar, and what the cells without a colour mean. */
export class ColourBar {
  #ramp = el("span", { class: "ramp", "aria-hidden": "true" });
  #ends = [el("span"), el("span"), el("span")];
  #scale = el("div", { class: "scale" }, this.#ramp, el("div", { class: "ends" }, ...this.#ends));
  #unit = el("span", { class: "unit" });
  #keys = {
    unmeasured: el("li", {}, el("i", { class: "key unmeasured" }), "not measured"),
    infinite: el("li", {}, el("i", { class: "key infinite" }, "∞"), "infinite"),
    absent: el("li", {}, el("i", { class: "key absent" }), "no such head"),
    warned: el("li", {}, el("i", { class: "key warned" }), "warning at this step"),
    alarmed: el("li", {}, el("i", { class: "key alarmed" }), "under alarm"),
    watched: el("li", {}, el("i", { class: "key watched" }), "worth watching"),
  };

  constructor() {
    this.node = el(
      "div",
      { class: "colour-bar" },
      this.#scale,
      this.#unit,
      el("ul", { class: "keys" }, ...Object.values(this.#keys)),
    );
  }

  draw({ state, view }) {
    const [low, high] = view.range;
    const write = state.view === "change" ? signed : number;
    this.#scale.hidden = this.#unit.hidden = !view.coloured;
    for (const [kind, key] of Object.entries(this.#keys)) key.hidden = !view.kinds.has(kind);
    this.#ramp.style.background = gradient(state.view);
    [low, (low + high) / 2, high].forEach((end, place) => (this.#ends[place].textContent = write(end, (high - low) / 100)));
    this.#unit.textContent = withUnit(state.view === "change" ? "change in" : "", view.about.unit || (state.view === "change" ? "value" : ""));
  }
}
