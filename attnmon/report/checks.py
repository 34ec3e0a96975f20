"""Whether a record can be used: its fields are there, of their kind, within bounds, and about heads of the run.

A file may be broken, or written by something else. What passes here needs no further care on its way to the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.records import UnreadableError
from attnmon.report.alarms import raised_heads

__all__ = ["check_run", "check_warnings", "figure"]

_MOST = 100_000  # layers, and heads of one, where no sample says how many there can be
_SHOWN = 200  # characters of what is wrong
_STEPS = 2**63


def check_run(record: Mapping[str, Any], most: tuple[int, int] | None = None) -> None:
    """Raises if a `attnmon.records.run_record` can't be used.

    Args:
        record: The record.
        most: Most layers, and most heads of a layer, that any sample has: the record must not name more.

    Raises:
        UnreadableError: The text says what is wrong.
    """
    _checked(_run, record, most or (_MOST, _MOST))


def check_warnings(record: Mapping[str, Any], there: NDArray[np.bool_] | None = None) -> None:
    """Raises if a `attnmon.records.warnings_record` can't be used.

    Args:
        record: The record.
        there: ``(layers, heads)``: the heads that the run has; None where it isn't known.

    Raises:
        UnreadableError: The text says what is wrong.
    """
    _checked(_warnings, record, there)


def _checked(check: Callable[[Any, Any], None], record: Mapping[str, Any], bounds: object) -> None:
    try:
        check(record, bounds)
        json.dumps(record, ensure_ascii=False).encode()  # halves of surrogate pairs can't be written
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UnreadableError(f"a field is missing or broken ({text[:_SHOWN]})") from None


def _run(record: Mapping[str, Any], most: tuple[int, int]) -> None:
    for layer in record["layers"]:
        _whole("layer", layer["number"], most[0])
        _whole("number of heads", layer["heads"], most[1] + 1)
        if layer["temperature"] is not None:
            figure(layer["temperature"])
        _text(layer["path"])
    for level in record["levels"]:
        figure(level["limit"])
        _text(level["rule"], level["title"], level["quantity"])
    if record["every_n_steps"] is not None:
        _whole("every_n_steps", record["every_n_steps"], _STEPS)
    _text(record["source"], *record["not_measured"], *record["not_measured"].values())


def _warnings(record: Mapping[str, Any], there: NDArray[np.bool_] | None) -> None:
    for alert in record["alerts"]:
        _text(*(alert[name] for name in ("rule", "title", "severity", "summary", "remedy")), *alert["layers"].values())
        for name in ("step", "since", "samples"):
            _whole(name, alert[name], _STEPS)
        for layer in alert["layers"]:
            _whole("layer", int(layer), _MOST if there is None else len(there))
        _heads(alert["heads"], there)
        for part in alert["evidence"]:
            _text(part["quantity"], part["label"])
            _heads(part["heads"], there)
            for name in ("figures", "baselines", "limits"):
                for layer in part["heads"]:
                    for item in part[name][layer]:
                        if item is not None:
                            figure(item)
    raised_heads(record["alerts"])  # as many figures as heads
    for layers in record["alarmed"].values():
        _heads(layers, there)


def _heads(layers: Mapping[str, Any], there: NDArray[np.bool_] | None) -> None:
    """Layer -> heads, each of them a head of the run."""
    for layer, heads in layers.items():
        number = int(layer)
        _whole("layer", number, _MOST if there is None else len(there))
        for head in heads:
            _whole("head", head, _MOST if there is None else there.shape[1])
            if there is not None and not there[number, head]:
                raise ValueError(f"layer {number} has no head {head}")


def _whole(name: str, item: object, end: int) -> None:
    """Raises if it is not an integer from 0 on, below ``end``."""
    if isinstance(item, bool) or not isinstance(item, int):
        raise TypeError(f"{name} {item!r} is not an integer")
    if not 0 <= item < end:
        raise ValueError(f"{name} {item} is not from 0 to {end - 1}")


def figure(item: object) -> float:
    """A finite number, as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or too large.

    Example:
        >>> figure(3)
        3.0
    """
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise TypeError(f"{item!r} is not a number")
    try:
        value = float(item)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value


def _text(*items: object) -> None:
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"{item!r} is not a text")
