"""One sample as the rules see it: its figures, and beside each head what they consult."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnmon.alerts.base import JACOBIAN_SHARE, NON_FINITE_ROWS, NOT_MEASURED, TEMPERATURE

__all__ = ["Figures", "Sample", "at", "take_sample"]

Figures = Mapping[str, Mapping[int, Sequence[float]]]
"""Quantity -> layer -> one figure per head."""

_COMPANY = ("entropy_normalized", "score_spread")


@dataclass(frozen=True)
class Sample:
    """A sample.

    Attributes:
        step: Its optimizer step.
        figures: The sample's values, and beside them what is none of its quantities.
        errors: Quantity -> layer -> per figure, its standard error; None for a figure from a single row, of which that
            is not known.
        company: Layer -> per head, the figures that rules consult beside their own.
    """

    step: int
    figures: Figures
    errors: Mapping[str, Mapping[int, Sequence[float | None]]]
    company: Mapping[int, Sequence[dict[str, float]]]


def take_sample(
    step: int,
    values: Figures,
    errors: Figures,
    temperatures: Mapping[int, float],
    nonfinite: Mapping[int, Sequence[int]],
    heads: Mapping[int, int],
) -> Sample:
    """Put a sample together; arguments as for `attnmon.alerts.AlertEngine.update`.

    Args:
        step: Its optimizer step.
        values: Figures.
        errors: Their standard errors.
        temperatures: Of each layer.
        nonfinite: Rows of each head.
        heads: Number of heads of each layer that was ever measured.
    """
    figures: dict[str, Mapping[int, Sequence[float]]] = dict(values)
    errors = dict(errors)
    if temperatures:
        figures[TEMPERATURE] = {
            layer: [temperature] * max(1, heads.get(layer, 0)) for layer, temperature in temperatures.items()
        }
    if nonfinite:
        figures[NON_FINITE_ROWS] = nonfinite
    if "jacobian@1.0" in values and temperatures:
        figures[JACOBIAN_SHARE] = _shares(values["jacobian@1.0"], temperatures)
        errors[JACOBIAN_SHARE] = _shares(errors.get("jacobian@1.0", {}), temperatures)
    tables = [*values.values()]

    def missing(layer: int, head: int) -> float:
        if any(layer in table and math.isfinite(at(table[layer], head)) for table in tables):
            return 0.0
        return math.nan if at(nonfinite.get(layer, ()), head) > 0 else 1.0  # NonFinite has told of that

    figures[NOT_MEASURED] = {layer: [missing(layer, head) for head in range(count)] for layer, count in heads.items()}
    consulted = [(name, values[name]) for name in _COMPANY if name in values]
    company = {
        layer: [
            {
                name: float(table[layer][head])
                for name, table in consulted
                if layer in table and head < len(table[layer])
            }
            for head in range(count)
        ]
        for layer, count in heads.items()
    }
    noise = {
        quantity: {layer: _noise(len(row), errors.get(quantity, {}).get(layer, ())) for layer, row in layers.items()}
        for quantity, layers in figures.items()
    }
    for layers in figures.values():  # a layer may have a temperature and no head that was ever measured
        for layer, row in layers.items():
            company.setdefault(layer, []).extend({} for _ in range(len(row) - len(company.get(layer, ()))))
    return Sample(step, figures, noise, company)


def _noise(count: int, errors: Sequence[float]) -> list[float | None]:
    found: list[float | None] = [
        error if math.isfinite(error) else None if math.isnan(error) else 0.0 for error in errors[:count]
    ]
    return found + [0.0] * (count - len(found))


def at(row: Sequence[float], head: int) -> float:
    """A head's figure, NaN where there is none."""
    return row[head] if head < len(row) else math.nan


def _shares(norms: Mapping[int, Sequence[float]], temperatures: Mapping[int, float]) -> dict[int, list[float]]:
    """Jacobian norms as shares of their bound 1/(2T)."""
    return {
        layer: [2.0 * temperatures[layer] * norm for norm in row]
        for layer, row in norms.items()
        if layer in temperatures
    }
