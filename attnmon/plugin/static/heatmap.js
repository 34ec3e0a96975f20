// Layers x heads of one run on a canvas, with a cursor for the keyboard.

import { colour, severity } from "./colours.js";
import { counted, el, number, signed, tip, withUnit } from "./dom.js";
import { alarmsNow, cell, columnsOf, exists, shown } from "./view.js";

const FONT = "11px Roboto, system-ui, sans-serif";
const LEFT = 44;
const BOTTOM = 34;
const TOP = 4;

/** The least of 1, 2, 4, 5, ... such that labels `room` pixels apart do not touch. */
function every(count, room, size) {
  return [1, 2, 4, 5, 8, 10, 20, 50, 100].find((step) => step * size >= room || step >= count) ?? 200;
}

/** One run's map. `onPick(head, add)` is called when a head is chosen, `say(text)` for screen readers. */
export class HeatMap {
  #title = el("figcaption", { class: "map-title" });
  #note = el("p", { class: "map-note" });
  #canvas = el("canvas", { class: "map-canvas", tabindex: "0", role: "application" });
  #model = null;
  #cursor = null; // [row, column], of the keyboard
  #grid = null; // where the cells are
  #onPick;
  #say;

  constructor({ onPick, say }) {
    this.#onPick = onPick;
    this.#say = say;
    this.node = el("figure", { class: "map" }, this.#title, this.#canvas, this.#note);
    this.#canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.#canvas.addEventListener("pointerleave", () => tip.hide());
    this.#canvas.addEventListener("click", (event) => {
      const at = this.#at(event);
      if (at) this.#pick(at, event.shiftKey || event.ctrlKey || event.metaKey);
    });
    this.#canvas.addEventListener("keydown", (event) => this.#key(event));
    this.#canvas.addEventListener("focus", () => {
      this.#cursor ??= [0, 0];
      this.#paint();
    });
    this.#canvas.addEventListener("blur", () => {
      tip.hide();
      this.#paint();
    });
  }

  focus() {
    this.#canvas.focus({ preventScroll: true });
  }

  /** @param {object} model - `{run, view, range, unit, several, heads, colours, width, dark}`. */
  draw(model) {
    const { run } = model;
    this.#canvas.classList.toggle("stale", Boolean(run.waiting));
    this.#canvas.hidden = Boolean(run.none); // a map of nothing but "not measured" says less
    if (run.waiting && this.#model?.run.frame && this.#model.run.name === run.name) {
      this.#note.textContent = `loading step ${run.step} ...`; // the old map stays, faint and without answers
      return;
    }
    this.#model = model;
    const heading = model.several ? run.name : "";
    this.#title.textContent = heading;
    this.#title.hidden = !heading;
    const at = run.step === undefined ? "" : `sample of step ${run.step}`;
    const since = model.view === "change" && run.base !== undefined ? `, change since step ${run.base}` : "";
    const early = run.steps.length && run.step === undefined ? "no sample yet at this step" : "";
    this.#note.textContent = run.error ?? (run.none || (run.frame && !run.waiting ? at + since : early || "loading ..."));
    this.#note.classList.toggle("error", Boolean(run.error));
    const columns = columnsOf(run);
    this.#canvas.setAttribute(
      "aria-label",
      `Map of ${counted(run.layers.length, "layer")} by ${counted(columns, "head")}, ${run.name}, ${at}${since}. ` +
        "Arrow keys move, Enter shows a head's line, Shift and Enter add it.",
    );
    this.#layOut(columns);
    this.#paint();
  }

  #layOut(columns) {
    const { run, width, several } = this.#model;
    const rows = Math.max(1, run.layers.length);
    const wide = Math.min(64, Math.max(6, Math.floor((width - LEFT - 6) / columns)));
    const tall = Math.min(36, Math.max(7, Math.floor((several ? 300 : 400) / rows)));
    this.#grid = { rows, columns, wide, tall };
    const size = [LEFT + columns * wide + 6, TOP + rows * tall + BOTTOM];
    const scale = window.devicePixelRatio || 1;
    this.#canvas.style.width = `${size[0]}px`;
    this.#canvas.style.height = `${size[1]}px`;
    this.#canvas.width = Math.round(size[0] * scale);
    this.#canvas.height = Math.round(size[1] * scale);
  }

  #paint() {
    if (!this.#model) return;
    const { run, view, range, heads, colours } = this.#model;
    const { rows, columns, wide, tall } = this.#grid;
    const style = getComputedStyle(this.#canvas);
    const ink = (name) => style.getPropertyValue(name).trim();
    const context = this.#canvas.getContext("2d");
    const scale = window.devicePixelRatio || 1;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    const gap = Math.min(wide, tall) > 9 ? 1 : 0;
    const warned = new Map(); // heads that a warning of this very sample names
    for (const warning of run.warnings.filter((known) => known.step === run.step)) {
      for (const [layer, names] of Object.entries(warning.heads)) {
        for (const head of names) warned.set(`${layer}.${head}`, warning);
      }
    }
    const alarmed = new Map(); // heads under alarm; true: under one that is more than a hint
    for (const { severity: kind, heads: named } of alarmsNow(run)) {
      for (const [layer, names] of Object.entries(named)) {
        for (const head of names) alarmed.set(`${layer}.${head}`, kind !== "watch" || alarmed.get(`${layer}.${head}`) === true);
      }
    }
    run.layers.forEach((layer, row) => {
      for (let column = 0; column < columns; column++) {
        const [x, y] = [LEFT + column * wide, TOP + row * tall];
        const value = shown(run, view, layer.number, column);
        if (Number.isFinite(value)) {
          context.fillStyle = colour(view, value, range);
          context.fillRect(x, y, wide - gap, tall - gap);
        } else if (exists(run, layer, column)) {
          this.#unmeasured(context, x, y, wide - gap, tall - gap, ink, !Number.isNaN(value));
        } else {
          this.#absent(context, x, y, wide - gap, tall - gap, ink);
        }
        const loud = alarmed.get(`${layer.number}.${column}`);
        if (loud !== undefined) this.#dot(context, x, y + tall - gap, Math.min(4, tall * 0.28, wide * 0.28), loud);
        if (warned.has(`${layer.number}.${column}`)) this.#corner(context, x + wide - gap, y, Math.min(9, tall * 0.6, wide * 0.6));
      }
    });
    context.font = FONT;
    context.fillStyle = ink("--muted");
    context.textBaseline = "middle";
    context.textAlign = "right";
    const down = every(rows, 13, tall);
    run.layers.forEach((layer, row) => {
      if (row % down === 0) context.fillText(String(layer.number), LEFT - 6, TOP + (row + 0.5) * tall);
    });
    context.textAlign = "center";
    const across = every(columns, 20, wide);
    for (let column = 0; column < columns; column += across) {
      context.fillText(String(column), LEFT + (column + 0.5) * wide, TOP + rows * tall + 10);
    }
    context.fillText("head", LEFT + (columns * wide) / 2, TOP + rows * tall + 25);
    context.save();
    context.translate(9, TOP + (rows * tall) / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("layer", 0, 0);
    context.restore();
    heads.forEach(({ layer, head }, place) => {
      const row = run.layers.findIndex((known) => known.number === layer);
      if (row >= 0 && head < columns) this.#frameCell(context, row, head, colours[place], ink("--panel"), Math.min(2.5, wide / 5));
    });
    if (this.#cursor && document.activeElement === this.#canvas) {
      this.#frameCell(context, Math.min(this.#cursor[0], rows - 1), Math.min(this.#cursor[1], columns - 1), ink("--text"), ink("--panel"), 1.5);
    }
  }

  #unmeasured(context, x, y, width, height, ink, infinite) {
    context.fillStyle = ink("--unmeasured");
    context.fillRect(x, y, width, height);
    if (infinite) {
      context.fillStyle = "#1f2328";
      context.font = `bold ${Math.min(18, width, height)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText("∞", x + width / 2, y + height / 2);
      return;
    }
    context.fillStyle = ink("--panel");
    const dot = Math.max(1, Math.min(width, height) / 8);
    context.beginPath();
    context.arc(x + width / 2, y + height / 2, dot, 0, 2 * Math.PI);
    context.fill();
  }

  #absent(context, x, y, width, height, ink) {
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = ink("--hatch");
    context.lineWidth = 1;
    context.beginPath();
    for (let offset = -height; offset < width; offset += 5) {
      context.moveTo(x + offset, y + height);
      context.lineTo(x + offset + height, y);
    }
    context.stroke();
    context.restore();
  }

  #corner(context, right, top, size) {
    context.beginPath();
    context.moveTo(right - size, top);
    context.lineTo(right, top);
    context.lineTo(right, top + size);
    context.closePath();
    context.fillStyle = "#e5352b";
    context.fill();
    context.strokeStyle = "#ffffff";
    context.lineWidth = 1;
    context.stroke();
  }

  /** In the lower left corner: the upper right one is that of warnings. */
  #dot(context, left, bottom, radius, loud) {
    context.beginPath();
    context.arc(left + radius + 1.5, bottom - radius - 1.5, radius, 0, 2 * Math.PI);
    context.fillStyle = loud ? "#e5352b" : "#ffffff";
    context.fill();
    context.strokeStyle = loud ? "#ffffff" : "#1f2328";
    context.lineWidth = 1;
    context.stroke();
  }

  #frameCell(context, row, column, ink, halo, width) {
    const { wide, tall } = this.#grid;
    const box = [LEFT + column * wide - 1, TOP + row * tall - 1, wide + 1, tall + 1];
    context.strokeStyle = halo;
    context.lineWidth = width + 2.5;
    context.strokeRect(...box);
    context.strokeStyle = ink;
    context.lineWidth = width;
    context.strokeRect(...box);
  }

  #at(event) {
    const box = this.#canvas.getBoundingClientRect();
    const { rows, columns, wide, tall } = this.#grid;
    const column = Math.floor((event.clientX - box.left - LEFT) / wide);
    const row = Math.floor((event.clientY - box.top - TOP) / tall);
    return row >= 0 && row < rows && column >= 0 && column < columns ? [row, column] : null;
  }

  #hover(event) {
    const at = this.#at(event);
    this.#canvas.style.cursor = at ? "pointer" : "default";
    if (!at || !this.#model.run.layers[at[0]]) tip.hide();
    else tip.show(event.clientX, event.clientY, ...this.#words(at));
  }

  #pick([row, column], add) {
    const layer = this.#model.run.layers[row];
    if (!layer || !exists(this.#model.run, layer, column)) return;
    this.#cursor = [row, column];
    this.#onPick({ layer: layer.number, head: column }, add);
  }

  #key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e6], End: [0, 1e6] };
    if (event.key in moves) {
      const { rows, columns } = this.#grid;
      const [down, right] = moves[event.key];
      const [row, column] = this.#cursor ?? [0, 0];
      this.#cursor = [Math.min(rows - 1, Math.max(0, row + down)), Math.min(columns - 1, Math.max(0, column + right))];
      this.#paint();
      const box = this.#canvas.getBoundingClientRect();
      const { wide, tall } = this.#grid;
      const words = this.#words(this.#cursor);
      tip.show(box.left + LEFT + (this.#cursor[1] + 0.5) * wide, box.top + TOP + (this.#cursor[0] + 0.5) * tall, ...words);
      this.#say(words.map((line) => line.textContent).join(". "));
    } else if ((event.key === "Enter" || event.key === " ") && this.#cursor) {
      this.#pick(this.#cursor, event.shiftKey);
    } else if (event.key === "Escape") {
      tip.hide();
    } else {
      return;
    }
    event.preventDefault();
  }

  /** A cell in words, for the tooltip and for screen readers. */
  #words([row, column]) {
    const { run, view, unit } = this.#model;
    const layer = run.layers[row];
    if (!layer) return [];
    const value = cell(run.frame, layer.number, column);
    const [low, high] = run.summary?.extent ?? [0, 0];
    const fine = (high - low) / 100;
    const words = [el("strong", {}, `Layer ${layer.number}, head ${column}`)];
    if (layer.path) words.push(el("span", { class: "path" }, layer.path));
    if (!run.frame) return words;
    if (!exists(run, layer, column)) return [...words, el("span", {}, "no such head in this layer")];
    words.push(el("span", { class: "figure" }, withUnit(number(value, fine), Number.isFinite(value) && unit)));
    if (view === "change") {
      const base = cell(run.baseFrame, layer.number, column);
      const change = value - base;
      words.push(el("span", {}, `${Number.isFinite(change) ? signed(change) : "change unknown"} since step ${run.base} (${number(base, fine)})`));
    }
    for (const warning of run.warnings.filter((known) => known.step === run.step)) {
      if (warning.heads[layer.number]?.includes(column)) {
        const mark = severity(warning.severity);
        words.push(el("span", { class: `mark ${warning.severity}` }, `${mark.glyph} ${mark.word}: ${warning.title}`));
      }
    }
    for (const alarm of alarmsNow(run)) {
      if (!alarm.heads[layer.number]?.includes(column)) continue;
      words.push(el("span", { class: `mark ${alarm.severity}` }, `${severity(alarm.severity).glyph} under alarm: ${alarm.title} since step ${alarm.since}`));
    }
    return words;
  }
}
