"""The bounds of Theorem 2 on the share of distinguishable keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from attnmon.metrics._blocks import _over_blocks
from attnmon.metrics._selection import _Block

__all__ = ["SeparabilityBounds", "separability_bounds"]

# Closest pairs of a group that are tried one after the other before all pairs of a row are looked at.
_PAIRS_PER_KEY = 4


class SeparabilityBounds(NamedTuple):
    """Theorem 2's bounds on ``E[N_s] / N``, the upper one as printed and where its argument holds."""

    lower: Tensor
    upper: Tensor
    upper_valid: Tensor


def _bounds_update(block: _Block, want: Iterable[str]) -> dict[str, Tensor]:
    """The wanted fields of `SeparabilityBounds` for one block, each (G, R, K)."""
    names = set(want) & set(SeparabilityBounds._fields)
    if not names:
        return {}
    # small arrays, and a lower bound that is 1 minus a quotient often near 1
    precise = torch.float32 if block.weights.device.type == "mps" else torch.float64
    radius = block.norm_sum[1].to(precise)
    lengths = block.group.norms[:, None]
    if block.shown is not None:
        lengths = lengths * block.shown
    longest = lengths.expand_as(block.weights).amax(-1).to(precise)  # M, (G, R)
    half = _smallest_gap(block).to(precise) ** 2 / 2
    lower, printed, valid = [], [], []
    for column, size in enumerate(block.top_n):
        own = block.top_weights[..., :size].to(precise)
        linear, square = _sum_of_others(own), _sum_of_others(own * own)
        inner = (longest**2 - half)[..., None] * linear**2 + half[..., None] * square
        xi = inner.clamp_min(0).sqrt()  # (G, R, N)
        r = radius[..., column, None]
        # r = 0 leaves nothing to be told apart and the bound says nothing, whatever the sum
        lower.append(torch.where(r[..., 0] > 0, 1 - xi.sum(-1) / (r[..., 0] * size), -torch.inf))
        exponent = -((r - xi) ** 2) / (16 * longest[..., None] ** 2)
        terms = torch.where(longest[..., None] > 0, exponent.exp(), 1.0)
        printed.append(terms.mean(-1))
        valid.append(torch.where(r < xi, terms, 1.0).mean(-1))
    made = {"lower": lower, "upper": printed, "upper_valid": valid}
    return {name: torch.stack(made[name], -1) for name in SeparabilityBounds._fields if name in names}


def _sum_of_others(values: Tensor) -> Tensor:
    """For each entry the sum of all others along the last dimension, without subtracting it from a total."""
    size = values.shape[-1]
    return values @ (1 - torch.eye(size, dtype=values.dtype, device=values.device))


def _smallest_gap(block: _Block) -> Tensor:
    """``delta``, the smallest distance between two visible keys, (G, R)."""
    g, r, n = block.weights.shape
    closest = block.group.closest
    if block.visible is None:
        return closest[:, -1:].expand(g, r)
    # A row that sees the keys up to some position, as causal rows do: a running minimum answers all of them.
    last = (block.count - 1).clamp_min(0).long()
    out = closest.gather(-1, last)
    prefix = (block.visible[..., 1:] <= block.visible[..., :-1]).all(-1) & block.visible[..., 0]
    left = ~prefix & (block.count > 1)
    if not bool(left.any()):
        return out
    pairwise = block.group.pairwise
    nearest = pairwise.where(torch.ones(n, n, dtype=torch.bool, device=pairwise.device).tril(-1), torch.inf)
    values, pairs = nearest.flatten(1).topk(min(_PAIRS_PER_KEY * n, n * n), dim=-1, largest=False)
    for group in range(g):
        rows = left[group].nonzero().squeeze(-1)
        if not len(rows):
            continue
        seen = block.visible[group, rows]
        both = seen[:, pairs[group] // n] & seen[:, pairs[group] % n]  # (m, pairs), the closest first
        out[group, rows] = values[group][both.to(torch.uint8).argmax(-1)]
        for row, mask in zip(rows[~both.any(-1)], seen[~both.any(-1)], strict=True):
            out[group, row] = nearest[group][mask][:, mask].amin()
    return out


def separability_bounds(
    weights: Tensor, vectors: Tensor, top_n: int | Iterable[int], *, mask: Tensor | None = None
) -> SeparabilityBounds:
    r"""Bound the mean share of distinguishable keys among the top N.

    With r the radius of `separability`, M the largest norm and ``delta`` the smallest distance among the visible keys,
    ``A_i`` and ``B_i`` the sums of ``a_j`` and ``a_j^2`` over the other selected keys, and
    ``xi_i = sqrt((M^2 - delta^2/2) A_i^2 + (delta^2/2) B_i)``:

    ``1 - sum_i xi_i / (r N) <= E[N_s] / N <= 1/N sum_i exp(-(r - xi_i)^2 / (16 M^2))``

    Source: Theorem 2 of arXiv 2508.17821. Its argument for the right side holds where ``r < xi_i`` only;
    ``upper_valid`` sets the other terms to 1. Both speak of the mean over random vectors: single rows may lie outside.

    Reading: `separability` above ``upper`` on average contradicts the theorem as printed; the lower bound is loose.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        vectors: ``(..., n, d)``, float, broadcastable over the rows; see `separability`.
        top_n: N, or several.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        Three tensors ``(...)`` or ``(..., len(top_n))``: ``lower`` at most 1 (-inf where r is 0), ``upper`` and
        ``upper_valid`` in ``[0, 1]``. NaN where a row sees N keys or fewer, or is not finite. No gradient.

    Raises:
        TypeError: If a tensor is not floating-point, `mask` is not bool or `top_n` is not integer.
        ValueError: If the shapes do not fit, `top_n` is below 1, or ``top_n >= n``.

    Example:
        >>> import torch
        >>> bounds = separability_bounds(torch.tensor([0.6, 0.3, 0.1]), torch.eye(3), 2)
        >>> bounds.lower, bounds.upper_valid
        (tensor(0.3365), tensor(1.))
    """
    names = SeparabilityBounds._fields
    # float64: the lower bound is 1 minus a quotient that is often near 1
    values = _over_blocks(weights, vectors, top_n, mask, lambda block: _bounds_update(block, names), precise=True)
    return SeparabilityBounds(**values)
