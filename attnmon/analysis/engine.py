"""Runs a model on a text and measures every row of every head, layer by layer, in bounded memory."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnmon.agreement import disagrees, full_precision
from attnmon.analysis.look import LOOK, Look, check_lengths, check_tokens, look_at, moved, run_model, sinks_first
from attnmon.analysis.options import AnalysisOptions
from attnmon.analysis.parts import Part, Parts, digest_model, digest_tokens
from attnmon.analysis.result import Analysis, Table
from attnmon.analysis.tasks import Rows, Task, make_tasks
from attnmon.analysis.vectors import Vectors, positions_seen
from attnmon.capture import attach, compiled_modules
from attnmon.masks import masked_softmax
from attnmon.metrics._group import _Group
from attnmon.normalizers import Normalizer, normalizer_from_name
from attnmon.rerun import undisturbed
from attnmon.rows import RowBatch, RowSampler, rows_at
from attnmon.types import AttentionCall

__all__ = ["analyze"]

# Rows of a head that are taken together; random directions are drawn for as many, whatever else is cut how.
_ROWS = 64
# Scores that are handled together: on a CPU they stay in the cache.
_ELEMENTS = {"cpu": 600_000}
# Relative difference of queries from one length to another that rounding explains, in half precision too.
_SAME_ROWS = 0.03
# Elsewhere the share of the memory budget that one array of them may take: there are about this many.
_ARRAYS = 32


@dataclass(frozen=True)
class _Run:
    """One forward pass: a sequence, cut to a length, and the lengths that its rows count for."""

    sequence: int
    length: int
    ends: tuple[int, ...]  # ascending; rows at positions below ends[0] belong to segment 0, and so on
    columns: tuple[int, ...]  # the column of the tables that each segment is first counted in


def analyze(
    model: nn.Module,
    tokens: Tensor,
    options: AnalysisOptions | None = None,
    *,
    device: str | torch.device | None = None,
    memory: int = 2**30,
    folder: str | Path | None = None,
    progress: bool = False,
) -> Analysis:
    r"""Measure every row of every head of a model on a text: the numbers behind the static figures.

    The model runs in eval mode under ``no_grad`` and is left as it was found. Where its attention is causal and rows
    are the keys they see, one pass over the longest context serves all lengths: the rows of a prefix are the first rows
    of the whole. Otherwise (a bidirectional model, positions that scale with the length, convention ``"full"``) each
    length is run by itself. A learned attention sink counts as one more key of each row, with a zero vector.

    Source: Algorithms 1 to 5 of arXiv 2508.17821.

    Reading: see the functions that the tasks of `AnalysisOptions` name.

    Args:
        model: Hugging Face, or any module whose attention `attnmon.capture` can read; called with ``input_ids``
            if its forward takes them, with the tokens otherwise.
        tokens: ``(length,)`` or ``(batch, length)``, integer, without padding. The mean is over the rows of all
            sequences.
        options: What is measured.
        device: Where; the model comes back to where it was. None: where the model is.
        memory: Bytes that the working arrays may take together, beside the model's own forward pass.
        folder: Where finished parts (a layer of a task) are kept; a run that was interrupted goes on from there. Parts
            of another model, text or option are told apart. None: nowhere.
        progress: Whether to show a progress bar.

    Returns:
        Means per head and length, with the number of rows behind each.

    Raises:
        TypeError: `tokens` is not an integer tensor.
        ValueError: `tokens` are fewer than the longest length, a length exceeds the model's context, an N is not below
            the longest length, no attention was found or could be read, or the model lacks the `vectors` asked for.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=50, n_positions=64, n_layer=1, n_head=2, n_embd=16)
        >>> model = GPT2LMHeadModel(config)
        >>> options = AnalysisOptions(lengths=(32, 64), tasks=("distance",), top_n=(5,))
        >>> analyze(model, torch.arange(64) % 50, options).tables["distance"].at("distance", top_n=5).shape
        (2, 2)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected `model` to be a torch.nn.Module, but got {type(model).__name__}. Load it first.")
    options = AnalysisOptions() if options is None else options
    if not isinstance(options, AnalysisOptions):
        raise TypeError(f"Expected `options` to be an AnalysisOptions, but got {type(options).__name__}.")
    tokens = check_tokens(model, tokens)
    lengths = check_lengths(model, tokens, options)
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 2**26:
        raise ValueError(f"Expected `memory` to be an integer of at least {2**26} bytes (64 MiB), but got {memory!r}.")
    compiled = compiled_modules(model)
    with moved(model, device) as place, undisturbed(model), full_precision(place):
        tokens = tokens.to(place)
        look = look_at(model, tokens[:1, : min(LOOK, lengths[0])])
        engine = _Engine(model, tokens, lengths, options, look, memory, folder, place)
        engine.run(progress)
    return engine.result(compiled)


