"""Clock, memory and tables of overhead.py: nothing here knows what is measured."""

from __future__ import annotations

import csv
import gc
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import rich.table
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

MIB = 2**20
FORMATS = (".md", ".csv", ".json")


class Spread(NamedTuple):
    """Quartiles of a measurement."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Quartiles of at least two numbers."""
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


# -- time -----------------------------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Variant:
    """One of the things that are timed in turn.

    Attributes:
        name: How the tables call it.
        run: What is timed.
        before: What `run` needs and is no part of its time.
        after: What the others need afterwards, no part of the time either.
    """

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing

    def __call__(self) -> None:
        """The whole of it, untimed."""
        self.before()
        self.run()
        self.after()


@dataclass(frozen=True)
class Pairs:
    """Seconds of a variant and of the plain run next to it, one entry each per round."""

    plain: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    def milliseconds(self) -> Spread:
        """The variant by itself."""
        return milliseconds(self.ours)

    def ratio(self) -> Spread:
        """The variant as a multiple of the plain run, pair by pair."""
        return spread([ours / plain for plain, ours in zip(self.plain, self.ours, strict=True)])

    def extra(self) -> Spread:
        """Milliseconds that the variant takes beyond the plain run, pair by pair."""
        return spread([1e3 * (ours - plain) for plain, ours in zip(self.plain, self.ours, strict=True)])

    def extra_ratio(self) -> Spread:
        """The same as a multiple of the plain run."""
        return spread([ours / plain - 1 for plain, ours in zip(self.plain, self.ours, strict=True)])


def alternate(
    plain: Variant, others: Sequence[Variant], repeats: int, warmup: int, device: torch.device
) -> dict[str, Pairs]:
    """Times each of the others next to a plain run, so that whatever slows the machine down meets both alike.

    Every second round the plain run comes second: what the first leaves behind in caches falls on either.

    Args:
        plain: What the others are compared with.
        others: What is timed.
        repeats: Timed rounds.
        warmup: Untimed runs of each before: what only first calls cost is no part of the result.
        device: Where they run.

    Returns:
        The times of each of the others, by name.
    """
    for variant in (plain, *others):
        for _ in range(warmup):
            variant()
    pairs = {other.name: Pairs() for other in others}
    gc.collect()
    gc.freeze()  # the collections between the runs then pass over all that was there before them
    try:
        for turn in range(repeats):
            for other in others:
                runs = [(plain, pairs[other.name].plain), (other, pairs[other.name].ours)]
                for variant, seconds in runs if turn % 2 == 0 else reversed(runs):
                    variant.before()
                    seconds.append(_clock(variant.run, device))
                    variant.after()
    finally:
        gc.unfreeze()
    return pairs


def _clock(run: Callable[[], object], device: torch.device) -> float:
    gc.collect()
    gc.disable()  # else a collection that others have made due may fall into this one's time
    try:
        _synchronize(device)
        begun = time.perf_counter()
        run()
        _synchronize(device)
        return time.perf_counter() - begun
    finally:
        gc.enable()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(seconds: Sequence[float]) -> Spread:
    """Quartiles in milliseconds."""
    return spread([1e3 * value for value in seconds])


# -- memory and synchronisations ------------------------------------------------------------------------------------


def peak_memory(variant: Variant, device: torch.device) -> int:
    """Most bytes of tensors that a run holds at a time, beyond those that were there before it."""
    variant.before()
    gc.collect()
    measure = _peak_on_gpu if device.type == "cuda" else _peak_on_cpu
    peak = measure(variant.run, device)
    variant.after()
    return peak


def _peak_on_gpu(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(run: Callable[[], object], device: torch.device) -> int:
    # Torch counts the bytes itself while it profiles: unlike the size of the process, that does not depend on what the
    # allocator below it keeps or gives back.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce its own start and stop on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    marks = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    if not marks:
        return 0
    first = min(marks, key=lambda event: float(event["ts"]))["args"]
    before = int(first["Total Allocated"]) - int(first["Bytes"])
    return max(0, *(int(event["args"]["Total Allocated"]) - before for event in marks))


def count_synchronizations(variant: Variant) -> int:
    """How often a run makes the host wait for the GPU, as torch counts it."""
    variant.before()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            variant.run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    variant.after()
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def machine_facts(device: torch.device, precision: str) -> dict[str, str]:
    """What the numbers depend on, without anything that names the machine or its user."""
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": on,
        "precision": precision,
        "CPUs": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "processor": platform.machine(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# -- tables ---------------------------------------------------------------------------------------------------------

Cell = str | int | float | Spread


@dataclass(frozen=True)
class Table:
    """Rows of numbers under headings that carry the units.

    Attributes:
        title: What was measured.
        columns: Headings; the first column names the row.
        rows: The cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    def to_rich(self) -> rich.table.Table:
        """The table for a terminal."""
        shown = rich.table.Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            shown.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            shown.add_row(*map(cell_text, row))
        return shown

    def to_markdown(self) -> str:
        """The table for a document."""
        lines = [self.columns, ("---",) * len(self.columns), *(tuple(map(cell_text, row)) for row in self.rows)]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


def cell_text(cell: Cell) -> str:
    """A number of three digits; of a measurement the median and its quartiles."""
    if isinstance(cell, Spread):
        return f"{_digits(cell.median)} ({_digits(cell.low)} to {_digits(cell.high)})"
    return _digits(cell) if isinstance(cell, float) else str(cell)


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_tables(path: Path, facts: dict[str, str], tables: Sequence[Table]) -> None:
    """Writes the tables as the ending of the path says: one of `FORMATS`."""
    if path.suffix == ".md":
        head = ", ".join(f"{name} {value}" for name, value in facts.items())
        text = "\n\n".join([head, *(table.to_markdown() for table in tables)]) + "\n"
        path.write_text(text, encoding="utf-8")
    elif path.suffix == ".json":
        content = {"machine": facts, "tables": [_plain(table) for table in tables]}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("table", "row", "column", "value", "lower_quartile", "upper_quartile"))
            for table in tables:
                writer.writerows(_lines(table))


def _plain(table: Table) -> dict[str, object]:
    rows = [
        {
            column: cell._asdict() if isinstance(cell, Spread) else cell
            for column, cell in zip(table.columns, row, strict=True)
        }
        for row in table.rows
    ]
    return {"title": table.title, "columns": table.columns, "rows": rows}


def _lines(table: Table) -> list[tuple[Cell, ...]]:
    lines: list[tuple[Cell, ...]] = []
    for row in table.rows:
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            value = (cell.median, cell.low, cell.high) if isinstance(cell, Spread) else (cell, "", "")
            lines.append((table.title, row[0], column, *value))
    return lines
