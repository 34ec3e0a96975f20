// Lines of heads over steps, with the limits they are judged by and the warnings they raised.
//
// The limits that a head has of its own change from sample to sample. They are drawn for one line at a time: those of all
// would hide the figures.

import { DASHES, headColour, severity } from "./colours.js";
import { counted, el, longest, number, svg, tickLabels, tip, withUnit } from "./dom.js";
import { placeOf } from "./view.js";

const EDGE = { right: 14, top: 14, bottom: 34 };
const LEFT = 58; // at least; more where the labels need it
const LETTER = 6.3; // width of a tick's character, roughly
const MOST_LIMITS = 8; // warned lines whose limits are drawn; more would hide them
const NEAR = 9; // pixels around a warning's mark
const ROW = 13; // ... from label to label
const WORDS = 220; // ... that a label takes at most, roughly

/** About `count` round numbers between two ends, at least `least` apart: 1 for whole ones. */
export function ticks(low, high, count, least = 0) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((step) => step * power).find((step) => step >= Math.max(rough, least)) ?? least;
  const found = [];
  for (let at = Math.ceil(low / size); at * size <= high + size * 1e-9; at++) found.push(at * size);
  return found;
}

/** A head's name; that of the run too where there are several. */
export function lineName({ layer, head, run }, several) {
  return `layer ${layer}, head ${head}${several ? ` in ${run}` : ""}`;
}

/** The height of a label that is wanted at `at`: there, or near by where another one of its side is. */
function freeRow(taken, at, [top, bottom]) {
  const free = (row) => row >= top && row <= bottom && taken.every((other) => Math.abs(other - row) >= ROW);
  const row = [at, at + ROW, at - ROW, at + 2 * ROW, at - 2 * ROW].find(free) ?? at;
  taken.push(row);
  return row;
}

/** What of a head's own limit can be reached: nothing beyond the ends that the quantity has. */
export function reachable({ values }, [low, high]) {
  return values.map((value) => ((low !== null && value < low) || (high !== null && value > high) ? NaN : value));
}

/** A limit at a step; NaN where it was not there yet or is no longer. */
export function limitAt({ steps, values }, step) {
  return steps.length && step >= steps[0] && step <= steps.at(-1) ? values[placeOf(steps, step)] : NaN;
}

/** The chart. `onStep(step, run)` is called when a step is chosen in it, with the run whose warning it is, `onMove(-1 | 1)` by the arrow keys. */
export class Chart {
  #svg = svg("svg", { class: "chart", tabindex: "0", role: "application" });
  #now = svg("g");
  #cross = svg("g");
  #model = null;
  #drawn = []; // what the picture was made of
  #x = null;
  #left = LEFT;
  #fine = 0; // what differs by less needs not be told apart
  #marks = []; // of warnings: `{x, y, step, run}`

