"""Rows that wait to be measured together with those of other layers.

Most operations of a sample are about a few numbers per row, and take about as long for the rows of one layer as for
those of four. So the rows of calls of one shape lie one after the other in common memory, as those of more sequences
would, up to a budget. What is needed of a call is copied: once it is over, the model may write to its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from attnmon.agreement import own_rows
from attnmon.rows import RowBatch, RowBlock, RowSampler
from attnmon.scratch import Scratch
from attnmon.sums import LayerSums
from attnmon.types import AttentionCall

__all__ = ["RowPool", "Together", "pieces"]

# What is measured at once: scores, of whose temporaries there are several times as many, and scores and values. More
# would take longer again, because less of it stays in the cache.
_SCORES, _NUMBERS = 2_000_000, 6_000_000
_WAITING = 24_000_000  # scores and values that wait at most
# Scores of a block of rows, and most blocks of a call: many form few scores of keys that a causal row does not see, few
# take fewer operations.
_BLOCK, _MOST_BLOCKS, _FULL_BLOCKS = 150_000, 4, 2


@dataclass(frozen=True, eq=False)
class Together:
    """Rows of several calls, which stand where a batch has sequences.

    Attributes:
        batches: The rows.
        sums: Where the figures of each call belong.
        outputs: ``(calls, num_heads, rows of all batches, v_head_dim)``, what the modules returned for these rows; None
            where that is not to be compared.
        temperature: The model's own.
    """

    batches: list[RowBatch]
    sums: list[LayerSums]
    outputs: Tensor | None
    temperature: float


@dataclass(eq=False)
class _Shelf:
    """Room for calls of one shape, whose rows see the same keys.

    Attributes:
        slot: Which part of the scratch memory is taken.
        kind: What calls have to have in common.
        seen: Which keys the rows of each block see.
        scores: Room for those of all calls, ``(calls, num_kv_heads, group * rows, n)`` for each block.
        values: ``(calls, num_kv_heads, kv_len, v_head_dim)``.
        held: Scores and values of one call.
        first: The rows of the first call, with its scores.
        weights: By call and block.
    """

    slot: int
    kind: tuple[object, ...]
    seen: list[Tensor]
    scores: list[Tensor]
    values: Tensor
    temperature: float
    held: int
    first: list[RowBatch] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)
    sums: list[LayerSums] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def fits(self, blocks: Sequence[RowBlock]) -> bool:
        return all(torch.equal(mine, block.seen[0]) for mine, block in zip(self.seen, blocks, strict=True))

    def together(self) -> Together:
        calls = len(self.sums)
        values = self.values[:calls]
        batches = []
        for index, (first, scores) in enumerate(zip(self.first, self.scores, strict=True)):
            weight = torch.cat([weights[index] for weights in self.weights])
            logits = scores[:calls]
            batches.append(
                replace(
                    first,
                    logits=logits,
                    scores=logits,
                    mask=first.mask.expand(calls, -1, -1, -1),
                    all_values=values,
                    sequences=slice(0, calls),
                    positions=first.positions.expand(calls, -1),
                    weight=weight,
                    finite=first.finite.expand(calls, -1, -1),
                )
            )
        return Together(batches, self.sums, torch.cat(self.outputs) if self.outputs else None, self.temperature)


class RowPool:
    """Collects rows on a CPU.

    Args:
        measure: Given what has been collected, adds its figures to the sums. Called when a budget is reached, and by
            `flush`.
        scratch: Memory for scores and values.
    """

    def __init__(self, measure: Callable[[Together], None], scratch: Scratch) -> None:
        self._measure, self._scratch = measure, scratch
        self._shelves: list[_Shelf] = []

    def put(self, call: AttentionCall, blocks: Sequence[RowBlock], sums: LayerSums) -> bool:
        """Takes the rows of one sequence of a call in.

        Args:
            call: The call, all sequences.
            blocks: All blocks of the sequence.
            sums: Where the figures belong.

        Returns:
            False, with nothing taken in, where these rows have to be measured by themselves: there are many of them,
            their scores are not all finite, or biases are added.
        """
        if not _simple(call, blocks):
            return False
        shelf = self._shelf(call, blocks)
        place = len(shelf.sums)
        room = slice(place, place + 1)
        rows = [block.form(scores[room]) for block, scores in zip(blocks, shelf.scores, strict=True)]
        if not all(batch.all_finite for batch in rows):
            return False
        shelf.values[room] = blocks[0].values
        shelf.first = shelf.first or [replace(batch, all_values=shelf.values) for batch in rows]
        shelf.weights.append([block.weight for block in blocks])
        shelf.sums.append(sums)
        if call.output is not None:
            shelf.outputs.append(torch.cat([own_rows(call.output, batch) for batch in rows], 2))
        if len(shelf.sums) == len(shelf.values):
            self._empty(shelf)
        elif self._held > _WAITING:
            self.flush()
        return True

    def forget(self) -> None:
        """Drops what waits."""
        self._shelves.clear()

    def flush(self) -> None:
        """Measures what waits."""
        for shelf in list(self._shelves):
            self._empty(shelf)

    @property
    def _held(self) -> int:
        return sum(shelf.held * len(shelf.sums) for shelf in self._shelves)

    def _shelf(self, call: AttentionCall, blocks: Sequence[RowBlock]) -> _Shelf:
        values = blocks[0].values
        shape = (call.num_heads, call.temperature, values.shape, *(block.shape for block in blocks))
        output = None if call.output is None else (call.output.dtype, call.output.shape[-1])
        kind = (*shape, output)
        for shelf in self._shelves:
            if shelf.kind == kind and shelf.fits(blocks):
                return shelf
        scores = sum(_size(block) for block in blocks)
        calls = min(_SCORES // scores, _NUMBERS // (scores + values.numel()))
        taken = {shelf.slot for shelf in self._shelves}
        slot = next(number for number in count() if number not in taken)
        rooms = [
            self._scratch.take(f"scores {slot} {index}", calls, *block.shape[1:], like=block.key)
            for index, block in enumerate(blocks)
        ]
        kept = self._scratch.take(f"values {slot}", calls, *values.shape[1:], like=values)
        seen = [block.seen[0] for block in blocks]
        shelf = _Shelf(slot, kind, seen, rooms, kept, call.temperature, scores + values.numel())
        self._shelves.append(shelf)
        return shelf

    def _empty(self, shelf: _Shelf) -> None:
        self._shelves.remove(shelf)
        if shelf.sums:
            self._measure(shelf.together())


def pieces(call: AttentionCall, sampler: RowSampler) -> int | None:
    """Into how many blocks the rows of a sequence are best cut to be put into a pool; None: they are too many."""
    length = call.query.shape[2]
    rows = length if sampler.rows == "all" else min(int(sampler.rows), length)
    scores = call.num_heads * rows * call.key.shape[2]
    if 2 * scores > _SCORES:
        return None
    ragged = call.causal_offset is not None or (call.attn_mask is not None and call.attn_mask.shape[2] > 1)
    return max(1, min(round(scores / _BLOCK), _MOST_BLOCKS if ragged else _FULL_BLOCKS))


def _size(block: RowBlock) -> int:
    return block.shape[0] * block.shape[1] * block.shape[2] * block.shape[3]


def _simple(call: AttentionCall, blocks: Sequence[RowBlock]) -> bool:
    values = blocks[0].values
    scores = sum(_size(block) for block in blocks)
    return (
        call.softcap is None
        and blocks[0].key.device.type == "cpu"
        and blocks[0].key.dtype == values.dtype == torch.float32
        and not torch.is_inference_mode_enabled()  # what is made in it can't be written to outside
        and len(values) == 1
        and 2 * scores <= _SCORES
        and 2 * (scores + values.numel()) <= _NUMBERS
        and all(block.seen[1] is None for block in blocks)
    )
