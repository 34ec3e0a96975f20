"""The memory of the rules over a run, and one message per sampled step and rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attnmon.alerts.base import NON_FINITE_ROWS, TEMPERATURE, HeadMemory, Rule, Signal, observe
from attnmon.alerts.rules import AlertRules
from attnmon.alerts.text import Alert, Evidence, describe_heads, figures_text

__all__ = ["AlertEngine", "AttentionSaturationWarning"]

_VERSION = 1
_COMPANY = ("entropy_normalized", "score_spread")  # figures that rules consult beside their own
_FRESH = asdict(HeadMemory())
_Figures = Mapping[str, Mapping[int, Sequence[float]]]


class AttentionSaturationWarning(UserWarning):
    """Python warning with which the monitor passes on an `Alert`'s message."""


class AlertEngine:
    """Shows every sample of a run to every rule and says what is new.

    An alert is raised when a head enters a rule's trouble and is not repeated while it stays there: only after it has
    recovered (``patience`` samples back beyond the rule's leave level) and entered again. A head that was not
    measured at a sample (NaN, or absent) is left exactly as it was. Layers and heads may appear at any time.

    Args:
        rules: The rules and their numbers; None = the defaults.
        patience: Consecutive samples beyond the limit before an alert (rules may have their own number), and
            consecutive samples back before it ends. 1 or more.
        prefix: First part of `Alert.tag`.

    Raises:
        ValueError: If ``patience`` is below 1 or not an integer.
        TypeError: If ``rules`` is not an `AlertRules`.

    Example:
        >>> engine = AlertEngine(patience=2)
        >>> for step, entropy in [(0, 0.5), (50, 0.9), (100, 0.9)]:
        ...     alerts = engine.update(step, {"entropy_normalized": {3: [0.4, entropy]}}, layers={3: "h.3.attn"})
        >>> print(alerts[0].summary)
        entropy rising in head 1 of layer 3 (h.3.attn): normalised entropy 0.90 against a baseline of 0.50 (+80%, \
limit: 40% of the way from the baseline to 1) for 2 samples, since step 50; attention spreads toward uniform and stops \
selecting.
        >>> alerts[0].heads
        {3: (1,)}
    """

    def __init__(self, rules: AlertRules | None = None, *, patience: int = 3, prefix: str = "attn") -> None:
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
        self._memory: dict[tuple[str, str], dict[int, dict[int, HeadMemory]]] = {}
        self._raised: dict[str, int] = {}

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
            At most one alert per rule, in the order of the rules; [] if nothing is new.
        """
        errors = errors or {}
        layers = layers or {}
        counts = _head_counts(values, nonfinite or {})
        figures: dict[str, Mapping[int, Sequence[float]]] = dict(values)
        if temperatures:
            figures[TEMPERATURE] = {
                layer: [temperature] * max(1, counts.get(layer, 0)) for layer, temperature in temperatures.items()
            }
        if nonfinite:
            figures[NON_FINITE_ROWS] = nonfinite
        alerts: list[Alert] = []
        for rule in self.rules.active():
            evidence = []
            begun: list[tuple[int, int]] = []
            before = self._alarmed(rule.name)
            for signal in rule.signals(figures):
                found, since = self._watch(rule, signal, step, figures, errors.get(signal.quantity, {}), before)
                if found is not None:
                    evidence.append(found)
                    begun += since
            if evidence:
                alerts.append(self._alert(rule, step, tuple(evidence), begun, counts, layers))
        return alerts

    def _watch(
        self,
        rule: Rule,
        signal: Signal,
        step: int,
        figures: _Figures,
        errors: Mapping[int, Sequence[float]],
        before: Mapping[int, Sequence[int]],
    ) -> tuple[Evidence | None, list[tuple[int, int]]]:
        """Step one signal of one rule over all heads.

        ``before`` names those already under the rule's alarm. Returns what is new, and for each new head the step of
        its first sample beyond the limit and the number of samples since.
        """
        memories = self._memory.setdefault((rule.name, signal.quantity), {})
        raised: dict[int, list[tuple[int, float, float, float]]] = {}
        since: list[tuple[int, int]] = []
        for layer, row in figures[signal.quantity].items():
            own = memories.setdefault(int(layer), {})
            own_errors = errors.get(layer, ())
            for head, figure in enumerate(row):
                memory = own.get(head, HeadMemory())
                error = float(own_errors[head]) if head < len(own_errors) else 0.0
                others = {
                    name: float(other[layer][head])
                    for name in _COMPANY
                    if layer in (other := figures.get(name, {})) and head < len(other[layer])
                }
                after, alarm = observe(
                    rule,
                    signal,
                    memory,
                    float(figure),
                    error,
                    step,
                    self.patience,
                    company=rule.in_company(others),
                    learn=rule.may_learn(others),
                )
                own[head] = after
                if alarm and head not in before.get(layer, ()):  # not again for a second signal of the same rule
                    base = math.nan if after.baseline is None else after.baseline
                    raised.setdefault(layer, []).append((head, float(figure), base, rule.limits(signal, base)[0]))
                    since.append((step if after.since is None else after.since, after.streak))
        if not raised:
            return None, since
        columns = [
            {layer: tuple(entry[column] for entry in raised[layer]) for layer in sorted(raised)} for column in range(4)
        ]
        heads = {layer: tuple(int(head) for head in names) for layer, names in columns[0].items()}
        return (
            Evidence(signal.quantity, signal.label, heads, columns[1], columns[2], columns[3], rule.limit_text(signal)),
            since,
        )

    def _alert(
        self,
        rule: Rule,
        step: int,
        evidence: tuple[Evidence, ...],
        begun: Sequence[tuple[int, int]],
        counts: Mapping[int, int],
        layers: Mapping[int, str],
    ) -> Alert:
        union: dict[int, tuple[int, ...]] = {}
        for part in evidence:
            for layer, names in part.heads.items():
                union[layer] = tuple(sorted({*union.get(layer, ()), *names}))
        union = dict(sorted(union.items()))
        since, samples = min(first for first, _ in begun), min(streak for _, streak in begun)
        when = f"for {samples} samples, since step {since}" if samples > 1 else f"at step {step}"
        new = sum(len(names) for names in union.values())
        figures = " and ".join(figures_text(part, new) for part in evidence)
        summary = f"{rule.title} in {describe_heads(union, counts, layers)}: {figures} {when}"
        under = sum(len(names) for names in self._alarmed(rule.name).values())
        if under > new:
            summary += f" ({under} heads under this alarm now)"
        summary += f"; {rule.meaning}."
        self._raised[rule.name] = self._raised.get(rule.name, 0) + 1
        return Alert(
            step=step,
            rule=rule.name,
            title=rule.title,
            severity=rule.severity,
            heads=union,
            layers={layer: layers[layer] for layer in union if layer in layers},
            since=since,
            samples=samples,
            evidence=evidence,
            summary=summary,
            remedy=rule.remedy,
            tag=f"{self.prefix}/warnings/{rule.name}",
        )

    def alarmed(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """``{rule: {layer: heads}}`` of the heads that are in trouble now; every active rule has an entry."""
        return {rule.name: self._alarmed(rule.name) for rule in self.rules.active()}

    def _alarmed(self, rule: str) -> dict[int, tuple[int, ...]]:
        result: dict[int, set[int]] = {}
        for (name, _), layers in self._memory.items():
            if name == rule:
                for layer, heads in layers.items():
                    names = {head for head, memory in heads.items() if memory.alarmed}
                    if names:
                        result.setdefault(layer, set()).update(names)
        return {layer: tuple(sorted(heads)) for layer, heads in sorted(result.items())}

    def counts(self) -> dict[str, int]:
        """``{rule: number of heads in trouble now}``, every active rule included: what ``attn/warnings/...`` logs."""
        return {name: sum(len(heads) for heads in layers.values()) for name, layers in self.alarmed().items()}

    def messages(self) -> dict[str, int]:
        """``{rule: number of alerts raised so far}``, for the rules that have raised any."""
        return dict(self._raised)

    def state_dict(self) -> dict[str, Any]:
        """The memory as plain JSON-able data. A restored engine behaves exactly as the unbroken one."""
        return {
            "version": _VERSION,
            "raised": dict(self._raised),
            "memory": [
                {
                    "rule": rule,
                    "quantity": quantity,
                    "layers": {
                        str(layer): {str(head): _plain(memory) for head, memory in heads.items()}
                        for layer, heads in layers.items()
                    },
                }
                for (rule, quantity), layers in self._memory.items()
            ],
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
            memory = {
                (str(entry["rule"]), str(entry["quantity"])): {
                    int(layer): {int(head): _memory(plain) for head, plain in heads.items()}
                    for layer, heads in entry["layers"].items()
                }
                for entry in state["memory"]
            }
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"Expected `state` to be what AlertEngine.state_dict() of version {_VERSION} returned, but got "
                f"{type(state).__name__} with {error!r}. Start without it to learn new baselines."
            ) from error
        self._raised, self._memory = raised, memory


def _plain(memory: HeadMemory) -> dict[str, Any]:
    """Fields that differ from a fresh memory's: a 48-layer model has thousands of heads."""
    return {name: value for name, value in asdict(memory).items() if value != _FRESH[name]}


def _memory(plain: Mapping[str, Any]) -> HeadMemory:
    for name, value in plain.items():
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if name not in _FRESH or not (number or (value is None and _FRESH[name] is None)):
            raise ValueError(f"{name!r}: {value!r} in a head's memory")
    return HeadMemory(**plain)


def _head_counts(values: _Figures, nonfinite: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Number of heads of every layer that this sample speaks of."""
    counts: dict[int, int] = {}
    for layers in (*values.values(), nonfinite):
        for layer, heads in layers.items():
            counts[layer] = max(counts.get(layer, 0), len(heads))
    return dict(sorted(counts.items()))
