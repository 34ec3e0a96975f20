"""What the keys of a row carry, and what depends on that alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnmon.analysis.options import AnalysisOptions
from attnmon.metrics._group import _Group
from attnmon.types import AttentionCall

__all__ = ["Vectors", "positions_seen"]

# Arrays of all pairs of keys that a group may keep at the same time: distances, products, and what making them takes.
_SQUARES = 4


class Vectors:
    """Makes the groups of a layer's rows.

    Args:
        options: Say which vectors.
        memory: Bytes that arrays of all pairs of keys may take.
        positional: Filled by `positions_seen` while the model runs.
    """

    def __init__(self, options: AnalysisOptions, memory: int, positional: list[Tensor]) -> None:
        self.kind = options.vectors
        self.normalize = options.normalize_vectors
        if self.normalize is None:
            self.normalize = options.vectors == "embedding"
        self._memory = memory
        self._positional = positional
        self._last: tuple[Tensor, _Group] | None = None

    @property
    def shared(self) -> bool:
        """Whether all heads of a layer carry the same."""
        return self.kind != "value"

    def context(self) -> frozenset[str]:
        """What the capture has to collect."""
        wanted = {"embedding": "embedding", "positioned": "embedding", "hidden": "hidden"}
        return frozenset({wanted[self.kind]} if self.shared else ())

    def group(self, call: AttentionCall, kv_head: int) -> _Group:
        """The group of one key head's rows (of all rows, if the vectors are shared).

        Raises:
            ValueError: The model doesn't have such vectors.
        """
        vectors = call.value[0, kv_head] if self.kind == "value" else self._of_tokens(call)
        vectors = vectors.detach()
        dtype = torch.float64 if vectors.dtype == torch.float64 else torch.float32
        if self._last is not None and self.shared and torch.equal(self._last[0], vectors):
            return self._last[1]
        made = vectors.to(dtype)
        if self.normalize:
            made = nn.functional.normalize(made, dim=-1)
        direct = dtype == torch.float64 or made.device.type != "cuda"
        made = made if direct else made.double()
        dense = _SQUARES * made.shape[0] ** 2 * made.dtype.itemsize <= self._memory
        group = _Group(made[None], direct, dense)
        self._last = (vectors, group)
        return group

    def _of_tokens(self, call: AttentionCall) -> Tensor:
        found = call.hidden if self.kind == "hidden" else call.embedding
        if found is None:
            raise ValueError(
                f"Expected `vectors`={self.kind!r} to be one vector for each key of `{call.layer}`, but the model "
                "shows none of that length. Use vectors='value'."
            )
        if self.kind != "positioned":
            return found[0]
        # the tokens' own table is looked up in the order of its rows, too, where their ids count up
        others = [seen for seen in self._positional if seen.data_ptr() != found.data_ptr()]
        fitting = [seen for seen in others if seen.shape[-2:] == found.shape[-2:]]
        if not fitting:
            raise ValueError(
                "Expected `vectors`='positioned' to find a learned position embedding, but the model looks none up "
                "(rotary and ALiBi positions are not vectors that are added). Use vectors='embedding' or 'hidden'."
            )
        return found[0] + fitting[-1].reshape(-1, *found.shape[-2:])[0].to(found.dtype)


@contextmanager
def positions_seen(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects what embedding tables return in the order of their rows, as tables of positions do."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        table = module.weight
        if not isinstance(output, Tensor) or output.dim() not in (2, 3) or not isinstance(table, Tensor):
            return
        rows = output.detach().reshape(-1, *output.shape[-2:])[0]
        if len(rows) < 2 or len(rows) > len(table):
            return
        for start in (table == rows[0]).all(-1).nonzero().flatten().tolist():
            if torch.equal(table[start : start + len(rows)], rows):
                seen.append(output.detach())
                return

    handles = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, nn.Embedding)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        seen.clear()
