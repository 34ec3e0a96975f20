"""The report as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.records import to_json
from attnmon.report.compare import Comparison
from attnmon.report.data import RunData, Scalars, Section, Series, mean_of_heads

__all__ = ["FORMAT", "report_json"]

FORMAT = "attnmon.report"
_VERSION = 1


def report_json(runs: Sequence[RunData], comparisons: Sequence[Comparison]) -> bytes:
    """All of the report's figures as strict JSON: tables are ``[layer][head]``, what was not measured is null.

    So is what was logged and is not finite, such as a loss that became NaN: its step is there.

    Returns:
        ``{"format", "version", "runs": [...], "comparisons": [...]}`` with the fields of `RunData` and what it holds,
        and of `Comparison`; figures with six significant digits.
    """
    return to_json(
        {
            "format": FORMAT,
            "version": _VERSION,
            "runs": [_run(run) for run in runs],
            "comparisons": [_comparison(entry) for entry in comparisons],
        }
    )


def _run(run: RunData) -> dict[str, Any]:
    return {
        "name": run.name,
        "files": run.files,
        "notes": run.notes,
        "times": run.times,
        "loss": None if run.loss is None else _scalars(run.loss),
        "sections": {prefix: _section(section) for prefix, section in run.sections.items()},
    }


def _section(section: Section) -> dict[str, Any]:
    return {
        "prefix": section.prefix,
        "per_head": section.per_head,
        "source": section.source,
        "cadence": [{"every_n_steps": every, "from_step": step} for every, step in section.cadence],
        "samples": section.samples,
        "steps": section.steps,
        "layers": [
            {"number": layer.number, "path": layer.path, "heads": layer.heads, "temperature": layer.temperature}
            for layer in section.layers.values()
        ],
        "not_measured": section.not_measured,
        "levels": section.levels,
        "notes": section.notes,
        "alerts_on": section.alerts_on,
        "alerts_complete": not section.warned_without_records,
        "status": [
            {
                "layer": layer,
                "head": head,
                "status": "under alarm" if status.under else "recovered",
                "severity": status.severity,
            }
            for (layer, head), status in sorted(section.status().items())
        ],
        "alarms": [vars(alarm) for alarm in section.alarms],
        "alerts": section.alerts,
        "heads_under_alarm": {rule: _scalars(scalars) for rule, scalars in section.counts.items()},
        "cost": {name: _scalars(scalars) for name, scalars in section.cost.items()},
        "quantities": {name: _series(series) for name, series in section.quantities.items()},
    }


def _series(series: Series) -> dict[str, Any]:
    return {
        "title": series.title,
        "unit": series.unit,
        "samples": series.samples,
        "first": _figures(series.first),
        "first_step": series.first_step.tolist(),
        "last": _figures(series.last),
        "last_step": series.last_step.tolist(),
        "change": _figures(series.change),
        "low": _figures(series.low),
        "low_step": series.low_step.tolist(),
        "high": _figures(series.high),
        "high_step": series.high_step.tolist(),
        "furthest_step": series.furthest_step,
        "furthest": _figures(series.furthest),
        "layers": {"first": _figures(mean_of_heads(series.first)), "last": _figures(mean_of_heads(series.last))},
        "steps": series.steps.tolist(),
        "values": _figures(series.values),
    }


def _comparison(entry: Comparison) -> dict[str, Any]:
    return {
        "prefix": entry.prefix,
        "paired_by": "path" if entry.by_path else "number",
        "pairs": entry.pairs,
        "only": entry.only,
        "other_heads": entry.other_heads,
        "only_quantities": entry.only_quantities,
        "differences": {
            name: {
                "title": part.title,
                "unit": part.unit,
                "layers_end": _figures(part.layers_end),
                "heads_end": _figures(part.heads_end),
                "common_steps": part.common.tolist(),
                "layers_common": _figures(part.layers_common),
                "heads_common": None if part.heads_common is None else _figures(part.heads_common),
            }
            for name, part in entry.differences.items()
        },
    }


def _scalars(scalars: Scalars) -> dict[str, Any]:
    return {"tag": scalars.tag, "steps": scalars.steps.tolist(), "values": _figures(scalars.values)}


def _figures(values: NDArray[np.floating[Any]]) -> Any:
    """Nested lists of figures with six significant digits; what is not finite is None."""
    if values.ndim > 1:
        return [_figures(row) for row in values]
    return [float(f"{value:.6g}") for value in values.tolist()]
