"""Where a run went back to an earlier step, as a resumed one does: what it had written beyond is void.

TensorBoard's fast loader drops some of that, tag by tag, and only where the tag is written again; the other one drops
nothing. Within a tag the order of the data tells; between tags the time does, as all of a sample is one event.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["in_order", "of_present"]


def in_order(data: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """What counts of a tag by itself, in rising order of the steps, and the steps that it went back to.

    Args:
        data: With `step`, in the order in which it was written; of a repeated step the last counts.
    """
    kept: list[Any] = []
    restarts = []
    for datum in data:
        if kept and datum.step < kept[-1].step:
            restarts.append(int(datum.step))
        while kept and kept[-1].step >= datum.step:
            kept.pop()
        kept.append(datum)
    return kept, restarts


def of_present(data: Iterable[Any], steps: Sequence[int], wall_times: Sequence[float]) -> tuple[list[Any], list[int]]:
    """What counts of a tag beside the samples that count, and the steps that those went back to.

    Args:
        data: With `step` and `wall_time`.
        steps: Of the samples, rising.
        wall_times: Of the samples.
    """
    events = set(zip(steps, wall_times, strict=True))
    latest = list(itertools.accumulate(wall_times, max))  # of the samples up to each step
    kept = []
    restarts = set()
    for datum in data:
        place = bisect.bisect_right(steps, datum.step) - 1
        # The event of a sample that counts does so too, even where the clock was set back afterwards
        if place < 0 or latest[place] <= datum.wall_time or (datum.step, datum.wall_time) in events:
            kept.append(datum)
        else:
            restarts.add(next(s for s, time in zip(steps, wall_times, strict=True) if time > datum.wall_time))
    return kept, sorted(restarts)