  constructor({ onStep, onMove }) {
    this.node = this.#svg;
    this.#svg.addEventListener("pointermove", (event) => this.#hover(event));
    this.#svg.addEventListener("pointerleave", () => this.#leave());
    this.#svg.addEventListener("click", (event) => {
      const { step, run } = this.#stepAt(event);
      if (step !== null) onStep(step, run);
    });
    this.#svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      onMove(move);
      event.preventDefault();
    });
  }

  /** @param {object} model - `{lines, own, levels, step, base, about, several, width, height, dark}`; own: the line whose own limits are drawn. */
  draw(model) {
    this.#model = model;
    const { width, height, lines } = model;
    const drawn = [model.own && lineName(model.own, true), width, height, model.dark, model.base, model.several, model.about.title, JSON.stringify(model.levels)].concat(
      lines.flatMap((line) => [line.values, line.limits, line.marks, line.colour, line.dash, line.run]),
    );
    if (drawn.length !== this.#drawn.length || drawn.some((part, at) => part !== this.#drawn[at])) this.#drawAll();
    this.#drawn = drawn; // the slider moves one line only
    const { first, last } = this.#x;
    const here = model.step !== null && model.step >= first && model.step <= last;
    this.#now.replaceChildren(...(here ? [this.#upright("now", model.step)] : []));
  }

  #upright(kind, step) {
    return svg("line", { class: kind, x1: this.#x.to(step), x2: this.#x.to(step), y1: EDGE.top, y2: this.#model.height - EDGE.bottom });
  }

  #drawAll() {
    const { lines, own, levels, width, height, about, base, dark, several } = this.#model;
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#svg.setAttribute("width", width);
    this.#svg.setAttribute("height", height);
    const [low, high] = this.#span();
    const rows = ticks(low, high, Math.max(3, Math.floor(height / 55)));
    const labels = tickLabels(rows);
    this.#left = Math.max(LEFT, 30 + LETTER * longest(labels));
    this.#fine = (high - low) / 100;
    const steps = lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]).filter((step) => step !== undefined);
    const [first, last] = steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
    this.#x = {
      first,
      last,
      to: (step) => this.#left + (last > first ? (step - first) / (last - first) : 0.5) * (width - this.#left - EDGE.right),
    };
    const y = (value) => EDGE.top + (1 - (value - low) / (high - low)) * (height - EDGE.top - EDGE.bottom);
    const parts = [...this.#axes(rows, labels, y)];
    for (const level of levels) parts.push(...this.#level(level, low, high, y));
    if (own) parts.push(...this.#ownLimits(own, low, high, y));
    if (base !== null && base >= first && base <= last) parts.push(this.#upright("base-step", base));
    const names = []; // of what warnings compared with: the heights of those that are written
    const marked = lines.filter((line) => line.marks.some((mark) => mark.limit !== null));
    for (const line of lines) {
      const ink = headColour(line.colour, dark);
      parts.push(svg("path", { class: "line", d: this.#path(line, y), stroke: ink, "stroke-dasharray": DASHES[line.dash] }));
      if (line.steps.length === 1 && Number.isFinite(line.values[0])) {
        parts.push(svg("circle", { cx: this.#x.to(line.steps[0]), cy: y(line.values[0]), r: 3, fill: ink }));
      }
      if (marked.length <= MOST_LIMITS) parts.push(...line.marks.flatMap((mark) => [...this.#limit(line, mark, ink, y, marked.length <= 2 ? names : null)]));
    }
    this.#marks = [];
    const marks = lines.flatMap((line) => line.marks.map((mark) => this.#mark(line, mark, y)).filter(Boolean));
    const isLabel = (part) => /-name$/.test(part.getAttribute("class") ?? "");
    const written = parts.filter(isLabel); // over the lines, or they can't be read
    this.#svg.replaceChildren(...parts.filter((part) => !isLabel(part)), this.#now, ...marks, ...written, this.#cross);
    const warned = lines.reduce((count, line) => count + line.marks.length, 0);
    this.#svg.setAttribute(
      "aria-label",
      `${withUnit(about.title, about.unit && `(${about.unit})`)} of ${lines.map((line) => lineName(line, several)).join("; ")} ` +
        `over steps ${first} to ${last}, ${counted(warned, "warning")}. Left and right arrow move the step.`,
    );
  }

  /** Lower and upper end of the vertical axis: the lines, what warnings say of them, and other limits that are not far away. */
  #span() {
    let [low, high] = [Infinity, -Infinity];
    const take = (value) => {
      if (value === null || !Number.isFinite(value)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    };
    for (const line of this.#model.lines) {
      line.values.forEach(take);
      for (const mark of line.marks) [mark.figure, mark.baseline, mark.limit].forEach(take);
    }
    if (low > high) [low, high] = [0, 1];
    const size = high - low || Math.abs(high) || 1;
    const [least, most] = [low - size, high + size];
    const near = (limit) => limit > least && limit < most && take(limit);
    this.#model.levels.forEach(({ limit }) => near(limit));
    for (const line of this.#model.lines) for (const limit of line.limits) reachable(limit, this.#model.about.limits).forEach(near);
    const room = (high - low || size) * 0.06;
    return [low - room, high + room];
  }

  *#axes(rows, labels, y) {
    const { width, height, about } = this.#model;
    for (const [place, value] of rows.entries()) {
      yield svg("line", { class: "grid", x1: this.#left, x2: width - EDGE.right, y1: y(value), y2: y(value) });
      yield svg("text", { class: "tick value", x: this.#left - 7, y: y(value), "text-anchor": "end", "dominant-baseline": "middle" }, labels[place]);
    }
    const { first, last } = this.#x;
    for (const step of ticks(first, last, Math.max(2, Math.floor(width / 110)), 1)) {
      const x = this.#x.to(step);
      const text = String(step);
      const wide = x + (LETTER / 2) * text.length > width; // it would be cut off
      yield svg("text", { class: "tick step", x: wide ? width : x, y: height - EDGE.bottom + 15, "text-anchor": wide ? "end" : "middle" }, text);
    }
    yield svg("line", { class: "axis", x1: this.#left, x2: width - EDGE.right, y1: height - EDGE.bottom, y2: height - EDGE.bottom });
    yield svg("text", { class: "tick", x: (this.#left + width - EDGE.right) / 2, y: height - 4, "text-anchor": "middle" }, "step");
    const middle = (EDGE.top + height - EDGE.bottom) / 2;
    const unit = about.unit || "value";
    yield svg("text", { class: "tick", transform: `translate(12 ${middle}) rotate(-90)`, "text-anchor": "middle" }, unit);
  }

  *#level({ limit, title, severity: kind }, low, high, y) {
    const { width, height } = this.#model;
    const text = `${severity(kind).glyph} ${title}: ${number(limit, this.#fine)}`;
    if (limit >= low && limit <= high) {
      yield svg("line", { class: "level", x1: this.#left, x2: width - EDGE.right, y1: y(limit), y2: y(limit) });
      const above = y(limit) > EDGE.top + 14;
      yield svg("text", { class: "level-name", x: this.#left + 5, y: y(limit) + (above ? -4 : 12) }, text);
    } else {
      const at = limit > high ? EDGE.top + 8 : height - EDGE.bottom - 6;
      yield svg("text", { class: "level-name", x: this.#left + 5, y: at }, `${limit > high ? "↑" : "↓"} ${text}`);
    }
  }

  /** The limits that the head of one line has of its own. */
  *#ownLimits(line, low, high, y) {
    const { width, height, about, dark } = this.#model;
    const ink = headColour(line.colour, dark);
    const box = { x: this.#left, y: EDGE.top, width: width - this.#left - EDGE.right, height: height - EDGE.top - EDGE.bottom };
    yield svg("clipPath", { id: "own-limits" }, svg("rect", box));
    const rows = [box.y + 9, box.y + box.height - 4];
    const taken = [];
    for (const limit of line.limits) {
      const values = reachable(limit, about.limits);
      const last = values.findLast((value) => Number.isFinite(value));
      if (last === undefined) continue;
      const quiet = limit.severity === "watch" ? " quiet" : "";
      const seen = values.some((value) => value >= low && value <= high);
      if (seen) yield svg("path", { class: `own-limit${quiet}`, d: this.#path({ steps: limit.steps, values }, y), stroke: ink, "clip-path": "url(#own-limits)" });
      const away = last > high ? "↑ " : last < low ? "↓ " : "";
      const beside = values.filter((value, at) => Number.isFinite(value) && this.#x.to(limit.steps[at]) > width - WORDS);
      const at = Math.min(rows[1], Math.max(rows[0], y(Math.max(last, ...(away ? [] : beside))) - 4));
      const text = `${away}${severity(limit.severity).glyph} own limit, ${limit.title}: ${number(last, this.#fine)}`;
      yield svg("text", { class: `own-limit-name${quiet}`, x: width - EDGE.right - 4, y: freeRow(taken, at, rows), "text-anchor": "end", fill: ink }, text);
    }
  }

  #path(line, y) {
    let [d, gap] = ["", true];
    line.steps.forEach((step, at) => {
      const value = line.values[at];
      if (Number.isFinite(value)) d += `${gap ? "M" : "L"}${this.#x.to(step).toFixed(1)} ${y(value).toFixed(1)}`;
      gap = !Number.isFinite(value);
    });
    return d;
  }

  /** What a warning compared its head with: the baseline it had learned, and the limit that was passed. */
  *#limit(line, mark, ink, y, taken) {
    if (mark.limit === null) return;
    const own = this.#model.own === line && line.limits.some((known) => known.rule === mark.rule && Number.isFinite(limitAt(known, mark.step)));
    if (mark.baseline === null && this.#model.levels.some(({ limit }) => limit === mark.limit)) return; // drawn for all heads
    const [start, end] = [this.#x.to(line.steps[0]), this.#x.to(mark.step)];
    const row = (at) => freeRow(taken, at, [EDGE.top + 9, this.#model.height - EDGE.bottom - 4]);
    if (mark.baseline !== null) {
      yield svg("line", { class: "baseline", x1: start, x2: end, y1: y(mark.baseline), y2: y(mark.baseline), stroke: ink });
      if (taken) yield svg("text", { class: "limit-name", x: start + 4, y: row(y(mark.baseline) + 12), fill: ink }, `baseline ${number(mark.baseline, this.#fine)}`);
    }
    if (own) return; // drawn over all steps
    yield svg("line", { class: "limit", x1: start, x2: end, y1: y(mark.limit), y2: y(mark.limit), stroke: ink });
    if (taken) yield svg("text", { class: "limit-name", x: start + 4, y: row(y(mark.limit) - 4), fill: ink }, `limit ${number(mark.limit, this.#fine)}`);
  }

  #mark(line, mark, y) {
    const at = line.steps.findIndex((step) => step >= mark.step); // that of its step may not be kept
    const value = mark.figure ?? (at >= 0 ? line.values[at] : NaN);
    if (!Number.isFinite(value)) return null;
    const [x, top] = [this.#x.to(mark.step), y(value)];
    this.#marks.push({ x, y: top, step: mark.step, run: line.run });
    const shapes = {
      watch: () => svg("circle", { cx: x, cy: top, r: 5 }),
      warn: () => svg("path", { d: `M${x} ${top - 7}L${x + 6.5} ${top + 5}L${x - 6.5} ${top + 5}Z` }),
      critical: () => svg("rect", { x: x - 5, y: top - 5, width: 10, height: 10 }),
    };
    const shape = (shapes[mark.severity] ?? shapes.watch)();
    shape.setAttribute("class", `mark ${mark.severity}`);
    return shape;
  }

  /** The step under the pointer, `{step, run}`: that of a warning's mark, or the nearest sample's. */
  #stepAt(event) {
    const box = this.#svg.getBoundingClientRect();
    const { width } = this.#model;
    const away = ({ x, y }) => Math.hypot(event.clientX - box.left - x, event.clientY - box.top - y);
    const [marked] = this.#marks.filter((one) => away(one) < NEAR).sort((a, b) => away(a) - away(b));
    if (marked) return marked;
    const { first, last } = this.#x;
    const steps = [...new Set(this.#model.lines.flatMap((line) => [...line.steps]))].sort((a, b) => a - b);
    if (!steps.length) return { step: null };
    const wanted = first + ((event.clientX - box.left - this.#left) / (width - this.#left - EDGE.right)) * (last - first);
    const place = placeOf(steps, wanted);
    const next = Math.min(place + 1, steps.length - 1);
    return { step: steps[Math.abs(steps[next] - wanted) < Math.abs(steps[place] - wanted) ? next : place] };
  }

  #hover(event) {
    const { step } = this.#stepAt(event);
    if (step === null) return;
    const { lines, own, about, several, dark } = this.#model;
    this.#cross.replaceChildren(this.#upright("cross", step));
    const rows = lines.map((line) => {
      const at = line.steps.indexOf(step);
      const swatch = el("i", { class: "swatch", style: `background:${headColour(line.colour, dark)}` });
      const figure = at < 0 ? "no sample at this step" : withUnit(number(line.values[at], this.#fine), Number.isFinite(line.values[at]) ? about.unit : "");
      const marks = line.marks.filter((mark) => mark.step === step).map((mark) => `${severity(mark.severity).glyph} ${mark.title}`);
      const limits = line === own ? this.#limitsAt(line, step) : [];
      return el("span", {}, swatch, `${lineName(line, several)}: ${[figure, ...limits, ...marks].join(", ")}`);
    });
    tip.show(event.clientX, event.clientY, el("strong", {}, `Step ${step}`), ...rows);
  }

  #limitsAt(line, step) {
    return line.limits.flatMap((limit) => {
      const value = limitAt({ steps: limit.steps, values: reachable(limit, this.#model.about.limits) }, step);
      return Number.isFinite(value) ? [`${severity(limit.severity).glyph} own limit ${number(value, this.#fine)} (${limit.title})`] : [];
    });
  }

  #leave() {
    tip.hide();
    this.#cross.replaceChildren();
  }
}
