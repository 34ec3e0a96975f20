"""What the monitor leaves in TensorBoard's event file, record by record."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from _overhead_models import check_measured, make_gpt2
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter

from attnmon import watch
from attnmon.alerts import AlertRules
from attnmon.records import PLUGIN

_FRAME = 16  # bytes around each record: its length and two checksums


def event_sizes(samples: int, per_head: bool, device: torch.device) -> dict[str, list[int]]:
    """Bytes of each record of the event file, by kind: ``scalar``, ``image``, ``tab``, ``other``.

    ``tab`` is the data of the Attention tab: a record per sample, the first of which also describes it.
    """
    net = make_gpt2(12, 12, 48, 64, 96, 0.0, device)
    ids = torch.randint(64, (1, 96)).to(device)
    # a head of fresh weights attends to everything, and an alarm would bring its own images
    rules = AlertRules(active_set=None)
    with TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        with watch(net, every_n_steps=1, rules=rules, writer=writer, per_head=per_head) as monitor:
            for _ in range(samples):
                net(ids)
                monitor.step()
        writer.close()
        check_measured([monitor], 12)
        (path,) = Path(folder).iterdir()
        return record_sizes(path)


def record_sizes(path: Path) -> dict[str, list[int]]:
    """Bytes of each record of an event file, by kind."""
    sizes: dict[str, list[int]] = {"scalar": [], "image": [], "tab": [], "other": []}
    for record in RawEventFileLoader(str(path)).Load():
        values = Event.FromString(record).summary.value
        kinds = {value.WhichOneof("value") for value in values}
        kind = "scalar" if kinds == {"simple_value"} else "image" if kinds == {"image"} else "other"
        if values and all(value.tag.startswith(f"{PLUGIN}/") for value in values):
            kind = "tab"
        sizes[kind].append(len(record) + _FRAME)
    return sizes
