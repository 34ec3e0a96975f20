"""What the figures show, as arrays: the same numbers are drawn, written as CSV and judged.

Where the paper's printed formula and its corrected form differ, both are here, and `FORMS` says which is which.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnmon.analysis import Analysis, CriticalSize

Array = np.ndarray[Any, np.dtype[Any]]
Record = dict[str, Any]

# "measured": a figure of the model; "printed": the paper's formula as it stands; "corrected": what holds instead
FORMS = {
    "distance": "measured",
    "upper_bound": "printed",
    "expected_paper": "printed",
    "expected_lower": "corrected",
    "expected_upper": "corrected",
    "critical_n": "measured",
    "p_value": "measured",
    "ratio": "measured",
    "lower": "printed",
    "upper": "printed",
    "upper_valid": "corrected",
    "sensitivity": "measured",
    "spectral": "measured",
    "max": "measured",
    "bound_entry": "printed",
    "bound_spectral": "corrected",
    "bound_sensitivity": "corrected",
}
LABELS = {
    "distance": "true distance",
    "expected_paper": "expectation, eq. 10 as printed",
    "upper_bound": "upper bound, Theorem 1.1",
    "expected_band": "true expectation lies here\n(Jensen bounds; corrected, not in the paper)",
    "lower": "lower bound, Theorem 2",
    "upper": "upper bound, Theorem 2 as printed",
    "upper_valid": "upper bound where its argument holds\n(corrected, not in the paper)",
    "bound_entry": "1/(4T), printed: bounds the largest entry",
    "bound_cap": "sqrt 2, the other branch of the printed bound",
    "bound_spectral": "1/(2T), corrected: bounds the spectral norm",
    "spectral": "exact spectral norm, max over heads",
    "max": "exact largest entry, max over heads",
}
DISTANCES = ("distance", "expected_paper", "upper_bound", "expected_lower", "expected_upper")
SEPARABILITY = ("ratio", "lower", "upper", "upper_valid")


class NotMeasuredError(Exception):
    """The analysis does not have what a figure or a claim needs; the text says what."""


class Grid(NamedTuple):
    """Quantities over one axis: `values` quantity to (heads, len(axis)), `rows` likewise; the rest is fixed."""

    axis: tuple[float, ...]
    values: Mapping[str, Array]
    rows: Mapping[str, Array]
    length: int | None
    top_n: int | None


def over_heads(values: Array, how: str = "mean") -> Array:
    """Mean, median, max or min over the first dimension, NaN left out; NaN where no head has a figure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an empty column is NaN, and means just that
        reduced: Array = np.asarray(getattr(np, f"nan{how}")(values, axis=0))
        return reduced


def distance_over_length(analysis: Analysis) -> Grid:
    """Figure 2a: over L at N = 5 (or the N nearest to it that was measured)."""
    table = _table(analysis, "distance")
    top_n = int(min(table.axes["top_n"], key=lambda size: (abs(size - 5), size)))
    place = table.axes["top_n"].index(top_n)
    return Grid(
        tuple(analysis.lengths),
        {name: table.at(name, top_n=top_n) for name in DISTANCES if name in table.values},
        {name: table.rows[name][:, :, place] for name in DISTANCES if name in table.values},
        None,
        top_n,
    )


def distance_over_top_n(analysis: Analysis) -> Grid:
    """Figure 2b: over N at the longest L."""
    return _over_top_n(analysis, "distance", DISTANCES)


def separability_over_top_n(analysis: Analysis) -> Grid:
    """Figure 3: over N at the longest L."""
    return _over_top_n(analysis, "separability", SEPARABILITY)


def critical_over_top_n(analysis: Analysis) -> Grid:
    """What Figure 2c is read off: distance and printed expectation at every N, at the longest L."""
    return _over_top_n(analysis, "critical", ("distance", "expected_paper"))


def largest_tested(analysis: Analysis) -> Array:
    """The largest N tested for being critical, at each L: a row of L keys has at most L - 1 selected ones."""
    most = max(_table(analysis, "critical").axes["top_n"])
    largest: Array = np.minimum(most, np.array(analysis.lengths) - 1)
    return largest


class Sensitivity(NamedTuple):
    """Figure 4 at the longest L: `sensitivity` (heads, T, eps), `spectral` and `max` (heads, T) or None."""

    temperatures: tuple[float, ...]
    epsilons: tuple[float, ...]
    sensitivity: Array
    spectral: Array | None
    max: Array | None
    length: int


def sensitivity(analysis: Analysis) -> Sensitivity:
    """Figure 4: over T for each eps, with the exact Jacobian's norm and largest entry."""
    table = _table(analysis, "sensitivity")
    temperatures, epsilons = table.axes["temperature"], table.axes["epsilon"]
    exact = analysis.tables.get("jacobian")
    if exact is not None and exact.axes["temperature"] != temperatures:
        exact = None
    return Sensitivity(
        tuple(temperatures),
        tuple(epsilons),
        table.values["sensitivity"][:, -1],
        exact.values["spectral"][:, -1] if exact else None,
        exact.values["max"][:, -1] if exact else None,
        analysis.lengths[-1],
    )


