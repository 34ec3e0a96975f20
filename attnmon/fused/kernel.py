"""Entropy and first-key weight of rows from the fused attention kernel, called with keys in the place of values.

It returns the log-sum-exp and the mean key ``P K`` of each row, and ``H_i = lse_i - scale * q_i . (P K)_i``. That is
one more forward of the float32 call and a few passes over the queries. It is not exact everywhere: both terms grow
with the scores while their difference does not, and the kernel's float32 product ``P K`` adds many small terms to a
large one. Two things keep the error below a few 1e-6. The keys are first shifted by the mean key that the head attends
to, which changes no weight and makes both terms small for all rows that look where the others look (a sink). And the
rounding that is left is estimated for each row, so that rows of which it is too large can be done in another way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attnmon.fused.walk import Walk, first_visible, norms

__all__ = ["by_kernel", "suits"]

# A mask of the kernel's own, where a mask or a causal limit differs from row to row: elements and rows.
_BIAS = (1 << 20, 512)
# Largest error, in nats, that a row may be estimated to have. The estimates are high: at this limit no row was found
# more than 4e-6 away from the materialised computation.
_TOLERATED = 1.2e-5
_PILOT_ROWS = 8
_LEAST_WIDTH = 16  # of a head: `_rounding` was not calibrated below, and came out too small there


def suits(walk: Walk) -> bool:
    """Whether it can be called for this call."""
    return walk.key.shape[-1] >= _LEAST_WIDTH and _kernel_works(walk.device, walk.dtype)


def by_kernel(walk: Walk, wants_first: bool) -> tuple[Tensor | None, Tensor | None]:
    """Measures entropy and first-key weight of all rows.

    Args:
        walk: Takes the sums.
        wants_first: Whether the first key's weight is wanted.

    Returns:
        ``(batch, num_kv_heads, group, q_len)``: True for the rows of which that is not exact enough; None for all.
        And what no score is above, a scalar, if that was found on the way.
    """
    shift, key, widest, usable = _shifted(walk)
    if not usable:  # the kernel's time would be lost
        return None, None
    scale = abs(walk.scale)
    lse, size, length, mixed = walk.query.new_empty(4, *walk.shape)
    for rows, keys, shown, is_causal in _strips(walk):
        bias = None if shown is None else (shown - 1) * (walk.limits.max / 2)
        those = key[:, :, :keys]
        for group in range(walk.shape[2]):
            at = (slice(None), slice(None), group, rows)
            query = walk.query[at]
            mean, lse[at] = _attend(query, those, _of_group(bias, group), is_causal, scale)
            size[at] = norms(query)
            length[at] = norms(mean)
            mixed[at] = mean.mul_(query).transpose(1, 2).sum(-1).transpose(1, 2)
            if wants_first:
                visible = None if walk.mask is None else _of_group(shown, group)
                walk.first[at] = _first_score(query, those, visible)
    walk.total.fill_(1.0)
    torch.sub(mixed.mul_(scale), lse, out=walk.mixed)
    # A row that sees one key is exact by its bounds; one that sees none has no figure.
    walk.first.mul_(scale).sub_(lse).exp_().masked_fill_(walk.count == 1, 1.0)
    size.mul_(scale)
    exact = _rounding(size, length, lse, widest[..., None], walk.count) <= _TOLERATED  # False for NaN
    left = exact.logical_or_(walk.count <= 1).logical_not_()
    # The kernel multiplies by the scale at last.
    return left, size.amax() * (widest.amax() + norms(shift).amax()) * max(1.0, 1 / scale)


def _shifted(walk: Walk) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Keys less the mean key that the head attends to, with the sign of the scale.

    Returns:
        That mean key, ``(batch, num_kv_heads, 1, head_dim)``; the shifted keys, ``(batch, num_kv_heads, kv_len,
        head_dim)``; the length of the longest of these, ``(batch, num_kv_heads, 1)``; and False if most rows are
        not exact enough even so.
    """
    scale = abs(walk.scale)
    step = -(-walk.shape[3] // _PILOT_ROWS)
    pilot = walk.query[:, :, :, ::step].flatten(2, 3)
    if walk.scale < 0:
        pilot = -pilot
    mean, lse = _attend(pilot, walk.key, None, False, scale)  # future keys do no harm: any shift is right
    shift = mean.mean(2, keepdim=True)
    key = walk.scratch.take("shifted keys", *walk.key.shape, like=walk.key)
    torch.sub(*((walk.key, shift) if walk.scale > 0 else (shift, walk.key)), out=key)
    widest = torch.linalg.vector_norm(key, dim=-1).amax(-1, keepdim=True)
    pilot = pilot * scale
    lse = lse - (pilot * shift).sum(-1)
    every = walk.query.new_full((), walk.kv_len)
    rounding = _rounding(norms(pilot), norms(mean - shift), lse, widest, every)
    return shift, key, widest, not bool((rounding > _TOLERATED).double().mean() > 0.5)


def _strips(walk: Walk) -> Iterator[tuple[slice, int, Tensor | None, bool]]:
    """Rows that one call of the kernel may take.

    Yields:
        Which rows; how many keys some of them see; which of these keys each sees, as `Walk.shown` has it, None for all;
        and whether it is the kernel that hides later keys.
    """
    q_len = walk.query.shape[3]
    every = (slice(None), slice(None))
    if (walk.mask is None or walk.mask.shape[3] == 1) and walk.offset in (None, 0):
        keys = walk.kv_len if walk.offset is None else min(walk.kv_len, q_len)
        shown = walk.shown(every, 0, q_len, keys, keys, None)
        if shown is not None and walk.offset == 0:
            last = torch.arange(q_len, device=walk.device).clamp_max(keys - 1)
            walk.count[:] = shown.cumsum(-1).squeeze(3)[..., last]
        yield slice(0, q_len), keys, shown, walk.offset == 0
        return
    most, step = _BIAS
    per_row = walk.kv_len * (1 if walk.mask is None else math.prod(walk.mask.shape[:3]))
    step = max(1, min(step, most // per_row))
    for lo in range(0, q_len, step):
        hi = min(lo + step, q_len)
        keys, tail, future = walk.causal(lo, hi)
        shown = walk.shown(every, lo, hi, keys, tail, future)
        if shown is None and future is not None:
            shown = F.pad(1 - future, (tail, 0), value=1.0)[None, None, None]
        yield slice(lo, hi), keys, shown, False


def _rounding(size: Tensor, length: Tensor, lse: Tensor, widest: Tensor, count: Tensor) -> Tensor:
    """Estimate of the error of ``lse - query . mean`` (and of a score less `lse`) by rounding, in nats.

    Rounding of either term, growth of the error of ``P K`` with the number of terms in it, rounding of the scores.
    The factors were found by comparison with float64, over 120 kinds of rows (sinks small and large, rotary keys,
    low rank, heavy dimensions, opposed keys; head_dim 16 to 128): the error was at most 2 times the estimate, and
    0.3 times it as a rule.

    Args:
        size: ``(..., rows)``, length of the queries, times the scale.
        length: ``(..., rows)``, length of the mean key of each row.
        lse: ``(..., rows)``, log-sum-exp of its scores.
        widest: ``(..., 1)``, length of the longest key.
        count: ``(..., rows)``, how many keys the row sees.
    """
    product = size * length
    terms = torch.addcmul(lse.abs().add_(product).add_(1), count.sqrt(), product, value=0.25)
    split = 4 if size.device.type == "cuda" else 1  # there a float32 product is put together from shorter ones
    return terms.addcmul_(size, widest, value=0.1).mul_(2 * split * torch.finfo(size.dtype).eps)


def _of_group(mask: Tensor | None, group: int) -> Tensor | None:
    """A mask by key head for one query head of each: ``(batch or 1, num_kv_heads or 1, rows or 1, keys)``."""
    return None if mask is None else mask[:, :, group if mask.shape[2] > 1 else 0]


def _first_score(query: Tensor, key: Tensor, shown: Tensor | None) -> Tensor:
    """Score of the first visible key of each row.

    Args:
        query: ``(batch, heads, rows, head_dim)``.
        key: ``(batch, heads, n, head_dim)``.
        shown: ``(batch or 1, heads or 1, rows or 1, n)``, 1.0 = visible; None: all rows see the first.

    Returns:
        ``(batch, heads, rows)``, without the scale.
    """
    if shown is None:
        return torch.matmul(key[:, :, :1], query.mT).squeeze(-2)  # twice as fast as the other way round
    index = first_visible(shown).expand(*key.shape[:2], -1)[..., None]
    first = key.gather(2, index.expand(*index.shape[:3], key.shape[3]))
    if first.shape[2] == 1:
        return torch.matmul(first, query.mT).squeeze(-2)
    return first.mul_(query).sum(-1)


def _attend(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Fused attention with the keys as values.

    Args:
        query: ``(batch, heads, rows, head_dim)``.
        key: ``(batch, heads, n, head_dim)``.
        bias: Broadcastable to ``(batch, heads, rows, n)``, added to the scores; None for nothing.
        is_causal: Row i sees keys up to i only.
        scale: Above 0.

    Returns:
        The mean key of each row, ``(batch, heads, rows, head_dim)``, and the log-sum-exp of its scores,
        ``(batch, heads, rows)``.
    """
    rows, n, head_dim = query.shape[2], key.shape[2], query.shape[3]
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, key, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return out, lse
    # Rows of queries, keys and bias have to start at multiples of 16 bytes; the log-sum-exp comes padded.
    query, key = (F.pad(x, (0, -head_dim % 8)) for x in (query, key))
    if bias is not None:
        bias = F.pad(bias, (0, -n % 8))[..., :n].expand(*query.shape[:3], n)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, key, bias, True, 0.0, is_causal, scale=scale
    )
    return out[..., :head_dim], lse[..., :rows]


@functools.cache
def _kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel, which is no public function, does what is expected of it here: tried once.

    The operators are torch's own business and may change or be missing (no float64 on CUDA); then all rows are done
    in blocks.
    """
    wave = torch.arange(2 * 2 * 70 * 12, dtype=torch.float64, device="cpu").sin().view(2, 2, 70, 12)
    query, key, scale = wave[:, :, :45] * 6, wave.cos(), 0.5
    bias = torch.zeros(1, 1, 1, 70, dtype=torch.float64, device="cpu")
    bias[..., :20] = torch.finfo(dtype).min / 2  # rows below 20 see nothing if causal
    for hidden, is_causal in ((None, False), (None, True), (bias, False), (bias, True)):
        scores = query @ key.mT * scale
        scores = scores if hidden is None else scores + hidden
        if is_causal:
            scores = scores.masked_fill(torch.ones(45, 70, dtype=torch.bool, device="cpu").triu(1), -math.inf)
        expected = (scores.softmax(-1) @ key, scores.logsumexp(-1))
        on_device = [None if x is None else x.to(device, dtype) for x in (query, key, hidden)]
        try:
            found = _attend(on_device[0], on_device[1], on_device[2], is_causal, scale)  # type: ignore[arg-type]
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return False
        seen = slice(20, None) if is_causal and hidden is not None else slice(None)
        for have, want in zip(found, expected, strict=True):
            if have.shape != want.shape or not torch.allclose(
                have.cpu().double()[:, :, seen], want[:, :, seen], 0, 2e-5
            ):
                return False
    return True
