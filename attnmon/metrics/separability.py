"""Which of the selected keys can be told apart from the unselected ones, and the bounds on their share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmon.metrics._base import _HeadMean
from attnmon.metrics._blocks import _over_blocks
from attnmon.metrics._checks import _check_top_n
from attnmon.metrics._group import _block_elements
from attnmon.metrics._pairs import EXACT_COMPONENTS, UNIT, _add, _exact_product, _multiply, _Pair, _subtract, _sum
from attnmon.metrics._selection import _Block, _unit_roundoff

__all__ = ["Separability", "SeparabilityRatio", "separability"]


_EXPONENT = 500  # of the power of two that rows are scaled by
_FEW = 8  # contenders that are always worth it, whatever their dimension


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

    Decided on ``e`` where two values differ by more than their rounding; other rows are decided by `_counts_again`.
    """
    e, least = block.selected_excess, block.least_excess  # (G, R, S), (G, R, K)
    # Rounding of e: of a dot product over d components and of a sum of N terms, in terms of the lengths involved.
    d = block.group.vectors.shape[-1]
    unit = _unit_roundoff(e.dtype) * (d + 16 + block.sizes)
    twice = 2 * block.reach
    lengths = block.of_ranks(block.lengths)
    slack = (lengths + block.of_n(twice)).mul_(lengths).mul_(block.of_n(unit))
    longest = block.next_weights * block.group.largest[..., None]
    slack_least = unit * longest * (longest + twice)
    gap = e - block.of_n(least)
    # Below the smallest normal number a product of lengths says nothing; where a length is 0, and not only as a product
    # that float32 can't hold, so is all it enters.
    tiny = torch.finfo(e.dtype).tiny
    some = _holds(torch.gt, torch.minimum(block.ranked_norms, block.top_weights), 0)
    others = _holds(torch.gt, torch.minimum(block.next_weights, block.group.largest[..., None]), 0)
    least_doubt = torch.maximum(block.of_ranks(some), block.of_n(others)).mul_(tiny)
    doubt = torch.maximum(slack + block.of_n(slack_least), least_doubt)
    # Where the arithmetic is float64 and the data float32, what rounding can't tell apart is equal.
    nearer = block.count_entries(_holds(torch.lt, gap, 0 if block.group.direct else -doubt))
    within = None
    open_ = _holds(torch.lt, gap.abs(), doubt)
    unsure = block.count_entries(open_) > 0
    if both:
        tops, slacks = [], []
        for apart, wide in zip(block.entries(e), block.entries(slack), strict=True):
            top, place = apart.max(-1, keepdim=True)
            tops.append(top)
            slacks.append(torch.maximum((apart + wide).amax(-1, keepdim=True) - top, wide.gather(-1, place)))
        top, slack_top = torch.cat(tops, -1), torch.cat(slacks, -1) + slack_least
        if not block.group.direct:
            within = _count(block.excess <= (top + slack_top)[..., None], e)
        else:
            within = _count(block.excess <= top[..., None], e)
            close = _count(block.excess < (top + slack_top)[..., None], e)
            close -= _count(block.excess <= (top - slack_top)[..., None], e)
            unsure |= (close > 0) & (slack_top > 0)
    unsure &= block.defined
    if block.group.direct and bool(unsure.any()):
        if within is None and e.dtype == torch.float32:
            unsure = _settle_contenders(block, nearer, unsure, open_, slack_least.clamp_min(tiny))
        for index in _by_group(unsure):
            again = _counts_again(block, index, both)
            nearer[index] = again[0].to(e.dtype)
            if within is not None:
                within[index] = again[1].to(e.dtype)
    return nearer, within


def _holds(compare: Callable[..., Tensor], this: Tensor, that: Tensor | float) -> Tensor:
    """A comparison as 1.0 and 0.0: an array of bools takes several times as long to make, and again to count."""
    holds: Tensor = compare(this, that, out=torch.empty_like(this))
    return holds


