"""The part of the page that shows each quantity of a run: maps, curves, layers, heads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from attnmon.report.curves import Limit, Line, Marker, curves, sparkline
from attnmon.report.data import Floats, Section, Series, fine, mean_of_heads
from attnmon.report.health import badge, lost_text
from attnmon.report.maps import SEQUENTIAL, Rows, colour_bar, heat_map, scale_of
from attnmon.report.text import counted, esc, note, number, path_code, signed, table, why_none

__all__ = ["by_size", "depth", "heads_of", "main_first", "not_measured", "quantity", "row_names"]

# Those that the rules read, and those of the paper's figures; the others come folded below them.
_MAIN = (
    "entropy_normalized", "active_share", "separability@10", "jacobian@1.0", "score_spread", "score_max",
    "first_key_weight",
)  # fmt: skip
_HEADS_SHOWN = 10  # rows of the list of heads above the fold
_HEADS_LISTED = 256  # rows in all
_UNDER_DRAWN = 12  # curves of single heads in a chart


def main_first(names: Iterable[str]) -> list[tuple[str, bool]]:
    """The quantities in the order of the page, and whether each is opened."""
    names = list(names)
    main = [name for name in _MAIN if name in names] or names[: len(_MAIN)]
    return [(name, True) for name in main] + [(name, False) for name in names if name not in main]


def row_names(section: Section) -> list[str]:
    """What the layers are called where there is room for it."""
    layers = [section.layers.get(row) for row in range(len(section.exists))]
    return [
        f"layer {row} ({layer.path})" if layer and layer.path else f"layer {row}" for row, layer in enumerate(layers)
    ]


def heads_of(section: Section, series: Series) -> NDArray[np.bool_]:
    """Which heads there are, in the shape of one quantity."""
    rows, columns = series.first.shape
    return section.exists[:rows, :columns]


def depth(row: int, count: int) -> str:
    """Class of a layer's curve: the first dark, the last light, though not too light for white paper."""
    return f"s{round(row / max(count - 1, 1) * (len(SEQUENTIAL) - 3))}"


def by_size(values: Floats) -> list[tuple[int, int]]:
    """Places of a table's figures, the largest in size first; without what was not measured."""
    order = np.argsort(-np.nan_to_num(np.abs(values), nan=-1.0), axis=None, kind="stable")
    places = [divmod(place, values.shape[1]) for place in order.tolist()]
    return [place for place in places if math.isfinite(values[place])]


def not_measured(title: str, words: str) -> str:
    """One line in place of the maps and curves of a quantity without figures."""
    return f'<p class="block"><b>{esc(title)}</b> <span class="soft">not measured{esc(words)}</span></p>'


def quantity(section: Section, series: Series, rows: Rows, *, opened: bool) -> str:
    """All about one quantity.

    Args:
        section: Where it was logged.
        series: Its figures.
        rows: What the rows of its maps are called.
        opened: Whether it is unfolded at first, and lists all heads.
    """
    if not series.measured:
        return not_measured(series.title, f": {why_none(series.name)}")
    first, last = (float(mean_of_heads(mean_of_heads(values))) for values in (series.first, series.last))
    apart = fine(series)
    unit = f", {series.unit}" if series.unit else ""
    state = " open" if opened else ""
    parts = [
        f'<details class="block"{state}><summary>{esc(series.title)}<span class="soft">{esc(unit)}; mean of the layers '
        f"{number(first, apart)} to {number(last, apart)}</span></summary>"
    ]
    readings = [f"{word}: {text}" for word, text in (("A rise", series.rise), ("A fall", series.fall)) if text]
    if readings:
        parts.append(f'<p class="soft small">{esc(". ".join(readings))}.</p>')
    lost = lost_text(section, series)
    parts += [note(lost)] if lost else []
    parts += [_maps(section, series, rows), _chart(section, series), _layers(section, series)]
    if section.per_head:
        parts.append(_heads(section, series, _HEADS_LISTED if opened else _HEADS_SHOWN))
    return "".join([*parts, "</details>"])


def _maps(section: Section, series: Series, rows: Rows) -> str:
    exists = heads_of(section, series)
    shown = [
        (int(series.steps[0]), series.values[0], "first"),
        _worst(section, series),
        (int(series.steps[-1]), series.values[-1], "last"),
    ]
    scale = scale_of(*(values for _, values, _ in shown), limits=series.limits)
    figures = []
    for step, values, what in shown:
        label = f"{series.title} at step {step}, {what}"
        picture = heat_map(values, exists, scale, rows, label=label, unit=series.unit, fine=fine(series))
        figures.append(f"<figure><figcaption>step {step}: {esc(what)}</figcaption>{picture}</figure>")
    missing = any(bool((exists & ~np.isfinite(values)).any()) for _, values, _ in shown)
    bar = colour_bar(scale, series.unit, missing=missing, absent=bool((~exists).any()))
    return f'<div class="columns">{"".join(figures)}</div>{bar}'


def _worst(section: Section, series: Series) -> tuple[int, Floats, str]:
    """The step with most heads under an alarm by this quantity; without any, the step furthest from the beginning."""
    under = np.zeros(len(series.steps), dtype=np.int64)
    for alarm in section.alarms:
        if alarm.quantity == series.name:
            end = math.inf if alarm.end is None else alarm.end
            under += (series.steps >= alarm.start) & (series.steps < end)
    place = int(under.argmax())
    if under[place]:
        count = counted(int(under[place]), "head")
        return int(series.steps[place]), series.values[place], f"most under alarm ({count})"
    return series.furthest_step, series.furthest, "furthest from the first"


