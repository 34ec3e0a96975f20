"""The memory of the rules over a run, and one message per sampled step and rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attnmon.alerts.base import (
    JACOBIAN_SHARE,
    NON_FINITE_ROWS,
    NOT_MEASURED,
    TEMPERATURE,
    HeadMemory,
    Rule,
    Signal,
    advance,
    is_beyond,
)
from attnmon.alerts.baselines import Baselines
from attnmon.alerts.messages import Told, raised_alert, recovered_alert
from attnmon.alerts.rules import AlertRules
from attnmon.alerts.text import Alert

__all__ = ["AlertEngine"]

_VERSION = 2
_COMPANY = ("entropy_normalized", "score_spread")  # figures that rules consult beside their own
_LONGEST_WAIT = 64  # samples
_FRESH = asdict(HeadMemory())
_Figures = Mapping[str, Mapping[int, Sequence[float]]]
_Starts = dict[int, dict[int, int]]  # layer -> head -> step at which its alarm was raised
_Found = dict[int, dict[int, tuple[float, HeadMemory]]]


@dataclass
class _Wait:
    """What is held back of a rule after its last message.

    Attributes:
        length: Samples that were to be waited for.
        left: How many of these are to come.
        heads: Signal -> layer -> heads that have entered meanwhile.
    """

    length: int = 0
    left: int = 0
    heads: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def places(self) -> set[tuple[int, int]]:
        """Layer and head of all that wait."""
        return {(layer, head) for layers in self.heads.values() for layer, heads in layers.items() for head in heads}

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        heads = {key: {str(layer): list(row) for layer, row in layers.items()} for key, layers in self.heads.items()}
        return {"length": self.length, "left": self.left, "heads": heads}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> _Wait:
        """The reverse of `plain`."""
        heads = {
            str(key): {int(layer): list(map(int, row)) for layer, row in layers.items()}
            for key, layers in plain["heads"].items()
        }
        return cls(int(plain["length"]), int(plain["left"]), heads)


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
selects less.
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
        self.gather = gather
        self.recoveries: list[Alert] = []
        self._memory: dict[tuple[str, str], dict[int, dict[int, HeadMemory]]] = {}
        self._raised: dict[str, int] = {}
        self._waits: dict[str, _Wait] = {}
        self._heads: dict[int, int] = {}  # number of heads of each layer that was ever measured
        self._paths: dict[int, str] = {}
        self._given: Baselines | None = None

    def update(
        self,
        step: int,
        values: _Figures,
        *,
        errors: _Figures | None = None,
        layers: Mapping[int, str] | None = None,
        temperatures: Mapping[int, float] | None = None,
        nonfinite: Mapping[int, Sequence[int]] | None = None,
    ) -> list[Alert]:
        """Take in one sample.

        Args:
            step: Optimizer step of the sample.
            values: ``values[quantity][layer]``, one figure per head; NaN = not measured. See `ALERT_QUANTITIES`.
            errors: Standard errors of the same shape; what is absent or NaN counts as 0.
            layers: Module paths, for the messages.
            temperatures: The model's own absolute softmax temperature ``1/scale`` of each layer.
            nonfinite: Rows with NaN or infinite scores in this sample, per layer and head.

        Returns:
            At most one alert per rule, in the order of the rules; [] if nothing is new. What has ended is in
            `recoveries`.
        """
        self._paths.update(layers or {})
        figures = self._figures(values, temperatures or {}, nonfinite or {})
        beside = {
            layer: [
                {
                    name: float(figures[name][layer][head])
                    for name in _COMPANY
                    if layer in figures.get(name, ()) and head < len(figures[name][layer])
                }
                for head in range(count)
            ]
            for layer, count in self._heads.items()
        }
        known_errors = dict(errors or {})
        if JACOBIAN_SHARE in figures:
            known_errors[JACOBIAN_SHARE] = _shares(known_errors.get("jacobian@1.0", {}), temperatures or {})
        alerts: list[Alert] = []
        self.recoveries = []
        for rule in self.rules.active():
            before = self._alarmed(rule.name)
            raised: list[Told] = []
            ended: list[Told] = []
            for signal in rule.signals(figures):
                own_errors = known_errors.get(signal.quantity, {})
                new, over = self._watch(rule, signal, step, figures[signal.quantity], own_errors, beside, before)
                raised.append(Told(signal, new))
                ended.append(Told(signal, over))
            after = self._alarmed(rule.name)
            ended = self._of_the_told(rule, ended, after)
            told = self._gathered(rule, _without(raised, before), figures, after)
            under = self._told_of(rule.name, after)
            alert = raised_alert(rule, step, told, self._heads, self._paths, self.prefix, under)
            if alert is not None:
                self._raised[rule.name] = self._raised.get(rule.name, 0) + 1
                alerts.append(alert)
            recovery = recovered_alert(
                rule, step, _without(ended, after), self._heads, self._paths, self.prefix, self.patience
            )
            if recovery is not None:
                self.recoveries.append(recovery)
        return alerts

    def _figures(
        self, values: _Figures, temperatures: Mapping[int, float], nonfinite: Mapping[int, Sequence[int]]
    ) -> dict[str, Mapping[int, Sequence[float]]]:
        """The sample's values, and beside them what is none of its quantities."""
        for layers in (*values.values(), nonfinite):
            for layer, row in layers.items():
                self._heads[layer] = max(self._heads.get(layer, 0), len(row))
        figures: dict[str, Mapping[int, Sequence[float]]] = dict(values)
        if temperatures:
            figures[TEMPERATURE] = {
                layer: [temperature] * max(1, self._heads.get(layer, 0)) for layer, temperature in temperatures.items()
            }
        if nonfinite:
            figures[NON_FINITE_ROWS] = nonfinite
        if "jacobian@1.0" in values and temperatures:
            figures[JACOBIAN_SHARE] = _shares(values["jacobian@1.0"], temperatures)
        tables = [*values.values()]

        def missing(layer: int, head: int) -> float:
            if any(layer in table and math.isfinite(_at(table[layer], head)) for table in tables):
                return 0.0
            return math.nan if _at(nonfinite.get(layer, ()), head) > 0 else 1.0  # NonFinite has told of that

        figures[NOT_MEASURED] = {
            layer: [missing(layer, head) for head in range(count)] for layer, count in self._heads.items()
        }
        return figures

    def _watch(
        self,
        rule: Rule,
        signal: Signal,
        step: int,
        figures: Mapping[int, Sequence[float]],
        errors: Mapping[int, Sequence[float]],
        beside: Mapping[int, Sequence[Mapping[str, float]]],
        before: _Starts,
    ) -> tuple[_Found, _Found]:
        """Step one signal of one rule over all heads: figure and memory of those that enter, and that leave.

        ``beside`` are the figures that rules consult beside their own, ``before`` the heads under the rule's alarm.
        """
        memories = self._memory.setdefault((rule.name, signal.key), {})
        raised: _Found = {}
        ended: _Found = {}
        for layer, row in figures.items():
            own = memories.setdefault(layer, {})
            for head in range(len(row)):
                if head not in own:
                    own[head] = self._fresh(rule, signal, layer, head)
            company = beside.get(layer, ())
            own_errors = [error if math.isfinite(error) else 0.0 for error in errors.get(layer, ())]
            own_errors += [0.0] * (len(row) - len(own_errors))
            beyond = [
                is_beyond(rule, signal, own[head], figure, own_errors[head])
                and rule.in_company(signal, company[head] if head < len(company) else {})
                for head, figure in enumerate(row)
            ]
            if signal.crowd and sum(beyond) < max(2.0, signal.crowd * len(row)):
                beyond = [False] * len(row)
            for head, figure in enumerate(row):
                memory = own[head]
                learn = signal.learning is not None and rule.may_learn(company[head] if head < len(company) else {})
                change = advance(
                    rule,
                    signal,
                    memory,
                    figure,
                    own_errors[head],
                    step,
                    self.patience,
                    beyond=beyond[head],
                    learn=learn,
                )
                if change == "raised":
                    memory.alarm_since = before.get(layer, {}).get(head, step)
                if change:
                    (raised if change == "raised" else ended).setdefault(layer, {})[head] = (float(figure), memory)
        return raised, ended

    def _gathered(self, rule: Rule, new: list[Told], figures: _Figures, alarmed: _Starts) -> list[Told]:
        """What of the new heads, and of those that wait, is told at this sample."""
        if not alarmed or not self.gather:
            self._waits.pop(rule.name, None)
            return new
        wait = self._waits.setdefault(rule.name, _Wait())
        if wait.left > 0:
            wait.left -= 1
            for told in new:
                for layer, heads in told.heads.items():
                    wait.heads.setdefault(told.signal.key, {}).setdefault(layer, []).extend(heads)
            return []
        result = []
        for signal in rule.signals(figures):
            found = {
                layer: dict(heads) for one in new if one.signal.key == signal.key for layer, heads in one.heads.items()
            }
            waiting = wait.heads.pop(signal.key, {})
            for layer, names in waiting.items():
                row, memories = figures[signal.quantity].get(layer, ()), self._memory[rule.name, signal.key][layer]
                for head in names:
                    if head not in alarmed.get(layer, ()):
                        continue
                    if math.isfinite(_at(row, head)) and memories[head].streak:
                        found.setdefault(layer, {})[head] = (float(row[head]), memories[head])
                    else:  # it has no figure that could be told
                        wait.heads.setdefault(signal.key, {}).setdefault(layer, []).append(head)
            if found:
                result.append(
                    Told(signal, {layer: dict(sorted(heads.items())) for layer, heads in sorted(found.items())})
                )
        if result:
            wait.length = min(2 * wait.length, _LONGEST_WAIT) if wait.length else self.gather
            wait.left = wait.length
        return result

    def _of_the_told(self, rule: Rule, ended: list[Told], alarmed: _Starts) -> list[Told]:
        """Without heads whose alarm was never told, of which nothing is told any more."""
        wait = self._waits.get(rule.name)
        if wait is None:
            return ended
        over = {(layer, head) for one in ended for layer, heads in one.heads.items() for head in heads}
        over = {place for place in over if place[1] not in alarmed.get(place[0], ())}
        waiting = wait.places()
        for layers in wait.heads.values():
            for layer, heads in layers.items():
                heads[:] = [head for head in heads if (layer, head) not in over]
        return [
            Told(
                one.signal,
                {
                    layer: {head: found for head, found in heads.items() if (layer, head) not in waiting}
                    for layer, heads in one.heads.items()
                },
            )
            for one in ended
        ]

    def _fresh(self, rule: Rule, signal: Signal, layer: int, head: int) -> HeadMemory:
        if self._given is None or signal.learning is None:
            return HeadMemory()
        return self._given.memory(rule.name, signal.key, self._paths.get(layer, ""), head)

    # -- what is known ------------------------------------------------------------------------------------------

    def alarmed(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """``{rule: {layer: heads}}`` of the heads that are in trouble now; every active rule has an entry.

        Heads that wait for a common message are not among them: an alarm begins when it is told.
        """
        told = {rule.name: self._told_of(rule.name, self._alarmed(rule.name)) for rule in self.rules.active()}
        return {
            rule: {layer: tuple(sorted(heads)) for layer, heads in sorted(layers.items())}
            for rule, layers in told.items()
        }

    def _told_of(self, rule: str, alarmed: _Starts) -> _Starts:
        """Those of the heads under alarm that do not wait."""
        waiting = self._waits[rule].places() if rule in self._waits else set()
        told = {
            layer: {head: since for head, since in heads.items() if (layer, head) not in waiting}
            for layer, heads in alarmed.items()
        }
        return {layer: heads for layer, heads in told.items() if heads}

    def _alarmed(self, rule: str) -> _Starts:
        result: _Starts = {}
        for (name, _), layers in self._memory.items():
            if name == rule:
                for layer, heads in layers.items():
                    for head, memory in heads.items():
                        if memory.alarmed:
                            since = 0 if memory.alarm_since is None else memory.alarm_since
                            known = result.setdefault(layer, {})
                            known[head] = min(since, known.get(head, since))
        return result

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
            "waits": {rule: wait.plain() for rule, wait in self._waits.items()},
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
                for (rule, signal), layers in self._memory.items()
            ],
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
            waits = {str(rule): _Wait.from_plain(plain) for rule, plain in state["waits"].items()}
            heads = {int(layer): int(count) for layer, count in state["heads"].items()}
            paths = {int(layer): str(path) for layer, path in state["paths"].items()}
            memory = {
                (str(entry["rule"]), str(entry["signal"])): {
                    int(layer): {int(head): _memory(plain) for head, plain in heads.items()}
                    for layer, heads in entry["layers"].items()
                }
                for entry in state["memory"]
            }
            given = None if state["given"] is None else Baselines.read(state["given"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"Expected `state` to be what AlertEngine.state_dict() of version {_VERSION} returned, but got "
                f"{type(state).__name__} with {error!r}. Start without it to learn new baselines."
            ) from error
        self._raised, self._waits, self._heads, self._paths = raised, waits, heads, paths
        self._memory, self._given = memory, given


def _without(told: Sequence[Told], known: _Starts) -> list[Told]:
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


def _at(row: Sequence[float], head: int) -> float:
    return row[head] if head < len(row) else math.nan


def _shares(norms: Mapping[int, Sequence[float]], temperatures: Mapping[int, float]) -> dict[int, list[float]]:
    """Jacobian norms as shares of their bound 1/(2T)."""
    return {
        layer: [2.0 * temperatures[layer] * norm for norm in row]
        for layer, row in norms.items()
        if layer in temperatures
    }


def _plain(memory: HeadMemory) -> dict[str, Any]:
    """Fields that differ from a fresh memory's: a 48-layer model has thousands of heads."""
    return {name: value for name, value in asdict(memory).items() if value != _FRESH[name]}


def _memory(plain: Mapping[str, Any]) -> HeadMemory:
    for name, value in plain.items():
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if name not in _FRESH or not (number or (value is None and _FRESH[name] is None)):
            raise ValueError(f"{name!r}: {value!r} in a head's memory")
    return HeadMemory(**plain)
