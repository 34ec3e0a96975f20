"""Rules about the scores: they grow, the softmax gets too sharp for them, and the head collapses on single keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from attnmon.alerts.base import (
    JACOBIAN_SHARE,
    OF_A_CHANGE,
    SETTLED,
    SLACKENING,
    TEMPERATURE,
    BaselineRule,
    HeadMemory,
    Rule,
    Signal,
    check,
    check_order,
    check_whole,
    former_temperature,
    if_present,
)
from attnmon.alerts.growth import FROM_NOTHING

__all__ = ["EntropyCollapse", "JacobianBound", "ScoreGrowth", "SharpTemperature"]

# Of the score spread: a level at which a head selects; the unrest below which it is calm. Heads that learn from scratch
# grow as fast as failing ones, but from nothing and restlessly.
_SETTLED = 0.3
_CALM = 0.15


def _check_slackening(rule: str, value: object) -> None:
    if value != math.inf:
        advice = (
            "1.15 means a doubling that took 15 % longer than one before it; math.inf asks for nothing of the kind."
        )
        check(rule, "slackening", value, 1.0, math.inf, advice)


@dataclass(frozen=True)
class EntropyCollapse(BaselineRule):
    """Normalised entropy at 0: low **and** fallen from the head's own baseline (Zhai et al. 2023), while scores grow.

    A healthy attention sink sits near 0 from the start: a head is judged only where it has been above ``leave``. A sink
    that forms during training has a small score spread (a single key stands out of a flat row): where the spread is
    measured it must be ``min_spread`` too. And a head that learns, from scratch, to single out exact keys comes to the
    same figures in good health, but its growth slackens; see `ScoreGrowth`.

    Attributes:
        level: Normalised entropy below which a sample counts.
        leave: The alarm ends above it.
        share: Share of the baseline that must be lost.
        min_spread: Least score spread (in units of scores / T) where that is measured.
        slackening: See `ScoreGrowth`.
    """

    severity: str = "critical"
    level: float = 0.05
    leave: float = 0.1
    share: float = 0.5
    min_spread: float = 10.0
    slackening: float = 1.15

    name: ClassVar[str] = "entropy_collapse"
    explained_by: ClassVar[str] = "sharp_temperature"
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
        check(self.name, "min_spread", self.min_spread, 0.0, math.inf, "0 asks for no second signal.", closed="low")
        _check_slackening(self.name, self.slackening)
        check_order(self.name, "level", self.level, "leave", self.leave)

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal("entropy_normalized", "normalised entropy", False, learning=self.learning))

    def ready(self, signal: Signal, memory: HeadMemory) -> bool:
        """See `Rule.ready`."""
        return (memory.baseline or 0.0) >= self.leave

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        enter = min(self.level, baseline * (1.0 - self.share))
        # Back at the leave level, or a quarter of the way back to a baseline that lies near it
        return enter, min(self.leave, enter + 0.25 * (baseline - enter))

    def in_company(self, signal: Signal, figures: Mapping[str, float]) -> bool:
        """See `Rule.in_company`."""
        if figures.get(SLACKENING, math.nan) > self.slackening:
            return False
        return not figures.get("score_spread", math.nan) < self.min_spread

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit: below {self.level:g} and a loss of {self.share:.0%}"


@dataclass(frozen=True)
class ScoreGrowth(BaselineRule):
    """Scores growing out of range: the row's spread, or the largest ``|score|``, both in units of scores / T.

    Five ways, of which the first that a head takes is told:

    - **level**: the spread of a head reaches ``spread``, at one sample.
    - **crowd**: that of half of a layer's heads, and two at least, reaches ``crowd_spread``. Single healthy heads do:
      one of a pretrained encoder sits at 13, rotary heads without warm-up came to 12.6; healthy layers don't.
    - **jump**: the spread is ``jump`` times the head's own baseline, and at least ``jump_spread``, at one sample. Only
      where the head had settled: it began so, as all do in fine-tuning (a first spread of 0.5), or it came to select
      (a baseline of 0.3) and its figure is calm from sample to sample.
    - **slope**: it is ``slope`` times the baseline, and at least ``slope_spread``, after ``slope_wait`` samples. The
      baseline follows with a weight of a tenth: at more than 12.5 % a sample the spread runs ahead of it by so much.
    - **largest**: some score reaches ``largest``, where QK-clip acts by default.

    A head that began with a spread of less than 0.5 has all of it to learn, and where a task asks for exact keys
    (copying) healthy heads come to 30. So level and crowd count there only while the growth does not slacken: for three
    samples the spread has doubled within ``slackening`` times the steps that the doublings before took. The slope,
    which such a head has anyway, counts once it has selected keys, without much growth, for half of its life.

    Attributes:
        learn_better: See `BaselineRule`.
        learn_worse: See `BaselineRule`.
        spread: Score spread from which a sample of any head counts.
        leave_spread: The alarm ends below it; None: at two thirds of ``spread``. Healthy heads come to 8.
        crowd_spread: Score spread from which a sample counts where half of the layer is there; ends at nine tenths.
        jump: Factor on the baseline that is a jump.
        jump_spread: Least score spread after a jump.
        slope: Factor on the baseline that is a steep slope.
        slope_spread: Least score spread there.
        slope_wait: Samples of a head before.
        largest: Largest ``|score|`` from which a sample counts.
        leave_largest: The alarm ends below it; None: at four fifths of ``largest``.
        slackening: Share of the time of the doublings before beyond which growth slackens; ``math.inf``: it never does.
    """

    patience: int | None = 1
    learn_better: float = 0.1
    learn_worse: float = 0.1
    spread: float = 15.0
    leave_spread: float | None = None
    crowd_spread: float = 10.0
    jump: float = 3.0
    jump_spread: float = 6.0
    slope: float = 2.25
    slope_spread: float = 8.0
    slope_wait: int = 40
    largest: float = 100.0
    leave_largest: float | None = None
    slackening: float = 1.15

    name: ClassVar[str] = "score_growth"
    explained_by: ClassVar[str] = "sharp_temperature"
    title: ClassVar[str] = "attention scores too large"
    meaning: ClassVar[str] = "queries and keys grew, or the scale did; entropy collapse and instability follow"
    remedy: ClassVar[str] = (
        "a lower learning rate or a longer warm-up (for the query and key projections first); QK-norm, QK-clip or "
        "sigmaReparam to bound the scores"
    )
    counts_scatter: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("spread", "crowd_spread", "jump_spread", "slope_spread", "largest"):
            check(self.name, name, getattr(self, name), 0.0, math.inf, "It is in units of scores / T.")
        for name in ("leave_spread", "leave_largest"):
            if getattr(self, name) is not None:
                check(self.name, name, getattr(self, name), 0.0, math.inf, "It is in units of scores / T.")
        for name in ("jump", "slope"):
            check(self.name, name, getattr(self, name), 1.0, math.inf, "It is a factor on the head's own baseline.")
        check_whole(self.name, "slope_wait", self.slope_wait, 0, "It is a number of samples.")
        _check_slackening(self.name, self.slackening)
        check_order(self.name, "leave_spread", self._leave_spread, "spread", self.spread)
        check_order(self.name, "leave_largest", self._leave_largest, "largest", self.largest)

    @property
    def _leave_spread(self) -> float:
        return 2.0 / 3.0 * self.spread if self.leave_spread is None else self.leave_spread

    @property
    def _leave_largest(self) -> float:
        return 0.8 * self.largest if self.leave_largest is None else self.leave_largest

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        spread = ("score_spread", "score spread", True)
        return if_present(
            quantities,
            Signal(*spread, way="jump", learning=self.learning),  # says most, so it comes first
            Signal(*spread),
            Signal(*spread, way="crowd", crowd=0.5),
            Signal(*spread, way="slope", learning=self.learning, grace=self.slope_wait),
            Signal("score_max", "largest |score|", True),
        )

    def ready(self, signal: Signal, memory: HeadMemory) -> bool:
        """See `Rule.ready`."""
        if signal.way != "jump":
            return True
        started_settled = (memory.first or 0.0) >= FROM_NOTHING
        calm = (memory.baseline or 0.0) >= _SETTLED and memory.unrest < _CALM
        return started_settled or calm

    def in_company(self, signal: Signal, figures: Mapping[str, float]) -> bool:
        """See `Rule.in_company`."""
        slackening = figures.get(SLACKENING, math.nan)
        if signal.way == "slope":
            return figures.get(SETTLED, 1.0) > 0.0
        return signal.quantity == "score_max" or signal.way == "jump" or not slackening > self.slackening

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        if signal.quantity == "score_max":
            return self.largest, self._leave_largest
        if signal.way in ("jump", "slope"):
            factor, least = (self.jump, self.jump_spread) if signal.way == "jump" else (self.slope, self.slope_spread)
            enter = max(factor * baseline, least)
            return enter, min(self._leave_spread, 0.5 * (enter + baseline))
        enter = self.spread if not signal.way else min(self.crowd_spread, self.spread)
        return enter, min(self._leave_spread, 0.9 * enter) if signal.way else self._leave_spread

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        if signal.way == "crowd":
            return f"limit {self.limits(signal, math.nan)[0]:g} where half of a layer passes it"
        if signal.way == "jump":
            return f"limit: {self.jump:g} times the baseline and {self.jump_spread:g}"
        if signal.way == "slope":
            return f"limit: {self.slope:g} times the baseline, which follows slowly, and {self.slope_spread:g}"
        return f"limit {self.limits(signal, math.nan)[0]:g}"

    def remedy_of(self, told: Mapping[Signal, Sequence[HeadMemory]]) -> str:
        """See `Rule.remedy_of`."""
        if any(signal.way == "jump" for signal in told):
            return f"{OF_A_CHANGE}, attention scale or temperature; else {self.remedy}"
        return self.remedy


@dataclass(frozen=True)
class SharpTemperature(BaselineRule):
    """The model's own softmax temperature ``T = 1/scale``: at or below 0.1 (paper, section 4, rule 3), or cut.

    A temperature means something beside the size of the scores only: cosine attention is healthy at 0.1, its scores
    being bounded. So a sample counts where the head's score spread, if it is measured, is ``min_spread``; for a
    temperature that was cut in mid-run, to ``cut`` of what it was, half of that.

    Attributes:
        learn_better: See `BaselineRule`; of the temperature before a cut.
        learn_worse: See `BaselineRule`.
        level: Temperature at or below which a sample counts.
        leave: The alarm ends above it.
        cut: Share of the head's former temperature at or below which a sample counts.
        min_spread: Least score spread, in units of scores / T.
    """

    patience: int | None = 1
    sigmas: float = 0.0
    learn_better: float = 0.5
    learn_worse: float = 0.5
    level: float = 0.1
    leave: float = 0.12
    cut: float = 0.5
    min_spread: float = 6.0

    name: ClassVar[str] = "sharp_temperature"
    title: ClassVar[str] = "softmax temperature too sharp"
    meaning: ClassVar[str] = "the softmax Jacobian grows like 1/T without a gain in separability"
    remedy: ClassVar[str] = (
        "a temperature well above 0.1, sqrt(head_dim) being usual: look at the attention scale (with QK-norm or cosine "
        "attention, where scores are bounded, judge by the Jacobian norm); for more selectivity more heads, or a "
        "length-aware or sparse normaliser"
    )
    counts_scatter: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("level", "leave"):
            check(self.name, name, getattr(self, name), 0.0, math.inf, "It is an absolute temperature, 1/scale.")
        check(self.name, "cut", self.cut, 0.0, 1.0, "0.5 means half of the former temperature.")
        check(self.name, "min_spread", self.min_spread, 0.0, math.inf, "0 asks for no second signal.", closed="low")
        check_order(self.name, "level", self.level, "leave", self.leave)

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(
            quantities,
            Signal(TEMPERATURE, "temperature T", False),
            Signal(TEMPERATURE, "temperature T", False, way="cut", learning=self.learning),
        )

    def in_company(self, signal: Signal, figures: Mapping[str, float]) -> bool:
        """See `Rule.in_company`."""
        return not figures.get("score_spread", math.nan) < self.min_spread * (0.5 if signal.way else 1.0)

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        if signal.way == "cut":
            return self.cut * baseline, math.sqrt(self.cut) * baseline
        return self.level, self.leave

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit: {self.cut:.0%} of the baseline" if signal.way == "cut" else f"limit {self.level:g}"

    def remedy_of(self, told: Mapping[Signal, Sequence[HeadMemory]]) -> str:
        """See `Rule.remedy_of`."""
        cut = [memory.baseline for signal, memories in told.items() if signal.way == "cut" for memory in memories]
        return f"{former_temperature(cut)}; if the cut was meant: {self.remedy}" if cut else self.remedy


@dataclass(frozen=True)
class JacobianBound(Rule):
    """The spectral norm of the softmax Jacobian near its bound 1/(2T), in the mean over a head's rows (Corollary 3).

    Rows reach the bound where two keys share all the weight. Single rows of healthy heads do; that most rows of a head
    do is rare, and no failure by itself: it only says "watch". Reads ``jacobian@1.0``, if that is measured.

    Attributes:
        share: Share of the bound from which a sample counts.
        leave: The alarm ends below it.
    """

    severity: str = "watch"
    share: float = 0.9
    leave: float = 0.8

    name: ClassVar[str] = "jacobian_bound"
    title: ClassVar[str] = "softmax Jacobian at its bound"
    meaning: ClassVar[str] = (
        "pairs of keys share all the weight, so a small change of the scores moves it from one to the other"
    )
    remedy: ClassVar[str] = (
        "a higher temperature in this layer, or QK-norm; look at the score spread beside it: together they grow when "
        "the softmax gets too sharp"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "leave"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "It is a share of the bound 1/(2T).")
        check_order(self.name, "leave", self.leave, "share", self.share)

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal(JACOBIAN_SHARE, "Jacobian norm as a share of 1/(2T)", True))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return self.share, self.leave

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit {self.share:g}"
