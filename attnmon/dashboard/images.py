"""Layer x head images, drawn by NumPy and Pillow.

Pillow comes with TensorBoard and is imported when the first image is drawn. A Matplotlib figure costs 50 times as much
a write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnmon.dashboard.names import BY_NAME, short_number, title

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

__all__ = ["heads_image", "quantity_image"]

# Anchors of a dark-to-light map whose lightness rises evenly (colour-blind safe, readable in grey).
_ANCHORS = (
    (68, 1, 84), (71, 39, 119), (62, 73, 137), (48, 103, 141), (38, 130, 142),
    (36, 157, 136), (67, 182, 113), (127, 209, 78), (189, 223, 55), (253, 231, 37),
)  # fmt: skip
_GREY, _PAPER, _INK, _HATCH = (176, 176, 176), (255, 255, 255), (32, 32, 32), (214, 214, 214)
_MARGIN = 10
_BAR = 14


@lru_cache(maxsize=1)
def _colours() -> npt.NDArray[np.uint8]:
    """256 colours, ``(256, 3)``."""
    anchors = np.array(_ANCHORS, dtype=np.float64)
    place = np.linspace(0.0, 1.0, len(anchors))
    grid = np.linspace(0.0, 1.0, 256)
    return np.stack([np.interp(grid, place, anchors[:, c]) for c in range(3)], axis=1).round().astype(np.uint8)


@lru_cache(maxsize=4)
def _font(size: int) -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except ImportError:  # Pillow built without FreeType: its small bitmap font
        return ImageFont.load_default()


@lru_cache(maxsize=1024)
def _text(text: str, size: int = 11) -> npt.NDArray[np.float32]:
    """A line of text as coverage 0 to 1, ``(height, width)``; kept, since the same labels come every time."""
    from PIL import Image, ImageDraw

    font = _font(size)
    left, _, right, _ = font.getbbox(text)
    image = Image.new("L", (max(1, math.ceil(right - left)), size + 4), 0)
    ImageDraw.Draw(image).text((-left, 0), text, fill=255, font=font)
    return np.asarray(image, dtype=np.float32) / 255.0


def _put(
    canvas: npt.NDArray[np.uint8],
    text: npt.NDArray[np.float32],
    x: float,
    y: float,
    align: str = "left",
    ink: tuple[int, int, int] = _INK,
) -> None:
    """Write ``text`` in ``ink``, vertically centred on ``y``."""
    height, width = text.shape
    left = round(x - {"left": 0.0, "centre": width / 2, "right": float(width)}[align])
    top = round(y - height / 2)
    left, top = max(0, left), max(0, top)
    target = canvas[top : top + height, left : left + width]
    cover = text[: target.shape[0], : target.shape[1], None]
    target[:] = (target * (1.0 - cover) + np.array(ink, dtype=np.float32) * cover).round().astype(np.uint8)


def _labels_every(count: int, room: float, cell: float) -> int:
    """Least of 1, 2, 5, 10, ... such that labels ``room`` pixels apart do not touch."""
    for every in (1, 2, 4, 5, 8, 10, 20, 50, 100):
        if every * cell >= room or every >= count:
            return every
    return 200


def heads_image(
    values: Mapping[int, Sequence[float]],
    *,
    title: str,
    vmin: float | None = None,
    vmax: float | None = None,
) -> npt.NDArray[np.uint8]:
    """A layer x head heat map with numbered axes and a colour bar.

    Layers run from top to bottom, heads from left to right. Grey: a head that was not measured (NaN or infinite).
    Hatched: a head that this layer does not have. Up to 36 heads carry their figure. Values beyond the colour scale
    take its end colour.

    Args:
        values: ``values[layer]``, one float per head; layers may have different numbers of heads.
        title: Line above the map; say the unit in it.
        vmin: Lower end of the colour scale; None = the least finite value.
        vmax: Upper end of the colour scale; None = the largest finite value.

    Returns:
        ``(height, width, 3)`` uint8, for ``SummaryWriter.add_image(..., dataformats="HWC")``.

    Raises:
        ValueError: If there is no layer, or no layer has a head, or ``vmin > vmax``.

    Example:
        >>> heads_image({0: [0.1, 0.9], 1: [0.4, 0.6]}, title="Normalised entropy (H / log n)").dtype
        dtype('uint8')
    """
    layers = sorted(values)
    columns = max((len(values[layer]) for layer in layers), default=0)
    if columns == 0:
        raise ValueError(
            f"Expected `values` to hold at least one layer with at least one head, but got {len(layers)} layers "
            f"without heads. Skip the image where nothing was measured."
        )
    grid = np.full((len(layers), columns), np.nan)
    exists = np.zeros(grid.shape, dtype=bool)
    for row, layer in enumerate(layers):
        count = len(values[layer])
        grid[row, :count] = values[layer]
        exists[row, :count] = True
    measured = np.isfinite(grid)
    finite = grid[measured]
    low = vmin if vmin is not None else (float(finite.min()) if finite.size else 0.0)
    high = vmax if vmax is not None else (float(finite.max()) if finite.size else 1.0)
    if vmin is not None and vmax is not None and low > high:
        raise ValueError(f"Expected `vmin` <= `vmax`, but got vmin={vmin} and vmax={vmax}. Swap them.")
    low = min(low, high) if vmin is None else low
    high = max(low, high)
    flat = high - low <= 1e-12 * max(abs(low), abs(high), 1e-30)
    place = np.full(grid.shape, 0.5) if flat else (np.where(measured, grid, low) - low) / (high - low)
    index = (np.clip(place, 0.0, 1.0) * 255).round().astype(int)
    colours = _colours()
    cells = colours[index]
    cells[exists & ~measured] = _GREY
    cells[~exists] = _PAPER

    # Sizes, in pixels
    tall = int(np.clip(420 // len(layers), 11, 40))
    wide = int(np.clip(560 // columns, 11, 40))
    heading = _text(title, 13)
    ends = [short_number(low)] if flat else [short_number(low), short_number((low + high) / 2), short_number(high)]
    bar_text = max(_text(end).shape[1] for end in ends)
    notes = [("not measured", _GREY)] * bool((exists & ~measured).any()) + [("no such head", None)] * bool(
        (~exists).any()
    )
    left = _MARGIN + 16 + max(_text(str(layer)).shape[1] for layer in layers) + 6
    top = _MARGIN + heading.shape[0] + 6
    map_h, map_w = len(layers) * tall, columns * wide
    bar_h = max(map_h, 60)
    bar_x = left + map_w + 16
    height = top + max(map_h + 38, bar_h + 8) + (18 if notes else 0) + _MARGIN
    width = max(bar_x + _BAR + 6 + bar_text, _MARGIN + heading.shape[1], left + 110 * len(notes)) + _MARGIN
    canvas = np.full((height, width, 3), 255, dtype=np.uint8)

    # Cells, with one white pixel between them, and hatching where a layer has no such head
    block = np.repeat(np.repeat(cells, tall, axis=0), wide, axis=1)
    if not exists.all():
        y, x = np.mgrid[0:map_h, 0:map_w]
        stripe = ((x + y) % 6 < 2) & ~np.repeat(np.repeat(exists, tall, axis=0), wide, axis=1)
        block[stripe] = _HATCH
    block[tall - 1 :: tall] = 255
    block[:, wide - 1 :: wide] = 255
    canvas[top : top + map_h, left : left + map_w] = block

    if exists.sum() <= 36 and wide >= 32 and tall >= 16:
        for row, column in np.argwhere(measured):
            dark = cells[row, column] @ np.array([0.299, 0.587, 0.114]) < 140
            x, y = left + (column + 0.5) * wide - 0.5, top + (row + 0.5) * tall
            _put(canvas, _text(short_number(float(grid[row, column]))), x, y, "centre", _PAPER if dark else _INK)

    # Axes
    every = _labels_every(len(layers), 13, tall)
    for row, layer in enumerate(layers):
        if row % every == 0:
            _put(canvas, _text(str(layer)), left - 5, top + (row + 0.5) * tall, "right")
    every = _labels_every(columns, _text(str(columns - 1)).shape[1] + 5, wide)
    for column in range(0, columns, every):
        _put(canvas, _text(str(column)), left + (column + 0.5) * wide - 0.5, top + map_h + 9, "centre")
    _put(canvas, _text("head"), left + map_w / 2, top + map_h + 26, "centre")
    _put(canvas, np.rot90(_text("layer")), _MARGIN + 5, top + map_h / 2, "centre")
    _put(canvas, heading, _MARGIN, _MARGIN + heading.shape[0] / 2)

    # Colour bar, the largest value on top
    ramp = colours[np.linspace(255, 0, bar_h).round().astype(int)] if not flat else colours[[128] * bar_h]
    canvas[top : top + bar_h, bar_x : bar_x + _BAR] = ramp[:, None]
    for place_y, end in zip(np.linspace(bar_h - 6, 6, len(ends)) if len(ends) > 1 else [bar_h / 2], ends, strict=True):
        _put(canvas, _text(end), bar_x + _BAR + 5, top + place_y)

    for number, (note, colour) in enumerate(notes):
        x0, y0 = left + 110 * number, height - _MARGIN - 12
        swatch = canvas[y0 : y0 + 11, x0 : x0 + 11]
        if colour is None:
            swatch[np.add.outer(np.arange(11), np.arange(11)) % 6 < 2] = _HATCH
        else:
            swatch[:] = colour
        _put(canvas, _text(note), x0 + 16, y0 + 6)
    return canvas


def quantity_image(quantity: str, values: Mapping[int, Sequence[float]]) -> npt.NDArray[np.uint8]:
    """`heads_image` with the quantity's own title, unit and colour scale.

    A scale end that the quantity has by definition (0 and 1 for a share) is kept fixed, so that images of different
    steps compare; the other ends are the data's own.

    Example:
        >>> quantity_image("separability@10", {0: [0.6, 0.7]}).shape[2]
        3
    """
    known = BY_NAME.get(quantity.partition("@")[0])
    vmin, vmax = known.limits if known else (None, None)
    return heads_image(values, title=title(quantity), vmin=vmin, vmax=vmax)
