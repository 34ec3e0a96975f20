"""The memory of the rules over a run, and one message per sampled step and rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnmon.alerts.base import SETTLED, SLACKENING, HeadMemory, Rule, Signal, advance, is_beyond
from attnmon.alerts.baselines import Baselines
from attnmon.alerts.gathering import Gathering, Starts
from attnmon.alerts.growth import Growth
from attnmon.alerts.messages import Told, raised_alert, recovered_alert
from attnmon.alerts.rules import AlertRules
from attnmon.alerts.sample import Figures, Sample, take_sample
from attnmon.alerts.text import Alert

__all__ = ["AlertEngine"]

_VERSION = 3
_FRESH = asdict(HeadMemory())
_QUIET = "watch"
_Place = tuple[int, int]  # layer and head
_Found = dict[int, dict[int, tuple[float, HeadMemory]]]


@dataclass(frozen=True)
class _Context:
    """Heads of a layer that some rule warns of, and those under the alarm of the rule at hand, since when."""

    troubled: Mapping[int, Collection[int]]
    before: Starts


class AlertEngine:
    """Shows every sample of a run to every rule and says what is new.

    An alert is raised when a head enters a rule's trouble and is not repeated while it stays there: only after it has
    recovered (``patience`` samples back beyond the rule's leave level) and entered again. A head that was not
    measured at a sample (NaN, or absent) is left exactly as it was, but for the rule that is about this. Layers and
    heads may appear at any time. All counts are of samples: after a change of the cadence they go on as they are.

    Args:
        rules: The rules and their numbers; None = the defaults.
        patience: Consecutive samples beyond the limit before an alert (rules may have their own number), and
            consecutive samples back before it ends. 1 or more.
        prefix: First part of `Alert.tag`.
        gather: Samples for which, after a rule's message, further heads of that rule are gathered for one common
            message, so that a failure which spreads over a model is not told head by head. Doubles with each message,
            until no head is under the rule's alarm any more. 0: every sample has its own.

    Attributes:
        recoveries: What ended at the last sample: at most one `Alert` per rule, with ``ended`` set.
        unknown_to_baselines: What is to be said of heads that the baselines given know nothing of; mostly "".

    Raises:
        ValueError: If ``patience`` is below 1 or not an integer.
        TypeError: If ``rules`` is not an `AlertRules`.

    Example:
        >>> engine = AlertEngine(patience=2)
        >>> for step, spread, entropy in [(0, 3.2, 0.5), (50, 3.2, 0.5), (100, 0.05, 0.99), (150, 0.05, 0.99)]:
        ...     values = {"score_spread": {3: [1.2, spread]}, "entropy_normalized": {3: [0.8, entropy]}}
        ...     for alert in engine.update(step, values, layers={3: "h.3.attn"}):
        ...         print(alert.summary)
        attention going uniform in head 1 of layer 3 (h.3.attn): score spread 0.05 against a baseline of 3.20 (-98%, \
limit: 10% of the sample before with normalised entropy above 0.95) at step 100; the scores no longer tell the keys \
apart, so the head averages all it sees.
        entropy rising in head 1 of layer 3 (h.3.attn): normalised entropy 0.99 against a baseline of 0.50 (+98%, \
limit: 40% of the way from the baseline to 1) for 2 samples, since step 100; attention spreads toward uniform and \
selects less. Also under alarm there: uniform_drift since step 100.
        >>> engine.alarmed()["uniform_drift"]
        {3: (1,)}
    """

    def __init__(
        self, rules: AlertRules | None = None, *, patience: int = 3, prefix: str = "attn", gather: int = 0
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(
                f"Expected `patience` to be an integer >= 1 (sampled steps), but got {patience!r}. "
                f"1 alerts at the first sample beyond a limit; 3 is the default."
            )
        if rules is not None and not isinstance(rules, AlertRules):
            raise TypeError(
                f"Expected `rules` to be an AlertRules or None, but got {type(rules).__name__}. "
                f"Write e.g. AlertRules(entropy_rise=EntropyRise(share=0.6))."
            )
        self.rules = rules if rules is not None else AlertRules()
        self.patience = patience
        self.prefix = prefix
        self.recoveries: list[Alert] = []
        self.unknown_to_baselines = ""
        self._gathering = Gathering(gather)
        self._memory: dict[str, dict[str, dict[int, dict[int, HeadMemory]]]] = {}  # rule, signal, layer, head
        self._alarms: dict[str, dict[str, set[_Place]]] = {}  # rule, signal -> heads whose memory is alarmed
        self._growth: dict[int, dict[int, Growth]] = {}
        self._raised: dict[str, int] = {}
        self._heads: dict[int, int] = {}  # number of heads of each layer that was ever measured
        self._paths: dict[int, str] = {}
        self._quantities: tuple[str, ...] = ()  # of the newest sample
        self._given: Baselines | None = None

    def update(
        self,
        step: int,
        values: Figures,
        *,
        errors: Figures | None = None,
        layers: Mapping[int, str] | None = None,
        temperatures: Mapping[int, float] | None = None,
        nonfinite: Mapping[int, Sequence[int]] | None = None,
    ) -> list[Alert]:
        """Take in one sample.

        Args:
            step: Optimizer step of the sample.
            values: ``values[quantity][layer]``, one figure per head; NaN = not measured. See `ALERT_QUANTITIES`.
            errors: Standard errors of the same shape; what is absent counts as 0. NaN beside a figure: it is from a
                single row, and counts for no rule that asks for more than noise.
            layers: Module paths, for the messages.
            temperatures: The model's own absolute softmax temperature ``1/scale`` of each layer.
            nonfinite: Rows with NaN or infinite scores in this sample, per layer and head.

        Returns:
            At most one alert per rule, in the order of the rules; [] if nothing is new. What has ended is in
            `recoveries`.
        """
        self._paths.update(layers or {})
        self._quantities = tuple(values)
        known = dict(self._heads)
        for table in (*values.values(), nonfinite or {}):
            for layer, row in table.items():
                self._heads[layer] = max(self._heads.get(layer, 0), len(row))
        if self._given is not None and self._heads != known:
            self.unknown_to_baselines = self._given.unknown(self._heads, self._paths)
        sample = take_sample(step, values, errors or {}, temperatures or {}, nonfinite or {}, self._heads)
        self._grow(sample)
        watched = {rule: rule.signals(sample.figures) for rule in self.rules.active()}
        beyond = {rule: {signal: self._beyond(rule, signal, sample) for signal in watched[rule]} for rule in watched}
        before: dict[str, Starts] = {rule.name: self._alarmed(rule.name) for rule in watched}
        # What a head shows while another rule warns of it is no reference: it is not what the head was, nor will be.
        troubled: dict[int, set[int]] = {}
        for rule in watched:
            if rule.severity != _QUIET:
                places: list[Mapping[int, Collection[int]]] = [before[rule.name], *beyond[rule].values()]
                for heads_of in places:
                    for layer, heads in heads_of.items():
                        troubled.setdefault(layer, set()).update(heads)
        news: list[tuple[Rule, list[Told]]] = []
        self.recoveries = []
        for rule, signals in watched.items():
            raised: list[Told] = []
            ended: list[Told] = []
            context = _Context(troubled, before[rule.name])
            for signal in signals:
                found = self._watch(rule, signal, sample, beyond[rule][signal], context)
                raised.append(Told(signal, found[0]))
                ended.append(Told(signal, found[1]))
            after = self._alarmed(rule.name)
            memories = self._memory.get(rule.name, {})
            ended = self._gathering.leaving(rule, ended, after)
            new = _without(raised, before[rule.name])
            news.append((rule, self._gathering.entering(rule, new, sample.figures, after, memories)))
            recovery = recovered_alert(
                rule, step, _without(ended, after), self._heads, self._paths, self.prefix, self.patience
            )
            if recovery is not None:
                self.recoveries.append(recovery)
        alerts = []
        under = self._under()
        loud = {rule.name: under[rule.name] for rule in watched if rule.severity != _QUIET}
        for rule, told in news:
            alert = raised_alert(rule, step, told, self._heads, self._paths, self.prefix, under[rule.name], others=loud)
            if alert is not None:
                self._raised[rule.name] = self._raised.get(rule.name, 0) + 1
                alerts.append(alert)
        return alerts

    def _grow(self, sample: Sample) -> None:
        """Show the scores of every head to its `Growth`, and what that says to the rules."""
        for layer, row in sample.figures.get("score_spread", {}).items():
            heads = self._growth.setdefault(layer, {})
            errors, company = sample.errors["score_spread"][layer], sample.company[layer]
            for head, spread in enumerate(row):
                growth = heads.get(head)
                if growth is None:
                    growth = heads[head] = Growth(self._fresh("score_growth", "score_spread:jump", layer, head).first)
                if errors[head] is not None:
                    growth.update(sample.step, spread)
                company[head][SLACKENING] = growth.slackening
                company[head][SETTLED] = float(growth.settled)

    def _beyond(self, rule: Rule, signal: Signal, sample: Sample) -> dict[int, set[int]]:
        """The heads that lie beyond the limit of one signal of one rule: layer -> heads."""
        memories = self._memory.setdefault(rule.name, {}).setdefault(signal.key, {})
        result = {}
        for layer, row in sample.figures[signal.quantity].items():
            own = memories.setdefault(layer, {})
            for head in range(len(own), len(row)):
                own[head] = HeadMemory() if signal.learning is None else self._fresh(rule.name, signal.key, layer, head)
            errors, company = sample.errors[signal.quantity][layer], sample.company[layer]
            found = set()
            for head, figure, error in _judged(rule, row, errors):
                if is_beyond(rule, signal, own[head], figure, error) and rule.in_company(signal, company[head]):
                    found.add(head)
            crowded = not signal.crowd or len(found) >= max(2.0, signal.crowd * len(row))
            result[layer] = found if crowded else set()
        return result

    def _watch(
        self, rule: Rule, signal: Signal, sample: Sample, beyond: Mapping[int, Collection[int]], context: _Context
    ) -> tuple[_Found, _Found]:
        """Step one signal of one rule over all heads: figure and memory of those that enter, and that leave."""
        memories = self._memory[rule.name][signal.key]
        alarms = self._alarms.setdefault(rule.name, {}).setdefault(signal.key, set())
        learns = signal.learning is not None
        raised: _Found = {}
        ended: _Found = {}
        for layer, row in sample.figures[signal.quantity].items():
            own, errors, company = memories[layer], sample.errors[signal.quantity][layer], sample.company[layer]
            troubled, before, over = context.troubled.get(layer, ()), context.before.get(layer, {}), beyond[layer]
            for head, figure, error in _judged(rule, row, errors):
                memory = own[head]
                learn = learns and head not in troubled and rule.may_learn(company[head])
                change = advance(
                    rule,
                    signal,
                    memory,
                    figure,
                    error,
                    sample.step,
                    self.patience,
                    beyond=head in over,
                    learn=learn,
                )
                if change == "raised":
                    memory.alarm_since = before.get(head, sample.step)
                    alarms.add((layer, head))
                    raised.setdefault(layer, {})[head] = (float(figure), memory)
                elif change:
                    alarms.discard((layer, head))
                    ended.setdefault(layer, {})[head] = (float(figure), memory)
        return raised, ended

    def _fresh(self, rule: str, signal: str, layer: int, head: int) -> HeadMemory:
        if self._given is None:
            return HeadMemory()
        return self._given.memory(rule, signal, self._paths.get(layer, ""), head)

    # -- what is known ------------------------------------------------------------------------------------------

    def alarmed(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """``{rule: {layer: heads}}`` of the heads that are in trouble now; every active rule has an entry.

        Heads that wait for a common message are not among them: an alarm begins when it is told.
        """
        return {
            rule: {layer: tuple(sorted(heads)) for layer, heads in sorted(layers.items())}
            for rule, layers in self._under().items()
        }

    def _under(self) -> dict[str, Starts]:
        """Rule -> layer -> head -> since when it is under alarm, of what has been told."""
        return {rule.name: self._gathering.told_of(rule.name, self._alarmed(rule.name)) for rule in self.rules.active()}

    def _alarmed(self, rule: str) -> Starts:
        result: Starts = {}
        for signal, places in self._alarms.get(rule, {}).items():
            for layer, head in places:
                since = self._memory[rule][signal][layer][head].alarm_since or 0
                known = result.setdefault(layer, {})
                known[head] = min(since, known.get(head, since))
        return result

    def limits(self) -> dict[str, dict[str, dict[int, list[float]]]]:
        """Rule -> quantity -> layer -> one number per head: the limits that are learned from the head itself.

        Beyond it a figure counts, if the rule's other conditions hold. Limits are those of the coming sample. NaN where
        the rule does not judge the head yet.
        """
        found: dict[str, dict[str, dict[int, list[float]]]] = {}
        for rule in self.rules.active():
            memories = self._memory.get(rule.name, {})
            for signal in rule.signals(self._quantities):
                if signal.own_limit and signal.quantity in self._quantities and signal.key in memories:
                    found.setdefault(rule.name, {})[signal.quantity] = {
                        layer: [_limit(rule, signal, own[head]) for head in range(len(own))]
                        for layer, own in memories[signal.key].items()
                    }
        return found

    def counts(self) -> dict[str, int]:
        """``{rule: number of heads in trouble now}``, every active rule included: what ``attn/warnings/...`` logs."""
        return {name: sum(len(heads) for heads in layers.values()) for name, layers in self.alarmed().items()}

    def messages(self) -> dict[str, int]:
        """``{rule: number of alerts raised so far}``, for the rules that have raised any."""
        return dict(self._raised)

    # -- baselines, from run to run -----------------------------------------------------------------------------

    def baselines(self) -> dict[str, Any]:
        """What has been learned of each head, as plain JSON-able data, to be given to another run's engine.

        Raises:
            ValueError: No layer has a path, or nothing has been learned yet.
        """
        return Baselines.collect(self._memory, self._paths).plain()

    def take_baselines(self, plain: Mapping[str, Any]) -> None:
        """Start every head that these know from there, as if it had been watched before. Before the first sample.

        Heads go by the path of their layer; those that are not known start afresh, and what is known of others is
        ignored.

        Args:
            plain: What `baselines` gave.

        Raises:
            ValueError: It is nothing of the kind, or holds a baseline that is not a finite number.
        """
        self._given = Baselines.read(plain)

    # -- over a restart -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The memory as plain JSON-able data. A restored engine behaves exactly as the unbroken one."""
        return {
            "version": _VERSION,
            "raised": dict(self._raised),
            "waits": self._gathering.plain(),
            "heads": {str(layer): count for layer, count in self._heads.items()},
            "paths": {str(layer): path for layer, path in self._paths.items()},
            "memory": [
                {
                    "rule": rule,
                    "signal": signal,
                    "layers": {
                        str(layer): {str(head): _plain(memory) for head, memory in heads.items()}
                        for layer, heads in layers.items()
                    },
                }
                for rule, signals in self._memory.items()
                for signal, layers in signals.items()
            ],
            "growth": {
                str(layer): {str(head): growth.plain() for head, growth in heads.items()}
                for layer, heads in self._growth.items()
            },
            "given": None if self._given is None else self._given.plain(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; the rules and their numbers stay this engine's own.

        Raises:
            ValueError: If it isn't such a state; the engine is then unchanged.
        """
        try:
            if state["version"] != _VERSION:
                raise ValueError(f"version {state['version']!r}")
            raised = {str(rule): int(count) for rule, count in state["raised"].items()}
            gathering = Gathering(self._gathering.length)
            gathering.load(state["waits"])
            heads = {int(layer): int(count) for layer, count in state["heads"].items()}
            paths = {int(layer): str(path) for layer, path in state["paths"].items()}
            memory: dict[str, dict[str, dict[int, dict[int, HeadMemory]]]] = {}
            for entry in state["memory"]:
                memory.setdefault(str(entry["rule"]), {})[str(entry["signal"])] = {
                    int(layer): {int(head): _memory(plain) for head, plain in heads.items()}
                    for layer, heads in entry["layers"].items()
                }
            growth = {
                int(layer): {int(head): Growth.from_plain(plain) for head, plain in heads.items()}
                for layer, heads in state["growth"].items()
            }
            given = None if state["given"] is None else Baselines.read(state["given"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"Expected `state` to be what AlertEngine.state_dict() of version {_VERSION} returned, but got "
                f"{type(state).__name__} with {error!r}. Start without it to learn new baselines."
            ) from error
        self._raised, self._gathering, self._heads, self._paths = raised, gathering, heads, paths
        self._memory, self._growth, self._given = memory, growth, given
        self._alarms = {
            rule: {
                signal: {(layer, head) for layer, heads in layers.items() for head, one in heads.items() if one.alarmed}
                for signal, layers in signals.items()
            }
            for rule, signals in memory.items()
        }


def _without(told: Sequence[Told], known: Starts) -> list[Told]:
    """Without heads that are under the rule's alarm anyway, and each head once for each quantity."""
    said: dict[str, set[tuple[int, int]]] = {}
    result = []
    for one in told:
        already = said.setdefault(one.signal.quantity, set())
        layers = {
            layer: {
                head: found
                for head, found in heads.items()
                if head not in known.get(layer, ()) and (layer, head) not in already
            }
            for layer, heads in one.heads.items()
        }
        layers = {layer: heads for layer, heads in sorted(layers.items()) if heads}
        already |= {(layer, head) for layer, heads in layers.items() for head in heads}
        if layers:
            result.append(Told(one.signal, layers))
    return result


def _limit(rule: Rule, signal: Signal, memory: HeadMemory) -> float:
    if memory.baseline is None or not rule.ready(signal, memory):
        return math.nan
    return rule.limits(signal, memory.baseline)[0]


def _judged(rule: Rule, row: Sequence[float], errors: Sequence[float | None]) -> Iterator[tuple[int, float, float]]:
    """Head, figure and standard error; without figures from single rows where the rule asks for more than noise."""
    for head, (figure, error) in enumerate(zip(row, errors, strict=True)):
        if error is not None or not rule.sigmas:
            yield head, figure, error or 0.0


def _plain(memory: HeadMemory) -> dict[str, Any]:
    """Fields that differ from a fresh memory's: a 48-layer model has thousands of heads."""
    return {name: value for name, value in asdict(memory).items() if value != _FRESH[name]}


def _memory(plain: Mapping[str, Any]) -> HeadMemory:
    for name, value in plain.items():
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if name not in _FRESH or not (number or (value is None and _FRESH[name] is None)):
            raise ValueError(f"{name!r}: {value!r} in a head's memory")
    return HeadMemory(**plain)
