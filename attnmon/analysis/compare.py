"""Two analyses side by side: which heads changed, and by how much."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from attnmon.analysis.engine import analyze
from attnmon.analysis.options import AnalysisOptions
from attnmon.analysis.result import Analysis

__all__ = ["Change", "Comparison", "compare", "compare_models"]

# What must agree for two means to be comparable; what is measured of the rest may differ.
_SAME = ("vectors", "normalize_vectors", "convention", "normalizer")
# What makes two means differ although nothing else does.
_DRAWS = ("rows", "seed")


@dataclass(frozen=True)
class Change:
    """One figure of one head in both analyses."""

    quantity: str
    layer: str
    head: int
    length: int
    arguments: dict[str, float]
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Second minus first."""
        return self.second - self.first


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two analyses of the same heads.

    Attributes:
        first: The one.
        second: The other.
        notes: What makes them less than comparable, a sentence each.
    """

    first: Analysis
    second: Analysis
    notes: tuple[str, ...] = ()

    def changes(self, quantity: str | None = None, length: int | None = None) -> list[Change]:
        """Every figure that both have, the largest relative changes first.

        Args:
            quantity: ``"ratio"``, ``"entropy"``, ...; None: all of them.
            length: One of the lengths; None: the longest that both have.

        Raises:
            ValueError: There is no such quantity or length in both.
        """
        common = sorted(set(self.first.lengths) & set(self.second.lengths))
        if not common:
            raise ValueError(
                f"Expected two analyses with a length in common, but got {self.first.lengths} and "
                f"{self.second.lengths}. Run one of them again."
            )
        if length is None:
            length = common[-1]
        if length not in common:
            raise ValueError(f"Expected `length` to be one of {common}, which both have, but got {length}.")
        found = list(self._figures(length, quantity))
        if quantity is not None and not found:
            raise ValueError(f"Expected `quantity` to be one that both analyses have, but got {quantity!r}.")

        def weight(change: Change) -> float:
            return abs(change.difference) / max(abs(change.first), abs(change.second), 1e-3)

        return sorted(found, key=weight, reverse=True)

    def write_csv(self, path: str | Path) -> None:
        """Write all changes of all common lengths, a line each."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["quantity", "layer", "head", "length", "arguments", "first", "second", "difference"])
            for length in sorted(set(self.first.lengths) & set(self.second.lengths)):
                for c in self.changes(length=length):
                    arguments = " ".join(f"{name}={value:g}" for name, value in c.arguments.items())
                    writer.writerow([c.quantity, c.layer, c.head, c.length, arguments, c.first, c.second, c.difference])

    def _figures(self, length: int, wanted: str | None) -> Iterator[Change]:
        at = self.first.lengths.index(length), self.second.lengths.index(length)
        for task, table in self.first.tables.items():
            other = self.second.tables.get(task)
            if other is None:
                continue
            for quantity, values in table.values.items():
                if quantity not in other.values or wanted not in (None, quantity):
                    continue
                for flat, where in enumerate(np.ndindex(*values.shape[2:])):
                    arguments = {name: grid[i] for (name, grid), i in zip(table.axes.items(), where, strict=True)}
                    if any(value not in other.axes.get(name, ()) for name, value in arguments.items()):
                        continue
                    left = values[:, at[0]].reshape(len(values), -1)[:, flat]
                    right = other.at(quantity, **arguments)[:, at[1]]
                    for (layer, head), one, two in zip(self.first.heads, left, right, strict=True):
                        if np.isfinite(one) and np.isfinite(two):
                            yield Change(
                                quantity, self.first.layers[layer], head, length, arguments, float(one), float(two)
                            )


def compare(first: Analysis, second: Analysis) -> Comparison:
    """Set two analyses side by side, head by head.

    Args:
        first: Of one checkpoint or step.
        second: Of another with the same layers and heads.

    Returns:
        The comparison; its `notes` say if the two were run on different tokens.

    Raises:
        ValueError: Layers, heads or what the vectors are differ.

    Example:
        >>> import numpy as np
        >>> from attnmon.analysis import Table
        >>> def made(entropy):
        ...     table = Table({}, {"entropy": np.array([[entropy]])}, {"entropy": np.ones((1, 1))})
        ...     return Analysis(("attn",), ((0, 0),), (1.0,), (64,), {"summary": table})
        >>> [change] = compare(made(2.0), made(1.5)).changes("entropy")
        >>> change.layer, change.head, change.difference
        ('attn', 0, -0.5)
    """
    if first.layers != second.layers or first.heads != second.heads:
        raise ValueError(
            f"Expected two analyses of the same heads, but got {len(first.heads)} heads in {len(first.layers)} layers "
            f"({first.layers[:1]}...) and {len(second.heads)} in {len(second.layers)} ({second.layers[:1]}...). "
            "Compare checkpoints of one architecture."
        )
    options = [analysis.about.get("options", {}) for analysis in (first, second)]
    for name in _SAME:
        if options[0].get(name) != options[1].get(name):
            raise ValueError(
                f"Expected two analyses with the same `{name}`, but got {options[0].get(name)!r} and "
                f"{options[1].get(name)!r}. Run one of them again."
            )
    notes = []
    if first.about.get("tokens_sha256") != second.about.get("tokens_sha256"):
        notes.append("The two were run on different tokens: differences may be those of the text.")
    notes += [
        f"The two have different `{name}`, {options[0].get(name)} and {options[1].get(name)}: differences may be "
        "those of the draw."
        for name in _DRAWS
        if options[0].get(name) != options[1].get(name)
    ]
    return Comparison(first, second, tuple(notes))


def compare_models(
    first: nn.Module, second: nn.Module, tokens: Tensor, options: AnalysisOptions | None = None, **settings: Any
) -> Comparison:
    """Analyse two checkpoints on the same tokens and set them side by side.

    Args:
        first: The one.
        second: The other, of the same architecture.
        tokens: ``(length,)`` or ``(batch, length)``, int64.
        options: What is measured.
        settings: Further arguments of `analyze`. With `folder`, each model's parts are kept below it.

    Raises:
        ValueError: As `analyze` and `compare`.
    """
    return compare(analyze(first, tokens, options, **settings), analyze(second, tokens, options, **settings))