def _settle_contenders(block: _Block, nearer: Tensor, unsure: Tensor, open_: Tensor, slack: Tensor) -> Tensor:
    """Decide `unsure` rows in float64, on those keys alone that float32 can't tell apart.

    Args:
        block: The rows, in float32.
        nearer: (G, R, K) counts, with `open_` keys on the wrong side perhaps; set right where that can be done.
        unsure: (G, R, K) bool.
        open_: (G, R, S), 1.0 where a selected key may be on either side.
        slack: (G, R, K), what rounding can do to ``e`` of an unselected key.

    Returns:
        (G, R, K) bool, the rows that float64 leaves undecided, or that have too many contenders for it to be quick.
    """
    rows = unsure.nonzero()
    index = g, r, k = rows.unbind(-1)
    # Places in arrays whose leading dimensions are (G, R) and (G, R, K): one index is looked up faster than several.
    per_row = g * unsure.shape[1] + r
    per_n = per_row * unsure.shape[2] + k
    n, d = block.n, block.group.vectors.shape[-1]

    def take(values: Tensor, at: Tensor, dims: int) -> Tensor:
        return values.flatten(0, dims - 1).index_select(0, at)

    # The entries of the rows' own N, (m, max N); what is behind them is masked.
    member = block.member.index_select(0, k)
    entry = (block.of_sizes.starts[k, None] + torch.arange(member.shape[-1], device=rows.device)).clamp_max(
        open_.shape[-1] - 1
    )
    e = take(block.selected_excess, per_row, 2).gather(-1, entry)
    open_ = (take(open_, per_row, 2).gather(-1, entry) * member).bool()
    least = take(block.least_excess, per_n, 3)[:, None]
    rivals = take(block.excess, per_n, 3) <= least + 2 * take(slack, per_n, 3)[:, None]
    own, rank = open_.nonzero().unbind(-1)
    row, other = rivals.nonzero().unbind(-1)
    if (len(own) + len(row)) * d > _block_elements(e.device, torch.float64):
        return unsure
    at = torch.cat([own, row])
    most = block.order.shape[-1]
    mine = block.order.flatten().take(per_row.index_select(0, own) * most + rank)
    key = torch.cat([mine, other])
    a = block.weights.flatten().take(per_row.index_select(0, at) * n + key).double()
    x = block.group.vectors[g.index_select(0, at), key].double()
    points = block.exact_points(index, False).index_select(0, at)
    square = (x * x).sum(-1)
    exact = a * (a * square - 2 * (x * points).sum(-1))
    length = a * square.sqrt()
    reach = take(block.reach, per_n, 3).index_select(0, at).double() * (1 + 2.0**-16)  # it was rounded itself
    unit = _unit_roundoff(torch.float64) * (d + 16 + max(block.top_n))
    doubt = unit * length * (length + 2 * reach)
    below, above = exact - doubt, exact + doubt
    low, high = torch.full((2, len(rows)), torch.inf, dtype=exact.dtype, device=e.device)
    low.scatter_reduce_(0, row, below[len(own) :], "amin")
    high.scatter_reduce_(0, row, above[len(own) :], "amin")
    nearest = above[: len(own)] < low.index_select(0, own)
    undecided = ~nearest & (below[: len(own)] < high.index_select(0, own))
    certain = _count((e < least) & member.bool() & ~open_, e)
    nearer[index] = certain.index_add_(0, own, nearest.to(e.dtype))
    left = torch.zeros_like(unsure)
    left.view(-1)[per_n.index_select(0, own[undecided])] = True
    return left


def _count(holds: Tensor, like: Tensor) -> Tensor:
    """How many are True along the last dimension; counting floats is several times as fast as counting bools."""
    return holds.to(like.dtype).sum(-1)


