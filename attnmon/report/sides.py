"""The part of the page that compares two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnmon.report.compare import Comparison, Difference
from attnmon.report.curves import Line, curves, sparkline
from attnmon.report.data import RunData, Section, Series, fine, mean_of_heads
from attnmon.report.health import lost_text, verdict, warnings_text
from attnmon.report.maps import Rows, Scale, colour_bar, heat_map, scale_of
from attnmon.report.quantities import by_size, depth, heads_of, main_first, not_measured
from attnmon.report.text import counted, esc, note, number, shortened, signed, table, why_none

__all__ = ["cadence_text", "comparison", "pair_names", "size_text", "source_text"]

_HEADS_SHOWN = 10
_SOURCES = {"train": "training batches", "probe": "a fixed probe batch", "validation": "validation batches"}


def source_text(section: Section) -> str:
    """What was looked at."""
    return _SOURCES.get(section.source, section.source) or "not recorded"


def cadence_text(section: Section) -> str:
    """How often it was sampled."""
    if section.source == "validation":
        return "when validations ran"
    several = len(section.cadence) > 1
    parts = [
        f"every {f'{every} steps' if every > 1 else 'step'}{f' from step {step}' if several else ''}"
        for every, step in section.cadence
    ]
    return ", ".join(parts) or "not recorded"


def size_text(section: Section) -> str:
    """How many layers and heads."""
    if not section.per_head:
        return f"{counted(len(section.layers), 'layer')} (means over their heads)"
    return f"{counted(len(section.layers), 'layer')}, {counted(int(section.exists.sum()), 'head')}"


def pair_names(entry: Comparison, sides: Sequence[Section]) -> list[str]:
    """What the rows of a difference are called."""
    names = []
    for a, b in entry.pairs:
        path = sides[0].layers[a].path
        name = f"layer {a}" if a == b else f"layer {a} of A and {b} of B"
        names.append(f"{name} ({path})" if path and path == sides[1].layers[b].path else name)
    return names


def comparison(entry: Comparison, runs: Sequence[RunData], rows: Sequence[Rows], names: Sequence[str]) -> str:
    """One prefix of two runs.

    Args:
        entry: How far they are apart.
        runs: The runs.
        rows: What the rows of maps are called: of the first run, of the second, of the difference, and of the
            difference of layer means.
        names: Full names of the pairs of layers.
    """
    sides = [run.sections[entry.prefix] for run in runs]
    parts = [_side_by_side(sides)]
    parts += [note(text) for text in _notes(entry, sides)]
    if not entry.pairs:
        return "".join([*parts, note("No layer of one run goes with a layer of the other.")])
    for name, opened in main_first(entry.differences):
        parts.append(_difference(entry, entry.differences[name], sides, rows, names, opened=opened))
    return "".join(parts)


def _side_by_side(sides: Sequence[Section]) -> str:
    def words(side: Section) -> str:
        if not side.alerts_on:
            return "no warnings recorded"
        text = warnings_text(side)
        return f"{text}. {verdict(side)}" if side.per_head and side.heads_known else text

    rows = [
        ["size", *(size_text(side) for side in sides)],
        ["steps", *(f"{side.steps[0]} to {side.steps[1]}, {counted(side.samples, 'sample')}" for side in sides)],
        ["cadence", *(cadence_text(side) for side in sides)],
        ["looked at", *(esc(source_text(side)) for side in sides)],
        ["health", *(words(side) for side in sides)],
    ]
    return table(["", "run A", "run B"], rows, left={0, 1, 2}, look="facts") + (
        '<p class="soft small">Differences are B less A. Head 3 of one run is head 3 of the other by number only: '
        "unless both began from the same weights, compare the layers.</p>"
    )


def _notes(entry: Comparison, sides: Sequence[Section]) -> list[str]:
    notes = []
    if not entry.by_path and entry.pairs:
        notes.append("No module path is common to both runs: layers are compared by their number in call order.")
    for letter, side, only in zip("AB", sides, entry.only, strict=True):
        if only:
            layers = [side.layers[number] for number in only]
            named = [f"{layer.number}{f' ({layer.path})' if layer.path else ''}" for layer in layers]
            notes.append(f"Layers that only run {letter} has: {shortened(named, 12)}.")
    if entry.other_heads:
        named = [f"layer {a}: {x} and {y}" for a, _, x, y in entry.other_heads]
        notes.append(
            f"Numbers of heads differ ({shortened(named, 6, '; ')}): only the means of these layers are compared."
        )
    for letter, names in zip("AB", entry.only_quantities, strict=True):
        if names:
            notes.append(f"Quantities that only run {letter} has: {', '.join(names)}.")
    every = [side.cadence[-1][0] if side.cadence else None for side in sides]
    if every[0] != every[1] and None not in every:
        notes.append("The cadences differ: over the run, only steps that both sampled are compared.")
    return notes


def _difference(
    entry: Comparison,
    part: Difference,
    sides: Sequence[Section],
    rows: Sequence[Rows],
    names: Sequence[str],
    *,
    opened: bool,
) -> str:
    series = [side.quantities[part.name] for side in sides]
    if without := [letter for letter, one in zip("AB", series, strict=True) if not one.measured]:
        which = "either run" if len(without) == 2 else f"run {without[0]}"
        return not_measured(part.title, f" in {which}: {why_none(part.name)}")
    unit = f", {part.unit}" if part.unit else ""
    parts = [
        f'<details class="block"{" open" if opened else ""}><summary>{esc(part.title)}<span class="soft">{esc(unit)}; '
        f"B less A at the end, mean of the layers {signed(float(mean_of_heads(part.layers_end)))}</span></summary>",
    ]
    for letter, side, one in zip("AB", sides, series, strict=True):
        lost = lost_text(side, one)
        parts += [note(f"Run {letter}: {lost}")] if lost else []
    parts.append(_maps(entry, part, sides, series, rows))
    if len(part.common) > 1 and not np.isfinite(part.layers_common).any():
        parts.append('<p class="soft small">No layer has a figure in both runs at a common step.</p>')
    elif len(part.common) > 1:
        count = part.layers_common.shape[1]
        lines = [
            Line(part.layers_common[:, row], names[row], depth(row, count))
            for row in range(count)
            if np.isfinite(part.layers_common[:, row]).any()
        ]
        label = f"{part.title}: difference over steps"
        parts.append(
            f"<figure><figcaption>B less A, mean of each layer, at the {len(part.common)} common steps; the first "
            f"layer dark, the last light.</figcaption>{curves(part.common, lines, label=label, zero=True)}</figure>"
        )
    else:
        parts.append('<p class="soft small">No two of the steps that were kept are common to both runs.</p>')
    parts.append(_layers(entry, part, series))
    if np.isfinite(part.heads_end).any():
        parts.append(_heads(entry, part, series))
    return "".join([*parts, "</details>"])


def _maps(
    entry: Comparison, part: Difference, sides: Sequence[Section], series: Sequence[Series], rows: Sequence[Rows]
) -> str:
    scale = scale_of(series[0].last, series[1].last, limits=series[0].limits)
    figures, missing, absent = [], False, False
    for letter, side, one, called in zip("AB", sides, series, rows[:2], strict=True):
        exists = heads_of(side, one)
        missing |= bool((exists & ~np.isfinite(one.last)).any())
        absent |= bool((~exists).any())
        label = f"{part.title}, run {letter} at its end"
        picture = heat_map(one.last, exists, scale, called, label=label, unit=part.unit, fine=fine(*series))
        what = f"run {letter}, last figures (step {one.steps[-1]})"
        figures.append(f"<figure><figcaption>{what}</figcaption>{picture}</figure>")
    bars = colour_bar(scale, part.unit, missing=missing, absent=absent)
    if not np.isfinite(part.layers_end).any():  # without these there are none of heads either
        none = note("No layer has a figure in both runs at their ends: there is no difference to show.")
        return f'<div class="columns">{"".join(figures)}</div>{bars}{none}'
    by_head = bool(np.isfinite(part.heads_end).any())
    values = part.heads_end if by_head else part.layers_end[:, None]
    exists = _both(entry, sides, values.shape[1]) if by_head else np.ones(values.shape, dtype=np.bool_)
    most = float(np.nanmax(np.abs(values)))
    ends = Scale(-most, most)
    label = f"{part.title}, B less A at the end"
    picture = heat_map(values, exists, ends, rows[2 if by_head else 3], label=label, unit=part.unit, diverging=True)
    figures.append(f"<figure><figcaption>B less A{'' if by_head else ', layer means'}</figcaption>{picture}</figure>")
    bars += colour_bar(ends, f"{part.unit} (B less A)".strip(), diverging=True)
    return f'<div class="columns">{"".join(figures)}</div><div class="columns">{bars}</div>'


def _both(entry: Comparison, sides: Sequence[Section], heads: int) -> NDArray[np.bool_]:
    """Which heads both runs have, ``(pairs, heads)``."""
    result = np.zeros((len(entry.pairs), heads), dtype=np.bool_)
    for place, pair in enumerate(entry.pairs):
        for head in range(heads):
            result[place, head] = all(
                row < len(side.exists) and head < side.exists.shape[1] and side.exists[row, head]
                for row, side in zip(pair, sides, strict=True)
            )
    return result


def _pair(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} / {pair[1]}"


def _layers(entry: Comparison, part: Difference, series: Sequence[Series]) -> str:
    ends = [mean_of_heads(one.last) for one in series]
    scale, apart = scale_of(part.layers_common), fine(*series)
    common = _common_text(part, series)
    rows = []
    for place, pair in enumerate(entry.pairs):
        figures = [float(end[row]) if row < len(end) else math.nan for end, row in zip(ends, pair, strict=True)]
        if np.isfinite(figures).any() or np.isfinite(part.layers_common[:, place]).any():
            cells = [_pair(pair), *(number(figure, apart) for figure in figures)]
            cells.append(signed(float(part.layers_end[place])))
            cells.append(sparkline(part.layers_common[:, place], scale.low, scale.high))
            rows.append([*cells, signed(float(part.layers_common[-1, place]))] if common else cells)
    columns = ["layer", "A, mean at the end", "B, mean at the end", "difference", "over the common steps"]
    return table([*columns, common] if common else columns, rows, left={4})


def _common_text(part: Difference, series: Sequence[Series]) -> str:
    """Heading of the difference at the last common step; "" where that is the end of both, or there is none."""
    if not len(part.common) or part.common[-1] == series[0].steps[-1] == series[1].steps[-1]:
        return ""
    return f"difference at step {part.common[-1]}"


def _heads(entry: Comparison, part: Difference, series: Sequence[Series]) -> str:
    rows, common, apart = [], _common_text(part, series), fine(*series)
    for place, head in by_size(part.heads_end)[:_HEADS_SHOWN]:
        pair = entry.pairs[place]
        ends = [number(float(one.last[row, head]), apart) for one, row in zip(series, pair, strict=True)]
        cells = [_pair(pair), str(head), *ends, signed(float(part.heads_end[place, head]))]
        if common and part.heads_common is not None:
            cells.append(signed(float(part.heads_common[place, head])))
        rows.append(cells)
    columns = ["layer", "head", "A, end", "B, end", "difference"]
    return f"<h4>Heads that differ most at the end</h4>{table([*columns, common] if common else columns, rows)}"
