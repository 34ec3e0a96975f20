"""An alert as data, and in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnmon.alerts.base import NOT_MEASURED

__all__ = ["Alert", "Evidence", "describe_heads", "figures_text"]

_MAX_PARTS = 4  # layers, or runs of heads, that are spelled out before "and ... more"


@dataclass(frozen=True)
class Evidence:
    """The figures of one quantity behind an alert. All mappings have the same layers, all tuples the same order.

    Attributes:
        quantity: Key in the sample's values (``"temperature"`` and ``"nonfinite_rows"`` for what is not in there).
        label: What it is called in a message.
        heads: ``{layer: heads}`` that raised the alert by this quantity.
        figures: Each head's figure at this step.
        baselines: What it was compared with, NaN for a fixed level.
        limits: The limit that the figure passed.
        limit_text: The limit in words.
    """

    quantity: str
    label: str
    heads: dict[int, tuple[int, ...]]
    figures: dict[int, tuple[float, ...]]
    baselines: dict[int, tuple[float, ...]]
    limits: dict[int, tuple[float, ...]]
    limit_text: str


@dataclass(frozen=True)
class Alert:
    """One message: what one rule found at one sampled step. Plain data, picklable.

    Attributes:
        step: Optimizer step of the sample.
        rule: Name of the rule, e.g. ``"entropy_rise"``.
        title: What happened, in two or three words.
        severity: "watch", "warn" or "critical".
        heads: ``{layer: heads}`` that raised it at this step (those already under alarm are not repeated).
        layers: ``{layer: module path}`` of these layers, where known.
        since: Step of the first sample beyond the limit, over all these heads.
        samples: Consecutive samples beyond the limit, the least of these heads.
        evidence: The figures, per quantity.
        summary: What, where, how much, since when, and what it means.
        remedy: What to try.
        tag: Under which loggers file it.
        ended: Whether this says that the alarm of these heads is over. Then ``since`` is the step at which it was
            raised, and there is no remedy.
        loss: Training loss of the step, where it is known; this and the following are filled in by the monitor.
        grad_norm: Norm of all gradients of the step, before clipping where that can be had.
        learning_rate: The largest of the optimizer's parameter groups.
        former_rate: Where that was less than half or more than twice as much at one of the ten samples before: what it
            was.
        former_rate_step: Step of the last of these samples.
    """

    step: int
    rule: str
    title: str
    severity: str
    heads: dict[int, tuple[int, ...]]
    layers: dict[int, str]
    since: int
    samples: int
    evidence: tuple[Evidence, ...]
    summary: str
    remedy: str
    tag: str = ""
    ended: bool = False
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    former_rate: float | None = None
    former_rate_step: int | None = None

    @property
    def training(self) -> str:
        """What is known of the step, in words."""
        known = (("loss", self.loss), ("gradient norm", self.grad_norm), ("learning rate", self.learning_rate))
        text = ", ".join(f"{label} {_number(value)}" for label, value in known if value is not None)
        if self.former_rate is not None and self.former_rate_step is not None:
            text += f" (it was {_number(self.former_rate)} at step {self.former_rate_step})"
        return text

    @property
    def message(self) -> str:
        """The whole text: summary, the state of training, remedy."""
        parts = (
            self.summary,
            self.training and f"Training: {self.training}.",
            self.remedy and f"Remedy: {self.remedy}.",
        )
        return " ".join(filter(None, parts))

    def plain(self) -> dict[str, Any]:
        """As JSON has it: keys are strings, and so is what is not finite."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Alert:
        """The reverse of `plain`.

        Raises:
            ValueError: It is nothing of the kind.
        """
        try:
            evidence = tuple(
                Evidence(
                    **{
                        **part,
                        "heads": _by_layer(part["heads"], int),
                        **{name: _by_layer(part[name], float) for name in ("figures", "baselines", "limits")},
                    }
                )
                for part in plain["evidence"]
            )
            layers = {int(layer): str(path) for layer, path in plain["layers"].items()}
            known = {
                name: None if plain.get(name) is None else float(plain[name])
                for name in ("loss", "grad_norm", "learning_rate", "former_rate")
            }
            return cls(
                **{**plain, **known, "heads": _by_layer(plain["heads"], int), "layers": layers, "evidence": evidence}
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"Expected an alert as `Alert.plain` gives it, but got {plain!r}: {error!r}.") from error

    @property
    def num_heads(self) -> int:
        """Number of heads that raised it."""
        return sum(len(heads) for heads in self.heads.values())

    def __str__(self) -> str:
        return self.message


def _plain(item: Any) -> Any:
    if isinstance(item, float):
        return item if math.isfinite(item) else str(item)
    if isinstance(item, Mapping):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_plain(value) for value in item]
    return item


def _by_layer(plain: Mapping[str, Iterable[Any]], read: Callable[[Any], Any]) -> dict[int, tuple[Any, ...]]:
    return {int(layer): tuple(map(read, row)) for layer, row in plain.items()}


