"""The monitor as a Lightning callback: hooks, loggers, checkpoints. The only module that imports Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from attnmon.alerts import Alert, AlertRules
from attnmon.capture import anything_compiled, is_compiled_function
from attnmon.events import SampledStep, gradient_norm, largest_rate
from attnmon.loggers import Sink, arrange, make_sink
from attnmon.monitor import Monitor
from attnmon.options import MonitorOptions, check_flag, check_prefix, check_state
from attnmon.probe import call_model, tokens_of
from attnmon.rerun import take_sequences, undisturbed
from attnmon.snapshot import Snapshot
from attnmon.tensorboard import worth_pictures
from attnmon.window import Window

__all__ = ["AttentionMonitor"]


class AttentionMonitor(pl.Callback):
    """Monitors the attention heads of a model while Lightning trains it.

    On each sampled optimizer step the query and key of every attention module are read as the training batch passes;
    figures of a sample of rows go to every logger of the Trainer, and heads that saturate, collapse or overflow raise
    an `AttentionSaturationWarning`. On all other steps nothing is attached to the model.

    Logged keys (``layer_03`` is the fourth attention module in call order; ``prefix`` replaces ``attn``):

    ====================================== ====================== ===============================================
    key                                    unit                   what
    ====================================== ====================== ===============================================
    ``attn/entropy/layer_03``              nats                   entropy of the weights, mean over heads and rows
    ``attn/entropy/normalized/...``        H / log n, 0 to 1      the same, comparable between lengths
    ``attn/entropy/effective_keys/...``    keys                   exp(H)
    ``attn/entropy/active_share/...``      share of the context   exp(H) / n, rows with n >= 64 (with ``alerts``)
    ``attn/separability/top_10/...``       share, 0 to 1          Ns/N: selected keys that can be told apart
    ``attn/distance/top_10/...``           vector norm            distance of the rest from the selected sum
    ``attn/distance/expected_top_10/...``  vector norm            the same, expected for a random set (as printed)
    ``attn/jacobian/temperature_1.0/...``  1 / raw score          spectral norm of the softmax Jacobian
    ``attn/logits/spread/...``             1                      standard deviation of the scaled scores of a row
    ``attn/logits/max/...``                1                      largest absolute scaled score of a row
    ``attn/logits/first_key_weight/...``   weight, 0 to 1         weight of the first visible key (attention sink)
    ``attn/warnings/<rule>``               heads                  heads under alarm; as text: the message
    ``attn/monitor/seconds``               seconds                time of the sample (see `attnmon.cost.Cost`)
    ``attn/monitor/share_of_step``         share                  the same over the rest of its step
    ``attn/monitor/share_of_run``          share                  time of all samples over that of the run
    ``attn/monitor/every_n_steps``         steps                  until the next sample
    ``attn/monitor/bytes_written``         bytes                  in TensorBoard's event files so far
    ====================================== ====================== ===============================================

    With ``per_head=True`` each key is also logged per head (``.../layer_03/head_07``). Every logger of the Trainer gets
    the scalars. Beside them go

    - to TensorBoard: the data of the "Attention" tab, an arranged "Custom Scalars" page, and the messages as text;
    - to Weights & Biases: the messages by its alert call, at most one per rule in five minutes;
    - to MLflow: the messages as Markdown artifacts (its keys per head are ``.../layer_03_head_07``: a store of files
      has no room for a key below another);
    - to all three: one layer x head image per quantity, at the first ten samples, then at ever fewer
      (`attnmon.schedule.picture_due`), and wherever there is an alert.

    A sample of 12 layers x 12 heads writes about 280 scalars (20 KB) and the tab's data (14 KB, each head's figures);
    images are about 12 KB each.

    Compiled training: parts of the module that `torch.compile` has been applied to, and training steps that are
    compiled as a whole, show nothing of their attention. The sequences looked at are then run a second time, as the
    model was written: uncompiled, in eval mode (so without dropout), under ``no_grad``. What such a pass changes is put
    back as far as it can be known (see `attnmon.rerun.undisturbed`). The training step stays compiled and keeps its
    bits. On a sampled step that costs one such forward pass, of at most ``sequences`` sequences where it is clear what
    these are, else of all; on all others nothing.

    A module that attends more than once in a step is one layer, and the rows of all its calls count; of a layer that
    runs both with and without gradients in a step, those with. A learned attention sink counts as one more key, with a
    zero vector and the sink's logit as its bias.

    Args:
        every_n_steps: Optimizer steps between two samples, counted as ``pl_module.log`` counts them (with manual
            optimization: batches); step 0 is sampled, and under gradient accumulation the first batch of a step.
        source: ``"train"`` reads the training batch as it passes, no extra forward; ``"probe"`` runs a fixed
            validation batch before each sampled step, in eval mode under ``no_grad``, so that figures of different
            steps compare like with like. It costs one such forward.
        rows: Query positions looked at per sequence, stratified over position, or ``"all"``. Every valid position is
            equally likely to be drawn, so the mean over rows is an unbiased estimate of that over all of them; its
            standard error (``snapshot.errors``) falls with the square root of the number of rows, or faster. With
            ``"all"``, and no other ``quantities`` than entropy (in all its forms), first-key weight and largest
            score, and ``alerts=False``, every row is measured in one pass and in memory linear in the length; all
            else is done in chunks of at most 32 MiB of float32 scores and a few times that beside. On a CPU, rows of
            several layers wait for each other where they are few: up to 100 MB.
        sequences: Most sequences of a batch that are looked at, drawn at random. How far they differ from each other
            is an error of its own, which falls with the square root of their number, is 0 where all are looked at,
            and is not part of ``snapshot.errors``. Where they differ in length the mean over some is a ratio
            estimate, with a small bias.
        tokens: ``"valid"`` looks at all tokens that are not padding; ``"labelled"`` at those whose label is not -100.
        top_n: Sizes N of the selected set, for separability and distance.
        temperatures: Temperatures of the Jacobian norms as multiples of the model's own; 1.0 is always measured.
        epsilons: Perturbation sizes of the finite-difference sensitivity (measured on request).
        vectors: What the keys carry: the head's ``"value"`` vectors, the ``"hidden"`` input of the attention module,
            or the token ``"embedding"``.
        normalize_vectors: Whether these are L2-normalised. None: embeddings are, the others are not.
        quantities: What is measured: names, ``"default"``, ``"all"``; see `attnmon.quantities`. None: the default.
        layers: Layers to measure: numbers, or module paths with ``*`` as wildcard. None: all.
        alerts: Whether the rules judge each sample.
        rules: The rules and their numbers; None: `attnmon.alerts.AlertRules()`.
        patience: Samples in a row that a change has to last before a warning.
        strict: Raise errors of the monitor itself, instead of one warning and a run that goes on without it.
        seed: Of the draws of sequences and rows, which leave every global random state alone.
        max_overhead: Most of the run's time that the monitor may take, e.g. 0.01. Where ``every_n_steps`` would take
            more it samples less often, at multiples of that, and says so. The first sample comes in any case. None: no
            limit.
        actions: What is done about an alert beside logging it, by severity: ``"log"`` (nothing more), ``"warn"`` (a
            Python warning), ``"stop"`` (also ends the run after its step, as ``Trainer.should_stop`` does) or
            ``"raise"`` (`attnmon.alerts.AttentionAlertError`, after everything has been written). What is not named
            keeps its default: ``{"watch": "log", "warn": "warn", "critical": "warn"}``.
        on_alert: Called with each `attnmon.alerts.Alert`, and with each recovery, in the first process, once it has
            been written. An error in it costs one warning.
        keep_batches: Folder into which the batch that raised an alert (of level warn or above) is saved, for a replay:
            ``torch.load(".../step_000120.pt")["batch"]``, with arrays as tensors and dataclasses as mappings (objects
            of other classes want ``weights_only=False``). A file that is there is left alone, and the next is
            ``step_000120_2.pt``. None: none is kept.
        baselines: What another run has learned of each head: the file that its `save_baselines` wrote. Heads that it
            knows are judged from their first sample on.
        prefix: First part of each key. Two monitors of one Trainer need different ones.
        per_head: Logs a scalar per head beside the mean per layer.
        images: Draws the layer x head images for TensorBoard.
        layout: Arranges TensorBoard's "Custom Scalars" page; False if the run has a layout of its own.
        validation_batches: How many batches of each validation are looked at; logged once per validation under
            ``<prefix>_val/``. 0: none.

    Attributes:
        latest: The newest `Snapshot` of the source, None before the first.
        latest_validation: The newest one of a validation.

    Raises:
        ValueError: An argument is out of range (here), or the model has no attention that can be found (in `setup`).
        MisconfigurationException: The Trainer lacks what the arguments need (in `setup` or at the first sample).

    Example:
        >>> from attnmon import AttentionMonitor
        >>> monitor = AttentionMonitor(every_n_steps=100, top_n=(5, 10))
        >>> monitor.latest is None
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
        validation_batches: int = 0,
    ) -> None:
        check_prefix(prefix)
        if isinstance(validation_batches, bool) or not isinstance(validation_batches, int) or validation_batches < 0:
            raise ValueError(
                f"Expected `validation_batches` to be a whole number >= 0, but got {validation_batches!r}."
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
        self.validation_batches = validation_batches
        self.latest_validation: Snapshot | None = None
        self._monitor = Monitor(self._options)
        self._restored = False
        self._step = 0  # batches that stepped, as pl_module.log counts them
        self._stepped = False  # whether the batch that ended last did
        self._sampled_step: int | None = None
        self._probe_batch: Any = None
        self._batch: Any = None  # of the sampled step, until its backward pass begins
        self._sampled = SampledStep()
        self._compiled_step: bool | None = None  # whether a function around the model is compiled; None: not known
        self._looks_twice = True
        self._sinks: dict[int, Sink] = {}  # id of a logger -> what passes samples on to it
        self._validates = validation_batches

    @property
    def latest(self) -> Snapshot | None:
        """The newest Snapshot of the source, None before the first."""
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

    @property
    def state_key(self) -> str:
        """Two monitors of one Trainer keep their state apart by their prefix; a new cadence keeps the old state."""
        return self._generate_state_key(prefix=self.prefix)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to sample, number, warn and log as the unbroken one."""
        return {"step": self._next_step(), "monitor": self._monitor.state_dict(self._sampled.held)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        check_state(state_dict, "step", "monitor")
        self._step, self._stepped = state_dict["step"], False
        self._monitor.load_state_dict(state_dict["monitor"])
        self._restored = True

    def __getstate__(self) -> dict[str, Any]:
        # Lightning binds `log` and `log_dict` of the module to a callback: a copy or a pickle leaves the module behind.
        empty: dict[str, Any] = {
            "_probe_batch": None,
            "_batch": None,
            "_sampled": SampledStep(),
            "_sinks": {},
        }
        left = {"log", "log_dict", *empty}
        return {**empty, **{k: v for k, v in self.__dict__.items() if k not in left}}

    def _next_step(self) -> int:
        return self._step + self._stepped

    # -- set-up and end -----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds the model's attention, or says what was looked for and what was found."""
        if stage not in ("fit", "validate"):
            return
        self._sinks = {}
        if stage == "fit" and not self._restored and trainer.global_step == 0:
            self._monitor = Monitor(self._options)  # a new run: nothing is left of an earlier one
            self._sampled_step = None
        try:
            self._monitor.bind(pl_module)
        except ValueError:
            # A model that `configure_model` makes is not there yet: on_train_start looks again.
            if type(pl_module).configure_model is pl.LightningModule.configure_model:
                raise

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up the step count of the run."""
        self._monitor.bind(pl_module)
        self._monitor.meter.start()
        self._compiled_step, self._looks_twice = None, True
        if not self._restored:
            optimizers = max(1, len(trainer.optimizers))
            self._step, self._stepped = trainer.global_step // optimizers, False
        self._restored = False
        self._validates = self.validation_batches
        if self.validation_batches and trainer.world_size > 1:
            # A process without validation data gets no hook, and the others would wait for it.
            mine = bool(trainer.num_val_batches) and trainer.num_val_batches[0] > 0
            if not trainer.strategy.reduce_boolean_decision(mine):
                self._validates = 0
                rank_zero_warn(
                    "attnmon does not look at validation batches in this run: a process has none. Give every process "
                    "some, or leave validation_batches at 0.",
                    category=UserWarning,
                )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the model as it was found, and writes what was held: Lightning calls no teardown after an error."""
        self._monitor.unbind()
        held, known = self._sampled.release()
        snapshot = self._monitor.note(held, batch=known["batch"])
        self._log(trainer, snapshot, self.prefix)
        self._monitor.tell(snapshot)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes what was held for a step that was not finished."""
        if self._sampled.held is not None:
            self._release_held(trainer, pl_module, None)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leaves the model as it was found."""
        self._monitor.unbind()
        self._probe_batch = None

    # -- training -----------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Attaches for the first batch of a sampled optimizer step, or runs the probe."""
        self._step, self._stepped = self._next_step(), False
        if self._step == self._sampled_step or not self._monitor.due(self._step):
            return
        self._sampled_step = self._step
        self._sampled = SampledStep(rate=largest_rate(*trainer.optimizers))
        if self._options.source == "probe":
            snapshot = self._monitor.sample(self._step, "probe", self._prepare_probe(trainer, pl_module))
            self._hold(trainer, snapshot, self._probe_batch)
            return
        if self._compiled_step is None:
            self._compiled_step = is_compiled_function(pl_module.training_step)
        # a step may take things out of it
        self._sampled.batch = copy.copy(batch) if self._options.keep_batches is not None else None
        if self._compiled_step:
            self._monitor.read(self._step, "train", self._second_pass(trainer, pl_module, batch))
            return
        if self._monitor.blind:
            return
        window = self._monitor.open(self._step)
        if window is not None:
            window.set_tokens(*tokens_of(batch))
            self._batch = batch if self._looks_twice else None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Reads the batch by a pass of its own where the training step showed nothing: it ran inside compiled code."""
        batch, self._batch = self._batch, None
        if pl_module.automatic_optimization:
            self._monitor.detach()  # all that is read of the step has run: the rest of it runs as it always does
        if batch is None or not self._monitor.sees_nothing or not anything_compiled():
            return
        self._monitor.read(self._step, "train", self._second_pass(trainer, pl_module, batch, certain=False))
        self._compiled_step = not self._monitor.sees_nothing  # if this sees nothing either it was something else
        self._looks_twice = self._compiled_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Detaches and logs, at the step that ``pl_module.log`` uses for this batch."""
        self._batch = None
        if self._monitor.is_open:
            self._hold(trainer, self._monitor.close(self._step), self._sampled.batch)
        # The step count moves on when the next batch starts: a validation in between belongs to this step.
        self._stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if self._sampled.held is not None and self._stepped:
            self._release_held(trainer, pl_module, outputs)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Takes the norm of a sampled step's gradients before they are clipped; an alert has it read."""
        sampled = self._sampled
        if not (self._monitor.is_open or sampled.held is not None) or not self._options.alerts:
            return
        rate = largest_rate(*trainer.optimizers)
        sampled.rates += [] if rate is None else [rate]
        if isinstance(trainer.strategy.model, FullyShardedDataParallel):  # this process has a part of them
            return

        def take() -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            sampled.norms[id(optimizer)] = gradient_norm(parameters)

        with self._monitor.meter.running():
            self._monitor.attempt("the gradients' norm", take)

    def _hold(self, trainer: pl.Trainer, snapshot: Snapshot | None, looked_at: Any) -> None:
        """Writes a sample; one with alerts, once what is known of its step is complete."""
        if snapshot is not None and (snapshot.alerts or snapshot.recoveries):
            self._sampled.held, self._sampled.batch = snapshot, looked_at
        else:
            self._sampled.batch = None
            self._log(trainer, self._monitor.note(snapshot, learning_rate=self._sampled.rate), self.prefix)

    def _release_held(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any) -> None:
        held, known = self._sampled.release()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
        snapshot = self._monitor.note(held, loss=loss, **known)
        self._log(trainer, snapshot, self.prefix)
        if self._monitor.act(snapshot):
            trainer.should_stop = True

    # -- validation ---------------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Attaches for the first batches of a validation."""
        if trainer.sanity_checking or dataloader_idx > 0 or batch_idx >= self._validates:
            return
        if self._monitor.failed:
            return
        if batch_idx == 0:
            self._monitor.open(self._step, "validation")

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Detaches after the last of them."""
        if dataloader_idx == 0 and batch_idx + 1 >= self._validates:
            self._monitor.detach()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs once per validation."""
        if self._monitor.is_open and not trainer.sanity_checking:
            snapshot = self._monitor.close(self._step, "validation")
            if snapshot is not None:
                self.latest_validation = snapshot
            self._log(trainer, snapshot, f"{self.prefix}_val")

    # -- passes of its own ---------------------------------------------------------------------------------------

    def run_probe(self, pl_module: pl.LightningModule, batch: Any) -> None:
        """Runs the model on a batch: the probe's, or that of a training step which is compiled as a whole.

        Override it where the model takes its batches in a way of its own. Called with the batch on the module's
        device, in eval mode, under ``no_grad`` and the Trainer's precision. As it stands it calls the module's
        ``forward``, or its only child if it has none.
        """
        call_model(_probe_target(pl_module), batch)

    def _second_pass(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *, certain: bool = True
    ) -> Callable[[Window], None]:
        """What runs the model on the sequences looked at; with `certain`, a failure is one of the monitor."""

        def run(window: Window) -> None:
            part = take_sequences(batch, window.sampler.select)[0]
            window.set_tokens(*tokens_of(part))
            try:
                with undisturbed(pl_module), trainer.precision_plugin.forward_context():
                    self._run(trainer, pl_module, part)
            except Exception as error:
                if not certain:  # that nothing was seen may have had another reason
                    return
                raise RuntimeError(
                    "attnmon has to run the model on the training batch by itself, because the training step is "
                    "compiled, and that failed. Override AttentionMonitor.run_probe(pl_module, batch) to say how, or "
                    "use source='probe'."
                ) from error

        return run

    def _prepare_probe(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Callable[[Window], None]:
        if self._probe_batch is None:
            with undisturbed(pl_module):
                batch = _first_validation_batch(trainer, pl_module)
            if batch is None:
                raise MisconfigurationException(
                    "Expected the Trainer to have validation data for source='probe', but got none. Pass a "
                    "validation dataloader, or use source='train'."
                )
            if type(self).run_probe is AttentionMonitor.run_probe:
                _probe_target(pl_module)
            self._probe_batch = trainer.strategy.batch_to_device(batch, pl_module.device)

        def run(_: Window) -> None:
            with undisturbed(pl_module), trainer.precision_plugin.forward_context():
                self._run(trainer, pl_module, self._probe_batch)

        return run

    def _run(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        """`run_probe`, through the wrapper that gathers a sharded module's parameters, as the Trainer's steps go."""
        wrapper = trainer.strategy.model
        if not isinstance(wrapper, FullyShardedDataParallel):
            self.run_probe(pl_module, batch)
            return
        own = vars(pl_module).get("forward")

        def restore() -> None:
            if own is None:
                vars(pl_module).pop("forward", None)
            else:
                vars(pl_module)["forward"] = own

        def forward(batch: Any) -> None:
            restore()
            self.run_probe(pl_module, batch)

        vars(pl_module)["forward"] = forward
        try:
            wrapper(batch)
        finally:
            restore()

    # -- loggers ------------------------------------------------------------------------------------------------

    def _log(self, trainer: pl.Trainer, snapshot: Snapshot | None, prefix: str) -> None:
        if snapshot is None or not trainer.is_global_zero:
            return
        with self._monitor.writing():
            scalars = snapshot.scalars(per_head=self.per_head, prefix=prefix)
            due = snapshot.source == "validation" or worth_pictures(snapshot, self._options.every_n_steps)
            for place, logger in enumerate(trainer.loggers):

                def write(logger: Logger = logger) -> None:
                    sink = self._sink(trainer, logger)
                    sink.write(snapshot, scalars, prefix=prefix, images=self.images and due)

                which = f" ({place + 1} of {len(trainer.loggers)})" if len(trainer.loggers) > 1 else ""
                self._monitor.attempt(f"logger {type(logger).__name__}{which}", write)

    def _sink(self, trainer: pl.Trainer, logger: Logger) -> Sink:
        if id(logger) not in self._sinks:
            layout = self._arrange(trainer)
            self._sinks[id(logger)] = make_sink(logger, self._options, prefix=self.prefix, layout=layout)
        return self._sinks[id(logger)]

    def _arrange(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """The "Custom Scalars" page, for the first monitor to write."""
        monitors = [c for c in trainer.callbacks if isinstance(c, AttentionMonitor)]  # type: ignore[attr-defined]
        if monitors[0] is not self or not self.layout:
            return None
        return arrange(
            (prefix, monitor._options)
            for monitor in monitors
            for prefix in (monitor.prefix, f"{monitor.prefix}_val")[: 1 + bool(monitor.validation_batches)]
        )


def _probe_target(pl_module: pl.LightningModule) -> nn.Module:
    if type(pl_module).forward is not pl.LightningModule.forward:
        return pl_module
    children = [child for child in pl_module.children() if next(child.parameters(), None) is not None]
    if len(children) != 1:
        raise MisconfigurationException(
            "Expected the LightningModule to have a forward, or one child module to run instead, for source='probe', "
            f"but {type(pl_module).__name__} has no forward and {len(children)} children with parameters. Define "
            "forward, or override AttentionMonitor.run_probe."
        )
    return children[0]


def _first_validation_batch(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
    loaders = trainer.val_dataloaders
    if loaders is None:  # validation was not set up yet
        for owner in (getattr(trainer, "datamodule", None), pl_module):
            if owner is not None and is_overridden("val_dataloader", owner):
                loaders = owner.val_dataloader()
                break
    while isinstance(loaders, list | tuple | Mapping) and len(loaders):
        loaders = next(iter(loaders.values() if isinstance(loaders, Mapping) else loaders))
    return None if loaders is None else next(iter(loaders), None)
