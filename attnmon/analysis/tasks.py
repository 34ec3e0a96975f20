"""The tasks: what each one computes for a block of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmon.analysis.options import AnalysisOptions
from attnmon.functional import finite_difference_sensitivity, score_spread
from attnmon.metrics import entropy_statistics, jacobian_norms
from attnmon.metrics._blocks import Fields, _over_rows
from attnmon.metrics._group import _Group
from attnmon.metrics._selection import _Block
from attnmon.metrics._walk import CONSECUTIVE_FIELDS, consecutive_distances
from attnmon.metrics.bounds import _bounds_update
from attnmon.metrics.distance import TopNDistances, _distance_update
from attnmon.metrics.separability import _separability_update
from attnmon.normalizers import Normalizer

__all__ = ["Rows", "Task", "make_tasks"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a few heads of one layer, ready for the tasks.

    Attributes:
        weights: ``(heads, rows, n)``.
        logits: Same shape: what the normaliser gets, scaled, capped and with bias.
        scores: Same shape: the scaled dot products without bias.
        mask: Same shape, True = visible.
        selectable: The mask that the top-N tasks use: `mask`, or None where all keys count (convention "full").
        group: The vectors of the keys, shared by all these rows.
        temperature: The layer's own.
        direction: Makes the random directions, ``(heads, rows, n)``.
    """

    weights: Tensor
    logits: Tensor
    scores: Tensor
    mask: Tensor
    selectable: Tensor | None
    group: _Group
    temperature: float
    direction: Callable[[], Tensor]

    def select(self, sizes: tuple[int, ...], fields: Fields, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Fields of top-N blocks: name -> ``(heads, rows, len(sizes))``, NaN for an N that no row can have."""
        heads, rows, n = self.weights.shape
        possible = tuple(size for size in sizes if size < n)
        out = {name: self.weights.new_full((heads, rows, len(sizes)), torch.nan) for name in names}
        if possible:
            mask = None if self.selectable is None else self.selectable.reshape(1, -1, n)
            found = _over_rows(self.weights.reshape(1, -1, n), self.group, possible, mask, fields, self.weights.dtype)
            for name in names:
                out[name][..., : len(possible)] = found[name].view(heads, rows, -1)
        return out


@dataclass(frozen=True, eq=False)
class Task:
    """One table of an analysis.

    Attributes:
        name: Of the table.
        axes: The grid; see `attnmon.analysis.Table`.
        quantities: What is measured.
        measure: Given rows, quantity -> ``(heads, rows, *axes)``, NaN where a row has no such figure.
        grid: Everything that a part depends on beside the common options.
    """

    name: str
    axes: dict[str, tuple[float, ...]]
    quantities: tuple[str, ...]
    measure: Callable[[Rows], dict[str, Tensor]]
    grid: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the grid."""
        return tuple(len(grid) for grid in self.axes.values())


def make_tasks(options: AnalysisOptions, normalizer: Normalizer | None) -> list[Task]:
    """The tasks of some options; `normalizer` is None for the model's own softmax."""
    tasks = []
    if "distance" in options.tasks:
        tasks.append(_distance(tuple(options.top_n)))
    if "critical" in options.tasks:
        tasks.append(_critical(options.critical_top_n))
    if "separability" in options.tasks:
        tasks.append(_separability(tuple(options.separability_top_n)))
    if "sensitivity" in options.tasks:
        tasks.append(_sensitivity(tuple(options.temperatures), tuple(options.epsilons), options.seed))
        tasks.append(_jacobian(tuple(options.temperatures)))
    if "summary" in options.tasks:
        tasks.append(_summary(normalizer))
    return tasks


def _task(
    name: str,
    axes: dict[str, tuple[float, ...]],
    quantities: tuple[str, ...],
    measure: Callable[[Rows], dict[str, Tensor]],
    **more: Any,
) -> Task:
    return Task(name, axes, quantities, measure, {"axes": axes, **more})


def _distance(sizes: tuple[int, ...]) -> Task:
    names = TopNDistances._fields

    def fields(block: _Block) -> dict[str, Tensor]:
        return _distance_update(block, names)

    return _task("distance", {"top_n": sizes}, names, lambda rows: rows.select(sizes, fields, names))


def _critical(most: int) -> Task:
    def measure(rows: Rows) -> dict[str, Tensor]:
        heads, count, n = rows.weights.shape
        mask = None if rows.selectable is None else rows.selectable.reshape(1, -1, n)
        weights = rows.weights.reshape(1, -1, n).to(rows.group.vectors.dtype)
        found = consecutive_distances(weights, rows.group, mask, most)
        return {name: value.view(heads, count, most) for name, value in found.items()}

    return _task("critical", {"top_n": tuple(range(1, most + 1))}, CONSECUTIVE_FIELDS, measure)


def _separability(sizes: tuple[int, ...]) -> Task:
    own, bounds = ("ratio",), ("lower", "upper", "upper_valid")

    def fields(block: _Block) -> dict[str, Tensor]:
        # the counts first: the radius of the bounds overwrites the arrays that they compare
        return _separability_update(block, own) | _bounds_update(block, bounds)

    names = own + bounds
    return _task("separability", {"top_n": sizes}, names, lambda rows: rows.select(sizes, fields, names))


def _sensitivity(temperatures: tuple[float, ...], epsilons: tuple[float, ...], seed: int) -> Task:
    def measure(rows: Rows) -> dict[str, Tensor]:
        draw = rows.direction()
        if rows.selectable is not None:  # a unit vector over the visible keys, else over all of them
            draw = draw * rows.mask
        value = finite_difference_sensitivity(
            rows.logits * rows.temperature,
            temperatures,
            epsilons,
            mask=rows.mask,
            direction=torch.nn.functional.normalize(draw, dim=-1, eps=1e-30),
        )
        return {"sensitivity": value}

    axes = {"temperature": temperatures, "epsilon": epsilons}
    return _task("sensitivity", axes, ("sensitivity",), measure, seed=seed)


def _jacobian(temperatures: tuple[float, ...]) -> Task:
    def measure(rows: Rows) -> dict[str, Tensor]:
        return jacobian_norms(rows.logits * rows.temperature, temperatures, mask=rows.mask, norms=("spectral", "max"))

    return _task("jacobian", {"temperature": temperatures}, ("spectral", "max"), measure)


def _summary(normalizer: Normalizer | None) -> Task:
    entropies = ("entropy", "entropy_normalized", "active_share")

    def measure(rows: Rows) -> dict[str, Tensor]:
        found = entropy_statistics(rows.weights, mask=rows.mask)
        out = {name: found[name] for name in entropies}
        out["score_spread"] = score_spread(rows.scores, mask=rows.mask)
        if normalizer is None:
            jacobian = jacobian_norms(rows.logits, 1.0, mask=rows.mask)["spectral"]
        else:
            jacobian = normalizer.jacobian_norm(rows.logits, mask=rows.mask)
            if not normalizer.sums_to_one:
                out |= {name: torch.full_like(out[name], torch.nan) for name in entropies}
        # the scaled scores are the raw ones over the temperature, hence the norm over it
        out["jacobian"] = jacobian / rows.temperature
        return out

    return _task("summary", {}, (*entropies, "score_spread", "jacobian"), measure)
