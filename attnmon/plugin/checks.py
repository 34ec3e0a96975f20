"""The records of a run, each field of the type and within the bounds that the tab takes it to have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attnmon.dashboard.names import counted
from attnmon.records import UnreadableError

__all__ = ["check_shape", "number", "run_record", "warnings_record"]

_MOST_PLACES = 10_000  # layers, or heads of one
_MOST_CELLS = 2**18  # a page that draws more does not answer any longer
_MOST_STEPS = 2**53


def number(value: object) -> float | None:
    """A finite number, None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _whole(value: object, name: str, most: int = _MOST_PLACES) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise UnreadableError(f"{name} is {str(value)[:40]}, where a whole number from 0 to {most} is expected")
    return value


def _limit(value: object) -> float:
    found = number(value)
    if found is None:
        raise UnreadableError(f"a limit is {str(value)[:40]}, where a number is expected")
    return found


def run_record(step: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """An `attnmon.records.run_record`, and the step it was written at; without a cadence where it has none."""
    layers: list[dict[str, Any]] = [
        {
            "number": _whole(layer["number"], "a layer's number"),
            "path": str(layer["path"]),
            "heads": _whole(layer["heads"], "a layer's number of heads"),
            "temperature": number(layer.get("temperature")),
        }
        for layer in record["layers"]
    ]
    cells = len(layers) * max((layer["heads"] for layer in layers), default=0)
    if cells > _MOST_CELLS:
        raise UnreadableError(f"{cells} heads, where up to {_MOST_CELLS} can be shown")
    source, every = str(record.get("source", "")), record.get("every_n_steps")
    return {
        "step": step,
        "layers": layers,
        "not_measured": {str(path): str(reason) for path, reason in record.get("not_measured", {}).items()},
        "source": source,
        # Validations come when the trainer has them; what earlier versions wrote there is the training's cadence
        "every_n_steps": None
        if every is None or source == "validation"
        else _whole(every, "the cadence", _MOST_STEPS) or None,
        "levels": [
            {
                "rule": str(level["rule"]),
                "title": str(level["title"]),
                "severity": str(level["severity"]),
                "quantity": str(level["quantity"]),
                "limit": _limit(level["limit"]),
                "rises": bool(level["rises"]),
            }
            for level in record.get("levels", [])
        ],
    }


def check_shape(record: Mapping[str, Any], shape: tuple[int, int] | None) -> None:
    """Whether the samples have the heads that the run says it has.

    Args:
        record: A `run_record`.
        shape: Layers and heads of the newest samples, as many as the largest of all quantities has; None if not known.

    Raises:
        UnreadableError: They have not.
    """
    for layer in record["layers"]:
        if shape is not None and (layer["number"] >= shape[0] or layer["heads"] > shape[1]):
            raise UnreadableError(
                f"it says that layer {layer['number']} has {counted(layer['heads'], 'head')}, where the samples are of "
                f"{counted(shape[0], 'layer')} x {counted(shape[1], 'head')}"
            )


def warnings_record(step: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """An `attnmon.records.warnings_record`; alarmed is None where it does not say."""
    alarmed = record.get("alarmed")
    return {
        "step": step,
        "alerts": [_alert(step, alert) for alert in record["alerts"]],
        "alarmed": None if alarmed is None else {str(rule): _heads(layers) for rule, layers in alarmed.items()},
    }


def _heads(layers: Mapping[str, Any]) -> dict[int, list[int]]:
    return {
        _whole(int(layer), "a layer's number"): [_whole(head, "a head's number") for head in heads]
        for layer, heads in layers.items()
    }


def _alert(step: int, alert: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        **{name: str(alert[name]) for name in ("rule", "title", "severity", "summary", "remedy")},
        "since": _whole(alert["since"], "a step", _MOST_STEPS),
        "heads": _heads(alert["heads"]),
        "evidence": [_evidence(part) for part in alert["evidence"]],
    }


def _evidence(part: Mapping[str, Any]) -> dict[str, Any]:
    """An `attnmon.alerts.Evidence` as one row per head."""
    return {
        "quantity": str(part["quantity"]),
        "label": str(part["label"]),
        "rows": {
            (int(layer), int(head)): tuple(
                number(part[name][layer][place]) for name in ("figures", "baselines", "limits")
            )
            for layer, heads in part["heads"].items()
            for place, head in enumerate(heads)
        },
    }
