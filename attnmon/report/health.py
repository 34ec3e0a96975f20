"""The part of the page that says which heads are in trouble: the verdict, and every warning with its remedy.

Nothing is judged here. A head is under alarm or has recovered because the rules said so during the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnmon.alerts import AlertRules
from attnmon.alerts.base import SEVERITIES
from attnmon.alerts.text import describe_heads
from attnmon.report.data import Alarm, HeadStatus, Section, Series
from attnmon.report.maps import Rows, key, status_map
from attnmon.report.text import NOTHING, counted, esc, note, number, short_path, shortened, table

__all__ = ["badge", "health", "look_of", "lost_text", "verdict", "warnings", "warnings_text"]

_NOT_HERE = "the warnings themselves are not in these files"
_EVIDENCE_ROWS = 64
_RULES = {rule.name: rule for rule in AlertRules().active()}


def look_of(status: HeadStatus | None) -> str:
    """Class in the style sheet: "watch" only asks for a look, and is drawn so."""
    if status is None:
        return "calm"
    if not status.under:
        return "recovered"
    return "watching" if status.severity == "watch" else "alarm"


def badge(status: HeadStatus | None, *, known: bool = True) -> str:
    """A head's status as a label; where not all warnings are known, none says nothing."""
    if status is None:
        return '<span class="badge none">never warned</span>' if known else NOTHING
    text = f"under alarm: {status.severity}" if status.under else "recovered"
    return f'<span class="badge {look_of(status)}">{esc(text)}</span>'


def verdict(section: Section) -> str:
    """One sentence, as HTML."""
    statuses = list(section.status().values())
    total, under = int(section.exists.sum()), [status for status in statuses if status.under]
    back = len(statuses) - len(under)
    kinds = Counter(status.severity for status in under)
    order = [kind for kind in (*reversed(SEVERITIES), *sorted(kinds)) if kinds[kind]]
    of_which = ", ".join(f"{kinds[kind]} {esc(kind)}" for kind in dict.fromkeys(order))
    grave = any(look_of(status) == "alarm" for status in under)
    parts = [
        f"<b{' class=bad' if grave else ''}>{len(under)}</b> of {counted(total, 'head')} "
        f"{'is' if len(under) == 1 else 'are'} under an alarm at the end of the run{f' ({of_which})' if under else ''}"
    ]
    if back:
        parts.append(f"<b class=back>{back}</b> {'was' if back == 1 else 'were'} earlier and recovered")
    if never := total - len(statuses):
        parts.append(f"{never} never gave a warning")
    return ", ".join(parts) + "."


def warnings_text(section: Section) -> str:
    """How many warnings there were, as far as the files tell."""
    count = len(section.alerts)
    text = counted(count, "warning")
    if not section.warned_without_records:
        return text
    return f"at least {text}: others are not in these files" if count else _NOT_HERE


def lost_text(section: Section, series: Series) -> str:
    """The heads that had a figure once and have none at the end; "" where there are none."""
    if not series.lost:
        return ""
    one = sum(map(len, series.lost.values())) == 1
    last = sorted({int(series.last_step[layer, head]) for layer, heads in series.lost.items() for head in heads})
    steps = f"step {last[0]}" if len(last) == 1 else f"steps {last[0]} to {last[-1]}"
    if section.per_head:
        where = describe_heads(series.lost, *_layers(section))
    else:
        where = shortened([f"layer {layer}" for layer in series.lost], 8)
    return f"No figure at the last sample, though there {'was one' if one else 'were some'} up to {steps}: {where}."


def health(section: Section, rows: Rows) -> str:
    """The verdict in a sentence, as a map and by rule."""
    if not section.alerts_on:
        return note(
            "The files hold no warnings and no number of heads under alarm: the rules were off, or the logger kept "
            "neither. So nothing is said here about heads in trouble; see the figures below."
        )
    title = "<h3>Health of the heads</h3>"
    if not section.heads_known:
        text = f"Which heads are or were under alarm is not fully known: {warnings_text(section)}."
        return title + note(text) + _by_rule(section) + _where(section)
    if not section.per_head:
        return title + _by_rule(section)
    text = f'<p class="verdict">{verdict(section)}</p>'
    figure = f'<figure class="narrow">{_map(section, rows)}</figure>'
    return f'{title}{text}<div class="columns">{figure}{_by_rule(section)}</div>{_where(section)}'


def _map(section: Section, rows: Rows) -> str:
    status = section.status()
    told: dict[tuple[int, int], list[str]] = {}
    for alarm in section.alarms:
        told.setdefault((alarm.layer, alarm.head), []).append(_alarm_text(section, alarm))
    looks, words = [], []
    for layer, there in enumerate(section.exists.tolist()):
        places = [(layer, head) for head in range(len(there))]
        looks.append([look_of(status.get(place)) if there[place[1]] else "" for place in places])
        words.append([" and ".join(told.get(place, ["never warned"])) if there[place[1]] else "x" for place in places])
    picture = status_map(looks, rows, label="What the warnings say of each head", words=words)
    legend = key("under alarm (warn, critical)", "alarm") + key("under alarm (watch)", "watching")
    legend += key("recovered", "recovered") + key("never warned", "calm")
    return f'{picture}<p class="bar">{legend}</p>'


