"""How far the unselected keys lie from the sum of the selected ones, with its bound and its expectation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmon.metrics._base import _HeadMean
from attnmon.metrics._blocks import _over_blocks
from attnmon.metrics._checks import _check_top_n
from attnmon.metrics._pairs import _Pair, _sum
from attnmon.metrics._selection import _CANCELLED, _Block, _norm_sum, _recompute

__all__ = ["TopNDistance", "TopNDistances", "top_n_distance"]


class TopNDistances(NamedTuple):
    """The top-N distance, its upper bound, and its expectation over random selections; each ``(..., len(top_n))``."""

    distance: Tensor
    upper_bound: Tensor
    expected_paper: Tensor
    expected_lower: Tensor
    expected_upper: Tensor


def _distance_update(block: _Block, want: Iterable[str]) -> dict[str, Tensor]:
    """The wanted fields of `TopNDistances` for one block, each (G, R, K)."""
    made = {
        "distance": lambda: block.norm_sum[0],
        "upper_bound": lambda: _upper_bound(block),
        "expected_paper": lambda: _expected_paper(block),
        "expected_lower": lambda: _expected_bounds(block)[0],
        "expected_upper": lambda: _expected_bounds(block)[1],
    }
    wanted = set(want)
    return {name: make() for name, make in made.items() if name in wanted}  # the distance first: see `_expected_paper`


def _left_out(block: _Block) -> Tensor:
    """``(n - N) / n``, the chance of a key to be left out of a random selection, (G, R, K)."""
    count = block.count[..., None].clamp_min(1)
    return (count - block.sizes) / count


def _drawn(block: _Block) -> Tensor:
    """``k = N / (n - 1)``, the chance of a key to be selected given that another one is not, (G, R, K)."""
    return block.sizes / (block.count[..., None] - 1).clamp_min(1)


def _expected_paper(block: _Block) -> Tensor:
    """Equation 10: ``(n - N)/n sum_i || (a_i + N/(n-1)) x_i - c ||``.

    The squared norms are polynomials in ``k = N/(n-1)``, with coefficients that all N share.
    """
    g, r, n = block.weights.shape
    k = _drawn(block).expand(g, r, -1)[..., None]
    a, squares = block.weights, block.group.squares[:, None]
    own = torch.mul(a, squares, out=block.group.take("own", g, r, n))
    linear = torch.sub(own, block.centre_dots, out=block.group.take("linear", g, r, n))
    fixed = torch.sub(linear, block.centre_dots, out=own).mul_(a).add_(block.centre_square[..., None])
    # The distances that this array may have held are needed no longer.
    squared = block.group.take("keys", g, r * len(block.top_n), n).view(g, r, -1, n)
    torch.addcmul(fixed[:, :, None], k, linear.mul_(2)[:, :, None], out=squared)
    squared.addcmul_(k * k, squares[:, None])
    scale = block.centre_square[..., None].expand_as(block.defined)
    total, _ = _norm_sum(block, squared, squared.amin(-1), scale, block.exact_centre, (1.0, k.squeeze(-1)))
    return _left_out(block) * total


def _expected_bounds(block: _Block) -> tuple[Tensor, Tensor]:
    """Jensen's lower and upper bound of the expectation over uniformly drawn selections."""
    cached = block.__dict__.get("_expected_bounds")
    if cached is not None:
        return cached  # type: ignore[no-any-return]
    k = _drawn(block)
    left_out = _left_out(block)
    a = block.weights
    own = a * a * block.group.squares[:, None]
    cross = a * block.centre_dots
    up, down = (1 + k)[..., None], k[..., None]
    centre = block.centre_square[..., None]
    squared = (up * up) * own[:, :, None] - (2 * up * down) * cross[:, :, None] + down * down * centre[..., None]
    scale = k * k * centre

    # where the two terms cancel, the rounding of k shows, too
    exact = k if k.device.type == "mps" else block.sizes.double() / (block.count[..., None].double() - 1).clamp_min(1)

    def points(index: tuple[Tensor, ...], many: bool) -> Tensor:
        return block.exact_centre(index, many) * exact[index][:, None]

    extra = _drawn_variance(block, own, cross)
    coefficient = (1 + exact, 0.0)
    lower, _ = _norm_sum(block, squared.clone(), squared.amin(-1), scale, points, coefficient)
    upper, _ = _norm_sum(block, squared, squared.amin(-1), scale, points, coefficient, extra=extra)
    result = (left_out * lower, left_out * upper)
    block.__dict__["_expected_bounds"] = result
    return result


def _drawn_variance(block: _Block, own: Tensor, cross: Tensor) -> Tensor:
    """``V_i``: variance of the sum of N keys drawn without replacement from all but i, (G, R, K, n).

    From the squared distances ``w_j`` to the mean of all n: leaving i out takes ``w_i n / (n-1)`` from their sum. The
    difference of the two means in the definition would cancel where the keys nearly coincide.
    """
    count = block.count[..., None].clamp_min(1)
    squared = own - (2 / count) * cross + (block.centre_square / block.count.clamp_min(1) ** 2)[..., None]
    scale = block.centre_square / block.count.clamp_min(1) ** 2
    single = squared[:, :, None].contiguous()

    def points(index: tuple[Tensor, ...], many: bool) -> Tensor:
        return block.exact_centre(index, many) / block.count[index[:2]].double()[:, None]

    if block.group.direct:
        flagged = (single.amin(-1) < _CANCELLED * scale[..., None]) & block.usable[..., None]
        if bool(flagged.any()):
            _recompute(block, single, single.amin(-1), scale[..., None], points, (1.0, 0.0), flagged)
    spread = single.clamp_min(0)
    if block.shown is not None:
        spread = spread * block.shown[:, :, None]
    others = (count - 1).clamp_min(1)
    remaining = (spread.sum(-1, keepdim=True) - spread * (count / others)[..., None]).clamp_min(0) / others[..., None]
    sizes = block.sizes
    factor = sizes * (count - 1 - sizes).clamp_min(0) / (count - 2).clamp_min(1)
    return factor[..., None] * remaining


