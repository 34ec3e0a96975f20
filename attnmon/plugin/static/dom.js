// Elements, the one tooltip, numbers as text.

/** An element: `el("p", {class: "note", on: {click}}, "text", child)`. A property that is null or false is left out. */
export function el(name, properties = {}, ...children) {
  return fill(document.createElement(name), properties, children);
}

/** The same in SVG. */
export function svg(name, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), properties, children);
}

function fill(node, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(key, value === true ? "" : value);
    }
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/**
 * Puts `children` in the place of what `node` holds, if `key` is not the one of the last time.
 *
 * What had the focus in there hands it on to its successor.
 */
export function refill(node, key, children) {
  if (node.attnmonKey === key) return;
  node.attnmonKey = key;
  const focused = document.activeElement;
  const place = focused === node ? -1 : reachable(node).indexOf(focused);
  const top = node.scrollTop;
  node.replaceChildren(...children());
  node.scrollTop = top;
  if (place >= 0) successor(reachable(node), nameOf(focused), place)?.focus({ preventScroll: true });
}

function reachable(node) {
  return [...node.querySelectorAll("a[href], button, input, select, summary, [tabindex]")];
}

function nameOf(node) {
  return node.getAttribute("aria-label") ?? (node.type === "checkbox" ? node.value : node.textContent);
}

/** The one with the same name; where that is gone or can't be chosen any longer, the nearest to its place. */
function successor(nodes, name, place) {
  const same = nodes.find((node) => nameOf(node) === name && !node.disabled);
  if (same) return same;
  const distance = (node) => Math.abs(nodes.indexOf(node) - place);
  return nodes.filter((node) => !node.disabled).sort((a, b) => distance(a) - distance(b))[0];
}

/**
 * Four significant digits, and more where figures that differ by `step` would look alike; not a number means not
 * measured.
 */
export function number(value, step = Infinity) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "-infinite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const wanted = step > 0 ? 1 + placeOfDigit(size) - placeOfDigit(step) : 0;
  const digits = Math.min(7, Math.max(4, wanted)); // seven are what a float32 holds
  if (size >= 1e5 || size < 1e-4) return value.toExponential(digits > 4 ? digits - 1 : 2).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

/** The power of ten of a number's first digit. */
function placeOfDigit(size) {
  return Math.floor(Math.log10(size) + 1e-9);
}

const SHORT = 6; // characters of a label that is never too long

/** Labels of an axis' ticks in their order, each with the digits that their spacing needs. */
export function tickLabels(values) {
  const apart = values.length > 1 ? values[1] - values[0] : 0;
  if (!(apart > 0)) return values.map((value) => number(value));
  const last = placeOfDigit(apart);
  const fixed = values.map((value) => (value || 0).toFixed(Math.min(100, Math.max(0, -last)))); // -0 is 0
  const powers = values.map((value) =>
    value ? value.toExponential(Math.min(100, Math.max(0, placeOfDigit(Math.abs(value)) - last))).replace("e+", "e") : "0",
  );
  return longest(fixed) <= Math.max(SHORT, longest(powers)) ? fixed : powers;
}

/** Characters of the longest of some texts. */
export function longest(texts) {
  return Math.max(0, ...texts.map((text) => text.length));
}

/** `1 layer`, `2 layers`. */
export function counted(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** The same with a sign. */
export function signed(value, step) {
  return Number.isFinite(value) && value > 0 ? `+${number(value, step)}` : number(value, step);
}

/** A number and its unit. */
export function withUnit(text, unit) {
  return unit ? `${text} ${unit}` : text;
}

/** The one tooltip, kept inside the window. */
export const tip = {
  node: el("div", { class: "tip", role: "tooltip", hidden: true }),
  show(x, y, ...children) {
    this.node.replaceChildren(...children);
    this.node.hidden = false;
    const { width, height } = this.node.getBoundingClientRect();
    const left = x + 14 + width > window.innerWidth ? x - width - 10 : x + 14;
    const top = y + 14 + height > window.innerHeight ? y - height - 10 : y + 14;
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    this.node.hidden = true;
  },
};
