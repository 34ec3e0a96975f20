"""Which of the selected keys can be told apart from the unselected ones, and the bounds on their share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmon.metrics._base import _HeadMean
from attnmon.metrics._blocks import _over_blocks
from attnmon.metrics._checks import _check_top_n
from attnmon.metrics._selection import _Block, _block_elements, _unit_roundoff

__all__ = ["Separability", "SeparabilityRatio", "separability"]


class Separability(NamedTuple):
    """Share of distinguishable keys, the radius it is measured by, and retrieval scores; each ``(..., len(top_n))``."""

    ratio: Tensor
    radius: Tensor
    precision: Tensor
    f_score: Tensor


def _separability_update(block: _Block, want: Iterable[str]) -> dict[str, Tensor]:
    """The wanted fields of `Separability` for one block, each (G, R, K)."""
    names = set(want)
    out: dict[str, Tensor] = {}
    if names & {"ratio", "precision", "f_score"}:
        both = bool(names & {"precision", "f_score"})
        nearer, within = _counts(block, both)
        recall = nearer / block.sizes
        if "ratio" in names:
            out["ratio"] = recall
        if within is not None:
            precision = block.sizes / (block.sizes + within)
            out["precision"] = precision
            out["f_score"] = 2 * precision * recall / (precision + recall)  # precision is never 0
    if "radius" in names:  # last: it overwrites the arrays that the counts are made from
        out["radius"] = block.norm_sum[1]
    return {name: value for name, value in out.items() if name in names}


def _counts(block: _Block, both: bool) -> tuple[Tensor, Tensor | None]:
    """Selected keys nearer to s_N than every unselected key, and unselected ones no farther than the farthest selected.

    Decided on ``e`` where two values differ by more than their rounding; other rows are decided again by `_again`.
    """
    e, least = block.selected_excess, block.least_excess  # (G, R, K, max N), (G, R, K)
    # Rounding of e: of a dot product over d components and of a sum of N terms, in terms of the lengths involved.
    d = block.group.vectors.shape[-1]
    unit = _unit_roundoff(e.dtype) * (d + 16 + block.sizes)
    lengths = block.group.norms[:, None].expand_as(block.weights).gather(-1, block.order) * block.top_weights
    slack = unit[:, None] * lengths[:, :, None] * (lengths[:, :, None] + 2 * block.reach[..., None])
    longest = block.next_weights * block.group.largest[..., None]
    slack_least = unit * longest * (longest + 2 * block.reach)
    gap = e - least[..., None]
    doubt = slack + slack_least[..., None]
    member = block.member.bool()
    if not block.group.direct:
        # The arithmetic is float64 and the data float32: what rounding can't tell apart here is equal.
        nearer = _count((gap < -doubt) & member, e)
    else:
        nearer = _count((gap < 0) & member, e)
    within = None
    unsure = ((gap.abs() < doubt) & member).any(-1)
    if both:
        farthest = e.where(member, -torch.inf)
        top = farthest.amax(-1)
        own = slack.gather(-1, farthest.argmax(-1, keepdim=True)).squeeze(-1)
        slack_top = torch.maximum((farthest + slack).amax(-1) - top, own) + slack_least
        if not block.group.direct:
            within = _count(block.excess <= (top + slack_top)[..., None], e)
        else:
            within = _count(block.excess <= top[..., None], e)
            close = _count(block.excess < (top + slack_top)[..., None], e)
            close -= _count(block.excess <= (top - slack_top)[..., None], e)
            unsure |= (close > 0) & (slack_top > 0)
    unsure &= block.defined
    if block.group.direct and bool(unsure.any()):
        decide = _by_products if e.dtype == torch.float32 else _by_differences
        for index in _by_group(unsure):
            again = decide(block, index, both)
            nearer[index] = again[0].to(e.dtype)
            if within is not None:
                within[index] = again[1].to(e.dtype)
    return nearer, within


def _count(holds: Tensor, like: Tensor) -> Tensor:
    """How many are True along the last dimension; counting floats is several times as fast as counting bools."""
    return holds.to(like.dtype).sum(-1)


def _by_group(chosen: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Indices (g, r, k) of the chosen rows, one group at a time."""
    rows = chosen.nonzero()
    for part in rows.split(rows[:, 0].unique_consecutive(return_counts=True)[1].tolist()):
        yield part[:, 0], part[:, 1], part[:, 2]


