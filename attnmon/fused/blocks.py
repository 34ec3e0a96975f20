"""Entropy, first-key weight and largest score of rows from their scores, a block of rows at a time.

``H = log Z + sum_j p_j (max - s_j)``: all terms are positive and nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attnmon.fused.walk import Walk, first_visible
from attnmon.scratch import Scratch

__all__ = ["Reduce", "in_blocks", "largest", "weights"]

_LEAST_ROWS = 32  # of a block, whatever the size of a group

_Rows = tuple[int, slice, slice, slice]
Reduce = Callable[[_Rows, Tensor, Tensor, Tensor | None, int, Tensor | None], None]


def in_blocks(walk: Walk, rows: Tensor | None, block: tuple[int, int], reduce: Sequence[Reduce]) -> None:
    """Forms the scores of all blocks with some rows, and gives them to each of `reduce`.

    Args:
        walk: The call.
        rows: ``(batch, num_kv_heads, group, q_len)``, True for those that are needed; None for all.
        block: Most scores of a block, and most rows.
        reduce: `largest` and `weights`, in this order, with what they need beside the block.
    """
    if not reduce:
        return
    batch, kv_heads, group, q_len = walk.shape
    most, step = block
    step = min(max(_LEAST_ROWS, step // group), max(1, most // (group * walk.kv_len)), q_len)
    most = min(max(most, group * step * walk.kv_len), kv_heads * group * step * walk.kv_len)
    # A GPU's own allocator hands memory out again; what the scratch holds stays until the step is over.
    scratch = walk.scratch if walk.device.type == "cpu" else Scratch()
    buffers = [scratch.take(name, most, like=walk.query) for name in ("block", "weights of block")]
    walk.key = walk.key.contiguous()  # it is read for each block of rows
    every = [[True] * kv_heads] * batch
    for lo in range(0, q_len, step):
        hi = min(lo + step, q_len)
        needed = every if rows is None else rows[..., lo:hi].flatten(2).any(-1).tolist()
        if not any(map(any, needed)):
            continue
        keys, tail, future = walk.causal(lo, hi)
        chunk = max(1, most // (group * (hi - lo) * keys))  # key heads
        chunk = -(-kv_heads // -(-kv_heads // chunk))  # as many in each
        for b in range(batch):
            shown: Tensor | None = None
            for heads in _runs(needed[b], chunk):
                if walk.mask is not None and (shown is None or walk.mask.shape[1] > 1):
                    shown = walk.shown((slice(b, b + 1), heads), lo, hi, keys, tail, future)
                at = (b, heads, slice(None), slice(lo, hi))
                query = walk.query[at]
                shape = (*query.shape[:3], keys)
                scores, other = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                query = query.reshape(shape[0], -1, query.shape[-1]) * walk.scale
                torch.bmm(query, walk.key[b, heads, :keys].mT, out=scores.view(*query.shape[:2], keys))
                visible = None if shown is None else shown[0]
                for measure in reduce:
                    measure(at, scores, other, visible, tail, future)


def largest(
    walk: Walk, at: _Rows, scores: Tensor, other: Tensor, shown: Tensor | None, tail: int, future: Tensor | None
) -> None:
    """Largest absolute score of a block's rows; in ``scores (heads, group, rows, keys)`` hidden ones become 0."""
    # 0 where a key is not visible: the largest absolute value of the others is not below it.
    if shown is not None:
        torch.mul(scores, shown, out=scores)
    elif future is not None:
        scores[..., tail:] *= 1 - future
    walk.largest[at] = torch.maximum(scores.amax(-1), -scores.amin(-1))


def weights(
    walk: Walk,
    wants_first: bool,
    far: bool,
    at: _Rows,
    scores: Tensor,
    other: Tensor,
    shown: Tensor | None,
    tail: int,
    future: Tensor | None,
) -> None:
    """Entropy and first-key weight of a block's rows; ``scores (heads, group, rows, keys)`` is overwritten.

    Args:
        walk: Takes the sums.
        wants_first: Whether the first key's weight is wanted.
        far: Whether a visible score may be so far below another that its weight is no normal number.
        at: Which rows.
        scores: ``(heads, group, rows, keys)``.
        other: Room of the same shape.
        shown: As `Walk.shown` has it, without the sequence.
        tail: From which key on `future` hides some.
        future: ``(rows, keys - tail)``, 1.0 = later than the row.
    """
    # Not -inf, with which 0 * log 0 would be NaN. An addition is far faster on a CPU than a choice.
    if shown is not None:
        scores += (shown - 1) * (walk.limits.max / 2)
    elif future is not None:
        scores[..., tail:].add_(future, alpha=walk.limits.min / 2)
    below = scores.sub_(scores.amax(-1, keepdim=True))
    if far or shown is not None:
        below.clamp_min_(walk.floor)
    elif future is not None:
        below[..., tail:].clamp_min_(walk.floor)
    terms = torch.exp(below, out=other)
    torch.sum(terms, -1, out=walk.total[at])
    if wants_first:
        if shown is None:
            walk.first[at] = terms[..., 0]
        else:
            walk.first[at] = terms.gather(-1, first_visible(shown)[..., None].expand(*terms.shape[:-1], 1)).squeeze(-1)
    torch.sum(below.mul_(terms), -1, out=walk.mixed[at])


def _runs(needed: Sequence[bool], most: int) -> Iterator[slice]:
    """Slices of at most `most` neighbours that together hold every place where `needed` is True."""
    start = 0
    while start < len(needed):
        if not needed[start]:
            start += 1
            continue
        stop = start + 1
        while stop < len(needed) and needed[stop] and stop - start < most:
            stop += 1
        yield slice(start, stop)
        start = stop
