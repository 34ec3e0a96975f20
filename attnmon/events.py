"""What becomes of alerts: the state of training beside them, the history, the batch for a replay, the actions."""

from __future__ import annotations

import dataclasses
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attnmon.alerts import Alert, AttentionAlertError, AttentionSaturationWarning
from attnmon.alerts.base import SEVERITIES
from attnmon.options import MonitorOptions
from attnmon.ranks import rank
from attnmon.snapshot import Snapshot

__all__ = ["Events", "SampledStep", "gradient_norm", "largest_rate"]

_KEPT = 1000  # newest alerts in the history
_RATES = 11  # newest samples whose learning rate is known
_CHANGE = 2.0  # factor of a learning rate that is worth a word beside an alert

Attempt = Callable[[str, Callable[[], object]], None]


class Events:
    """The alerts of a run.

    Args:
        options: Of the monitor.
        attempt: Runs what may fail without harm to the run, see `attnmon.monitor.Monitor.attempt`.

    Attributes:
        history: Alerts and recoveries so far, the newest thousand.
    """

    def __init__(self, options: MonitorOptions, attempt: Attempt) -> None:
        self.history: list[Alert] = []
        self._actions = options.action_of()
        self._on_alert = options.on_alert
        self._folder = options.keep_batches
        self._attempt = attempt
        self._rates: list[tuple[int, float]] = []  # step and learning rate of the newest samples
        self._pending: tuple[int, Any, tuple[Alert, ...]] | None = None  # step, batch and alerts that are to be kept

    def note(
        self,
        snapshot: Snapshot,
        *,
        loss: object = None,
        grad_norm: object = None,
        learning_rate: object = None,
        batch: Any = None,
    ) -> Snapshot:
        """Puts what is known of the step beside the sample's alerts, and the alerts into the history.

        Nothing is read from the device unless there is an alert.

        Args:
            snapshot: The sample.
            loss: Training loss of its step, a number or a tensor with one.
            grad_norm: Norm of its gradients, likewise.
            learning_rate: The optimizer's, likewise.
            batch: What was looked at, for a replay.

        Returns:
            The sample with what is known.
        """
        rate = None if isinstance(learning_rate, Tensor) else _number(learning_rate)  # no read from its device
        if rate is not None:
            self._rates = [*self._rates, (snapshot.step, rate)][-_RATES:]
        if not snapshot.alerts and not snapshot.recoveries:
            return snapshot
        known: dict[str, Any] = {
            "loss": _number(loss),
            "grad_norm": _number(grad_norm),
            "learning_rate": _number(learning_rate),
            **self._former_rate(_number(learning_rate)),
        }
        alerts, recoveries = (
            tuple(dataclasses.replace(alert, **known) for alert in some)
            for some in (snapshot.alerts, snapshot.recoveries)
        )
        self.history = [*self.history, *alerts, *recoveries][-_KEPT:]
        if self._folder is not None and batch is not None and any(alert.severity != "watch" for alert in alerts):
            self._pending = snapshot.step, batch, alerts
        return dataclasses.replace(snapshot, alerts=alerts, recoveries=recoveries)

    def _former_rate(self, rate: float | None) -> dict[str, Any]:
        """What the learning rate was before it changed, if it did so in the last samples."""
        for step, other in reversed(self._rates[:-1]):
            if rate is not None and other > 0.0 and not 1 / _CHANGE <= rate / other <= _CHANGE:
                return {"former_rate": other, "former_rate_step": step}
        return {}

    def _keep(self) -> None:
        """Saves what is to be kept, after the sample has been written: nothing of that may be lost by it."""
        if self._pending is None or self._folder is None:
            return
        (step, batch, alerts), self._pending = self._pending, None
        stem = f"step_{step:06d}{f'_rank_{rank()}' if rank() else ''}"
        folder = Path(self._folder)
        self._attempt(f"keep_batches={self._folder!r}", lambda: _save(folder, stem, step, batch, alerts))

    def tell(self, snapshot: Snapshot | None) -> None:
        """Calls the user's function with what a sample has to tell, in the first process."""
        self._keep()
        on_alert = self._on_alert
        if snapshot is None or on_alert is None or rank() > 0:
            return
        for alert in (*_worst_first(snapshot.alerts), *snapshot.recoveries):
            self._attempt("on_alert", partial(on_alert, alert))

    def act(self, snapshot: Snapshot | None) -> bool:
        """Calls the user's function, and does what the severities ask for, once the sample has been written.

        Returns:
            Whether the run is to stop.

        Raises:
            AttentionAlertError: An alert's severity asks for it.
        """
        if snapshot is None or not (snapshot.alerts or snapshot.recoveries):
            return False
        self.tell(snapshot)
        asked = [(alert, self._actions[alert.severity]) for alert in _worst_first(snapshot.alerts)]
        if rank() == 0:
            for alert, action in asked:
                if action in ("warn", "stop"):
                    warnings.warn(alert.message, AttentionSaturationWarning, stacklevel=4)
        fatal = [alert for alert, action in asked if action == "raise"]
        if fatal:
            raise AttentionAlertError(fatal)
        return any(action == "stop" for _, action in asked)

    def state_dict(self) -> dict[str, Any]:
        """The history, and what the next event needs, as JSON has it."""
        return {"history": [alert.plain() for alert in self.history], "rates": [list(one) for one in self._rates]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`.

        Raises:
            ValueError: It is nothing of the kind.
        """
        self.history = [Alert.from_plain(plain) for plain in state.get("history", ())]
        self._rates = [(int(step), float(rate)) for step, rate in state.get("rates", ())]


@dataclasses.dataclass
class SampledStep:
    """What is known of a sampled step, piece by piece, until its optimizers have stepped.

    Attributes:
        rate: Learning rate with which it began.
        rates: Those with which its optimizers stepped.
        norms: Of the gradients, by optimizer; None where this process has only a part of them.
        batch: What was looked at, where it may be kept for a replay.
        held: The sample, where there is something to tell that the rest of the step belongs to.
    """

    rate: float | None = None
    rates: list[float] = dataclasses.field(default_factory=list)
    norms: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)
    batch: Any = None
    held: Snapshot | None = None

    def release(self) -> tuple[Snapshot | None, dict[str, Any]]:
        """Lets go of the sample: it, and what is known of its step, as `Events.note` takes it."""
        snapshot, self.held = self.held, None
        batch, self.batch = self.batch, None
        whole = [norm for norm in self.norms.values() if norm is not None]
        known = {
            "grad_norm": torch.stack(whole).norm() if whole and len(whole) == len(self.norms) else None,
            "learning_rate": max(self.rates, default=None),
            "batch": batch,
        }
        return snapshot, known


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, on their device; None where this process has only a part of them.

    Args:
        parameters: The model's, after the backward pass.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or any(isinstance(grad, DTensor) or grad.is_sparse for grad in gradients):
        return None
    with torch.no_grad():
        return torch.nn.utils.get_total_norm(gradients)


def largest_rate(*optimizers: object) -> float | None:
    """The largest learning rate of the optimizers' parameter groups; None without any."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    return max((float(group["lr"]) for group in groups if "lr" in group), default=None)


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _worst_first(alerts: Sequence[Alert]) -> list[Alert]:
    return sorted(alerts, key=lambda alert: -SEVERITIES.index(alert.severity))


def _save(folder: Path, stem: str, step: int, batch: Any, alerts: Sequence[Alert]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{stem}.{uuid.uuid4().hex}.unfinished"
    content = {
        "step": step,
        "alerts": [alert.plain() for alert in alerts],
        "batch": _copied(batch),
    }
    try:
        torch.save(content, unfinished)
        for number in count(1):  # another monitor, or the run before a restart, may have kept a batch of this step
            path = folder / f"{stem}{'' if number == 1 else f'_{number}'}.pt"
            if not path.exists():
                unfinished.replace(path)
                return
    finally:
        unfinished.unlink(missing_ok=True)


def _copied(batch: Any) -> Any:
    """As `torch.load` reads it without being told to trust the file, and without what lies beside it in memory.

    A view would be saved with all that it is a view of. Arrays become tensors; objects with named fields, mappings.
    """
    if isinstance(batch, Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, np.ndarray):
        return torch.tensor(batch) if batch.dtype.kind in "biuf" else batch.tolist()
    if isinstance(batch, np.generic):
        return batch.item()
    if isinstance(batch, Mapping):
        return {key: _copied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return {key: _copied(value) for key, value in batch._asdict().items()}
    if isinstance(batch, list | tuple):
        return [_copied(value) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: _copied(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    return batch
