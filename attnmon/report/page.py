"""The report as one HTML page that needs nothing beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from attnmon.report.compare import Comparison
from attnmon.report.curves import Line, curves
from attnmon.report.data import RunData, Scalars, Section
from attnmon.report.health import health, warnings
from attnmon.report.maps import Rows
from attnmon.report.quantities import main_first, quantity, row_names
from attnmon.report.sides import cadence_text, comparison, pair_names, size_text, source_text
from attnmon.report.style import SCRIPT, style
from attnmon.report.text import NOTHING, counted, esc, measured, note, number, plural, table

__all__ = ["GENERATOR", "report_html"]

GENERATOR = '<meta name="generator" content="attnmon.report">'

# Even a text that was not escaped could load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_LAYERS_OPEN = 16
_COSTS = {
    "seconds": "{:.3g} s for the last sample",
    "share_of_step": "{:.1%} of the time of its step, for the last sample",
    "share_of_run": "{:.2%} of the run's time",
    "bytes_written": "{:,.0f} bytes in the event files",
}


def report_html(runs: Sequence[RunData], comparisons: Sequence[Comparison]) -> str:
    """The page.

    Args:
        runs: One run, or two.
        comparisons: Of two runs, one for each prefix that both have.
    """
    letters = ("A", "B") if len(runs) == 2 else ("",)
    names: dict[str, dict[str, Any]] = {}
    parts: list[str] = []
    links: list[tuple[str, str]] = []

    def open_part(key: str, title: str) -> None:
        links.append((key, title))
        parts.append(f'<h2 id="{esc(key)}">{esc(title)}</h2>')

    for entry in comparisons:
        key = f"compare-{entry.prefix}"
        open_part(key, f"A and B compared: {entry.prefix}")
        sides = [run.sections[entry.prefix] for run in runs]
        paired = pair_names(entry, sides)
        rows = [_rows(names, f"{x}-{entry.prefix}", side) for x, side in zip("AB", sides, strict=True)]
        ticks = [str(a) if a == b else f"{a}/{b}" for a, b in entry.pairs]
        for suffix, by_head in (("", True), ("-layers", False)):
            names[key + suffix] = {"names": paired, "heads": by_head}
            rows.append(Rows(key + suffix, ticks, by_head))
        parts.append(comparison(entry, runs, rows, paired))
    for run, letter in zip(runs, letters, strict=True):
        for prefix, section in run.sections.items():
            key = f"{letter or 'run'}-{prefix}"
            open_part(key, f"Run {letter}: {_section_name(section)}" if letter else _section_name(section))
            if len(runs) == 2 and not all(prefix in other.sections for other in runs):
                parts.append(note(f"Only run {letter} has this prefix: there is nothing to compare it with."))
            loss = run.loss if prefix == next(iter(run.sections)) else None
            parts.append(_section(section, _rows(names, key, section), loss))

    title = f"Attention of {' and '.join(run.name for run in runs)}"
    menu = "".join(f'<a href="#{esc(key)}">{esc(text)}</a>' for key, text in links)
    data = json.dumps(names, ensure_ascii=False).replace("<", "\\u003c")  # nothing in it ends the script
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{esc(title)}</title><style>{style()}</style></head><body><main>",
            f"<h1>{esc(title)}</h1>{_overview(runs, letters)}",
            f"<nav>{menu}</nav>" if len(links) > 1 else "",
            *parts,
            "<footer>Made by <code>python -m attnmon.report</code>. Each figure is the mean over the sampled rows of a "
            "head; all of them are in the JSON file beside this page. Definitions: Limitations of Normalization in "
            "Attention Mechanism, arXiv 2508.17821.</footer></main>",
            f'<div id="label" hidden></div><script type="application/json" id="names">{data}</script>',
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _rows(names: dict[str, dict[str, Any]], key: str, section: Section) -> Rows:
    """The rows of a section's maps, named for the pointer's label too."""
    names[key] = {"names": row_names(section), "heads": section.per_head}
    return Rows(key, [str(row) for row in range(len(section.exists))], section.per_head)


def _section_name(section: Section) -> str:
    if section.prefix == "attn":
        return "Training (attn)"
    if section.source == "validation" or section.prefix.endswith("_val"):
        return f"Validation ({section.prefix})"
    return f"Prefix {section.prefix}"


def _overview(runs: Sequence[RunData], letters: Sequence[str]) -> str:
    rows = [
        ["recorded", *(_times(run.times) for run in runs)],
        ["folder", *(f"<code>{esc(run.folder)}</code>" for run in runs)],
        ["files", *(", ".join(f"<code>{esc(name)}</code>" for name in run.files) for run in runs)],
        ["loss", *(_loss_text(run.loss) for run in runs)],
    ]
    for prefix in dict.fromkeys(prefix for run in runs for prefix in run.sections):
        sections = [run.sections.get(prefix) for run in runs]
        rows.append([esc(prefix), *(NOTHING if section is None else size_text(section) for section in sections)])
    columns = ["", *(f"run {x}: {esc(run.name)}" for x, run in zip(letters, runs, strict=True))] if runs[1:] else []
    text = table(columns, rows, left={0, 1, 2}, look="facts")
    for run, letter in zip(runs, letters, strict=True):
        text += "".join(note(f"Run {letter}: {words}" if letter else words) for words in run.notes)
    return text


def _times(times: tuple[float, float] | None) -> str:
    if times is None:
        return "not recorded"
    try:
        first, last = (datetime.fromtimestamp(time, UTC) for time in times)
    except (OSError, OverflowError, ValueError):  # broken: no time that a calendar has
        return "not recorded"
    end = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
    return f"{first:%Y-%m-%d %H:%M} to {end} UTC"


def _loss_text(loss: Scalars | None) -> str:
    if loss is None or not len(loss.values):
        return "none was found among the scalars"
    good = np.isfinite(loss.values)
    apart = float(np.ptp(loss.values[good])) / 100 if good.any() else 0.0
    first, last = (measured(float(loss.values[place]), apart) for place in (0, -1))
    broken = np.flatnonzero(~good)
    more = f"; not finite {counted(len(broken), 'time')}, from step {loss.steps[broken[0]]} on" if broken.size else ""
    return f"<code>{esc(loss.tag)}</code> {first} at step {loss.steps[0]}, {last} at step {loss.steps[-1]}{more}"


def _section(section: Section, rows: Rows, loss: Scalars | None) -> str:
    parts = [_tiles(section), *(note(text) for text in section.notes), health(section, rows)]
    parts.append(f"<h3>Warnings</h3>{warnings(section)}<h3>Each quantity over the run</h3>")
    if loss is not None and len(loss.values) > 1 and np.isfinite(loss.values).any():
        picture = curves(loss.steps, [Line(loss.values, loss.tag)], label=f"{loss.tag} over steps")
        parts.append(f"<h4>Loss: <code>{esc(loss.tag)}</code></h4>{picture}")
    for name, opened in main_first(section.quantities):
        parts.append(quantity(section, section.quantities[name], rows, opened=opened))
    parts.append(f"<h3>What was watched</h3>{_watched(section)}")
    return "".join(parts)


def _last(section: Section, cost: str) -> float | None:
    scalars = section.cost.get(cost)
    value = float(scalars.values[-1]) if scalars is not None and len(scalars.values) else math.nan
    return value if math.isfinite(value) else None


def _tiles(section: Section) -> str:
    tiles = [
        (str(section.samples), plural(section.samples, "sample")),
        (f"{section.steps[0]} to {section.steps[1]}", "steps"),
        (str(len(section.layers)), plural(len(section.layers), "layer")),
    ]
    if section.per_head:
        heads = int(section.exists.sum())
        tiles.append((str(heads), plural(heads, "head")))
    if section.alerts_on and section.warned_without_records:
        tiles.append((f"{len(section.alerts)} or more" if section.alerts else NOTHING, "warnings: not in these files"))
    elif section.alerts_on:
        tiles.append((str(len(section.alerts)), plural(len(section.alerts), "warning")))
    share = _last(section, "share_of_run")
    if share is not None:
        tiles.append((f"{share:.2%}", "of the run's time: the monitor"))
    cells = "".join(f'<div class="tile"><b>{esc(figure)}</b><span>{esc(name)}</span></div>' for figure, name in tiles)
    return f'<div class="tiles">{cells}</div>'


def _watched(section: Section) -> str:
    facts = [
        ["looked at", esc(source_text(section))],
        ["sampled", f"{counted(section.samples, 'time')}, steps {section.steps[0]} to {section.steps[1]}"],
        ["cadence", cadence_text(section)],
    ]
    for name, words in _COSTS.items():
        value = _last(section, name)
        if value is not None:
            facts.append([f"monitor, {name.replace('_', ' ')}", words.format(value)])
    layers = [
        [
            str(layer.number),
            f"<code>{esc(layer.path)}</code>" if layer.path else "not recorded",
            NOTHING if layer.heads is None else str(layer.heads),
            number(layer.temperature),
        ]
        for layer in section.layers.values()
    ]
    columns = ["layer", "module", "heads", "softmax temperature, 1 / scale"]
    opened = " open" if len(layers) <= _LAYERS_OPEN else ""
    text = table([], facts, left={0, 1}, look="facts")
    many = counted(len(layers), "layer")
    text += f"<details{opened}><summary>{many}</summary>{table(columns, layers, left={1})}</details>"
    if section.not_measured:
        missing = [[f"<code>{esc(path)}</code>", esc(reason)] for path, reason in section.not_measured.items()]
        text += (
            f"<h4>Attention that was not measured</h4>{table(['module', 'reason'], missing, left={0, 1}, look='facts')}"
        )
    return text
