"""From what the rules found of heads to the one message of a rule at a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from attnmon.alerts.base import HeadMemory, Rule, Signal
from attnmon.alerts.text import Alert, Evidence, describe_heads, figures_text

__all__ = ["Told", "raised_alert", "recovered_alert"]


@dataclass(frozen=True)
class Told:
    """What one signal has to tell.

    Attributes:
        signal: The signal.
        heads: Layer -> head -> figure and memory.
    """

    signal: Signal
    heads: Mapping[int, Mapping[int, tuple[float, HeadMemory]]]


def raised_alert(
    rule: Rule,
    step: int,
    told: Sequence[Told],
    head_counts: Mapping[int, int],
    layers: Mapping[int, str],
    prefix: str,
    alarmed: Mapping[int, Mapping[int, int]],
    others: Mapping[str, Mapping[int, Mapping[int, int]]] = MappingProxyType({}),
) -> Alert | None:
    """The message about heads that have entered a rule's trouble; None if there are none.

    Args:
        rule: The rule.
        step: Of the sample.
        told: The heads, by signal.
        head_counts: Number of heads of each layer.
        layers: Module paths.
        prefix: First part of the tag.
        alarmed: Layer -> head -> since when, of all heads under the rule's alarm now.
        others: Rule -> the same, of rules that are worth a word beside this one.
    """
    if not told:
        return None
    places = _union(told)
    memories = [memory for one in told for heads in one.heads.values() for _, memory in heads.values()]
    since = min(step if memory.since is None else memory.since for memory in memories)
    samples = max(1, min(memory.streak for memory in memories))
    evidence = tuple(_evidence(rule, one, leaving=False) for one in told)
    new = sum(map(len, places.values()))
    under = sum(map(len, alarmed.values()))
    summary = (
        f"{rule.title} in {describe_heads(places, head_counts, layers)}: "
        f"{' and '.join(figures_text(part, new) for part in evidence)} "
        f"{f'for {samples} samples, since step {since}' if samples > 1 else f'at step {step}'}"
        f"{f' ({under} heads under this alarm now)' if under > new else ''}; {rule.meaning}."
        f"{_origin(step, layers, alarmed) if rule.spreads else ''}{_also(rule, places, others)}"
    )
    remedy = rule.remedy_of(
        {one.signal: [memory for heads in one.heads.values() for _, memory in heads.values()] for one in told}
    )
    if _starts(places, others.get(rule.explained_by, {})):
        remedy = f"that of {rule.explained_by} first, which may be the cause; else {remedy}"
    return _alert(rule, step, evidence, layers, prefix, since=since, samples=samples, summary=summary, remedy=remedy)


def _origin(step: int, layers: Mapping[int, str], alarmed: Mapping[int, Mapping[int, int]]) -> str:
    """Where trouble began that reaches every layer behind, and with a step of the optimizer all others, too."""
    starts: dict[tuple[int, int], list[int]] = {}
    for layer, heads in alarmed.items():
        for head, since in heads.items():
            starts.setdefault((since, layer), []).append(head)
    if len(starts) < 2:
        return ""
    since, layer = min(starts)  # layers are numbered as the model calls them
    names = sorted(starts[since, layer])
    where = f"head{'s' if len(names) > 1 else ''} {', '.join(map(str, names))} of layer {layer}"
    where += f" ({layers[layer]})" if layers.get(layer) else ""
    if since < step:
        return f" It began at step {since}, with {where}: look there first."
    return f" Look first at {where}, which is called before the others."


def _also(
    rule: Rule, places: Mapping[int, Sequence[int]], others: Mapping[str, Mapping[int, Mapping[int, int]]]
) -> str:
    """Other warnings about the same heads: one cause may have several signs."""
    found = []
    for name, layers in others.items():
        starts = _starts(places, layers)
        if starts and name != rule.name:
            found.append(f"{name} since step {min(starts)}")
    return f" Also under alarm there: {', '.join(found)}." if found else ""


def _starts(places: Mapping[int, Sequence[int]], alarmed: Mapping[int, Mapping[int, int]]) -> list[int]:
    return [since for layer, heads in alarmed.items() for head, since in heads.items() if head in places.get(layer, ())]


def recovered_alert(
    rule: Rule,
    step: int,
    told: Sequence[Told],
    head_counts: Mapping[int, int],
    layers: Mapping[int, str],
    prefix: str,
    patience: int,
) -> Alert | None:
    """The message about heads whose alarm has ended; None if there are none. Arguments as for `raised_alert`."""
    if not told:
        return None
    places = _union(told)
    starts = [memory.alarm_since for one in told for heads in one.heads.values() for _, memory in heads.values()]
    since = min(step if start is None else start for start in starts)
    evidence = tuple(_evidence(rule, one, leaving=True) for one in told)
    gone = sum(map(len, places.values()))
    summary = (
        f"{rule.title}: over in {describe_heads(places, head_counts, layers)}, after an alarm since step {since}: "
        f"{' and '.join(figures_text(part, gone) for part in evidence)} "
        f"{f'for {patience} samples' if patience > 1 else f'at step {step}'}."
    )
    return _alert(rule, step, evidence, layers, prefix, since=since, samples=patience, summary=summary, ended=True)


def _alert(
    rule: Rule, step: int, evidence: tuple[Evidence, ...], layers: Mapping[int, str], prefix: str, **told: Any
) -> Alert:
    """An alert with what is the same whether its heads enter or leave."""
    places = _union(evidence)
    return Alert(
        step=step,
        rule=rule.name,
        title=rule.title,
        severity=rule.severity,
        heads=places,
        layers={layer: layers[layer] for layer in places if layer in layers},
        evidence=evidence,
        tag=f"{prefix}/warnings/{rule.name}",
        **{"remedy": "", **told},
    )


def _union(told: Sequence[Told] | Sequence[Evidence]) -> dict[int, tuple[int, ...]]:
    places: dict[int, set[int]] = {}
    for one in told:
        for layer, heads in one.heads.items():
            places.setdefault(layer, set()).update(heads)
    return {layer: tuple(sorted(heads)) for layer, heads in sorted(places.items())}


def _evidence(rule: Rule, told: Told, *, leaving: bool) -> Evidence:
    signal = told.signal
    baselines = {
        layer: tuple(math.nan if memory.baseline is None else memory.baseline for _, memory in heads.values())
        for layer, heads in told.heads.items()
    }
    return Evidence(
        quantity=signal.quantity,
        label=signal.label,
        heads={layer: tuple(heads) for layer, heads in told.heads.items()},
        figures={layer: tuple(figure for figure, _ in heads.values()) for layer, heads in told.heads.items()},
        baselines=baselines,
        limits={
            layer: tuple(rule.limits(signal, baseline)[int(leaving)] for baseline in row)
            for layer, row in baselines.items()
        },
        limit_text="back on the good side" if leaving else rule.limit_text(signal),
    )
