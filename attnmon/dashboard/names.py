"""The table of quantities: how each figure is called, logged, drawn and read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "BY_NAME",
    "QUANTITIES",
    "Quantity",
    "cost_scalars",
    "counted",
    "image_tag",
    "path_of",
    "plural",
    "scalar_tag",
    "scalars",
    "short_number",
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

BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


def _safe(text: str) -> str:
    """Only characters that every logger takes in a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", text).strip("_") or "_"


def plural(count: int, word: str) -> str:
    """The word for so many.

    Example:
        >>> plural(1, "layer"), plural(2, "layer")
        ('layer', 'layers')
    """
    return word if count == 1 else f"{word}s"


def counted(count: int, word: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "layer"), counted(2, "layer")
        ('1 layer', '2 layers')
    """
    return f"{count} {plural(count, word)}"


def path_of(quantity: str) -> str:
    """``separability@10`` -> ``separability/top_10``."""
    name, _, argument = quantity.partition("@")
    known = BY_NAME.get(name)
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
    tag = f"{prefix}/{path_of(quantity)}/layer_{layer:02d}"
    return tag if head is None else f"{tag}/head_{head:02d}"


def image_tag(quantity: str, prefix: str = "attn") -> str:
    """The tag of a quantity's layer x head image.

    Example:
        >>> image_tag("entropy_normalized")
        'attn/entropy/normalized/heads'
    """
    return f"{prefix}/{path_of(quantity)}/heads"


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
    known = BY_NAME.get(name)
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


def cost_scalars(cost: Mapping[str, float], prefix: str = "attn") -> dict[str, float]:
    """What the monitor costs, as scalars; what is not known (NaN) is absent.

    Args:
        cost: Name to number.
        prefix: First part of each key.

    Example:
        >>> cost_scalars({"seconds": 0.4, "share_of_step": float("nan")})
        {'attn/monitor/seconds': 0.4}
    """
    return {f"{prefix}/monitor/{name}": float(value) for name, value in cost.items() if math.isfinite(value)}


def short_number(value: float) -> str:
    """Three significant digits, as short as they can be written."""
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")