def _chart(section: Section, series: Series) -> str:
    means, names = series.layer_means, row_names(section)
    count = means.shape[1]
    of_heads = ", mean of its heads" if section.per_head else ""
    lines = [
        Line(means[:, row], names[row] + of_heads, depth(row, count))
        for row in range(count)
        if np.isfinite(means[:, row]).any()
    ]
    alarms = [alarm for alarm in section.alarms if alarm.quantity == series.name and alarm.end is None]
    under = list(dict.fromkeys((alarm.layer, alarm.head) for alarm in alarms))
    for layer, head in under[:_UNDER_DRAWN]:
        if layer < count and head < series.values.shape[2]:
            name = f"layer {layer}, head {head}: under alarm at the end"
            lines.append(Line(series.values[:, layer, head], name, "under"))
    limits = [
        Limit(float(level["limit"]), str(level["title"]))
        for level in section.levels
        if level["quantity"] == series.name
    ]
    markers = [
        Marker(alert["step"], alert["severity"], f"step {alert['step']}: {alert['title']}")
        for alert in section.alerts
        if any(part["quantity"] == series.name for part in alert["evidence"])
    ]
    band = None
    caption = ["Each layer, the first dark, the last light"]
    if section.per_head:
        caption = ["The mean over each layer's heads, the first layer dark, the last light"]
        flat = series.values.reshape(len(series.values), -1)
        finite = np.isfinite(flat)
        band = np.where(finite, flat, np.inf).min(axis=1), np.where(finite, flat, -np.inf).max(axis=1)
        caption.append("shaded: from the lowest to the highest head")
    if under:
        which = f"{_UNDER_DRAWN} of {len(under)}" if len(under) > _UNDER_DRAWN else "the"
        caption.append(f"dotted: {which} heads that this quantity has under alarm at the end")
    if markers:
        caption.append("triangles: warnings")
    picture = curves(series.steps, lines, label=f"{series.title} over steps", band=band, limits=limits, markers=markers)
    return f"<figure><figcaption>{esc('; '.join(caption))}.</figcaption>{picture}</figure>"


def _layers(section: Section, series: Series) -> str:
    first, last, means = mean_of_heads(series.first), mean_of_heads(series.last), series.layer_means
    scale, apart = scale_of(means), fine(series)
    alarms = [alarm for alarm in section.alarms if alarm.quantity == series.name]
    under = Counter(layer for layer, _ in {(alarm.layer, alarm.head) for alarm in alarms if alarm.end is None})
    rows = []
    for row in np.flatnonzero(np.isfinite(first)).tolist():
        path = section.layers[row].path if row in section.layers else ""
        cells = [
            str(row),
            path_code(path),
            _first(series, series.first_step[row], number(float(first[row]), apart)),
            number(float(last[row]), apart),
            signed(float(last[row] - first[row])),
            _extreme(section, series, series.low[row], series.low_step[row], int(np.nanargmin(series.low[row]))),
            _extreme(section, series, series.high[row], series.high_step[row], int(np.nanargmax(series.high[row]))),
            sparkline(means[:, row], scale.low, scale.high),
        ]
        rows.append([*cells, str(under[row] or "")] if alarms else cells)
    names = ["mean, first", "mean, last", "change", "lowest head", "highest head"]
    if not section.per_head:
        names = ["first", "last", "change", "lowest", "highest"]
    columns = ["layer", "module", *names, "over the run"]
    return table([*columns, "heads under alarm"] if alarms else columns, rows, left={1, 7})


def _first(series: Series, steps: NDArray[np.int64], text: str) -> str:
    """With its step, where that is not the first sample's."""
    last = int(steps.max())
    if last <= series.steps[0]:
        return text
    several = bool((steps[steps >= 0] < last).any())
    return f"{text} <small>({'up to ' if several else ''}step {last})</small>"


def _extreme(section: Section, series: Series, values: Floats, steps: NDArray[np.int64], head: int) -> str:
    where = f"head {head}, step {steps[head]}" if section.per_head else f"step {steps[head]}"
    return f"{number(float(values[head]), fine(series))} <small>({where})</small>"


def _heads(section: Section, series: Series, most: int) -> str:
    """Heads by how much they changed."""
    change, status = series.change, section.status()
    places = by_size(change)
    scale, apart = scale_of(series.low, series.high), fine(series)
    rows = []
    for layer, head in places[:most]:
        first = _first(series, series.first_step[layer, head, None], number(float(series.first[layer, head]), apart))
        last = number(float(series.last[layer, head]), apart)
        cells = [str(layer), str(head), first, last, signed(float(change[layer, head]))]
        cells.append(sparkline(series.values[:, layer, head], scale.low, scale.high))
        if section.alerts_on:
            cells.append(badge(status.get((layer, head)), known=section.heads_known))
        rows.append(cells)
    columns = ["layer", "head", "first", "last", "change", "over the run"]
    columns += ["by any rule"] if section.alerts_on else []
    text = table(columns, rows[:_HEADS_SHOWN], left={5, 6})
    left = len(places) - len(rows)
    if rows[_HEADS_SHOWN:]:
        following = len(rows) - _HEADS_SHOWN
        next_ones = f"{following} heads" if following > 1 else "head"
        more = f"the next {next_ones}{f' ({left} more in the JSON file)' if left else ''}"
        rest = table(columns, rows[_HEADS_SHOWN:], left={5, 6})
        text += f'<details><summary class="small">{more}</summary>{rest}</details>'
    elif left:
        text += f'<p class="soft small">{left} more in the JSON file</p>'
    return f"<h4>Heads that changed most from first to last</h4>{text}"
