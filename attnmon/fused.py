"""Exact entropy, first-key weight and largest score of *every* row of a call, with memory linear in the lengths.

On a CPU the rows are done from their scores, a block of rows at a time in a buffer that fits the cache, as ``H = log Z
+ sum_j p_j (max - s_j)``: all terms are positive and nothing cancels. Nothing of size ``q_len x kv_len`` is ever made.

On a GPU the entropy comes from the fused kernel, called with keys in the place of values: it returns the log-sum-exp
and the mean key ``P K`` of each row, and ``H_i = lse_i - scale * q_i . (P K)_i``. That is one more forward of the
float32 call and a few passes over the queries. It is not exact everywhere: both terms grow with the scores while their
difference does not, and the kernel's float32 product ``P K`` adds many small terms to a large one. Three things keep
the error below a few 1e-6. The keys are first shifted by the mean key that the head attends to, which changes no
weight and makes both terms small for all rows that look where the others look (a sink). The rounding that is left is
estimated for each row. And where the estimate is too large, the rows are done again in blocks. The largest score is
found in such blocks, too: no kernel returns it.

Beside `attnmon.rows` this is the second place where query meets key, under the same rules: float32 (float64 if the
model is), heads grouped by the key head they read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from attnmon.masks import distinct, hides
from attnmon.metrics.entropy import ENTROPY_STATISTICS, MIN_KEYS, _normalized, _share
from attnmon.scratch import Scratch
from attnmon.types import AttentionCall

__all__ = ["BASES", "covers", "fused_rows"]

_ENTROPY = frozenset(ENTROPY_STATISTICS)
BASES = _ENTROPY | {"first_key_weight", "score_max"}
"""Quantities that `fused_rows` knows."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Where blocks of scores take longer than the kernel: a GPU has to be filled by one operation, and its memory is slow
# beside its arithmetic.
_KERNEL = frozenset({"cuda"})
# Scores of a block, in elements, and its rows: few, so that a causal block holds little above its diagonal, and so few
# that it stays in the second-level caches of a few cores, but enough for an efficient product. Where all that is made
# of a block is its largest score, it gains more from fewer operations.
_BLOCK = {"cpu": (1 << 19, 128), "cuda": (1 << 22, 128)}
_LARGE_BLOCK = {"cuda": (1 << 24, 128)}
# The kernel's own mask, where a mask or a causal limit differs from row to row: elements and rows.
_BIAS = (1 << 20, 512)

# Largest error, in nats, that a row of the kernel may be estimated to have. The estimates of `_rounding` are high: at
# this limit no row was found more than 4e-6 away from the materialised computation.
_TOLERATED = 1.2e-5
_PILOT_ROWS = 8
_LEAST_ROWS = 32  # of a block, whatever the size of a group
_LEAST_WIDTH = 16  # of a head: `_rounding` was not calibrated below, and came out too small there


