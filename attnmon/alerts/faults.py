"""Rules about figures that can't be had: non-finite scores, and heads that are no longer measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from attnmon.alerts.base import NON_FINITE_ROWS, NOT_MEASURED, Rule, Signal, check_whole, if_present

__all__ = ["NonFinite", "NotMeasured"]


@dataclass(frozen=True)
class NonFinite(Rule):
    """Rows whose scores hold NaN or infinity. They are left out of every other figure.

    Attributes:
        rows: Non-finite rows in one sample from which it counts.
    """

    patience: int | None = 1
    severity: str = "critical"
    sigmas: float = 0.0
    rows: int = 1

    name: ClassVar[str] = "nonfinite"
    title: ClassVar[str] = "non-finite scores"
    meaning: ClassVar[str] = "overflow or a division by zero in queries or keys, even where the loss does not show it"
    remedy: ClassVar[str] = (
        "bfloat16 or float32 instead of float16, a lower learning rate, QK-norm; look for inf or NaN in this layer's "
        "input and weights, and go back to a checkpoint from before"
    )

    spreads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self.name, "rows", self.rows, 1, "Pass 1.")

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal(NON_FINITE_ROWS, "rows with NaN or infinite scores", True))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return float(self.rows), float(self.rows)

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit {self.rows}"


@dataclass(frozen=True)
class NotMeasured(Rule):
    """A head has no figures: its layer is not called any more, is called in a way unknown, or sees no row.

    Until it is measured again no other rule can say anything of it. Heads whose rows are all non-finite are told by
    `NonFinite` instead.
    """

    severity: str = "watch"
    sigmas: float = 0.0

    name: ClassVar[str] = "not_measured"
    title: ClassVar[str] = "not measured"
    meaning: ClassVar[str] = "nothing is known of these heads meanwhile"
    remedy: ClassVar[str] = (
        "see whether the layer is still called in training (it may be skipped, frozen or compiled away) and whether "
        "its rows are all padding; attnmon's own warning names the reason where it knows one"
    )

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal(NOT_MEASURED, "samples without figures", True))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return 1.0, 0.5

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return "every sample of these"
