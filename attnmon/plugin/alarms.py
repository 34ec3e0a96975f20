"""From the warnings of a run to its alarms: which heads are under them, from which step on, and until when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attnmon.alerts import AlertRules

__all__ = ["find_alarms"]


def find_alarms(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Heads that came under one rule's alarm together and left it together.

    Args:
        records: As `attnmon.plugin.checks.warnings_record` has them, in order of their steps. There is one wherever a
            head comes under alarm or leaves it.

    Returns:
        By step, each ``{"rule", "title", "severity", "since", "until", "heads"}``: since is the step of the warning,
        until that of the first sample without the alarm, None where there is none.

    Example:
        >>> under = [{"step": 5, "alerts": [], "alarmed": {"nonfinite": {0: [1, 2]}}}]
        >>> (alarm,) = find_alarms([*under, {"step": 9, "alerts": [], "alarmed": {"nonfinite": {}}}])
        >>> alarm["severity"], alarm["since"], alarm["until"], alarm["heads"]
        ('critical', 5, 9, {0: [1, 2]})
    """
    known = {rule.name: (rule.title, rule.severity) for rule in AlertRules().active()}
    since: dict[tuple[str, int, int], int] = {}
    found: dict[tuple[int, str, int | None], list[tuple[int, int]]] = {}
    for record in records:
        known |= {alert["rule"]: (alert["title"], alert["severity"]) for alert in record["alerts"]}
        if record["alarmed"] is None:
            continue
        under = {
            (rule, layer, head)
            for rule, layers in record["alarmed"].items()
            for layer, heads in layers.items()
            for head in heads
        }
        for rule, layer, head in since.keys() - under:
            found.setdefault((since.pop((rule, layer, head)), rule, record["step"]), []).append((layer, head))
        for place in under - since.keys():
            since[place] = record["step"]
    for (rule, layer, head), step in since.items():
        found.setdefault((step, rule, None), []).append((layer, head))
    alarms = []
    for (step, rule, until), places in sorted(found.items(), key=lambda item: (item[0][0], item[0][1], item[1])):
        title, severity = known.get(rule, (rule.replace("_", " "), "warn"))
        alarm: dict[str, Any] = {"rule": rule, "title": title, "severity": severity, "since": step, "until": until}
        alarm["heads"] = {}
        for layer, head in sorted(places):
            alarm["heads"].setdefault(layer, []).append(head)
        alarms.append(alarm)
    return alarms
