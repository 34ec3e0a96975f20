"""Sequences of random symbols, parts of which can be told exactly from others: what text has little of.

A head that solves these looks at one key and no other, so its scores grow and its entropy falls to 0 in good health.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SYMBOLS", "make_sequences"]

SYMBOLS = 32
_PERIOD = 6


def make_sequences(task: str, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw sequences.

    Args:
        task: ``periodic`` repeats its first six symbols; ``copy`` its first half; ``reverse`` has the second half in
            reverse; in ``sum`` each symbol is the sum of the two before it, modulo 32.
        count: Of sequences.
        length: Of each.
        generator: Where they are drawn from.

    Returns:
        ``(count, length)``, symbols 0 to 31.

    Raises:
        ValueError: The task is none of these.
    """
    half = -(-length // 2)
    if task == "sum":
        found = list(torch.randint(SYMBOLS, (2, count), generator=generator))
        while len(found) < length:
            found.append((found[-1] + found[-2]) % SYMBOLS)
        return torch.stack(found, dim=1)[:, :length]
    if task == "periodic":
        first = torch.randint(SYMBOLS, (count, _PERIOD), generator=generator)
        return first.repeat(1, -(-length // _PERIOD))[:, :length]
    first = torch.randint(SYMBOLS, (count, half), generator=generator)
    if task == "copy":
        return torch.cat([first, first], dim=1)[:, :length]
    if task == "reverse":
        return torch.cat([first, first.flip(1)], dim=1)[:, :length]
    raise ValueError(f"Expected `task` to be periodic, copy, reverse or sum, but got {task!r}.")
