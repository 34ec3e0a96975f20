"""The rules: each a frozen dataclass of numbers. `attnmon.alerts.base.observe` steps them over a head's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from attnmon.alerts.base import (
    NON_FINITE_ROWS,
    TEMPERATURE,
    BaselineRule,
    Rule,
    Signal,
    check,
    check_order,
    if_present,
)

__all__ = [
    "ALERT_QUANTITIES",
    "ActiveSet",
    "AlertRules",
    "EntropyCollapse",
    "EntropyRise",
    "NonFinite",
    "ScoreGrowth",
    "SeparabilityLoss",
    "SharpTemperature",
]

ALERT_QUANTITIES: tuple[str, ...] = (
    "entropy_normalized",
    "separability@10",
    "active_share",
    "score_spread",
    "score_max",
)
"""What the rules read; a rule whose quantity is not among a sample's values stays silent."""

_SELECTIVITY = (
    "more heads (narrower ones), or a length-aware or sparse normaliser (Scalable-Softmax, sparsemax, alpha-entmax); "
    "a shorter context; not a sharper temperature, which raises gradients without gaining separability"
)


@dataclass(frozen=True)
class EntropyRise(BaselineRule):
    """Normalised entropy rising from the head's own baseline: the head stops selecting (paper, section 4, rule 2).

    A sample counts when the figure has closed more than ``share`` of the baseline's distance to 1 (uniform
    attention): a share of the baseline itself would cry wolf on attention sinks (0.02 to 0.04) and could never fire
    on a head at 0.85.

    Attributes:
        share: Share of the distance from the baseline to 1 that must be closed.
        leave_share: The alarm ends below this share.
        min_rise: Least rise in normalised entropy; heads that were never below ``1 - min_rise`` are not judged.
    """

    share: float = 0.4
    leave_share: float = 0.2
    min_rise: float = 0.1

    name: ClassVar[str] = "entropy_rise"
    title: ClassVar[str] = "entropy rising"
    meaning: ClassVar[str] = "attention spreads toward uniform and stops selecting"
    remedy: ClassVar[str] = (
        f"{_SELECTIVITY}. If it came suddenly, look at what changed: weight decay on the query and key projections, "
        "the attention scale, the context length"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "leave_share", "min_rise"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "0.4 means 40 % of the way to uniform attention.")
        check_order(self.name, "leave_share", self.leave_share, "share", self.share, "Else every alarm ends at once.")

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal("entropy_normalized", "normalised entropy", True))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        room = 1.0 - baseline
        enter = baseline + max(self.share * room, self.min_rise)
        return enter, min(baseline + self.leave_share * room, enter)

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit: {self.share:.0%} of the way from the baseline to 1"


@dataclass(frozen=True)
class SeparabilityLoss(BaselineRule):
    """Ns/N falling from the head's own baseline (paper, section 4, rule 2). Reads the measured N nearest to 10.

    The figure means little where a head selects nothing (it scatters between 0.1 and 0.5 before training has made
    the head select) or a single key (it goes to 1/N). So, where the normalised entropy is measured too, the baseline
    is learned between ``min_entropy`` and ``max_entropy`` only, and below ``min_entropy`` no sample counts: that is
    entropy collapse, which has a rule and remedies of its own.

    Attributes:
        share: Share of the baseline that must be lost.
        leave_share: The alarm ends below this share.
        min_entropy: Normalised entropy from which a sample counts and is learned.
        max_entropy: Normalised entropy up to which a sample is learned.
    """

    share: float = 0.4
    leave_share: float = 0.2
    min_entropy: float = 0.1
    max_entropy: float = 0.95

    name: ClassVar[str] = "separability_loss"
    title: ClassVar[str] = "separability falling"
    meaning: ClassVar[str] = "the keys the head selects can no longer be told apart from the rest"
    remedy: ClassVar[str] = (
        f"{_SELECTIVITY}. Fewer selected keys (a smaller top-N, a sparse normaliser) separate better"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "leave_share"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "0.4 means a loss of 40 % of the baseline.")
        for name in ("min_entropy", "max_entropy"):
            check(self.name, name, getattr(self, name), -1e-300, 1.0 + 1e-9, "It is a normalised entropy, 0 to 1.")
        check_order(
            self.name, "min_entropy", self.min_entropy, "max_entropy", self.max_entropy, "Else nothing is learned."
        )
        check_order(self.name, "leave_share", self.leave_share, "share", self.share, "Else every alarm ends at once.")

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        found = []
        for quantity in quantities:
            name, _, top_n = quantity.partition("@")
            if name == "separability" and top_n.isdecimal() and int(top_n) > 0:
                found.append((abs(math.log(int(top_n) / 10)), int(top_n), quantity))
        return tuple(Signal(key, f"Ns/N (N = {top_n})", False) for _, top_n, key in sorted(found)[:1])

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return baseline * (1.0 - self.share), baseline * (1.0 - self.leave_share)

    def in_company(self, figures: Mapping[str, float]) -> bool:
        """See `Rule.in_company`."""
        return not figures.get("entropy_normalized", math.nan) < self.min_entropy

    def may_learn(self, figures: Mapping[str, float]) -> bool:
        """See `Rule.may_learn`."""
        entropy = figures.get("entropy_normalized", math.nan)
        return math.isnan(entropy) or self.min_entropy <= entropy <= self.max_entropy

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit: a loss of {self.share:.0%}"


