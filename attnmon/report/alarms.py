"""From the warnings of a run to each head's alarms: when they began, and whether and when they ended.

A warning is recorded when a head enters a rule's trouble; that it has recovered is not. So the end is worked out as
the rule does it: from the head's own figures, its recorded baseline and the level at which the rule lets go, which is
known where the recorded limit is the one of the rule as it comes. The logged number of heads under each rule's alarm
then says whether that is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.alerts import AlertRules, Rule
from attnmon.report.data import Alarm, Scalars

__all__ = ["Raised", "find_alarms", "raised_heads"]

_PATIENCE = 3  # samples that an AlertEngine waits, unless told otherwise


@dataclass(frozen=True)
class Raised:
    """One head in one warning."""

    rule: str
    severity: str
    layer: int
    head: int
    quantity: str
    step: int
    since: int
    figure: float
    baseline: float
    limit: float


def raised_heads(alerts: Iterable[Mapping[str, Any]]) -> list[Raised]:
    """The heads of all warnings; a head that two quantities of one rule warn of comes once per quantity."""
    return [
        Raised(
            rule=alert["rule"],
            severity=alert["severity"],
            layer=int(layer),
            head=int(head),
            quantity=part["quantity"],
            step=int(alert["step"]),
            since=int(alert["since"]),
            figure=_float(part["figures"][layer][place]),
            baseline=_float(part["baselines"][layer][place]),
            limit=_float(part["limits"][layer][place]),
        )
        for alert in alerts
        for part in alert["evidence"]
        for layer, heads in part["heads"].items()
        for place, head in enumerate(heads)
    ]


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def find_alarms(
    alerts: Iterable[Mapping[str, Any]],
    figures: Mapping[tuple[str, int, int], tuple[NDArray[np.int64], NDArray[np.float32]]],
    counts: Mapping[str, Scalars],
) -> tuple[Alarm, ...]:
    """The alarms of all heads, in order of their warnings.

    Args:
        alerts: The warnings.
        figures: ``(quantity, layer, head)`` -> steps and figures of all samples, of the heads that were warned of.
        counts: Logged number of heads under each rule's alarm.
    """
    alerts = tuple(alerts)
    rules = {rule.name: rule for rule in AlertRules().active()}
    patience = min((alert["samples"] for alert in alerts if _waits(rules.get(alert["rule"]))), default=_PATIENCE)
    by_rule: dict[str, dict[tuple[int, int], list[Raised]]] = {}
    for entry in raised_heads(alerts):
        entries = by_rule.setdefault(entry.rule, {}).setdefault((entry.layer, entry.head), [])
        if not entries or entries[-1].step != entry.step:
            entries.append(entry)
    result: list[Alarm] = []
    for rule, heads in by_rule.items():
        spans = []
        for (layer, head), entries in heads.items():
            for place, entry in enumerate(entries):
                again = entries[place + 1].step if place + 1 < len(entries) else None
                known = figures.get((entry.quantity, layer, head))
                end = None if known is None else _recovery(entry, rules.get(rule), patience, *known)
                if again is not None:  # raised again, so it had recovered in between
                    end = again if end is None else min(end, again)
                alarm = Alarm(
                    rule, entry.severity, layer, head, entry.quantity, entry.since, entry.step, end, known is not None
                )
                spans.append(alarm)
        result += _checked(spans, counts.get(rule))
    return tuple(sorted(result, key=lambda alarm: (alarm.start, alarm.rule, alarm.layer, alarm.head)))


def _waits(rule: Rule | None) -> bool:
    """Whether a rule's warnings come after as many samples as the engine waits."""
    return rule is not None and rule.patience is None and not rule.grace


def _recovery(
    entry: Raised,
    rule: Rule | None,
    patience: int,
    steps: NDArray[np.int64],
    values: NDArray[np.float32],
) -> int | None:
    """The step at which the head has been back for ``patience`` samples after a warning."""
    rises, leave = entry.figure >= entry.limit, entry.limit
    for signal in rule.signals([entry.quantity]) if rule is not None else ():
        rises = signal.rises
        enter, low = rule.limits(signal, entry.baseline) if rule is not None else (math.nan, math.nan)
        if math.isclose(enter, entry.limit, rel_tol=1e-6):
            leave = low
    after = (steps > entry.step) & np.isfinite(values)
    quiet = 0
    for step, value in zip(steps[after].tolist(), values[after].tolist(), strict=True):
        quiet = quiet + 1 if (value < leave if rises else value > leave) else 0
        if quiet >= patience:
            return int(step)
    return None


def _checked(spans: list[Alarm], logged: Scalars | None) -> list[Alarm]:
    """Holds what was worked out against the logged number of heads under the alarm, which is the engine's own."""
    if logged is None or not len(logged.values):
        return [replace(span, certain=False) for span in spans]
    at_end = int(logged.values[-1])
    last: dict[tuple[int, int], int] = {(span.layer, span.head): place for place, span in enumerate(spans)}
    still = [place for place in last.values() if spans[place].end is None]
    if at_end == 0:
        zero = np.flatnonzero(logged.values != 0)
        since = int(logged.steps[zero[-1] + 1]) if zero.size else int(logged.steps[0])
        return [replace(span, end=since if span.end is None else span.end, certain=True) for span in spans]
    if at_end == len(last):  # every head ever warned of is under alarm
        return [
            replace(span, end=None if place in last.values() else span.end, certain=True)
            for place, span in enumerate(spans)
        ]
    if len(still) == at_end and all(span.certain for span in spans):
        return spans
    return [replace(span, certain=False) for span in spans]
