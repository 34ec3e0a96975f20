"""All rules of a monitor, with their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from attnmon.alerts.base import Rule, Signal
from attnmon.alerts.faults import NonFinite, NotMeasured
from attnmon.alerts.scores import EntropyCollapse, JacobianBound, ScoreGrowth, SharpTemperature
from attnmon.alerts.selection import ActiveSet, EntropyRise, SeparabilityLoss, UniformDrift

__all__ = ["ALERT_QUANTITIES", "AlertRules"]

ALERT_QUANTITIES: tuple[str, ...] = (
    "entropy_normalized",
    "separability@10",
    "active_share",
    "score_spread",
    "score_max",
)
"""What the rules read and the monitor measures for them; a rule whose quantity is not among a sample's values stays
silent. `JacobianBound` reads ``jacobian@1.0`` beside these, where it is measured anyway."""


@dataclass(frozen=True)
class AlertRules:
    """The rules and all their numbers; None switches a rule off.

    Example:
        >>> from attnmon.alerts import ScoreGrowth
        >>> rules = AlertRules(score_growth=ScoreGrowth(spread=12), active_set=None)
        >>> [rule.name for rule in rules.active()][:3]
        ['uniform_drift', 'entropy_rise', 'separability_loss']
    """

    uniform_drift: UniformDrift | None = field(default_factory=UniformDrift)
    entropy_rise: EntropyRise | None = field(default_factory=EntropyRise)
    separability_loss: SeparabilityLoss | None = field(default_factory=SeparabilityLoss)
    active_set: ActiveSet | None = field(default_factory=ActiveSet)
    entropy_collapse: EntropyCollapse | None = field(default_factory=EntropyCollapse)
    score_growth: ScoreGrowth | None = field(default_factory=ScoreGrowth)
    sharp_temperature: SharpTemperature | None = field(default_factory=SharpTemperature)
    jacobian_bound: JacobianBound | None = field(default_factory=JacobianBound)
    nonfinite: NonFinite | None = field(default_factory=NonFinite)
    not_measured: NotMeasured | None = field(default_factory=NotMeasured)

    def __post_init__(self) -> None:
        for entry in fields(self):
            rule = getattr(self, entry.name)
            if rule is not None and not (isinstance(rule, Rule) and rule.name == entry.name):
                raise ValueError(
                    f"Expected `{entry.name}` of `AlertRules` to be its own rule object or None (off), "
                    f"but got {rule!r}. Import the class from attnmon.alerts, e.g. EntropyRise(share=0.6)."
                )

    def active(self) -> tuple[Rule, ...]:
        """The rules that are on, in a fixed order."""
        return tuple(rule for entry in fields(self) if (rule := getattr(self, entry.name)) is not None)

    def fixed_levels(self, quantities: Iterable[str]) -> tuple[dict[str, Any], ...]:
        """The limits that are the same for every head, to be drawn beside its figures.

        Args:
            quantities: What is measured.

        Example:
            >>> AlertRules().fixed_levels(["score_max"])[0]["limit"]
            100.0
        """
        measured = tuple(quantities)
        return tuple(
            {**_about(rule, signal), "limit": rule.limits(signal, math.nan)[0]}
            for rule in self.active()
            for signal in rule.signals(measured)
            if signal.learning is None and not signal.crowd and signal.quantity in measured
        )

    def own_limits(self, quantities: Iterable[str]) -> tuple[dict[str, Any], ...]:
        """What is to be said of the limits that are learned from each head itself, see `AlertEngine.limits`.

        Args:
            quantities: What is measured.

        Example:
            >>> [(limit["rule"], limit["rises"]) for limit in AlertRules().own_limits(["score_spread"])]
            [('uniform_drift', False), ('score_growth', True)]
        """
        measured = tuple(quantities)
        return tuple(
            _about(rule, signal)
            for rule in self.active()
            for signal in rule.signals(measured)
            if signal.own_limit and signal.quantity in measured
        )


def _about(rule: Rule, signal: Signal) -> dict[str, Any]:
    """What is to be said of a limit, whatever it is."""
    return {
        "rule": rule.name,
        "title": rule.title,
        "severity": rule.severity,
        "quantity": signal.quantity,
        "rises": signal.rises,
    }
