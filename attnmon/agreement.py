"""Whether captured arguments explain what a module's own attention returned, and the precision that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attnmon.metrics import score_max
from attnmon.rows import RowBatch, take_rows

__all__ = ["contradicts", "full_precision"]

# How far the output recomputed from the captured arguments may be from the module's own, relative to the largest
# visible value: rounding of the weights in the model's dtype stays well below, a forgotten bias, cap or mask does not.
# Functions that take the softmax in float32 do so in float64 models, too.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TF32_TOLERANCE = 5e-3  # float32 products on other devices than the CPU may keep 10 bits of the mantissa


def contradicts(output: Tensor, batch: RowBatch, weights: Tensor) -> Tensor:
    """Whether the module's own attention output is not the one that the captured arguments give."""
    own = take_rows(output.detach(), batch.positions).to(batch.values.dtype)
    recomputed = batch.per_head(weights @ batch.values)
    error = (own - recomputed).abs().amax(dim=-1)
    usable = batch.finite & (batch.weight > 0)[:, None]
    values = batch.values.flatten(-2)
    size = torch.maximum(values.amax(-1), -values.amin(-1))
    size = size.repeat_interleave(batch.num_heads // batch.values.shape[1], dim=1)
    tolerance = _TOLERANCE.get(output.dtype, 5e-2)
    if output.dtype == torch.float32 and output.device.type != "cpu":
        tolerance = _TF32_TOLERANCE
    # The larger the scores, the more of them is lost to rounding before the softmax sees it.
    logits = batch.per_head(score_max(batch.logits, mask=batch.mask))  # NaN for a row that sees nothing: not usable
    rounding = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps)
    limit = (tolerance + 8 * rounding * logits) * size[:, :, None]
    return (usable & (error > limit)).any()


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
