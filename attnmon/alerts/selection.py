"""Rules about what a head selects: it goes uniform, its keys blur, or too many of them are active."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from attnmon.alerts.base import (
    OF_A_CHANGE,
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

__all__ = ["ActiveSet", "EntropyRise", "SeparabilityLoss", "UniformDrift"]

_SELECTIVITY = (
    "more heads (narrower ones), or a length-aware or sparse normaliser (Scalable-Softmax, sparsemax, alpha-entmax); "
    "a shorter context; not a sharper temperature, which raises gradients without gaining separability"
)
# When a head's score spread has settled, see `UniformDrift`.
_GROWN = 1.5
_TRAINED = 0.4
_STOOD = 10  # samples
_CALM = 0.15
_SELECTS = 1.5
_AT_ONCE = 3  # samples


@dataclass(frozen=True)
class EntropyRise(BaselineRule):
    """Normalised entropy rising from the head's own baseline: the head selects less (paper, section 4, rule 2).

    A sample counts when the figure has closed more than ``share`` of the baseline's distance to 1 (uniform
    attention): a share of the baseline itself would cry wolf on attention sinks (0.02 to 0.04) and could never fire
    on a head at 0.85. By itself this is no sign of trouble: on one in ten of the benchmark's healthy runs some head
    spreads out again. So it only says "watch"; a head that goes uniform is told by `UniformDrift`.

    Attributes:
        share: Share of the distance from the baseline to 1 that must be closed.
        leave_share: The alarm ends below this share.
        min_rise: Least rise in normalised entropy; heads that were never below ``1 - min_rise`` are not judged.
    """

    severity: str = "watch"
    share: float = 0.4
    leave_share: float = 0.2
    min_rise: float = 0.1

    name: ClassVar[str] = "entropy_rise"
    title: ClassVar[str] = "entropy rising"
    meaning: ClassVar[str] = "attention spreads toward uniform and selects less"
    remedy: ClassVar[str] = (
        f"{_SELECTIVITY}. If it came suddenly, look at what changed: weight decay on the query and key projections, "
        "the attention scale, the context length"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "leave_share", "min_rise"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "0.4 means 40 % of the way to uniform attention.")
        check_order(self.name, "leave_share", self.leave_share, "share", self.share)

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal("entropy_normalized", "normalised entropy", True, learning=self.learning))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        room = 1.0 - baseline
        enter = baseline + max(self.share * room, self.min_rise)
        return enter, min(baseline + self.leave_share * room, enter)

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit: {self.share:.0%} of the way from the baseline to 1"


@dataclass(frozen=True)
class UniformDrift(BaselineRule):
    """A head that selected goes uniform: its score spread is all but gone, its entropy near that of equal weights.

    Five ways:

    - **sudden**: the spread falls to ``sudden_share`` of the sample before, at one sample.
    - **drift**: it falls to ``share`` of the baseline, which is what the head had reached: that goes up with
      ``learn_better``, and down so slowly (``learn_worse``) that a fall of more than 1 % a sample is not learned.
    - **crowd**: half of a layer's heads come to ``crowd_share`` of their baselines, and to ``crowd_entropy``.
    - **flat**: half of a layer's heads come to ``flat_share`` of their very first spread within three samples, and stay
      there for ``flat_patience``: the layer is dead before it has learned anything, as in post-norm without warm-up.
    - **hotter**: the model's own temperature has risen by that factor, and the entropy to ``crowd_entropy``.

    The first three judge a head only once it has settled: its spread has grown to one and a half times the first, or a
    spread that only training or normalised queries and keys give (0.4) stood for ten samples, or it began at 1.5. What
    random weights give dips slowly in healthy runs, to a tenth, before it grows.

    Attributes:
        share: Share of the baseline at which a sample counts as drift, if ``patience`` samples agree.
        sudden_share: Share of the sample before at which one sample is enough.
        crowd_share: Share of the baseline that is enough where half of a layer's heads are there.
        crowd_entropy: Normalised entropy from which a sample counts then.
        crowd_baseline: Least score spread that such a head must have had: weaker ones come and go while a model learns.
        flat_share: Share of the first figure at which a layer counts as flat.
        flat_patience: Samples that this has to last.
        leave_share: The alarm ends above this share.
        min_entropy: Normalised entropy from which a sample counts, where that is measured.
        min_baseline: Least score spread, in units of scores / T, that a head must have had.
        hotter: Factor by which the model's own temperature must have risen over its baseline.
    """

    patience: int | None = 2
    learn_worse: float = 0.01
    share: float = 0.15
    sudden_share: float = 0.1
    crowd_share: float = 0.3
    crowd_entropy: float = 0.85
    crowd_baseline: float = 1.0
    flat_share: float = 0.12
    flat_patience: int = 5
    leave_share: float = 0.4
    min_entropy: float = 0.95
    min_baseline: float = 0.2
    hotter: float = 3.0

    name: ClassVar[str] = "uniform_drift"
    title: ClassVar[str] = "attention going uniform"
    meaning: ClassVar[str] = "the scores no longer tell the keys apart, so the head averages all it sees"
    remedy: ClassVar[str] = (
        "look at what shrinks or levels the scores: weight decay on the query and key projections (take them out of "
        "it), the attention scale or temperature, a context far longer than trained, a layer norm or learning rate "
        "that flattens the layer's input (a longer warm-up, a lower rate)"
    )
    flat_remedy: ClassVar[str] = (
        "a longer warm-up or a lower learning rate, or layer norm before attention rather than after it: what reaches "
        "the layer has gone flat before it has learned anything"
    )
    counts_scatter: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "sudden_share", "crowd_share", "flat_share", "leave_share"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "0.15 means that 15 % are left.")
        for name in ("min_entropy", "crowd_entropy"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "It is a normalised entropy.", closed="low")
        for name in ("min_baseline", "crowd_baseline"):
            check(self.name, name, getattr(self, name), 0.0, math.inf, "0 judges every head.", closed="low")
        check(self.name, "hotter", self.hotter, 1.0, math.inf, "3 means three times the temperature.")
        check_whole(self.name, "flat_patience", self.flat_patience, 1, "It is a number of samples.")
        for name in ("share", "sudden_share", "crowd_share", "flat_share"):
            check_order(self.name, name, getattr(self, name), "leave_share", self.leave_share)

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        spread = ("score_spread", "score spread", False)
        return if_present(
            quantities,
            Signal(TEMPERATURE, "temperature T", True, way="hotter", learning=(0.5, 0.5), patience=1),
            Signal(*spread, way="sudden", learning=(1.0, 1.0), patience=1),
            Signal(*spread, way="drift", learning=self.learning),
            Signal(*spread, way="crowd", learning=self.learning, crowd=0.5),
            Signal(*spread, way="flat", learning=(0.0, 0.0), patience=self.flat_patience, crowd=0.5),
        )

    def ready(self, signal: Signal, memory: HeadMemory) -> bool:
        """See `Rule.ready`."""
        if signal.way == "hotter":
            return True
        least = max(self.min_baseline, self.crowd_baseline) if signal.way == "crowd" else self.min_baseline
        if (memory.baseline or 0.0) < least:
            return False
        return memory.streak > 0 or memory.seen <= _AT_ONCE if signal.way == "flat" else memory.settled

    def settles(self, signal: Signal, memory: HeadMemory) -> bool:
        """See `Rule.settles`."""
        if memory.first is None or memory.baseline is None or memory.last is None:
            return False
        grown = memory.baseline >= max(_GROWN * memory.first, self.min_baseline)
        stood = memory.seen >= _STOOD and memory.first >= _TRAINED and memory.unrest < _CALM
        return grown or memory.first >= _SELECTS or (stood and 0.75 <= memory.last / memory.first <= 1.0 / 0.75)

    def in_company(self, signal: Signal, figures: Mapping[str, float]) -> bool:
        """See `Rule.in_company`."""
        return not figures.get("entropy_normalized", math.nan) < self._entropy(signal)

    def _entropy(self, signal: Signal) -> float:
        return self.crowd_entropy if signal.way in ("crowd", "hotter") else self.min_entropy

    def _share(self, signal: Signal) -> float:
        return {
            "sudden": self.sudden_share,
            "drift": self.share,
            "crowd": self.crowd_share,
            "flat": self.flat_share,
        }[signal.way]

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        if signal.way == "hotter":
            return self.hotter * baseline, math.sqrt(self.hotter) * baseline
        return self._share(signal) * baseline, self.leave_share * baseline

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        if signal.way == "hotter":
            return f"limit: {self.hotter:g} times the baseline"
        of = {
            "sudden": "the sample before",
            "drift": "the baseline",
            "crowd": "the baselines, in half of a layer,",
            "flat": "the first, in half of a layer,",
        }
        share = f"{self._share(signal):.0%} of {of[signal.way]}"
        return f"limit: {share} with normalised entropy above {self._entropy(signal):g}"

    def remedy_of(self, told: Mapping[Signal, Sequence[HeadMemory]]) -> str:
        """See `Rule.remedy_of`."""
        ways = {signal.way: [memory.baseline for memory in memories] for signal, memories in told.items()}
        if "hotter" in ways:
            return f"{former_temperature(ways['hotter'])}, unless the change was meant"
        if "sudden" in ways:
            return f"{OF_A_CHANGE}, attention scale or temperature, length of the context; else {self.remedy}"
        return self.flat_remedy if set(ways) == {"flat"} else self.remedy


@dataclass(frozen=True)
class SeparabilityLoss(BaselineRule):
    """Ns/N falling from the head's own baseline (paper, section 4, rule 2). Reads the measured N nearest to 10.

    The figure means little where a head selects nothing (it scatters between 0.1 and 0.5 before training has made
    the head select) or a single key (it goes to 1/N). So, where the normalised entropy is measured too, the baseline
    is learned between ``min_entropy`` and ``max_entropy`` only, and below ``min_entropy`` no sample counts: that is
    entropy collapse, which has a rule and remedies of its own. Even so it has no one direction in a failure (it goes
    to 1/N on collapse, to 1 when the values become alike) and falls on healthy runs: it only says "watch".

    Attributes:
        share: Share of the baseline that must be lost.
        leave_share: The alarm ends below this share.
        min_entropy: Normalised entropy from which a sample counts and is learned.
        max_entropy: Normalised entropy up to which a sample is learned.
    """

    severity: str = "watch"
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
            check(self.name, name, getattr(self, name), 0.0, 1.0, "It is a normalised entropy.", closed="both")
        check_order(
            self.name, "min_entropy", self.min_entropy, "max_entropy", self.max_entropy, "Else nothing is learned."
        )
        check_order(self.name, "leave_share", self.leave_share, "share", self.share)

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        found = []
        for quantity in quantities:
            name, _, top_n = quantity.partition("@")
            if name == "separability" and top_n.isdecimal() and int(top_n) > 0:
                found.append((abs(math.log(int(top_n) / 10)), int(top_n), quantity))
        return tuple(
            Signal(key, f"Ns/N (N = {top_n})", False, learning=self.learning) for _, top_n, key in sorted(found)[:1]
        )

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return baseline * (1.0 - self.share), baseline * (1.0 - self.leave_share)

    def in_company(self, signal: Signal, figures: Mapping[str, float]) -> bool:
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

    Many healthy heads are above it, so it only says "watch", and once per head: again only after the head has gone
    below ``leave`` and come back. Training from scratch starts near 1: the first ``wait`` samples of a head raise
    nothing.

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
    at_the_limit: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("level", "leave"):
            check(self.name, name, getattr(self, name), 0.0, 1.0, "It is a share of the context; the paper's is 0.06.")
        check_order(self.name, "leave", self.leave, "level", self.level)
        check_whole(self.name, "wait", self.wait, 0, "0 judges from the first sample, as suits fine-tuning.")

    def signals(self, quantities: Iterable[str]) -> tuple[Signal, ...]:
        """See `Rule.signals`."""
        return if_present(quantities, Signal("active_share", "active share exp(H)/n", True, grace=self.wait))

    def limits(self, signal: Signal, baseline: float) -> tuple[float, float]:
        """See `Rule.limits`."""
        return self.level, self.leave

    def limit_text(self, signal: Signal) -> str:
        """See `Rule.limit_text`."""
        return f"limit {self.level:g}"
