// Lines of heads over steps, with the limits they are judged by and the warnings they raised.

import { DASHES, headColour, severity } from "./colours.js";
import { counted, el, longest, number, svg, tickLabels, tip, withUnit } from "./dom.js";
import { placeOf } from "./view.js";

const EDGE = { right: 14, top: 14, bottom: 34 };
const LEFT = 58; // at least; more where the labels need it
const LETTER = 6.3; // width of a tick's character, roughly
const MOST_LIMITS = 8; // lines with limits of their own drawn in; more would hide them

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

/** The chart. `onStep(step)` is called when a step is chosen in it, `onMove(-1 | 1)` by the arrow keys. */
export class Chart {
  #svg = svg("svg", { class: "chart", tabindex: "0", role: "application" });
  #now = svg("g");
  #cross = svg("g");
  #model = null;
  #drawn = []; // what the picture was made of
  #x = null;
  #left = LEFT;
  #fine = 0; // what differs by less needs not be told apart

  constructor({ onStep, onMove }) {
    this.node = this.#svg;
    this.#svg.addEventListener("pointermove", (event) => this.#hover(event));
    this.#svg.addEventListener("pointerleave", () => this.#leave());
    this.#svg.addEventListener("click", (event) => {
      const step = this.#stepAt(event);
      if (step !== null) onStep(step);
    });
    this.#svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      onMove(move);
      event.preventDefault();
    });
  }

  /** @param {object} model - `{lines, levels, step, base, about, several, width, height, dark}`. */
  draw(model) {
    this.#model = model;
    const { width, height, lines } = model;
    const drawn = [width, height, model.dark, model.base, model.several, model.about.title, JSON.stringify(model.levels)].concat(
      lines.flatMap((line) => [line.values, line.marks, line.colour, line.dash, line.run]),
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
    const { lines, levels, width, height, about, base, dark, several } = this.#model;
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
    if (base !== null && base >= first && base <= last) parts.push(this.#upright("base-step", base));
    const marked = lines.filter((line) => line.marks.some((mark) => mark.limit !== null));
    for (const line of lines) {
      const ink = headColour(line.colour, dark);
      parts.push(svg("path", { class: "line", d: this.#path(line, y), stroke: ink, "stroke-dasharray": DASHES[line.dash] }));
      if (line.steps.length === 1 && Number.isFinite(line.values[0])) {
        parts.push(svg("circle", { cx: this.#x.to(line.steps[0]), cy: y(line.values[0]), r: 3, fill: ink }));
      }
      if (marked.length <= MOST_LIMITS) parts.push(...line.marks.flatMap((mark) => [...this.#limit(line, mark, ink, y, marked.length)]));
    }
    const marks = lines.flatMap((line) => line.marks.map((mark) => this.#mark(line, mark, y)).filter(Boolean));
    const isLabel = (part) => /-name$/.test(part.getAttribute("class") ?? "");
    const names = parts.filter(isLabel); // over the lines, or they can't be read
    this.#svg.replaceChildren(...parts.filter((part) => !isLabel(part)), this.#now, ...marks, ...names, this.#cross);
    const warned = lines.reduce((count, line) => count + line.marks.length, 0);
    this.#svg.setAttribute(
      "aria-label",
      `${withUnit(about.title, about.unit && `(${about.unit})`)} of ${lines.map((line) => lineName(line, several)).join("; ")} ` +
        `over steps ${first} to ${last}, ${counted(warned, "warning")}. Left and right arrow move the step.`,
    );
  }

  /** Lower and upper end of the vertical axis: the lines, their limits, and fixed levels that are not far away. */
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
    for (const { limit } of this.#model.levels) if (limit > low - size && limit < high + size) take(limit);
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
  *#limit(line, mark, ink, y, marked) {
    if (mark.limit === null) return;
    if (mark.baseline === null && this.#model.levels.some(({ limit }) => limit === mark.limit)) return; // drawn for all heads
    const [start, end] = [this.#x.to(line.steps[0]), this.#x.to(mark.step)];
    const words = marked <= 2;
    if (mark.baseline !== null) {
      yield svg("line", { class: "baseline", x1: start, x2: end, y1: y(mark.baseline), y2: y(mark.baseline), stroke: ink });
      if (words) yield svg("text", { class: "limit-name", x: start + 4, y: y(mark.baseline) + 12, fill: ink }, `baseline ${number(mark.baseline, this.#fine)}`);
    }
    yield svg("line", { class: "limit", x1: start, x2: end, y1: y(mark.limit), y2: y(mark.limit), stroke: ink });
    if (words) yield svg("text", { class: "limit-name", x: start + 4, y: y(mark.limit) - 4, fill: ink }, `limit ${number(mark.limit, this.#fine)}`);
  }

  #mark(line, mark, y) {
    const at = line.steps.indexOf(mark.step);
    const value = mark.figure ?? (at >= 0 ? line.values[at] : NaN);
    if (!Number.isFinite(value)) return null;
    const [x, top] = [this.#x.to(mark.step), y(value)];
    const shapes = {
      watch: () => svg("circle", { cx: x, cy: top, r: 5 }),
      warn: () => svg("path", { d: `M${x} ${top - 7}L${x + 6.5} ${top + 5}L${x - 6.5} ${top + 5}Z` }),
      critical: () => svg("rect", { x: x - 5, y: top - 5, width: 10, height: 10 }),
    };
    const shape = (shapes[mark.severity] ?? shapes.watch)();
    shape.setAttribute("class", `mark ${mark.severity}`);
    return shape;
  }

  #stepAt(event) {
    const box = this.#svg.getBoundingClientRect();
    const { width } = this.#model;
    const { first, last } = this.#x;
    const steps = [...new Set(this.#model.lines.flatMap((line) => [...line.steps]))].sort((a, b) => a - b);
    if (!steps.length) return null;
    const wanted = first + ((event.clientX - box.left - this.#left) / (width - this.#left - EDGE.right)) * (last - first);
    const place = placeOf(steps, wanted);
    const next = Math.min(place + 1, steps.length - 1);
    return steps[Math.abs(steps[next] - wanted) < Math.abs(steps[place] - wanted) ? next : place];
  }

  #hover(event) {
    const step = this.#stepAt(event);
    if (step === null) return;
    const { lines, about, several, dark } = this.#model;
    this.#cross.replaceChildren(this.#upright("cross", step));
    const rows = lines.map((line) => {
      const at = line.steps.indexOf(step);
      const swatch = el("i", { class: "swatch", style: `background:${headColour(line.colour, dark)}` });
      const figure = at < 0 ? "no sample at this step" : withUnit(number(line.values[at], this.#fine), Number.isFinite(line.values[at]) ? about.unit : "");
      const marks = line.marks.filter((mark) => mark.step === step).map((mark) => `${severity(mark.severity).glyph} ${mark.title}`);
      return el("span", {}, swatch, `${lineName(line, several)}: ${[figure, ...marks].join(", ")}`);
    });
    tip.show(event.clientX, event.clientY, el("strong", {}, `Step ${step}`), ...rows);
  }

  #leave() {
    tip.hide();
    this.#cross.replaceChildren();
  }
}
