// Colour scales and palettes. The scale of values is the one of the images that a run writes.

const RISING = ["#440154", "#472777", "#3e4989", "#30678d", "#26828e", "#249d88", "#43b671", "#7fd14e", "#bddf37", "#fde725"];
const DIVERGING = ["#2d5f9e", "#6f9fd0", "#b5d0e8", "#f1f1ef", "#f3c79a", "#df8a45", "#a8480d"]; // blue: fell, orange: rose

// Told apart by people with any kind of colour vision, on white and on near black.
const HEADS = {
  light: ["#0072b2", "#d55e00", "#008766", "#b0578d", "#9c6b00", "#3f51b5", "#595959", "#7b1fa2"],
  dark: ["#56b4e9", "#ff9142", "#2ec4a0", "#e39bc4", "#f0c541", "#9fa8ff", "#c4c4c4", "#d78bef"],
};

// A line of the first run is solid; those of the others are dashed.
export const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

export const SEVERITIES = {
  watch: { glyph: "○", word: "watch" },
  warn: { glyph: "▲", word: "warn" },
  critical: { glyph: "■", word: "critical" },
};

/** The mark of a severity; one that is not known is shown as it is. */
export function severity(name) {
  return SEVERITIES[name] ?? { glyph: "◇", word: name };
}

/** The colour of the n-th head of the comparison. */
export function headColour(place, dark) {
  const palette = dark ? HEADS.dark : HEADS.light;
  return palette[place % palette.length];
}

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function ramp(anchors) {
  const known = anchors.map(channels);
  return Array.from({ length: 256 }, (_, index) => {
    const at = (index / 255) * (known.length - 1);
    const low = Math.min(Math.floor(at), known.length - 2);
    const mixed = known[low].map((value, c) => Math.round(value + (known[low + 1][c] - value) * (at - low)));
    return `rgb(${mixed.join(",")})`;
  });
}

const RAMPS = { value: ramp(RISING), change: ramp(DIVERGING) };

/** The colour of a value between the ends of a scale; the middle one where both ends are the same. */
export function colour(view, value, [low, high]) {
  const place = high > low ? (value - low) / (high - low) : 0.5;
  return RAMPS[view][Math.round(Math.min(1, Math.max(0, place)) * 255)];
}

/** The scale as a CSS gradient from left to right. */
export function gradient(view) {
  return `linear-gradient(to right, ${(view === "change" ? DIVERGING : RISING).join(", ")})`;
}
