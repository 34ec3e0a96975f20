"""The monitor as a callback of `transformers.Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from attnmon.alerts import Alert, AlertRules
from attnmon.capture import anything_compiled
from attnmon.events import gradient_norm, largest_rate
from attnmon.loggers import arrange, flat_heads, make_board
from attnmon.monitor import Monitor
from attnmon.options import MonitorOptions, check_flag, check_prefix
from attnmon.probe import call_model, to_device, tokens_of
from attnmon.rerun import take_sequences, undisturbed
from attnmon.snapshot import Snapshot
from attnmon.tensorboard import Board, worth_pictures
from attnmon.window import Window

__all__ = ["AttentionMonitorCallback"]

_SCOPE = "train/"  # what the Trainer's TensorBoard callback puts before a key


class AttentionMonitorCallback(TrainerCallback):
    """Monitors the attention heads of a model while `transformers.Trainer` trains it.

    What `attnmon.AttentionMonitor` does under Lightning: on each sampled optimizer step the query and key of every
    attention module are read as the first batch of the step passes through ``Trainer.compute_loss``; on all other steps
    nothing is attached to the model, and training keeps its bits. The figures go through ``Trainer.log``, and so to
    whatever ``report_to`` names and to ``trainer.state.log_history``, under the keys that `AttentionMonitor` lists;
    the callbacks put their ``train/`` before these. A subclass's own ``log`` is passed over: it may add metrics that it
    gathers between two logs, which its next one would then lack. So are progress bars and printers of the Trainer: they
    would print some hundred numbers per sample. With ``report_to="tensorboard"`` its writer also gets images, warnings
    as text, the data of the "Attention" tab and an arranged "Custom Scalars" page.

    Steps are numbered as under Lightning: step 0 is the first, and a sample stands at the step whose update its
    parameters have not had. The Trainer logs the loss of that step one further, when it is complete.

    Checkpoints hold the monitor's memory in ``trainer_state.json``, so that a resumed run samples, numbers and warns as
    the unbroken one.

    Args:
        every_n_steps: Optimizer steps between two samples; this and the following as for `attnmon.AttentionMonitor`.
        source: ``"train"`` reads the training batch as it passes, ``"probe"`` runs a fixed batch before each sampled
            step, in eval mode under ``no_grad``.
        rows: Query positions looked at per sequence, stratified over position, or ``"all"``.
        sequences: Most sequences of a batch that are looked at, drawn at random.
        tokens: ``"valid"`` or ``"labelled"``.
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
        strict: Raise errors of the monitor itself, instead of one warning and a run that goes on without it.
        seed: Of the draws of sequences and rows.
        max_overhead: Most of the run's time that the monitor may take, e.g. 0.01. None: no limit.
        actions: What is done about an alert, by severity: ``"log"``, ``"warn"``, ``"stop"`` (the Trainer ends after the
            step) or ``"raise"``.
        on_alert: Called with each alert and each recovery.
        keep_batches: Folder into which the batch that raised an alert is saved.
        baselines: What another run has learned of each head: the file that its `save_baselines` wrote.
        prefix: First part of each key. Two monitors of one Trainer need different ones.
        per_head: Logs a scalar per head beside the mean per layer. Where ``report_to`` names MLflow their keys are
            ``.../layer_03_head_07``.
        images: Draws the layer x head images for TensorBoard.
        layout: Arranges TensorBoard's "Custom Scalars" page; False if the run has a layout of its own.
        probe: With ``source="probe"``, a batch as the model takes it. None: the first one of the Trainer's
            ``eval_dataset``.

    Attributes:
        latest: The newest `attnmon.Snapshot`, None before the first.

    Raises:
        ValueError: An argument is out of range (here), or the model has no attention that can be found (when training
            begins).

    Example:
        >>> monitor = AttentionMonitorCallback(every_n_steps=100, top_n=(5, 10))
        >>> monitor.latest is None  # then: Trainer(model, args, train_dataset=..., callbacks=[monitor]).train()
        True
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        source: Literal["train", "probe"] = "train",
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
        prefix: str = "attn",
        per_head: bool = False,
        images: bool = True,
        layout: bool = True,
        probe: Any = None,
    ) -> None:
        check_prefix(prefix)
        if prefix.startswith(("eval_", "test_")):
            raise ValueError(
                f"Expected `prefix` not to begin with 'eval_' or 'test_', but got {prefix!r}: the Trainer's loggers "
                "would file the keys under evaluation. Choose e.g. 'attn'."
            )
        for name, flag in (("per_head", per_head), ("images", images), ("layout", layout)):
            check_flag(name, flag)
        self._options = MonitorOptions(
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
        self.prefix = prefix
        self.per_head = per_head
        self.images = images
        self.layout = layout
        self.probe = probe
        self._monitor = Monitor(self._options)
        self._trainer: Trainer | None = None
        self._batch: Any = None  # the probe's, on its device
        self._looks_twice = True
        self._known: dict[str, Any] = {}  # of the sampled step
        self._stops = False
        self._let_the_norm_be: Callable[[], None] = _nothing
        self._stop_listening: Callable[[], None] = _nothing
        self._heard: Callable[[], bool] = _heard_all
        self._board: tuple[Any, Board] | None = None  # the writer it is for, and what writes through it

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

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle leaves the Trainer, and what is open, behind.
        return {
            **self.__dict__,
            "_trainer": None,
            "_batch": None,
            "_known": {},
            "_let_the_norm_be": _nothing,
            "_board": None,
            "_stop_listening": _nothing,
            "_heard": _heard_all,
        }

    # -- events of the Trainer ----------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finds the model's attention, and takes up what a checkpoint holds."""
        self._release()
        trainer = self._trainer = _calling_trainer(self)
        monitors = [c for c in trainer.callback_handler.callbacks if isinstance(c, AttentionMonitorCallback)]
        if sum(monitor.prefix == self.prefix for monitor in monitors) > 1:
            raise ValueError(
                f"Expected each AttentionMonitorCallback of a Trainer to have a `prefix` of its own, but two have "
                f"{self.prefix!r}: their figures would stand under the same keys. Pass e.g. prefix='attn_2'."
            )
        self._monitor = Monitor(self._options)
        kept: Any = state.stateful_callbacks
        if self._key in kept:
            self._monitor.load_state_dict(kept[self._key])
        self._monitor.bind(_watched(trainer))
        self._monitor.meter.start()
        self._looks_twice = True
        if self._options.source == "probe":
            self._batch = self._find_probe(trainer)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """On a sampled step: sees to it that its first batch is read, or runs the probe."""
        step = state.global_step
        if self._trainer is None:  # added in mid-training
            self.on_train_begin(args, state, control, **kwargs)
        if self._trainer is None or not self._monitor.due(step):
            return
        if self._options.source == "probe":
            probe = self._pass(self._trainer, _watched(self._trainer), self._batch)
            self._known = {"batch": self._batch}
            self._report(self._trainer, self._monitor.sample(step, "probe", probe))
        elif not self._monitor.blind:
            self._listen(self._trainer, step)
            self._hear_the_norm(self._trainer)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Logs the sample, while the Trainer's step count is still that of this step."""
        if not self._heard():  # the step went past `compute_loss`
            self._monitor.open(state.global_step)  # and `close` says that nothing was seen
        self._stop_listening()
        self._let_the_norm_be()
        if self._trainer is not None and self._monitor.is_open:
            self._report(self._trainer, self._monitor.close(state.global_step))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the run where an alert has asked for it: earlier, the Trainer would end in the middle of the step."""
        if self._stops:
            self._stops = False
            control.should_training_stop = True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the norm of a sampled step's gradients, where the Trainer has not; an alert has it read."""
        if self._trainer is None or not self._monitor.is_open or "grad_norm" in self._known:
            return

        def take() -> None:
            sharded = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
            self._known["grad_norm"] = None if sharded else gradient_norm(list(model.parameters()))

        model = _watched(self._trainer)
        with self._monitor.meter.running():
            self._monitor.attempt("the gradients' norm", take)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Lets go of model and Trainer."""
        self._release()

    # -- one sampled step ---------------------------------------------------------------------------------------

    def _listen(self, trainer: Trainer, step: int) -> None:
        """Has the next call of ``compute_loss`` read.

        The Trainer tells its callbacks of no error. So nothing is attached to the model before that call, and all is
        taken off again when it ends, in whatever way.
        """
        own = vars(trainer).get("compute_loss")
        compute_loss = trainer.compute_loss
        listening = True

        def stop() -> None:
            nonlocal listening
            listening = False  # where another has put itself around this one, it stays, and only passes on
            if vars(trainer).get("compute_loss") is read:
                vars(trainer).pop("compute_loss")
                vars(trainer).update({} if own is None else {"compute_loss": own})

        def read(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # An evaluation or a teacher may come first; after an error, it may be a call outside of training.
            if not (listening and torch.is_grad_enabled() and _is_trained(trainer, model)):
                return compute_loss(model, inputs, *args, **kwargs)
            stop()
            batch = dict(inputs) if isinstance(inputs, Mapping) else inputs  # compute_loss may take the labels out
            window = self._monitor.open(step)
            try:
                if window is not None:
                    window.set_tokens(*tokens_of(batch))
                result = compute_loss(model, inputs, *args, **kwargs)
            except BaseException:
                self._monitor.abort()
                raise
            self._monitor.detach()
            loss: Any = result[0] if isinstance(result, tuple) else result
            if trainer.args.gradient_accumulation_steps > 1:  # one of several parts, however these are weighed
                loss = None
            kept = batch if self._options.keep_batches is not None else None
            self._known |= {"loss": loss.detach() if isinstance(loss, torch.Tensor) else loss, "batch": kept}
            if self._looks_twice and self._monitor.sees_nothing and anything_compiled():
                self._monitor.read(step, "train", self._pass(trainer, model, batch, certain=False))
                self._looks_twice = not self._monitor.sees_nothing  # if this sees nothing either it was something else
            return result

        vars(trainer)["compute_loss"] = read
        self._stop_listening = stop
        self._heard = lambda: not listening

    def _hear_the_norm(self, trainer: Trainer) -> None:
        """Takes up the norm of the gradients that the next clipping finds, which is that before it."""
        self._known = {}
        accelerator = trainer.accelerator
        own = vars(accelerator).get("clip_grad_norm_")
        clip = accelerator.clip_grad_norm_

        def stop() -> None:
            if vars(accelerator).get("clip_grad_norm_") is read:
                vars(accelerator).pop("clip_grad_norm_")
                vars(accelerator).update({} if own is None else {"clip_grad_norm_": own})

        def read(*args: Any, **kwargs: Any) -> Any:
            stop()
            norm = clip(*args, **kwargs)
            self._known["grad_norm"] = norm.detach().clone() if isinstance(norm, torch.Tensor) else norm
            return norm

        vars(accelerator)["clip_grad_norm_"] = read
        self._let_the_norm_be = stop

    def _pass(
        self, trainer: Trainer, model: nn.Module, batch: Any, *, certain: bool = True
    ) -> Callable[[Window], None]:
        """What runs the model by itself: on the probe, or, not `certain` to succeed, on a batch that showed nothing."""

        def run(window: Window) -> None:
            part = batch if certain else take_sequences(batch, window.sampler.select)[0]
            window.set_tokens(*tokens_of(part))
            try:
                with undisturbed(model), trainer.compute_loss_context_manager():
                    call_model(model, part)
            except Exception:
                if certain:
                    raise

        return run

    def _find_probe(self, trainer: Trainer) -> Any:
        batch = self.probe
        if batch is None:
            if trainer.eval_dataset is None:
                raise ValueError(
                    "Expected the Trainer to have an `eval_dataset` for source='probe', but got none. Pass one, or a "
                    "batch as `probe`, or use source='train'."
                )
            with undisturbed(_watched(trainer)):
                batch = _first_batch(trainer)
        return to_device(batch, trainer.args.device)

    # -- what is found ------------------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        """Where the Trainer's state keeps the monitor's, which is the user's object in a resumed run, too.

        `transformers.trainer_callback.ExportableState` would have the Trainer make a new callback from plain JSON, or,
        by default, restore nothing.
        """
        return f"attnmon/{self.prefix}"

    def _report(self, trainer: Trainer, snapshot: Snapshot | None) -> None:
        known, self._known = self._known, {}
        snapshot = self._monitor.note(snapshot, learning_rate=largest_rate(trainer.optimizer), **known)
        kept: Any = trainer.state.stateful_callbacks
        kept[self._key] = self._monitor.state_dict()
        if snapshot is None:
            return
        self._write(trainer, snapshot)
        self._stops |= self._monitor.act(snapshot)

    def _write(self, trainer: Trainer, snapshot: Snapshot) -> None:
        with self._monitor.writing():
            scalars = snapshot.scalars(per_head=self.per_head, prefix=self.prefix)
            handler = trainer.callback_handler
            kinds = {kind.__name__ for callback in handler.callbacks for kind in type(callback).__mro__}
            if "MLflowCallback" in kinds:
                scalars = flat_heads(scalars)
            board = self._find_board(trainer)
            if board is not None:
                scalars = board.counted(scalars, snapshot.step)

            self._monitor.attempt("the Trainer's log", lambda: self._pass_on(trainer, scalars))
            if board is not None:
                images = self.images and worth_pictures(snapshot, self._options.every_n_steps)
                self._monitor.attempt(
                    "the TensorBoard writer", lambda: board.write(snapshot, prefix=self.prefix, images=images)
                )

    def _pass_on(self, trainer: Trainer, scalars: dict[str, float]) -> None:
        """To the Trainer's history and to each of its callbacks by itself, so that none that fails harms the others.

        By the Trainer's own ``log`` and not that of its class: one of these may add figures that it gathers between two
        logs, and would find them gone at the next.
        """
        handler, control = trainer.callback_handler, trainer.control
        should_log = control.should_log
        callbacks = handler.callbacks
        try:
            handler.callbacks = []
            Trainer.log(trainer, scalars)
            for callback in callbacks:
                if isinstance(callback, ProgressCallback | PrinterCallback):  # it would print some hundred numbers
                    continue
                handler.callbacks = [callback]
                self._monitor.attempt(
                    f"callback {type(callback).__name__}",
                    lambda: handler.on_log(trainer.args, trainer.state, trainer.control, dict(scalars)),
                )
        finally:
            handler.callbacks = callbacks
            control.should_log = should_log  # that a log has come is no word on the one that was asked for

    def _find_board(self, trainer: Trainer) -> Board | None:
        """The run's TensorBoard, if it has one: the writer of the Trainer's own callback, in the first process."""
        writers = [getattr(callback, "tb_writer", None) for callback in trainer.callback_handler.callbacks]
        writer = next((writer for writer in writers if writer is not None), None)
        if writer is None:
            return None
        if self._board is None or self._board[0] is not writer:
            layout = self._arrange(trainer)
            self._board = writer, make_board(writer, self._options, prefix=self.prefix, scope=_SCOPE, layout=layout)
        return self._board[1]

    def _arrange(self, trainer: Trainer) -> dict[str, Any] | None:
        """The "Custom Scalars" page, for the first monitor to write."""
        monitors = [c for c in trainer.callback_handler.callbacks if isinstance(c, AttentionMonitorCallback)]
        if monitors[0] is not self or not self.layout:
            return None
        return arrange(((monitor.prefix, monitor._options) for monitor in monitors), scope=_SCOPE)

    def _release(self) -> None:
        self._stop_listening()
        self._let_the_norm_be()
        self._heard = _heard_all
        self._stops = False
        self._monitor.unbind()
        self._trainer = self._batch = self._board = None


def _nothing() -> None:
    pass


def _heard_all() -> bool:
    return True


def _is_trained(trainer: Trainer, model: nn.Module) -> bool:
    """Whether it is the Trainer's model, however it is wrapped: the first parameter is the same."""
    ours: nn.Module | None = trainer.model
    return ours is None or next(model.parameters(), None) is next(ours.parameters(), None)


def _calling_trainer(callback: TrainerCallback) -> Trainer:
    """The Trainer that sends an event. It hands its callbacks no reference to itself, but it is what called them."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    raise RuntimeError(
        f"Expected {type(callback).__name__} to be called by the transformers.Trainer that it is a callback of, but "
        "there is none. Use attnmon.watch in a loop of your own."
    )


def _watched(trainer: Trainer) -> nn.Module:
    """The model; where it is compiled, as it is called, since what is put inside would have it compiled anew."""
    model: nn.Module | None = trainer.model_wrapped if hasattr(trainer.model_wrapped, "_orig_mod") else trainer.model
    if model is None:
        raise RuntimeError("Expected the Trainer to have a model by now, but it has none.")
    return model


def _first_batch(trainer: Trainer) -> Any:
    """The first evaluation batch of this process, past the Trainer's loader, which keeps count of who iterates it."""
    chosen = next(iter(trainer.eval_dataset)) if isinstance(trainer.eval_dataset, dict) else None
    loader: DataLoader[Any] = trainer.get_eval_dataloader(chosen)
    dataset, size = loader.dataset, trainer.args.eval_batch_size
    rank, world = trainer.args.process_index, trainer.args.world_size
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        entries = [dataset[index % len(dataset)] for index in islice(range(rank, world * size, world), size)]
    else:
        entries = list(islice(iter(dataset), rank, world * size, world))
    return loader.collate_fn(entries)
