"""From the warnings of a run to each head's alarms: when they began, and whether and when they ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnmon.alerts import AlertRules
from attnmon.report.data import Alarm

__all__ = ["Raised", "find_alarms", "raised_heads"]


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


def find_alarms(records: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[Alarm, ...]:
    """The alarms of all heads, in order of their warnings.

    Args:
        records: Step and `attnmon.records.warnings_record`, in order: a new one wherever a head comes under alarm or
            leaves it.
    """
    severities = {rule.name: rule.severity for rule in AlertRules().active()}
    open_: dict[tuple[str, int, int], Alarm] = {}
    closed: list[Alarm] = []
    for step, record in records:
        under = {
            (rule, int(layer), head)
            for rule, layers in record["alarmed"].items()
            for layer, heads in layers.items()
            for head in heads
        }
        for place in [place for place in open_ if place not in under]:
            closed.append(replace(open_.pop(place), end=step))
        for entry in raised_heads(record["alerts"]):
            place = (entry.rule, entry.layer, entry.head)
            if place in under and place not in open_:
                open_[place] = Alarm(*place, entry.severity, entry.quantity, entry.since, step)
        for rule, layer, head in sorted(under - open_.keys()):  # warned of in a file that is not here
            severity = severities.get(rule, "warn")
            open_[rule, layer, head] = Alarm(rule, layer, head, severity, "", step, step)
    return tuple(
        sorted([*closed, *open_.values()], key=lambda alarm: (alarm.start, alarm.rule, alarm.layer, alarm.head))
    )
