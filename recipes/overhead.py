"""Measure what the monitor costs: training steps and bare attention with and without it, in turn on one machine.

    python recipes/overhead.py --config configs/overhead/demo.yaml

The arguments of `overhead` are the schema of the YAML files and of the command line; ``--help`` lists them.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from _models import choose_device
from _overhead import (
    FORMATS,
    MIB,
    Pairs,
    Spread,
    Table,
    Variant,
    alternate,
    count_synchronizations,
    machine_facts,
    milliseconds,
    peak_memory,
    spread,
    write_tables,
)
from _overhead_events import event_sizes
from _overhead_models import (
    DTYPES,
    TOP_WEIGHTS,
    AttentionStack,
    Training,
    check_measured,
    make_gpt2,
    sampled,
    unsampled,
)
from jsonargparse import auto_cli
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from attnmon import AttentionSaturationWarning, watch
from attnmon.cost import Cost
from attnmon.schedule import picture_due

PARTS = ("step", "rows_all", "naive", "growth", "events")
PLAIN_STEP, SAMPLED_STEP = "no monitor", "monitor, sampled"
NEVER = 10**9  # steps between two samples
LEAST_LENGTH = 32  # the default settings measure N = 20, for which rows of more keys are needed
_N_STEP = 5  # the growth over top_n measures N = 5, 10, 15 ...


@dataclass(frozen=True)
class Settings:
    """Sizes and repetitions; see `overhead`."""

    length: int
    batch: int
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    dropout: float
    repeats: int
    warmup: int
    every_n_steps: int
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    top_n_counts: tuple[int, ...]
    temperature_counts: tuple[int, ...]
    event_samples: int
    precision: str
    device: torch.device

    def time(self, plain: Variant, others: Sequence[Variant]) -> dict[str, Pairs]:
        """Seconds of each of the others, in turn with the plain one."""
        return alternate(plain, others, self.repeats, self.warmup, self.device)

    def attention(self, *, layers: int, heads: int, length: int, trains: bool = False) -> AttentionStack:
        """Bare attention of the width that a head has."""
        shape = (self.batch, heads, length, self.n_embd // self.n_head)
        return AttentionStack(shape, layers, self.device, DTYPES[self.precision], trains)


def overhead(
    parts: Sequence[str] | str = PARTS,
    length: int = 1024,
    batch: int = 1,
    n_layer: int = 12,
    n_head: int = 12,
    n_embd: int = 768,
    vocab_size: int = 50257,
    dropout: float = 0.1,
    repeats: int = 10,
    warmup: int = 2,
    every_n_steps: int = 50,
    lengths: Sequence[int] = (256, 512, 1024, 2048, 4096),
    rows: Sequence[int] = (16, 32, 64, 128, 256),
    heads: Sequence[int] = (4, 8, 12, 16, 32),
    top_n_counts: Sequence[int] = (1, 2, 4, 8, 16),
    temperature_counts: Sequence[int] = (1, 2, 4, 8, 16),
    event_samples: int = 100,
    precision: Literal["fp32", "bf16"] = "fp32",
    device: str | None = None,
    threads: int | None = None,
    seed: int = 0,
    output: str | None = None,
) -> None:
    """Print what the monitor costs.

    Everything is timed in pairs, with and without the monitor one after the other, the order turned round each time.
    Ratios and differences are taken within a pair; a cell shows their median, and in brackets the quartiles.

    Args:
        parts: What is measured, as a list or with commas between: ``step`` (a training step without the monitor, not
            sampled, sampled), ``rows_all`` (entropy of every row against the fused forward pass), ``naive`` (eager
            attention that returns its weights), ``growth`` (a sample over L, rows, heads, N and temperatures),
            ``events`` (size of TensorBoard's files).
        length: Context length L.
        batch: Sequences per batch.
        n_layer: Layers of the GPT-2, fresh weights.
        n_head: Its heads per layer.
        n_embd: Its width.
        vocab_size: Entries of its vocabulary.
        dropout: Its dropout; 0.1 is GPT-2's own. Without it a step is faster, on a CPU by far, and a sample weighs
            more beside it.
        repeats: Timed pairs.
        warmup: Untimed runs before.
        every_n_steps: Optimizer steps between two samples, for the share of a whole run.
        lengths: L of the growth table.
        rows: Sampled rows of the growth table.
        heads: Heads of the growth table, each as wide as the model's.
        top_n_counts: How many N are measured, in the growth table.
        temperature_counts: How many temperatures, in the growth table.
        event_samples: Samples written before the size of the event file is scaled to a thousand.
        precision: ``bf16`` trains under autocast; bare attention gets bf16 inputs.
        device: ``cpu`` or ``cuda``; by default a GPU if there is one.
        threads: CPU threads; by default torch decides.
        seed: Of weights, tokens and attention inputs.
        output: File for the tables as well: ``.md``, ``.csv`` or ``.json``.

    Raises:
        ValueError: An argument is out of its range.
    """
    chosen = tuple(part.strip() for part in (parts.split(",") if isinstance(parts, str) else parts))
    settings = Settings(
        length=length,
        batch=batch,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        vocab_size=vocab_size,
        dropout=dropout,
        repeats=repeats,
        warmup=warmup,
        every_n_steps=every_n_steps,
        lengths=tuple(lengths),
        rows=tuple(rows),
        heads=tuple(heads),
        top_n_counts=tuple(top_n_counts),
        temperature_counts=tuple(temperature_counts),
        event_samples=event_samples,
        precision=precision,
        device=choose_device(device),
    )
    check(chosen, settings)
    target = check_output(output)
    if threads is not None:
        if threads < 1:
            raise ValueError(f"Expected `threads` to be at least 1, but got {threads}. Leave it out: torch decides.")
        torch.set_num_threads(threads)
    facts = machine_facts(settings.device, precision)
    # as wide as the tables where no terminal says how wide it is
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    console.print(f"Median of {repeats} pairs (quartiles in brackets), batch {batch}.\n")
    tables = []
    with warnings.catch_warnings():
        # fresh weights attend to everything: the monitor says so, and it is not what is measured here
        warnings.simplefilter("ignore", AttentionSaturationWarning)
        for table in measure(chosen, settings, seed):
            console.print(table.to_rich())
            tables.append(table)
    if target is not None:
        write_tables(target, facts, tables)
        console.print(f"Tables: {target}", soft_wrap=True)


def measure(parts: Sequence[str], settings: Settings, seed: int) -> Iterator[Table]:
    """The tables, each as soon as it is there."""
    steps = [part for part in ("step", "naive") if part in parts]
    makers: dict[str, Callable[[], Iterator[Table]]] = {
        "step": lambda: step_tables(settings, steps),  # both kinds of step in one table
        "rows_all": lambda: rows_all_tables(settings),
        "growth": lambda: growth_tables(settings),
        "events": lambda: event_tables(settings),
    }
    for part, make in makers.items():
        if part in parts or (part == "step" and steps):
            torch.manual_seed(seed)
            yield from make()


# -- a training step ------------------------------------------------------------------------------------------------


def step_tables(settings: Settings, parts: Sequence[str]) -> Iterator[Table]:
    """A training step of GPT-2: without the monitor, with it, and as it is done by hand."""
    sizes = (settings.n_layer, settings.n_head, settings.n_embd, settings.vocab_size, settings.length)
    net = make_gpt2(*sizes, settings.dropout, settings.device)
    ids = torch.randint(settings.vocab_size, (settings.batch, settings.length)).to(settings.device)
    training = Training(net, ids, settings.precision)
    plain = Variant(PLAIN_STEP, training.step)
    watching = watch(net, every_n_steps=2)
    others = []
    costs: list[Cost] = []
    if "step" in parts:
        others.append(unsampled("monitor, not sampled", watch(net, every_n_steps=NEVER), training.step))
        others.append(sampled(SAMPLED_STEP, watching, training.step, costs))
    if "naive" in parts:
        name = f"eager: entropy, top {TOP_WEIGHTS}"
        others.append(Variant(name, training.step_by_hand, before=training.materialise, after=training.fuse))
    pairs = settings.time(plain, others)
    if "step" in parts:
        check_measured([watching], settings.n_layer)
    memory = {variant.name: peak_memory(variant, settings.device) / MIB for variant in (plain, *others)}
    size = sum(parameter.numel() for parameter in net.parameters())
    yield Table(
        f"Training step: forward, backward, AdamW; GPT-2 of {size / 1e6:.3g}M parameters, L = {settings.length}, "
        f"dropout {settings.dropout:g}",
        ("step", "ms", "ratio to no monitor", "peak memory, MiB", "extra memory, MiB"),
        [
            (plain.name, plain_milliseconds(pairs), 1.0, memory[plain.name], 0.0),
            *(
                (name, pair.milliseconds(), pair.ratio(), memory[name], memory[name] - memory[plain.name])
                for name, pair in pairs.items()
            ),
        ],
    )
    if "step" in parts:
        yield sample_table(
            settings,
            pairs[SAMPLED_STEP],
            costs[settings.warmup : settings.warmup + settings.repeats],
            (plain, others[1]),
        )


def sample_table(settings: Settings, pair: Pairs, costs: Sequence[Cost], variants: Sequence[Variant]) -> Table:
    """What one sample adds, and what that is of a whole run.

    The difference of two whole steps scatters as they do; the monitor's own clock (the host's, on a GPU) runs only
    while it works.
    """
    share = divide(pair.extra_ratio(), settings.every_n_steps / 100)  # in percent
    table = Table(
        "What a sample adds (default settings: 64 rows, every head, alerts)",
        ("figure", "value"),
        [
            ("a sample, ms", pair.extra()),
            ("by the monitor's own clock, ms", milliseconds([cost.seconds for cost in costs])),
            ("the same, % of the rest of its step", spread([100 * cost.share_of_step for cost in costs])),
            (f"its share of a run with one every {settings.every_n_steps} steps, %", share),
        ],
    )
    if settings.device.type == "cuda":
        for variant in variants:
            name = f"times the host waits for the GPU in a step: {variant.name}"
            table.rows.append((name, count_synchronizations(variant)))
    return table


def plain_milliseconds(pairs: dict[str, Pairs]) -> Spread:
    """The plain run over all pairs."""
    return milliseconds([seconds for pair in pairs.values() for seconds in pair.plain])


# -- every row ------------------------------------------------------------------------------------------------------


def rows_all_tables(settings: Settings) -> Iterator[Table]:
    """Figures of every row of bare attention layers, against the fused forward pass itself."""
    net = settings.attention(layers=settings.n_layer, heads=settings.n_head, length=settings.length)
    asked = {"entropy, first key": ["entropy", "first_key_weight"]}
    asked["and score max"] = [*asked["entropy, first key"], "score_max"]
    monitors = {
        name: watch(net, every_n_steps=2, rows="all", sequences=settings.batch, quantities=quantities, alerts=False)
        for name, quantities in asked.items()
    }
    plain = Variant("fused forward", net)
    others = [sampled(name, monitor, net) for name, monitor in monitors.items()]
    others.append(Variant("n x n weights by hand", net.by_hand))
    pairs = settings.time(plain, others)
    check_measured(list(monitors.values()), settings.n_layer)
    memory = {variant.name: peak_memory(variant, settings.device) / MIB for variant in (plain, *others)}
    layers = settings.n_layer
    yield Table(
        f"Every row: {settings.n_head} heads, L = {settings.length}, per layer (a pass of {layers} layers)",
        ("forward pass", "ms a layer", "extra, ms a layer", "extra / fused forward", "extra memory, MiB"),
        [
            (plain.name, divide(plain_milliseconds(pairs), layers), 0.0, 0.0, 0.0),
            *(
                (
                    name,
                    divide(pair.milliseconds(), layers),
                    divide(pair.extra(), layers),
                    pair.extra_ratio(),
                    memory[name] - memory[plain.name],
                )
                for name, pair in pairs.items()
            ),
        ],
    )


def divide(values: Spread, by: float) -> Spread:
    """Each of the quartiles divided."""
    return Spread(*(value / by for value in values))


# -- growth ---------------------------------------------------------------------------------------------------------


def growth_tables(settings: Settings) -> Iterator[Table]:
    """What a sample of one layer costs, over one size at a time."""
    base: dict[str, Any] = {"length": settings.length, "heads": settings.n_head}
    over: dict[str, dict[str, dict[str, Any]]] = {
        "L": {str(length): {"length": length} for length in settings.lengths},
        "rows": {str(rows): {"rows": rows} for rows in settings.rows},
        "heads": {str(heads): {"heads": heads} for heads in settings.heads},
        "number of N": {str(count): {"top_n": multiples(count, _N_STEP)} for count in settings.top_n_counts},
        "temperatures": {str(count): {"temperatures": multiples(count)} for count in settings.temperature_counts},
    }
    fixed = {"L": f"{settings.n_head} heads", "heads": f"L = {settings.length}"}
    for name, points in over.items():
        rest = fixed.get(name, f"L = {settings.length}, {settings.n_head} heads")
        yield Table(
            f"Growth of a sample of one layer over {name} ({rest}, else defaults)",
            (name, "a sample, ms", "fused forward and backward, ms", "sample / fused"),
            [(label, *growth_point(settings, **{**base, **point})) for label, point in points.items()],
        )


def multiples(count: int, step: int = 1) -> tuple[int, ...]:
    """``step``, ``2 * step`` and so on."""
    return tuple(range(step, step * count + 1, step))


def growth_point(settings: Settings, length: int, heads: int, **arguments: Any) -> tuple[Spread, Spread, Spread]:
    """A sample in milliseconds, forward and backward of the module it looks at, and their ratio."""
    net = settings.attention(layers=1, heads=heads, length=length, trains=True)
    monitor = watch(net, every_n_steps=2, **arguments)
    plain = Variant("plain", net.forward_and_backward)
    pair = settings.time(plain, [sampled("ours", monitor, net.forward_and_backward)])["ours"]
    check_measured([monitor], 1)
    return pair.extra(), milliseconds(pair.plain), pair.extra_ratio()


# -- event files ----------------------------------------------------------------------------------------------------


def event_tables(settings: Settings) -> Iterator[Table]:
    """Bytes that a thousand samples of 12 layers with 12 heads leave in TensorBoard's file."""
    pictures = sum(picture_due(sample) for sample in range(1000))
    yield Table(
        f"Event file of a thousand samples, 12 layers x 12 heads (from {settings.event_samples} samples, no warnings)",
        (
            "scalars",
            "scalars a sample",
            "scalars, MiB",
            f"images at {pictures} samples, MiB",
            "an image, KiB",
            "Attention tab, MiB",
            "all, MiB",
        ),
        [event_row(settings, per_head, pictures) for per_head in (False, True)],
    )


