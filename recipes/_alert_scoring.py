"""What rules say of stored runs, and how that compares with what was planted. Nothing is trained or read here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _alert_families import CONTROL, KINDS, Family
from _alert_training import Array, Run
from _overhead import Cell, Table, spread
from numpy.typing import NDArray

from attnmon.alerts import Alert, AlertEngine, AlertRules

__all__ = ["SETS", "Outcome", "damage_step", "family_table", "judge", "kind_table", "listing", "score", "signal_table"]

SETS: Mapping[str, str] = {
    "tune": "tuned families, seeds to tune on",
    "score": "tuned families, fresh seeds",
    "unseen": "families and seeds never tuned on",
}
_DECAY = 0.9
_NATS = 0.5
_LASTING = 10  # steps
_SUDDEN = 20  # steps in which the loss is hit
_QUIET = "watch"


@dataclass(frozen=True)
class Outcome:
    """One run as the rules saw it.

    Attributes:
        family: Its family.
        group: Key of `SETS`.
        seed: Its seed.
        text: Its text.
        next_sample: Step of the first sample that can show the plant; None without a plant.
        first: Step of the first alert of a right rule in a planted head, None if there was none.
        signal: The rule that gave it.
        heads: The heads that it named.
        first_rules: Rules of the first alerts of any kind after the plant, of level warn or above.
        exact: Whether the right alerts at ``first`` name planted heads only, and a single planted head.
        damage: Step at which the loss shows it, None if it doesn't.
        false: Alerts of level warn or above that nothing planted explains: step, rule, heads and largest figures.
        extremes: Quantity -> least and largest figure of any head from ``next_sample`` on, or of the whole run.
    """

    family: Family
    group: str
    seed: int
    text: str
    next_sample: int | None = None
    first: int | None = None
    signal: str = ""
    heads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    first_rules: tuple[str, ...] = ()
    exact: bool = False
    damage: int | None = None
    false: tuple[Mapping[str, Any], ...] = ()
    extremes: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def sudden(self) -> bool:
        """Whether the loss was hit at once."""
        step = None if self.family.plant is None else self.family.plant.step
        return self.damage is not None and step is not None and self.damage - step <= _SUDDEN

    @property
    def in_time(self) -> bool:
        """Before the loss; where that is hit at once, with the next sample."""
        if self.first is None or self.next_sample is None:
            return False
        if self.damage is None:
            return True
        return self.first <= self.next_sample if self.sudden else self.first < self.damage

    @property
    def lead(self) -> int | None:
        """Steps between warning and loss."""
        return None if self.first is None or self.damage is None else self.damage - self.first

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "family": self.family.name,
            "kind": self.family.kind,
            "set": self.group,
            "seed": self.seed,
            "text": self.text,
            "planted_at": None if self.family.kind == CONTROL or self.family.plant is None else self.family.plant.step,
            "next_sample": self.next_sample,
            "first": self.first,
            "signal": self.signal,
            "heads": {str(layer): list(heads) for layer, heads in self.heads.items()},
            "first_rules": list(self.first_rules),
            "exact": self.exact,
            "damage": self.damage,
            "sudden": self.sudden,
            "in_time": self.in_time,
            "lead": self.lead,
            "false_alarms": [dict(entry) for entry in self.false],
            "extremes": {name: list(ends) for name, ends in self.extremes.items()},
        }


def judge(run: Run, rules: AlertRules | None = None, patience: int = 3) -> list[Alert]:
    """What the rules say of a run, sample by sample."""
    engine = AlertEngine(rules, patience=patience, gather=2)
    paths = dict(enumerate(run.layers))
    found: list[Alert] = []
    for index, step in enumerate(run.steps.tolist()):
        found += engine.update(
            step=step,
            values={name: _rows(array[index]) for name, array in run.values.items()},
            errors={name: _rows(array[index]) for name, array in run.errors.items()},
            layers=paths,
            temperatures={layer: value for layer, value in enumerate(run.temperatures[index].tolist()) if value > 0},
            nonfinite=_rows(run.nonfinite[index]),
        )
    return found


def _rows(matrix: NDArray[Any]) -> dict[int, list[Any]]:
    return dict(enumerate(matrix.tolist()))


# -- the loss -------------------------------------------------------------------------------------------------------


def smooth(loss: Array) -> Array:
    """Exponential moving average; from the first loss that is not finite on, infinite."""
    found = np.empty(len(loss))
    level = float(loss[0]) if len(loss) else math.nan
    for step, value in enumerate(loss.tolist()):
        level = _DECAY * level + (1 - _DECAY) * value if math.isfinite(level) and math.isfinite(value) else math.inf
        found[step] = level
    return found


def damage_step(loss: Array, healthy: Array | None, start: int) -> int | None:
    """The step at which a loss shows damage.

    Args:
        loss: Of each step.
        healthy: The twin's, of the same steps; None: there is none.
        start: Step of the plant; nothing before counts.

    Returns:
        The first step from ``start`` on whose moving average is 0.5 nats above the twin's, or the first of ten in a
        row in which it is 0.5 nats above its own minimum so far; None if there is neither.
    """
    ours = smooth(loss)
    risen = ours > np.minimum.accumulate(ours) + _NATS
    if healthy is not None:
        theirs = smooth(healthy)
        common = min(len(ours), len(theirs))
    for step in range(start, len(ours)):
        if not math.isfinite(ours[step]):
            return step
        if healthy is not None and step < common and ours[step] > theirs[step] + _NATS:
            return step
        if step + _LASTING <= len(ours) and risen[step : step + _LASTING].all():
            return step
    return None


# -- one run --------------------------------------------------------------------------------------------------------


def score(family: Family, group: str, run: Run, healthy: Run | None, alerts: Sequence[Alert]) -> Outcome:
    """Compare what was said with what was planted.

    Args:
        family: Of the run.
        group: Key of `SETS`.
        run: The run.
        healthy: Its twin, None for a control.
        alerts: What `judge` found.

    Returns:
        The outcome.
    """
    loud = [alert for alert in alerts if alert.severity != _QUIET]
    about = (family, group, int(run.about["seed"]), str(run.about["text"]))
    if family.kind == CONTROL or family.plant is None:
        false = tuple(map(describe, loud))
        return Outcome(*about, false=false, extremes=extremes(run, 0))
    start = family.plant.step
    shown = [step for step in run.steps.tolist() if step > start or (step == start and seen_at_once(family))]
    next_sample = shown[0] if shown else None
    after = [alert for alert in loud if next_sample is not None and alert.step >= next_sample]
    places = family.heads()
    right = [
        alert
        for alert in after
        if alert.rule in family.rules()
        and any(head in places.get(layer, ()) for layer, heads in alert.heads.items() for head in heads)
    ]
    first = right[0].step if right else None
    named = merge(alert.heads for alert in right if alert.step == first)
    return Outcome(
        *about,
        next_sample=next_sample,
        first=first,
        signal="+".join(dict.fromkeys(alert.rule for alert in right if alert.step == first)),
        heads=named,
        first_rules=tuple(alert.rule for alert in after if alert.step == after[0].step),
        exact=first is not None and all(set(heads) <= set(places.get(layer, ())) for layer, heads in named.items()),
        damage=damage_step(run.loss, None if healthy is None else healthy.loss, start),
        false=tuple(describe(alert) for alert in loud if next_sample is None or alert.step < next_sample),
        extremes=extremes(run, next_sample or 0),
    )


def seen_at_once(family: Family) -> bool:
    """Whether a sample of the plant's own step shows it.

    A probe is run before its step and so before anything planted there, but for what the model starts with. A training
    batch is read as it passes.
    """
    plant = family.plant
    if plant is None or family.setup.source == "train":
        return True
    return plant.step == 0 and plant.what in ("query_key_size", "temperature", "inf", "nan", "fp16")


def merge(places: Iterable[Mapping[int, Sequence[int]]]) -> dict[int, tuple[int, ...]]:
    """The union of several alerts' heads."""
    found: dict[int, set[int]] = {}
    for one in places:
        for layer, heads in one.items():
            found.setdefault(layer, set()).update(heads)
    return {layer: tuple(sorted(heads)) for layer, heads in sorted(found.items())}


