"""What a logger is given: tags, per-layer scalars, layer x head images, TensorBoard's layout, warnings as text.

Everything here is a pure function of plain numbers. Images are drawn by NumPy and Pillow (Pillow comes with
TensorBoard and is imported when the first image is drawn), since a Matplotlib figure costs 50 times as much a write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

__all__ = [
    "QUANTITIES",
    "Quantity",
    "alert_markdown",
    "custom_scalars_layout",
    "heads_image",
    "image_tag",
    "quantity_image",
    "scalar_tag",
    "scalars",
    "title",
    "warning_scalars",
    "warning_tag",
]


@dataclass(frozen=True)
class Quantity:
    """One row of the table of quantities: how a figure is called, logged, drawn and read.

    Attributes:
        name: Name in ``snapshot.values``, without the ``@`` part.
        title: Name for people, for charts and images.
        unit: Unit; "" for a pure number.
        range: Possible values, in words.
        tag: Path under the prefix; ``{}`` stands for what follows the ``@``.
        rise: What a rise during training means.
        fall: What a fall during training means.
        argument: What follows the ``@``: "N" (the size of the top-N set), "m" (a temperature, as a multiple of the
            model's own), "m, epsilon", or "" if nothing does.
        limits: Ends of the image's colour scale; None = the data's own.
    """

    name: str
    title: str
    unit: str
    range: str
    tag: str
    rise: str
    fall: str
    argument: str = ""
    limits: tuple[float | None, float | None] = (0.0, None)


_MIXES = "attention spreads over more keys: an early sign that a head saturates (paper, rule 2)"
_FOCUS = "attention concentrates; down to 0 with growing scores it is entropy collapse"
_SPREAD_OUT = "the selected keys' share stands further from the rest"

QUANTITIES: tuple[Quantity, ...] = (
    Quantity("entropy", "Entropy", "nats", "0 to log n", "entropy", _MIXES, _FOCUS),
    Quantity(
        "entropy_normalized", "Normalised entropy", "H / log n", "0 to 1", "entropy/normalized", _MIXES, _FOCUS,
        limits=(0.0, 1.0),
    ),
    Quantity("effective_keys", "Effective keys exp(H)", "keys", "1 to n", "entropy/effective_keys", _MIXES, _FOCUS),
    Quantity(
        "active_share", "Active share exp(H) / n", "share of the context", "1/n to 1", "entropy/active_share",
        "above 0.06 no separation is left (paper, rule 1)", "the head selects", limits=(0.0, 1.0),
    ),
    Quantity(
        "participation_ratio", "Participation ratio", "keys", "1 to n", "entropy/participation_ratio", _MIXES, _FOCUS
    ),
    Quantity(
        "lemma1_min", "Lemma 1 constant C1 = n min a", "", "0 to 1", "entropy/lemma1_min",
        "the least attended key nears the uniform weight", "keys are being ignored", limits=(0.0, 1.0),
    ),
    Quantity(
        "lemma1_max", "Lemma 1 constant C2 = n max a", "", "1 to n", "entropy/lemma1_max",
        "one key gains weight over the uniform one", "the head drifts toward uniform", limits=(1.0, None),
    ),
    Quantity(
        "separability", "Separability Ns/N, N = {}", "share of the selected keys", "0 to 1", "separability/top_{}",
        "selected keys are told apart from the rest; to 1 also where the value vectors become alike",
        "selected keys blur into the rest (paper, rule 2); to 1/N where one key takes all weight", "N", (0.0, 1.0),
    ),
    Quantity(
        "precision", "Separability precision, N = {}", "share", "0 to 1", "separability/precision_top_{}",
        "few unselected keys look selected", "unselected keys look selected", "N", (0.0, 1.0),
    ),
    Quantity(
        "f_score", "Separability F-score, N = {}", "share", "0 to 1", "separability/f_score_top_{}",
        "selection can be read off the output", "selection is lost in the output", "N", (0.0, 1.0),
    ),
    Quantity(
        "radius", "Separability radius r, N = {}", "vector norm", "0 and up", "separability/radius_top_{}",
        "the nearest unselected key moves away", "an unselected key comes close", "N",
    ),
    Quantity(
        "separability_lower", "Theorem 2 lower bound, N = {}", "share", "-inf to 1", "separability/lower_top_{}",
        "more separability is guaranteed", "less is guaranteed; below 0 the bound says nothing", "N", (None, 1.0),
    ),
    Quantity(
        "separability_upper", "Theorem 2 upper bound, N = {}", "share", "0 and up", "separability/upper_top_{}",
        "the bound loosens", "the geometry caps separability", "N",
    ),
    Quantity(
        "separability_upper_valid", "Theorem 2 upper bound where it argues, N = {}", "share", "0 to 1",
        "separability/upper_valid_top_{}", "the bound loosens", "the geometry caps separability", "N", (0.0, 1.0),
    ),
    Quantity(
        "distance", "Top-N distance, N = {}", "vector norm", "0 and up", "distance/top_{}", _SPREAD_OUT,
        "selected and unselected keys blend", "N",
    ),
    Quantity(
        "distance_upper", "Top-N distance, Theorem 1 bound, N = {}", "vector norm", "0 and up",
        "distance/upper_top_{}", "the bound loosens", "the bound tightens", "N",
    ),
    Quantity(
        "distance_expected", "Top-N distance expected at random, N = {}", "vector norm", "0 and up",
        "distance/expected_top_{}", "compare with the distance: equal means that the top N are no better than chance",
        "likewise", "N",
    ),
    Quantity(
        "distance_expected_lower", "Top-N distance, random sets, lower bound, N = {}", "vector norm", "0 and up",
        "distance/expected_lower_top_{}", "as distance_expected", "as distance_expected", "N",
    ),
    Quantity(
        "distance_expected_upper", "Top-N distance, random sets, upper bound, N = {}", "vector norm", "0 and up",
        "distance/expected_upper_top_{}", "as distance_expected", "as distance_expected", "N",
    ),
    Quantity(
        "jacobian", "Softmax Jacobian, spectral norm, T x {}", "1 / score", "0 to 1/(2T)", "jacobian/temperature_{}",
        "weights react more to the scores: steeper gradients, less stable",
        "weights react less: rows are one-hot, or near uniform over many keys", "m",
    ),
    Quantity(
        "jacobian_frobenius", "Softmax Jacobian, Frobenius norm, T x {}", "1 / score", "0 to 1/(2T)",
        "jacobian/frobenius_temperature_{}", "as jacobian", "as jacobian", "m",
    ),
    Quantity(
        "jacobian_max", "Softmax Jacobian, largest entry, T x {}", "1 / score", "0 to 1/(4T)",
        "jacobian/max_temperature_{}", "as jacobian", "as jacobian", "m",
    ),
    Quantity(
        "sensitivity", "Finite-difference sensitivity, T x {}", "1 / score", "0 to min(1/(2T), sqrt(2)/epsilon)",
        "jacobian/sensitivity_temperature_{}", "as jacobian, in a random direction", "as jacobian", "m, epsilon",
    ),
    Quantity(
        "score_spread", "Score spread", "scores / T", "0 and up", "logits/spread",
        "scores grow: 10 and more comes before collapse", "the head drifts toward uniform attention",
    ),
    Quantity(
        "score_max", "Largest |score|", "scores / T", "0 and up", "logits/max",
        "scores grow: 100 is where QK-clip acts", "scores shrink",
    ),
    Quantity(
        "first_key_weight", "Weight of the first key", "share", "0 to 1", "logits/first_key_weight",
        "the head parks its weight on the first key (attention sink)", "the head leaves the sink", limits=(0.0, 1.0),
    ),
)  # fmt: skip
"""Every quantity that has a name of its own, in the order of the dashboard."""

_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


def _safe(text: str) -> str:
    """Only characters that every logger takes in a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", text).strip("_") or "_"


def _path(quantity: str) -> str:
    """``separability@10`` -> ``separability/top_10``."""
    name, _, argument = quantity.partition("@")
    known = _BY_NAME.get(name)
    if known is None or bool(known.argument) != bool(argument):
        return "/".join(_safe(part) for part in quantity.replace("@", "_").split("/") if part) or "_"
    if known.argument == "m, epsilon":
        argument = "_epsilon_".join(part.strip() for part in argument.split(",", 1))
    return known.tag.format(_safe(argument))


def scalar_tag(quantity: str, layer: int, head: int | None = None, prefix: str = "attn") -> str:
    """The key under which a quantity of one layer, or of one head, is logged.

    Args:
        quantity: Name as in ``snapshot.values``, e.g. ``"separability@10"``. An unknown one gets a path of its own
            name.
        layer: Layer number in call order, 0 or more; written with at least two digits.
        head: Query head, or None for the layer's mean over its heads.
        prefix: First part of the key.

    Returns:
        A tag of letters, digits, ``_ - .`` and ``/`` only.

    Example:
        >>> scalar_tag("separability@10", 3)
        'attn/separability/top_10/layer_03'
        >>> scalar_tag("jacobian@0.5", 3, head=7)
        'attn/jacobian/temperature_0.5/layer_03/head_07'
    """
    tag = f"{prefix}/{_path(quantity)}/layer_{layer:02d}"
    return tag if head is None else f"{tag}/head_{head:02d}"


def image_tag(quantity: str, prefix: str = "attn") -> str:
    """The tag of a quantity's layer x head image.

    Example:
        >>> image_tag("entropy_normalized")
        'attn/entropy/normalized/heads'
    """
    return f"{prefix}/{_path(quantity)}/heads"


def warning_tag(rule: str, prefix: str = "attn") -> str:
    """The tag of one rule's warnings, both of the count (a scalar) and of the text.

    Example:
        >>> warning_tag("entropy_rise")
        'attn/warnings/entropy_rise'
    """
    return f"{prefix}/warnings/{_safe(rule)}"


def title(quantity: str, *, unit: bool = True) -> str:
    """A quantity's name for people, with its unit.

    Example:
        >>> title("separability@10")
        'Separability Ns/N, N = 10 (share of the selected keys)'
    """
    name, _, argument = quantity.partition("@")
    known = _BY_NAME.get(name)
    if known is None or bool(known.argument) != bool(argument):
        return quantity
    if known.argument == "m, epsilon":
        argument = ", epsilon = ".join(part.strip() for part in argument.split(",", 1))
    text = known.title.format(argument)
    return f"{text} ({known.unit})" if unit and known.unit else text


def scalars(
    values: Mapping[str, Mapping[int, Sequence[float]]], *, per_head: bool = False, prefix: str = "attn"
) -> dict[str, float]:
    """A snapshot's figures as one flat dictionary, for ``logger.log_metrics``.

    Args:
        values: ``values[quantity][layer]``, one float per head; NaN where a head was not measured.
        per_head: Adds every head's own figure to the layer's mean.
        prefix: First part of each key.

    Returns:
        ``{tag: mean over the layer's measured heads}``. What was not measured is absent: never 0, never NaN.

    Example:
        >>> scalars({"entropy": {3: [1.0, 2.0, float("nan")], 4: [float("nan")]}})
        {'attn/entropy/layer_03': 1.5}
    """
    result: dict[str, float] = {}
    for quantity, layers in values.items():
        for layer, heads in layers.items():
            finite = [float(value) for value in heads if math.isfinite(value)]
            if not finite:
                continue
            result[scalar_tag(quantity, layer, prefix=prefix)] = math.fsum(finite) / len(finite)
            if per_head:
                for head, value in enumerate(heads):
                    if math.isfinite(value):
                        result[scalar_tag(quantity, layer, head, prefix)] = float(value)
    return result


def warning_scalars(counts: Mapping[str, int], prefix: str = "attn") -> dict[str, float]:
    """Warnings as scalars: heads under each rule's alarm.

    Args:
        counts: ``{rule: number of heads}``, as `AlertEngine.counts` returns it.
        prefix: First part of each key.

    Example:
        >>> warning_scalars({"entropy_rise": 5})
        {'attn/warnings/entropy_rise': 5.0}
    """
    return {warning_tag(rule, prefix): float(count) for rule, count in counts.items()}


# --- TensorBoard's custom-scalars page -------------------------------------------------------------------------------

_LEAD = (  # one chart each on the first page; of the quantities with an argument, the one nearest to the number
    ("entropy_normalized", None), ("separability", 10.0), ("score_spread", None), ("score_max", None),
    ("jacobian", 1.0), ("distance", 10.0), ("active_share", None), ("first_key_weight", None),
)  # fmt: skip


def _nearest(quantities: Sequence[str], name: str, target: float | None) -> str | None:
    """The quantity called ``name`` whose argument is nearest to ``target`` (by ratio)."""
    found: list[tuple[float, str]] = []
    for quantity in quantities:
        own, _, argument = quantity.partition("@")
        if own != name:
            continue
        try:
            number = float(argument) if target is not None else 1.0
            found.append((abs(math.log(number / (target or 1.0))), quantity))
        except ValueError:
            continue
    return min(found)[1] if found else None


def custom_scalars_layout(
    quantities: Iterable[str], layers: Iterable[int] | None = None, prefix: str = "attn"
) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's "Custom Scalars" page, arranged: one chart per quantity, one curve per layer.

    The first category, "Attention", holds one chart per family (of several N the one nearest 10, of several
    temperatures the model's own) and the warnings; a second one holds the rest.

    Args:
        quantities: Names of what is logged, e.g. ``snapshot.values``.
        layers: The layers whose curves are shown; None = all, also those that appear later.
        prefix: First part of the logged keys.

    Returns:
        What ``SummaryWriter.add_custom_scalars`` takes. Call that once per writer.

    Example:
        >>> custom_scalars_layout(["entropy_normalized"])["Attention"]["Normalised entropy (H / log n)"]
        ['Multiline', ['^attn/entropy/normalized/layer_[0-9]+$']]
    """
    names = list(dict.fromkeys(quantities))
    which = "[0-9]+"
    if layers is not None:
        which = "(?:" + "|".join(f"{layer:02d}" for layer in sorted(set(layers))) + ")"

    def chart(quantity: str) -> list[Any]:
        return ["Multiline", [f"^{re.escape(prefix)}/{re.escape(_path(quantity))}/layer_{which}$"]]

    lead = [found for name, target in _LEAD if (found := _nearest(names, name, target)) is not None]
    first = {title(quantity): chart(quantity) for quantity in lead}
    first["Warnings (heads under alarm)"] = ["Multiline", [f"^{re.escape(prefix)}/warnings/[^/]+$"]]
    order = {quantity.name: place for place, quantity in enumerate(QUANTITIES)}
    rest = sorted(
        (name for name in names if name not in lead), key=lambda name: order.get(name.partition("@")[0], len(order))
    )
    layout = {"Attention": first}
    if rest:
        layout["Attention: more"] = {title(quantity): chart(quantity) for quantity in rest}
    return layout


# --- Images ----------------------------------------------------------------------------------------------------------

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


def _number(value: float) -> str:
    """Three significant digits, as short as they can be written."""
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")


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
    ends = [_number(low)] if flat else [_number(low), _number((low + high) / 2), _number(high)]
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
            _put(canvas, _text(_number(float(grid[row, column]))), x, y, "centre", _PAPER if dark else _INK)

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
    known = _BY_NAME.get(quantity.partition("@")[0])
    vmin, vmax = known.limits if known else (None, None)
    return heads_image(values, title=title(quantity), vmin=vmin, vmax=vmax)


# --- Text ------------------------------------------------------------------------------------------------------------


class _Evidence(Protocol):
    """The figures of one quantity behind an alert."""

    @property
    def label(self) -> str: ...
    @property
    def heads(self) -> Mapping[int, tuple[int, ...]]: ...
    @property
    def figures(self) -> Mapping[int, tuple[float, ...]]: ...
    @property
    def baselines(self) -> Mapping[int, tuple[float, ...]]: ...
    @property
    def limits(self) -> Mapping[int, tuple[float, ...]]: ...


class _Alert(Protocol):
    """What `alert_markdown` reads of an alert (this module does not import `attnmon.alerts`)."""

    @property
    def step(self) -> int: ...
    @property
    def title(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def remedy(self) -> str: ...
    @property
    def layers(self) -> Mapping[int, str]: ...
    @property
    def heads(self) -> Mapping[int, tuple[int, ...]]: ...
    @property
    def evidence(self) -> Sequence[_Evidence]: ...


def alert_markdown(alert: _Alert, *, max_rows: int = 64) -> str:
    """An alert as Markdown, for ``SummaryWriter.add_text``: the message, one table row per head, the remedy.

    Args:
        alert: An `attnmon.alerts.Alert`.
        max_rows: Rows of the table; what is left out is counted below it.

    Returns:
        Markdown text.
    """

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    def number(value: float) -> str:
        return _number(value) if math.isfinite(value) else ""

    rows = [
        (
            str(layer),
            f"`{cell(alert.layers.get(layer, '') or '-')}`",
            str(head),
            cell(part.label),
            number(part.figures[layer][place]),
            number(part.baselines[layer][place]),
            number(part.limits[layer][place]),
        )
        for part in alert.evidence
        for layer, heads in part.heads.items()
        for place, head in enumerate(heads)
    ]
    lines = [f"**{alert.severity}: {alert.title}** (step {alert.step})", "", cell(alert.summary), ""]
    lines += [f"**Remedy:** {cell(alert.remedy)}.", ""]
    if rows:
        lines += ["| layer | module | head | quantity | figure | baseline | limit |"]
        lines += ["|---:|:---|---:|:---|---:|---:|---:|"]
        lines += [f"| {' | '.join(row)} |" for row in rows[:max_rows]]
        if len(rows) > max_rows:
            lines += ["", f"and {len(rows) - max_rows} more rows"]
    return "\n".join(lines)