def event_row(settings: Settings, per_head: bool, pictures: int) -> tuple[str | float, ...]:
    """One line of the table."""
    found = event_sizes(settings.event_samples, per_head, settings.device)
    scalars = 1000 / settings.event_samples * sum(found["scalar"])
    images = pictures / sum(picture_due(sample) for sample in range(settings.event_samples)) * sum(found["image"])
    first, *later = found["tab"]  # the first one also describes the data
    tab = first + 999 * statistics.mean(later or [first])
    return (
        "a layer's and each head's" if per_head else "a layer's",
        round(len(found["scalar"]) / settings.event_samples),
        scalars / MIB,
        images / MIB,
        statistics.mean(found["image"]) / 1024,
        tab / MIB,
        (scalars + images + tab + sum(found["other"])) / MIB,
    )


# -- arguments ------------------------------------------------------------------------------------------------------


def check(parts: Sequence[str], settings: Settings) -> None:
    """Refuse what cannot be measured, before anything is.

    Raises:
        ValueError: An argument is out of its range.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        got = repr(unknown[0]) if unknown else "none"
        raise ValueError(f"Expected `parts` to name some of {', '.join(PARTS)}, but got {got}.")
    for name in ("batch", "n_layer", "n_head", "n_embd", "vocab_size", "warmup", "every_n_steps", "event_samples"):
        _at_least(name, getattr(settings, name), 1)
    if not 0.0 <= settings.dropout < 1.0:
        raise ValueError(f"Expected `dropout` to be at least 0 and below 1, but got {settings.dropout}.")
    _at_least("repeats", settings.repeats, 2)  # quartiles of one number say nothing
    _at_least("length", settings.length, LEAST_LENGTH)
    for name, least in (
        ("lengths", LEAST_LENGTH),
        ("rows", 1),
        ("heads", 1),
        ("top_n_counts", 1),
        ("temperature_counts", 1),
    ):
        values = getattr(settings, name)
        if not values:
            raise ValueError(f"Expected `{name}` to have at least one entry, but got none.")
        _at_least(name, min(values), least)
    if settings.n_embd % settings.n_head:
        raise ValueError(
            f"Expected `n_embd` to be a multiple of `n_head`, but got {settings.n_embd} and {settings.n_head}."
        )
    if "growth" in parts and max(settings.rows) > settings.length:
        raise ValueError(
            f"Expected `rows` to be at most `length`, {settings.length}, but got {max(settings.rows)}. There are no "
            "more rows to look at."
        )
    largest = _N_STEP * max(settings.top_n_counts)
    if "growth" in parts and largest >= settings.length:
        raise ValueError(
            f"Expected `top_n_counts` to be below `length` / {_N_STEP}, since N = {_N_STEP}, {2 * _N_STEP} ... are "
            f"measured, but got {max(settings.top_n_counts)} at `length` {settings.length}."
        )
    if settings.device.type not in ("cpu", "cuda"):
        raise ValueError(f"Expected `device` to be cpu or cuda, but got {settings.device.type!r}.")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")


def check_output(output: str | None) -> Path | None:
    """The file for the tables, if one is wanted and can be.

    Raises:
        ValueError: Its ending is unknown or its folder cannot be made.
    """
    if output is None:
        return None
    path = Path(output)
    if path.suffix not in FORMATS:
        raise ValueError(f"Expected `output` to end in {', '.join(FORMATS)}, but got {output!r}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"Expected `output` to lie in a folder, but making {str(path.parent)!r} failed: {error.strerror}. Give "
            "another one."
        ) from error
    return path


if __name__ == "__main__":
    disable_progress_bar()
    try:
        auto_cli(overhead, as_positional=False)
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