def describe(alert: Alert) -> dict[str, Any]:
    """An alert in short."""
    return {
        "step": alert.step,
        "rule": alert.rule,
        "severity": alert.severity,
        "heads": {str(layer): list(heads) for layer, heads in alert.heads.items()},
        "figures": {
            part.quantity: [
                min(value for row in part.figures.values() for value in row),
                max(value for row in part.figures.values() for value in row),
            ]
            for part in alert.evidence
        },
    }


def extremes(run: Run, start: int) -> dict[str, tuple[float, float]]:
    """Least and largest figure of any head from a step on."""
    chosen = run.steps >= start
    found = {}
    for name, array in run.values.items():
        finite = array[chosen][np.isfinite(array[chosen])]
        if finite.size:
            found[name] = (float(finite.min()), float(finite.max()))
    return found


# -- tables ---------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "runs",
    "warned",
    "by a right rule first",
    "place",
    "in time",
    "lead, steps",
    "first signal",
    "false alarms",
)


def family_table(outcomes: Sequence[Outcome]) -> Table:
    """One line per family and set."""
    rows: list[tuple[Cell, ...]] = []
    for kind in KINDS:
        for group in SETS:
            chosen = [outcome for outcome in outcomes if outcome.family.kind == kind and outcome.group == group]
            for name in dict.fromkeys(outcome.family.name for outcome in chosen):
                rows.append((name, kind, group, *_cells([one for one in chosen if one.family.name == name])))
    return Table("Families", ("family", "kind", "set", *_COLUMNS), rows)


