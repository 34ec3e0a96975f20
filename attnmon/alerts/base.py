"""What a rule is, what it remembers of a head, and the one step that all rules share.

A rule watches **signals**: series of one head's figures. A signal with a **baseline** is compared with what has been
learned of that same head; one with a **level** with a fixed number. Healthy heads differ so much in level (an attention
sink has entropy near 0, a head that averages has it near 1, and training from scratch starts every head at 1) that
levels are used only where no healthy head comes near.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

__all__ = [
    "JACOBIAN_SHARE",
    "NON_FINITE_ROWS",
    "NOT_MEASURED",
    "OF_A_CHANGE",
    "SETTLED",
    "SEVERITIES",
    "SLACKENING",
    "TEMPERATURE",
    "BaselineRule",
    "Change",
    "HeadMemory",
    "Rule",
    "Signal",
    "advance",
    "check",
    "check_order",
    "check_whole",
    "former_temperature",
    "if_present",
    "is_beyond",
]

SEVERITIES = ("watch", "warn", "critical")

# Names under which the engine presents what is not a quantity of the snapshot.
TEMPERATURE = "temperature"
NON_FINITE_ROWS = "nonfinite_rows"
NOT_MEASURED = "not_measured"
JACOBIAN_SHARE = "jacobian_share"
SLACKENING = "slackening"  # this and the next: see `attnmon.alerts.growth.Growth`
SETTLED = "settled"

_UNREST_RATE = 0.2

# Beginnings of remedies that more than one rule has.
OF_A_CHANGE = "it came at once, so look at what was changed since the sample before: learning rate"

Change = Literal["", "raised", "ended"]


@dataclass(frozen=True)
class Signal:
    """One series of figures that a rule watches.

    Attributes:
        quantity: Its key in the sample's values.
        label: What a message calls it.
        rises: True if trouble is upward, False if it is downward.
        way: Sets it apart from the rule's other signals of the same quantity.
        learning: Weights of a calm sample in the baseline, on its good and on its bad side; None: a level, not learned.
        patience: Consecutive measured samples beyond the limit; None: the rule's.
        grace: Samples of a head, from its first, in which the signal raises nothing.
        crowd: Least share of a layer's heads (and two of them) that must be beyond the limit together; 0: each by
            itself.
    """

    quantity: str
    label: str
    rises: bool
    way: str = ""
    learning: tuple[float, float] | None = None
    patience: int | None = None
    grace: int = 0
    crowd: float = 0.0

    @property
    def key(self) -> str:
        """Its name among the signals of its rule."""
        return f"{self.quantity}:{self.way}" if self.way else self.quantity

    @property
    def own_limit(self) -> bool:
        """Whether each head has a limit of its own at all times, which moves slowly: one to be drawn beside it."""
        follows = self.learning is not None and 0.0 < max(self.learning) < 1.0
        return follows and not self.crowd and not self.grace


@dataclass(slots=True)
class HeadMemory:
    """What one signal of one rule remembers of one head. Plain numbers only.

    Attributes:
        seen: Samples in which the head was measured.
        baseline: Learned level of the figure, None before the first sample and for a level.
        baseline_error: Standard error of the baseline.
        scatter: Standard deviation of the figure from one calm sample to the next (what other batches do to it).
        unrest: Moving average of ``|log|`` of the figure over that of the sample before.
        first: Figure of the first sample; of a head whose baseline was given, that baseline.
        last: Figure of the last calm sample.
        settled: Whether the head has come to what it is, in the eyes of the rule; stays once it is.
        streak: Consecutive measured samples beyond the limit.
        since: Step of the first of them.
        alarmed: Whether an alert has been raised that the head has not recovered from.
        alarm_since: While alarmed, the step at which it was raised.
        quiet: While alarmed, consecutive measured samples back on the good side.
    """

    seen: int = 0
    baseline: float | None = None
    baseline_error: float = 0.0
    scatter: float = 0.0
    unrest: float = 0.0
    first: float | None = None
    last: float | None = None
    settled: bool = False
    streak: int = 0
    since: int | None = None
    alarmed: bool = False
    alarm_since: int | None = None
    quiet: int = 0


def check(
    rule: str,
    name: str,
    value: object,
    low: float,
    high: float,
    advice: str,
    *,
    closed: Literal["", "low", "both"] = "",
) -> None:
    """``low < value < high``, a finite number; ``closed`` names the ends that are allowed themselves."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    number = float(value) if ok else math.nan  # type: ignore[arg-type]
    above = low <= number if closed else low < number
    below = number <= high if closed == "both" else number < high
    if not (above and below):
        if math.isinf(high):
            span = f"of at least {low:g}" if closed else f"above {low:g}"
        else:
            ends = {"": "both excluded", "low": f"{high:g} excluded", "both": "both included"}[closed]
            span = f"between {low:g} and {high:g} ({ends})"
        raise ValueError(f"Expected `{name}` of `{rule}` to be a number {span}, but got {value!r}. {advice}")


