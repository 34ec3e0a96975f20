"""A Snapshot written through a TensorBoard writer that already exists: images, warning texts, an arranged dashboard."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attnmon import dashboard, records
from attnmon.schedule import picture_due

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from torch.utils.tensorboard import SummaryWriter

    from attnmon.snapshot import Snapshot

__all__ = [
    "Board",
    "TabWriter",
    "scalar_bytes",
    "worth_pictures",
    "write_pictures",
]


def scalar_bytes(tags: Iterable[str], step: int) -> int:
    """Bytes that scalars take in an event file.

    Args:
        tags: Their tags.
        step: The step they are written at.

    Example:
        >>> scalar_bytes(["attn/entropy/layer_03"], 100)
        59
    """
    total = 0
    for tag in tags:
        name = len(tag.encode())
        value = 1 + _varint(name) + name + 5  # the tag and a float
        total += _record(1 + _varint(value) + value, step)
    return total


def _record(summary: int, step: int) -> int:
    """Bytes of a record: its frame, the time, the step (0 is left out) and a summary of so many bytes."""
    return 16 + 9 + (1 + _varint(step) if step else 0) + 1 + _varint(summary) + summary


def _varint(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


def worth_pictures(snapshot: Snapshot, every_n_steps: int) -> bool:
    """Whether a sample gets its images: those with an alert do, of the others ever fewer."""
    return bool(snapshot.alerts) or picture_due(snapshot.step // every_n_steps)


def write_pictures(writer: SummaryWriter, snapshot: Snapshot, *, images: bool = True, prefix: str = "attn") -> int:
    """What scalars can't show: one layer x head image per quantity, and each alert and recovery as text.

    Returns:
        Bytes that this takes in the event file.
    """
    from torch.utils.tensorboard import summary

    written = 0
    if images:
        for quantity, values in snapshot.values.items():
            picture, tag = dashboard.quantity_image(quantity, values), dashboard.image_tag(quantity, prefix)
            writer.add_image(tag, picture, snapshot.step, dataformats="HWC")
            written += _record(summary.image(tag, picture, dataformats="HWC").ByteSize(), snapshot.step)
    for alert in (*snapshot.alerts, *snapshot.recoveries):
        tag, text = dashboard.warning_tag(alert.rule, prefix), dashboard.alert_markdown(alert)
        writer.add_text(tag, text, snapshot.step)
        written += _record(summary.text(tag, text).ByteSize(), snapshot.step)
    return written


class TabWriter:
    """Writes what the Attention tab shows, through a writer that the run already has.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or tensorboardX's.
        prefix: Of the run's tags.

    Attributes:
        available: Whether the writer lets other data through than its own: neither library has a public way.
    """

    def __init__(self, writer: SummaryWriter, prefix: str = "attn") -> None:
        self._prefix = prefix
        self._described: set[str] = set()  # tags whose first event, which carries the metadata, is written
        self._run: dict[str, Any] | None = None
        self._alarmed: Mapping[str, Any] | None = None
        self._get_file: Any = getattr(writer, "_get_file_writer", None)
        self._file: Any = None
        self._open()

    def _open(self) -> None:
        """Takes up the writer's file: one that was closed goes on in a new file, of which nothing is described yet."""
        file = self._get_file() if callable(self._get_file) else None
        if file is not self._file:
            self._file, self._described, self._run, self._alarmed = file, set(), None, None
        self.available = callable(getattr(file, "add_summary", None))

    def write(
        self,
        snapshot: Snapshot,
        *,
        every_n_steps: int = 1,
        levels: Iterable[Mapping[str, Any]] = (),
        own_limits: Iterable[Mapping[str, Any]] = (),
    ) -> int:
        """One tensor per quantity, and per limit that each head has of its own; alerts, the heads under alarm, and what
        the run is like, where these are new.

        Args:
            snapshot: The sample.
            every_n_steps: The cadence.
            levels: Fixed limits of the rules.
            own_limits: See `attnmon.alerts.AlertRules.own_limits`.

        Returns:
            Bytes written.
        """
        self._open()
        if not self.available:
            return 0
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.util.tensor_util import make_tensor_proto

        heads = {layer: len(row) for table in snapshot.values.values() for layer, row in table.items()}
        run = records.run_record(
            layers=snapshot.layers,
            heads=heads,
            temperatures=snapshot.temperatures,
            not_measured=snapshot.not_measured,
            source=snapshot.source,
            every_n_steps=None if snapshot.source == "validation" else every_n_steps,
            levels=levels,
        )
        summary = Summary()
        if run != self._run:
            self._add(summary, "run", make_tensor_proto(records.to_json(run)))
            self._run = run
        for quantity, layers in snapshot.values.items():
            self._add(summary, "heads", make_tensor_proto(records.heads_matrix(layers)), quantity)
        for about in own_limits:
            limits = snapshot.limits.get(about["rule"], {}).get(about["quantity"])
            if limits is not None:
                self._add(summary, "limits", make_tensor_proto(records.heads_matrix(limits)), about["quantity"], about)
        if snapshot.alerts or (snapshot.alarmed and snapshot.alarmed != self._alarmed):
            warnings = records.warnings_record(snapshot.step, snapshot.alerts, snapshot.alarmed)
            self._add(summary, "warnings", make_tensor_proto(records.to_json(warnings)))
            self._alarmed = snapshot.alarmed
        return self._pass_on(summary, snapshot.step)

    def _add(
        self,
        summary: Summary,
        kind: str,
        tensor: TensorProto,
        quantity: str = "",
        rule: Mapping[str, Any] | None = None,
    ) -> None:
        name = "" if rule is None else rule["rule"]
        value = summary.value.add(tag=records.tag_of(kind, self._prefix, quantity, name), tensor=tensor)
        if value.tag not in self._described:
            self._described.add(value.tag)
            value.metadata.plugin_data.plugin_name = records.PLUGIN
            value.metadata.plugin_data.content = records.metadata(kind, self._prefix, quantity, rule)
            value.metadata.data_class = 2  # DATA_CLASS_TENSOR: without it TensorBoard shows nothing of the tag

    def _pass_on(self, summary: Summary, step: int) -> int:
        content = summary.SerializeToString()
        if type(self._file).__module__.startswith("tensorboardX"):  # has message classes of its own
            from tensorboardX.proto.summary_pb2 import Summary as Theirs

            self._file.add_summary(Theirs.FromString(content), step)
        else:
            self._file.add_summary(summary, step)
        return _record(len(content), step)


