"""The arguments of a monitor, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from attnmon.alerts import ALERT_QUANTITIES, AlertRules
from attnmon.quantities import Column, expand_quantities

__all__ = ["MonitorOptions", "check_flag", "check_prefix", "check_state"]


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
        if self.quantities is not None:
            _check_sequence("quantities", self.quantities)
        for layer in () if self.layers is None else _check_sequence("layers", self.layers):
            if not isinstance(layer, str):
                _check_whole("layers", layer, 0, alternative="a module path")
        self.columns()

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
