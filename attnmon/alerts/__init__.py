"""Rules over plain numbers, with memory: which heads saturate, collapse or blow up, and what to do about it."""

from attnmon.alerts.base import Rule
from attnmon.alerts.engine import AlertEngine, AttentionSaturationWarning
from attnmon.alerts.rules import (
    ALERT_QUANTITIES,
    ActiveSet,
    AlertRules,
    EntropyCollapse,
    EntropyRise,
    NonFinite,
    ScoreGrowth,
    SeparabilityLoss,
    SharpTemperature,
)
from attnmon.alerts.text import Alert, Evidence

__all__ = [
    "ALERT_QUANTITIES",
    "ActiveSet",
    "Alert",
    "AlertEngine",
    "AlertRules",
    "AttentionSaturationWarning",
    "EntropyCollapse",
    "EntropyRise",
    "Evidence",
    "NonFinite",
    "Rule",
    "ScoreGrowth",
    "SeparabilityLoss",
    "SharpTemperature",
]
