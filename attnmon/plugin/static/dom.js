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

/** Puts `children` in the place of what `node` holds, if `key` is not the one of the last time. */
export function refill(node, key, children) {
  if (node.attnmonKey === key) return;
  node.attnmonKey = key;
  node.replaceChildren(...children());
}

/** Four significant digits; not a number means not measured. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "-infinite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** The same with a sign. */
export function signed(value) {
  return Number.isFinite(value) && value > 0 ? `+${number(value)}` : number(value);
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
