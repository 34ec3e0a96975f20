"""What is done about an alert, beside having it logged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from attnmon.alerts.base import SEVERITIES
from attnmon.alerts.text import Alert

__all__ = ["ACTIONS", "Action", "AttentionAlertError", "AttentionSaturationWarning", "check_actions"]

Action = Literal["log", "warn", "stop", "raise"]
ACTIONS: tuple[Action, ...] = ("log", "warn", "stop", "raise")
_DEFAULTS: Mapping[str, Action] = MappingProxyType({"watch": "log", "warn": "warn", "critical": "warn"})


class AttentionSaturationWarning(UserWarning):
    """Python warning with which the monitor passes on an `Alert`'s message."""


class AttentionAlertError(RuntimeError):
    """Stops a run at an alert whose severity asks for it; everything of the sample has been written before.

    Attributes:
        alerts: The alerts, the worst first.
    """

    def __init__(self, alerts: Iterable[Alert]) -> None:
        self.alerts = tuple(alerts)
        super().__init__(" ".join(alert.message for alert in self.alerts))

    def __reduce__(self) -> tuple[type[AttentionAlertError], tuple[tuple[Alert, ...]]]:
        return type(self), (self.alerts,)


def check_actions(actions: Mapping[str, str] | None) -> dict[str, Action]:
    """Severity -> action, for each severity; what is not named keeps its default.

    Raises:
        ValueError: A severity or an action is unknown.

    Example:
        >>> check_actions({"critical": "stop"})
        {'watch': 'log', 'warn': 'warn', 'critical': 'stop'}
    """
    asked = {} if actions is None else actions
    if not isinstance(asked, Mapping) or not all(
        severity in SEVERITIES and action in ACTIONS for severity, action in asked.items()
    ):
        raise ValueError(
            f"Expected `actions` to map severities ({', '.join(SEVERITIES)}) to actions ({', '.join(ACTIONS)}), but "
            f"got {actions!r}. Write e.g. {{'critical': 'stop'}}."
        )
    known: dict[str, Action] = {action: action for action in ACTIONS}
    return {severity: known[asked[severity]] if severity in asked else _DEFAULTS[severity] for severity in SEVERITIES}
