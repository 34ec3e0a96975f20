"""What waits for a common message, so that a failure which spreads over a model is not told head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnmon.alerts.base import HeadMemory, Rule
from attnmon.alerts.messages import Told
from attnmon.alerts.sample import Figures, at

__all__ = ["Gathering", "Starts"]

_LONGEST_WAIT = 64  # samples

Starts = dict[int, dict[int, int]]
"""Layer -> head -> step at which its alarm was raised."""


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


class Gathering:
    """The heads of each rule that are under alarm and not told yet.

    Args:
        length: Samples to gather for after a rule's first message. Doubles with each message, until no head is under
            the rule's alarm any more. 0: every sample has its own.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._waits: dict[str, _Wait] = {}

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {rule: wait.plain() for rule, wait in self._waits.items()}

    def load(self, plain: Mapping[str, Any]) -> None:
        """The reverse of `plain`; KeyError, TypeError, AttributeError or ValueError where it is nothing of the kind."""
        self._waits = {str(rule): _Wait.from_plain(wait) for rule, wait in plain.items()}

    def told_of(self, rule: str, alarmed: Starts) -> Starts:
        """Those of the heads under alarm that do not wait: an alarm begins when it is told."""
        waiting = self._waits[rule].places() if rule in self._waits else set()
        told = {
            layer: {head: since for head, since in heads.items() if (layer, head) not in waiting}
            for layer, heads in alarmed.items()
        }
        return {layer: heads for layer, heads in told.items() if heads}

    def entering(
        self,
        rule: Rule,
        new: list[Told],
        figures: Figures,
        alarmed: Starts,
        memories: Mapping[str, Mapping[int, Mapping[int, HeadMemory]]],
    ) -> list[Told]:
        """What of the new heads, and of those that wait, is told at this sample.

        Args:
            rule: The rule.
            new: Heads that have entered at this sample.
            figures: Of the sample.
            alarmed: Heads under the rule's alarm.
            memories: Signal -> layer -> head -> what is remembered of it.
        """
        if not alarmed or not self.length:
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
                row, known = figures[signal.quantity].get(layer, ()), memories[signal.key][layer]
                for head in names:
                    if head not in alarmed.get(layer, ()):
                        continue
                    if math.isfinite(at(row, head)) and known[head].streak:
                        found.setdefault(layer, {})[head] = (float(row[head]), known[head])
                    else:  # it has no figure that could be told
                        wait.heads.setdefault(signal.key, {}).setdefault(layer, []).append(head)
            if found:
                result.append(
                    Told(signal, {layer: dict(sorted(heads.items())) for layer, heads in sorted(found.items())})
                )
        if result:
            wait.length = min(2 * wait.length, _LONGEST_WAIT) if wait.length else self.length
            wait.left = wait.length
        return result

    def leaving(self, rule: Rule, ended: Sequence[Told], alarmed: Starts) -> list[Told]:
        """Without heads whose alarm was never told, of which nothing is told any more."""
        wait = self._waits.get(rule.name)
        if wait is None:
            return list(ended)
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
