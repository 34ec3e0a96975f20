"""The figures of sampled rows in one pass: what several quantities need is made once, in memory that is used again.

The functions of each quantity take any tensors and stand alone. In a training step all quantities are taken of the same
rows, of which more is known: they are finite, every row sees a key, and the keys that not all of them see are the last.
On a CPU that halves the time. Where less is known, `row_figures` leaves the rows to the functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from attnmon.masks import distinct
from attnmon.metrics._group import _Group, _Scratch
from attnmon.metrics._selection import _Block, _top_keys
from attnmon.metrics.distance import TopNDistances, _distance_update
from attnmon.metrics.entropy import ENTROPY_STATISTICS, _statistics
from attnmon.metrics.jacobian import LEADERS, _jacobian_block
from attnmon.metrics.logits import SPREAD_KEYS, _spread
from attnmon.metrics.separability import Separability, _separability_update

__all__ = ["Carried", "Scratch", "row_figures"]

SELECTED = (*Separability._fields, *TopNDistances._fields)
JACOBIAN = ("spectral", "frobenius", "max")
Scratch = _Scratch
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


@torch.no_grad()
def row_figures(
    logits: Tensor,
    mask: Tensor,
    carried: Carried | None,
    scratch: Scratch,
    *,
    top_n: Sequence[int],
    temperatures: Sequence[float],
    want: Collection[str],
) -> dict[str, Tensor] | None:
    """Figures of rows that share their keys.

    Args:
        logits: ``(groups, rows, n)``, float32, contiguous, on a CPU: the scaled scores. Overwritten.
        mask: ``(groups, rows, n)`` bool, True = visible.
        carried: The vectors of at least these n keys; None if no top-N quantity is wanted.
        scratch: Memory for temporaries.
        top_n: N, several, in ascending order and each below n.
        temperatures: Multiples of the temperature that the scores are scaled by, for the Jacobian norms.
        want: Names of entropy statistics, ``"score_spread"``, ``"first_key_weight"``, and names out of `SELECTED` and
            `JACOBIAN`. Others are left out of the answer.

    Returns:
        Name to ``(groups, rows)``, ``(groups, rows, len(top_n))`` or ``(groups, rows, len(temperatures))``, as the
        functions of each quantity return them, ``"score_max"`` in any case, and ``"weights"``, ``(groups, rows, n)``,
        which the next call overwrites. With `carried`, ``"output"``: ``(groups, rows, d)``, the weighted sum of the
        vectors. Where there is a result, `logits` are -inf at hidden keys. None, with `logits` as they were, where
        these rows are not of the simple kind: a score is not finite, a row sees nothing, vectors are extreme.
    """
    groups, rows, n = logits.shape
    if n < 2 or (carried is not None and not carried.plain):
        return None
    shown = distinct(mask)
    seen = shown.flatten(0, -2).all(0)
    ragged = slice(n if bool(seen.all()) else int(seen.to(torch.uint8).argmin()), None)
    shown = shown.to(logits.dtype)
    count = shown.sum(-1)
    if not bool(logits.sum().isfinite()) or not bool((count > 0).all()):
        return None
    part, hidden = shown[..., ragged], 1 - shown[..., ragged]
    out: dict[str, Tensor] = {}

    # Scores: with 0 where a key is hidden.
    tail = logits[..., ragged]
    tail.mul_(part)
    out["score_max"] = torch.maximum(logits.amax(-1), -logits.amin(-1)) + 0.0  # never -0
    if "score_spread" in want:
        mean = (logits.sum(-1) / count)[..., None]
        centred = torch.sub(logits, mean, out=scratch.take("a", *logits.shape, like=logits))
        centred[..., ragged].mul_(part)
        spread = _spread(centred, count)
        out["score_spread"] = torch.where(count >= SPREAD_KEYS, spread, torch.nan)

    # Weights.
    tail.add_(torch.zeros_like(part).masked_fill_(part == 0, -torch.inf))
    weights = torch.softmax(logits, -1, out=scratch.take("weights", *logits.shape, like=logits))
    out["weights"] = weights
    count = count.expand(groups, rows)
    if any(name in want for name in ENTROPY_STATISTICS):
        tiny = torch.finfo(weights.dtype).tiny
        terms = torch.clamp_min(weights, tiny, out=scratch.take("a", *logits.shape, like=logits)).log_().mul_(weights)
        out |= _statistics(0.0 - terms.sum(-1), count)
    if "first_key_weight" in want:
        first = shown.argmax(-1, keepdim=True).expand(groups, rows, 1)
        out["first_key_weight"] = weights.gather(-1, first).squeeze(-1)

    wanted = [name for name in SELECTED if name in want]
    most = max(top_n) + 1 if carried is not None and wanted else 0
    leaders = min(LEADERS + 1, n) if any(name in want for name in JACOBIAN) else 0
    if not most and not leaders:
        return out
    tail = weights[..., ragged]
    tail.sub_(hidden)  # -1 where hidden
    ranked = _top_keys(weights, max(most, leaders), True)
    tail.add_(hidden)
    if carried is not None and wanted:
        block = _Block.prepared(weights, carried.group.prefix(n), mask, shown, ragged, count, tuple(top_n))
        block.ranked = (ranked[0][..., :most], ranked[1][..., :most])
        found = _separability_update(block, wanted) | _distance_update(block, wanted)
        out |= {name: torch.where(block.defined, value, torch.nan) for name, value in found.items()}
        out["output"] = block.centre
    if leaders:
        order = ranked[1][..., :leaders].reshape(groups * rows, leaders)
        flat = logits.reshape(groups * rows, n)
        # Scores so far below the largest that their weights are all but 0 have to be ranked by themselves.
        leading = ranked[0][..., :leaders]
        known = bool(((leading > _INDISTINCT) | (leading < 0)).all())
        made = _jacobian_block(
            flat,
            tuple(temperatures),
            [name for name in JACOBIAN if name in want],
            (flat.gather(-1, order), order) if known else None,
            scratch,
        )
        out |= {name: value.mT.reshape(groups, rows, -1) for name, value in made.items()}
    return out
