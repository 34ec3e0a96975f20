"""A Snapshot written through a TensorBoard writer that already exists: images, warning texts, an arranged dashboard."""

from __future__ import annotations

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
    "TabWriter",
    "count_bytes",
    "scalar_bytes",
    "worth_pictures",
    "write_layout",
    "write_pictures",
    "write_snapshot",
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


def write_layout(writer: SummaryWriter, snapshot: Snapshot, *, prefix: str = "attn") -> None:
    """Arranges TensorBoard's "Custom Scalars" page. Once per writer: the last layout written is the one shown."""
    writer.add_custom_scalars(dashboard.custom_scalars_layout(snapshot.values, prefix=prefix))


def worth_pictures(snapshot: Snapshot, every_n_steps: int) -> bool:
    """Whether a sample gets its images: those with an alert do, of the others ever fewer."""
    return bool(snapshot.alerts) or picture_due(snapshot.step // every_n_steps)


def write_pictures(writer: SummaryWriter, snapshot: Snapshot, *, images: bool = True, prefix: str = "attn") -> int:
    """What scalars can't show: one layer x head image per quantity, and each alert as text.

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
    for alert in snapshot.alerts:
        tag, text = dashboard.warning_tag(alert.rule, prefix), dashboard.alert_markdown(alert)
        writer.add_text(tag, text, snapshot.step)
        written += _record(summary.text(tag, text).ByteSize(), snapshot.step)
    return written


def write_snapshot(
    writer: SummaryWriter,
    snapshot: Snapshot,
    *,
    per_head: bool = False,
    images: bool = True,
    prefix: str = "attn",
    written: int = 0,
) -> int:
    """Scalars and pictures, for a loop that has a writer and no logger.

    Args:
        writer: Where to.
        snapshot: What.
        per_head: A scalar per head beside those per layer.
        images: Whether images are written.
        prefix: First part of each tag.
        written: Bytes written before.

    Returns:
        Bytes written, those before among them.
    """
    scalars = snapshot.scalars(per_head=per_head, prefix=prefix)
    written += count_bytes(scalars, snapshot.step, prefix, written)
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, snapshot.step)
    return written + write_pictures(writer, snapshot, images=images, prefix=prefix)


def count_bytes(scalars: dict[str, float], step: int, prefix: str, written: int) -> int:
    """Adds the bytes written so far, and those of these scalars, as one of them; returns the latter."""
    tag = f"{prefix}/monitor/bytes_written"
    size = scalar_bytes((*scalars, tag), step)
    scalars[tag] = float(written + size)
    return size


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
        get = getattr(writer, "_get_file_writer", None)
        self._file: Any = get() if callable(get) else None
        self.available = callable(getattr(self._file, "add_summary", None))

    def write(self, snapshot: Snapshot, *, every_n_steps: int = 1, levels: Iterable[Mapping[str, Any]] = ()) -> int:
        """One tensor per quantity; the warnings, if there are any; what the run is like, where that is new.

        Args:
            snapshot: The sample.
            every_n_steps: The cadence.
            levels: Fixed limits of the rules.

        Returns:
            Bytes written.
        """
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
            every_n_steps=every_n_steps,
            levels=levels,
        )
        summary = Summary()
        if run != self._run:
            self._add(summary, "run", make_tensor_proto(records.to_json(run)))
            self._run = run
        for quantity, layers in snapshot.values.items():
            self._add(summary, "heads", make_tensor_proto(records.heads_matrix(layers)), quantity)
        if snapshot.alerts:
            warnings = records.warnings_record(snapshot.step, snapshot.alerts)
            self._add(summary, "warnings", make_tensor_proto(records.to_json(warnings)))
        return self._pass_on(summary, snapshot.step)

    def _add(self, summary: Summary, kind: str, tensor: TensorProto, quantity: str = "") -> None:
        value = summary.value.add(tag=records.tag_of(kind, self._prefix, quantity), tensor=tensor)
        if value.tag not in self._described:
            self._described.add(value.tag)
            value.metadata.plugin_data.plugin_name = records.PLUGIN
            value.metadata.plugin_data.content = records.metadata(kind, self._prefix, quantity)
            value.metadata.data_class = 2  # DATA_CLASS_TENSOR: without it TensorBoard shows nothing of the tag

    def _pass_on(self, summary: Summary, step: int) -> int:
        content = summary.SerializeToString()
        if type(self._file).__module__.startswith("tensorboardX"):  # has message classes of its own
            from tensorboardX.proto.summary_pb2 import Summary as Theirs

            self._file.add_summary(Theirs.FromString(content), step)
        else:
            self._file.add_summary(summary, step)
        return _record(len(content), step)
