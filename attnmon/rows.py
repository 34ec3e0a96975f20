"""Which rows of an attention call are looked at, and where query meets key (but for `attnmon.fused`).

One row is one query position of one head. A *sample* of rows is drawn per sequence, stratified over position, by draws
that depend on nothing but a seed and the step: they leave every global random state alone, and a resumed run looks at
the rows that the unbroken run would have looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnmon.masks import hides
from attnmon.scratch import Scratch
from attnmon.types import AttentionCall

__all__ = ["RowBatch", "RowBlock", "RowSampler", "Rows", "all_rows", "formed", "row_batches", "row_blocks", "rows_at"]

# Bound for one chunk's scores, in elements; the metrics' temporaries are a small multiple of it.
_CHUNK_ELEMENTS = 8_000_000
# On a CPU rows are taken in blocks of about this many scores, whose arrays stay in the cache; those of a causal call
# without the keys that none of the block's rows can see, which saves nearly half of the work.
_CACHED_ELEMENTS = 400_000
# Numbers of keys are multiples of this where they can be: they divide well then.
_ROUND = 32


class RowSampler:
    """Draws sequences and rows for one sampled step.

    Args:
        rows: Rows per sequence, or ``"all"``.
        sequences: Most sequences of a batch that are looked at.
        key: Anything whose text identifies the draw (seed, step, rank). The same key gives the same rows.

    The rows of a sequence are one uniform draw from each of ``rows`` equal strata of its valid positions, so every
    valid position is equally likely to be seen and the mean over rows is an unbiased estimate of the mean over all of
    them. A sequence with no more valid positions than ``rows`` is read whole. Where only some sequences of unequal
    length are looked at, the mean is a ratio estimate with the small bias of these.

    Attributes:
        key: What identifies the draw.
        generator: The source of these draws, for whatever else of this step needs one.
    """

    def __init__(self, rows: int | str, sequences: int, key: object) -> None:
        self.key = key
        self.rows = rows
        self.sequences = sequences
        self.generator = torch.Generator("cpu").manual_seed(random.Random(str(key)).getrandbits(63))
        self._selected: dict[int, Tensor | None] = {}
        self._uniforms: dict[tuple[int, int], Tensor] = {}
        self._drawn: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def select(self, batch: int) -> Tensor | None:
        """Indices of the sequences to look at, sorted, as a CPU LongTensor; None for all of them.

        The same answer for the same batch size throughout a step, so that all layers look at the same sequences.
        """
        if batch not in self._selected:
            chosen = None
            if batch > self.sequences:
                chosen = torch.randperm(batch, generator=self.generator, device="cpu")[: self.sequences].sort().values
            self._selected[batch] = chosen
        return self._selected[batch]

    def positions(self, batch: int, q_len: int, valid: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Query positions to look at.

        Args:
            batch: Number of sequences (after selection).
            q_len: Number of query positions.
            valid: ``(batch, q_len)`` bool, True = token; None if all are.
            device: Where the answer is needed.

        Returns:
            ``(batch, rows)`` int64 positions, and ``(batch, rows)`` float32 weights: the number of valid positions
            that each row stands for, 0 where a sequence has fewer rows than asked for (its position is then 0).
        """
        if valid is not None:
            return self._draw(batch, q_len, valid, device)
        key = batch, q_len, device  # the same for every layer
        if key not in self._drawn:
            with torch.inference_mode(False):
                self._drawn[key] = self._draw(batch, q_len, None, device)
        return self._drawn[key]

    def _draw(self, batch: int, q_len: int, valid: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        count = q_len if self.rows == "all" else min(int(self.rows), q_len)
        rank = torch.arange(count, device=device)
        if valid is None:
            order = torch.arange(q_len, device=device).expand(batch, q_len)
            total = torch.full((batch, 1), q_len, device=device)
        else:
            valid = valid.to(device=device, dtype=torch.bool)
            order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
            total = valid.sum(dim=-1, keepdim=True)
        # In float64: float32 can round (rank + u) * total / count up to the next position.
        draws = (rank + self._uniform(batch, count).to(device, non_blocking=True)) * total / count
        index = torch.where(total <= count, rank.expand(batch, count), draws.long())
        weight = torch.where(total <= count, (rank < total).float(), total / count)
        index = index.minimum(total - 1).clamp(min=0)
        return order.gather(-1, index), weight.float()

    def _uniform(self, batch: int, count: int) -> Tensor:
        if (batch, count) not in self._uniforms:
            self._uniforms[batch, count] = torch.rand(
                batch, count, generator=self.generator, dtype=torch.float64, device="cpu"
            )
        return self._uniforms[batch, count]


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of some sequences of a call.

    Attributes:
        sequences: Which sequences of the call these are.
        positions: ``(batch, rows)`` query positions.
        weight: ``(batch, rows)`` number of valid positions each row stands for; 0 = not a row.
        finite: ``(batch, num_heads, rows)`` bool, False where a visible key has a NaN or infinite score.
        num_heads: Number of query heads.
    """

    sequences: slice
    positions: Tensor
    weight: Tensor
    finite: Tensor
    num_heads: int

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Rows of the same sequences, one part after the other."""
        positions, weight, finite = (
            torch.cat([getattr(part, name) for part in parts], -1) for name in ("positions", "weight", "finite")
        )
        return Rows(parts[0].sequences, positions, weight, finite, parts[0].num_heads)


@dataclass(frozen=True, eq=False)
class RowBatch(Rows):
    """Rows ready for the metrics: float32 (float64 if the model is), detached, on the model's device.

    Heads are grouped by the key head they read, and the rows of a group share its keys and values, so that nothing is
    copied for grouped-query attention: ``group = num_heads // num_kv_heads`` and row ``g * rows + r`` of a group is
    row ``r`` of its ``g``-th query head.

    Attributes:
        logits: ``(batch, num_kv_heads, group * rows, n)`` over the first n keys of the call, what the softmax gets:
            scaled, capped, with bias (meaningless where the mask hides a key).
        scores: Same shape: the same without bias, the scaled dot products themselves.
        mask: Same shape, True = visible.
        all_values: ``(batch, num_kv_heads, kv_len, v_head_dim)`` of all keys of the call; chunks of the same sequences
            have the same tensor.
        all_finite: True if all logits are known to be finite, those at hidden keys among them.
    """

    logits: Tensor
    scores: Tensor
    mask: Tensor
    all_values: Tensor
    all_finite: bool = False

    @property
    def values(self) -> Tensor:
        """``(batch, num_kv_heads, n, v_head_dim)``."""
        return self.all_values[:, :, : self.logits.shape[-1]]

    def per_head(self, values: Tensor) -> Tensor:
        """``(batch, num_kv_heads, group * rows, ...)`` to ``(batch, num_heads, rows, ...)``."""
        batch, rows = self.weight.shape
        return values.reshape(batch, self.num_heads, rows, *values.shape[3:])


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Some rows of some sequences of a call that are about to be formed.

    Attributes:
        call: The call, of these sequences alone.
        key: ``(batch, num_kv_heads, n, head_dim)``: the first n keys, up to the last that these rows may see.
        values: ``(batch, num_kv_heads, kv_len, v_head_dim)`` of all keys.
        positions: ``(batch, rows)`` query positions.
        weight: ``(batch, rows)`` number of valid positions each row stands for.
        sequences: Which sequences of the whole call these are.
    """

    call: AttentionCall
    key: Tensor
    values: Tensor
    positions: Tensor
    weight: Tensor
    sequences: slice

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(batch, num_kv_heads, group * rows, n)``, that of the scores."""
        batch, kv_heads, n, _ = self.key.shape
        return batch, kv_heads, self.call.num_heads // kv_heads * self.positions.shape[1], n

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor | None]:
        """Which keys are visible, bool, and what is added to the scores of those, None if nothing is.

        Both have dimensions (batch, heads, rows, n); a size of 1 stands for all.
        """
        call, positions, n = self.call, self.positions, self.key.shape[2]
        visible: Tensor | None = None
        bias: Tensor | None = None
        if call.attn_mask is not None:
            mask = call.attn_mask.detach()[..., :n]
            mask = mask.expand(len(positions), mask.shape[1], mask.shape[2], n)
            mask = mask if mask.shape[2] == 1 else take_rows(mask, positions)
            if mask.dtype == torch.bool:
                visible = mask
            else:
                hidden = hides(mask)
                visible = ~hidden
                # without the numbers that hide: a sum over them could overflow
                bias = mask.to(self.key.dtype).masked_fill(hidden, 0.0)
                if bias.device.type == "cpu" and not bool(bias.any()):  # most masks only hide
                    bias = None
        if call.causal_offset is not None:
            last = positions + call.causal_offset
            past = torch.arange(n, device=self.key.device) <= last[:, None, :, None]
            visible = past if visible is None else visible & past
        if visible is None:
            visible = torch.ones(1, 1, 1, n, dtype=torch.bool, device=self.key.device)
        return visible, bias

    def form(self, room: Tensor | None = None) -> RowBatch:
        """The rows with their scores.

        Args:
            room: Memory for the scores, of `shape`, contiguous and in the dtype of `key`; None: they take their own.
        """
        return _form(self, room)