def check_order(
    rule: str, lesser: str, a: float, greater: str, b: float, reason: str = "Else every alarm ends at once."
) -> None:
    """``a < b``, else a ValueError that names both numbers."""
    if not a < b:
        raise ValueError(
            f"Expected `{lesser}` of `{rule}` to be below `{greater}`, but got {lesser}={a:g} and {greater}={b:g}. "
            f"{reason}"
        )


def check_whole(rule: str, name: str, value: object, least: int, advice: str) -> None:
    """An integer >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"Expected `{name}` of `{rule}` to be an integer >= {least}, but got {value!r}. {advice}")


@dataclass(frozen=True)
class Rule:
    """What all rules share.

    Attributes:
        patience: Consecutive measured samples beyond the limit before the alert; None = the engine's. Recovery
            always takes the engine's number of samples.
        severity: "watch" (worth a look: logged only, unless the monitor's ``actions`` say more), "warn" or "critical".
        sigmas: How many standard errors a figure must lie beyond noise to count. Where a baseline is learned the noise
            is the sample's standard error and the baseline's, combined, for some rules with the head's own scatter
            between samples.
    """

    patience: int | None = None
    severity: str = "warn"
    sigmas: float = 3.0

    name: ClassVar[str]
    title: ClassVar[str]
    meaning: ClassVar[str]
    remedy: ClassVar[str]
    counts_scatter: ClassVar[bool] = True
    at_the_limit: ClassVar[bool] = True  # whether a figure at a level itself counts
    explained_by: ClassVar[str] = ""  # the rule that names the cause, if it warns of the same heads
    spreads: ClassVar[bool] = False  # whether trouble in a head reaches every layer behind it

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
        check(self.name, "sigmas", self.sigmas, 0.0, math.inf, "0 ignores the standard errors.", closed="low")

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """Which of the measured quantities this rule watches."""
        raise NotImplementedError

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """``(enter, leave)`` for a head with this baseline (NaN for a level)."""
        raise NotImplementedError

    def in_company(self, signal: Signal, figures: Mapping[str, float]) -> bool:
        """Whether the head's other figures allow this sample to count."""
        return True

    def ready(self, signal: Signal, memory: HeadMemory) -> bool:
        """Whether the head's past allows this sample to count."""
        return True

    def settles(self, signal: Signal, memory: HeadMemory) -> bool:
        """Whether the head has come to what it is, after a calm sample."""
        return False

    def may_learn(self, figures: Mapping[str, float]) -> bool:
        """Whether the head's other figures make this sample fit for the baseline."""
        return True

    def limit_text(self, signal: Signal) -> str:
        """The limit in words, for the message."""
        raise NotImplementedError

    def remedy_of(self, told: Mapping[Signal, Sequence[HeadMemory]]) -> str:
        """What to try about heads that these signals found, with what is remembered of them."""
        return self.remedy


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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learn_better", "learn_worse"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "It is the weight of one new sample.")

    @property
    def learning(self) -> tuple[float, float]:
        """See `Signal.learning`."""
        return self.learn_better, self.learn_worse


def if_present(quantities: Iterable[str], *signals: Signal) -> tuple[Signal, ...]:
    """Those of ``signals`` whose quantity was measured."""
    present = set(quantities)
    return tuple(signal for signal in signals if signal.quantity in present)


def former_temperature(known: Iterable[float | None]) -> str:
    """The remedy for a temperature that was changed: what heads had before, as T and as the scale 1/T."""
    found = sorted({float(f"{baseline:.3g}") for baseline in known if baseline})
    if not found:  # baselines from a file may be 0
        return "the former temperature"
    span = f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}"
    scale = f"{1 / found[-1]:.3g}" if len(found) == 1 else f"{1 / found[-1]:.3g} to {1 / found[0]:.3g}"
    return f"the former temperature, T = {span} (a scale of {scale})"