def kind_table(outcomes: Sequence[Outcome]) -> Table:
    """One line per kind and set."""
    rows: list[tuple[Cell, ...]] = []
    for kind, words in KINDS.items():
        for group in SETS:
            chosen = [outcome for outcome in outcomes if outcome.family.kind == kind and outcome.group == group]
            if chosen:
                rows.append((words, group, *_cells(chosen)))
    for words, planted in (("all that is planted", True), ("all that is healthy", False)):
        for group in SETS:
            chosen = [one for one in outcomes if (one.family.kind != CONTROL) == planted and one.group == group]
            if chosen:
                rows.append((words, group, *_cells(chosen)))
    return Table("Kinds of failure", ("kind", "set", *_COLUMNS), rows)


def _cells(outcomes: Sequence[Outcome]) -> tuple[Cell, ...]:
    count = len(outcomes)
    false = f"{sum(bool(outcome.false) for outcome in outcomes)} of {count}"
    if all(outcome.family.kind == CONTROL for outcome in outcomes):
        return (count, "", "", "", "", "", "", false)
    warned = [outcome for outcome in outcomes if outcome.first is not None]
    leads = [float(outcome.lead) for outcome in warned if outcome.lead is not None]
    lead: Cell = spread(leads) if len(leads) > 1 else leads[0] if leads else ""
    if all(outcome.damage is None for outcome in outcomes):
        lead = "no damage"
    signals = Counter(outcome.signal for outcome in warned)
    return (
        count,
        f"{len(warned)} of {count}",
        f"{sum(set(one.first_rules) <= one.family.rules() for one in warned)} of {len(warned)}",
        f"{sum(outcome.exact for outcome in warned)} of {len(warned)}",
        f"{sum(outcome.in_time for outcome in outcomes)} of {count}",
        lead,
        ", ".join(f"{name} {number}" for name, number in signals.most_common()),
        false,
    )


