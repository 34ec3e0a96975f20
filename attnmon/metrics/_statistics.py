"""All quantities of a top-N selection in one pass, for whoever wants several of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from attnmon.metrics._blocks import _over_blocks
from attnmon.metrics._checks import _check_top_n
from attnmon.metrics._selection import _Block
from attnmon.metrics.bounds import SeparabilityBounds, separability_bounds
from attnmon.metrics.distance import TopNDistances, _distance_update
from attnmon.metrics.separability import Separability, _separability_update

__all__ = ["SELECTION_FIELDS", "selection_statistics"]

SELECTION_FIELDS = (*Separability._fields, *TopNDistances._fields, *SeparabilityBounds._fields)


def selection_statistics(
    weights: Tensor,
    vectors: Tensor,
    top_n: int | Iterable[int],
    *,
    mask: Tensor | None = None,
    want: Iterable[str] = ("ratio", "distance", "expected_paper"),
) -> dict[str, Tensor]:
    """Compute several fields of `top_n_distance`, `separability` and `separability_bounds` from one selection.

    Args:
        weights: ``(..., n)``, float. Attention weights; ``(batch, heads, rows, n)`` in a training step.
        vectors: ``(..., n, d)``, float, broadcastable over the rows: ``(batch, heads, 1, n, d)``.
        top_n: N, or several.
        mask: ``(..., n)``, bool, True = visible, or None.
        want: Names out of `SELECTION_FIELDS`; only these are computed.

    Returns:
        Name to tensor ``(...)`` or ``(..., len(top_n))``, with the meaning, unit and NaN rule of the functions above.

    Raises:
        TypeError: As the functions above.
        ValueError: As the functions above, or if a name in `want` is unknown.
    """
    names = tuple(dict.fromkeys(want))
    unknown = [name for name in names if name not in SELECTION_FIELDS]
    if unknown:
        raise ValueError(f"Expected `want` to hold names out of {SELECTION_FIELDS}, but got {unknown[0]!r}.")

    sizes, single = _check_top_n(top_n)
    chosen = sizes[0] if single else sizes
    plain = [name for name in names if name not in SeparabilityBounds._fields]

    def fields(block: _Block) -> dict[str, Tensor]:
        # Separability first: the distances overwrite the arrays that it compares.
        return _separability_update(block, plain) | _distance_update(block, plain)

    out = _over_blocks(weights, vectors, chosen, mask, fields) if plain else {}
    if len(plain) < len(names):
        limits = separability_bounds(weights, vectors, chosen, mask=mask)._asdict()
        out |= {name: limits[name] for name in names if name in limits}
    return out
