"""From scores to weights."""

from __future__ import annotations

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
    weights = logits.masked_fill(~mask, -float("inf")).softmax(dim=-1)
    return weights.masked_fill_(~mask, 0.0)
