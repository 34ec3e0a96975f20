"""A Snapshot written through a TensorBoard writer that already exists: images, warning texts, an arranged dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmon import dashboard
from attnmon.schedule import picture_due

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from attnmon.snapshot import Snapshot

__all__ = ["worth_pictures", "write_layout", "write_pictures", "write_snapshot"]


def write_layout(writer: SummaryWriter, snapshot: Snapshot, *, prefix: str = "attn") -> None:
    """Arranges TensorBoard's "Custom Scalars" page. Once per writer: the last layout written is the one shown."""
    writer.add_custom_scalars(dashboard.custom_scalars_layout(snapshot.values, prefix=prefix))


def worth_pictures(snapshot: Snapshot, every_n_steps: int) -> bool:
    """Whether a sample gets its images: those with an alert do, of the others ever fewer."""
    return bool(snapshot.alerts) or picture_due(snapshot.step // every_n_steps)


def write_pictures(writer: SummaryWriter, snapshot: Snapshot, *, images: bool = True, prefix: str = "attn") -> None:
    """What scalars can't show: one layer x head image per quantity, and each alert as text."""
    if images:
        for quantity, values in snapshot.values.items():
            picture = dashboard.quantity_image(quantity, values)
            writer.add_image(dashboard.image_tag(quantity, prefix), picture, snapshot.step, dataformats="HWC")
    for alert in snapshot.alerts:
        writer.add_text(dashboard.warning_tag(alert.rule, prefix), dashboard.alert_markdown(alert), snapshot.step)


def write_snapshot(
    writer: SummaryWriter, snapshot: Snapshot, *, per_head: bool = False, images: bool = True, prefix: str = "attn"
) -> None:
    """Scalars and pictures, for a loop that has a writer and no logger."""
    for tag, value in snapshot.scalars(per_head=per_head, prefix=prefix).items():
        writer.add_scalar(tag, value, snapshot.step)
    write_pictures(writer, snapshot, images=images, prefix=prefix)
