"""Whether captured arguments explain what a module's own attention returned, and the precision that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attnmon.masks import distinct
from attnmon.rows import RowBatch, Rows, take_rows

__all__ = ["contradicts", "disagrees", "full_precision", "own_rows", "value_size"]

# How far the output recomputed from the captured arguments may be from the module's own, relative to the largest
# visible value: rounding of the weights in the model's dtype stays well below, a forgotten bias, cap or mask does not.
# Functions that take the softmax in float32 do so in float64 models, too.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TF32_TOLERANCE = 5e-3  # float32 products on other devices than the CPU may keep 10 bits of the mantissa


def contradicts(own: Tensor, rows: Rows, recomputed: Tensor, largest: Tensor, size: Tensor) -> Tensor:
    """Whether the module's own attention output is not the one that the captured arguments give.

    Args:
        own: ``(batch, num_heads, rows, v_head_dim)``, what the module returned for these rows.
        rows: Which rows.
        recomputed: ``(batch, num_heads, rows, v_head_dim)``, weights times values.
        largest: ``(batch, num_heads, rows)``, the largest absolute score of each row, bias and all; NaN where a row
            sees nothing.
        size: `value_size` of the values of these sequences.

    Returns:
        ``(batch,)`` bool.
    """
    error = (own.to(recomputed.dtype) - recomputed).abs().amax(dim=-1)
    error = torch.where(error.isnan() & recomputed.isfinite().all(dim=-1), torch.inf, error)  # the module's own NaN
    usable = rows.finite & (rows.weight > 0)[:, None]
    size = size.repeat_interleave(rows.num_heads // size.shape[1], dim=1)
    # The larger the scores, the more of them is lost to rounding before the softmax sees it.
    rounding = max(torch.finfo(own.dtype).eps, torch.finfo(torch.float32).eps)
    limit = (_tolerance(own) + 8 * rounding * largest) * size[:, :, None]
    return (usable & (error > limit)).flatten(1).any(1)


def own_rows(output: Tensor, rows: Rows) -> Tensor:
    """A module's own output at some rows, ``(batch, num_heads, rows, v_head_dim)``, a copy.

    Args:
        output: ``(sequences, num_heads, q_len, v_head_dim)`` of all sequences of the call.
        rows: Which rows.
    """
    return take_rows(output.detach()[rows.sequences], rows.positions)


def value_size(values: Tensor) -> Tensor:
    """The largest absolute value of each head, (batch, num_kv_heads)."""
    # one dimension at a time is the fastest where the heads lie between each other in memory
    return torch.maximum(values.amax(-2).amax(-1), -values.amin(-2).amin(-1))


def disagrees(output: Tensor, batch: RowBatch, weights: Tensor) -> Tensor:
    """`contradicts` for rows of which only the weights are there, ``(batch, num_kv_heads, group * rows, n)``.

    Args:
        output: As for `own_rows`.
        batch: The rows.
        weights: Their weights. Those of a row that sees nothing don't matter.

    Returns:
        A bool scalar.
    """
    own = own_rows(output, batch)
    recomputed = batch.per_head(weights @ batch.values)
    if own.device.type == "cpu" and _plainly_agrees(own, recomputed):
        return torch.zeros((), dtype=torch.bool)
    largest = batch.per_head(_largest(batch))
    return contradicts(own, batch, recomputed, largest, value_size(batch.values)).any()


def _plainly_agrees(own: Tensor, recomputed: Tensor) -> bool:
    """Whether `contradicts` would be False whatever rows these are, with few operations: that is the rule."""
    error = (own.to(recomputed.dtype) - recomputed).abs_().amax((-2, -1))
    # as means of them, no output is larger than the largest value
    return bool((error <= _tolerance(own) * recomputed.abs().amax((-2, -1))).all())


def _largest(batch: RowBatch) -> Tensor:
    """The largest absolute score of each row that is visible, as `contradicts` takes it, with few operations."""
    shown = distinct(batch.mask)
    sizes = batch.logits.masked_fill(~shown, 0.0)
    return torch.maximum(sizes.amax(-1), -sizes.amin(-1)).masked_fill_(~shown.any(-1), torch.nan)


def _tolerance(own: Tensor) -> float:
    if own.dtype == torch.float32 and own.device.type != "cpu":
        return _TF32_TOLERANCE
    return _TOLERANCE.get(own.dtype, 5e-2)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast and no reduced-precision products inside, whatever the run has chosen for itself."""
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        if precision == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