class _DependsOnLengthError(Exception):
    """The first rows of a long context are not those of a short one."""


class _Engine:
    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        lengths: tuple[int, ...],
        options: AnalysisOptions,
        look: Look,
        memory: int,
        folder: str | Path | None,
        device: torch.device,
    ) -> None:
        self.model, self.tokens, self.lengths, self.options = model, tokens, lengths, options
        self.look = look
        self.layers, self.skipped, self.causal = look.layers, dict(look.skipped), look.causal
        self.memory, self.device = memory, device
        self.normalizer: Normalizer | None = None
        if options.normalizer != "softmax":
            self.normalizer = normalizer_from_name(options.normalizer)
        self.tasks = make_tasks(options, self.normalizer)
        self.trimmed = self.causal and options.convention == "visible"
        self.nested = self.trimmed  # the rows of a prefix are the first rows of the whole
        self.runs = list(self._plan())
        self.about = self._describe()
        common: dict[str, Any] = {}
        if folder is not None:
            own = ("vectors", "normalize_vectors", "convention", "rows", "normalizer")
            common = {name: getattr(options, name) for name in own}
            common |= {"seed": options.seed if options.rows != "all" else None, "model": digest_model(model)}
            common |= {"tokens": self.about["tokens_sha256"], "lengths": lengths, "format": 2}
            common["layers"] = [(layer.name, layer.num_heads, layer.temperature) for layer in look.layers]
        self.parts = Parts(folder, common)
        self.done: dict[tuple[str, _Run, int], Part] = {}

    def _plan(self) -> Iterator[_Run]:
        for sequence in range(self.tokens.shape[0]):
            if self.nested:
                yield _Run(sequence, self.lengths[-1], self.lengths, tuple(range(len(self.lengths))))
            else:
                for column, length in enumerate(self.lengths):
                    yield _Run(sequence, length, (length,), (column,))

    def run(self, progress: bool) -> None:
        try:
            self._run_all(progress)
        except _DependsOnLengthError:
            self.nested = False
            self.runs = list(self._plan())
            self.done.clear()
            self._run_all(progress)

    def _run_all(self, progress: bool) -> None:
        from tqdm import tqdm

        for run in self.runs:
            for index in range(len(self.layers)):
                for task in self.tasks:
                    part = self.parts.load(task.name, task.grid, self._name(run, index))
                    if part is not None and self._fits(part, task, run, index):
                        self.done[task.name, run, index] = part
        total = len(self.runs) * len(self.layers)
        missing = {(run, index) for run in self.runs for index in range(len(self.layers)) if self._missing(run, index)}
        with tqdm(
            total=total, initial=total - len(missing), unit="layer", desc="attention", disable=not progress
        ) as bar:
            for run in self.runs:
                wanted = {index for other, index in missing if other == run}
                if wanted:
                    self._forward(run, wanted, bar.update)

    def _name(self, run: _Run, index: int) -> str:
        return f"sequence_{run.sequence:03d}-length_{run.length:06d}-layer_{index:03d}"

    def _missing(self, run: _Run, index: int) -> list[Task]:
        return [task for task in self.tasks if (task.name, run, index) not in self.done]

    def _fits(self, part: Part, task: Task, run: _Run, index: int) -> bool:
        shape = (self.layers[index].num_heads, len(run.ends), *task.shape)
        return "seconds" in part and all(
            part.get(key, np.empty(0)).shape == shape for name in task.quantities for key in (name, f"{name}/rows")
        )

    def _forward(self, run: _Run, wanted: set[int], advance: Callable[[], Any]) -> None:
        tokens = self.tokens[run.sequence : run.sequence + 1, : run.length]
        seen = 0

        with positions_seen(self.model) as positional:
            vectors = Vectors(self.options, self.memory // 2, positional)

            def on_call(call: AttentionCall) -> None:
                nonlocal seen
                index, seen = seen, seen + 1
                call, sinks = sinks_first(call)
                self._check_call(call, run, index)
                if index in wanted and call.layer not in self.skipped:
                    with torch.no_grad():
                        self._measure(call, sinks, run, index, vectors)
                    advance()

            with attach(self.model, on_call, self._skip, context=vectors.context()):
                try:
                    run_model(self.model, tokens)
                except (IndexError, RuntimeError) as error:
                    if seen:
                        raise
                    # a table of positions that is shorter than the configuration says, as RoBERTa's is by two
                    raise ValueError(
                        f"Expected the model to take {run.length} tokens, but its forward failed before any attention: "
                        f"{error}. Use shorter `lengths`."
                    ) from error
        if seen != len(self.layers):
            raise ValueError(
                f"Expected the model to attend {len(self.layers)} times on {run.length} tokens, as it does on "
                f"{min(LOOK, self.lengths[0])}, but it attended {seen} times. Only models whose layers do not depend "
                "on the input can be analysed."
            )

    def _check_call(self, call: AttentionCall, run: _Run, index: int) -> None:
        known = self.layers[index] if index < len(self.layers) else None
        if known is None or (known.name, known.num_heads) != (call.layer, call.num_heads):
            raise ValueError(
                f"Expected attention call {index} to be {known}, as on a short text, but got `{call.layer}` with "
                f"{call.num_heads} heads. Only models whose layers do not depend on the input can be analysed."
            )
        if self.nested and run.sequence == 0:  # whose first tokens were looked at
            before = self.look.queries[index]
            now = call.query[0, :, : before.shape[1]]
            if bool((now - before).abs().amax() > _SAME_ROWS * before.abs().amax()):
                raise _DependsOnLengthError

    def _measure(self, call: AttentionCall, sinks: int, run: _Run, index: int, vectors: Vectors) -> None:
        tasks = self._missing(run, index)
        parts = {task.name: self._empty(task, run, index) for task in tasks}
        started, spent = time.perf_counter(), 0.0
        group_size = call.num_heads // call.num_kv_heads
        units = [(0, call.num_kv_heads)] if vectors.shared else [(h, h + 1) for h in range(call.num_kv_heads)]
        for first, last in units:
            group = vectors.group(call, first)
            for positions, counts in self._positions(run):
                keys = self._keys(call, positions, sinks)
                for a, b in self._head_chunks(first, last, group_size, len(positions) * keys):
                    heads = slice(a * group_size, b * group_size)
                    rows = self._rows(call, sinks, index, positions, keys, slice(a, b), heads, group)
                    if rows is None:
                        return
                    for task in tasks:
                        begun = time.perf_counter()
                        values = task.measure(rows)
                        _add(parts[task.name], values, heads, positions, counts, run.ends)
                        self._synchronize()
                        took = time.perf_counter() - begun
                        parts[task.name]["seconds"] += took
                        spent += took
            if "separability" in parts and bool((group.closest[:, -1] == 0).any()):
                parts["separability"]["duplicates"] = np.ones(())
        self.about["seconds_shared"] += time.perf_counter() - started - spent
        for task in tasks:
            self.done[task.name, run, index] = parts[task.name]
            self.parts.save(task.name, task.grid, self._name(run, index), parts[task.name])

    def _empty(self, task: Task, run: _Run, index: int) -> Part:
        shape = (self.layers[index].num_heads, len(run.ends), *task.shape)
        part = {key: np.zeros(shape) for name in task.quantities for key in (name, f"{name}/rows")}
        return part | {"seconds": np.zeros(())}

    def _positions(self, run: _Run) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Blocks of query positions, ascending, with the number of rows that each stands for."""
        if self.options.rows == "all":
            positions = torch.arange(run.length, device=self.device)
            counts = np.ones(run.length)
        else:
            drawn, weights, start = [], [], 0
            for end in run.ends:
                sampler = RowSampler(int(self.options.rows), 1, (self.options.seed, "rows", run.sequence, end))
                place, weight = sampler.positions(1, end - start, None, torch.device("cpu"))
                drawn.append(place[0] + start)
                weights.append(weight[0].double().numpy())
                start = end
            positions, counts = torch.cat(drawn).to(self.device), np.concatenate(weights)
        for start in range(0, len(positions), _ROWS):
            yield positions[start : start + _ROWS], counts[start : start + _ROWS]

    def _keys(self, call: AttentionCall, positions: Tensor, sinks: int) -> int:
        """How many keys these rows need: those behind are seen by none of them."""
        return int(positions[-1]) + 1 + sinks if self.trimmed else call.key.shape[2]

    def _head_chunks(self, first: int, last: int, group_size: int, per_head: int) -> Iterator[tuple[int, int]]:
        most = _ELEMENTS.get(self.device.type, self.memory // 2 // _ARRAYS // 8)
        step = max(1, most // (group_size * per_head))
        for start in range(first, last, step):
            yield start, min(start + step, last)

    def _rows(
        self,
        call: AttentionCall,
        sinks: int,
        index: int,
        positions: Tensor,
        keys: int,
        kv_heads: slice,
        heads: slice,
        group: _Group,
    ) -> Rows | None:
        """Rows of some heads, or None if the layer turns out not to be measurable."""
        mask = call.attn_mask
        part = replace(
            call,
            query=call.query[:, heads],
            key=call.key[:, kv_heads],
            value=call.value[:, kv_heads],
            attn_mask=mask if mask is None or mask.shape[1] == 1 else mask[:, heads],
            output=None if call.output is None else call.output[:, heads],
        )
        batch = rows_at(part, positions, keys)
        weights = masked_softmax(batch.logits, batch.mask)
        if part.output is not None and bool(disagrees(part.output, batch, weights)):
            self._give_up(call.layer)
            return None
        logits, shown = _per_head(batch, batch.logits), _per_head(batch, batch.mask)
        if self.normalizer is not None:
            weights = self.normalizer.weights(logits, mask=shown)
        else:
            weights = _per_head(batch, weights)

        def direction() -> Tensor:
            # as many numbers as a whole block has, so that a shorter context gets the same first rows
            wide = max(keys, int(positions[0]) + _ROWS + sinks)
            drawn = []
            for head in range(heads.start, heads.stop):
                key = (self.options.seed, "direction", index, head, int(positions[0]))
                generator = torch.Generator().manual_seed(random.Random(str(key)).getrandbits(63))
                drawn.append(torch.randn(_ROWS, wide, generator=generator)[: len(positions), :keys])
            return torch.stack(drawn).to(logits)

        return Rows(
            weights=weights,
            logits=logits,
            scores=_per_head(batch, batch.scores),
            mask=shown,
            selectable=None if self.options.convention == "full" else shown,
            group=group.prefix(keys),
            temperature=call.temperature,
            direction=direction,
        )

    def _give_up(self, layer: str) -> None:
        self.skipped[layer] = "its output is not the one that its captured arguments give"

    def _skip(self, layer: str, reason: str) -> None:
        self.skipped[layer] = reason

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _describe(self) -> dict[str, Any]:
        name = getattr(getattr(self.model, "config", None), "name_or_path", "") or type(self.model).__name__
        return {
            "model": name,
            "options": {**asdict(self.options), "lengths": self.lengths},
            "tokens": tuple(self.tokens.shape),
            "tokens_sha256": digest_tokens(self.tokens),
            "causal": self.causal,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds_shared": 0.0,
        }

    def result(self, compiled: list[str]) -> Analysis:
        """Everything, put together."""
        kept = [i for i, layer in enumerate(self.layers) if not self._missing_anywhere(i)]
        if not kept:
            reasons = "; ".join(f"`{layer}`: {reason}" for layer, reason in self.skipped.items())
            raise ValueError(
                f"Expected the attention of the model to be readable, but no layer's was: {reasons}. "
                "Load the model with attn_implementation='sdpa' or 'eager'."
            )
        layers = [self.layers[i] for i in kept]
        heads = tuple((place, head) for place, layer in enumerate(layers) for head in range(layer.num_heads))
        return Analysis(
            layers=tuple(layer.name for layer in layers),
            heads=heads,
            temperatures=tuple(layer.temperature for layer in layers),
            lengths=self.lengths,
            tables={task.name: self._table(task, kept) for task in self.tasks},
            not_measured=dict(self.skipped),
            notes=tuple(self._notes(compiled)),
            about=self.about,
        )

    def _missing_anywhere(self, index: int) -> bool:
        return any(self._missing(run, index) for run in self.runs)

    def _table(self, task: Task, kept: list[int]) -> Table:
        values: dict[str, np.ndarray] = {}
        rows: dict[str, np.ndarray] = {}
        seconds = sum(float(part["seconds"]) for (name, _, _), part in self.done.items() if name == task.name)
        for quantity in task.quantities:
            total, count = (self._sum(task, key, kept) for key in (quantity, f"{quantity}/rows"))
            with np.errstate(invalid="ignore"):
                values[quantity] = np.where(count > 0, total / count, np.nan)
            rows[quantity] = count
        return Table(task.axes, values, rows, seconds)

    def _sum(self, task: Task, key: str, kept: list[int]) -> np.ndarray:
        """Sums of one quantity over runs and segments, ``(heads, lengths, *axes)``."""
        by_layer = []
        for index in kept:
            columns = np.zeros((self.layers[index].num_heads, len(self.lengths), *task.shape))
            for run in self.runs:
                columns[:, list(run.columns)] += self.done[task.name, run, index][key]
            by_layer.append(columns.cumsum(1) if self.nested else columns)
        return np.concatenate(by_layer)

    def _notes(self, compiled: list[str]) -> Iterator[str]:
        if not self.causal:
            yield (
                "The model is bidirectional: a row sees all n = L keys, and each length was run by itself. Claims "
                "about causal rows, whose n grows along the text, do not apply."
            )
        if self.options.convention == "full":
            yield "Rows are all L keys, those that a row may not see with weight 0 (convention 'full')."
        if self.trimmed and not self.nested:
            yield (
                "What the model computes for the first tokens depends on how many follow (as with scaled rotary "
                "positions), so each length was run by itself."
            )
        if self.look.sinks:
            yield (
                "The model has learned attention sinks. Each counts as one more key of every row, with a zero vector: "
                "n is one larger per sink, and a sink can be among the N selected."
            )
        if self.options.rows != "all":
            yield f"Means are over {self.options.rows} drawn rows between each length and the next smaller one."
        if any("duplicates" in part for part in self.done.values()):
            yield (
                "Some keys carry identical vectors (a token that occurs twice): delta = 0, and Theorem 2 is measured "
                "with xi_i = M A_i."
            )
        separable = [part for (task, _, _), part in self.done.items() if task == "separability"]
        endless = sum(float((part["ratio/rows"] - part["lower/rows"]).sum()) for part in separable)
        if endless > 0:
            share = endless / sum(float(part["ratio/rows"].sum()) for part in separable)
            yield (
                f"Theorem 2's lower bound is -inf where r = 0, in {100 * share:.2g} % of the rows: its means leave "
                "them out."
            )
        if compiled:
            yield "The model is compiled; it was run uncompiled."


def _per_head(batch: RowBatch, values: Tensor) -> Tensor:
    return batch.per_head(values)[0]


def _add(
    part: Part,
    values: dict[str, Tensor],
    heads: slice,
    positions: Tensor,
    counts: np.ndarray,
    ends: tuple[int, ...],
) -> None:
    """Add the values of a block of rows to the sums of the segments that they belong to."""
    place = positions.cpu().numpy()
    weight = torch.from_numpy(counts)
    edges = [int(np.searchsorted(place, end)) for end in (0, *ends)]
    for name, value in values.items():
        usable = value.isfinite()
        shaped = weight.to(value.device).view(1, -1, *(1,) * (value.dim() - 2))
        counted = usable * shaped
        summed = torch.where(usable, value, 0.0).double() * shaped
        for segment, (a, b) in enumerate(itertools.pairwise(edges)):
            if a < b:
                part[name][heads, segment] += summed[:, a:b].sum(1).cpu().numpy()
                part[f"{name}/rows"][heads, segment] += counted[:, a:b].sum(1).cpu().numpy()
