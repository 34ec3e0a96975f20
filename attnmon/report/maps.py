"""Layer x head maps as SVG text. Colours are classes of the page's style sheet, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.report.text import esc, number, signed

__all__ = ["DIVERGING", "SEQUENTIAL", "Rows", "Scale", "colour_bar", "heat_map", "key", "scale_of", "status_map"]

_Figures = NDArray[np.floating[Any]]

# Dark to light with evenly rising lightness, and blue to orange over the page's own ground: both are told apart by
# colour-blind readers, and the first in grey too.
SEQUENTIAL = (
    "#2a1a5e", "#2f2f7a", "#2c4489", "#26598f", "#236d92", "#228093", "#2a9391", "#3fa68a", "#60b87d", "#88c86d",
    "#b4d65c", "#e2e04f",
)  # fmt: skip
DIVERGING = {
    "light": ("#0b4f8a", "#3d7fb5", "#7fb0d6", "#bdd7ec", "#efefec", "#f7d3ad", "#eea76a", "#d1762f", "#984605"),
    "dark": ("#8ec5f5", "#5b9bd3", "#386f9f", "#26496b", "#2b2e34", "#5e3d1c", "#96592a", "#cf8140", "#f8b777"),
}  # fmt: skip


_BEYOND = 1e-4  # a figure that passes its own limit by less does so by rounding


@dataclass(frozen=True)
class Scale:
    """Ends of a colour scale, and whether there are figures beyond them, which take the colour of the end."""

    low: float
    high: float
    below: bool = False
    above: bool = False


def scale_of(*tables: _Figures, limits: tuple[float | None, float | None] = (None, None)) -> Scale:
    """From the least to the largest figure; a few that are far from all others must not take the whole scale.

    Args:
        tables: The figures.
        limits: Ends that the quantity has by itself; None: the figures' own.
    """
    finite = np.concatenate([table[np.isfinite(table)] for table in tables])
    if not finite.size:
        low = 0.0 if limits[0] is None else limits[0]
        return Scale(low, low + 1.0 if limits[1] is None else limits[1])
    least, low, high, most = (float(value) for value in np.percentile(finite, [0, 2, 98, 100]))
    below, above = (0 < high - low < distance for distance in (low - least, most - high))
    low, high = low if below else least, high if above else most
    if limits[0] is not None:
        low, below = limits[0], least < limits[0] - _BEYOND
    if limits[1] is not None:
        high, above = limits[1], most > limits[1] + _BEYOND
    return Scale(min(low, high), max(low, high), below, above)


@dataclass(frozen=True)
class Rows:
    """What the rows of a map are called.

    Attributes:
        key: The page's list of their full names, for the pointer's label.
        ticks: Short names, at the axis.
        by_head: False where the only column is the mean over a layer's heads.
    """

    key: str
    ticks: Sequence[str]
    by_head: bool = True


@dataclass(frozen=True)
class _Grid:
    """Where the cells of a map are, in pixels."""

    rows: int
    columns: int
    cell: tuple[float, float]
    left: float
    top: float = 4.0

    @property
    def size(self) -> tuple[float, float]:
        """Of the whole picture, the head numbers below the cells included."""
        margin = 16 if self.columns == 1 else 4  # for the name of the only column
        return self.left + self.columns * self.cell[0] + margin, self.top + self.rows * self.cell[1] + 30

    def place(self, row: int, column: int) -> tuple[float, float]:
        """Upper left corner of a cell."""
        return round(self.left + column * self.cell[0], 1), round(self.top + row * self.cell[1], 1)


def _grid(rows: int, columns: int, width: float, height: float) -> _Grid:
    side = max(4.0, min(20.0, width / max(columns, 1), height / max(rows, 1)))
    wide = 46.0 if columns == 1 else side
    return _Grid(rows, columns, (round(wide, 1), round(side, 1)), 34.0)


def _every(room: float, cell: float) -> int:
    """Least of 1, 2, 5, 10, ... cells that leave room for a label."""
    return next((every for every in (1, 2, 5, 10, 20, 50, 100) if every * cell >= room), 200)


def _axes(grid: _Grid, rows: Rows) -> str:
    parts = []
    wide, tall = grid.cell
    for row in range(0, grid.rows, _every(11, tall)):
        y = grid.place(row, 0)[1] + tall / 2 + 3.5
        parts.append(f'<text class="tick end" x="{grid.left - 4:g}" y="{y:g}">{esc(rows.ticks[row])}</text>')
    bottom = grid.top + grid.rows * tall
    for column in range(0, grid.columns, _every(16, wide)) if rows.by_head else ():
        x = grid.place(0, column)[0] + wide / 2
        parts.append(f'<text class="tick mid" x="{x:g}" y="{bottom + 12:g}">{column}</text>')
    middle, label = grid.left + grid.columns * wide / 2, "head" if rows.by_head else "mean of heads"
    parts.append(f'<text class="tick mid" x="{middle:g}" y="{bottom + 25:g}">{label}</text>')
    middle = grid.top + grid.rows * tall / 2
    parts.append(f'<text class="tick mid" transform="translate(9 {middle:g}) rotate(-90)">layer</text>')
    return "".join(parts)


def _cells(grid: _Grid, places: NDArray[np.intp]) -> str:
    """One path for all cells of a colour."""
    wide, tall = (max(size - 1, 0.8 * size) for size in grid.cell)
    return "".join(
        f"M{x:g} {y:g}h{wide:.3g}v{tall:.3g}h-{wide:.3g}z"
        for row, column in places.tolist()
        for x, y in [grid.place(row, column)]
    )


def _strokes(grid: _Grid, places: NDArray[np.intp]) -> str:
    """A diagonal through each cell: not measured."""
    wide, tall = (max(size - 1, 0.8 * size) for size in grid.cell)
    return "".join(
        f"M{x:g} {y + tall:g}l{wide:.3g}-{tall:.3g}"
        for row, column in places.tolist()
        for x, y in [grid.place(row, column)]
    )


def _open_map(grid: _Grid, rows: Rows, label: str, cells: Sequence[Sequence[str]], unit: str = "") -> str:
    """``cells`` is what the pointer's label says: "" = not measured, ``x`` = no such head."""
    width, height = grid.size
    text = ";".join(",".join(row) for row in cells)
    return (
        f'<svg class="map" role="img" aria-label="{esc(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" data-v="{esc(text)}" data-s="{esc(rows.key)}" data-u="{esc(unit)}" '
        f'data-g="{grid.left:g},{grid.top:g},{grid.cell[0]:g},{grid.cell[1]:g}">'
    )