def _runs(numbers: Iterable[int]) -> list[str]:
    """``[0, 1, 2, 7]`` -> ``["0-2", "7"]``; a pair is written as two numbers."""
    result: list[str] = []
    run: list[int] = []
    for number in [*sorted(numbers), None]:
        if run and (number is None or number != run[-1] + 1):
            result += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(item) for item in run]
            run = []
        if number is not None:
            run.append(number)
    return result


def _listing(numbers: Sequence[int]) -> str:
    runs = _runs(numbers)
    if len(runs) > 2 * _MAX_PARTS:
        return f"{', '.join(runs[: 2 * _MAX_PARTS - 1])}, ... ({len(numbers)} in all)"
    return ", ".join(runs)


def describe_heads(
    heads: Mapping[int, Sequence[int]], head_counts: Mapping[int, int], layers: Mapping[int, str]
) -> str:
    """Where, for people: the whole model, whole layers, single heads; never an endless list.

    Args:
        heads: ``{layer: heads}`` to be named.
        head_counts: Number of heads of every layer that was measured.
        layers: Module paths.

    Example:
        >>> describe_heads({3: [0, 1, 2, 7]}, {3: 12, 4: 12}, {3: "transformer.h.3.attn"})
        '4 heads of layer 3 (transformer.h.3.attn) [0-2, 7]'
        >>> describe_heads({0: range(4), 1: range(4)}, {0: 4, 1: 4}, {})
        'all 8 heads of the model'
        >>> describe_heads({0: range(4), 1: range(4), 5: [2]}, {layer: 4 for layer in range(6)}, {})
        '9 heads [layers 0, 1: all; layer 5: 2]'
    """
    total = sum(len(names) for names in heads.values())
    whole = [layer for layer in sorted(heads) if len(heads[layer]) == head_counts.get(layer, -1)]
    partial = [layer for layer in sorted(heads) if layer not in whole]
    if not partial and len(whole) == len(head_counts) > 1:
        return f"all {total} heads of the model"

    def path(layer: int) -> str:
        return f" ({layers[layer]})" if len(heads) <= _MAX_PARTS and layers.get(layer) else ""

    if len(heads) == 1:
        (layer,) = heads
        only = sorted(heads[layer])
        place = f"layer {layer}{path(layer)}"
        if len(only) == 1:
            return f"head {only[0]} of {place}"
        return f"all {total} heads of {place}" if whole else f"{total} heads of {place} [{_listing(only)}]"
    if not partial:
        paths = [layers[layer] for layer in whole if path(layer)]
        return f"all {total} heads of layers {_listing(whole)}" + (f" ({', '.join(paths)})" if paths else "")
    parts = []
    if whole:
        names = f"s {_listing(whole)}" if len(whole) > 1 else f" {whole[0]}{path(whole[0])}"
        parts.append(f"layer{names}: all")
    parts += [f"layer {layer}{path(layer)}: {_listing(sorted(heads[layer]))}" for layer in partial[:_MAX_PARTS]]
    rest = partial[_MAX_PARTS:]
    if rest:
        more = sum(len(heads[layer]) for layer in rest)
        parts.append(f"{more} more in layer{'s' if len(rest) > 1 else ''} {_listing(rest)}")
    return f"{total} heads [{'; '.join(parts)}]"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e6:
        return str(round(value))
    if abs(value) < 0.1:
        return f"{value:.2g}"
    if abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value:.0f}"


def _span(values: Sequence[float]) -> str:
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def figures_text(evidence: Evidence, num_heads: int) -> str:
    """How much: the figure, the baseline and the limit of one quantity.

    Of several heads the range is given, and the head that changed most.

    Args:
        evidence: The quantity's figures.
        num_heads: Heads of the whole alert; said where this quantity speaks of fewer.
    """
    if evidence.quantity == NOT_MEASURED:
        return "measured again" if not any(map(sum, evidence.figures.values())) else "no figures"
    rows = [
        (layer, head, figure, baseline)
        for layer, names in evidence.heads.items()
        for head, figure, baseline in zip(names, evidence.figures[layer], evidence.baselines[layer], strict=True)
    ]
    text = f"{evidence.label} {_span([row[2] for row in rows])}"
    if len(rows) < num_heads:
        text += f" in {len(rows)} of them"
    compared = [row for row in rows if not math.isnan(row[3])]
    if compared:
        several = len(rows) > 1
        text += f" against {'baselines of' if several else 'a baseline of'} {_span([row[3] for row in compared])}"
        layer, head, figure, baseline = max(compared, key=lambda row: abs(row[2] - row[3]))
        change = f"{(figure - baseline) / baseline:+.0%}" if baseline > 0.0 else ""
        if several:
            most = f"most: layer {layer} head {head}, {_number(baseline)} to {_number(figure)}"
            text += f" ({most}{', ' + change if change else ''}; {evidence.limit_text})"
        else:
            text += f" ({change + ', ' if change else ''}{evidence.limit_text})"
    else:
        text += f" ({evidence.limit_text})"
    return text
