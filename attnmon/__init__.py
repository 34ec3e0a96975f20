"""Watches, while a transformer trains, whether its attention heads still do their job."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmon.alerts import Alert, AttentionSaturationWarning
    from attnmon.callback import AttentionMonitor
    from attnmon.loop import watch
    from attnmon.snapshot import Snapshot

__all__ = ["Alert", "AttentionMonitor", "AttentionSaturationWarning", "Snapshot", "watch"]

# Looked up on first use: Lightning takes seconds to import, and neither a plain loop nor the functions need it.
_HOMES = {
    "Alert": "attnmon.alerts",
    "AttentionMonitor": "attnmon.callback",
    "AttentionSaturationWarning": "attnmon.alerts",
    "Snapshot": "attnmon.snapshot",
    "watch": "attnmon.loop",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
