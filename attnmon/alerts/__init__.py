"""Rules over plain numbers, with memory: which heads saturate, collapse or blow up, and what to do about it."""

from attnmon.alerts.actions import AttentionAlertError, AttentionSaturationWarning
from attnmon.alerts.base import Rule
from attnmon.alerts.engine import AlertEngine
from attnmon.alerts.faults import NonFinite, NotMeasured
from attnmon.alerts.rules import ALERT_QUANTITIES, AlertRules
from attnmon.alerts.scores import EntropyCollapse, JacobianBound, ScoreGrowth, SharpTemperature
from attnmon.alerts.selection import ActiveSet, EntropyRise, SeparabilityLoss, UniformDrift
from attnmon.alerts.text import Alert, Evidence

__all__ = [
    "ALERT_QUANTITIES",
    "ActiveSet",
    "Alert",
    "AlertEngine",
    "AlertRules",
    "AttentionAlertError",
    "AttentionSaturationWarning",
    "EntropyCollapse",
    "EntropyRise",
    "Evidence",
    "JacobianBound",
    "NonFinite",
    "NotMeasured",
    "Rule",
    "ScoreGrowth",
    "SeparabilityLoss",
    "SharpTemperature",
    "UniformDrift",
]