def signal_table(runs: Sequence[Run]) -> Table:
    """How each figure is distributed over the heads and samples of healthy runs."""
    rows: list[tuple[Cell, ...]] = []
    for label, figures, ends in (*_figures(runs), *_changes(runs)):
        if figures.size:
            low, middle, high = (float(value) for value in np.quantile(figures, (0.05, 0.5, 0.95)))
            rows.append((label, float(figures.min()), low, middle, high, float(figures.max()), *ends))
    columns = ("signal", "least", "5 %", "median", "95 %", "largest", "run of the least", "run of the largest")
    return Table(f"Signals of {len(runs)} healthy runs, over heads and samples", columns, rows)


def _figures(runs: Sequence[Run]) -> list[tuple[str, Array, tuple[str, str]]]:
    names = dict.fromkeys(name for run in runs for name in run.values)
    return [(name, *_pool(runs, [run.values.get(name, np.empty(0)) for run in runs])) for name in names]


def _changes(runs: Sequence[Run]) -> list[tuple[str, Array, tuple[str, str]]]:
    """Score spread against the sample before, and against the head's largest so far."""
    jumps, shares = [], []
    for run in runs:
        spreads = run.values["score_spread"]
        with np.errstate(divide="ignore", invalid="ignore"):
            jumps.append(spreads[1:] / spreads[:-1])
            shares.append(spreads / np.fmax.accumulate(spreads, axis=0))
    return [
        ("score_spread / the sample's before", *_pool(runs, jumps)),
        ("score_spread / its largest so far", *_pool(runs, shares)),
    ]


def _pool(runs: Sequence[Run], arrays: Sequence[NDArray[Any]]) -> tuple[Array, tuple[str, str]]:
    finite = [array[np.isfinite(array)] for array in arrays]
    filled = [(run, array) for run, array in zip(runs, finite, strict=True) if array.size]
    if not filled:
        return np.empty(0), ("", "")
    least, _ = min(filled, key=lambda pair: float(pair[1].min()))
    largest, _ = max(filled, key=lambda pair: float(pair[1].max()))
    return np.concatenate(finite), (_name(least), _name(largest))


def _name(run: Run) -> str:
    return "{family} {text} {seed}".format(**run.about)


def listing(outcomes: Sequence[Outcome]) -> Table:
    """What went wrong, run by run."""
    rows: list[tuple[Cell, ...]] = []
    for one in outcomes:
        about = (one.family.name, one.group, f"{one.text} {one.seed}")
        for entry in one.false[:1]:
            figures = ", ".join(span(name, low, high) for name, (low, high) in entry["figures"].items())
            more = f", and {len(one.false) - 1} more" if len(one.false) > 1 else ""
            rows.append((*about, "false alarm", f"{entry['rule']} at step {entry['step']}: {figures}{more}"))
        if one.family.kind == CONTROL:
            continue
        if one.first is None:
            shown = ("score_spread", "entropy_normalized", "separability@10")
            ends = (span(name, *one.extremes[name]) for name in shown if name in one.extremes)
            said = f"; said: {', '.join(one.first_rules)}" if one.first_rules else ""
            rows.append((*about, "missed", f"{', '.join(ends)}; damage {_at(one.damage)}{said}"))
            continue
        if not one.in_time:
            rows.append((*about, "late", f"{one.signal} {_at(one.first)}, damage {_at(one.damage)}"))
        if not one.exact:
            rows.append((*about, "other heads too", f"{one.signal}: {dict(one.heads)}, planted {one.family.heads()}"))
        if not set(one.first_rules) <= one.family.rules():
            rows.append((*about, "another rule first", f"{', '.join(one.first_rules)}, then {one.signal}"))
    return Table("Misses and false alarms", ("family", "set", "run", "what", "how"), rows)


def span(name: str, low: float, high: float) -> str:
    """A figure's range in words."""
    return f"{name} {low:.3g}" if low == high else f"{name} {low:.3g} to {high:.3g}"


def _at(step: int | None) -> str:
    return "never" if step is None else f"at step {step}"
