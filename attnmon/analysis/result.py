"""What an analysis gives: means over rows, per head and length, as plain arrays that can be saved and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

__all__ = ["Analysis", "Table"]

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Table:
    """Means over rows of several quantities on one grid.

    Attributes:
        axes: The grid: name of each argument to its values, in the order of the trailing dimensions; empty for
            quantities without arguments.
        values: Quantity to float64 ``(heads, lengths, *axes)``; NaN where no row has such a figure.
        rows: Quantity to the number of rows behind each mean, same shape; float64, since a sampled row stands for
            several.
        seconds: Wall time of computing it, summed over parts.
    """

    axes: Mapping[str, tuple[float, ...]]
    values: Mapping[str, np.ndarray]
    rows: Mapping[str, np.ndarray]
    seconds: float = 0.0

    def at(self, quantity: str, **where: float) -> np.ndarray:
        """The means of one quantity, with some arguments fixed: ``table.at("distance", top_n=5)`` is (heads, lengths).

        Raises:
            KeyError: There is no such quantity, argument or value.
        """
        if quantity not in self.values:
            raise KeyError(f"Expected `quantity` to be one of {sorted(self.values)}, but got {quantity!r}.")
        array = self.values[quantity]
        for name in where:
            if name not in self.axes:
                raise KeyError(f"Expected arguments out of {sorted(self.axes)}, but got {name!r}.")
        for dimension, (name, grid) in reversed(list(enumerate(self.axes.items(), start=2))):
            if name in where:
                if where[name] not in grid:
                    raise KeyError(f"Expected `{name}` to be one of {grid}, but got {where[name]!r}.")
                array = array.take(grid.index(where[name]), axis=dimension)
        return array


@dataclass(frozen=True, eq=False)
class Analysis:
    """The figures of a model on a text, head by head.

    Attributes:
        layers: Path of each attention module, in call order.
        heads: ``(layer, head)`` of each entry of the tables' first dimension.
        temperatures: The model's own softmax temperature of each layer (``1 / scale``).
        lengths: Context lengths, ascending: the tables' second dimension. The mean at length L is over the rows of
            the first L tokens.
        tables: Task to its table; see `attnmon.analysis.AnalysisOptions` for the tasks.
        not_measured: Layer to the reason why it is absent.
        notes: What a reader has to know to read the figures, a sentence each.
        about: Options, tokens, device and versions of the run: plain values only.
    """

    layers: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    temperatures: tuple[float, ...]
    lengths: tuple[int, ...]
    tables: Mapping[str, Table]
    not_measured: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write everything to one ``.npz`` file, which `load` reads.

        Raises:
            OSError: The file cannot be written.
        """
        arrays: dict[str, Any] = {}
        tables = {}
        for task, table in self.tables.items():
            tables[task] = {"axes": dict(table.axes), "seconds": table.seconds, "quantities": list(table.values)}
            for name in table.values:
                arrays[f"{task}/{name}/values"] = table.values[name]
                arrays[f"{task}/{name}/rows"] = table.rows[name]
        header = {
            "format": _FORMAT,
            "layers": self.layers,
            "heads": self.heads,
            "temperatures": self.temperatures,
            "lengths": self.lengths,
            "not_measured": dict(self.not_measured),
            "notes": self.notes,
            "about": dict(self.about),
            "tables": tables,
        }
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ValueError: The file is not such a file.
            OSError: The file cannot be read.
        """
        try:
            with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                if header["format"] != _FORMAT:
                    raise KeyError(f"format {header['format']}")
                tables = {
                    task: Table(
                        axes={name: tuple(grid) for name, grid in table["axes"].items()},
                        values={name: file[f"{task}/{name}/values"] for name in table["quantities"]},
                        rows={name: file[f"{task}/{name}/rows"] for name in table["quantities"]},
                        seconds=table["seconds"],
                    )
                    for task, table in header["tables"].items()
                }
        except OSError:
            raise
        except Exception as error:  # whatever zipfile, zlib or NumPy make of damaged bytes
            raise ValueError(
                f"Expected {str(path)!r} to be a file that Analysis.save wrote, but reading it failed: {error}. "
                "Run the analysis again."
            ) from error
        return cls(
            layers=tuple(header["layers"]),
            heads=tuple((layer, head) for layer, head in header["heads"]),
            temperatures=tuple(header["temperatures"]),
            lengths=tuple(header["lengths"]),
            tables=tables,
            not_measured=header["not_measured"],
            notes=tuple(header["notes"]),
            about=header["about"],
        )
