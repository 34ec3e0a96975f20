"""What masks do to scores: when an additive one hides a key, how hidden keys leave the softmax, and the softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["broadcast_shape", "distinct", "hide", "hides", "masked_softmax"]

# An additive mask hides a key by a very negative number; which one differs: -inf, the dtype's smallest number, -1e9,
# -1e4, -100. At -1e4 the weight is exactly zero in every floating dtype. Nearer to zero, what counts is the distance
# from the row's largest bias: exp(-88) is below float32's smallest normal number. But a bias that falls with the
# distance of the key gets there, too, and hides nothing: so there has to be a gap.
_ANYWHERE = -1e4
_BELOW_LARGEST = 88.0
_NEAR_LARGEST = 44.0


def hides(bias: Tensor) -> Tensor:
    """Which keys an additive mask hides: by -1e4 or less, or beyond a gap, 88 or more below the row's largest entry.

    A gap is where no entry of the row lies between 44 and 88 below the largest.

    Args:
        bias: ``(..., n)``, added to the scaled scores. A NaN hides nothing: it spoils the row, and that is reported.

    Returns:
        ``(..., n)`` bool, True = hidden.

    Example:
        >>> import torch
        >>> hides(torch.tensor([[0.0, -100.0, -3.0], [-1e9, -1e9, -1e9]])).tolist()
        [[False, True, False], [True, True, True]]
    """
    if bias.shape[-1] == 0:
        return bias <= _ANYWHERE
    hidden = bias <= _ANYWHERE
    largest = bias.amax(dim=-1, keepdim=True)
    far = bias <= largest - _BELOW_LARGEST
    if bias.device.type == "cpu" and torch.equal(far, hidden):  # most masks
        return hidden
    gap = (far | (bias >= largest - _NEAR_LARGEST)).all(dim=-1, keepdim=True)
    return hidden | (far & gap)


def broadcast_shape(first: torch.Size, *others: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, which takes longer than many an operation, for shapes that mostly are the same.

    Example:
        >>> broadcast_shape(torch.Size((2, 1)), torch.Size((3,)))
        torch.Size([2, 3])
    """
    return first if all(other == first for other in others) else torch.broadcast_shapes(first, *others)


def distinct(mask: Tensor) -> Tensor:
    """`mask` with size 1 where it repeats itself over rows (heads, as a rule): what is made of it is small."""
    return mask[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in mask.stride()[:-1])]


def hide(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores with -inf where a key is not visible.

    Args:
        scores: ``(..., n)``.
        mask: ``(..., n)`` bool, True = visible, broadcastable.

    Example:
        >>> hide(torch.tensor([1.0, 2.0]), torch.tensor([True, False]))
        tensor([1., -inf])
    """
    shape = broadcast_shape(scores.shape, mask.shape)
    mask = distinct(mask)
    if scores.device.type == "cpu" and bool(scores.sum().isfinite()):  # there a sum is ten times faster than a choice
        scores = scores + torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -math.inf)
    else:
        scores = torch.where(mask, scores, -math.inf)
    return scores.expand(shape)


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Weights of the visible keys, exactly 0 elsewhere.

    Args:
        logits: ``(..., n)`` scaled scores.
        mask: ``(..., n)`` bool, True = visible.

    Returns:
        ``(..., n)``; a row that sees nothing is all 0, a row with a NaN or +inf score is NaN where it is visible.

    Example:
        >>> masked_softmax(torch.zeros(3), torch.tensor([True, True, False]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    weights = hide(logits, mask).softmax(dim=-1)
    if weights.device.type == "cpu" and bool(weights.sum().isfinite()):  # every row sees something finite
        return weights
    return weights.masked_fill(~mask, 0.0)
