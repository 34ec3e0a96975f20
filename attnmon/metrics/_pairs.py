"""Numbers kept as the unevaluated sum of two float64 ones: about 32 digits, for the few comparisons that need them.

Error-free sums and products after Dekker and Knuth. They hold for separate, correctly rounded operations, which is what
torch's elementwise functions are; scale what may overflow or underflow first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []

_SPLITTER = 2.0**27 + 1
UNIT = 2.0**-104
"""Relative error of one operation on pairs, generously."""
EXACT_COMPONENTS = 4096
"""Components of vectors that one row may have computed in pairs."""


class _Pair(NamedTuple):
    high: Tensor
    low: Tensor


def _exact_sum(a: Tensor, b: Tensor) -> _Pair:
    total = a + b
    other = total - a
    return _Pair(total, (a - (total - other)) + (b - other))


def _exact_product(a: Tensor, b: Tensor) -> _Pair:
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return _Pair(product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    scaled = _SPLITTER * a
    high = scaled - (scaled - a)
    return high, a - high


def _renormalized(high: Tensor, low: Tensor) -> _Pair:
    total = high + low
    return _Pair(total, low - (total - high))


def _add(a: _Pair, b: _Pair) -> _Pair:
    high, error = _exact_sum(a.high, b.high)
    low, rest = _exact_sum(a.low, b.low)
    high, error = _renormalized(high, error + low)
    return _renormalized(high, error + rest)


def _subtract(a: _Pair, b: _Pair) -> _Pair:
    return _add(a, _Pair(-b.high, -b.low))


def _multiply(a: _Pair, b: _Pair) -> _Pair:
    high, error = _exact_product(a.high, b.high)
    return _renormalized(high, error + (a.high * b.low + a.low * b.high))


def _sum(a: _Pair, dim: int) -> _Pair:
    """The sum along a dimension, by halves."""
    while (size := a.high.shape[dim]) > 1:
        half = size // 2
        merged = _add(*(_Pair(*(part.narrow(dim, start, half) for part in a)) for start in (0, half)))
        if size % 2:
            merged = _Pair(*(torch.cat([m, p.narrow(dim, size - 1, 1)], dim) for m, p in zip(merged, a, strict=True)))
        a = merged
    if a.high.shape[dim] == 0:
        return _Pair(a.high.sum(dim), a.low.sum(dim))
    return _Pair(a.high.squeeze(dim), a.low.squeeze(dim))
