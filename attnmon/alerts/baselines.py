"""What has been learned of heads, taken from one run to another: by the path of the layer, which both know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnmon.alerts.base import HeadMemory

__all__ = ["Baselines"]

_VERSION = 1
_LARGEST = 1e9  # beyond every figure that any head has: a baseline there would switch its rule off
_SHARES = ("entropy_rise", "entropy_collapse", "separability_loss")  # rules about figures from 0 to 1
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
            ValueError: It is nothing of the kind, or holds a number that no head can have.
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
                most = 1.0 + 1e-6 if name == "baseline" and key[0] in _SHARES else _LARGEST
                number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else value
                if not 0.0 <= number <= most:  # NaN is not
                    raise ValueError(
                        f"Expected `baselines` to hold finite numbers from 0 to {most:g}, but got {name}={value!r} for "
                        f"head {head} of {path!r} (rule {key[0]}). Delete that head's entry: its baseline is then "
                        "learned anew."
                    )
            memory = HeadMemory(**{name: numbers[name] for name in _FIELDS})
            found.setdefault(key, {}).setdefault(path, {})[head] = memory
        return cls(found)

    def memory(self, rule: str, signal: str, path: str, head: int) -> HeadMemory:
        """Where a head starts: with what is known of it, else with nothing."""
        layers = self.heads.get((rule, signal), {})
        name = _same(path, layers)
        known = None if name is None else layers[name].get(head)
        return HeadMemory() if known is None else replace(known, first=known.baseline, settled=True)

    def unknown(self, heads: Mapping[int, int], paths: Mapping[int, str]) -> str:
        """What is to be said of heads that these know nothing of; "" where they know all.

        Args:
            heads: Number of heads of each layer that was measured.
            paths: Of these layers.
        """
        known: dict[str, set[int]] = {}
        for layers in self.heads.values():
            for path, rows in layers.items():
                known.setdefault(path, set()).update(rows)
        total = sum(heads.values())
        found = {layer: known.get(_same(paths.get(layer, ""), known) or "", set()) for layer in heads}
        fit = sum(len(found[layer] & set(range(count))) for layer, count in heads.items())
        if fit == total:
            return ""
        strange = [paths.get(layer, str(layer)) for layer, count in heads.items() if len(found[layer]) < count]
        return (
            f"the baselines given fit {fit} of the {total} heads that are measured; the others learn theirs anew. They "
            f"are of {sum(map(len, known.values()))} heads in {_few(known)}, and the model's others are in "
            f"{_few(strange)}. Heads go by the path of their layer: save the baselines of this model."
        )


def _same(path: str, known: Iterable[str]) -> str | None:
    """The name under which a layer is known: under Lightning a model is an attribute of a module, its paths longer."""
    names = list(known)
    if path in names:
        return path
    same = [name for name in names if f".{name}".endswith(f".{path}") or f".{path}".endswith(f".{name}")]
    return same[0] if len(same) == 1 else None


def _few(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def _calm(memory: HeadMemory) -> HeadMemory:
    return HeadMemory(**{name: getattr(memory, name) for name in _FIELDS})
