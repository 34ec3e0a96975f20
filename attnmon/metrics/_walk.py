"""The top-N distance and its printed expectation at every N up to some size, in one walk over the ranks of a row.

Going from N - 1 to N adds one key to ``s_N``, and with it one row of the products ``x_i . x_j`` to ``x_i . s_N``: a
step costs O(n) a row whatever the dimension of the vectors. A key that nearly coincides with ``s_N`` costs its own
term digits: in float32 up to 5e-4 of ``||s_N||`` (3e-8 in float64), among n - N terms of about that size. Rows in which
so many terms are small that this could show in their sum are left to what computes such terms from differences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnmon.metrics._blocks import _over_rows
from attnmon.metrics._group import _Group
from attnmon.metrics._selection import _Block
from attnmon.metrics.distance import _distance_update

__all__ = ["CONSECUTIVE_FIELDS", "consecutive_distances"]

CONSECUTIVE_FIELDS = ("distance", "expected_paper")
# A sum this far below its number of terms times their scale: 5e-4 of the scale lost in each lost term stays below 1e-4
# of the sum as long as only a small part of the terms is lost, which above this share is so.
_SPARSE = 0.7
_TOGETHER = 8


def consecutive_distances(weights: Tensor, group: _Group, visible: Tensor | None, most: int) -> dict[str, Tensor]:
    """`CONSECUTIVE_FIELDS` of `TopNDistances` at N = 1..most.

    Args:
        weights: ``(G, R, n)`` in the dtype of the group's vectors.
        group: The vectors of each group.
        visible: ``(G, R, n)`` bool, True = visible, or None if all are.
        most: The largest N.

    Returns:
        Name to ``(G, R, most)``; NaN where a row sees N keys or fewer, or is not finite.
    """
    g, r, n = weights.shape
    out = {name: weights.new_full((g, r, most), torch.nan) for name in CONSECUTIVE_FIELDS}
    steps = min(most, n - 1)
    if steps < 1:
        return out
    block = _Block(weights, group, visible, (steps,))
    hidden = torch.zeros(1, 1, n, dtype=torch.bool, device=weights.device) if visible is None else ~visible
    for index in range(g):
        shut = hidden[index if len(hidden) > 1 else 0]
        distance, expected = (out[name][index] for name in CONSECUTIVE_FIELDS)
        scales = _walk(block, index, shut, distance), _expect(block, index, shut, expected)
        if group.direct:
            rows = _crowded(block, index, out, scales)
            mask = None if visible is None else visible[min(index, len(visible) - 1), rows][None]
            _replace(out, index, rows, weights[index : index + 1, rows], group.select(slice(index, index + 1)), mask)
    sizes = torch.arange(1, most + 1, device=weights.device, dtype=weights.dtype)
    defined = block.usable[..., None] & (block.count[..., None] > sizes)
    return {name: torch.where(defined, value, torch.nan) for name, value in out.items()}


def _crowded(block: _Block, index: int, out: dict[str, Tensor], scales: tuple[Tensor, Tensor]) -> Tensor:
    """Rows of one group whose sums are small against as many terms of the scale that they were rounded at, (m,)."""
    count = block.count[index][:, None]
    sizes = torch.arange(1, scales[0].shape[-1] + 1, device=count.device)
    left = (count - sizes).clamp_min(0)
    distance, expected = (out[name][index, :, : len(sizes)] for name in CONSECUTIVE_FIELDS)
    small = (distance < _SPARSE * left * scales[0]) | (expected < _SPARSE * count * scales[1])
    return (small & (left > 0)).any(-1).nonzero().squeeze(-1)


def _replace(
    out: dict[str, Tensor], index: int, rows: Tensor, weights: Tensor, group: _Group, mask: Tensor | None
) -> None:
    """Compute rows of one group again, (1, m, n), a few N at a time."""
    steps = min(out["distance"].shape[-1], weights.shape[-1] - 1)
    for start in range(0, steps if len(rows) else 0, _TOGETHER):
        sizes = tuple(range(start + 1, min(start + _TOGETHER, steps) + 1))
        again = _over_rows(weights, group, sizes, mask, _fields, weights.dtype)
        for name, value in again.items():
            out[name][index, rows, start : start + len(sizes)] = value[0]


def _fields(block: _Block) -> dict[str, Tensor]:
    return _distance_update(block, CONSECUTIVE_FIELDS)


def _walk(block: _Block, index: int, shut: Tensor, out: Tensor) -> Tensor:
    """``d_N`` of one group's rows for N = 1, 2, ... into `out` (R, at least steps); returns ``||s_N||``, (R, steps)."""
    weights, order, chosen = block.weights[index], block.order[index], block.top_weights[index]
    squares = block.group.squares[index]
    own = (weights * weights).mul_(squares)
    # a selected or invisible key is so far below zero that it is clamped to 0, and adds nothing to the sum
    own.masked_fill_(shut, -block.far)
    slope = weights * -2
    dots = torch.zeros_like(weights)  # x_i . s_N
    buffer, row = torch.empty_like(weights), torch.empty_like(weights)
    square = weights.new_zeros(len(weights), 1)  # ||s_N||^2
    lengths = torch.empty_like(chosen)
    for step in range(order.shape[-1]):
        key, weight = order[:, step : step + 1], chosen[:, step : step + 1]
        block.group.products_from(index, key.squeeze(-1), row)
        square = square + weight * (2 * dots.gather(-1, key) + weight * squares[key])
        dots.addcmul_(weight, row)
        own.scatter_(-1, key, -block.far)
        torch.addcmul(own, slope, dots, out=buffer).add_(square).clamp_min_(0).sqrt_()
        torch.sum(buffer, -1, out=out[:, step])
        lengths[:, step : step + 1] = square
    return lengths.clamp_min_(0).sqrt_()


def _expect(block: _Block, index: int, shut: Tensor, out: Tensor) -> Tensor:
    """Equation 10 of one group's rows for N = 1, 2, ... into `out`: a polynomial of ``k = N / (n - 1)`` per key.

    Returns:
        The scale of its terms, ``||c|| (n - N) / n``, (R, steps).
    """
    weights, squares = block.weights[index], block.group.squares[index]
    count = block.count[index][:, None]
    scaled = weights * squares
    dots, centre = block.centre_dots[index], block.centre_square[index][:, None]
    fixed = (scaled - 2 * dots).mul_(weights).add_(centre).masked_fill_(shut, -block.far)
    linear = (scaled - dots).mul_(2)
    buffer = torch.empty_like(weights)
    for step in range(block.order.shape[-1]):
        k = (step + 1) / (count - 1).clamp_min(1)
        torch.addcmul(linear, k, squares, out=buffer)
        torch.addcmul(fixed, k, buffer, out=buffer).clamp_min_(0).sqrt_()
        out[:, step] = buffer.sum(-1).mul_(((count - step - 1) / count).squeeze(-1))
    sizes = torch.arange(1, block.order.shape[-1] + 1, device=count.device)
    return centre.clamp_min(0).sqrt() * (count - sizes).clamp_min(0) / count