def row_blocks(
    call: AttentionCall, sampler: RowSampler, *, apart: bool = False, pieces: int | None = None
) -> Iterator[RowBlock]:
    """The sampled rows of a call, in blocks of bounded size, each over the first keys up to the last that may be seen.

    Args:
        call: The call, already restricted to the sampler's sequences.
        sampler: Says which rows.
        apart: Sequences one by one where that is faster, on a CPU.
        pieces: Into how many blocks the rows of a sequence are cut; None: as the size of the scores demands.
    """
    batch, _, q_len, _ = call.query.shape
    positions, weight = sampler.positions(batch, q_len, call.valid, call.query.device)
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    key = call.key.detach().to(dtype)
    value = call.value.detach().to(dtype)
    on_cpu = positions.device.type == "cpu"
    together = 1 if apart and on_cpu else max(1, batch)
    trim = on_cpu and (call.causal_offset is not None or apart)  # elsewhere the host would have to wait
    most = min(_CACHED_ELEMENTS, _CHUNK_ELEMENTS) if trim or (apart and on_cpu) else _CHUNK_ELEMENTS
    step = max(1, min(positions.shape[1], most // max(1, together * call.num_heads * key.shape[-2])))
    if pieces is not None:
        step = max(1, -(-positions.shape[1] // pieces))
    for first in range(0, batch, together):
        some = slice(first, first + together)
        part_of = call if together == batch else _sequences(call, some)
        keys, values = key[some], value[some]
        for start in range(0, positions.shape[1], step):
            rows = (some, slice(start, start + step))
            seen = _last_seen(part_of, positions[rows]) if trim and step < positions.shape[1] else keys.shape[2]
            seen = min(-(-seen // _ROUND) * _ROUND, keys.shape[2])
            yield RowBlock(part_of, keys[:, :, :seen], values, positions[rows], weight[rows], some)


def row_batches(
    call: AttentionCall, sampler: RowSampler, *, apart: bool = False, scratch: Scratch | None = None
) -> Iterator[RowBatch]:
    """The rows of `row_blocks` with their scores, one block after the other.

    Must run under ``no_grad`` and outside autocast.

    Args:
        call: The call, already restricted to the sampler's sequences.
        sampler: Says which rows.
        apart: Sequences one by one where that is faster, on a CPU.
        scratch: Memory for the scores on a CPU: those of the next block take the place of a block's. None: each has
            its own.
    """
    return formed(row_blocks(call, sampler, apart=apart), scratch)


def formed(blocks: Iterable[RowBlock], scratch: Scratch | None = None) -> Iterator[RowBatch]:
    """The rows of one block after the other, see `row_batches`."""
    for block in blocks:
        room = None
        if scratch is not None and block.key.device.type == "cpu":
            room = scratch.take("scores", *block.shape, like=block.key)
        yield block.form(room)


def _last_seen(call: AttentionCall, positions: Tensor) -> int:
    """How many of the first keys hold all that the rows at these positions see."""
    seen = call.key.shape[2]
    if call.causal_offset is not None:
        seen = min(seen, int(positions.max()) + call.causal_offset + 1)
    mask = call.attn_mask
    if mask is not None and mask.shape[1] == 1 and mask.shape[2] > 1 and mask.shape[3] == call.key.shape[2]:
        rows = take_rows(mask.detach().expand(positions.shape[0], -1, -1, -1), positions)
        visible = (rows if rows.dtype == torch.bool else ~hides(rows)).flatten(0, -2).any(0)
        seen = min(seen, int(visible.nonzero()[-1]) + 1 if bool(visible.any()) else 1)
    return max(1, seen)


def _sequences(call: AttentionCall, some: slice) -> AttentionCall:
    mask = call.attn_mask
    if mask is not None and mask.shape[0] == call.query.shape[0]:
        mask = mask[some]
    return replace(call, query=call.query[some], key=call.key[some], value=call.value[some], attn_mask=mask)


def all_rows(call: AttentionCall) -> Iterator[RowBatch]:
    """Every row of a call in the order of their positions, padding included, in chunks as `row_batches` makes them.

    Must run under ``no_grad`` and outside autocast.
    """
    sampler = RowSampler("all", call.query.shape[0], None)
    return row_batches(replace(call, valid=None), sampler)


def rows_at(call: AttentionCall, positions: Tensor, keys: int) -> RowBatch:
    """The rows at some positions of every sequence of a call, over its first keys.

    Must run under ``no_grad`` and outside autocast.

    Args:
        call: The call.
        positions: ``(rows,)`` int64 query positions, on the device of the call.
        keys: How many keys; those behind them must be invisible to these rows, or be meant to be left out.
    """
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    key, value = (tensor[:, :, :keys].detach().to(dtype) for tensor in (call.key, call.value))
    batch = call.query.shape[0]
    positions = positions.expand(batch, -1)
    weight = torch.ones_like(positions, dtype=torch.float32)
    return RowBlock(call, key, value, positions, weight, slice(0, batch)).form()


def take_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Rows ``positions`` (batch, rows) of ``tensor`` (batch, heads, q_len, ...), as (batch, heads, rows, ...)."""
    if tensor.shape[0] == 1:
        return tensor.index_select(2, positions[0])
    sequence = torch.arange(tensor.shape[0], device=tensor.device)[:, None]
    return tensor[sequence, :, positions].transpose(1, 2)


def _form(block: RowBlock, room: Tensor | None) -> RowBatch:
    call, key, positions = block.call, block.key, block.positions
    batch, heads, _, head_dim = call.query.shape
    kv_heads, n = key.shape[1], key.shape[2]
    rows = positions.shape[1]
    query = take_rows(call.query.detach(), positions).to(key.dtype)  # (batch, heads, rows, head_dim)
    # Scaling the few queries instead of the many scores; one GEMM per key head, shared by its query heads.
    grouped = (query * call.scale).reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    logits = torch.matmul(grouped, key.transpose(-1, -2), out=room).view(batch, heads, rows, n)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    scores = logits
    visible, bias = block.seen
    if bias is not None:
        logits = logits + bias
    group = heads // kv_heads
    if visible.shape[1] == 1:  # what is the same for all heads is not copied for each
        shown = visible.expand(batch, 1, rows, n)
        shown = (shown.repeat(1, 1, group, 1) if group > 1 else shown).expand(batch, kv_heads, group * rows, n)
    else:
        shown = visible.expand(batch, heads, rows, n).reshape(batch, kv_heads, group * rows, n)
    # a sum is far faster there than a look at each
    all_finite = logits.device.type == "cpu" and bool(logits.sum().isfinite())
    if all_finite:
        finite = torch.ones(batch, heads, rows, dtype=torch.bool)
    else:
        finite = (torch.isfinite(logits) | ~visible).all(dim=-1)
    shape = (batch, kv_heads, group * rows, n)
    plain = scores is logits
    logits = logits.reshape(shape)
    return RowBatch(
        logits=logits,
        scores=logits if plain else scores.reshape(shape),
        mask=shown,
        all_values=block.values,
        sequences=block.sequences,
        positions=positions,
        weight=block.weight,
        finite=finite,
        num_heads=heads,
        all_finite=all_finite,
    )
