"""What a rule is, what it remembers of a head, and the one step that all rules share.

Two kinds. A **baseline** rule compares a head with what it has learned of that same head; a **level** rule compares
it with a fixed number. Healthy heads differ so much in level (an attention sink has entropy near 0, a head that
averages has it near 1, and training from scratch starts every head at 1) that only temperature, score size, the
active set and non-finite rows are judged by level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "NON_FINITE_ROWS",
    "SEVERITIES",
    "TEMPERATURE",
    "BaselineRule",
    "HeadMemory",
    "Rule",
    "Signal",
    "check",
    "check_order",
    "if_present",
    "observe",
]

SEVERITIES = ("watch", "warn", "critical")

# Names under which the engine presents what is not a quantity of the snapshot.
TEMPERATURE = "temperature"
NON_FINITE_ROWS = "nonfinite_rows"


@dataclass(frozen=True)
class Signal:
    """One series of figures that a rule watches.

    Attributes:
        quantity: Its key in the sample's values.
        label: What a message calls it.
        rises: True if trouble is upward, False if it is downward.
    """

    quantity: str
    label: str
    rises: bool


@dataclass(frozen=True)
class HeadMemory:
    """What one rule remembers of one head and one signal. Plain numbers only; a new one is made for every sample.

    Attributes:
        seen: Samples in which the head was measured.
        baseline: Learned level of the figure, None before the first sample.
        baseline_error: Standard error of the baseline.
        scatter: Standard deviation of the figure from one calm sample to the next (what other batches do to it).
        last: Figure of the last calm sample.
        streak: Consecutive measured samples beyond the limit.
        since: Step of the first of them.
        alarmed: Whether an alert has been raised that the head has not recovered from.
        quiet: While alarmed, consecutive measured samples back on the good side.
    """

    seen: int = 0
    baseline: float | None = None
    baseline_error: float = 0.0
    scatter: float = 0.0
    last: float | None = None
    streak: int = 0
    since: int | None = None
    alarmed: bool = False
    quiet: int = 0


def check(rule: str, name: str, value: object, low: float, high: float, advice: str) -> None:
    """``low < value < high``, a finite number."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low < float(value) < high:  # type: ignore[arg-type]
        span = f"above {low:g}" if math.isinf(high) else f"between {low:g} and {high:g} (both excluded)"
        raise ValueError(f"Expected `{name}` of `{rule}` to be a number {span}, but got {value!r}. {advice}")


def check_order(rule: str, lesser: str, a: float, greater: str, b: float, reason: str) -> None:
    """``a < b``, else a ValueError that names both numbers."""
    if not a < b:
        raise ValueError(
            f"Expected `{lesser}` of `{rule}` to be below `{greater}`, but got {lesser}={a:g} and {greater}={b:g}. "
            f"{reason}"
        )


@dataclass(frozen=True)
class Rule:
    """What all rules share.

    Attributes:
        patience: Consecutive measured samples beyond the limit before the alert; None = the engine's. Recovery
            always takes the engine's number of samples.
        severity: "watch" (worth a look), "warn" or "critical".
        sigmas: How many standard errors a figure must lie beyond noise to count. For a baseline rule the noise is
            the sample's standard error, the baseline's and the head's own scatter between samples, combined.
    """

    patience: int | None = None
    severity: str = "warn"
    sigmas: float = 3.0

    name: ClassVar[str]
    title: ClassVar[str]
    meaning: ClassVar[str]
    remedy: ClassVar[str]
    learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.patience is not None and (
            isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1
        ):
            raise ValueError(
                f"Expected `patience` of `{self.name}` to be None or an integer >= 1, but got {self.patience!r}. "
                f"1 alerts at the first sample beyond the limit; None takes the engine's."
            )
        if self.severity not in SEVERITIES:
            raise ValueError(
                f"Expected `severity` of `{self.name}` to be one of {', '.join(SEVERITIES)}, but got {self.severity!r}."
            )
        check(self.name, "sigmas", self.sigmas, -1e-300, math.inf, "0 ignores the standard errors.")

    @property
    def grace(self) -> int:
        """Samples of a head, from its first, in which it can't raise an alert."""
        return 0

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """Which of the measured quantities this rule watches."""
        raise NotImplementedError

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """``(enter, leave)`` for a head with this baseline (NaN for a level rule)."""
        raise NotImplementedError

    def in_company(self, figures: Mapping[str, float]) -> bool:
        """Whether the head's other figures allow this rule to count the sample."""
        return True

    def may_learn(self, figures: Mapping[str, float]) -> bool:
        """Whether the head's other figures make this sample fit for the baseline."""
        return True

    def limit_text(self, signal: Signal) -> str:
        """The limit in words, for the message."""
        raise NotImplementedError