def _upper_bound(block: _Block) -> Tensor:
    """Theorem 1.1: ``(1 - A) d1 + max_{I_N} ||x_j|| (A (n - N) - (1 - A))``."""
    # 1 - A is multiplied by a distance that may be huge: it needs more digits than the weights' own type carries
    wide = torch.float32 if block.weights.device.type == "mps" else torch.float64
    kept = block.top_weights.to(wide).unsqueeze(-2) * block.member
    if block.weights.dtype == torch.float64:
        total = _sum(_Pair(kept, torch.zeros_like(kept)), -1)
        selected, rest = total.high, (1 - total.high) - total.low
    else:
        selected = kept.sum(-1)
        rest = 1 - selected
    longest = block.ranked_norms.cummax(-1).values[..., [size - 1 for size in block.top_n]]
    bound = rest * _largest_gap(block) + longest * (selected * (block.count[..., None] - block.sizes) - rest)
    return bound.to(block.weights.dtype)


def _largest_gap(block: _Block) -> Tensor:
    """``d1``, the largest distance between a selected and an unselected key, (G, R, K)."""
    gap = torch.zeros_like(block.weights)  # over the selected keys so far
    out = torch.empty_like(block.defined, dtype=gap.dtype)
    hidden = torch.zeros_like(gap, dtype=torch.bool) if block.visible is None else ~block.visible
    done = 0
    for column in sorted(range(len(block.top_n)), key=lambda c: block.top_n[c]):
        size = block.top_n[column]
        for rank in range(done, size):
            torch.maximum(gap, block.group.distances_from(block.order[..., rank]), out=gap)
        hidden = hidden.scatter(-1, block.order[..., done:size], True)
        out[..., column] = torch.where(hidden, 0.0, gap).amax(-1)
        done = max(done, size)
    return out


def top_n_distance(
    weights: Tensor, vectors: Tensor, top_n: int | Iterable[int], *, mask: Tensor | None = None
) -> TopNDistances:
    r"""Measure how far the keys outside the top N lie from what the top N contribute.

    With ``I_N`` the N keys of largest weight and ``s_N = sum_{i in I_N} a_i x_i``:

    - ``distance`` ``d_N = sum_{i not in I_N} || a_i x_i - s_N ||`` (eqs. 6, 7);
    - ``upper_bound`` ``(1 - A) d1 + max_{I_N} ||x_j|| (A (n - N) - (1 - A))``, ``A = sum_{I_N} a_i``, ``d1`` the
      largest distance between a selected and an unselected key (Theorem 1.1);
    - ``expected_paper`` ``(n - N)/n sum_i || (a_i + N/(n-1)) x_i - c ||``, ``c = sum_j a_j x_j`` (eq. 10 as printed);
    - ``expected_lower``, ``expected_upper``: Jensen's bounds of the expectation of ``d_N`` over a uniformly drawn
      selection, which the printed form is not.

    Source: eqs. 6, 7 and Theorem 1 of arXiv 2508.17821. The last two are derived, not the paper's.

    Reading: ``distance`` near ``expected_paper`` means that the N selected keys are as good as any others; the paper
    sees the two meet at about 6 % of the context.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        vectors: ``(..., n, d)``, float, broadcastable over the rows: ``(batch, heads, 1, n, d)`` for rows that share
            their keys, which is also the fast form.
        top_n: N, or several.
        mask: ``(..., n)``, bool, True = visible, or None. n counts the visible keys of a row.

    Returns:
        Five tensors ``(...)`` or ``(..., len(top_n))`` in the unit of the vectors, at least 0 (the bound too, for
        weights that sum to 1). NaN where a row sees N keys or fewer, or is not finite. No gradient.

    Raises:
        TypeError: If a tensor is not floating-point, `mask` is not bool or `top_n` is not integer.
        ValueError: If the shapes do not fit, `top_n` is below 1, or ``top_n >= n``.

    Example:
        >>> import torch
        >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> result = top_n_distance(torch.tensor([0.6, 0.3, 0.1]), vectors, 1)
        >>> result.distance, result.upper_bound
        (tensor(1.2791), tensor(1.3657))
    """
    names = TopNDistances._fields
    values = _over_blocks(weights, vectors, top_n, mask, lambda block: _distance_update(block, names))
    return TopNDistances(**values)


class TopNDistance(_HeadMean):
    r"""Mean top-N distance of the rows of each head.

    The mean over rows of ``d_N = sum_{i not in I_N} || a_i x_i - s_N ||``, see `top_n_distance`. Rows that see at most
    N keys are left out for that N and counted.

    Source: eqs. 6, 7 of arXiv 2508.17821.

    Reading: see `top_n_distance`; it grows about linearly with the length of the context.

    Args:
        num_heads: Number of heads, dimension 1 of what `update` is given.
        top_n: N, or several.
        kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        TypeError: If `num_heads` or `top_n` is not integer.
        ValueError: If `num_heads` or `top_n` is below 1.

    Example:
        >>> import torch
        >>> metric = TopNDistance(num_heads=1, top_n=(1, 2))
        >>> metric.update(torch.tensor([[[[0.6, 0.3, 0.1]]]]), torch.eye(3)[None, None])
        >>> metric.compute()
        tensor([[1.2791, 0.6782]], dtype=torch.float64)
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
            weights, vectors[:, :, None], self.top_n, mask, lambda block: _distance_update(block, ("distance",))
        )
        self._add(values["distance"])
