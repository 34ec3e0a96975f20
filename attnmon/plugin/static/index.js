// The Attention tab. TensorBoard imports this module into a frame of its own and calls render().

import { Chart, lineName, reachable } from "./chart.js";
import { DASHES, headColour } from "./colours.js";
import { ColourBar, Controls, Stepper } from "./controls.js";
import { Data } from "./data.js";
import { counted, el, refill, svg, tip } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { askedView, followAddress, followReloads, followTheme, link, remember } from "./host.js";
import { MOST_HEADS, decode, encode, fitted, initial, runsOf, sameHead, unmet } from "./state.js";
import { derive, grouped, measured, movedFrom, placeSince, someHas } from "./view.js";
import { Warnings } from "./warnings.js";

const LIGHTNING = `import lightning.pytorch as pl
from attnmon import AttentionMonitor
from lightning.pytorch.loggers import TensorBoardLogger

trainer = pl.Trainer(
    logger=TensorBoardLogger("runs"),
    callbacks=[AttentionMonitor(every_n_steps=50)],
)`;

const TRAINER = `from attnmon.integrations.transformers import AttentionMonitorCallback
from transformers import Trainer, TrainingArguments

trainer = Trainer(
    model,
    TrainingArguments("runs", report_to="tensorboard"),
    train_dataset=dataset,
    callbacks=[AttentionMonitorCallback(every_n_steps=50)],
)`;

const PLAIN = `from attnmon import watch
from torch.utils.tensorboard import SummaryWriter

with watch(model, writer=SummaryWriter("runs/mine"), every_n_steps=50) as monitor:
    for batch in batches:
        ...  # your training step
        monitor.step()`;

/** Called by TensorBoard. */
export async function render() {
  document.documentElement.lang = "en";
  document.title = "Attention";
  const style = el("link", { rel: "stylesheet", href: new URL("style.css", import.meta.url).href });
  const styled = new Promise((resolve) => {
    for (const event of ["load", "error"]) style.addEventListener(event, resolve);
  });
  document.head.append(style);
  await styled; // the map's size is measured
  new Tab(document.body).start();
}

function sameLine(one, other) {
  return Boolean(other) && sameHead(one, other) && one.run === other.run;
}

/** What the limits in the chart are, and where those of the other lines are to be had. */
function limitsWords(own, lines, { limits: [low, high], title }, several) {
  const beyond = own.limits.filter((limit) => measured(limit.values) && !measured(reachable(limit, [low, high]))).map((limit) => limit.title);
  const words = [`Thin dashed: the limits that layer ${own.layer}, head ${own.head}${several ? ` in ${own.run}` : ""} has of its own, learned from its figures; faint where they are only worth watching.`];
  if (lines.length > 1) words.push("Point at another name above to see those of its line.");
  if (beyond.length) words.push(`Not drawn: ${beyond.join(", ")}, whose limit ${title} can't reach here.`);
  return words.join(" ");
}

class Tab {
  #asked = askedView(); // null once its view is shown
  #state = decode(this.#asked.text);
  #unmet = []; // of the link, until something is chosen
  #moved = ""; // where the sample of a warning is not kept: what is shown in its place, likewise
  #dark = false;
  #waiting = false;
  #maps = [];
  #view = null;
  #pointed = null; // the line whose name in the legend is pointed at, `{layer, head, run}`

