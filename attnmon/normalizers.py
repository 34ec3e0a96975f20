"""From scores to weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["softmax"]


def softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Weights of the visible keys, exactly 0 elsewhere.

    Args:
        logits: ``(..., n)`` scaled scores.
        mask: ``(..., n)`` bool, True = visible.

    Returns:
        ``(..., n)``; a row that sees nothing is all 0, a row with a NaN or +inf score is NaN where it is visible.
    """
    if logits.device.type == "cpu" and bool(logits.sum().isfinite()):  # a sum is ten times faster there than a choice
        # the mask without the dimensions that it repeats, as a rule the heads
        mask_once = mask[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in mask.stride()[:-1])]
        bias = torch.zeros_like(mask_once, dtype=logits.dtype).masked_fill_(~mask_once, -float("inf"))
        weights = (logits + bias).softmax(dim=-1)
        if bool(weights.sum().isfinite()):  # every row sees something
            return weights.expand(torch.broadcast_shapes(logits.shape, mask.shape))
    weights = logits.masked_fill(~mask, -float("inf")).softmax(dim=-1)
    return weights.masked_fill_(~mask, 0.0)
