"""TensorBoard's "Custom Scalars" page, arranged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from attnmon.dashboard.names import QUANTITIES, path_of, title

__all__ = ["custom_scalars_layout"]

_LEAD = (  # one chart each on the first page; of the quantities with an argument, the one nearest to the number
    ("entropy_normalized", None), ("separability", 10.0), ("score_spread", None), ("score_max", None),
    ("jacobian", 1.0), ("distance", 10.0), ("active_share", None), ("first_key_weight", None),
)  # fmt: skip


_COST = {
    "Share of the step and of the run": "share_of_[a-z]+",
    "Seconds of a sample": "seconds",
    "Bytes written": "bytes_written",
    "Steps between samples": "every_n_steps",
}


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
    temperatures the model's own) and the warnings; a second one holds the rest, a third what the monitor costs.

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
        return ["Multiline", [f"^{re.escape(prefix)}/{re.escape(path_of(quantity))}/layer_{which}$"]]

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
    layout["Cost of the monitor"] = {
        name: ["Multiline", [f"^{re.escape(prefix)}/monitor/{pattern}$"]] for name, pattern in _COST.items()
    }
    return layout
