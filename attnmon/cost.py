"""What the monitor costs a run: seconds per sample, its share, and how seldom to sample in order to keep to a share."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Cost", "Meter", "next_step"]


@dataclass(frozen=True)
class Cost:
    """What a sample took.

    Attributes:
        seconds: Time of the sample itself: attaching, reading, reducing, judging. On CUDA the longer of the host's
            time and the device's. Writing to loggers counts for `share_of_run` of the next sample.
        share_of_step: That over the time of the rest of the step; NaN where it is not known.
        share_of_run: Time of all samples so far, writing included, over the time of the run so far.
        every_n_steps: Steps until the next sample.
    """

    seconds: float
    share_of_step: float
    share_of_run: float
    every_n_steps: int


class Meter:
    """Clocks of one run. Steps that are not sampled don't touch it.

    Attributes:
        spent: Seconds of all samples so far.
        elapsed: Seconds of the run before this process took it up.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self.elapsed = 0.0
        self._started: float | None = None
        self._sample = 0.0
        self._running = False
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """The run begins, unless it has."""
        if self._started is None:
            self._started = time.perf_counter()

    @property
    def run_time(self) -> float:
        """Seconds of the run so far."""
        return self.elapsed + (0.0 if self._started is None else time.perf_counter() - self._started)

    @property
    def sample(self) -> float:
        """Seconds of the host since `take`."""
        return self._sample

    @contextmanager
    def running(self, device: torch.device | None = None) -> Iterator[None]:
        """Within, time counts as the monitor's; on a CUDA device also that of the kernels launched within."""
        if self._running:  # part of what is being timed
            yield
            return
        self._running = True
        began = time.perf_counter()
        events = None
        if device is not None and device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record(torch.cuda.current_stream(device))
        try:
            yield
        finally:
            if events is not None and device is not None:
                events[1].record(torch.cuda.current_stream(device))
                self._events.append(events)
            self._sample += time.perf_counter() - began
            self._running = False

    def take(self) -> float:
        """Seconds of the monitor since the last time; on CUDA to be called when the device has come to this point."""
        device = float(sum(begin.elapsed_time(end) for begin, end in self._events if end.query())) / 1e3
        seconds: float = max(self._sample, device)
        self.forget()
        self.spent += seconds
        return seconds

    def forget(self) -> None:
        """Drops what was not taken."""
        self._sample, self._events = 0.0, []

    def state_dict(self) -> dict[str, float]:
        """Seconds spent and elapsed."""
        return {"spent": self.spent, "elapsed": self.run_time}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The reverse of `state_dict`: the run goes on from there."""
        self.spent, self.elapsed, self._started = float(state["spent"]), float(state["elapsed"]), None

    def __getstate__(self) -> dict[str, Any]:
        # Neither events nor the clock's zero mean anything in another process.
        return {**self.__dict__, "elapsed": self.run_time, "_started": None, "_running": False, "_events": []}


def next_step(
    step: int,
    every_n_steps: int,
    max_overhead: float | None,
    *,
    spent: float,
    seconds: float,
    run_time: float,
    per_step: float,
) -> int:
    """The next step to sample so that the share of all samples, that one included, stays below a limit.

    Args:
        step: The step that was sampled.
        every_n_steps: The cadence; the answer is a multiple of it.
        max_overhead: The limit; None: there is none.
        spent: Seconds of all samples so far.
        seconds: Seconds of this one, which the next is expected to take as well.
        run_time: Seconds of the run so far, samples included.
        per_step: Seconds of a step without a sample.

    Example:
        >>> clocks = {"spent": 1.0, "seconds": 0.5, "run_time": 60.0, "per_step": 0.6}
        >>> next_step(100, 50, None, **clocks)
        150
        >>> next_step(100, 50, 0.01, **clocks)  # (1 + 0.5) / 0.01 = 150 s are reached at step 249
        250
    """
    planned = (step // every_n_steps + 1) * every_n_steps
    if max_overhead is None or per_step <= 0:
        return planned
    # After k more steps of that length: spent + seconds <= max_overhead * (run_time + k * per_step + seconds).
    wait = ((spent + seconds) / max_overhead - run_time - seconds) / per_step
    return max(planned, math.ceil((step + wait) / every_n_steps) * every_n_steps)