def _alarm_text(section: Section, alarm: Alarm) -> str:
    """Without the characters that part cells and rows, see `status_map`."""
    title = _title(section, alarm.rule).replace(",", " ").replace(";", " ")
    if alarm.end is None:
        return f"{title} since step {alarm.since} and still under alarm"
    return f"{title} since step {alarm.since} and recovered by step {alarm.end}"


def _title(section: Section, rule: str) -> str:
    for alert in section.alerts:
        if alert["rule"] == rule:
            return str(alert["title"])
    return _RULES[rule].title if rule in _RULES else rule


def _by_rule(section: Section) -> str:
    raised = Counter(alert["rule"] for alert in section.alerts)
    rows = []
    under = {alarm.rule for alarm in section.alarms}
    for rule in sorted({*section.counts, *raised, *under}, key=lambda rule: (-raised[rule], rule)):
        most = end = NOTHING
        there = rule in under
        count = section.counts.get(rule)
        if count is not None and np.isfinite(count.values).any():
            place = int(np.nanargmax(count.values))
            most, end = f"{count.values[place]:.0f}", number(float(count.values[-1]))
            if count.values[place] > 0:
                there = True
                most += f" <small>(step {count.steps[place]})</small>"
        known = raised[rule] or not (section.unread or there)
        rows.append([esc(_title(section, rule)), str(raised[rule]) if known else NOTHING, most, end])
    return table(["rule", "warnings", "heads at once, most", "at the end"], rows, left={0}) if rows else ""


def _where(section: Section) -> str:
    """By rule: which heads are under alarm at the end, and which have recovered."""
    lines = []
    for under in (True, False):
        groups: dict[tuple[str, str], dict[int, set[int]]] = {}
        for alarm in section.alarms:
            if (alarm.end is None) == under:
                groups.setdefault((alarm.rule, alarm.severity), {}).setdefault(alarm.layer, set()).add(alarm.head)
        for (rule, severity), layers in sorted(groups.items(), key=lambda group: _rank(group[0][1])):
            heads = {layer: sorted(found) for layer, found in sorted(layers.items())}
            named = describe_heads(heads, *_layers(section))
            lines.append(f"<li>{badge(HeadStatus(under, severity))} {esc(_title(section, rule))}: {esc(named)}</li>")
    return f'<ul class="plain small">{"".join(lines)}</ul>' if lines else ""


def _layers(section: Section) -> tuple[dict[int, int], dict[int, str]]:
    """Number of heads, and module path, of each layer."""
    return (
        {number: layer.heads or 0 for number, layer in section.layers.items()},
        {number: short_path(layer.path) for number, layer in section.layers.items()},
    )


def warnings(section: Section) -> str:
    """Every warning, by rule, the gravest first."""
    if not section.alerts:
        if section.warned_without_records:
            return note(f"{'Records could not be read' if section.unread else 'Heads came under alarm'}: {_NOT_HERE}.")
        return '<p class="soft">None is recorded.</p>'
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for alert in section.alerts:
        groups.setdefault((alert["rule"], alert["severity"], alert["remedy"]), []).append(alert)
    parts = []
    if section.warned_without_records:
        parts.append(note("These are not all: others are not in these files, or could not be read."))
    for (rule, severity, remedy), alerts in sorted(groups.items(), key=lambda group: _rank(group[0][1])):
        count = counted(len(alerts), "warning")
        parts.append(
            f'<div class="rule"><h4><span class="badge {esc(severity)}">{esc(severity)}</span>'
            f'{esc(alerts[0]["title"])} <span class="soft small">{count}</span></h4>'
        )
        if rule in _RULES:
            parts.append(f"<p><b>What it means.</b> {esc(_sentence(_RULES[rule].meaning))}</p>")
        parts.append(f"<p><b>Remedy.</b> {esc(_sentence(remedy))}</p>")
        parts += [_warning(section, alert) for alert in alerts]
        parts.append("</div>")
    return "".join(parts)


def _rank(severity: str) -> int:
    return -SEVERITIES.index(severity) if severity in SEVERITIES else 1


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _warning(section: Section, alert: Mapping[str, Any]) -> str:
    heads = {int(layer): found for layer, found in alert["heads"].items()}
    where = describe_heads(heads, *_layers(section))
    rows = [
        [
            esc(layer), esc(head), esc(part["label"]),
            *(number(part[name][layer][place]) for name in ("figures", "baselines", "limits")),
        ]
        for part in alert["evidence"]
        for layer, found in part["heads"].items()
        for place, head in enumerate(found)
    ]  # fmt: skip
    more = len(rows) - _EVIDENCE_ROWS
    return (
        f"<details><summary>step {alert['step']}: {esc(where)} "
        f'<span class="soft small">beyond the limit since step {esc(alert["since"])}</span></summary>'
        f'<p class="small">{esc(_sentence(alert["summary"]))}</p>'
        + table(["layer", "head", "quantity", "figure", "baseline", "limit"], rows[:_EVIDENCE_ROWS], left={2})
        + (f'<p class="soft small">and {more} more, in the JSON file</p>' if more > 0 else "")
        + "</details>"
    )
