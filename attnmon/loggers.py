"""What each kind of logger gets of a Snapshot: scalars all of them, images and warnings those that can show them.

Loggers are told apart by the names of their classes, since none of their libraries need be installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from attnmon import dashboard
from attnmon.alerts import AlertRules
from attnmon.options import MonitorOptions
from attnmon.snapshot import Snapshot
from attnmon.tensorboard import Board

__all__ = ["Sink", "arrange", "flat_heads", "make_board", "make_sink"]

_WANDB_LEVELS = {"watch": "INFO", "warn": "WARN", "critical": "ERROR"}
_WANDB_PAUSE = 300  # seconds between two alerts of one rule


class Sink:
    """A logger that takes scalars: CSV, Comet, Neptune and any other.

    Args:
        logger: A Lightning or Fabric logger.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write(self, snapshot: Snapshot, scalars: Mapping[str, float], *, prefix: str, images: bool) -> None:
        """Passes on a sample.

        Args:
            snapshot: The sample.
            scalars: Its scalars, under their keys.
            prefix: First part of these keys.
            images: Whether images are due.
        """
        self._logger.log_metrics(dict(scalars), step=snapshot.step)

    def arrange(self, layout: Mapping[str, Any]) -> None:
        """Has a "Custom Scalars" page written with the next sample, where there is such a thing."""

    def save(self) -> None:
        """Has what the logger holds back written: nothing but a Trainer does that at the end of a run."""
        save = getattr(self._logger, "save", None)
        if callable(save):
            save()


class BoardSink(Sink):
    """TensorBoard, through its logger or a bare writer."""

    def __init__(self, logger: Any, board: Board) -> None:
        super().__init__(logger)
        self._board = board

    def write(self, snapshot: Snapshot, scalars: Mapping[str, float], *, prefix: str, images: bool) -> None:
        counted = self._board.counted(scalars, snapshot.step)
        if hasattr(self._logger, "log_metrics"):
            self._logger.log_metrics(counted, step=snapshot.step)
        else:
            for key, value in counted.items():
                self._logger.add_scalar(key, value, snapshot.step)
        self._board.write(snapshot, prefix=prefix, images=images)

    def arrange(self, layout: Mapping[str, Any]) -> None:
        self._board.layout = layout


class WandbSink(Sink):
    """Weights & Biases: images beside the scalars, warnings by its alert call, at most one per rule in five minutes."""

    def write(self, snapshot: Snapshot, scalars: Mapping[str, float], *, prefix: str, images: bool) -> None:
        super().write(snapshot, scalars, prefix=prefix, images=images)
        for quantity, values in snapshot.values.items() if images else ():
            picture = dashboard.quantity_image(quantity, values)
            self._logger.log_image(dashboard.image_tag(quantity, prefix), [picture], step=snapshot.step)
        for alert in (*snapshot.alerts, *snapshot.recoveries):
            self._logger.experiment.alert(
                title=f"{prefix}: {alert.title}{' over' if alert.ended else ''}"[
                    :63
                ],  # its limit; the pause goes by it
                text=alert.message,
                level="INFO" if alert.ended else _WANDB_LEVELS.get(alert.severity, "WARN"),
                wait_duration=_WANDB_PAUSE,
            )


class MlflowSink(Sink):
    """MLflow: images and the texts of warnings as artifacts. Heads are ``.../layer_03_head_07`` there."""

    def write(self, snapshot: Snapshot, scalars: Mapping[str, float], *, prefix: str, images: bool) -> None:
        super().write(snapshot, flat_heads(scalars), prefix=prefix, images=images)
        client, run_id = self._logger.experiment, self._logger.run_id
        for quantity, values in snapshot.values.items() if images else ():
            picture = dashboard.quantity_image(quantity, values)
            client.log_image(run_id, picture, key=dashboard.image_tag(quantity, prefix), step=snapshot.step)
        for alert in (*snapshot.alerts, *snapshot.recoveries):
            end = "_over" if alert.ended else ""
            file = f"{dashboard.warning_tag(alert.rule, prefix)}/step_{alert.step:06d}{end}.md"
            client.log_text(run_id, dashboard.alert_markdown(alert), file)


def flat_heads(scalars: Mapping[str, float]) -> dict[str, float]:
    """The scalars under keys of which none lies below another: some stores keep a file for each, and folders.

    Example:
        >>> flat_heads({"attn/entropy/layer_03": 1.0, "attn/entropy/layer_03/head_07": 2.0})
        {'attn/entropy/layer_03': 1.0, 'attn/entropy/layer_03_head_07': 2.0}
    """
    return {re.sub(r"/(head_\d+)$", r"_\1", key): value for key, value in scalars.items()}


def arrange(monitors: Iterable[tuple[str, MonitorOptions]], *, scope: str = "") -> dict[str, Any]:
    """The "Custom Scalars" page of a log directory: one for all monitors, since only one is kept.

    Args:
        monitors: First part of the keys, and options, of each.
        scope: What whoever writes the scalars puts before their keys.
    """
    layout: dict[str, Any] = {}
    for prefix, options in monitors:
        names = [column.name for column in options.columns()]
        for category, charts in dashboard.custom_scalars_layout(names, prefix=f"{scope}{prefix}").items():
            layout[category if prefix == "attn" else f"{category} ({prefix})"] = charts
    return layout


def make_board(
    writer: Any, options: MonitorOptions, *, prefix: str, scope: str = "", layout: Mapping[str, Any] | None = None
) -> Board:
    """A run's TensorBoard, for a monitor with these options."""
    rules = (options.rules or AlertRules()) if options.alerts else None
    measured = [column.name for column in options.columns()]
    return Board(
        writer,
        prefix=prefix,
        scope=scope,
        every_n_steps=options.every_n_steps,
        levels=() if rules is None else rules.fixed_levels(measured),
        own_limits=() if rules is None else rules.own_limits(measured),
        layout=layout,
    )


def make_sink(logger: Any, options: MonitorOptions, *, prefix: str, layout: Mapping[str, Any] | None = None) -> Sink:
    """What passes samples on to a logger.

    Args:
        logger: A Lightning or Fabric logger, or a TensorBoard writer.
        options: The monitor's.
        prefix: First part of its keys.
        layout: TensorBoard's "Custom Scalars" page; None: none.

    Raises:
        TypeError: It is nothing of that kind.
    """
    kinds = {kind.__name__ for kind in type(logger).__mro__}
    if isinstance(logger, type | ModuleType):
        raise TypeError(
            f"Expected `writer` to be a writer or a logger itself, but got {logger!r}. Make one of it first."
        )
    if "TensorBoardLogger" in kinds:
        return BoardSink(logger, make_board(logger.experiment, options, prefix=prefix, layout=layout))
    if hasattr(logger, "add_scalar"):
        return BoardSink(logger, make_board(logger, options, prefix=prefix, layout=layout))
    if "WandbLogger" in kinds:
        return WandbSink(logger)
    if "MLFlowLogger" in kinds:
        return MlflowSink(logger)
    if callable(getattr(logger, "log_metrics", None)):
        return Sink(logger)
    raise TypeError(
        f"Expected `writer` to be a TensorBoard writer, a Lightning or Fabric logger, or a list of these, but got "
        f"{type(logger).__name__}. Log `snapshot.scalars()` yourself instead."
    )
