"""A monitor for a plain training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from attnmon.alerts import Alert, AlertRules
from attnmon.capture import Hook
from attnmon.loggers import Sink, arrange, make_sink
from attnmon.monitor import Monitor
from attnmon.options import MonitorOptions, check_flag, check_prefix, check_state
from attnmon.probe import call_model, to_device
from attnmon.rerun import take_sequences, undisturbed
from attnmon.snapshot import Snapshot
from attnmon.tensorboard import worth_pictures
from attnmon.window import Window

__all__ = ["Watch", "watch"]

# Who writes where, as long as it is entered: several of one writer need prefixes of their own, and share one page.
_writing: list[tuple[Any, Watch]] = []


class Watch:
    """A monitor attached to a plain loop; made by `watch`, used as a context manager.

    Attributes:
        latest: The newest Snapshot, None before the first.
        step_count: Number of optimizer steps made.
        should_stop: Whether an alert's severity has asked for an end of the run (``actions``). The loop has to look.
    """

    def __init__(
        self, model: nn.Module, options: MonitorOptions, probe: Any, writer: Any, per_head: bool, prefix: str
    ) -> None:
        if options.source == "probe" and (probe is None or isinstance(probe, bool | int | float | str)):
            raise ValueError(
                "Expected `probe` to be a batch or a function that runs the model when source='probe', but got "
                f"{probe!r}."
            )
        check_flag("per_head", per_head)
        check_prefix(prefix)
        self._monitor = Monitor(options)
        self._monitor.bind(model)
        self._model = model
        self._options = options
        self._probe = probe
        self._prefix = prefix
        self._writers = writer if isinstance(writer, list | tuple) else [] if writer is None else [writer]
        self._sinks: list[tuple[str, Sink]] = [
            (type(one).__name__, make_sink(one, options, prefix=prefix)) for one in self._writers
        ]
        self._per_head = per_head
        self._active = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._known: dict[str, Any] = {}  # of the step that ended last
        self.step_count = 0
        self.should_stop = False

    @property
    def latest(self) -> Snapshot | None:
        """The newest Snapshot, None before the first."""
        return self._monitor.latest

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts and recoveries of the run, those from before a resume included, the newest thousand."""
        return self._monitor.alerts

    def save_baselines(self, path: str) -> None:
        """Writes what the rules have learned of each head, as JSON, for the argument ``baselines`` of another run.

        Raises:
            ValueError: Nothing has been learned yet, or the rules are off.
        """
        self._monitor.save_baselines(path)

    def __enter__(self) -> Self:
        if self._active:
            raise RuntimeError("Expected a Watch to be entered once at a time. Make a second one with `watch(model)`.")
        self._share()
        self._active = True
        try:
            self._act(self._begin())
        except BaseException:  # an alert may ask for this: `with` has not begun then, and ends nothing
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the model as it was found. Called by ``with``; may be called again."""
        self._active = False
        _writing[:] = [(writer, watch) for writer, watch in _writing if watch is not self]
        self._remove_hooks()
        self._monitor.abort()
        for name, sink in self._sinks:
            self._monitor.attempt(f"writer {name}", sink.save)

    def step(
        self, *, loss: Any = None, grad_norm: Any = None, learning_rate: Any = None, batch: Any = None
    ) -> Snapshot | None:
        """To be called once after each optimizer step.

        Args:
            loss: Training loss of the step, a number or a tensor with one; this and the following stand beside an
                alert, and are read only if there is one. With ``source="probe"`` an alert is about the parameters after
                this step.
            grad_norm: Norm of the step's gradients, as ``clip_grad_norm_`` returns it.
            learning_rate: Of the step.
            batch: Of the step, to be kept for a replay with ``keep_batches``: without it nothing is kept. With
                ``source="probe"`` the probe is what was looked at, and is kept.

        Returns:
            The Snapshot of the step that was just made if that was a sampled one, else None. With
            ``source="probe"``: that of the parameters as they are now, if the coming step is a sampled one.
        """
        if not self._active:
            raise RuntimeError("Expected `step()` to be called inside `with watch(model) as monitor:`.")
        self._remove_hooks()
        self._known = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "batch": batch}
        if self._options.keep_batches is not None and batch is None and self._options.source == "train":
            self._monitor.warn(
                "keep_batches",
                f"attnmon keeps no batch in {str(self._options.keep_batches)!r}: it sees the model, and not the loop's "
                "batches. Pass them: monitor.step(batch=batch).",
            )
        snapshot = self._monitor.close(self.step_count) if self._monitor.is_open else None
        self.step_count += 1  # an alert that raises leaves a count behind that a resumed run can go on from
        snapshot = self._record(snapshot)
        following = self._begin()  # before an alert may raise: the next step is then looked at as well
        self._known = {}
        self._act(snapshot, following)
        return following or snapshot

    def look(self, batch: Any | Callable[[nn.Module], object]) -> None:
        """To be called before each optimizer step where the loop compiles a function around the model.

        Compiled code shows nothing of its attention, and the model's own call lies inside of it. So on a sampled step
        this runs the model on the sequences looked at, uncompiled, in eval mode under ``no_grad``, with the random
        states put back; that costs one such forward pass. On other steps it does nothing. `step` gives the Snapshot,
        as always. A model that is compiled itself needs none of this.

        Args:
            batch: The batch of this step (mapping, sequence or tensor, as the model's forward takes it), or a function
                that runs the model it is given.
        """
        if not self._active:
            raise RuntimeError("Expected `look()` to be called inside `with watch(model) as monitor:`.")
        if self._options.source == "probe" or not (self._monitor.is_open or self._monitor.due(self.step_count)):
            return
        self._remove_hooks()

        def run(window: Window) -> None:
            self._run(batch if callable(batch) else take_sequences(batch, window.sampler.select)[0])

        self._monitor.read(self.step_count, "train", run)

    def state_dict(self) -> dict[str, Any]:
        """Step count, layer numbers and the rules' memory: save it beside the model's."""
        return {"step_count": self.step_count, "monitor": self._monitor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`; before or after entering ``with``.

        Raises:
            ValueError: ``state`` is not what `state_dict` returned.
        """
        check_state(state, "step_count", "monitor")
        self._monitor.load_state_dict(state["monitor"])
        self.step_count = state["step_count"]
        if self._active:
            self._remove_hooks()
            self._monitor.abort()
            self._act(self._begin())

    def _share(self) -> None:
        """Puts itself beside those that write where it does, and arranges a page for all of them."""
        for writer in self._writers:
            if any(other is writer and watch._prefix == self._prefix for other, watch in _writing):
                raise ValueError(
                    f"Expected each `watch` that writes to one {type(writer).__name__} to have a `prefix` of its own, "
                    f"but two have {self._prefix!r}: their figures would stand under the same keys. Pass e.g. "
                    "prefix='attn_2'."
                )
        _writing.extend((writer, self) for writer in self._writers)
        for writer in self._writers:
            sharing = [watch for other, watch in _writing if other is writer]
            layout = arrange((watch._prefix, watch._options) for watch in sharing)
            for watch in sharing:
                for other, (_, sink) in zip(watch._writers, watch._sinks, strict=True):
                    if other is writer:
                        sink.arrange(layout)

    def _begin(self) -> Snapshot | None:
        if not self._monitor.due(self.step_count):
            return None
        if self._options.source == "probe":
            return self._record(self._monitor.sample(self.step_count, "probe", lambda _: self._run(self._probe)))
        if self._monitor.blind:
            return None
        window = self._monitor.open(self.step_count)
        if window is None or window.read_once(self._model):  # hooks there would have it compiled anew
            return None

        # The first training pass of the step is read; evaluation in between and further micro-batches are not.
        def before(*_: object) -> None:
            window.paused = bool(window.sums) or not torch.is_grad_enabled()

        def after(module: nn.Module, arguments: object, output: object) -> None:
            if output is None and sys.exc_info()[1] is not None:  # it failed: the loop may try again
                window.forget()
            if window.sums and not window.rerunning:
                self._monitor.detach()  # the rest of the step runs as it always does
            else:
                window.paused = False

        self._hooks = [
            self._model.register_forward_pre_hook(Hook(before, self._monitor.guarded)),
            self._model.register_forward_hook(Hook(after, self._monitor.guarded), always_call=True),
        ]
        return None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _run(self, batch: Any) -> None:
        """Runs the model on a batch, or a function on the model, without leaving a trace."""
        with undisturbed(self._model):
            if callable(batch):
                batch(self._model)
            else:
                device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
                call_model(self._model, to_device(batch, device))

    def _record(self, snapshot: Snapshot | None) -> Snapshot | None:
        """Notes and writes a sample."""
        looked_at = {} if self._options.source == "train" or callable(self._probe) else {"batch": self._probe}
        snapshot = self._monitor.note(snapshot, **self._known | looked_at)
        if snapshot is not None and self._sinks:
            with self._monitor.writing():
                scalars = snapshot.scalars(per_head=self._per_head, prefix=self._prefix)
                due = worth_pictures(snapshot, self._options.every_n_steps)
                for name, sink in self._sinks:
                    write = partial(sink.write, snapshot, scalars, prefix=self._prefix, images=due)
                    self._monitor.attempt(f"writer {name}", write)
        return snapshot

    def _act(self, *snapshots: Snapshot | None) -> None:
        for snapshot in snapshots:
            self.should_stop |= self._monitor.act(snapshot)


def watch(
    model: nn.Module,
    every_n_steps: int = 50,
    *,
    source: Literal["train", "probe"] = "train",
    probe: Any | Callable[[nn.Module], object] = None,
    rows: int | Literal["all"] = 64,
    sequences: int = 4,
    tokens: Literal["valid", "labelled"] = "valid",
    top_n: int | Sequence[int] = (1, 5, 10, 20),
    temperatures: float | Sequence[float] = (0.1, 0.5, 1.0, 2.0),
    epsilons: float | Sequence[float] = (0.1,),
    vectors: Literal["value", "hidden", "embedding"] = "value",
    normalize_vectors: bool | None = None,
    quantities: Sequence[str] | None = None,
    layers: Sequence[int | str] | None = None,
    alerts: bool = True,
    rules: AlertRules | None = None,
    patience: int = 3,
    strict: bool = False,
    seed: int = 0,
    max_overhead: float | None = None,
    actions: dict[str, str] | None = None,
    on_alert: Callable[[Alert], object] | None = None,
    keep_batches: str | None = None,
    baselines: str | None = None,
    writer: Any = None,
    per_head: bool = False,
    prefix: str = "attn",
) -> Watch:
    """Watches the attention heads of a model in a plain PyTorch loop.

    On a sampled step the first forward pass of ``model`` with gradients enabled is read as it passes (under gradient
    accumulation: the first micro-batch); on all others nothing is attached. Compiled parts of the model
    (`torch.compile` around them, or their ``compile()``) are first run once more, uncompiled and in eval mode, on the
    sequences looked at; where the loop compiles a function around the model, see `Watch.look`. Steps are counted from
    0, and step 0 is sampled. A module that attends more than once in a pass is one layer, and the rows of all its
    calls count.

    Args:
        model: The model that the loop calls. Wrapped models (DDP, ``fully_shard``) are passed as they are called.
        every_n_steps: Optimizer steps between two samples.
        source: ``"train"`` reads the training batch as it passes; ``"probe"`` runs ``probe`` in eval mode under
            ``no_grad`` before each sampled step, so that figures of different steps compare like with like.
        probe: A batch (mapping, sequence or tensor, as the model's forward takes it) or a function of the model.
        writer: What the samples are written to, or a list of such: a TensorBoard ``SummaryWriter``, or a logger of
            Fabric or Lightning (see `attnmon.AttentionMonitor` for what each gets). None: nothing is written.
        per_head: Writes a scalar per head beside those per layer.
        prefix: First part of each key that is written. Two that write to one writer at a time need different ones.
        rows: Query positions looked at per sequence, stratified over position, or ``"all"``.
        sequences: Most sequences of a batch that are looked at, drawn at random.
        tokens: ``"valid"`` or ``"labelled"``; this and the following as for `attnmon.AttentionMonitor`.
        top_n: Sizes N of the selected set.
        temperatures: Temperatures of the Jacobian norms as multiples of the model's own.
        epsilons: Perturbation sizes of the finite-difference sensitivity.
        vectors: What the keys carry: ``"value"``, ``"hidden"`` or ``"embedding"``.
        normalize_vectors: Whether these are L2-normalised; None: embeddings are, the others are not.
        quantities: What is measured; None: the default list.
        layers: Layers to measure, by number or by path with ``*`` as wildcard; None: all.
        alerts: Whether the rules judge each sample.
        rules: The rules and their numbers.
        patience: Samples in a row that a change has to last before a warning.
        strict: Raise errors of the monitor itself.
        seed: Of the draws of sequences and rows.
        max_overhead: Most of the run's time that the monitor may take, e.g. 0.01; it samples less often where the
            cadence would take more. None: no limit.
        actions: What is done about an alert, by severity: ``"log"``, ``"warn"``, ``"stop"`` (sets `Watch.should_stop`)
            or ``"raise"``; this and the following as for `attnmon.AttentionMonitor`.
        on_alert: Called with each alert and each recovery.
        keep_batches: Folder for the ``batch`` that `Watch.step` was given where there is an alert of level warn or
            above.
        baselines: What another run has learned of each head: the file that `Watch.save_baselines` wrote.

    Returns:
        A `Watch`: ``.step()`` after each optimizer step gives a Snapshot or None, ``.latest`` the newest one.

    Raises:
        ValueError: An argument is out of range, or no attention can be found in the model; on entering ``with``, if
            another one writes under the same prefix to the same writer.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with watch(layer, every_n_steps=2, top_n=(1, 2)) as monitor:
        ...     for _ in range(3):
        ...         layer(torch.randn(2, 8, 16)).mean().backward()
        ...         optimizer.step()
        ...         snapshot = monitor.step()
        >>> snapshot.step, snapshot.layers, len(snapshot.values["entropy"][0])
        (2, {0: 'self_attn'}, 2)
    """
    options = MonitorOptions(
        every_n_steps=every_n_steps,
        source=source,
        rows=rows,
        sequences=sequences,
        tokens=tokens,
        top_n=top_n,
        temperatures=temperatures,
        epsilons=epsilons,
        vectors=vectors,
        normalize_vectors=normalize_vectors,
        quantities=quantities,
        layers=layers,
        alerts=alerts,
        rules=rules,
        patience=patience,
        strict=strict,
        seed=seed,
        max_overhead=max_overhead,
        actions=actions,
        on_alert=on_alert,
        keep_batches=keep_batches,
        baselines=baselines,
    )
    return Watch(model, options, probe, writer, per_head, prefix)
