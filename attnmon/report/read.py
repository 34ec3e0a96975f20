"""From the files of a run to `RunData`."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.dashboard.names import BY_NAME, QUANTITIES, title
from attnmon.records import UnreadableError, read_json, tag_of
from attnmon.report.alarms import find_alarms
from attnmon.report.checks import check_run, check_warnings, figure
from attnmon.report.data import Floats, Layer, RunData, Scalars, Section, Series, mean_of_heads
from attnmon.report.events import Column, Events, layer_tag, read_csv, read_events
from attnmon.report.find import Found, ReportError, find_run
from attnmon.report.text import counted, shortened

__all__ = ["MAX_VALUES", "read_run"]

MAX_VALUES = 2_000_000
"""Figures kept of one prefix, unless told otherwise: all of 12 x 12 heads, 22 quantities and 600 samples."""

_LOSSES = ("train_loss", "train/loss", "loss", "train/train_loss", "training_loss", "train_loss_step", "loss/train")
_HOW_TO_LOG = (
    "Log with `AttentionMonitor()` among the callbacks of a Lightning Trainer with a TensorBoardLogger or CSVLogger, "
    "with `attnmon.integrations.transformers.AttentionMonitorCallback()` among those of a `transformers.Trainer`, or "
    "with `watch(model, writer=SummaryWriter(...))` around a plain loop."
)


def read_run(run_dir: str | os.PathLike[str], *, max_values: int = MAX_VALUES) -> RunData:
    """Reads what the attention monitor logged in a run.

    Args:
        run_dir: A folder with event files, or with one sub-folder that has them. Several files, as resumed runs leave
            them, are one run; where steps were run again, the last time counts.
        max_values: Figures that are kept of one prefix. Of a run with more, every second, fourth, ... sample and the
            last are kept; what is first, last, lowest and highest is of all samples all the same.

    Raises:
        ReportError: There is no run, more than one, or no attention data in it.
    """
    if isinstance(max_values, bool) or not isinstance(max_values, int) or max_values < 1:
        raise ValueError(f"Expected `max_values` to be an integer >= 1, but got {max_values!r}.")
    found = find_run(run_dir)
    asked = Path(run_dir)
    csv = found.files[0].suffix == ".csv"
    with closing(read_csv(found.files[0]) if csv else read_events(found.files)) as events:
        return _build(events, found, asked, max_values)


def _build(events: Events, found: Found, asked: Path, max_values: int) -> RunData:
    notes = list(events.notes)
    if found.folder != asked:
        notes.append(f"The run was found in the sub-folder {found.folder.relative_to(asked)}.")
    if found.aside:
        aside = ", ".join(str(place.relative_to(asked)) for place in found.aside[:8])
        notes.append(f"Sub-folders with files of their own were left alone: {aside}.")
    sections = {prefix: _section(events, prefix, max_values, notes) for prefix in _prefixes(events)}
    sections = {prefix: section for prefix, section in sections.items() if section.quantities}
    if not sections:
        more = f" What was read: {' '.join(notes)}" if notes else ""
        raise ReportError(
            f"Expected the run in {found.folder} to hold attention data, but {len(found.files)} "
            f"file{'s have' if len(found.files) > 1 else ' has'} none.{more} {_HOW_TO_LOG}"
        )
    return RunData(
        name=str(Path(asked.resolve().name) / found.folder.relative_to(asked)),
        folder=found.folder,
        files=tuple(path.name for path in found.files),
        notes=tuple(notes),
        times=events.times,
        sections=sections,
        loss=_loss(events, sections),
    )


def _prefixes(events: Events) -> list[str]:
    """Prefixes with figures: a training run before its validations."""
    found = {described["prefix"] for described in events.described.values() if described["kind"] == "heads"}
    scalars = {tag.prefix for name in events.scalars if (tag := layer_tag(name)) is not None}
    # A trainer puts a name of its own before the keys of scalars, not of tensors: train/attn goes with attn.
    found |= {prefix for prefix in scalars if not prefix.endswith(tuple(f"/{ours}" for ours in found))}
    return sorted(found, key=lambda prefix: (prefix.endswith("_val"), prefix))


class _Restarts:
    """Where a run went back to an earlier step, as a resumed one does: what it had written beyond is void.

    Args:
        columns: All that was written under one prefix.
    """

    def __init__(self, columns: Iterable[Column]) -> None:
        written = sorted({pair for column in columns for pair in zip(column.order, column.steps, strict=True)})
        self.steps: list[int] = []
        self._orders: list[int] = []
        for (_, before), (order, step) in pairwise(written):
            if step < before:
                self._orders.append(order)
                self.steps.append(step)
        # The earliest step that a restart at this place or later went back to
        self._least = list(self.steps)
        for place in range(len(self._least) - 2, -1, -1):
            self._least[place] = min(self._least[place], self._least[place + 1])

    def beyond(self, columns: Iterable[Column]) -> bool:
        """Whether all of these were written before the run went back for the last time."""
        last = max((order for column in columns for order in column.order), default=-1)
        return bool(self._orders) and last < self._orders[-1]

    def valid(self, column: Column) -> list[int]:
        """Places in a column that count, in order of their steps; of a repeated step the last."""
        kept: dict[int, int] = {}
        for place, (order, step) in enumerate(zip(column.order, column.steps, strict=True)):
            later = bisect.bisect_right(self._orders, order)
            if later == len(self._least) or step < self._least[later]:
                kept[step] = place
        return [kept[step] for step in sorted(kept)]


def _section(events: Events, prefix: str, max_values: int, run_notes: list[str]) -> Section:
    ours = [
        events.columns[tag]
        for tag, described in events.described.items()
        if described["prefix"] == prefix and tag in events.columns
    ]
    theirs = [column for tag, column in events.scalars.items() if f"/{prefix}/" in f"/{tag}"]
    # Each by itself: a logger may number the steps of scalars otherwise.
    restarts, scalar_restarts = _Restarts(ours), _Restarts(theirs)
    if len(scalar_restarts.steps) < len(restarts.steps) and restarts.beyond(theirs):
        # Nothing more was logged that would show where they went back.
        scalar_restarts = restarts
    notes: list[str] = []
    if steps := restarts.steps or scalar_restarts.steps:
        where = ", ".join(str(step) for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
        notes.append(f"The run went back to an earlier step (resumed at step {where}); steps run again count once.")

    shapes = _shapes(events, prefix, restarts)
    largest = (max(rows for rows, _ in shapes), max(columns for _, columns in shapes)) if shapes else None
    runs, unread_runs = _records(events, tag_of("run", prefix), restarts, run_notes, partial(check_run, most=largest))
    named = None if unread_runs else _named(runs)
    if named is not None and 2 * sum(_fits(shape, named) for shape in shapes) < len(shapes):
        named = None
        notes.append("The run's record names fewer layers or heads than most of its samples have.")
    tables = _tensor_tables(events, prefix, restarts, named, notes)
    per_head = bool(tables)
    if not tables:
        tables, per_head = _scalar_tables(events, prefix, scalar_restarts)
        what = "each head was" if per_head else "only the means over each layer's heads were"
        notes.append(f"Read from scalars, as the files hold no tensors of the Attention tab: {what} logged.")
    samples = max((len(table.steps) for table in tables.values()), default=0)
    size = sum(table.layers * table.heads for table in tables.values())
    stride = 1
    while size * samples // stride > max_values and stride < samples:
        stride *= 2
    if stride > 1:
        notes.append(
            f"Of {samples} samples 1 in {stride} and the last were kept for the curves; first, last, lowest and "
            f"highest figures and the ends of alarms are of all samples."
        )
    check = partial(check_warnings, there=_there(tables, named) if per_head else None)
    warned, unread = _records(events, tag_of("warnings", prefix), restarts, run_notes, check)
    unread += events.unreadable(tag_of("warnings", prefix))  # all of them: as one, as their number isn't known
    alerts = [{**alert, "step": step} for step, record in warned for alert in record["alerts"]]
    quantities = {}
    for name in sorted(tables, key=_place):
        table = tables[name]
        values = table.load()  # of all samples: one quantity at a time
        quantities[name] = _series(name, table.described, table.steps, values, stride)

    source = str(runs[-1][1]["source"]) if runs else ""
    counts = _scalars(events, f"{prefix}/warnings/", scalar_restarts)
    notes += _ended_early(counts, tables)
    ends = [int(step) for table in tables.values() for step in (table.steps[0], table.steps[-1])]
    return Section(
        prefix=prefix,
        per_head=per_head,
        source=source,
        cadence=() if source == "validation" else _cadence(runs),
        layers=_layers(runs, alerts, max((table.layers for table in tables.values()), default=0)),
        not_measured=runs[-1][1]["not_measured"] if runs else {},
        levels=tuple(runs[-1][1]["levels"]) if runs else (),
        samples=samples,
        steps=(min(ends, default=0), max(ends, default=0)),
        quantities=quantities,
        alerts=tuple(alerts),
        alarms=find_alarms(warned),
        alerts_on=bool(counts or warned or unread),
        counts=counts,
        cost=_scalars(events, f"{prefix}/monitor/", scalar_restarts),
        notes=tuple(notes),
        unread=unread,
    )


def _ended_early(counts: Mapping[str, Scalars], tables: Mapping[str, _Table]) -> list[str]:
    """Says so where the rules fell silent long before the end, as in a run resumed without them."""
    steps = np.unique(np.concatenate([count.steps for count in counts.values()] or [np.array([], dtype=np.int64)]))
    end = max((int(table.steps[-1]) for table in tables.values()), default=0)
    if len(steps) < 2 or end - steps[-1] <= 2 * np.diff(steps).max():
        return []
    return [
        f"The rules were last heard of at step {steps[-1]}, though the samples go on to step {end}: what is said of "
        f"warnings at the end of the run holds for step {steps[-1]}."
    ]


@dataclass(frozen=True)
class _Table:
    """One quantity that can be loaded."""

    steps: NDArray[np.int64]
    layers: int
    heads: int
    load: Callable[[], Floats]
    described: Mapping[str, Any] = field(default_factory=dict)


def _tensor_columns(events: Events, prefix: str) -> Iterator[tuple[str, Mapping[str, Any], Column]]:
    for tag, described in events.described.items():
        column = events.columns.get(tag)
        if described["kind"] == "heads" and described["prefix"] == prefix and column is not None:
            yield tag, described, column


def _shapes(events: Events, prefix: str, restarts: _Restarts) -> list[tuple[int, int]]:
    """Layers and heads of each sample's table."""
    return [
        events.shapes[int(column.values[place])]
        for _, _, column in _tensor_columns(events, prefix)
        for place in restarts.valid(column)
    ]