class Board:
    """A run's TensorBoard, through the writer that the run has: the tab's data, images, warnings, an arranged page.

    Args:
        writer: The writer.
        prefix: First part of the keys.
        scope: What whoever writes the scalars puts before their keys.
        every_n_steps: The cadence.
        levels: Fixed limits of the rules.
        own_limits: See `attnmon.alerts.AlertRules.own_limits`.
        layout: The "Custom Scalars" page; None: none.

    Attributes:
        layout: The page that is still to be written, with the next sample.
        written: Bytes in the event file so far, as far as they are the monitor's.
    """

    def __init__(
        self,
        writer: SummaryWriter,
        *,
        prefix: str = "attn",
        scope: str = "",
        every_n_steps: int = 1,
        levels: Iterable[Mapping[str, Any]] = (),
        own_limits: Iterable[Mapping[str, Any]] = (),
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        self.written = 0
        self._writer = writer
        self._prefix = prefix
        self._scope = scope
        self._every_n_steps = every_n_steps
        self._levels = tuple(levels)
        self._own_limits = tuple(own_limits)
        self.layout = layout
        self._tabs: dict[str, TabWriter] = {}
        self._closed = False  # to the tab's data

    def counted(self, scalars: Mapping[str, float], step: int) -> dict[str, float]:
        """The scalars, and as one more of them the bytes written when they are."""
        key = f"{self._prefix}/monitor/bytes_written"
        self.written += scalar_bytes([f"{self._scope}{name}" for name in (*scalars, key)], step)
        return {**scalars, key: float(self.written)}

    def write(self, snapshot: Snapshot, *, prefix: str, images: bool) -> None:
        """All but the scalars."""
        if self.layout is not None:
            self._writer.add_custom_scalars(self.layout)
            self.layout = None
        # First what every writer has a public way for.
        self.written += write_pictures(self._writer, snapshot, images=images, prefix=f"{self._scope}{prefix}")
        if not self._closed:
            self._write_tab(snapshot, prefix)

    def _write_tab(self, snapshot: Snapshot, prefix: str) -> None:
        try:
            self.written += self._tab(prefix).write(
                snapshot, every_n_steps=self._every_n_steps, levels=self._levels, own_limits=self._own_limits
            )
        except OSError:  # a full disk: the next sample is tried again
            raise
        except Exception:  # the way in is the writer's own affair, and may have changed
            self._closed = True
            warnings.warn(
                "attnmon writes nothing more for the Attention tab to this TensorBoard writer "
                f"({type(self._writer).__name__}), whose way in for such data failed; scalars, images and texts go "
                f"on.\n{traceback.format_exc()}",
                UserWarning,
                stacklevel=2,
            )

    def _tab(self, prefix: str) -> TabWriter:
        tab = self._tabs.get(prefix)
        if tab is None:
            tab = self._tabs[prefix] = TabWriter(self._writer, prefix)
            if not tab.available and len(self._tabs) == 1:
                warnings.warn(
                    f"attnmon writes scalars, images and texts to this TensorBoard writer "
                    f"({type(self._writer).__name__}), but nothing for the Attention tab: the writer has no way in for "
                    "data of that kind. Use torch.utils.tensorboard.SummaryWriter for it.",
                    UserWarning,
                    stacklevel=2,
                )
        return tab
