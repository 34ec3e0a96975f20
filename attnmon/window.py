"""One sampled step while it lasts: the capture is attached, rows become sums inside each call, nothing else stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import Literal

import torch
from torch import Tensor, nn

from attnmon import fused
from attnmon.agreement import contradicts, disagrees, full_precision, own_rows, value_size
from attnmon.capture import Attachment, attach
from attnmon.masks import hide
from attnmon.pool import RowPool, Together, pieces
from attnmon.quantities import Column, Measurer
from attnmon.rows import RowBlock, RowSampler, formed, row_batches, row_blocks
from attnmon.sums import LayerSums, row_sums
from attnmon.types import AttentionCall

__all__ = ["Window", "WindowOptions"]

_CHECKED_ROWS = 4  # per sequence, where all are measured without being formed
_UNSUMMED = 2_000_000  # figures of such rows that wait to be summed


@dataclasses.dataclass(frozen=True)
class WindowOptions:
    """What is looked at in a sampled step; see `attnmon.AttentionMonitor` for the meaning of each."""

    columns: tuple[Column, ...]
    vectors: Literal["value", "hidden", "embedding"]
    normalize_vectors: bool
    tokens: Literal["valid", "labelled"]


class Window:
    """Collects the sums of one step.

    Args:
        model: The watched model.
        options: What is measured.
        sampler: Which sequences and rows.
        wanted: Given a layer's path, whether it is measured. Called for every attention call, in call order.
        guard: Runs what reads the model's calls and may fail; it decides what a failure means.

    Attributes:
        sums: What is left of the rows, by layer.
        not_measured: Layer -> reason.
        rerun: Whether something was read in a second pass.
    """

    def __init__(
        self,
        model: nn.Module,
        options: WindowOptions,
        sampler: RowSampler,
        wanted: Callable[[str], bool],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self.options = options
        self.sampler = sampler
        self.sums: dict[str, LayerSums] = {}
        self.not_measured: dict[str, str] = {}
        self.rerun = False
        self._measurer = Measurer(options.columns, sampler.generator)
        self._pool = RowPool(self._measure_together, self._measurer.scratch)
        # others at each step: what is wrong in a few rows of every step is found in time
        self._checked = RowSampler(_CHECKED_ROWS, sampler.sequences, (sampler.key, "agreement"))
        self._wanted = wanted
        self._unsummed: list[tuple[LayerSums, Tensor, Tensor]] = []
        self._trained: set[str] = set()  # layers of which a call with gradients was seen
        context = {"labels"} if options.tokens == "labelled" else set()
        if options.vectors != "value":
            context.add(options.vectors)
        self._attachment: Attachment | None = attach(
            model,
            self._on_call,
            self._on_skip,
            context=frozenset(context),
            select=sampler.select,
            guard=guard,
            rerun=True,
        )

    def set_tokens(self, valid: Tensor | None, labels: Tensor | None) -> None:
        """Padding mask and labels of the batch that comes, where the model itself is not given them."""
        if self._attachment is not None:
            self._attachment.tokens = (valid, labels)

    @property
    def rerunning(self) -> bool:
        """Whether a compiled part is being run once more."""
        return self._attachment is not None and self._attachment.running_again

    @property
    def paused(self) -> bool:
        """True while calls pass unread."""
        return self._attachment is None or self._attachment.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        # Hooks of ours on a part that is run once more run in that, too.
        if self._attachment is not None and not self.rerunning:
            self._attachment.paused = paused

    def read_once(self, model: nn.Module) -> bool:
        """Whether `model` is compiled itself; then its first call with gradients is read, and no other."""
        if self._attachment is None or model not in self._attachment.roots:
            return False
        self._attachment.once = True
        return True

    def detach(self) -> None:
        """Leaves the model as it was found; may be called again."""
        if self._attachment is not None:
            self.rerun |= self._attachment.ran_again
            self._attachment.detach()
            self._attachment = None

    def forget(self) -> None:
        """Drops what has been read so far."""
        self.sums, self.not_measured, self._trained, self._unsummed = {}, {}, set(), []
        self._pool.forget()

    def finish(self) -> None:
        """Measures the rows that wait for others. To be called once all has been read, before `sums` is used."""
        with torch.no_grad(), full_precision(torch.device("cpu")):
            self._pool.flush()
            self._sum()

    def _on_skip(self, layer: str, reason: str) -> None:
        if self._wanted(layer):
            self.not_measured[layer] = reason

    def _on_call(self, call: AttentionCall) -> None:
        if not self._wanted(call.layer):
            return
        # A step may run the model without gradients beside its training pass (generation, a teacher, a rollout): where
        # a layer has calls of both kinds, those without don't count. Frozen layers, reentrant checkpoints, probes and
        # validations have none with.
        if torch.is_grad_enabled():
            if call.layer not in self._trained:
                self._trained.add(call.layer)
                self.sums.pop(call.layer, None)
        elif call.layer in self._trained:
            return
        with torch.no_grad(), full_precision(call.query.device):
            self._add(call)

    def _add(self, call: AttentionCall) -> None:
        if call.query.numel() == 0 or call.key.shape[2] == 0:
            return
        if not 0 < abs(call.scale) < float("inf"):
            self.not_measured[call.layer] = f"its scale is {call.scale}: it has no temperature"
            return
        if self.options.tokens == "labelled":
            if call.labels is None:
                self.not_measured[call.layer] = (
                    "tokens='labelled' needs the labels of the query positions, and the model was not given any of "
                    "that shape: pass labels to the model or use tokens='valid'"
                )
                return
            labelled = call.labels != -100
            call = dataclasses.replace(call, valid=labelled if call.valid is None else call.valid & labelled)
        sums = self.sums.get(call.layer)
        if sums is None:
            sums = self.sums[call.layer] = LayerSums(len(self.options.columns), call.num_heads, call.query.device)
        elif sums.data.shape[1] != call.num_heads:
            self.not_measured[call.layer] = (
                f"it was called with {sums.data.shape[1]} and then with {call.num_heads} heads in one step"
            )
            return
        if self.sampler.rows == "all" and self._add_fused(call, sums):
            return
        own = self.options.vectors == "value"
        vectors = None if own else self._vectors(call)
        cut = pieces(call, self.sampler) if own and self._measurer.together else None
        blocks = row_blocks(call, self.sampler, apart=True, pieces=cut)
        for _, of_sequence in groupby(blocks, key=lambda block: block.sequences):
            if cut is None:
                self._measure(call, of_sequence, vectors, sums)
                continue
            some = list(of_sequence)
            if not self._pool.put(call, some, sums):
                self._measure(call, iter(some), vectors, sums)
        sums.add_call(_padding(call), call.temperature)

    def _measure(
        self, call: AttentionCall, blocks: Iterator[RowBlock], vectors: Tensor | None, sums: LayerSums
    ) -> None:
        """Adds rows of the same sequences by themselves."""
        first = next(blocks)
        carried = None if vectors is None else vectors[first.sequences]
        if self.options.vectors == "value":
            carried = first.values
        size = value_size(first.values)
        batches = formed(chain([first], blocks), self._measurer.scratch)
        for part in self._measurer.measure(batches, temperature=call.temperature, vectors=carried):
            spoiled = ~part.rows.finite  # also by -inf, which the figures themselves take for a hidden key
            sums.add_rows(part.values.masked_fill(spoiled, torch.nan), part.rows.weight)
            sums.add_nonfinite((spoiled & (part.rows.weight > 0)[:, None]).sum(dim=(0, 2)))
            if call.output is not None:
                own = own_rows(call.output, part.rows)
                sums.add_mismatch(contradicts(own, part.rows, part.output, part.largest, size).any())

    def _measure_together(self, calls: Together) -> None:
        """Adds the rows of several calls, whose scores are finite."""
        values = calls.batches[0].all_values
        size = value_size(values)
        done = 0
        for part in self._measurer.measure(calls.batches, temperature=calls.temperature, vectors=values):
            found = row_sums(part.values, part.rows.weight).unbind(1)
            for sums, its in zip(calls.sums, found, strict=True):
                sums.add(its)
            rows = slice(done, done + part.rows.weight.shape[1])
            done = rows.stop
            if calls.outputs is not None:
                wrong = contradicts(calls.outputs[:, :, rows], part.rows, part.output, part.largest, size)
                for sums, its in zip(calls.sums, wrong, strict=True):
                    sums.add_mismatch(its)

    def _add_fused(self, call: AttentionCall, sums: LayerSums) -> bool:
        """Adds every row in memory linear in the length, if what is wanted and what the call is like allow for that."""
        bases = [column.base for column in self.options.columns]
        if not set(bases) <= fused.BASES:
            return False
        found = fused.fused_rows(call, bases, self._measurer.scratch)
        if found is None:
            return False
        batch, _, q_len, _ = call.query.shape
        weight = torch.ones(batch, q_len, device=call.query.device) if call.valid is None else call.valid.float()
        self._sum_later(sums, torch.stack([found[base] for base in bases]), weight)
        if call.output is not None:  # some rows are enough to tell whether the arguments explain it
            for rows in row_batches(call, self._checked):
                sums.add_mismatch(disagrees(call.output, rows, hide(rows.logits, rows.mask).softmax(-1)))
        sums.add_call(_padding(call), call.temperature)
        return True

    def _sum_later(self, sums: LayerSums, values: Tensor, weight: Tensor) -> None:
        """Adds figures of rows, together with those of the layers to come: the sums of one take as many operations."""
        if self._unsummed and _kind(self._unsummed[0][1]) != _kind(values):
            self._sum()
        self._unsummed.append((sums, values, weight))
        if len(self._unsummed) * values.numel() > _UNSUMMED:
            self._sum()

    def _sum(self) -> None:
        waiting, self._unsummed = self._unsummed, []
        if waiting:
            layers, values, weights = zip(*waiting, strict=True)
            found = row_sums(torch.cat(values, 1), torch.cat(weights)).unflatten(1, (len(layers), -1)).sum(2)
            for sums, its in zip(layers, found.unbind(1), strict=True):
                sums.add(its)

    def _vectors(self, call: AttentionCall) -> Tensor | None:
        """What the keys carry, where that is not the head's own values: (batch, 1, n, d), shared by all heads."""
        vectors = call.hidden if self.options.vectors == "hidden" else call.embedding
        if vectors is None:
            self.not_measured[call.layer] = (
                f"vectors={self.options.vectors!r} were not to be had for its keys: distance and separability are "
                "left out; use vectors='value'"
            )
            return None
        vectors = vectors.detach().to(torch.float64 if vectors.dtype == torch.float64 else torch.float32)
        if self.options.normalize_vectors:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors[:, None]


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _padding(call: AttentionCall) -> Tensor:
    """How many query positions are padding."""
    return torch.zeros((), device=call.query.device) if call.valid is None else (~call.valid.bool()).sum()
