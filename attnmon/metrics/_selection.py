r"""What top-N distance and separability share: the selected keys, their sums, and distances by matrix products.

All of it is computed for *groups*: ``weights`` (G, R, n) and ``vectors`` (G, n, d), the R rows of a group sharing its
vectors. Every distance here has the form ``|| c_i x_i - p ||`` with a coefficient per key and a point per row, and

    ``|| c_i x_i - p ||^2 = c_i^2 ||x_i||^2 - 2 c_i (x_i . p) + ||p||^2``

needs the points in a matrix product only, never an array of (R, n, d). Where the result is small against its terms
that expansion loses digits, so those entries are computed again from the differences, in float64 (`_norm_sum`). On
CUDA, finding them would make the host wait; there float32 rows are computed in float64 throughout instead, whose
expansion is right to about 3e-8 of its terms even at coincidence.

Which selected keys are nearer to ``s_N`` than every unselected one (`separability`) is decided on
``e_i = a_i (a_i ||x_i||^2 - 2 x_i . s_N)``, that is ``D_i^2 - ||s_N||^2`` without the cancellation, wherever two
values of it differ by more than rounding can explain; where they don't, that row is decided again in float64, and
for float64 rows from the differences themselves.

`attnmon.metrics._blocks` cuts any batch into the blocks that are handled here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from attnmon.masks import distinct
from attnmon.metrics._checks import _zeroed
from attnmon.metrics._group import _block_elements, _Group
from attnmon.metrics._pairs import EXACT_COMPONENTS, _exact_product, _Pair, _subtract, _sum

__all__: list[str] = []

# A squared norm below this share of ||p||^2 (about 1e-2 of all its terms) is computed again from the differences.
_CANCELLED = 2.5e-2
# Below this share the difference itself is what the rounding of ||p|| has left.
_LOST = 2.0**-40
# Where the selected keys cancel, ||s_N|| is small against what it was summed from: this share of the squared sum of
# lengths takes its place in the two comparisons above.
_SUMMED = 4e-3
# Up to this many selected keys are gathered to form s_N; beyond, a matrix product over all keys is cheaper.
_GATHERED = 64

Points = Callable[[tuple[Tensor, ...], bool], Tensor]


class _Sizes:
    """What depends on the values of N alone. A tensor made of Python numbers takes as long as a pass over a block.

    Attributes:
        sizes: N, (K,).
        which_n: Which N an entry belongs to, (S,) int64. Entries are the selected keys of each N, one N after another.
        ranks: The rank of an entry's key, (S,) int64.
        starts: Place of the first entry of each N, (K,) int64.
        belongs: 1.0 where an entry belongs to an N, (S, K).
        member: 1.0 where the key of a rank belongs to I_N, (K, max N).
    """

    def __init__(self, top_n: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        counts = torch.tensor(top_n, device=device)
        self.sizes = counts.to(dtype)
        self.which_n = torch.arange(len(top_n), device=device).repeat_interleave(counts)
        self.starts = counts.cumsum(0) - counts
        self.ranks = torch.arange(len(self.which_n), device=device) - self.starts[self.which_n]
        self.belongs = torch.nn.functional.one_hot(self.which_n, len(top_n)).to(dtype)
        self.member = (torch.arange(max(top_n), device=device) < counts[:, None]).to(dtype)


@lru_cache(maxsize=64)
def _sizes_of(top_n: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Sizes:
    with torch.inference_mode(False):  # they outlive the mode that they were first wanted in
        return _Sizes(top_n, dtype, device)


def _unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


class _Block:
    """Rows of a few groups with everything that is computed from them at most once.

    Attributes:
        weights: (G, R, n), 0 where a key is not visible or the row is unusable.
        visible: (G, R, n) bool, or None if every key is visible.
        usable: (G, R) bool: at least one visible key, and all that is visible is finite.
        count: (G, R) number of visible keys, in the dtype of the weights.
        top_n: the K values of N.
    """

    def __init__(self, weights: Tensor, group: _Group, visible: Tensor | None, top_n: tuple[int, ...]) -> None:
        self.group, self.top_n = group, top_n
        self.n = weights.shape[-1]
        self.shown: Tensor | None = None  # the mask as 0.0 and 1.0, (1 or G, R, n): a product is faster than a choice
        self.ragged = slice(self.n, None)  # the keys that not every row sees: the others need no mask
        if visible is None:
            count = weights.new_full(weights.shape[:-1], self.n)
        else:
            mask = distinct(visible)
            self.shown = mask.to(weights.dtype)
            weights = _zeroed(weights, mask, self.shown)
            count = self.shown.sum(-1).expand(weights.shape[:-1])
            first = self.shown.amin((0, 1)).argmin() if group.direct and mask.numel() else 0
            self.ragged = slice(int(first), None)  # from 0 on if all is visible, which costs no more than time
        usable = weights.sum(-1).isfinite() & (count > 0)
        if group.any_broken:
            broken = group.broken[:, None, :]
            usable = usable & ~(broken if visible is None else broken & visible).any(-1)
        if not group.direct or not bool(usable.all()):
            weights = torch.where(usable[..., None], weights, 0.0)
        self.weights, self.visible, self.usable, self.count = weights, visible, usable, count

    @classmethod
    def prepared(
        cls,
        weights: Tensor,
        group: _Group,
        visible: Tensor,
        shown: Tensor,
        ragged: slice,
        count: Tensor,
        top_n: tuple[int, ...],
    ) -> _Block:
        """A block of which everything is known to be finite and every row to see a key.

        Args:
            weights: (G, R, n), 0 where a key is not visible.
            group: The vectors.
            visible: (G, R, n) bool.
            shown: The same as 0.0 and 1.0, (1 or G, R, n).
            ragged: The keys that not every row sees.
            count: (G, R) number of visible keys, in the dtype of the weights.
            top_n: the K values of N.
        """
        block = cls.__new__(cls)
        block.group, block.top_n, block.n = group, top_n, weights.shape[-1]
        block.weights, block.visible, block.shown, block.ragged, block.count = weights, visible, shown, ragged, count
        block.usable = torch.ones_like(count, dtype=torch.bool)
        return block

    # Per N: (G, R, K) of something (G, R), or (1, 1, K).
    @cached_property
    def of_sizes(self) -> _Sizes:
        """What depends on the values of N alone."""
        return _sizes_of(self.top_n, self.weights.dtype, self.weights.device)

    @property
    def sizes(self) -> Tensor:
        """N, (K,)."""
        return self.of_sizes.sizes

    @cached_property
    def defined(self) -> Tensor:
        """(G, R, K): the row is usable and has an unselected key."""
        return self.usable[..., None] & (self.count[..., None] > self.sizes)

    @cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        keys = self.weights if self.shown is None else self.weights + (self.shown - 1)  # -1 where invisible
        return _top_keys(keys, max(self.top_n) + 1, self.group.direct)

    @cached_property
    def order(self) -> Tensor:
        """Indices of the keys with the largest weights, (G, R, max N), ties to the lower index."""
        return self.ranked[1][..., :-1]

    @cached_property
    def top_weights(self) -> Tensor:
        """Their weights, (G, R, max N); 0 where a row has fewer visible keys."""
        return self.ranked[0][..., :-1].clamp_min(0)

    @cached_property
    def next_weights(self) -> Tensor:
        """The largest weight that is not selected, (G, R, K)."""
        return self.ranked[0][..., list(self.top_n)].clamp_min(0)

    @property
    def member(self) -> Tensor:
        """1.0 where the key of this rank belongs to I_N, (K, max N)."""
        return self.of_sizes.member

    # Per N and selected key: S = sum of all N entries, those of the first N first.
    @property
    def which_n(self) -> Tensor:
        """Which N an entry belongs to, (S,)."""
        return self.of_sizes.which_n

    def of_ranks(self, ranked: Tensor) -> Tensor:
        """Something of the ranked keys, (G, R, max N), for each entry, (G, R, S)."""
        return ranked.index_select(-1, self.of_sizes.ranks)

    def of_n(self, per_n: Tensor) -> Tensor:
        """Something per N, (..., K), for each entry, (..., S)."""
        return per_n.index_select(-1, self.which_n)

    @cached_property
    def places(self) -> Tensor:
        """Where the key of an entry lies in an array (G, R, K n), (G, R, S)."""
        return self.of_ranks(self.order) + self.which_n * self.n

    def entries(self, each: Tensor) -> tuple[Tensor, ...]:
        """The entries of each N apart, (G, R, N)."""
        parts: tuple[Tensor, ...] = each.split(self.top_n, -1)
        return parts

    def count_entries(self, marks: Tensor) -> Tensor:
        """Sum over the entries of each N of what is 0.0 or 1.0, (G, R, K)."""
        return marks @ self.of_sizes.belongs  # sums of few ones are exact in any precision

    @cached_property
    def points(self) -> Tensor:
        """``s_N``, (G, R, K, d)."""
        g, r, most = self.order.shape
        d = self.group.vectors.shape[-1]
        if most <= _GATHERED:
            table, stride = self.group.table
            index = (self.order + torch.arange(g, device=self.order.device)[:, None, None] * stride).reshape(-1)
            if index.device.type == "cpu":  # one sum over the keys that each N adds to the one before
                steps = sorted(set(self.top_n))
                starts = torch.arange(0, g * r * most, most)[:, None] + torch.tensor([0, *steps[:-1]])
                added = torch.nn.functional.embedding_bag(
                    index, table, starts.view(-1), mode="sum", per_sample_weights=self.top_weights.reshape(-1)
                )
                sums = added.view(g, r, -1, d)
                parts = sums.unbind(2)
                for before, part in pairwise(parts):  # cumsum takes five times as long
                    part.add_(before)
                return sums if tuple(steps) == self.top_n else sums[:, :, [steps.index(size) for size in self.top_n]]
            picked = table.index_select(0, index).view(g * r, most, d)
            coefficients = self.member * self.top_weights.reshape(g * r, 1, most)
            return torch.bmm(coefficients, picked).view(g, r, -1, d)
        kept = self.weights.new_zeros(g, r, len(self.top_n), self.n)
        for k, size in enumerate(self.top_n):
            index = self.order[..., :size]
            kept[:, :, k].scatter_(-1, index, self.top_weights[..., :size])
        return torch.bmm(kept.view(g, -1, self.n), self.group.vectors).view(g, r, -1, d)

    @cached_property
    def point_squares(self) -> Tensor:
        """``||s_N||^2``, (G, R, K)."""
        return (self.points * self.points).sum(-1)

    @cached_property
    def ranked_norms(self) -> Tensor:
        """``||x_j||`` of the ranked keys, (G, R, max N)."""
        return self.group.norms[:, None].expand_as(self.weights).gather(-1, self.order)

    @cached_property
    def lengths(self) -> Tensor:
        """``a_j ||x_j||`` of the ranked keys, (G, R, max N)."""
        return self.ranked_norms * self.top_weights

    @cached_property
    def reach(self) -> Tensor:
        """``sum_{I_N} a_j ||x_j||``, (G, R, K): what the rounding of s_N is measured against."""
        return self.lengths @ self.member.mT

    @cached_property
    def _excess(self) -> tuple[Tensor, Tensor]:
        g, r, n = self.weights.shape
        k = len(self.top_n)
        weights = self.weights
        own = torch.mul(weights, self.group.squares[:, None], out=self.group.take("own", g, r, n)).mul_(weights)
        excess = self.group.take("keys", g, r * k, n)
        torch.bmm((self.points * -2.0).view(g, -1, self.points.shape[-1]), self.group.vectors.mT, out=excess)
        excess = excess.view(g, r, k, n)
        if self.shown is not None:  # far beyond any key, and finite, so that a later product with 0 is 0
            own[..., self.ragged].add_((1 - self.shown[..., self.ragged]).mul_(self.far))
        torch.addcmul(own[:, :, None], excess, weights[:, :, None], out=excess)
        flat = excess.view(g, r, k * n)
        selected = flat.gather(-1, self.places)
        flat.scatter_(-1, self.places, self.far)
        return excess, selected

    @cached_property
    def far(self) -> float:
        """Stands for infinity in arrays that are multiplied by 0 later."""
        return torch.finfo(self.weights.dtype).max / 16

    @property
    def excess(self) -> Tensor:
        """``e_j``, (G, R, K, n), `far` at selected and invisible keys. `squared` overwrites it."""
        return self._excess[0]

    @property
    def selected_excess(self) -> Tensor:
        """``e_i`` of the selected keys, (G, R, S)."""
        return self._excess[1]

    @cached_property
    def least_excess(self) -> Tensor:
        """``min e_j`` over the unselected keys, (G, R, K)."""
        return self.excess.amin(-1)

    @cached_property
    def norm_sum(self) -> tuple[Tensor, Tensor]:
        """Sum and minimum of ``|| a_i x_i - s_N ||`` over the unselected keys, each (G, R, K). Consumes `excess`."""
        least = self.least_excess + self.point_squares
        scale = torch.maximum(self.point_squares, _SUMMED * self.reach**2)
        squared = self.excess.add_(self.point_squares[..., None])
        self.__dict__["_excess"] = (torch.empty(0), self.selected_excess)  # so that a second use can't go unseen
        return _norm_sum(self, squared, least, scale, self.exact_points, (1.0, 0.0), far=True)

    def exact_points(self, index: tuple[Tensor, ...], many: bool) -> Tensor:
        """`points` in float64 for some rows, ``index = (g, r, k)`` of shape (m,) each: (m, d)."""
        group, row, column = index
        out = []
        step = max(
            1, _block_elements(row.device, torch.float64) // (self.order.shape[-1] * self.group.vectors.shape[-1])
        )
        for g, r, k in zip(group.split(step), row.split(step), column.split(step), strict=True):
            picked = self.group.vectors[g[:, None], self.order[g, r]].double()
            out.append(torch.bmm((self.member[k] * self.top_weights[g, r])[:, None].double(), picked).squeeze(1))
        return torch.cat(out)

    def exact_squares(self, rows: Tensor, which: Tensor, key: Tensor) -> Tensor:
        """``|| a_i x_i - s_N ||^2`` of some keys, in pairs of float64: (m,), float64.

        Where the key and the point coincide but for rounding, float64 has no digit left.

        Args:
            rows: ``(rows, 3)``, the (g, r, k) of some rows.
            which: ``(m,)``, each key's row among them.
            key: ``(m,)``.
        """
        out = torch.empty(len(key), dtype=torch.float64, device=key.device)
        distinct_rows, place = which.unique(return_inverse=True)
        step = max(
            1, _block_elements(key.device, torch.float64) // (self.order.shape[-1] * self.group.vectors.shape[-1])
        )
        for start in range(0, len(distinct_rows), step):
            g, r, k = rows[distinct_rows[start : start + step]].unbind(-1)
            coefficients = (self.member[k] * self.top_weights[g, r]).double()
            point = _sum(_exact_product(coefficients[..., None], self.group.double[g[:, None], self.order[g, r]]), 1)
            here = ((place >= start) & (place < start + step)).nonzero().squeeze(-1)
            at = place[here] - start
            own = _exact_product(
                self.weights[g[at], r[at], key[here]].double()[:, None], self.group.double[g[at], key[here]]
            )
            difference = _subtract(own, _Pair(*(p[at] for p in point)))
            out[here] = difference.high.square().sum(-1)
        return out

    @cached_property
    def centre(self) -> Tensor:
        """``c = sum_j a_j x_j``, (G, R, d)."""
        return torch.bmm(self.weights, self.group.vectors)

    @cached_property
    def centre_dots(self) -> Tensor:
        """``x_i . c``, (G, R, n)."""
        return torch.bmm(self.centre, self.group.vectors.mT, out=self.group.take("dots", *self.weights.shape))

    @cached_property
    def centre_square(self) -> Tensor:
        """``||c||^2``, (G, R)."""
        return (self.centre * self.centre).sum(-1)

    @cached_property
    def _centre_double(self) -> Tensor:
        return torch.bmm(self.weights.double(), self.group.double)

    def exact_centre(self, index: tuple[Tensor, ...], many: bool) -> Tensor:
        """`centre` for some rows, ``index = (g, r, k)`` of shape (m,) each: (m, d), float64.

        Rounding of the centre itself shows only where *many* keys of a row lie close to it: one such key adds next to
        nothing to the sum over all.
        """
        centre = self._centre_double if many else self.centre
        return centre[index[:2]].double()


def _norm_sum(
    block: _Block,
    squared: Tensor,
    least: Tensor,
    scale: Tensor,
    exact_points: Points,
    coefficient: tuple[float | Tensor, float | Tensor],
    far: bool = False,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum and minimum over the kept keys of ``|| (u a_i + v) x_i - p ||``.

    Args:
        block: Where weights and vectors come from.
        squared: The squared norms by expansion, (G, R, K, n); overwritten. `far` marks what is not to be summed.
        least: Their minimum over the kept keys, (G, R, K).
        scale: ``||p||^2`` or more, (G, R, K): what the rounding of the squared norms goes by.
        exact_points: Makes ``p`` in float64 for some rows, see `_Block.exact_points`.
        coefficient: ``(u, v)``, each a number or (G, R, K).
        far: Selected keys are marked in `squared`.
        extra: Added to the squared norms before the root, (G, R, K, n), or None.
    """
    if block.group.direct:
        flagged = (least < _CANCELLED * scale) & block.defined
        if bool(flagged.any()):
            least = _recompute(block, squared, least, scale, exact_points, coefficient, flagged)
    else:
        squared = squared.clamp_(min=0)
    if extra is not None:
        squared = squared.add_(extra)
    squared = squared.sqrt_()
    if far:
        squared.view(*squared.shape[:2], -1).scatter_(-1, block.places, 0.0)
    if block.shown is not None:
        squared[..., block.ragged].mul_(block.shown[:, :, None, block.ragged])
    return squared.sum(-1), least.clamp_min(0).sqrt()


