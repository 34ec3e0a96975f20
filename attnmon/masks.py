"""When an additive mask hides a key."""

from __future__ import annotations

from torch import Tensor

__all__ = ["hides"]

# An additive mask hides a key by a very negative number; which one differs: -inf, the dtype's smallest number, -1e9,
# -1e4, -100. At -1e4 the weight is exactly zero in every floating dtype. Nearer to zero, what counts is the distance
# from the row's largest bias: exp(-88) is below float32's smallest normal number.
_ANYWHERE = -1e4
_BELOW_LARGEST = 88.0


def hides(bias: Tensor) -> Tensor:
    """Which keys an additive mask hides.

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
    return (bias <= _ANYWHERE) | (bias <= bias.amax(dim=-1, keepdim=True) - _BELOW_LARGEST)