def _by_group(chosen: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Indices (g, r, k) of the chosen rows, one group at a time."""
    rows = chosen.nonzero()
    for part in rows.split(rows[:, 0].unique_consecutive(return_counts=True)[1].tolist()):
        yield part[:, 0], part[:, 1], part[:, 2]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of one group in float64, scaled so that the longest ``a_j x_j`` is about 1.

    Attributes:
        weights: (m, n).
        vectors: (n, d).
        chosen: (m, n) bool, the selected keys; `outside` the visible others.
        reach: (m, 1), ``sum_{I_N} a_j ||x_j||``.
        sizes: (m, 1), N.
    """

    weights: Tensor
    vectors: Tensor
    lengths: Tensor
    chosen: Tensor
    outside: Tensor
    reach: Tensor
    sizes: Tensor


def _rows_of(block: _Block, index: tuple[Tensor, Tensor, Tensor]) -> _Rows:
    g, r, k = index
    weights = block.weights[g, r].double()
    chosen = torch.zeros_like(weights, dtype=torch.bool)
    chosen.scatter_(-1, block.order[g, r], block.member[k].bool())
    outside = ~chosen if block.visible is None else ~chosen & block.visible[g, r]
    vectors = block.group.double[g[0]]
    norms = torch.linalg.vector_norm(vectors, dim=-1)
    longest = (weights * norms).amax(-1, keepdim=True)
    exponent = -torch.frexp(longest).exponent.clamp(-_EXPONENT, _EXPONENT)
    weights = torch.ldexp(weights, exponent)  # by a power of two: exact
    lengths = weights * norms
    reach = (lengths * chosen).sum(-1, keepdim=True)
    return _Rows(weights, vectors, lengths, chosen, outside, reach, block.sizes[k].double()[:, None])


def _counts_again(block: _Block, index: tuple[Tensor, Tensor, Tensor], both: bool) -> tuple[Tensor, Tensor]:
    """`_counts` of some rows of one group: in float64, and where that leaves keys in doubt, in pairs of float64."""
    rows = _rows_of(block, index)
    a, x = rows.weights, rows.vectors
    e = a * (a * (x * x).sum(-1) - 2 * ((a * rows.chosen) @ x) @ x.mT)
    unit = _unit_roundoff(torch.float64) * (x.shape[-1] + 16 + rows.sizes)
    slack = unit * rows.lengths * (rows.lengths + 2 * rows.reach)
    low, high = e - slack, e + slack
    least, most = (torch.where(rows.outside, end, torch.inf).amin(-1, keepdim=True) for end in (low, high))
    nearer = rows.chosen & (high < least)
    open_ = rows.chosen & ~nearer & (low < most)
    nearer = nearer | _settle(rows, open_, rows.outside & (low <= most), 1.0)
    if not both:
        return nearer.sum(-1), nearer.sum(-1)
    least, most = (torch.where(rows.chosen, end, -torch.inf).amax(-1, keepdim=True) for end in (low, high))
    beyond = rows.outside & (low > most)
    open_ = rows.outside & ~beyond & (high > least)
    beyond = beyond | _settle(rows, open_, rows.chosen & (high >= least), -1.0)
    return nearer.sum(-1), (rows.outside & ~beyond).sum(-1)


def _settle(rows: _Rows, open_: Tensor, rivals: Tensor, sign: float) -> Tensor:
    """Which `open_` keys are certainly nearer than the nearest of the `rivals`; farther for sign -1. (m, n) bool.

    What is equal to some 30 digits is equal. So is what float64 can't tell apart in a row whose contenders have over
    `EXACT_COMPONENTS` components: crowds of keys that all but coincide are not worth the time.
    """
    out = torch.zeros_like(open_)
    d = rows.vectors.shape[-1]
    contenders = (open_ | rivals).sum(-1)
    which = (open_.any(-1) & (contenders <= max(_FEW, EXACT_COMPONENTS // d))).nonzero().squeeze(-1)
    if not len(which):
        return out
    width = int(contenders[which].amax())
    per_row = (width + int(rows.sizes[which].amax())) * d
    for part in which.split(max(1, _block_elements(open_.device, torch.float64) // (8 * per_row))):
        keys = (open_ | rivals)[part].to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :width]
        here = rivals[part].gather(-1, keys)
        decided = _decide(rows, part, keys, here, sign) & open_[part].gather(-1, keys)
        out[part] = torch.zeros_like(open_[part]).scatter(-1, keys, decided)
    return out


def _decide(rows: _Rows, part: Tensor, keys: Tensor, rivals: Tensor, sign: float) -> Tensor:
    """Whether each of `keys` (m, c) is nearer to s than the nearest one marked in `rivals`; farther for sign -1."""
    a, lengths = rows.weights[part], rows.lengths[part].gather(-1, keys)
    y = _exact_product(a.gather(-1, keys)[..., None], rows.vectors[keys])  # (m, c, d)
    s = _point(rows, part)
    reach = rows.reach[part]
    difference = torch.zeros_like(lengths)
    pivot = rivals.to(torch.uint8).argmax(-1, keepdim=True)
    for _ in range(3):  # the nearest relative to any, to the nearest so found, and once more
        here = _Pair(*(p.gather(1, pivot[..., None].expand(-1, 1, p.shape[-1])) for p in y))
        apart = _subtract(y, here)
        middle = _subtract(_add(y, here), _Pair(2 * s.high[:, None], 2 * s.low[:, None]))
        difference = _sum(_multiply(apart, middle), -1).high  # D^2 less that of the pivot
        pivot = torch.where(rivals, sign * difference, torch.inf).argmin(-1, keepdim=True)
    own = lengths + lengths.gather(-1, pivot)
    wide, far = torch.linalg.vector_norm(apart.high, dim=-1), torch.linalg.vector_norm(middle.high, dim=-1)
    operations = rows.vectors.shape[-1] + rows.sizes[part] + 16
    doubt = UNIT * operations * (far * own + wide * (own + 2 * reach) + wide * far)
    decided: Tensor = sign * difference < -doubt
    return decided


def _point(rows: _Rows, part: Tensor) -> _Pair:
    """``s_N`` in pairs, (m, d)."""
    most = int(rows.sizes[part].amax())
    keys = rows.chosen[part].to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    weights = (rows.weights[part] * rows.chosen[part]).gather(-1, keys)
    return _sum(_exact_product(weights[..., None], rows.vectors[keys]), 1)


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
