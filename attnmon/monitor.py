"""The engine, without a framework: when to look, what to make of it, and one Snapshot of plain numbers each time."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnmon.alerts import Alert, AlertEngine
from attnmon.capture import anything_compiled, compiled_modules, describe_search, find_attention
from attnmon.cost import Cost, Meter, next_step
from attnmon.events import Events
from attnmon.options import MonitorOptions, check_state
from attnmon.ranks import distributed, rank
from attnmon.rerun import uncompiled
from attnmon.rows import RowSampler
from attnmon.schedule import due
from attnmon.snapshot import Snapshot
from attnmon.sums import Figures
from attnmon.window import Window, WindowOptions

__all__ = ["Monitor"]

Source = Literal["train", "probe", "validation"]

_BLIND_AFTER = 2  # samples


class Monitor:
    """Watches one model. Frameworks and loops call it; it knows none of them.

    Args:
        options: What to do.

    A sampled step is `open`, the model's own forward pass, `close`. Nothing is attached to the model outside.

    Attributes:
        latest: The newest Snapshot of the main source, None before the first.
        failed: Whether an error has switched it off.
        meter: What it costs. Whoever writes what it finds lets that run meanwhile.
    """

    def __init__(self, options: MonitorOptions) -> None:
        self.options = options
        self.latest: Snapshot | None = None
        self.failed = False
        self._columns = options.columns()
        normalize = options.vectors == "embedding" if options.normalize_vectors is None else options.normalize_vectors
        self._window_options = WindowOptions(self._columns, options.vectors, normalize, options.tokens)
        self._rules = options.engine()
        self._events = Events(options, self.attempt)
        self._model: nn.Module | None = None
        self._found: list[str] = []
        self._order: list[str] = []  # layer paths in the order of their first call: the layer numbers
        self._heads: dict[str, int] = {}  # agreed between ranks
        self._window: Window | None = None
        self._open = False
        self._failure: str | None = None
        self._warned: set[str] = set()
        self.meter = Meter()
        self._device = torch.device("cpu")
        self._pace: tuple[int, float] | None = None  # last sample, and the run's seconds without any until then
        self._not_before = 0  # no step before this one is sampled, so as to keep to `max_overhead`
        self._opened_at = 0.0
        self._blind = 0  # samples in a row that showed nothing although compiled code ran

    # -- set-up and state ---------------------------------------------------------------------------------------

    def bind(self, model: nn.Module) -> None:
        """Says which model is watched.

        Raises:
            ValueError: No attention can be found in it, or `layers` names none of it.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected `model` to be a torch.nn.Module, but got {type(model).__name__}.")
        sites = find_attention(model)
        if not sites:
            raise ValueError(
                f"Expected `model` to contain attention that can be measured, but got {type(model).__name__}: "
                f"{describe_search(model)}"
            )
        self._model = model
        self._found = [site.layer for site in sites]
        patterns = [p for p in self.options.layers or () if isinstance(p, str)]
        for pattern in patterns:
            if not fnmatch.filter(self._found, pattern):
                raise ValueError(
                    f"Expected every name in `layers` to match an attention module, but got {pattern!r}; "
                    f"there are: {_shorten(self._found)}."
                )

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle has the history, not the model: it must be bound again.
        return {**self.__dict__, "_model": None, "_window": None, "_open": False}

    def unbind(self) -> None:
        """Lets go of the model."""
        self.abort()
        self._model = None

    def state_dict(self, held: Snapshot | None = None) -> dict[str, Any]:
        """What a resumed run needs in order to number, warn and log as the unbroken one.

        Args:
            held: A sample that `note` has not been called for yet: its alerts belong to the history all the same.
        """
        waiting = () if held is None else (*held.alerts, *held.recoveries)
        events = self._events.state_dict()
        return {
            "order": list(self._order),
            "rules": None if self._rules is None else self._rules.state_dict(),
            "history": [*events["history"], *(alert.plain() for alert in waiting)],
            "rates": events["rates"],
            "warned": sorted(self._warned),
            "not_before": self._not_before,
            "pace": self._pace,
            "meter": self.meter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        check_state(state, "order", "rules", "warned")
        self._order = list(state["order"])
        self._warned = set(state["warned"])
        self._events.load_state_dict(state)
        # Another cadence holds at once, unless the limit of the cost stands against it.
        self._not_before = 0 if self.options.max_overhead is None else state.get("not_before", 0)
        self._pace = state.get("pace")
        if "meter" in state:
            self.meter.load_state_dict(state["meter"])
        if self._rules is not None and state["rules"] is not None:
            self._rules.load_state_dict(state["rules"])

    # -- one sampled step ---------------------------------------------------------------------------------------

    @property
    def blind(self) -> bool:
        """Whether training passes are not worth attaching to: they run inside compiled code, and show nothing.

        That code would be compiled anew for what is attached, each time, and in the end not at all.
        """
        return self._blind >= _BLIND_AFTER

    def due(self, step: int) -> bool:
        """Whether this optimizer step is sampled."""
        return not self.failed and due(step, self.options.every_n_steps) and step >= self._not_before

    @property
    def is_open(self) -> bool:
        """Whether a sample has been begun and not finished."""
        return self._open

    def open(self, step: int, source: Source = "train", *, own: bool = False) -> Window | None:
        """Attaches to the model until `close` or `abort`; None if that failed.

        Args:
            step: The optimizer step.
            source: What is read.
            own: The pass that will be read is the monitor's own affair, and runs uncompiled.
        """
        self.abort()
        self._open = True
        self.meter.start()
        self._device = _device(self._model)
        self._opened_at = time.perf_counter()

        def attach() -> None:
            if self._model is None:
                raise RuntimeError("Expected `bind(model)` to be called before `open`.")
            # A probe compares steps, so it looks at the same rows each time.
            key = (self.options.seed, source, None if source == "probe" else step, rank())
            sampler = RowSampler(self.options.rows, self.options.sequences, key)
            # What runs uncompiled has to do so already when the capture looks for compiled parts.
            with uncompiled() if own else nullcontext():
                self._window = Window(self._model, self._window_options, sampler, self._wanted, self._guard)
            self._window.rerun = own and source != "probe"

        self._guard(attach)
        return self._window

    def detach(self) -> None:
        """Leaves the model as it was found; what was collected waits for `close`."""
        if self._window is not None:
            self._window.detach()

    def abort(self) -> None:
        """Leaves the model as it was found and forgets what was collected."""
        self.detach()
        self._window = None
        self._open = False
        self.meter.forget()

    def close(self, step: int, source: Source = "train") -> Snapshot | None:
        """Leaves the model as it was found and makes the Snapshot.

        With several processes this is where their sums meet: each of them must call it.

        Returns:
            The Snapshot, or None if nothing could be measured (which warns once, with the reason).
        """
        if not self._open:
            return None
        with self.meter.running():
            self.detach()
            if self._window is not None:
                self._guard(self._window.finish)
        if source == "train":
            self._blind = self._blind + 1 if self.sees_nothing and anything_compiled() else 0
        window, self._window, self._open = self._window, None, False
        # Not timed: the host waits there until the device has come to the end of the step.
        sums, clocks = self._reduce(window)
        snapshot: Snapshot | None = None

        def finish() -> None:
            nonlocal snapshot
            if window is not None and sums is not None:
                snapshot = self._finish(step, source, window, sums)

        if sums is None:
            self._switch_off(self._failure or "The monitor of another process of this run failed.")
        else:
            self.guarded(finish)
        cost = self._settle(step, source, clocks)
        if snapshot is not None:
            is_latest = self.latest is snapshot
            snapshot = dataclasses.replace(snapshot, cost=cost)
            self.latest = snapshot if is_latest else self.latest
        return snapshot

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The history: alerts and recoveries of the run, resumed or not, the newest thousand."""
        return tuple(self._events.history)

    def note(self, snapshot: Snapshot | None, **known: Any) -> Snapshot | None:
        """Puts what is known of the step beside the sample's alerts, see `attnmon.events.Events.note`.

        To be called once for each sample, before it is written.
        """
        if snapshot is None:
            return None
        noted = self._events.note(snapshot, **known)
        self.latest = noted if self.latest is snapshot else self.latest
        return noted

    def tell(self, snapshot: Snapshot | None) -> None:
        """Calls the user's function only, where the run has ended in the middle of a step."""
        self._events.tell(snapshot)

    def act(self, snapshot: Snapshot | None) -> bool:
        """Does what the alerts of a sample that has been written ask for, see `attnmon.events.Events.act`.

        Not under a guard: who has a warning made an error of, or asks for one, wants to be stopped by it.
        """
        return self._events.act(snapshot)

    def save_baselines(self, path: str | PathLike[str]) -> None:
        """Writes what has been learned of each head, as JSON, for the argument ``baselines`` of another run.

        Raises:
            ValueError: Nothing has been learned yet, or the rules are off.
        """
        if self._rules is None:
            raise ValueError("Expected rules to have learned baselines, but got alerts=False. Pass alerts=True.")
        text = json.dumps(self._rules.baselines(), allow_nan=False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")

    def guarded(self, function: Callable[[], None]) -> None:
        """Runs something that may fail without harm to the run: a failure switches the monitor off, with one warning.

        With `strict` it is raised instead. With several processes the monitors are switched off together, at the next
        sample, because each of them has to take part in that.
        """
        self._guard(function)
        if self._failure is not None and not distributed():
            self._switch_off(self._failure)

    def attempt(self, what: str, function: Callable[[], object]) -> None:
        """Runs something outside the monitor that may fail and may do better next time: a failure warns once.

        With `strict` it is raised instead.
        """
        try:
            function()
        except Exception:
            if self.options.strict:
                raise
            self.warn(
                f"attempt:{what}",
                f"attnmon could not write to {what}, or what was called there failed; this sample is lost there, later "
                f"ones are tried again without a further warning.\n{traceback.format_exc()}",
            )

    def read(self, step: int, source: Source, forward: Callable[[Window], object]) -> None:
        """`open`, and a forward pass that is the monitor's own affair; to be closed as usual."""
        window = self.open(step, source, own=True)
        if window is None:
            return
        try:
            self._guard(lambda: forward(window))
        except BaseException:
            self.abort()
            raise
        self.detach()

    def sample(self, step: int, source: Source, forward: Callable[[Window], object]) -> Snapshot | None:
        """`read` and `close`."""
        self.read(step, source, forward)
        return self.close(step, source)

    @property
    def sees_nothing(self) -> bool:
        """Whether no attention has been seen since `open`, nor a reason why."""
        return self._window is not None and not self._window.sums and not self._window.not_measured

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, what the monitor has found is written; that counts as its time, too."""
        with self.meter.running():
            yield
        self.meter.take()

    # -- inside -------------------------------------------------------------------------------------------------

    def _wanted(self, layer: str) -> bool:
        """Numbers a layer at its first call and says whether it is measured."""
        if layer not in self._order:
            self._order.append(layer)
        return self._chosen(layer)

    def _chosen(self, layer: str) -> bool:
        """Whether `layers` asks for it: by path, or by the number that it got when it was first called."""
        wanted = self.options.layers
        number = self._order.index(layer) if layer in self._order else None
        return wanted is None or any(
            fnmatch.fnmatchcase(layer, want) if isinstance(want, str) else number == want for want in wanted
        )

    def _guard(self, function: Callable[[], object]) -> None:
        """Runs what may fail: the run that is watched goes on, unless `strict`."""
        if self._failure is not None:
            return
        try:
            with self.meter.running(self._device):
                function()
        except Exception:
            if self.options.strict:
                raise
            self._failure = traceback.format_exc()

    def _switch_off(self, failure: str) -> None:
        self.failed = True
        self.warn(
            "failed",
            "attnmon failed and is switched off for the rest of this run; the run itself goes on. "
            f"Pass strict=True to stop at such an error instead.\n{failure}",
        )

    def warn(self, key: str, message: str) -> None:
        """Warns once per key, in the first process only."""
        if key not in self._warned:
            self._warned.add(key)
            if rank() == 0:
                warnings.warn(message, UserWarning, stacklevel=4)

    def _settle(self, step: int, source: Source, clocks: list[float] | None) -> Cost:
        """What the sample took, and when the next one is due."""
        seconds = self.meter.take()
        spent, run_time = self.meter.spent, self.meter.run_time
        every, limit = self.options.every_n_steps, self.options.max_overhead
        # Several processes go by what they have told each other: they must come to the same step.
        mine, before, run = (seconds, spent - seconds, run_time) if clocks is None else clocks
        rest = run - before - mine
        # The pace since the last sample: the first steps of a run may take far longer than the others.
        since = (-1, 0.0) if self._pace is None or self._pace[0] >= step else self._pace
        self._pace = (step, rest)
        per_step = (rest - since[1]) / (step - since[0])
        following = next_step(step, every, limit, spent=before + mine, seconds=mine, run_time=run, per_step=per_step)
        planned = (step // every + 1) * every
        if source == "validation":
            following = max(self._not_before, planned)
        elif following == planned:
            self._not_before = 0  # so that a run that is taken up again with another cadence keeps to that at once
        else:
            self._not_before = following
            self.warn(
                "max_overhead",
                f"attnmon samples less often than every {every} steps, to keep to max_overhead={limit}: a sample takes "
                f"{mine:.2g} s, and the next one is due at step {following}. Measure less (rows, sequences, layers, "
                "quantities) to see more often. `attn/monitor/every_n_steps` says how often it samples.",
            )
        without = time.perf_counter() - self._opened_at - seconds if source == "train" else math.nan
        return Cost(
            seconds=seconds,
            share_of_step=seconds / without if without > 0 else math.nan,
            share_of_run=spent / run_time if run_time > 0 else math.nan,
            every_n_steps=following - step,
        )

    def _reduce(self, window: Window | None) -> tuple[dict[str, Tensor] | None, list[float] | None]:
        """The layers' sums over all processes, on the CPU, after one transfer; None if a process failed.

        With them the clocks that the processes agree on: seconds of this sample so far, of all before, of the run.
        """
        sums = {} if window is None else {layer: layer_sums.data for layer, layer_sums in window.sums.items()}
        if not distributed():
            return (_to_cpu(sums) if self._failure is None else None), None
        # One reduction of a shape all processes know. Two flags lead it: a layer that not all of them know (then the
        # names are exchanged and the reduction is repeated), and a failure. The clocks follow.
        device = next((t.device for t in sums.values()), self._device)
        clocks = [self.meter.sample, self.meter.spent, self.meter.run_time]
        for _ in range(2):
            news = any(self._heads.get(layer) != data.shape[1] for layer, data in sums.items())
            flags = torch.tensor([news, self._failure is not None, *clocks], dtype=torch.float64, device=device)
            shapes = {layer: (len(self._columns) + 1, heads, 6) for layer, heads in self._heads.items()}
            parts = [sums[layer] if layer in sums else flags.new_zeros(shape) for layer, shape in shapes.items()]
            if news:  # what the others don't know can't be in a vector of the agreed shape
                parts = [flags.new_zeros(shape) for shape in shapes.values()]
            total = torch.cat([flags, *(part.flatten().to(flags.dtype) for part in parts)])
            dist.all_reduce(total)
            total = total.cpu()
            agreed = (total[2:5] / dist.get_world_size()).tolist()
            if total[1] > 0:
                return None, agreed
            if total[0] == 0:
                pieces = total[5:].split([a * b * c for a, b, c in shapes.values()])
                reduced = {
                    layer: piece.view(shape) for (layer, shape), piece in zip(shapes.items(), pieces, strict=True)
                }
                return {layer: data for layer, data in reduced.items() if data[-1, 0, 4] > 0}, agreed
            self._agree(sums)
        raise RuntimeError("The processes of this run disagree about the number of heads of a layer.")

    def _agree(self, sums: dict[str, Tensor]) -> None:
        mine = [(layer, sums[layer].shape[1] if layer in sums else None) for layer in self._order]
        everyone: list[list[tuple[str, int | None]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        self._order = list(dict.fromkeys(layer for theirs in everyone for layer, _ in theirs))
        heads = {layer: count for theirs in reversed(everyone) for layer, count in theirs if count is not None}
        self._heads = {**self._heads, **heads}

    def _finish(self, step: int, source: Source, window: Window, sums: dict[str, Tensor]) -> Snapshot | None:
        figures = {layer: Figures.from_sums(data) for layer, data in sums.items()}
        not_measured = dict(window.not_measured)
        for layer, figure in list(figures.items()):
            if figure.mismatched:
                del figures[layer]
                not_measured[layer] = (
                    "its own attention output is not what its query, key, value, mask and scale give, so an argument "
                    "or a step that changes the weights is unknown to attnmon"
                )
        self._warn_of(not_measured, [f for f in self._found if f not in sums and f not in not_measured], figures)
        if not figures:
            return None
        number = {layer: self._order.index(layer) for layer in figures}
        layers = sorted(figures, key=number.__getitem__)
        snapshot = Snapshot(
            step=step,
            values=self._table(figures, number, layers, lambda f: f.means),
            errors=self._table(figures, number, layers, lambda f: f.errors),
            rows_used=self._table(figures, number, layers, lambda f: f.used),
            rows_skipped=self._table(figures, number, layers, lambda f: f.skipped),
            layers={number[layer]: layer for layer in layers},
            temperatures={number[layer]: figures[layer].temperature for layer in layers},
            nonfinite={number[layer]: figures[layer].nonfinite for layer in layers},
            padding={number[layer]: figures[layer].padding for layer in layers},
            not_measured=not_measured,
            source=source,
            rerun=window.rerun,
        )
        if not any(map(any, chain.from_iterable(t.values() for t in snapshot.rows_used.values()))) and not any(
            map(any, snapshot.nonfinite.values())
        ):
            self.warn(
                "no rows",
                "attnmon found no row to measure in a sampled step: every query of the sequences looked at is padding, "
                "has no label (with tokens='labelled'), or sees no key. Nothing is reported for such steps.",
            )
            return None
        self._warn_of_empty_columns(snapshot)
        if source != "validation":
            if self._rules is not None:
                alerts = tuple(self._judge(self._rules, snapshot))
                snapshot = dataclasses.replace(
                    snapshot,
                    alerts=alerts,
                    alarmed=self._rules.alarmed(),
                    limits=self._rules.limits(),
                    recoveries=tuple(self._rules.recoveries),
                )
            self.latest = snapshot
        return snapshot

    def _table(
        self,
        figures: dict[str, Figures],
        number: dict[str, int],
        layers: list[str],
        pick: Callable[[Figures], list[list[Any]]],
    ) -> dict[str, dict[int, list[Any]]]:
        return {
            column.name: {number[layer]: pick(figures[layer])[index] for layer in layers}
            for index, column in enumerate(self._columns)
        }

    def _judge(self, rules: AlertEngine, snapshot: Snapshot) -> list[Alert]:
        alerts = rules.update(
            step=snapshot.step,
            values=snapshot.values,
            errors=snapshot.errors,
            layers=snapshot.layers,
            temperatures=snapshot.temperatures,
            nonfinite=snapshot.nonfinite,
        )
        if rules.unknown_to_baselines:
            self.warn("baselines", f"attnmon: {rules.unknown_to_baselines}")
        return alerts

    def _warn_of(self, not_measured: dict[str, str], silent: list[str], figures: dict[str, Figures]) -> None:
        listing = "; ".join(f"{layer}: {reason}" for layer, reason in not_measured.items())
        # Only then: the search goes through the whole model.
        if not_measured and self._model is not None and compiled_modules(self._model):
            listing += ". To read a compiled model use source='probe', which runs it uncompiled on a batch of its own"
        wanted = [layer for layer in silent if self._chosen(layer)]
        if figures:
            if not_measured:
                self.warn(
                    f"not_measured:{listing}", f"attnmon does not measure all of this model's attention. {listing}."
                )
            if wanted and self.options.layers is None:
                self.warn(
                    "silent",
                    f"attnmon found attention in {_shorten(wanted)} but saw no call of it in a sampled step: it is not "
                    "measured.",
                )
            return
        reasons = [listing] if listing else []
        if self._order and not wanted and not not_measured:
            reasons.append(
                f"`layers` = {self.options.layers} names none of the {len(self._order)} layers that were called "
                f"(0 to {len(self._order) - 1}: {_shorten(self._order)})"
            )
        elif wanted:
            reasons.append(
                f"no attention call was seen from {_shorten(wanted)}: the step did not run the model, ran it without "
                "gradients (`watch` reads training passes; source='probe' others), ran it inside a compiled function "
                "or as another, compiled module than the one that is watched (with `watch`: pass the "
                "compiled module, or call `look(batch)` before the step; anywhere: source='probe'), or the model "
                "computes its weights by hand"
            )
        self.warn("nothing", "attnmon measured nothing in a sampled step. " + ". ".join(reasons) + ".")

    def _warn_of_empty_columns(self, snapshot: Snapshot) -> None:
        if any(map(any, snapshot.nonfinite.values())):  # then that is why, and the rules say so
            return
        asked = {column.name for column in self.options.asked()}
        empty = [
            column
            for column in self._columns
            if column.base in ("separability", "distance")  # every row that sees more than N keys has these
            and column.name in asked
            and not any(map(any, snapshot.rows_used[column.name].values()))
        ]
        too_large = sorted({column.top_n for column in empty if column.top_n is not None})
        if too_large and self.options.vectors == "value":
            names = ", ".join(map(str, too_large))
            self.warn(
                f"top_n:{names}",
                f"attnmon: no sampled row sees more keys than N = {names} of `top_n`; these figures are NaN and not "
                "logged. Choose a smaller N or longer sequences.",
            )


# -- small helpers ----------------------------------------------------------------------------------------------


def _device(model: nn.Module | None) -> torch.device:
    parameter = next(model.parameters(), None) if model is not None else None
    return torch.device("cpu") if parameter is None else parameter.device


def _to_cpu(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    if not sums:
        return {}
    flat = torch.cat([data.flatten() for data in sums.values()]).cpu()
    pieces = flat.split([data.numel() for data in sums.values()])
    return {layer: piece.view(sums[layer].shape) for layer, piece in zip(sums, pieces, strict=True)}


def _shorten(names: Sequence[str], most: int = 6) -> str:
    listed = ", ".join(repr(name) for name in names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"