def covers(call: AttentionCall, bases: Iterable[str]) -> bool:
    """Whether `fused_rows` can give these quantities of a call (but for rows that are not finite).

    Reads a floating-point mask once, block by block, and waits for its device. Whoever calls `fused_rows` anyway need
    not ask first.

    Args:
        call: The call.
        bases: Names without arguments, out of `BASES`.

    Returns:
        False for a name that is not in `BASES`, a soft cap, an additive mask with entries that neither are 0 nor
        hide, a mask of another kind, and for a device or dtype that has not been provided for.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 4, 8)
        >>> call = AttentionCall("attn", x, x, x, attn_mask=None, causal_offset=0, scale=8**-0.5)
        >>> covers(call, ["entropy", "score_max"]), covers(call, ["separability"])
        (True, False)
    """
    if not _expressible(call, frozenset(bases)):
        return False
    mask = _by_key_head(call)
    if mask is None or mask.dtype == torch.bool:
        return True
    step = max(1, _BIAS[0] // mask[:, :, :, 0].numel())
    alone = call.causal_offset is not None
    return all(bool(_only_hides(mask[:, :, :, lo : lo + step], alone)) for lo in range(0, mask.shape[3], step))


@torch.no_grad()
def fused_rows(call: AttentionCall, bases: Iterable[str], scratch: Scratch | None = None) -> dict[str, Tensor] | None:
    """Measures every row of a call, with memory linear in the lengths.

    The figures are those of `attnmon.metrics` of the same names on the rows of `attnmon.rows.all_rows`, to a few 1e-6
    (nats, weights; of the largest score itself); where scores are in the hundreds, to the rounding that they have in
    float32.

    Source: Shannon entropy of the weights of section 2.1 of arXiv 2508.17821, as the log-sum-exp of the scores less
    their mean; see `attnmon.metrics.attention_entropy`, `first_key_weight` and `score_max` for each of the figures.

    Must run with full-precision products (`attnmon.agreement.full_precision`).

    Args:
        call: The call.
        bases: Names without arguments, out of `BASES`.
        scratch: Memory for a copy of the keys, which the next call uses again; None: each takes its own.

    Returns:
        Each name to ``(batch, num_heads, q_len)``, float32 (float64 if the query is), on the device of the call: nats,
        shares, keys, weights and scaled scores as in `attnmon.metrics`; NaN where a row has no such figure. Padding
        rows are measured like others. None if `covers` is False, or if a query or key is not finite or so large that
        a score may overflow: then rows have to be looked at one by one.

    Example:
        >>> import torch
        >>> x = torch.zeros(1, 1, 3, 8)
        >>> call = AttentionCall("attn", x, x, x, attn_mask=None, causal_offset=0, scale=8**-0.5)
        >>> rows = fused_rows(call, ["effective_keys", "first_key_weight"])
        >>> rows["effective_keys"], rows["first_key_weight"]
        (tensor([[[1., 2., 3.]]]), tensor([[[1.0000, 0.5000, 0.3333]]]))
    """
    names = tuple(bases)
    if not _expressible(call, frozenset(names)):
        return None
    with torch.autocast(call.query.device.type, enabled=False):
        found = _Walk(call, frozenset(names), scratch or Scratch()).figures()
    return None if found is None else {name: found[name].flatten(1, 2) for name in names}


_Rows = tuple[int, slice, slice, slice]
_Reduce = Callable[[_Rows, Tensor, Tensor, Tensor | None, int, Tensor | None], None]


class _Walk:
    """What is measured of one call.

    Heads are grouped by the key head they read: what is kept per row is ``(batch, num_kv_heads, group, q_len)``.
    """

    def __init__(self, call: AttentionCall, wanted: frozenset[str], scratch: Scratch) -> None:
        self.scratch = scratch
        batch, heads, q_len, _ = call.query.shape
        kv_heads, self.kv_len = call.key.shape[1:3]
        self.device = call.query.device
        self.dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
        self.limits = torch.finfo(self.dtype)
        self.scale = call.scale
        self.query = call.query.detach().to(self.dtype).unflatten(1, (kv_heads, heads // kv_heads))
        self.key = call.key.detach().to(self.dtype)
        self.mask = _by_key_head(call)
        self.offset = call.causal_offset
        self.wanted = wanted
        self.wants_weights = bool((_ENTROPY | {"first_key_weight"}) & wanted)
        self.shape = (batch, kv_heads, heads // kv_heads, q_len)
        self.count = self._count()
        # Of each row, with weights relative to any one number: their sum, that of weight times logarithm of the weight,
        # the first key's, and, apart from these, the largest score.
        self.total, self.mixed, self.first, self.largest = self.query.new_empty(4, *self.shape)
        self.futures: dict[tuple[int, int, int], Tensor] = {}
        self.only_hides = torch.ones((), dtype=torch.bool, device=self.device)
        # Below this a weight is no normal number any more, and the vectorised exp falls back to a slow path.
        self.floor = math.ceil(math.log(self.limits.tiny))

    def figures(self) -> dict[str, Tensor] | None:
        """All quantities that were wanted, ``(batch, num_kv_heads, group, q_len)``, or None."""
        kind = self.device.type
        left: Tensor | None = None  # of all rows the weights are still to be measured
        reach: Tensor | None = None
        if self.wants_weights and kind in _KERNEL and self._kernel_suits():
            left, reach = self._by_kernel()
        longest = float(self._reach() if reach is None else reach)
        if not longest < self.limits.max / 4:  # near the number that hides a key, or NaN
            return None
        self.far = 2 * longest > -self.floor
        largest: list[_Reduce] = [self._largest] if "score_max" in self.wanted else []
        weights: list[_Reduce] = [self._weights] if self.wants_weights and (left is None or bool(left.any())) else []
        if kind in _KERNEL:
            self._in_blocks(None, _LARGE_BLOCK[kind], largest)
            self._in_blocks(left, _BLOCK[kind], weights)
        else:
            self._in_blocks(None, _BLOCK[kind], largest + weights)
        if not bool(self.only_hides):
            return None
        blind = self.count < 1
        found = {}
        if "score_max" in self.wanted:
            found["score_max"] = self.largest.masked_fill_(blind, torch.nan)
        if "first_key_weight" in self.wanted:
            found["first_key_weight"] = self.first.div_(self.total).clamp_max_(1.0).masked_fill_(blind, torch.nan)
        if _ENTROPY & self.wanted:
            entropy = self.total.log().sub_(self.mixed.div_(self.total)).clamp_min_(0.0)
            entropy = entropy.minimum(self.count.log()).masked_fill_(blind, torch.nan)
            makers: dict[str, Callable[[], Tensor]] = {
                "entropy": lambda: entropy,
                "entropy_normalized": lambda: _normalized(entropy, self.count),
                "effective_keys": entropy.exp,
                "active_share": lambda: _share(entropy, self.count, MIN_KEYS),
            }
            found |= {name: make() for name, make in makers.items() if name in self.wanted}
        return found

    def _count(self) -> Tensor:
        """How many keys each row sees, broadcastable to ``(batch, num_kv_heads, group, q_len)``.

        Of a mask, which is counted where it is read, there is only room for it.
        """
        if self.mask is not None:
            return torch.empty(self.shape, device=self.device, dtype=self.dtype)
        if self.offset is None:
            return torch.full((1, 1, 1, 1), self.kv_len, device=self.device, dtype=self.dtype)
        first = self.offset + 1
        count = torch.arange(first, first + self.shape[-1], device=self.device, dtype=self.dtype)
        return count.clamp_(0, self.kv_len)[None, None, None]

    def _reach(self) -> Tensor:
        """What no score is above, a scalar; NaN if something is not finite."""
        reach: Tensor = _length(self.query.flatten(1, 2)).amax() * abs(self.scale) * _length(self.key).amax()
        return reach

    # ---- which keys a row sees

    def _causal(self, lo: int, hi: int) -> tuple[int, int, Tensor | None]:
        """How many keys some row of a block sees, from which on not all of them do, and there: 1.0 = not seen."""
        if self.offset is None:
            return self.kv_len, self.kv_len, None
        keys = min(self.kv_len, max(1, hi + self.offset))
        tail = min(keys, max(0, lo + self.offset + 1))
        if tail == keys:
            return keys, tail, None
        kind = (hi - lo, keys - tail, lo + self.offset - tail)  # the same for most blocks
        if kind not in self.futures:
            rows, columns, first = kind
            last = torch.arange(first, first + rows, device=self.device)
            self.futures[kind] = (torch.arange(columns, device=self.device) > last[:, None]).to(self.dtype)
        return keys, tail, self.futures[kind]

    def _shown(
        self, heads: tuple[slice, slice], lo: int, hi: int, keys: int, tail: int, future: Tensor | None
    ) -> Tensor | None:
        """Mask and causality of a block as 1.0 = visible, ``(batch or 1, kv_heads or 1, group or 1, rows or 1, keys)``.

        None without a mask. `heads`: which sequences and key heads; what these share is made, and counted, for all.
        """
        if self.mask is None:
            return None
        at = tuple(part if size > 1 else slice(None) for part, size in zip(heads, self.mask.shape, strict=False))
        mask = self.mask[at]
        mask = mask[:, :, :, lo:hi] if mask.shape[3] > 1 else mask
        if mask.dtype != torch.bool:
            self.only_hides &= _only_hides(mask, self.offset is not None)
            mask = mask == 0
        shown = mask[..., :keys].to(self.dtype)  # a copy: the model's own mask stays as it is
        if future is not None:
            shown = shown.expand(*shown.shape[:3], hi - lo, keys).contiguous()
            shown[..., tail:] *= 1 - future
        self.count[(*at, slice(None), slice(lo, hi))] = shown.sum(-1)
        return shown

    # ---- the kernel

    def _kernel_suits(self) -> bool:
        return self.key.shape[-1] >= _LEAST_WIDTH and _kernel_works(self.device, self.dtype)

    def _by_kernel(self) -> tuple[Tensor | None, Tensor | None]:
        """Entropy and first-key weight of all rows from the fused kernel.

        Returns:
            ``(batch, num_kv_heads, group, q_len)``: True for the rows of which that is not exact enough; None for all.
            And what no score is above, a scalar, if that was found on the way.
        """
        shift, key, widest, usable = self._shifted()
        if not usable:  # the kernel's time would be lost
            return None, None
        scale = abs(self.scale)
        lse, size, length, mixed = self.query.new_empty(4, *self.shape)
        for rows, keys, shown, is_causal in self._strips():
            bias = None if shown is None else (shown - 1) * (self.limits.max / 2)
            those = key[:, :, :keys]
            for group in range(self.shape[2]):
                at = (slice(None), slice(None), group, rows)
                query = self.query[at]
                mean, lse[at] = _attend(query, those, _of_group(bias, group), is_causal, scale)
                size[at] = _length(query)
                length[at] = _length(mean)
                mixed[at] = mean.mul_(query).transpose(1, 2).sum(-1).transpose(1, 2)
                if "first_key_weight" in self.wanted:
                    hidden = None if self.mask is None else _of_group(shown, group)
                    self.first[at] = _first_score(query, those, hidden)
        self.total.fill_(1.0)
        torch.sub(mixed.mul_(scale), lse, out=self.mixed)
        # A row that sees one key is exact by its bounds; one that sees none has no figure.
        self.first.mul_(scale).sub_(lse).exp_().masked_fill_(self.count == 1, 1.0)
        size.mul_(scale)
        exact = self._rounding(size, length, lse, widest[..., None], self.count) <= _TOLERATED  # False for NaN
        left = exact.logical_or_(self.count <= 1).logical_not_()
        # The kernel multiplies by the scale at last.
        return left, size.amax() * (widest.amax() + _length(shift).amax()) * max(1.0, 1 / scale)

    def _shifted(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Keys less the mean key that the head attends to, with the sign of the scale.

        Returns:
            That mean key, ``(batch, num_kv_heads, 1, head_dim)``; the shifted keys, ``(batch, num_kv_heads, kv_len,
            head_dim)``; the length of the longest of these, ``(batch, num_kv_heads, 1)``; and False if most rows are
            not exact enough even so.
        """
        scale = abs(self.scale)
        step = -(-self.shape[3] // _PILOT_ROWS)
        pilot = self.query[:, :, :, ::step].flatten(2, 3)
        if self.scale < 0:
            pilot = -pilot
        mean, lse = _attend(pilot, self.key, None, False, scale)  # future keys do no harm: any shift is right
        shift = mean.mean(2, keepdim=True)
        key = self.scratch.take("shifted keys", *self.key.shape, like=self.key)
        torch.sub(*((self.key, shift) if self.scale > 0 else (shift, self.key)), out=key)
        widest = torch.linalg.vector_norm(key, dim=-1).amax(-1, keepdim=True)
        pilot = pilot * scale
        lse = lse - (pilot * shift).sum(-1)
        every = self.query.new_full((), self.kv_len)
        rounding = self._rounding(_length(pilot), _length(mean - shift), lse, widest, every)
        return shift, key, widest, not bool((rounding > _TOLERATED).double().mean() > 0.5)

    def _strips(self) -> Iterator[tuple[slice, int, Tensor | None, bool]]:
        """Rows that one call of the kernel may take.

        Yields:
            Which rows; how many keys some of them see; which of these keys each sees, as `_shown` has it, None for all;
            and whether it is the kernel that hides later keys.
        """
        q_len = self.query.shape[3]
        every = (slice(None), slice(None))
        if (self.mask is None or self.mask.shape[3] == 1) and self.offset in (None, 0):
            keys = self.kv_len if self.offset is None else min(self.kv_len, q_len)
            shown = self._shown(every, 0, q_len, keys, keys, None)
            if shown is not None and self.offset == 0:
                last = torch.arange(q_len, device=self.device).clamp_max(keys - 1)
                self.count[:] = shown.cumsum(-1).squeeze(3)[..., last]
            yield slice(0, q_len), keys, shown, self.offset == 0
            return
        most, step = _BIAS
        per_row = self.kv_len * (1 if self.mask is None else math.prod(self.mask.shape[:3]))
        step = max(1, min(step, most // per_row))
        for lo in range(0, q_len, step):
            hi = min(lo + step, q_len)
            keys, tail, future = self._causal(lo, hi)
            shown = self._shown(every, lo, hi, keys, tail, future)
            if shown is None and future is not None:
                shown = F.pad(1 - future, (tail, 0), value=1.0)[None, None, None]
            yield slice(lo, hi), keys, shown, False

    def _rounding(self, size: Tensor, length: Tensor, lse: Tensor, widest: Tensor, count: Tensor) -> Tensor:
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
        split = 4 if self.device.type == "cuda" else 1  # there a float32 product is put together from shorter ones
        return terms.addcmul_(size, widest, value=0.1).mul_(2 * split * self.limits.eps)

    # ---- blocks of scores

    def _in_blocks(self, rows: Tensor | None, block: tuple[int, int], reduce: Sequence[_Reduce]) -> None:
        """Forms the scores of all blocks with some of `rows`, None for all, and gives them to each of `reduce`."""
        if not reduce:
            return
        batch, kv_heads, group, q_len = self.shape
        most, step = block
        step = min(max(_LEAST_ROWS, step // group), max(1, most // (group * self.kv_len)), q_len)
        most = min(max(most, group * step * self.kv_len), kv_heads * group * step * self.kv_len)
        buffers = [self.scratch.take(name, most, like=self.query) for name in ("block", "weights of block")]
        self.key = self.key.contiguous()  # it is read for each block of rows
        every = [[True] * kv_heads] * batch
        for lo in range(0, q_len, step):
            hi = min(lo + step, q_len)
            needed = every if rows is None else rows[..., lo:hi].flatten(2).any(-1).tolist()
            if not any(map(any, needed)):
                continue
            keys, tail, future = self._causal(lo, hi)
            chunk = max(1, most // (group * (hi - lo) * keys))  # key heads
            chunk = -(-kv_heads // -(-kv_heads // chunk))  # as many in each
            for b in range(batch):
                shown: Tensor | None = None
                for heads in _runs(needed[b], chunk):
                    if self.mask is not None and (shown is None or self.mask.shape[1] > 1):
                        shown = self._shown((slice(b, b + 1), heads), lo, hi, keys, tail, future)
                    at = (b, heads, slice(None), slice(lo, hi))
                    query = self.query[at]
                    shape = (*query.shape[:3], keys)
                    scores, other = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                    query = query.reshape(shape[0], -1, query.shape[-1]) * self.scale
                    torch.bmm(query, self.key[b, heads, :keys].mT, out=scores.view(*query.shape[:2], keys))
                    visible = None if shown is None else shown[0]
                    for measure in reduce:
                        measure(at, scores, other, visible, tail, future)

    def _largest(
        self, at: _Rows, scores: Tensor, other: Tensor, shown: Tensor | None, tail: int, future: Tensor | None
    ) -> None:
        """Largest absolute score of a block's rows; in ``scores (heads, group, rows, keys)`` hidden ones become 0."""
        # 0 where a key is not visible: the largest absolute value of the others is not below it.
        if shown is not None:
            torch.mul(scores, shown, out=scores)
        elif future is not None:
            scores[..., tail:] *= 1 - future
        self.largest[at] = torch.maximum(scores.amax(-1), -scores.amin(-1))

    def _weights(
        self, at: _Rows, scores: Tensor, other: Tensor, shown: Tensor | None, tail: int, future: Tensor | None
    ) -> None:
        """Entropy and first-key weight of a block's rows; ``scores (heads, group, rows, keys)`` is overwritten."""
        # Not -inf, with which 0 * log 0 would be NaN. An addition is far faster on a CPU than a choice.
        if shown is not None:
            scores += (shown - 1) * (self.limits.max / 2)
        elif future is not None:
            scores[..., tail:].add_(future, alpha=self.limits.min / 2)
        below = scores.sub_(scores.amax(-1, keepdim=True))
        if self.far or shown is not None:
            below.clamp_min_(self.floor)
        elif future is not None:
            below[..., tail:].clamp_min_(self.floor)
        terms = torch.exp(below, out=other)
        torch.sum(terms, -1, out=self.total[at])
        if "first_key_weight" in self.wanted:
            if shown is None:
                self.first[at] = terms[..., 0]
            else:
                self.first[at] = terms.gather(-1, _first(shown)[..., None].expand(*terms.shape[:-1], 1)).squeeze(-1)
        torch.sum(below.mul_(terms), -1, out=self.mixed[at])


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


def _of_group(mask: Tensor | None, group: int) -> Tensor | None:
    """A mask by key head for one query head of each: ``(batch or 1, num_kv_heads or 1, rows or 1, keys)``."""
    return None if mask is None else mask[:, :, group if mask.shape[2] > 1 else 0]


def _length(vectors: Tensor) -> Tensor:
    """``(batch, heads, rows, dim)`` to ``(batch, heads, rows)``."""
    # With rows before heads this takes half as long, however the vectors lie.
    length: Tensor = torch.linalg.vector_norm(vectors.transpose(1, 2), dim=-1)
    return length.transpose(1, 2)


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
    index = _first(shown).expand(*key.shape[:2], -1)[..., None]
    first = key.gather(2, index.expand(*index.shape[:3], key.shape[3]))
    if first.shape[2] == 1:
        return torch.matmul(first, query.mT).squeeze(-2)
    return first.mul_(query).sum(-1)


def _first(shown: Tensor) -> Tensor:
    """Index of the first visible key, ``(..., keys)`` to ``(...)`` int64 (the last key where none is)."""
    keys = shown.shape[-1]
    ramp = torch.arange(keys, 0, -1, device=shown.device, dtype=shown.dtype)
    return (keys - (shown * ramp).amax(-1)).long().clamp_max(keys - 1)


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


def _expressible(call: AttentionCall, wanted: frozenset[str]) -> bool:
    """`covers`, but for the entries of a floating-point mask."""
    query, key, mask = call.query, call.key, call.attn_mask
    if not wanted <= BASES or call.softcap is not None:
        return False
    if query.device.type not in _BLOCK or query.dtype not in _DTYPES or key.dtype not in _DTYPES:
        return False
    if query.numel() == 0 or key.numel() == 0:
        return False
    if mask is None:
        return True
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask.dim() > 4 or any(size not in (1, most) for size, most in zip(mask.shape[::-1], full[::-1], strict=False)):
        return False
    return mask.dtype == torch.bool or mask.dtype in _DTYPES


def _by_key_head(call: AttentionCall) -> Tensor | None:
    """The mask as a view, ``(batch or 1, num_kv_heads or 1, group or 1, q_len or 1, kv_len)``."""
    if call.attn_mask is None:
        return None
    mask = call.attn_mask.detach()
    mask = mask[(None,) * (4 - mask.dim())]
    mask = distinct(mask.expand(*mask.shape[:3], call.key.shape[2]))
    if mask.shape[1] == 1:
        return mask[:, :, None]
    grouped: Tensor = mask.unflatten(1, (call.num_kv_heads, call.num_heads // call.num_kv_heads))
    return grouped


def _only_hides(bias: Tensor, alone: bool) -> Tensor:
    """Whether all of an additive mask ``(..., n)`` is 0 or hides; `alone`: without regard to the row it stands in.

    Beside a causal limit the largest entry of a row may belong to a key that it does not see.
    """
    hidden = hides(bias[..., None])[..., 0] if alone else hides(bias)
    return ((bias == 0) | hidden).all()