def _recompute(
    block: _Block,
    squared: Tensor,
    least: Tensor,
    scale: Tensor,
    exact_points: Points,
    coefficient: tuple[float | Tensor, float | Tensor],
    flagged: Tensor,
) -> Tensor:
    """Replace the entries of `squared` that cancellation spoilt; return the minimum over the kept keys."""
    dtype = squared.dtype
    shape = least.shape
    u, v = (torch.as_tensor(c, dtype=torch.float64, device=squared.device).expand(shape) for c in coefficient)
    rows = flagged.nonzero()  # (m, 3)
    step = max(1, _block_elements(squared.device, dtype) // block.n)
    for chunk in rows.split(step):
        index = tuple(chunk.unbind(-1))
        kept = squared[index]  # (m, n), a copy
        bad = kept < _CANCELLED * scale[index][:, None]
        if block.visible is not None:
            bad[:, block.ragged] &= block.visible[..., block.ragged][index[:2]]
        entries = bad.nonzero()
        crowded = bool((entries[:, 0].bincount(minlength=1) * 64 > block.n).any())
        points = exact_points(index, crowded)
        width = max(1, _block_elements(squared.device, torch.float64) // block.group.vectors.shape[-1])
        for part in entries.split(width):
            row, key = part.unbind(-1)
            where = tuple(chunk[row].unbind(-1))
            a = block.weights[where[0], where[1], key].double()
            x = block.group.vectors[where[0], key].double()
            factor = u[where] * a + v[where]
            difference = (factor[:, None] * x).sub_(points[row])
            value = difference.square_().sum(-1)
            if exact_points == block.exact_points:  # of the others, the coefficients themselves are rounded
                lost = value < _LOST * scale[where]
                many = row[lost].bincount(minlength=len(chunk)) * x.shape[-1] > EXACT_COMPONENTS  # a crowd: as it is
                lost = (lost & ~many[row]).nonzero().squeeze(-1)
                if len(lost):
                    value[lost] = block.exact_squares(chunk, row[lost], key[lost])
            kept[row, key] = value.to(dtype)
        squared[index] = kept.clamp_(min=0)  # invisible keys, whose roots would spoil the sum, among them
        seen = kept if block.visible is None else torch.where(block.visible[index[:2]], kept, block.far)
        least = least.index_put(index, seen.amin(-1))
    return least


def _top_keys(keys: Tensor, k: int, direct: bool) -> tuple[Tensor, Tensor]:
    """The k largest of `keys` (G, R, n) in descending order, ties to the lower index. Invisible keys hold -1."""
    if keys.shape[-1] < k:
        raise ValueError(f"Expected at least {k} keys, but got {keys.shape[-1]}.")
    n = keys.shape[-1]
    if direct and keys.dtype == torch.float32 and 8 * k <= n:
        values, index = _top_candidates(keys, k + 1)
        # topk breaks ties either way, which shows as two equal neighbours among the first k + 1
        equal = (values[..., 1:] == values[..., :-1]) & (values[..., 1:] >= 0)
        if bool(equal.any()):
            tied = equal.any(-1)
            by_index = index[tied].sort(-1)
            ranked = values[tied].gather(-1, by_index.indices).sort(dim=-1, descending=True, stable=True)
            values[tied], index[tied] = ranked.values, by_index.values.gather(-1, ranked.indices)
            tied = equal[..., -1]  # here keys that are not among the first may be as large
            if bool(tied.any()):
                ranked = torch.sort(keys[tied], dim=-1, descending=True, stable=True)
                values[tied], index[tied] = ranked.values[..., : k + 1], ranked.indices[..., : k + 1]
        return values[..., :k], index[..., :k]
    ranked = torch.sort(keys, dim=-1, descending=True, stable=True)
    return ranked.values[..., :k], ranked.indices[..., :k]


def _top_candidates(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` in two rounds: the k columns with the largest maxima hold the k largest keys. 2-3 times as fast."""
    n = keys.shape[-1]
    depth = min(round((n / k) ** 0.5), n // (2 * k))  # both rounds then look at about as many
    # Near it one that n can be divided by: else the keys have to be copied.
    depth = next((d for off in range(3) for d in (depth + off, depth - off) if 2 <= d <= n // k and n % d == 0), depth)
    if depth < 2:
        values, index = keys.topk(k, dim=-1)
        return values, index
    width = -(-n // depth)
    if width * depth != n:
        keys = torch.nn.functional.pad(keys, (0, width * depth - n), value=-torch.inf)
    columns = keys.unflatten(-1, (depth, width)).amax(-2).topk(k, dim=-1, sorted=False).indices
    candidates = (columns[..., None, :] + torch.arange(0, width * depth, width, device=keys.device)[:, None]).flatten(
        -2
    )
    values, place = keys.gather(-1, candidates).topk(k, dim=-1)
    return values, candidates.gather(-1, place)