def heat_map(
    values: _Figures,
    exists: NDArray[np.bool_],
    scale: Scale,
    rows: Rows,
    *,
    label: str,
    unit: str = "",
    fine: float = 0.0,
    diverging: bool = False,
) -> str:
    """A layer x head map.

    Args:
        values: ``(layers, heads)``; NaN = not measured: grey with a stroke.
        exists: Which heads there are; the others are dotted frames.
        scale: The colour scale.
        rows: What its rows are called.
        label: What it shows, for readers that can't see it.
        unit: Follows the figure in the pointer's label.
        fine: What figures may differ by and still look alike there.
        diverging: Blue to orange instead of dark to light.
    """
    grid = _grid(values.shape[0], values.shape[1], 270, 260)
    finite = np.isfinite(values)
    colours = len(DIVERGING["light"]) if diverging else len(SEQUENTIAL)
    span = scale.high - scale.low
    share = np.where(finite, (values - scale.low) / span, 0.0) if span > 0 else np.full(values.shape, 0.5)
    index = (np.clip(share, 0.0, 1.0) * colours).astype(np.int64).clip(max=colours - 1)
    cells = [
        [("" if not math.isfinite(value) else number(value, fine)) if there else "x" for value, there in pairs]
        for pairs in (zip(*pair, strict=True) for pair in zip(values.tolist(), exists.tolist(), strict=True))
    ]
    parts = [_open_map(grid, rows, label, cells, unit)]
    for colour in range(colours):
        places = np.argwhere(finite & (index == colour))
        if len(places):
            parts.append(f'<path class="{"d" if diverging else "c"}{colour}" d="{_cells(grid, places)}"/>')
    missing = np.argwhere(exists & ~finite)
    if len(missing):
        parts.append(f'<path class="nan" d="{_cells(grid, missing)}"/>')
        parts.append(f'<path class="stroke" d="{_strokes(grid, missing)}"/>')
    parts += _absent(grid, ~exists & ~finite)
    return "".join([*parts, _axes(grid, rows), "</svg>"])


def _absent(grid: _Grid, absent: NDArray[np.bool_]) -> list[str]:
    return [f'<path class="absent" d="{_cells(grid, np.argwhere(absent))}"/>'] if absent.any() else []


def status_map(looks: Sequence[Sequence[str]], rows: Rows, *, label: str, words: Sequence[Sequence[str]]) -> str:
    """What the warnings say of each head.

    Args:
        looks: Class of each head in the style sheet; "" = no such head.
        rows: What its rows are called.
        label: What it shows, for readers that can't see it.
        words: What the pointer's label says of each head, without commas and semicolons.
    """
    shown = np.array(looks)
    grid = _grid(shown.shape[0], shown.shape[1], 330, 300)
    parts = [_open_map(grid, rows, label, words)]
    for look in sorted(set(shown.flat) - {""}):
        parts.append(f'<path class="{look}" d="{_cells(grid, np.argwhere(shown == look))}"/>')
    parts += _absent(grid, shown == "")
    return "".join([*parts, _axes(grid, rows), "</svg>"])


def colour_bar(scale: Scale, unit: str, *, diverging: bool = False, missing: bool = False, absent: bool = False) -> str:
    """The colour scale with its ends and unit, and what grey and empty cells mean where there are any."""
    kind, colours = ("d", len(DIVERGING["light"])) if diverging else ("c", len(SEQUENTIAL))
    steps = "".join(f'<rect class="{kind}{i}" x="{i * 12}" width="12.5" height="10"/>' for i in range(colours))
    text = signed if diverging else number
    fine = (scale.high - scale.low) / 100
    low = f"{text(scale.low, fine)}{' and less' if scale.below else ''}"
    high = f"{text(scale.high, fine)}{' and more' if scale.above else ''}{f' {esc(unit)}' if unit else ''}"
    notes = key("not measured", "nan", stroke=True) if missing else ""
    notes += key("no such head", "absent") if absent else ""
    return (
        f'<p class="bar"><span>{low}</span><svg viewBox="0 0 {colours * 12} 10" width="{colours * 12}" height="10" '
        f'aria-hidden="true">{steps}</svg><span>{high}</span>{notes}</p>'
    )


def key(name: str, look: str, *, stroke: bool = False) -> str:
    """What a kind of cell means."""
    line = '<path class="stroke" d="M1 12l11-11"/>' if stroke else ""
    cell = f'<svg width="13" height="13" aria-hidden="true"><path class="{look}" d="M1 1h11v11h-11z"/>{line}</svg>'
    return f'<span class="key">{cell}{esc(name)}</span>'