@dataclass(frozen=True)
class BaselineRule(Rule):
    """Adds what learning takes.

    Attributes:
        learn_better: Weight of a calm sample that lies on the good side of the baseline. Large: when a head gets more
            selective, as all do in training from scratch, the baseline goes along.
        learn_worse: Weight of a calm sample that lies on the bad side. Small: a slow drift must not be learned.
    """

    learn_better: float = 0.2
    learn_worse: float = 0.05

    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learn_better", "learn_worse"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "It is the weight of one new sample.")


def if_present(quantities: Iterable[str], *signals: Signal) -> tuple[Signal, ...]:
    """Those of ``signals`` whose quantity was measured."""
    present = set(quantities)
    return tuple(signal for signal in signals if signal.quantity in present)


def observe(
    rule: Rule,
    signal: Signal,
    memory: HeadMemory,
    value: float,
    error: float,
    step: int,
    patience: int,
    *,
    company: bool = True,
    learn: bool = True,
) -> tuple[HeadMemory, bool]:
    """Show one head's figure to one rule.

    Args:
        rule: The rule.
        signal: Which of its signals.
        memory: What it remembers of this head (`HeadMemory()` at first).
        value: The figure; NaN or infinite = not measured, which changes nothing.
        error: Its standard error; NaN or infinite counts as unknown, i.e. 0.
        step: Optimizer step of the sample.
        patience: Samples to enter where the rule has no number of its own, and to leave.
        company: Whether the head's other figures allow this sample to count as beyond the limit.
        learn: Whether they allow the baseline to learn it. A head is judged from the first learned sample on.

    Returns:
        The new memory, and True if the alert is raised by this sample.
    """
    if not math.isfinite(value):
        return memory, False
    error = error if math.isfinite(error) else 0.0
    sign = 1.0 if signal.rises else -1.0
    seen = memory.seen + 1
    if rule.learns and memory.baseline is None:
        if not learn:
            return HeadMemory(seen=seen), False
        return HeadMemory(seen=seen, baseline=value, baseline_error=error, last=value), False
    baseline = math.nan if memory.baseline is None else memory.baseline
    enter, leave = rule.limits(signal, baseline)
    excess = sign * (value - enter)
    if rule.learns:
        noise = math.sqrt(error**2 + memory.baseline_error**2 + memory.scatter**2)
        beyond = excess > 0.0 and sign * (value - baseline) > rule.sigmas * noise
    else:
        beyond = excess >= rule.sigmas * error
    beyond = beyond and company
    good = sign * (value - leave) < 0.0

    streak = memory.streak + 1 if beyond else 0
    since = (memory.since if memory.streak else step) if beyond else None
    alarmed, quiet, raised = memory.alarmed, 0, False
    if alarmed:
        quiet = memory.quiet + 1 if good else 0
        if quiet >= patience:
            alarmed, quiet = False, 0
    elif seen > rule.grace and streak >= (rule.patience or patience):
        alarmed = raised = True

    learned: dict[str, Any] = {
        "baseline": memory.baseline,
        "baseline_error": memory.baseline_error,
        "scatter": memory.scatter,
        "last": memory.last,
    }
    if isinstance(rule, BaselineRule) and learn and not beyond and not alarmed:
        # From the first sample on, so that a fine-tuning run is judged from its second; trouble itself is not learned.
        rate = rule.learn_worse if sign * (value - baseline) > 0.0 else rule.learn_better
        jump = value - (memory.last if memory.last is not None else value)
        new = max(0.1, 1.0 / (seen - 1))  # weight of this difference between neighbours
        learned = {
            "baseline": baseline + rate * (value - baseline),
            "baseline_error": math.hypot((1.0 - rate) * memory.baseline_error, rate * error),
            "scatter": math.sqrt((1.0 - new) * memory.scatter**2 + new * jump**2 / 2.0),
            "last": value,
        }
    return HeadMemory(seen=seen, streak=streak, since=since, alarmed=alarmed, quiet=quiet, **learned), raised