def _rows_of(block: _Block, index: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights (m, n), vectors (n, d), points (m, d) in float64, and the selected keys (m, n), of one group's rows."""
    g, r, k = index
    weights = block.weights[g, r].double()
    chosen = torch.zeros_like(weights, dtype=torch.bool)
    chosen.scatter_(-1, block.order[g, r], block.member[k].bool())
    vectors = block.group.double[g[0]]
    return weights, vectors, (weights * chosen) @ vectors, chosen


def _by_products(block: _Block, index: tuple[Tensor, Tensor, Tensor], both: bool) -> tuple[Tensor, Tensor]:
    """Counts for float32 rows: `_counts` in float64, where what rounding can't tell apart is equal."""
    a, x, s, chosen = _rows_of(block, index)
    squares = (x * x).sum(-1)
    lengths = a * squares.sqrt()
    e = a * (a * squares - 2 * s @ x.mT)
    unit = _unit_roundoff(torch.float64) * (x.shape[-1] + 16 + block.sizes[index[2]].double())
    reach = (lengths * chosen).sum(-1)
    slack = unit[:, None] * lengths * (lengths + 2 * reach[:, None])
    outside = ~chosen if block.visible is None else ~chosen & block.visible[index[:2]]
    # the same comparison for all keys: certain when the intervals e +- slack are apart
    bar = torch.where(outside, e - slack, torch.inf).amin(-1, keepdim=True)
    nearer = (chosen & (e + slack < bar)).sum(-1)
    top = torch.where(chosen, e + slack, -torch.inf).amax(-1, keepdim=True)
    within = (outside & (e - slack <= top)).sum(-1)
    return nearer, within


def _by_differences(block: _Block, index: tuple[Tensor, Tensor, Tensor], both: bool) -> tuple[Tensor, Tensor]:
    """Counts for float64 rows, by the sign of ``(y_i - y_j) . (y_i + y_j - 2 s)`` with ``y_i - y_j`` taken exactly."""
    a, x, s, chosen = _rows_of(block, index)
    outside = ~chosen if block.visible is None else ~chosen & block.visible[index[:2]]
    squares = (x * x).sum(-1)
    nearer, within = [], []
    step = max(1, _block_elements(x.device, x.dtype) // x.numel())
    for at in range(0, a.shape[0], step):
        rows = slice(at, at + step)
        e = a[rows] * (a[rows] * squares - 2 * s[rows] @ x.mT)
        bar = _extreme(a[rows], x, s[rows], torch.where(outside[rows], e, torch.inf), outside[rows])
        nearer.append((chosen[rows] & (_relative(a[rows], x, s[rows], bar) < 0)).sum(-1))
        if both:
            top = _extreme(a[rows], x, s[rows], torch.where(chosen[rows], -e, torch.inf), chosen[rows], -1.0)
            within.append((outside[rows] & (_relative(a[rows], x, s[rows], top) <= 0)).sum(-1))
    return torch.cat(nearer), torch.cat(within) if both else torch.cat(nearer)


def _extreme(a: Tensor, x: Tensor, s: Tensor, rough: Tensor, among: Tensor, sign: float = 1.0) -> Tensor:
    """Index (m, 1) of the nearest key (farthest for sign -1), from a rough choice that the differences improve."""
    pivot = rough.argmin(-1, keepdim=True)
    fine = torch.where(among, sign * _relative(a, x, s, pivot), torch.inf)
    return fine.argmin(-1, keepdim=True)


def _relative(a: Tensor, x: Tensor, s: Tensor, pivot: Tensor) -> Tensor:
    """``D_i^2 - D_p^2`` of every key i to the pivot p of its row, (m, n), exactly 0 for identical keys."""
    ap, xp = a.gather(-1, pivot), x[pivot.squeeze(-1)]  # (m, 1), (m, d)
    # a_i x_i - a_p x_p, without the rounding of the two products
    difference = a[..., None] * (x - xp[:, None]) + (a - ap)[..., None] * xp[:, None]
    middle = a[..., None] * x + (ap * xp - 2 * s)[:, None]
    return (difference * middle).sum(-1)


def separability(
    weights: Tensor, vectors: Tensor, top_n: int | Iterable[int], *, mask: Tensor | None = None
) -> Separability:
    r"""Measure how many of the N selected keys can be told apart from the keys left out.

    With ``I_N`` the N keys of largest weight, ``s_N`` their weighted sum and ``D_i = || a_i x_i - s_N ||``:

    - ``radius`` ``r = min_{i not in I_N} D_i`` (eq. 12);
    - ``ratio`` ``N_s / N``, the share of the selected keys with ``D_i < r``;
    - ``precision`` ``N / (N + #{j not in I_N : D_j <= max_{i in I_N} D_i})``;
    - ``f_score`` the harmonic mean of ``ratio`` (which is the recall) and ``precision``.

    The comparisons are exact: rows in which one key dominates, and keys that nearly coincide, are decided by the sign
    of ``(y_i - y_j) . (y_i + y_j - 2 s_N)`` rather than by distances; identical keys are never told apart.

    Source: eq. 12 and Algorithm 4 of arXiv 2508.17821; precision and f_score: "Retrieval Capacity of Self-Attention
    Under Competition" (2026).

    Reading: a falling ``ratio`` is an early sign that a head saturates; the paper calls 0.70-0.80 saturated.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        vectors: ``(..., n, d)``, float, broadcastable over the rows: ``(batch, heads, 1, n, d)`` for rows that share
            their keys, which is also the fast form.
        top_n: N, or several.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        Four tensors ``(...)`` or ``(..., len(top_n))``: shares in ``[0, 1]``, and ``radius``, at least 0, in the unit
        of the vectors. NaN where a row sees N keys or fewer, or is not finite. No gradient.

    Raises:
        TypeError: If a tensor is not floating-point, `mask` is not bool or `top_n` is not integer.
        ValueError: If the shapes do not fit, `top_n` is below 1, or ``top_n >= n``.

    Example:
        >>> import torch
        >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> separability(torch.tensor([0.6, 0.3, 0.1]), vectors, (1, 2)).ratio
        tensor([1., 1.])
    """
    names = Separability._fields
    values = _over_blocks(weights, vectors, top_n, mask, lambda block: _separability_update(block, names))
    return Separability(**values)


class SeparabilityRatio(_HeadMean):
    r"""Mean share of distinguishable keys among the top N, of the rows of each head.

    The mean over rows of ``N_s / N``, see `separability`. Rows that see at most N keys are left out for that N and
    counted.

    Source: eq. 12 and Algorithm 4 of arXiv 2508.17821.

    Reading: see `separability`.

    Args:
        num_heads: Number of heads, dimension 1 of what `update` is given.
        top_n: N, or several.
        kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        TypeError: If `num_heads` or `top_n` is not integer.
        ValueError: If `num_heads` or `top_n` is below 1.

    Example:
        >>> import torch
        >>> metric = SeparabilityRatio(num_heads=1, top_n=(1, 2))
        >>> metric.update(torch.tensor([[[[0.6, 0.3, 0.1]]]]), torch.eye(3)[None, None])
        >>> metric.compute()
        tensor([[1., 1.]], dtype=torch.float64)
    """

    def __init__(self, num_heads: int, top_n: int | Iterable[int] = (5, 10), **kwargs: Any) -> None:
        sizes, single = _check_top_n(top_n)
        super().__init__(num_heads, None if single else len(sizes), **kwargs)
        self.top_n = sizes

    def update(self, weights: Tensor, vectors: Tensor, mask: Tensor | None = None) -> None:
        """Add rows.

        Args:
            weights: ``(batch, num_heads, rows, n)``, float.
            vectors: ``(batch, num_heads, n, d)``, float, key heads expanded to the query heads.
            mask: Broadcastable to `weights`, bool, True = visible, or None.
        """
        self._check_rows("weights", weights)
        self._check_vectors(vectors)
        values = _over_blocks(
            weights, vectors[:, :, None], self.top_n, mask, lambda block: _separability_update(block, ("ratio",))
        )
        self._add(values["ratio"])
