"""Made-up runs, written as a monitor writes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter

from attnmon.alerts import AlertEngine, AlertRules
from attnmon.cost import Cost
from attnmon.snapshot import Snapshot
from attnmon.tensorboard import TabWriter

Table = Mapping[str, Mapping[int, Sequence[float]]]

# Files of one second are told apart by a counter, and 10 sorts before 9: from here on all have as many digits.
event_file_writer._global_uid = event_file_writer.AtomicCounter(1_000_000)


class Run:
    """A run being written: one sample after the other, judged by the real rules."""

    def __init__(
        self,
        folder: Path,
        *,
        prefix: str = "attn",
        tensors: bool = True,
        scalars: bool = True,
        per_head: bool = False,
        every_n_steps: int = 10,
        paths: Mapping[int, str] | None = None,
        source: str = "train",
        suffix: str = "",
        engine: AlertEngine | None = None,
        rules: AlertRules | None = None,
        judged: bool = True,
    ) -> None:
        self.writer = SummaryWriter(folder, filename_suffix=suffix)
        self.tab = TabWriter(self.writer, prefix)
        self.rules = rules or AlertRules()
        self.engine = engine or AlertEngine(self.rules)
        self.prefix, self.tensors, self.scalars, self.per_head = prefix, tensors, scalars, per_head
        self.every_n_steps, self.paths, self.source, self.judged = every_n_steps, paths, source, judged

    def sample(self, step: int, values: Table, not_measured: Mapping[str, str] | None = None) -> Snapshot:
        layers = sorted({layer for table in values.values() for layer in table})
        paths = {layer: (self.paths or {}).get(layer, f"h.{layer}.attn") for layer in layers}
        zeros = {
            quantity: {layer: [0.0] * len(row) for layer, row in table.items()} for quantity, table in values.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alerts = self.engine.update(step, values, errors=zeros, layers=paths)
        snapshot = Snapshot(
            step=step,
            values={quantity: {layer: list(row) for layer, row in table.items()} for quantity, table in values.items()},
            errors=zeros,
            rows_used={},
            rows_skipped={},
            layers=paths,
            temperatures=dict.fromkeys(layers, 8.0),
            nonfinite={},
            padding={},
            not_measured=not_measured or {},
            alerts=tuple(alerts),
            alarmed=self.engine.alarmed() if self.judged else {},
            source=self.source,
            cost=Cost(0.25, 0.05, 0.001, self.every_n_steps),
        )
        if self.scalars:
            for tag, value in snapshot.scalars(per_head=self.per_head, prefix=self.prefix).items():
                self.writer.add_scalar(tag, value, snapshot.step)
        if self.tensors:
            levels = self.rules.fixed_levels(values)
            self.tab.write(snapshot, every_n_steps=self.every_n_steps, levels=levels)
        return snapshot

    def samples(self, steps: Iterable[int], figure: Callable[[int, int, int], float], shape: Mapping[int, int]) -> None:
        """``figure(step, layer, head)`` as normalised entropy."""
        for step in steps:
            rows = {layer: [figure(step, layer, head) for head in range(heads)] for layer, heads in shape.items()}
            self.sample(step, {"entropy_normalized": rows})

    def close(self) -> Path:
        self.writer.close()
        return Path(self.writer.log_dir)


def event_file(folder: Path) -> Path:
    (path,) = (path for path in folder.iterdir() if "tfevents" in path.name)
    return path