@dataclass(frozen=True)
class ActiveSet(Rule):
    """``exp(H)/n`` above 6 %: more of the context is active than can be separated (paper, section 4, rule 1).

    A level rule, and many healthy heads are above it, so it only says "watch", and once per head: again only after
    the head has gone below ``leave`` and come back. Training from scratch starts near 1: the first ``wait`` samples
    of a head raise nothing.

    Attributes:
        level: Active share above which a sample counts.
        leave: The alarm ends below it.
        wait: Samples of a head before the first alert.
    """

    severity: str = "watch"
    level: float = 0.06
    leave: float = 0.05
    wait: int = 10

    name: ClassVar[str] = "active_set"
    title: ClassVar[str] = "large active set"
    meaning: ClassVar[str] = "above about 6 % of the context the selected keys are no longer separable"
    remedy: ClassVar[str] = (
        f"{_SELECTIVITY}. Normal for heads that average on purpose and for contexts of 100 or 200 keys"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("level", "leave"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "It is a share of the context; the paper's is 0.06.")
        check_order(self.name, "leave", self.leave, "level", self.level, "Else every alarm ends at once.")
        if isinstance(self.wait, bool) or not isinstance(self.wait, int) or self.wait < 0:
            raise ValueError(
                f"Expected `wait` of `{self.name}` to be an integer >= 0 (samples), but got {self.wait!r}. "
                f"0 judges from the first sample, as suits fine-tuning."
            )

    @property
    def grace(self) -> int:
        """See `Rule.grace`."""
        return self.wait

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal("active_share", "active share exp(H)/n", True))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return self.level, self.leave

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit {self.level:g}"


@dataclass(frozen=True)
class EntropyCollapse(BaselineRule):
    """Normalised entropy falling toward 0: low **and** fallen from the head's own baseline (Zhai et al. 2023).

    A healthy attention sink sits near 0 from the start and never fires. One that forms during training has a small
    score spread (a single key stands out of a flat row): where the spread is measured it must be ``min_spread`` too.

    Attributes:
        level: Normalised entropy below which a sample counts.
        leave: The alarm ends above it.
        share: Share of the baseline that must be lost.
        min_spread: Least score spread (in units of scores / T) where that is measured.
    """

    severity: str = "critical"
    level: float = 0.1
    leave: float = 0.15
    share: float = 0.5
    min_spread: float = 5.0

    name: ClassVar[str] = "entropy_collapse"
    title: ClassVar[str] = "entropy collapse"
    meaning: ClassVar[str] = "attention locks onto single keys and its gradient vanishes; training tends to diverge"
    remedy: ClassVar[str] = (
        "a lower learning rate or a longer warm-up; QK-norm, QK-clip or sigmaReparam to bound the scores; "
        "go back to a checkpoint from before the fall"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("level", "leave", "share"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "Normalised entropy runs from 0 to 1.")
        check(self.name, "min_spread", self.min_spread, -1e-300, math.inf, "0 asks for no second signal.")
        check_order(self.name, "level", self.level, "leave", self.leave, "Else every alarm ends at once.")

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal("entropy_normalized", "normalised entropy", False))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        enter = min(self.level, baseline * (1.0 - self.share))
        # Back at the leave level, or half of the way back to a baseline that is itself below it
        return enter, min(self.leave, enter + 0.5 * (baseline - enter))

    def in_company(self, figures: Mapping[str, float]) -> bool:
        """See `Rule.in_company`."""
        spread = figures.get("score_spread", math.nan)
        return math.isnan(spread) or spread >= self.min_spread

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit: below {self.level:g} and a loss of {self.share:.0%}"


