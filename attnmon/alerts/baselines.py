"""What has been learned of heads, taken from one run to another: by the path of the layer, which both know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnmon.alerts.base import HeadMemory

__all__ = ["Baselines"]

_VERSION = 1
_FIELDS = ("seen", "baseline", "baseline_error", "scatter", "unrest", "last")

_Memories = Mapping[str, Mapping[str, Mapping[int, Mapping[int, HeadMemory]]]]


@dataclass(frozen=True)
class Baselines:
    """Learned levels of heads.

    Attributes:
        heads: (rule, signal) -> path of the layer -> head -> a memory without any trouble in it.
    """

    heads: Mapping[tuple[str, str], Mapping[str, Mapping[int, HeadMemory]]]

    @classmethod
    def collect(cls, memory: _Memories, paths: Mapping[int, str]) -> Baselines:
        """What an engine has learned.

        Args:
            memory: Of the engine: rule -> signal -> layer -> head.
            paths: Of its layers.

        Raises:
            ValueError: No layer has a path, or nothing has been learned yet.
        """
        found: dict[tuple[str, str], dict[str, dict[int, HeadMemory]]] = {}
        for rule, signals in memory.items():
            for signal, layers in signals.items():
                for layer, heads in layers.items():
                    learned = {head: _calm(one) for head, one in heads.items() if one.baseline is not None}
                    if learned and layer in paths:
                        found.setdefault((rule, signal), {})[paths[layer]] = learned
        if not found:
            raise ValueError(
                "Expected baselines to have been learned, but got none: no head of a layer with a known path has been "
                "sampled yet, or all of them only under a warning. Save them once some heads were sampled without."
            )
        return cls(found)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "version": _VERSION,
            "baselines": [
                {
                    "rule": rule,
                    "signal": signal,
                    "layers": {
                        path: {
                            str(head): {name: getattr(memory, name) for name in _FIELDS}
                            for head, memory in rows.items()
                        }
                        for path, rows in layers.items()
                    },
                }
                for (rule, signal), layers in self.heads.items()
            ],
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Baselines:
        """The reverse of `plain`.

        Raises:
            ValueError: It is nothing of the kind, or holds a number that is not finite.
        """
        try:
            version = plain["version"]
            entries = [
                ((str(entry["rule"]), str(entry["signal"])), str(path), int(head), dict(numbers))
                for entry in plain["baselines"]
                for path, heads in entry["layers"].items()
                for head, numbers in heads.items()
            ]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"Expected `baselines` to be what a monitor saved, but got {type(plain).__name__} with {error!r}. "
                "Save them again with save_baselines."
            ) from error
        if version != _VERSION:
            raise ValueError(
                f"Expected `baselines` of version {_VERSION}, but got version {version!r}. Save them again with "
                "save_baselines."
            )
        found: dict[tuple[str, str], dict[str, dict[int, HeadMemory]]] = {}
        for key, path, head, numbers in entries:
            for name in _FIELDS:
                value = numbers.get(name)
                if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(
                        f"Expected `baselines` to hold finite numbers, but got {name}={value!r} for head {head} of "
                        f"{path!r} (rule {key[0]}). Delete that head's entry, and its baseline is learned anew."
                    )
            memory = HeadMemory(**{name: numbers[name] for name in _FIELDS})
            found.setdefault(key, {}).setdefault(path, {})[head] = memory
        return cls(found)

    def memory(self, rule: str, signal: str, path: str, head: int) -> HeadMemory:
        """Where a head starts: with what is known of it, else with nothing."""
        layers = self.heads.get((rule, signal), {})
        # Under Lightning a model is an attribute of a module, and its layers' paths are longer by that.
        same = [name for name in layers if f".{name}".endswith(f".{path}") or f".{path}".endswith(f".{name}")]
        known = layers[path].get(head) if path in layers else layers[same[0]].get(head) if len(same) == 1 else None
        return HeadMemory() if known is None else replace(known, first=known.baseline, settled=True)


def _calm(memory: HeadMemory) -> HeadMemory:
    return HeadMemory(**{name: getattr(memory, name) for name in _FIELDS})
