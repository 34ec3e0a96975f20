"""How the score spread of a head has grown: whether it goes on as it did, or slackens.

Scores that run away double in the same time again and again, until something breaks. Those of a head that learns to
single out keys grow as fast at first, from nothing to the same size where the task is exact (copying, looking a
position up), and then ever more slowly. A level alone can't tell them apart, in a model trained from scratch.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

__all__ = ["FROM_NOTHING", "Growth"]

FROM_NOTHING = 0.5
"""First score spread of a head below which it has yet to learn: random weights give a third at most."""

_SAMPLES = 3  # that have to agree
_SELECTS = 1.5  # spread of a head that singles keys out
_LITTLE = 1.5  # factor of a growth that is none
_STOOD = 10  # samples
_FINENESS = 2.0**0.125  # of what is kept
_DOUBLINGS = 3


class Growth:
    """The growth of one head, as few plain numbers. Steps rather than samples count, so that no cadence matters.

    Args:
        first: Spread that the head began with, if that is known from another run.

    Attributes:
        slackening: Steps in which the spread last doubled, as a share of those that the faster one of the two doublings
            before it took; the largest of three samples. Infinite: not known yet. NaN: the head began with more than
            `FROM_NOTHING`, or was never seen.
        settled: Whether the head began so, or has selected keys for half of its life with hardly any growth; stays.

    Example:
        >>> growth = Growth()
        >>> for step in range(0, 80, 5):
        ...     growth.update(step, 0.1 * 2 ** (step / 10))
        >>> round(growth.slackening, 2)
        1.0
        >>> for step in range(80, 160, 5):
        ...     growth.update(step, 20.0 + step / 10)
        >>> growth.slackening > 3, growth.settled
        (True, False)
    """

    __slots__ = ("_began", "_first", "_points", "_ratios", "_seen", "settled")

    def __init__(self, first: float | None = None) -> None:
        self.settled = False
        self._first = first
        self._began: int | None = None
        self._seen = 0
        self._points: list[tuple[int, float]] = []  # step and spread: the largest so far, thinned out
        self._ratios: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def slackening(self) -> float:
        """See the class."""
        if self._first is None or self._first >= FROM_NOTHING:
            return math.nan
        return max(self._ratios) if len(self._ratios) == _SAMPLES else math.inf

    def update(self, step: int, spread: float) -> None:
        """Take in a sample; NaN or infinite = not measured, which changes nothing."""
        if not math.isfinite(spread):
            return
        if self._first is None:
            self._first = spread
        if self._first >= FROM_NOTHING:  # nothing more is asked of it
            self.settled = True
            return
        self._began = step if self._began is None else self._began
        self._seen += 1
        if spread > 0.0 and (not self._points or spread > self._points[-1][1]):
            # Of points close together the newest is kept: a run of weeks has no more of them than one of minutes.
            if len(self._points) > 1 and spread < _FINENESS * self._points[-2][1]:
                self._points.pop()
            self._points.append((step, spread))
            least = spread / 2.0**_DOUBLINGS
            while len(self._points) > 2 and self._points[1][1] < least:
                del self._points[0]
        self._ratios.append(self._ratio(step))
        self.settled = self.settled or self._stands(step, self._began)

    def _stands(self, step: int, began: int) -> bool:
        top = self._points[-1][1] if self._points else 0.0
        if top < _SELECTS or self._seen < _STOOD:
            return False
        passed = self._passed(top / _LITTLE)
        return passed is not None and step - passed[0] >= 0.5 * (step - began)

    def _ratio(self, step: int) -> float:
        if not self._points:
            return math.inf
        top = self._points[-1][1]
        half, quarter, eighth = (self._passed(top / 2.0**power) for power in (1, 2, 3))
        if half is None or quarter is None or quarter[1] == half[1] == len(self._points) - 2:
            return math.inf  # it has not been seen to grow: of a leap between two samples nothing is known
        before = half[0] - quarter[0]
        if eighth is not None:
            before = min(before, quarter[0] - eighth[0])
        return (step - half[0]) / before if before > 0.0 else math.inf

    def _passed(self, spread: float) -> tuple[float, int] | None:
        """When the largest so far passed this, between which point and the next; None: it began above."""
        for index in range(len(self._points) - 2, -1, -1):
            (step, below), (later, above) = self._points[index], self._points[index + 1]
            if below < spread:
                return step + (later - step) * math.log(spread / below) / math.log(above / below), index
        return None

    def plain(self) -> list[Any]:
        """As JSON has it, infinity as None."""
        ratios = [ratio if math.isfinite(ratio) else None for ratio in self._ratios]
        points = [list(point) for point in self._points]
        return [self._first, self._began, self._seen, self.settled, points, ratios]

    @classmethod
    def from_plain(cls, plain: Any) -> Growth:
        """The reverse of `plain`.

        Raises:
            ValueError: It is nothing of the kind.
        """
        try:
            first, began, seen, settled, points, ratios = plain
            growth = cls(None if first is None else float(first))
            growth._began, growth._seen, growth.settled = (
                None if began is None else int(began),
                int(seen),
                bool(settled),
            )
            growth._points = [(int(step), float(spread)) for step, spread in points]
            growth._ratios.extend(math.inf if ratio is None else float(ratio) for ratio in ratios)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Expected the growth of a head, but got {plain!r}.") from error
        return growth
