"""The arguments of a monitor, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from attnmon.alerts import ALERT_QUANTITIES, Alert, AlertEngine, AlertRules
from attnmon.alerts.actions import Action, check_actions
from attnmon.quantities import Column, expand_quantities

__all__ = ["MonitorOptions", "check_flag", "check_prefix", "check_state"]


_GATHER = 2  # samples, see `attnmon.alerts.AlertEngine`


@dataclass(frozen=True)
class MonitorOptions:
    """Checked arguments of a monitor; each is explained at `attnmon.AttentionMonitor`.

    Raises:
        ValueError: A value is out of range, a name unknown.
        TypeError: A value has the wrong type.
    """

    every_n_steps: int = 50
    source: Literal["train", "probe"] = "train"
    rows: int | Literal["all"] = 64
    sequences: int = 4
    tokens: Literal["valid", "labelled"] = "valid"
    top_n: int | Sequence[int] = (1, 5, 10, 20)
    temperatures: float | Sequence[float] = (0.1, 0.5, 1.0, 2.0)
    epsilons: float | Sequence[float] = (0.1,)
    vectors: Literal["value", "hidden", "embedding"] = "value"
    normalize_vectors: bool | None = None
    quantities: Sequence[str] | None = None
    layers: Sequence[int | str] | None = None
    alerts: bool = True
    rules: AlertRules | None = None
    patience: int = 3
    strict: bool = False
    seed: int = 0
    max_overhead: float | None = None
    actions: Mapping[str, str] | None = None
    on_alert: Callable[[Alert], object] | None = None
    keep_batches: str | PathLike[str] | None = None
    baselines: str | PathLike[str] | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_whole("every_n_steps", self.every_n_steps, 1)
        _check_choice("source", self.source, ("train", "probe"))
        if self.rows != "all":
            _check_whole("rows", self.rows, 1, alternative="'all'")
        _check_whole("sequences", self.sequences, 1)
        _check_choice("tokens", self.tokens, ("valid", "labelled"))
        _check_choice("vectors", self.vectors, ("value", "hidden", "embedding"))
        for name in ("top_n", "temperatures", "epsilons"):
            if isinstance(getattr(self, name), Real):  # one number means a list of one
                object.__setattr__(self, name, (getattr(self, name),))
            entries = _check_sequence(name, getattr(self, name))
            for entry in entries:
                _check_whole(name, entry, 1) if name == "top_n" else _check_positive(name, entry)
            object.__setattr__(self, name, tuple(entries))
        for name in ("alerts", "strict"):
            check_flag(name, getattr(self, name))
        if self.normalize_vectors is not None:
            check_flag("normalize_vectors", self.normalize_vectors)
        _check_whole("patience", self.patience, 1)
        if self.max_overhead is not None and (
            isinstance(self.max_overhead, bool)
            or not isinstance(self.max_overhead, Real)
            or not 0.0 < float(self.max_overhead) <= 1.0
        ):
            raise ValueError(
                "Expected `max_overhead` to be None or a share of the run's time above 0 and at most 1, e.g. 0.01, but "
                f"got {self.max_overhead!r}."
            )
        _check_whole("seed", self.seed, None)
        check_actions(self.actions)
        if self.on_alert is not None and not callable(self.on_alert):
            raise TypeError(
                f"Expected `on_alert` to be None or a function of one Alert, but got {type(self.on_alert).__name__}."
            )
        if self.keep_batches is not None and not isinstance(self.keep_batches, str | PathLike):
            raise TypeError(
                f"Expected `keep_batches` to be None or a folder, but got {self.keep_batches!r} "
                f"({type(self.keep_batches).__name__})."
            )
        if self.keep_batches is not None and Path(self.keep_batches).exists() and not Path(self.keep_batches).is_dir():
            raise ValueError(
                f"Expected `keep_batches` to be a folder, but {str(self.keep_batches)!r} is a file. Name another one."
            )
        for name in ("actions", "on_alert", "keep_batches", "baselines"):
            if not self.alerts and getattr(self, name) is not None:
                raise ValueError(
                    f"Expected `{name}` to be None where alerts=False, but got {getattr(self, name)!r}: without alerts "
                    "nothing would come of it. Leave one of the two out."
                )
        if isinstance(self.baselines, str | PathLike):  # read now: a wrong one must not end a run that has begun
            object.__setattr__(self, "baselines", _read_json(self.baselines))
        self.engine()
        if self.quantities is not None:
            _check_sequence("quantities", self.quantities)
        for layer in () if self.layers is None else _check_sequence("layers", self.layers):
            if not isinstance(layer, str):
                _check_whole("layers", layer, 0, alternative="a module path")
        self.columns()

    def action_of(self) -> dict[str, Action]:
        """What is done about an alert of each severity."""
        return check_actions(self.actions)

    def engine(self) -> AlertEngine | None:
        """The rules and their memory, with the baselines that were given; None without rules.

        Raises:
            ValueError: The baselines are not what a monitor saved.
        """
        if not self.alerts:
            return None
        engine = AlertEngine(self.rules, patience=self.patience, gather=_GATHER)
        if self.baselines is not None:
            engine.take_baselines(self.baselines)  # type: ignore[arg-type]
        return engine

    def asked(self) -> tuple[Column, ...]:
        """What was asked for."""
        # __post_init__ has made sequences of them
        numbers: Any = (self.top_n, self.temperatures, self.epsilons)
        return expand_quantities(self.quantities, *numbers)

    def columns(self) -> tuple[Column, ...]:
        """Everything measured: what was asked for, and what the rules need beside it."""
        asked = self.asked()
        if not self.alerts:
            return asked
        return tuple(dict.fromkeys((*asked, *expand_quantities(ALERT_QUANTITIES, (10,), (1.0,)))))


def _read_json(path: str | PathLike[str]) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Expected `baselines` to be a file that a monitor's save_baselines wrote, but reading {str(path)!r} "
            f"failed: {error}."
        ) from error


def _check_whole(name: str, value: object, least: int | None, alternative: str = "") -> None:
    expected = "a whole number" + ("" if least is None else f" of at least {least}")
    expected += f" or {alternative}" if alternative else ""
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and int(value) < least):
        raise ValueError(f"Expected `{name}` to be {expected}, but got {value!r} ({type(value).__name__}).")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 < float(value) < float("inf"):
        raise ValueError(
            f"Expected every entry of `{name}` to be a positive finite number, but got {value!r} "
            f"({type(value).__name__})."
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Expected `{name}` to be one of {', '.join(map(repr, choices))}, but got {value!r}.")


def _check_sequence(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"Expected `{name}` to be a list or tuple, but got {value!r} ({type(value).__name__}).")
    if not value:
        raise ValueError(f"Expected `{name}` to name at least one, but got an empty {type(value).__name__}.")
    return value


def check_flag(name: str, value: object) -> None:
    """Raises a TypeError that names the argument unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"Expected `{name}` to be True or False, but got {value!r} ({type(value).__name__}).")


def check_prefix(prefix: object) -> None:
    """Raises a ValueError unless keys can begin with it."""
    if not isinstance(prefix, str) or not prefix or prefix.endswith("/"):
        raise ValueError(f"Expected `prefix` to be a name without a trailing '/', but got {prefix!r}.")


def check_state(state: object, *keys: str) -> None:
    """Raises a ValueError unless this is a state with these keys."""
    if not isinstance(state, dict) or not set(keys) <= set(state):
        came = f"keys {sorted(map(str, state))}" if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"Expected `state_dict` to be one that a monitor returned (keys {list(keys)}), but got {came}."
        )