  constructor(body) {
    this.data = new Data(new URL("../", import.meta.url), () => this.#redraw());
    const set = (change) => this.#set(change);
    this.reloadButton = el("button", { type: "button", title: "Look for new data", on: { click: () => this.data.reload() } }, "Reload");
    this.linkButton = el("button", { type: "button", title: "A link that opens this view", on: { click: () => this.#copyLink() } }, "Copy link");
    this.linkText = el("input", { class: "link", readonly: true, hidden: true, "aria-label": "Link to this view" });
    this.linkNotes = el("div", { class: "notes", role: "status" });
    this.live = el("div", { class: "for-readers", "aria-live": "polite" });
    this.controls = new Controls({ set, reload: this.reloadButton, copyLink: this.linkButton });
    this.stepNote = el("p", { class: "step-note", role: "status" });
    this.stepper = new Stepper({ set });
    this.stepper.node.append(this.stepNote);
    this.bar = new ColourBar();
    this.chart = new Chart({ onStep: (step, run) => this.#goTo(run, step), onMove: (by) => this.stepper.move(by) });
    this.warnings = new Warnings({ onFilter: set, onShow: (warning) => this.#show(warning) });
    this.title = el("h2", { id: "map-title" });
    this.meaning = el("dl", { class: "meaning" });
    this.mapGrid = el("div", { class: "maps" });
    this.runNotes = el("div", { class: "run-notes" });
    this.legend = el("ul", { class: "legend", "aria-label": "Heads in the chart" });
    this.legendHint = el("p", { class: "hint", hidden: true });
    this.limitsHint = el("p", { class: "hint", hidden: true });
    this.clear = el("button", { type: "button", class: "plain", on: { click: () => this.#keepOnly([]) } }, "Clear");
    this.chartBox = el("div", { class: "chart-box" });
    this.noLines = el("p", { class: "hint chart-hint no-lines", hidden: true });
    this.chartHint = el("p", { class: "hint chart-hint" }, "Choose a head in the map to see its line over the steps, with the limits it is judged by. Shift and a click, or Shift and Enter, adds another.");
    this.problems = el("details", { class: "problems", hidden: true });
    this.failure = el("p", { class: "failure", role: "alert", hidden: true });
    this.empty = this.#emptyPage();
    this.main = el(
      "main",
      { hidden: true },
      this.controls.node,
      this.linkText,
      this.linkNotes,
      this.stepper.node,
      this.problems,
      el(
        "div",
        { class: "columns" },
        el("section", { class: "panel map-panel", "aria-labelledby": "map-title" }, el("header", {}, this.title), this.meaning, this.bar.node, this.mapGrid, this.runNotes),
        el(
          "div",
          { class: "side" },
          el(
            "section",
            { class: "panel", "aria-labelledby": "chart-title" },
            el("header", {}, el("h2", { id: "chart-title" }, "Heads over steps"), this.clear),
            this.legend,
            this.legendHint,
            this.chartHint,
            this.noLines,
            this.chartBox,
            this.limitsHint,
          ),
          this.warnings.node,
        ),
      ),
    );
    this.chartBox.append(this.chart.node);
    body.replaceChildren(el("h1", { class: "for-readers" }, "Attention heads"), this.failure, this.empty, this.main, this.live, tip.node);
    new ResizeObserver(() => this.#redraw()).observe(body);
  }

  start() {
    followTheme((dark) => {
      this.#dark = dark;
      document.documentElement.dataset.theme = dark ? "dark" : "light";
      this.#redraw();
    });
    followAddress((text) => {
      if (text === encode(this.#state)) return;
      this.#asked = { text, linked: true };
      this.#moved = "";
      this.#state = decode(text);
      this.#redraw();
    });
    followReloads(() => this.data.reload());
    this.data.reload();
  }

  #set(change) {
    this.#state = { ...this.#state, ...change };
    this.#unmet = [];
    this.#moved = "";
    this.#redraw();
  }

  #redraw() {
    if (this.#waiting) return;
    this.#waiting = true;
    requestAnimationFrame(() => {
      this.#waiting = false;
      this.#draw();
    });
  }

  #draw() {
    this.failure.hidden = !this.data.error;
    this.failure.textContent = this.data.error ?? "";
    const { catalogue } = this.data;
    if (!catalogue) return;
    const known = runsOf(catalogue);
    this.empty.hidden = known.length > 0;
    this.main.hidden = !known.length;
    if (!known.length) {
      this.#drawEmpty(catalogue.problems);
      return;
    }
    if (this.#asked?.linked) this.#unmet = unmet(this.#asked.text, catalogue);
    else if (this.#asked && !this.#state.runs.some((run) => known.includes(run))) this.#state = initial(); // of another directory
    this.#asked = null;
    let state = (this.#state = fitted(this.#state, catalogue));
    let view = derive(state, this.data);
    const heads = state.heads.filter((head) => someHas(view.runs, head));
    if (heads.length < state.heads.length) {
      state = this.#state = { ...state, heads }; // a link may name any
      view = derive(state, this.data);
    }
    this.#view = view;
    refill(this.linkNotes, JSON.stringify(this.#unmet), () => this.#unmet.map((text) => el("p", {}, text)));
    const moved = view.moved || this.#moved;
    if (this.stepNote.textContent !== moved) this.stepNote.textContent = moved;
    remember(encode(state));
    const several = state.runs.length > 1;
    this.controls.draw({ state, view, catalogue });
    this.stepper.draw({ state, view });
    this.bar.draw({ state, view });
    this.#drawProblems(view.problems, this.main);
    this.#drawAbout(view);
    this.#drawMaps(state, view, several);
    this.#drawLines(state, view, several);
    this.warnings.draw({ warnings: view.warnings, known: view.known, state, several });
  }

  #drawAbout({ about }) {
    this.title.textContent = about.unit ? `${about.title} (${about.unit})` : about.title;
    const rows = [
      ["A rise means", about.rise],
      ["A fall means", about.fall],
    ].filter(([, text]) => text);
    refill(this.meaning, JSON.stringify(rows), () => rows.map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, text))));
  }

  #drawMaps(state, view, several) {
    while (this.#maps.length < view.runs.length) {
      this.#maps.push(new HeatMap({ onPick: (head, add) => this.#pick(head, add), say: (text) => (this.live.textContent = text) }));
    }
    this.#maps.length = view.runs.length;
    refill(this.mapGrid, String(view.runs.length), () => this.#maps.map(({ node }) => node));
    this.mapGrid.classList.toggle("several", several);
    const room = this.mapGrid.clientWidth;
    const width = several && room > 616 ? (room - 16) / 2 : room; // as the style sheet divides it
    const colours = state.heads.map((_, place) => headColour(place, this.#dark));
    view.runs.forEach((run, place) =>
      this.#maps[place].draw({
        run,
        view: state.view,
        range: view.range,
        unit: view.about.unit,
        several,
        heads: state.heads,
        colours,
        width,
        dark: this.#dark,
      }),
    );
    const notes = view.runs.map(({ name, record, restarts, summary }) => ({
      name,
      record,
      restarts: [...new Set([...restarts, ...(summary?.restarts ?? [])])].sort((a, b) => a - b),
      kept: summary?.kept ?? null,
    }));
    refill(this.runNotes, JSON.stringify([notes, several]), () => notes.map((note) => this.#runNote(note, several)));
  }

  #runNote({ name, record, restarts, kept }, several) {
    const of = several ? `${name}: ` : "";
    const where = restarts.slice(0, 5).join(", ") + (restarts.length > 5 ? ", ..." : "");
    return el(
      "div",
      {},
      ...(record ? this.#recordNote(of, record) : []),
      restarts.length > 0 && el("p", { class: "hint" }, `${of}The run went back to an earlier step (resumed at step ${where}). What it had written beyond is left out.`),
      kept !== null &&
        el("p", { class: "hint" }, `${of}TensorBoard keeps ${counted(kept, "sample")}, spread over the run, and may have left others out; --samples_per_plugin attnmon=0 keeps all.`),
    );
  }

  #recordNote(of, record) {
    const source = { train: "training batches", probe: "a fixed probe batch", validation: "validation batches" }[record.source] ?? record.source;
    const every = record.every_n_steps === null ? "" : record.every_n_steps > 1 ? ` every ${record.every_n_steps} steps` : " every step";
    const left = Object.entries(record.not_measured);
    return [
      el("p", { class: "hint" }, `${of}${counted(record.layers.length, "layer")}, sampled${every} on ${source}.`),
      left.length > 0 &&
        el("details", {}, el("summary", {}, `${counted(left.length, "attention module")} ${left.length === 1 ? "is" : "are"} not measured`), el("ul", {}, ...left.map(([path, reason]) => el("li", {}, el("code", {}, path), `: ${reason}`)))),
    ];
  }

  #drawLines(state, view, several) {
    const { lines } = view;
    this.chartHint.hidden = state.heads.length > 0;
    this.clear.hidden = this.legend.hidden = state.heads.length === 0;
    const some = lines.some(({ values }) => measured(values));
    this.chartBox.hidden = !some;
    this.noLines.hidden = some || lines.length === 0;
    const none = view.runs.every((run) => run.none || !run.tag);
    this.noLines.textContent = none ? view.none : `No figures of ${state.heads.length === 1 ? "this head" : "these heads"} at any step.`;
    const own = some ? this.#lineWithLimits(lines) : null;
    this.#drawLegend(view, several, lines.length > 1 ? own : null);
    this.limitsHint.hidden = !own;
    if (own) this.limitsHint.textContent = limitsWords(own, lines, view.about, several);
    if (!some) return;
    const bases = view.runs.map((run) => run.base).filter((base) => base !== undefined);
    this.chart.draw({
      lines,
      own,
      levels: view.levels,
      step: view.step,
      base: state.view === "change" && bases.length ? bases[0] : null,
      about: view.about,
      several,
      width: Math.max(260, this.chartBox.clientWidth),
      height: 280,
      dark: this.#dark,
    });
  }

  /** The line whose own limits are drawn: the one pointed at in the legend, else the head chosen last. */
  #lineWithLimits(lines) {
    const pointed = lines.find((line) => sameLine(line, this.#pointed));
    const having = lines.filter(({ limits }) => limits.some(({ values }) => measured(values)));
    if (pointed) return having.includes(pointed) ? pointed : null;
    const last = Math.max(...having.map(({ colour }) => colour));
    return having.find(({ colour }) => colour === last) ?? null;
  }

  #drawLegend(view, several, own) {
    const paths = new Map(view.runs.flatMap((run) => run.layers.map((layer) => [`${run.name} ${layer.number}`, layer.path])));
    const items = view.legend.map((entry, at) => ({
      ...entry,
      path: paths.get(`${entry.run} ${entry.layer}`) ?? "",
      first: entry.colour !== view.legend[at - 1]?.colour,
    }));
    if (!items.some((item) => sameLine(item, this.#pointed))) this.#pointed = null;
    refill(this.legend, JSON.stringify([items, several, this.#dark]), () => items.map((item) => this.#legendItem(item, several)));
    [...this.legend.children].forEach((node, at) => node.classList.toggle("own", Boolean(own) && sameLine(items[at], own)));
    const more = this.legend.scrollHeight > this.legend.clientHeight + 1;
    this.legendHint.hidden = !more;
    this.legendHint.textContent = `${items.length} lines: scroll their names to see all.`;
    if (more) this.legend.setAttribute("tabindex", "0");
    else this.legend.removeAttribute("tabindex");
  }

  #legendItem({ layer, head, run, colour, dash, path, first, none }, several) {
    const name = lineName({ layer, head, run }, several) + (none ? ": no figures" : "");
    const sample = svg(
      "svg",
      { width: 26, height: 10, "aria-hidden": "true" },
      svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: headColour(colour, this.#dark), "stroke-width": 2.5, "stroke-dasharray": DASHES[dash] }),
    );
    const leave = () => this.#keepOnly(this.#state.heads.filter((known) => !sameHead(known, { layer, head })));
    const button = el("button", { type: "button", class: "plain", "aria-label": `Remove layer ${layer}, head ${head}`, on: { click: leave } }, "×");
    const point = (line) => () => {
      this.#pointed = line;
      this.#redraw();
    };
    const line = { layer, head, run };
    const on = { pointerenter: point(line), focusin: point(line), pointerleave: point(null), focusout: point(null) };
    return el("li", { title: path || null, on }, sample, el("span", {}, name), first && button);
  }

  #keepOnly(heads) {
    this.#set({ heads });
    if (!heads.length) this.#maps[0]?.focus(); // what was pressed goes, and the focus with it
  }

  #pick(head, add) {
    const { heads } = this.#state;
    const known = heads.some((other) => sameHead(other, head));
    if (known && (add || heads.length === 1)) this.#set({ heads: heads.filter((other) => !sameHead(other, head)) });
    else if (add) this.#set({ heads: [...heads, head].slice(-MOST_HEADS) });
    else this.#set({ heads: [head] });
  }

  /** Shows a step of a run; where its sample is not kept, the one in which a warning of that step is seen. */
  #goTo(name, asked, change = {}) {
    const run = this.#view.runs.find((known) => known.name === name);
    const step = run?.steps[placeSince(run.steps, asked)] ?? asked;
    this.#set({ ...change, step });
    if (step !== asked) this.#moved = movedFrom(asked, step, [run]);
  }

  #show(warning) {
    const heads = Object.entries(warning.heads).flatMap(([layer, names]) => names.map((head) => ({ layer: Number(layer), head })));
    const known = new Set(this.#view.quantities.map(({ quantity }) => quantity));
    const quantity = warning.evidence.find((name) => known.has(name)) ?? this.#state.quantity;
    this.#goTo(warning.run, warning.step, { heads: heads.slice(0, MOST_HEADS), quantity });
    this.live.textContent = `Step ${warning.step}, ${warning.title}`;
  }

  /** Without anything to show: how to write some, or why what there is can't be shown. */
  #drawEmpty(problems) {
    const texts = [...new Set(problems.map(({ text }) => text))];
    this.emptyTitle.textContent = texts.length ? "Attention data that can't be read" : "No attention data yet";
    this.emptyWhy.hidden = !texts.length;
    this.emptyWhy.textContent = `There is data of attnmon in this log directory, but none that can be shown: ${texts[0]}${texts.length > 1 ? "; and more, see below" : ""}.`;
    this.emptyHow.hidden = texts.length > 0;
    this.#drawProblems(grouped(problems), this.empty);
  }

  #drawProblems(texts, before) {
    this.problems.hidden = texts.length === 0;
    if (this.problems.parentNode !== before) {
      before.insertBefore(this.problems, before === this.empty ? this.emptyHow : before.querySelector(".columns"));
      this.problems.open = before === this.empty; // there it is all there is to say
    }
    refill(this.problems, JSON.stringify(texts), () => [
      el("summary", {}, `Problems with the data (${texts.length})`),
      el("ul", {}, ...texts.map((text) => el("li", {}, text))),
    ]);
  }

  async #copyLink() {
    const address = link(encode(this.#state));
    try {
      await navigator.clipboard.writeText(address);
      this.linkButton.textContent = "Copied";
      setTimeout(() => (this.linkButton.textContent = "Copy link"), 1500);
    } catch {
      this.linkText.hidden = false; // not allowed here: to be copied by hand
      this.linkText.value = address;
      this.linkText.select();
    }
  }

  #emptyPage() {
    this.emptyTitle = el("h2");
    this.emptyWhy = el("p");
    this.emptyHow = el(
      "div",
      {},
      el("p", {}, "This tab shows what attnmon measures of attention heads while a model trains: layers by heads at any step, each head's history, and every warning. Nothing of it is in this log directory."),
      el("h3", {}, "With Lightning"),
      el("pre", {}, el("code", {}, LIGHTNING)),
      el("h3", {}, "With transformers.Trainer"),
      el("pre", {}, el("code", {}, TRAINER)),
      el("h3", {}, "In a plain PyTorch loop"),
      el("pre", {}, el("code", {}, PLAIN)),
      el("p", {}, "Once a sample is written, it appears here after TensorBoard's next reload."),
    );
    const again = el("button", { type: "button", on: { click: () => this.data.reload() } }, "Look again");
    return el("div", { class: "empty", hidden: true }, this.emptyTitle, this.emptyWhy, this.emptyHow, el("p", {}, again));
  }
}