def _fits(shape: tuple[int, int], named: NDArray[np.bool_]) -> bool:
    rows, columns = len(named), len(named[0])
    return shape[0] <= rows and shape[1] <= columns


def _named(runs: Iterable[tuple[int, Mapping[str, Any]]]) -> NDArray[np.bool_] | None:
    """``(layers, heads)``: the heads that the run was ever said to have; None where nothing is said."""
    heads: dict[int, int] = {}
    for _, run in runs:
        for layer in run["layers"]:
            heads[layer["number"]] = max(heads.get(layer["number"], 0), layer["heads"])
    if not any(heads.values()):
        return None
    result = np.zeros((max(heads) + 1, max(heads.values())), dtype=np.bool_)
    for number, count in heads.items():
        result[number, :count] = True
    return result


def _there(tables: Mapping[str, _Table], named: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Heads that a warning can be about."""
    if named is not None:
        return named
    shape = max(table.layers for table in tables.values()), max(table.heads for table in tables.values())
    return np.ones(shape, dtype=np.bool_)


def _tensor_tables(
    events: Events, prefix: str, restarts: _Restarts, named: NDArray[np.bool_] | None, notes: list[str]
) -> dict[str, _Table]:
    """The tables of a prefix; samples with more layers or heads than the run has are somebody else's."""
    tables = {}
    for tag, described, column in _tensor_columns(events, prefix):
        places = restarts.valid(column)
        if named is not None:
            every = len(places)
            places = [place for place in places if _fits(events.shapes[int(column.values[place])], named)]
            if len(places) < every:
                left = every - len(places)
                notes.append(
                    f"{left} of {counted(every, 'sample')} of {tag!r} {'was' if left == 1 else 'were'} left out: more "
                    f"layers or heads than the {named.shape[0]} x {named.shape[1]} of the run's record."
                )
        numbers = [int(column.values[place]) for place in places]
        kept = [events.shapes[number] for number in numbers]
        layers, heads = (max((shape[axis] for shape in kept), default=0) for axis in (0, 1))
        if layers and heads:
            steps = np.array([column.steps[place] for place in places], dtype=np.int64)
            load = partial(_loaded, events, numbers, named)
            tables[str(described.get("quantity", tag))] = _Table(steps, layers, heads, load, described)
    return tables


def _loaded(events: Events, numbers: Sequence[int], named: NDArray[np.bool_] | None) -> Floats:
    """The samples, without figures of heads that the run does not have."""
    values = events.tensors(numbers)
    if named is not None:
        values[:, ~named[: values.shape[1], : values.shape[2]]] = np.nan
    return values


def _scalar_tables(events: Events, prefix: str, restarts: _Restarts) -> tuple[dict[str, _Table], bool]:
    """The same from scalars, and whether they are of single heads."""
    found: dict[str, dict[tuple[int, int | None], Column]] = {}
    for name, column in events.scalars.items():
        tag = layer_tag(name)
        if tag is not None and tag.prefix == prefix:
            found.setdefault(tag.quantity, {})[tag.layer, tag.head] = column
    per_head = any(head is not None for columns in found.values() for _, head in columns)
    tables = {}
    for quantity, columns in found.items():
        cells = {
            (layer, head or 0): column for (layer, head), column in columns.items() if (head is not None) == per_head
        }
        points = {
            cell: {column.steps[place]: column.values[place] for place in restarts.valid(column)}
            for cell, column in cells.items()
        }
        steps = np.array(sorted({step for values in points.values() for step in values}), dtype=np.int64)
        if steps.size:
            layers, heads = (1 + max(cell[axis] for cell in points) for axis in (0, 1))
            tables[quantity] = _Table(steps, layers, heads, partial(_filled, points, steps, layers, heads))
    return tables, per_head


def _filled(
    points: Mapping[tuple[int, int], Mapping[int, float]], steps: NDArray[np.int64], layers: int, heads: int
) -> Floats:
    result = np.full((len(steps), layers, heads), np.nan, dtype=np.float32)
    for (layer, head), values in points.items():
        rows = np.searchsorted(steps, np.array(list(values), dtype=np.int64))
        result[rows, layer, head] = list(values.values())
    return result


def _series(name: str, described: Mapping[str, Any], steps: NDArray[np.int64], values: Floats, stride: int) -> Series:
    known = BY_NAME.get(name.partition("@")[0])
    finite = np.isfinite(values)
    measured = finite.any(axis=0)
    first_place, last_place = finite.argmax(axis=0), len(steps) - 1 - finite[::-1].argmax(axis=0)
    low_place = np.where(finite, values, np.inf).argmin(axis=0)
    high_place = np.where(finite, values, -np.inf).argmax(axis=0)

    def at(place: NDArray[np.intp]) -> Floats:
        return np.where(measured, np.take_along_axis(values, place[None], axis=0)[0], np.float32(np.nan))

    first = at(first_place)
    furthest = int(np.nan_to_num(_distances(values, first), nan=-1.0).argmax())
    kept = np.unique(np.append(np.arange(0, len(steps), stride), len(steps) - 1))
    limits = _limits(described.get("limits"), known.limits if known else (None, None))
    return Series(
        name=name,
        title=str(described.get("title") or title(name, unit=False)),
        unit=str(described.get("unit") or (known.unit if known else "")),
        limits=limits,
        rise=str(described.get("rise") or (known.rise if known else "")),
        fall=str(described.get("fall") or (known.fall if known else "")),
        samples=len(steps),
        steps=steps[kept],
        values=values[kept],
        first=first,
        first_step=np.where(measured, steps[first_place], -1),
        last=np.where(finite[-1], values[-1], np.float32(np.nan)),
        last_step=np.where(measured, steps[last_place], -1),
        low=at(low_place),
        high=at(high_place),
        low_step=np.where(measured, steps[low_place], -1),
        high_step=np.where(measured, steps[high_place], -1),
        furthest_step=int(steps[furthest]),
        furthest=values[furthest].copy(),
    )


def _distances(values: Floats, first: Floats) -> Floats:
    """How far the heads of each sample are from their first figures, on average; NaN where none was measured."""
    return np.array([mean_of_heads(np.abs(sample - first).reshape(-1)) for sample in values], dtype=np.float32)


def _limits(described: object, known: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    """Ends of the colour scale from a tag's metadata; where these can't be such, the known ones."""
    if not isinstance(described, list) or len(described) != 2:
        return known
    try:
        low, high = (None if end is None else figure(end) for end in described)
    except (TypeError, ValueError):
        return known
    return known if low is not None and high is not None and low >= high else (low, high)


def _place(name: str) -> tuple[int, float, str]:
    """The order of the table of quantities."""
    base, _, argument = name.partition("@")
    try:
        number = float(argument)
    except ValueError:
        number = 0.0
    names = [quantity.name for quantity in QUANTITIES]
    return (names.index(base) if base in BY_NAME else len(names), number, name)


def _records(
    events: Events,
    tag: str,
    restarts: _Restarts,
    notes: list[str],
    check: Callable[[dict[str, Any]], None],
) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Step and content of the JSON records of a tag, as far as they can be read, and how many can't be."""
    column = events.columns.get(tag)
    if column is None:
        return [], 0
    records: list[tuple[int, dict[str, Any]]] = []
    unread: dict[str, list[int]] = {}  # what is wrong -> steps
    for place in restarts.valid(column):
        try:
            record = read_json(events.texts[int(column.values[place])])
            check(record)
        except UnreadableError as error:
            unread.setdefault(str(error), []).append(column.steps[place])
        else:
            records.append((column.steps[place], record))
    for what, steps in unread.items():
        if len(steps) == 1:
            notes.append(f"The record of {tag!r} at step {steps[0]} was left out: {what}.")
        else:
            where = shortened([str(step) for step in steps], 8)
            notes.append(f"{len(steps)} records of {tag!r} were left out (steps {where}): {what}.")
    return records, sum(map(len, unread.values()))


def _cadence(runs: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[tuple[int, int], ...]:
    """``every_n_steps`` and the step from which it held."""
    changes: list[tuple[int, int]] = []
    for step, run in runs:
        every = run["every_n_steps"]
        if every is None:
            continue
        if not changes or changes[-1][0] != every:
            changes.append((every, step))
    return tuple(changes)


def _layers(
    runs: Sequence[tuple[int, Mapping[str, Any]]], alerts: Iterable[Mapping[str, Any]], rows: int
) -> dict[int, Layer]:
    """All layers that the run was ever said to have; those of which only figures tell have no path."""
    layers = {row: Layer(row) for row in range(rows)} if not runs else {}
    for alert in alerts:
        layers |= {int(number): Layer(int(number), str(path)) for number, path in alert["layers"].items()}
    for _, run in runs:
        for entry in run["layers"]:
            number, temperature = int(entry["number"]), entry["temperature"]
            layers[number] = Layer(
                number, str(entry["path"]), int(entry["heads"]), None if temperature is None else float(temperature)
            )
    return dict(sorted(layers.items()))


def _scalars(events: Events, start: str, restarts: _Restarts) -> dict[str, Scalars]:
    """Scalars whose tag begins so, by the rest of it; else those with a trainer's own name before that."""
    found = {tag: tag.removeprefix(start) for tag in sorted(events.scalars) if tag.startswith(start)}
    if not found:
        found = {tag: tag.partition(f"/{start}")[2] for tag in sorted(events.scalars) if f"/{start}" in tag}
    scalars = {name: _scalar(tag, events.scalars[tag], restarts) for tag, name in found.items()}
    return {name: scalar for name, scalar in scalars.items() if len(scalar.steps)}  # else all of it is void


def _scalar(tag: str, column: Column, restarts: _Restarts) -> Scalars:
    places = restarts.valid(column)
    return Scalars(
        tag,
        np.array([column.steps[place] for place in places], dtype=np.int64),
        np.array([column.values[place] for place in places], dtype=np.float64),
    )


def _loss(events: Events, prefixes: Iterable[str]) -> Scalars | None:
    """The training loss: a scalar with one of its usual names, else the first that is called a loss of training."""
    candidates = [tag for tag in sorted(events.scalars) if "loss" in tag.lower() and layer_tag(tag) is None]
    candidates = [tag for tag in candidates if not tag.startswith(tuple(f"{prefix}/" for prefix in prefixes))]
    named = [tag for tag in _LOSSES if tag in candidates]
    others = [tag for tag in candidates if not any(word in tag.lower() for word in ("val", "eval", "test"))]
    for tag in named + others:
        column = events.scalars[tag]
        return _scalar(tag, column, _Restarts([column]))
    return None