def sensitivity_bound(temperatures: Sequence[float], epsilon: float) -> Array:
    """The corrected bound of g(T, eps): min(1/(2T), sqrt(2)/eps)."""
    bound: Array = np.minimum(0.5 / np.asarray(temperatures), np.sqrt(2) / epsilon)
    return bound


def printed_bound(temperatures: Sequence[float]) -> Array:
    """Corollary 3 as printed: min(1/(4T), sqrt(2))."""
    bound: Array = np.minimum(0.25 / np.asarray(temperatures), np.sqrt(2))
    return bound


# -- CSV ----------------------------------------------------------------------------------------------------------


def grid_records(analysis: Analysis, grid: Grid, axis: str) -> Iterator[Record]:
    """One record per quantity, head and point, and the same for mean and maximum over heads."""
    fixed = {"length": grid.length, "top_n": grid.top_n}
    for name, values in grid.values.items():
        for place, point in enumerate(grid.axis):
            at = {**fixed, axis: int(point)}
            for (layer, head), value, rows in zip(
                analysis.heads, values[:, place], grid.rows[name][:, place], strict=True
            ):
                yield _record(name, "head", layer, head, at, value) | {"rows": float(rows)}
            for how in ("mean", "min", "max"):
                yield _record(name, how, None, None, at, float(over_heads(values, how)[place])) | {"rows": None}


def critical_records(analysis: Analysis, criticals: Sequence[CriticalSize]) -> Iterator[Record]:
    """The critical N of each L and alpha, and the p-values behind them."""
    table = _table(analysis, "critical")
    for critical in criticals:
        for length, size in zip(analysis.lengths, critical.size, strict=True):
            at = {"length": length, "top_n": None, "alpha": critical.alpha}
            yield _record("critical_n", "all heads", None, None, at, np.nan if size is None else size)
    grid = table.axes["top_n"]
    for place, point in np.ndindex(*criticals[0].p_values.shape):
        at = {"length": analysis.lengths[place], "top_n": int(grid[point]), "alpha": None}
        yield _record("p_value", "all heads", None, None, at, float(criticals[0].p_values[place, point]))


def sensitivity_records(analysis: Analysis) -> Iterator[Record]:
    """G per head, T and eps, the exact norms per head and T, maxima over heads, and the bounds."""
    data = sensitivity(analysis)

    def all_of(name: str, values: Array, place: int, epsilon: float | None) -> Iterator[Record]:
        at = {"length": data.length, "temperature": data.temperatures[place], "epsilon": epsilon}
        for (layer, head), value in zip(analysis.heads, values, strict=True):
            yield _record(name, "head", layer, head, at, value)
        yield _record(name, "max", None, None, at, float(over_heads(values, "max")))

    for place, temperature in enumerate(data.temperatures):
        for which, epsilon in enumerate(data.epsilons):
            yield from all_of("sensitivity", data.sensitivity[:, place, which], place, epsilon)
        for name, exact in (("spectral", data.spectral), ("max", data.max)):
            if exact is not None:
                yield from all_of(name, exact[:, place], place, None)
        at = {"length": data.length, "temperature": temperature, "epsilon": None}
        yield _record("bound_entry", "bound", None, None, at, 0.25 / temperature)
        yield _record("bound_spectral", "bound", None, None, at, 0.5 / temperature)
        for epsilon in data.epsilons:
            bound = sensitivity_bound([temperature], epsilon)[0]
            yield _record("bound_sensitivity", "bound", None, None, {**at, "epsilon": epsilon}, bound)


def write_csv(path: Path, records: Iterator[Record]) -> None:
    """Write records, all with the same keys, a line each; nothing measured is an empty field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] | None = None
        for record in records:
            if writer is None:
                writer = csv.DictWriter(file, record)
                writer.writeheader()
            writer.writerow(record)


def _record(
    quantity: str, statistic: str, layer: int | None, head: int | None, at: Mapping[str, Any], value: float
) -> Record:
    known = {"quantity": quantity, "form": FORMS[quantity], "statistic": statistic, "layer": layer, "head": head}
    return {**known, **at, "value": None if np.isnan(value) else float(value)}


def _table(analysis: Analysis, task: str) -> Any:
    if task not in analysis.tables:
        raise NotMeasuredError(f"the task {task!r} was not run")
    return analysis.tables[task]


def _over_top_n(analysis: Analysis, task: str, names: Sequence[str]) -> Grid:
    table = _table(analysis, task)
    names = [name for name in names if name in table.values]
    return Grid(
        tuple(table.axes["top_n"]),
        {name: table.values[name][:, -1] for name in names},
        {name: table.rows[name][:, -1] for name in names},
        analysis.lengths[-1],
        None,
    )
