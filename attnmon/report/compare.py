"""Two runs side by side: which layers go together, and how far their figures are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.report.data import Floats, Section, Series, Steps, mean_of_heads

__all__ = ["Comparison", "Difference", "compare"]


@dataclass(frozen=True)
class Difference:
    """One quantity of two runs, the second less the first. Rows are the pairs of `Comparison`.

    Attributes:
        name: The quantity.
        title: For people.
        unit: Its unit.
        layers_end: Of the layers' means at each run's own end, ``(pairs,)``.
        heads_end: Of the heads there, ``(pairs, heads)``; NaN throughout in layers whose numbers of heads differ.
        common: Steps that both runs sampled, of those kept.
        layers_common: Of the layers' means at these steps, ``(len(common), pairs)``.
        heads_common: Of the heads at the last of these steps, ``(pairs, heads)``; None without one.
    """

    name: str
    title: str
    unit: str
    layers_end: Floats
    heads_end: Floats
    common: Steps
    layers_common: Floats
    heads_common: Floats | None


@dataclass(frozen=True)
class Comparison:
    """One prefix of two runs.

    Attributes:
        prefix: The prefix.
        by_path: Whether layers were paired by their module paths; else by number.
        pairs: Layer numbers that go together, ``(of the first run, of the second)``.
        only: Layers that only the first, and only the second run has.
        other_heads: Pairs whose numbers of heads differ: ``(first, second, heads, heads)``.
        only_quantities: Quantities that only the first, and only the second run has.
        differences: By quantity.
    """

    prefix: str
    by_path: bool
    pairs: tuple[tuple[int, int], ...]
    only: tuple[tuple[int, ...], tuple[int, ...]]
    other_heads: tuple[tuple[int, int, int, int], ...]
    only_quantities: tuple[tuple[str, ...], tuple[str, ...]]
    differences: Mapping[str, Difference]


def compare(first: Section, second: Section) -> Comparison:
    """Compares what two runs logged under the same prefix.

    Layers are paired by module path; by number where no path is common to both. Heads are compared one by one only in
    layers with as many heads in both runs, and only where both runs have figures of single heads.
    """
    sides = (first, second)
    paths = [{layer.path: number for number, layer in side.layers.items() if layer.path} for side in sides]
    by_path = bool(paths[0].keys() & paths[1].keys())
    if by_path:
        pairs = tuple((number, paths[1][path]) for path, number in paths[0].items() if path in paths[1])
    else:
        pairs = tuple((number, number) for number in first.layers if number in second.layers)
    matched = [{pair[side] for pair in pairs} for side in (0, 1)]
    left, right = (tuple(n for n in side.layers if n not in matched[i]) for i, side in enumerate(sides))
    counts = [(a, b, _heads(first, a), _heads(second, b)) for a, b in pairs]
    other = tuple(entry for entry in counts if entry[2] != entry[3])
    alike = first.per_head and second.per_head
    same = np.array([alike and entry[2] == entry[3] for entry in counts], dtype=np.bool_)
    names = [name for name in first.quantities if name in second.quantities]
    return Comparison(
        prefix=first.prefix,
        by_path=by_path,
        pairs=pairs,
        only=(left, right),
        other_heads=other if alike else (),
        only_quantities=(
            tuple(name for name in first.quantities if name not in names),
            tuple(name for name in second.quantities if name not in names),
        ),
        differences={name: _difference(first.quantities[name], second.quantities[name], pairs, same) for name in names},
    )


def _heads(section: Section, number: int) -> int:
    known = section.layers[number].heads
    if known is not None:
        return known
    return int(section.exists[number].sum()) if number < len(section.exists) else 0


def _difference(
    first: Series, second: Series, pairs: tuple[tuple[int, int], ...], same: NDArray[np.bool_]
) -> Difference:
    heads = max(first.last.shape[1], second.last.shape[1])
    rows = [[pair[side] for pair in pairs] for side in (0, 1)]
    a_end, b_end = (_rows(series.last[None], row, heads) for series, row in zip((first, second), rows, strict=True))
    common, a_at, b_at = np.intersect1d(first.steps, second.steps, return_indices=True)
    a, b = _rows(first.values[a_at], rows[0], heads), _rows(second.values[b_at], rows[1], heads)
    each = np.where(same[:, None], np.float32(0.0), np.float32(np.nan))
    return Difference(
        name=first.name,
        title=first.title,
        unit=first.unit,
        layers_end=(mean_of_heads(b_end) - mean_of_heads(a_end))[0],
        heads_end=(b_end - a_end)[0] + each,
        common=common,
        layers_common=mean_of_heads(b) - mean_of_heads(a),
        heads_common=b[-1] - a[-1] + each if len(common) else None,
    )


def _rows(values: Floats, rows: list[int], heads: int) -> Floats:
    """These layers of ``(samples, layers, heads)``; NaN for a layer or a head that the table does not have."""
    result = np.full((len(values), len(rows), heads), np.nan, dtype=np.float32)
    for place, row in enumerate(rows):
        if row < values.shape[1]:
            result[:, place, : values.shape[2]] = values[:, row]
    return result
