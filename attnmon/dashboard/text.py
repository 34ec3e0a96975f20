"""Warnings as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from attnmon.dashboard.names import short_number

__all__ = ["alert_markdown"]


class _Evidence(Protocol):
    """The figures of one quantity behind an alert."""

    @property
    def label(self) -> str: ...
    @property
    def heads(self) -> Mapping[int, tuple[int, ...]]: ...
    @property
    def figures(self) -> Mapping[int, tuple[float, ...]]: ...
    @property
    def baselines(self) -> Mapping[int, tuple[float, ...]]: ...
    @property
    def limits(self) -> Mapping[int, tuple[float, ...]]: ...


class _Alert(Protocol):
    """What `alert_markdown` reads of an alert (this module does not import `attnmon.alerts`)."""

    @property
    def step(self) -> int: ...
    @property
    def title(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def remedy(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    @property
    def training(self) -> str: ...
    @property
    def layers(self) -> Mapping[int, str]: ...
    @property
    def heads(self) -> Mapping[int, tuple[int, ...]]: ...
    @property
    def evidence(self) -> Sequence[_Evidence]: ...


def alert_markdown(alert: _Alert, *, max_rows: int = 64) -> str:
    """An alert as Markdown, for ``SummaryWriter.add_text``: the message, one table row per head, the remedy.

    Args:
        alert: An `attnmon.alerts.Alert`.
        max_rows: Rows of the table; what is left out is counted below it.

    Returns:
        Markdown text.
    """

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    def number(value: float) -> str:
        return short_number(value) if math.isfinite(value) else ""

    rows = [
        (
            str(layer),
            f"`{cell(alert.layers.get(layer, '') or '-')}`",
            str(head),
            cell(part.label),
            number(part.figures[layer][place]),
            number(part.baselines[layer][place]),
            number(part.limits[layer][place]),
        )
        for part in alert.evidence
        for layer, heads in part.heads.items()
        for place, head in enumerate(heads)
    ]
    kind = "over" if alert.ended else alert.severity
    lines = [f"**{kind}: {alert.title}** (step {alert.step})", "", cell(alert.summary), ""]
    lines += [f"**Training:** {alert.training}.", ""] if alert.training else []
    lines += [f"**Remedy:** {cell(alert.remedy)}.", ""] if alert.remedy else []
    if rows:
        lines += ["| layer | module | head | quantity | figure | baseline | limit |"]
        lines += ["|---:|:---|---:|:---|---:|---:|---:|"]
        lines += [f"| {' | '.join(row)} |" for row in rows[:max_rows]]
        if len(rows) > max_rows:
            lines += ["", f"and {len(rows) - max_rows} more rows"]
    return "\n".join(lines)