@dataclass(frozen=True)
class ScoreGrowth(Rule):
    """Scores growing out of range: the row's spread, or the largest |score|, both in units of scores / T.

    The spread is never above 8.3 on the healthy runs and at most 6.7 on the healthy pretrained models that the level
    was set on. 100 is where QK-clip acts by default. One sample is enough, if it is above the level by more than its
    sampling noise.

    Attributes:
        spread: Score spread from which a sample counts.
        leave_spread: The alarm ends below it.
        largest: Largest |score| from which a sample counts.
        leave_largest: The alarm ends below it.
    """

    patience: int | None = 1
    spread: float = 10.0
    leave_spread: float = 8.5
    largest: float = 100.0
    leave_largest: float = 80.0

    name: ClassVar[str] = "score_growth"
    title: ClassVar[str] = "attention scores too large"
    meaning: ClassVar[str] = "queries and keys grow; entropy collapse and instability follow"
    remedy: ClassVar[str] = (
        "a lower learning rate or a longer warm-up (for the query and key projections first); QK-norm, QK-clip or "
        "sigmaReparam to bound the scores"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("spread", "leave_spread", "largest", "leave_largest"):
            check(self.name, name, getattr(self, name), 0.0, math.inf, "It is in units of scores / T.")
        check_order(
            self.name, "leave_spread", self.leave_spread, "spread", self.spread, "Else every alarm ends at once."
        )
        check_order(
            self.name, "leave_largest", self.leave_largest, "largest", self.largest, "Else every alarm ends at once."
        )

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(
            quantities,
            Signal("score_spread", "score spread", True),
            Signal("score_max", "largest |score|", True),
        )

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        if signal.quantity == "score_spread":
            return self.spread, self.leave_spread
        return self.largest, self.leave_largest

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit {self.limits(signal, math.nan)[0]:g}"


@dataclass(frozen=True)
class SharpTemperature(Rule):
    """The model's own softmax temperature ``T = 1/scale`` at or below 0.1 (paper, section 4, rule 3).

    Attributes:
        level: Temperature at or below which a sample counts.
        leave: The alarm ends above it.
    """

    patience: int | None = 1
    sigmas: float = 0.0
    level: float = 0.1
    leave: float = 0.12

    name: ClassVar[str] = "sharp_temperature"
    title: ClassVar[str] = "softmax temperature too sharp"
    meaning: ClassVar[str] = "the softmax Jacobian grows like 1/T without a gain in separability"
    remedy: ClassVar[str] = (
        "a temperature above 0.1, sqrt(head_dim) being usual: look at the attention scale (with QK-norm or cosine "
        "attention, where scores are bounded, judge by the Jacobian norm); for more selectivity more heads, or a "
        "length-aware or sparse normaliser"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("level", "leave"):
            check(self.name, name, getattr(self, name), 0.0, math.inf, "It is an absolute temperature, 1/scale.")
        check_order(self.name, "level", self.level, "leave", self.leave, "Else every alarm ends at once.")

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal(TEMPERATURE, "temperature T", False))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return self.level, self.leave

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit {self.level:g}"


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise ValueError(f"Expected `rows` of `{self.name}` to be an integer >= 1, but got {self.rows!r}. Pass 1.")

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
class AlertRules:
    """The rules and all their numbers; None switches a rule off.

    Example:
        >>> rules = AlertRules(entropy_rise=EntropyRise(share=0.6), active_set=None)
        >>> [rule.name for rule in rules.active()][:3]
        ['entropy_rise', 'separability_loss', 'entropy_collapse']
    """

    entropy_rise: EntropyRise | None = field(default_factory=EntropyRise)
    separability_loss: SeparabilityLoss | None = field(default_factory=SeparabilityLoss)
    active_set: ActiveSet | None = field(default_factory=ActiveSet)
    entropy_collapse: EntropyCollapse | None = field(default_factory=EntropyCollapse)
    score_growth: ScoreGrowth | None = field(default_factory=ScoreGrowth)
    sharp_temperature: SharpTemperature | None = field(default_factory=SharpTemperature)
    nonfinite: NonFinite | None = field(default_factory=NonFinite)

    def __post_init__(self) -> None:
        for entry in fields(self):
            rule = getattr(self, entry.name)
            if rule is not None and not (isinstance(rule, Rule) and rule.name == entry.name):
                raise ValueError(
                    f"Expected `{entry.name}` of `AlertRules` to be its own rule object or None (off), "
                    f"but got {rule!r}. Import the class from attnmon.alerts, e.g. EntropyRise(share=0.6)."
                )

    def active(self) -> tuple[Rule, ...]:
        """The rules that are on, in a fixed order."""
        return tuple(rule for entry in fields(self) if (rule := getattr(self, entry.name)) is not None)

    def fixed_levels(self, quantities: Iterable[str]) -> tuple[dict[str, Any], ...]:
        """The limits that are the same for every head, to be drawn beside its figures.

        Args:
            quantities: What is measured.

        Example:
            >>> AlertRules().fixed_levels(["score_max"])[0]["limit"]
            100.0
        """
        measured = tuple(quantities)
        return tuple(
            {
                "rule": rule.name,
                "title": rule.title,
                "severity": rule.severity,
                "quantity": signal.quantity,
                "limit": rule.limits(signal, math.nan)[0],
                "rises": signal.rises,
            }
            for rule in self.active()
            if not rule.learns
            for signal in rule.signals(measured)
            if signal.quantity in measured
        )
