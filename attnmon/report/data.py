"""A run as plain numbers: what `read_run` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.alerts.base import SEVERITIES

__all__ = ["Alarm", "HeadStatus", "Layer", "RunData", "Scalars", "Section", "Series", "fine", "mean_of_heads"]

Floats = NDArray[np.float32]
Steps = NDArray[np.int64]


@dataclass(frozen=True)
class Scalars:
    """One scalar over the run."""

    tag: str
    steps: Steps
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One quantity of every head over the run. NaN = not measured.

    Attributes:
        name: As in ``snapshot.values``.
        title: For people.
        unit: Its unit; "" for a pure number.
        limits: Ends of the colour scale; None = the data's own.
        rise: What a rise means.
        fall: What a fall means.
        samples: Number of samples in the run.
        steps: Steps of the samples that were kept: all of a small run's, every second, fourth, ... and the last of a
            large one's.
        values: Their figures, ``(len(steps), layers, heads)``.
        first: Each head's first figure, ``(layers, heads)``; this and what follows is of all samples.
        first_step: Step of the first figure, -1 where the head was never measured.
        last: Its figure at the last sample: NaN where it was not measured there, whatever came before.
        last_step: Step of the last figure that was measured, -1 where the head never was.
        low: Its lowest.
        high: Its highest.
        low_step: Step of the lowest, -1 where the head was never measured.
        high_step: Step of the highest, likewise.
        furthest_step: The step at which the heads are furthest from their first figures, on average.
        furthest: Their figures there.
    """

    name: str
    title: str
    unit: str
    limits: tuple[float | None, float | None]
    rise: str
    fall: str
    samples: int
    steps: Steps
    values: Floats
    first: Floats
    first_step: Steps
    last: Floats
    last_step: Steps
    low: Floats
    high: Floats
    low_step: Steps
    high_step: Steps
    furthest_step: int
    furthest: Floats

    @property
    def change(self) -> Floats:
        """Figure at the last sample less first figure of each head."""
        return self.last - self.first

    @property
    def measured(self) -> bool:
        """Whether any head has a figure at any sample."""
        return bool(np.isfinite(self.first).any())

    @property
    def lost(self) -> dict[int, list[int]]:
        """Heads by layer that had a figure once, but have none at the last sample."""
        result: dict[int, list[int]] = {}
        for layer, head in np.argwhere((self.last_step >= 0) & ~np.isfinite(self.last)).tolist():
            result.setdefault(layer, []).append(head)
        return result

    @cached_property
    def layer_means(self) -> Floats:
        """``(len(steps), layers)``: mean over the heads that were measured."""
        return mean_of_heads(self.values)


@dataclass(frozen=True)
class Layer:
    """One attention layer.

    Attributes:
        number: Its number in call order.
        path: Module path; "" where only scalars tell of it.
        heads: Number of heads; None where it isn't known.
        temperature: The model's own softmax temperature; None where it isn't known.
    """

    number: int
    path: str = ""
    heads: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Alarm:
    """One head under one rule's alarm, from the warning to its recovery.

    Attributes:
        rule: The rule.
        layer: Layer number.
        head: Head.
        severity: The rule's severity.
        quantity: What gave the alarm; "" if the warning itself is not in the files.
        since: Step of the first sample beyond the limit.
        start: Step of the warning.
        end: Step at which the head had recovered; None = under alarm at the end.
    """

    rule: str
    layer: int
    head: int
    severity: str
    quantity: str
    since: int
    start: int
    end: int | None = None


@dataclass(frozen=True)
class HeadStatus:
    """The gravest of a head's alarms: one that goes on before one that has ended.

    Attributes:
        under: Whether the head is under alarm at the end; else it has recovered.
        severity: Of the rule.
    """

    under: bool
    severity: str

    def weight(self) -> tuple[bool, int]:
        """The graver, the larger."""
        return self.under, SEVERITIES.index(self.severity) if self.severity in SEVERITIES else -1


