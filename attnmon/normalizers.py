"""From scores to weights."""

from __future__ import annotations

from torch import Tensor

from attnmon.masks import hide

__all__ = ["softmax"]


def softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Weights of the visible keys, exactly 0 elsewhere.

    Args:
        logits: ``(..., n)`` scaled scores.
        mask: ``(..., n)`` bool, True = visible.

    Returns:
        ``(..., n)``; a row that sees nothing is all 0, a row with a NaN or +inf score is NaN where it is visible.
    """
    weights = hide(logits, mask).softmax(dim=-1)
    if weights.device.type == "cpu" and bool(weights.sum().isfinite()):  # every row sees something finite
        return weights
    return weights.masked_fill(~mask, 0.0)
