"""The figures of sampled rows in one pass: what several quantities need is made once, in memory that is used again.

The functions of each quantity take any tensors and stand alone. In a training step all quantities are taken of the same
rows, of which more is known: they are finite, every row sees a key, and the keys that not all of them see are the last.
On a CPU that halves the time. Where less is known, `RowFigures` leaves the rows to the functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from attnmon.masks import distinct
from attnmon.metrics._group import _Group
from attnmon.metrics._selection import _Block, _sizes_of, _top_keys
from attnmon.metrics.distance import TopNDistances, _distance_update
from attnmon.metrics.entropy import ENTROPY_STATISTICS, _statistics
from attnmon.metrics.jacobian import LEADERS, _Jacobian
from attnmon.metrics.logits import SPREAD_KEYS, _spread_of
from attnmon.metrics.separability import Separability, _separability_update
from attnmon.scratch import Scratch

__all__ = ["TOGETHER", "Carried", "RowFigures"]

SELECTED = (*Separability._fields, *TopNDistances._fields)
JACOBIAN = ("spectral", "frobenius", "max")
TOGETHER = frozenset({*ENTROPY_STATISTICS, "score_spread", "score_max", "first_key_weight", *SELECTED, *JACOBIAN})
"""Names of all that `RowFigures` knows."""
# Of vectors outside of these lengths the squares, or those times small weights, leave the range of float32.
_SHORTEST, _LONGEST = 1e-11, 1e12
# Below this share of the largest weight the order of the weights says little about the order of the scores.
_INDISTINCT = 1e-30


class Carried:
    """Vectors that the keys of some groups of rows carry, and what depends on them alone.

    Args:
        vectors: ``(groups, n, d)``, float32, on a CPU.
        scratch: Memory for temporaries.
    """

    def __init__(self, vectors: Tensor, scratch: Scratch) -> None:
        self.group = _Group(vectors, direct=True, scratch=scratch)
        longest = float(self.group.largest.amax())
        self.plain = vectors.dtype == torch.float32 and not self.group.any_broken and _SHORTEST < longest < _LONGEST


class RowFigures:
    """Figures of rows that share their keys and come in blocks.

    What needs all scores of a row is done block by block, what is a few numbers per row for all blocks at once.

    Args:
        scratch: Memory for temporaries.
        top_n: N, several, in ascending order.
        temperatures: Multiples of the temperature that the scores are scaled by, for the Jacobian norms.
        want: Names of entropy statistics, ``"score_spread"``, ``"first_key_weight"``, and names out of `SELECTED` and
            `JACOBIAN`. Others are left out of the answer.

    Attributes:
        held: Scores of the rows that were added since the last `finish`: memory goes by it.
    """

    def __init__(
        self, scratch: Scratch, *, top_n: Sequence[int], temperatures: Sequence[float], want: Collection[str]
    ) -> None:
        self._scratch = scratch
        self._top_n = tuple(top_n)
        self._temperatures = tuple(temperatures)
        self._selected = [name for name in SELECTED if name in want]
        self._norms = [name for name in JACOBIAN if name in want]
        self._entropy = any(name in want for name in ENTROPY_STATISTICS)
        self._spread = "score_spread" in want
        self._first = "first_key_weight" in want
        self._begin()

    def _begin(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._jacobian = _Jacobian(self._temperatures, self._norms, self._scratch)
        self.held = 0

    def _keep(self, **parts: Tensor) -> None:
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)

    def add(self, logits: Tensor, mask: Tensor, carried: Carried | None, *, finite: bool = False) -> Tensor | None:
        """Add a block of rows.

        Args:
            logits: ``(groups, rows, n)``, float32, contiguous, on a CPU: the scaled scores. Overwritten.
            mask: ``(groups, rows, n)`` bool, True = visible.
            carried: The vectors of at least these n keys; None if no top-N quantity is wanted.
            finite: All scores are known to be finite.

        Returns:
            The weights, ``(groups, rows, n)``, which the next block overwrites; `logits` are -inf at hidden keys then.
            None, with `logits` as they were, where these rows are not of the simple kind: a score is not finite, a row
            sees nothing, vectors are extreme. They have not been added.
        """
        groups, rows, n = logits.shape
        if n < 2 or (carried is not None and not carried.plain):
            return None
        shown = distinct(mask)
        seen = shown.flatten(0, -2).all(0)
        ragged = slice(n if bool(seen.all()) else int(seen.to(torch.uint8).argmin()), None)
        shown = shown.to(logits.dtype)
        count = shown.sum(-1)
        if not (finite or bool(logits.sum().isfinite())) or not bool((count > 0).all()):
            return None
        part, hidden = shown[..., ragged], 1 - shown[..., ragged]

        # Scores: with 0 where a key is hidden.
        tail = logits[..., ragged]
        tail.mul_(part)
        self._keep(most=logits.amax(-1), least=logits.amin(-1))
        if self._spread:
            mean = (logits.sum(-1) / count)[..., None]
            centred = torch.sub(logits, mean, out=self._scratch.take("a", *logits.shape, like=logits))
            centred[..., ragged].mul_(part)
            self._keep(left=centred.sum(-1), size=torch.linalg.vector_norm(centred, dim=-1))

        # Weights.
        tail.add_(torch.zeros_like(part).masked_fill_(part == 0, -torch.inf))
        weights = torch.softmax(logits, -1, out=self._scratch.take("weights", *logits.shape, like=logits))
        self._keep(count=count.expand(groups, rows))
        if self._entropy:
            tiny = torch.finfo(weights.dtype).tiny
            logs = torch.clamp_min(weights, tiny, out=self._scratch.take("a", *logits.shape, like=logits)).log_()
            self._keep(entropy=logs.mul_(weights).sum(-1))
        if self._first:
            self._keep(first_key_weight=_first_key(weights, shown, ragged))

        sizes = tuple(size for size in self._top_n if size < n) if carried is not None and self._selected else ()
        leaders = min(LEADERS + 1, n) if self._norms else 0
        if sizes or leaders:
            tail = weights[..., ragged]
            tail.sub_(hidden)  # -1 where hidden
            ranked = _top_keys(weights, max(*sizes, leaders - 1) + 1 if sizes else leaders, True)
            tail.add_(hidden)
        if carried is not None:
            group = carried.group.prefix(n)
            if sizes:
                block = _Block.prepared(weights, group, mask, shown, ragged, count.expand(groups, rows), sizes)
                most = sizes[-1] + 1
                block.ranked = (ranked[0][..., :most], ranked[1][..., :most])
                found = _separability_update(block, self._selected) | _distance_update(block, self._selected)
                missing = len(self._top_n) - len(sizes)
                for name, value in found.items():
                    self._keep(**{name: torch.nn.functional.pad(value, (0, missing)) if missing else value})
                self._keep(output=block.centre)
            else:
                nothing = logits.new_zeros(groups, rows, len(self._top_n))
                self._keep(**dict.fromkeys(self._selected, nothing), output=torch.bmm(weights, group.vectors))
        if leaders:
            order = ranked[1][..., :leaders].reshape(groups * rows, leaders)
            flat = logits.reshape(groups * rows, n)
            # Scores so far below the largest that their weights are all but 0 have to be ranked by themselves.
            leading = ranked[0][..., :leaders]
            known = bool(((leading > _INDISTINCT) | (leading < 0)).all())
            self._jacobian.add(flat, (flat.gather(-1, order), order) if known else None)
        self.held += logits.numel()
        return weights

    def finish(self) -> dict[str, Tensor]:
        """Name to ``(groups, rows)``, ``(groups, rows, len(top_n))`` or ``(groups, rows, len(temperatures))``.

        The rows are those of all blocks, one after the other, with the figures as the functions of each quantity return
        them; beside what was wanted ``"score_max"``, and with vectors ``"output"``: ``(groups, rows, d)``, the weighted
        sum of the vectors.
        """
        parts = {name: torch.cat(tensors, 1) for name, tensors in self._parts.items()}
        sizes = [part.shape[1] for part in self._parts["count"]]
        count = parts.pop("count")
        groups = len(count)
        out = {"score_max": torch.maximum(parts.pop("most"), -parts.pop("least")) + 0.0}  # never -0
        if self._spread:
            spread = _spread_of(parts.pop("left"), parts.pop("size"), count)
            out["score_spread"] = torch.where(count >= SPREAD_KEYS, spread, torch.nan)
        if self._entropy:
            out |= _statistics(0.0 - parts.pop("entropy"), count)
        if any(name in parts for name in self._selected):
            undefined = count[..., None] <= _sizes_of(self._top_n, count.dtype, count.device).sizes
            out |= {name: parts.pop(name).masked_fill_(undefined, torch.nan) for name in self._selected}
        if self._norms:
            for name, value in self._jacobian.finish().items():  # (T, groups * rows of each block)
                blocks = [
                    block.view(-1, groups, size)
                    for block, size in zip(value.split([groups * size for size in sizes], 1), sizes, strict=True)
                ]
                out[name] = torch.cat(blocks, -1).movedim(0, -1)
        self._begin()
        return out | parts


def _first_key(weights: Tensor, shown: Tensor, ragged: slice) -> Tensor:
    """Weight of the first visible key of each row."""
    if ragged.start > 0 or bool(shown[..., 0].all()):
        return weights[..., 0].clone()
    first = shown.argmax(-1, keepdim=True).expand(*weights.shape[:-1], 1)
    return weights.gather(-1, first).squeeze(-1)