@dataclass(frozen=True)
class Section:
    """All that was logged under one prefix.

    Attributes:
        prefix: ``attn``, ``attn_val``, ...
        per_head: False where only the layers' means are there; then each layer has one column.
        source: What was looked at: ``"train"``, ``"probe"``, ``"validation"``; "" where it isn't known.
        cadence: ``every_n_steps`` and the step from which it held, in order; empty where it isn't known, and of
            validations, which have none of their own.
        layers: The layers by number.
        not_measured: Module path -> reason.
        levels: Fixed limits of the rules, see `attnmon.records.run_record`.
        samples: Number of sampled steps.
        steps: First and last of them.
        quantities: The figures, in the order of the table of quantities.
        alerts: The warnings, each with the fields of `attnmon.alerts.Alert`, in order of their steps.
        alarms: What follows from them for each head.
        alerts_on: Whether the rules were on, as far as it can be told.
        unread: Records of warnings that could not be read.
        counts: Logged number of heads under each rule's alarm.
        cost: What was logged of the monitor's own cost.
        notes: What a reader should know of the data.
    """

    prefix: str
    per_head: bool
    source: str
    cadence: tuple[tuple[int, int], ...]
    layers: Mapping[int, Layer]
    not_measured: Mapping[str, str]
    levels: tuple[Mapping[str, Any], ...]
    samples: int
    steps: tuple[int, int]
    quantities: Mapping[str, Series]
    alerts: tuple[Mapping[str, Any], ...]
    alarms: tuple[Alarm, ...]
    alerts_on: bool
    counts: Mapping[str, Scalars]
    cost: Mapping[str, Scalars]
    notes: tuple[str, ...] = ()
    unread: int = 0

    @property
    def warned_without_records(self) -> bool:
        """Whether heads came under alarm of which the warnings are not in the files."""
        ruled, raised = {alarm.rule for alarm in self.alarms}, {alert["rule"] for alert in self.alerts}
        counted = {rule for rule, count in self.counts.items() if np.any(count.values > 0)}
        return bool(self.unread or (ruled | counted) - raised or any(not alarm.quantity for alarm in self.alarms))

    @property
    def heads_known(self) -> bool:
        """Whether it is known of each head if it was warned of: a count above 0 without an alarm leaves that open."""
        ruled = {alarm.rule for alarm in self.alarms}
        return not self.unread and all(
            rule in ruled or not np.any(count.values > 0) for rule, count in self.counts.items()
        )

    @cached_property
    def exists(self) -> NDArray[np.bool_]:
        """``(layers, heads)``: which heads there are, as far as it is known."""
        shapes = [series.first.shape for series in self.quantities.values()]
        rows = max((shape[0] for shape in shapes), default=0)
        columns = max((shape[1] for shape in shapes), default=0)
        result = np.zeros((rows, columns), dtype=np.bool_)
        for series in self.quantities.values():
            result[: series.first.shape[0], : series.first.shape[1]] |= np.isfinite(series.first)
        for number, layer in self.layers.items():
            if layer.heads is not None and number < rows and self.per_head:
                result[number, : layer.heads] = True
        return result

    def status(self) -> dict[tuple[int, int], HeadStatus]:
        """What the warnings say of each head that was ever warned of, by ``(layer, head)``."""
        result: dict[tuple[int, int], HeadStatus] = {}
        for alarm in self.alarms:
            new = HeadStatus(alarm.end is None, alarm.severity)
            old = result.setdefault((alarm.layer, alarm.head), new)
            result[alarm.layer, alarm.head] = max(old, new, key=HeadStatus.weight)
        return result


@dataclass(frozen=True)
class RunData:
    """What the files of a run hold.

    Attributes:
        name: Name of its folder.
        folder: The folder.
        files: Names of the files that were read.
        notes: What could not be read, was left out, or was taken instead of something else.
        times: Wall time of the first and last event, seconds since 1970; None where the files don't say.
        sections: By prefix, the training run first.
        loss: The training loss, where one was logged.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]
    times: tuple[float, float] | None
    sections: Mapping[str, Section]
    loss: Scalars | None = field(default=None)


def fine(*series: Series) -> float:
    """What figures may differ by and still look alike: a hundredth of the range of all of them; 0 without one."""
    low = [float(one.low[np.isfinite(one.low)].min()) for one in series if one.measured]
    high = [float(one.high[np.isfinite(one.high)].max()) for one in series if one.measured]
    return (max(high) - min(low)) / 100 if low else 0.0


def mean_of_heads(values: NDArray[np.floating[Any]]) -> Floats:
    """Mean over the last axis of what is finite; NaN where nothing is.

    Example:
        >>> mean_of_heads(np.float32([[1.0, np.nan], [np.nan, np.nan]])).tolist()
        [1.0, nan]
    """
    finite = np.isfinite(values)
    count = finite.sum(axis=-1)
    total = np.where(finite, values, 0.0).sum(axis=-1, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