def is_beyond(rule: Rule, signal: Signal, memory: HeadMemory, value: float, error: float) -> bool:
    """Whether a head's figure lies beyond the limit, by more than noise.

    Args:
        rule: The rule.
        signal: Which of its signals.
        memory: What it remembers of this head.
        value: The figure. NaN or infinite = not measured.
        error: Its standard error.
    """
    if not math.isfinite(value):
        return False
    sign = 1.0 if signal.rises else -1.0
    if signal.learning is None:
        margin = sign * (value - rule.limits(signal, math.nan)[0]) - rule.sigmas * error
        return margin >= 0.0 if rule.at_the_limit else margin > 0.0
    if memory.baseline is None or not rule.ready(signal, memory):
        return False
    if sign * (value - rule.limits(signal, memory.baseline)[0]) < 0.0:
        return False
    noise = math.hypot(error, memory.baseline_error, memory.scatter if rule.counts_scatter else 0.0)
    return sign * (value - memory.baseline) > rule.sigmas * noise


def advance(
    rule: Rule,
    signal: Signal,
    memory: HeadMemory,
    value: float,
    error: float,
    step: int,
    patience: int,
    *,
    beyond: bool,
    learn: bool = True,
) -> Change:
    """Take in one head's figure.

    Args:
        rule: The rule.
        signal: Which of its signals.
        memory: What it remembers of this head, which is changed; `HeadMemory()` at first.
        value: The figure; NaN or infinite = not measured, which changes nothing.
        error: Its standard error.
        step: Optimizer step of the sample.
        patience: Samples to enter where neither signal nor rule has a number of its own, and to leave.
        beyond: Whether it counts as beyond the limit.
        learn: Whether the baseline may learn it. A head is judged from the first learned sample on.

    Returns:
        Whether the alarm is raised, or has ended, by this sample.
    """
    if not math.isfinite(value):
        return ""
    memory.seen += 1
    if signal.learning is not None and memory.baseline is None:
        if learn:
            memory.baseline, memory.baseline_error = value, error
            memory.first = memory.last = value
        return ""
    change: Change = ""
    if beyond:
        memory.since = memory.since if memory.streak else step
        memory.streak += 1
    else:
        memory.since, memory.streak = None, 0
    if memory.alarmed:
        baseline = math.nan if memory.baseline is None else memory.baseline
        leave = rule.limits(signal, baseline)[1]
        good = not beyond and (value < leave if signal.rises else value > leave)
        memory.quiet = memory.quiet + 1 if good else 0
        if memory.quiet >= patience:
            memory.alarmed, memory.quiet, change = False, 0, "ended"
    elif memory.seen > signal.grace and memory.streak >= (signal.patience or rule.patience or patience):
        memory.alarmed, memory.alarm_since, change = True, step, "raised"
    if (
        signal.learning is not None
        and memory.baseline is not None
        and learn
        and not (beyond or memory.alarmed or change)
    ):
        # From the first sample on, so that a fine-tuning run is judged from its second; trouble itself is not learned.
        worse = value > memory.baseline if signal.rises else value < memory.baseline
        _learn(memory, memory.baseline, value, error, signal.learning[worse])
        memory.settled = memory.settled or rule.settles(signal, memory)
    return change


def _learn(memory: HeadMemory, baseline: float, value: float, error: float, rate: float) -> None:
    last = value if memory.last is None else memory.last
    new = max(0.1, 1.0 / max(1, memory.seen - 1))  # weight of this difference between neighbours
    memory.baseline = baseline + rate * (value - baseline)
    memory.baseline_error = math.hypot((1.0 - rate) * memory.baseline_error, rate * error)
    memory.scatter = math.sqrt((1.0 - new) * memory.scatter**2 + new * (value - last) ** 2 / 2.0)
    if value > 0.0 and last > 0.0:
        memory.unrest += _UNREST_RATE * (abs(math.log(value / last)) - memory.unrest)
    memory.last = value
