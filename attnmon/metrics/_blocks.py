"""From any batch of rows to blocks of groups that fit the memory budget, and back.

`_over_blocks` checks the arguments of a top-N quantity, finds which rows share their vectors, and hands blocks of them
to a function of a `_Block`. `attnmon.metrics.selection_statistics` is what most callers want.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from attnmon.masks import broadcast_shape
from attnmon.metrics._checks import _check_floating, _check_mask, _check_top_n
from attnmon.metrics._group import _block_elements, _Group
from attnmon.metrics._selection import _GATHERED, _Block

__all__: list[str] = []

# Largest components between which float32 has room for their squares, and for those of small weights.
_SMALLEST, _LARGEST = 1e-12, 1e12

Fields = Callable[[_Block], dict[str, Tensor]]


def _over_blocks(
    weights: Tensor,
    vectors: Tensor,
    top_n: int | Iterable[int],
    mask: Tensor | None,
    fields: Fields,
    precise: bool = False,
) -> dict[str, Tensor]:
    """Check and group the arguments of a top-N quantity and gather what `fields` makes of each block.

    With `precise`, float32 rows are computed in float64 where the device has it.

    Returns:
        Every field as ``(..., K)`` in the dtype of the result, NaN where a row is unusable or sees at most N keys.
    """
    weights = _check_floating("weights", weights, "(..., n)", 1)
    vectors = _check_floating("vectors", vectors, "(..., n, d)", 2)
    mask = _check_mask(mask, weights, "weights")
    n, d = vectors.shape[-2:]
    if weights.shape[-1] != n:
        raise ValueError(
            f"Expected `vectors` to hold one vector for each of the {weights.shape[-1]} keys of `weights`, but got "
            f"{n}: shape {tuple(vectors.shape)} for weights of shape {tuple(weights.shape)}. The key is dimension -2."
        )
    sizes, single = _check_top_n(top_n, n)
    result = torch.promote_types(weights.dtype, vectors.dtype)
    lead = weights.shape[:-1] if mask is None else broadcast_shape(weights.shape[:-1], mask.shape[:-1])
    try:
        lead = broadcast_shape(lead, vectors.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"Expected `vectors` to broadcast over the rows of `weights`, {tuple(weights.shape[:-1])}, but got leading "
            f"dimensions {tuple(vectors.shape[:-2])}. Rows that share their vectors need a 1 there, e.g. "
            "`vectors.unsqueeze(-3)` for weights (batch, heads, rows, n) and vectors (batch, heads, n, d)."
        ) from None
    # The trailing dimensions that `vectors` lacks or holds once are the rows of a group.
    batch = (1,) * (len(lead) - vectors.dim() + 2) + tuple(vectors.shape[:-2])
    cut = len(lead)
    while cut and batch[cut - 1] == 1:
        cut -= 1
    groups, rows = math.prod(lead[:cut]), math.prod(lead[cut:])
    weights = weights.detach().expand(*lead, n).reshape(groups, rows, n)
    mask = None if mask is None else mask.expand(*lead, n).reshape(groups, rows, n)
    vectors = vectors.detach().reshape(*batch[:cut], n, d).expand(*lead[:cut], n, d).reshape(groups, n, d)
    if precise and weights.device.type != "mps":
        weights, vectors = weights.double(), vectors.double()
    with torch.autocast(weights.device.type, enabled=False):  # it would do the matrix products in half precision
        out = _grouped(weights, vectors, sizes, mask, fields, torch.promote_types(weights.dtype, vectors.dtype))
    shape = lead if single else (*lead, len(sizes))
    return {name: value.reshape(shape).to(result) for name, value in out.items()}


@torch.no_grad()
def _grouped(
    weights: Tensor,
    vectors: Tensor,
    sizes: tuple[int, ...],
    mask: Tensor | None,
    fields: Fields,
    result: torch.dtype,
) -> dict[str, Tensor]:
    """`fields` of weights (G, R, n) and vectors (G, n, d), block by block: name -> (G, R, K)."""
    groups, rows, n = weights.shape
    if not groups * rows:  # one row of zeros says which fields there are
        block = _Block(
            weights.new_zeros(1, 1, n), _Group(vectors.new_zeros(1, n, vectors.shape[-1]), True), None, sizes
        )
        return {name: weights.new_empty(groups, rows, len(sizes), dtype=result) for name in fields(block)}
    direct = result == torch.float64 or weights.device.type != "cuda"
    work = result if direct and not _extreme(vectors) else torch.float64
    some = max(1, min(groups, _block_elements(weights.device, work) // (rows * _per_row(n, vectors.shape[-1], sizes))))
    out: dict[str, Tensor] = {}
    for g in range(0, groups, some):
        at = slice(g, g + some)
        part = _over_rows(
            weights[at], _Group(vectors[at].to(work), direct), sizes, None if mask is None else mask[at], fields, result
        )
        for name, value in part.items():
            if name not in out:
                out[name] = torch.empty(groups, rows, len(sizes), dtype=result, device=weights.device)
            out[name][at] = value
    return out


def _extreme(vectors: Tensor) -> bool:
    """Whether squares of the vectors leave the range of float32, or come near its ends."""
    if vectors.dtype != torch.float32:
        return False
    largest = float(vectors.abs().amax())
    return 0 < largest < _SMALLEST or _LARGEST < largest < math.inf


def _over_rows(
    weights: Tensor,
    group: _Group,
    sizes: tuple[int, ...],
    mask: Tensor | None,
    fields: Fields,
    result: torch.dtype,
) -> dict[str, Tensor]:
    """`fields` of weights (G, R, n) whose vectors are prepared, a block of rows after the other: name -> (G, R, K)."""
    groups, rows, n = weights.shape
    d, work = group.vectors.shape[-1], group.vectors.dtype
    step = max(1, min(rows, _block_elements(weights.device, work) // (groups * _per_row(n, d, sizes))))
    out: dict[str, Tensor] = {}
    for r in range(0, rows, step):
        at = (slice(None), slice(r, r + step))
        block = _Block(weights[at].to(work), group, None if mask is None else mask[at], sizes)
        for name, value in fields(block).items():
            if name not in out:
                out[name] = torch.empty(groups, rows, len(sizes), dtype=result, device=weights.device)
            out[name][at] = torch.where(block.defined, value, torch.nan).to(result)
    return out


def _per_row(n: int, d: int, sizes: tuple[int, ...]) -> int:
    """Elements of the largest temporary of one row."""
    return n * len(sizes) + (max(sizes) * d if max(sizes) <= _GATHERED else 0)
