"""Exact entropy, first-key weight and largest score of *every* row of a call, with memory linear in the lengths.

On a CPU the rows are done from their scores, a block of rows at a time in a buffer that fits the cache
(`attnmon.fused.blocks`). On a GPU entropy and first-key weight come from the fused attention kernel
(`attnmon.fused.kernel`), and in blocks only where that is not exact enough; the largest score is found in blocks there,
too, since no kernel returns it. Nothing of size ``q_len x kv_len`` is ever made.

Beside `attnmon.rows` this is the second place where query meets key, under the same rules: float32 (float64 if the
model is), heads grouped by the key head they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from attnmon.fused.blocks import Reduce, in_blocks, largest, weights
from attnmon.fused.kernel import by_kernel, suits
from attnmon.fused.walk import Walk, by_key_head, only_hides
from attnmon.metrics.entropy import ENTROPY_STATISTICS, MIN_KEYS, _normalized, _share
from attnmon.scratch import Scratch
from attnmon.types import AttentionCall

__all__ = ["BASES", "covers", "fused_rows"]

_ENTROPY = frozenset(ENTROPY_STATISTICS)
BASES = _ENTROPY | {"first_key_weight", "score_max"}
"""Quantities that `fused_rows` knows."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_READ = 1 << 20  # entries of a mask that are looked at together
# Where blocks of scores take longer than the kernel: a GPU has to be filled by one operation, and its memory is slow
# beside its arithmetic.
_KERNEL = frozenset({"cuda"})
# Scores of a block, in elements, and its rows: few, so that a causal block holds little above its diagonal, and so few
# that it stays in the second-level caches of a few cores, but enough for an efficient product. Where all that is made
# of a block is its largest score, it gains more from fewer operations.
_BLOCK = {"cpu": (1 << 19, 128), "cuda": (1 << 22, 128)}
_LARGE_BLOCK = {"cuda": (1 << 24, 128)}


def covers(call: AttentionCall, bases: Iterable[str]) -> bool:
    """Whether `fused_rows` can give these quantities of a call (but for rows that are not finite).

    Reads a floating-point mask once, block by block, and waits for its device. Whoever calls `fused_rows` anyway need
    not ask first.

    Args:
        call: The call.
        bases: Names without arguments, out of `BASES`.

    Returns:
        False for a name that is not in `BASES`, a soft cap, an additive mask with entries that neither are 0 nor
        hide, a mask of another kind, and for a device or dtype that has not been provided for.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 4, 8)
        >>> call = AttentionCall("attn", x, x, x, attn_mask=None, causal_offset=0, scale=8**-0.5)
        >>> covers(call, ["entropy", "score_max"]), covers(call, ["separability"])
        (True, False)
    """
    if not _expressible(call, frozenset(bases)):
        return False
    mask = by_key_head(call)
    if mask is None or mask.dtype == torch.bool:
        return True
    step = max(1, _READ // mask[:, :, :, 0].numel())
    alone = call.causal_offset is not None
    return all(bool(only_hides(mask[:, :, :, lo : lo + step], alone)) for lo in range(0, mask.shape[3], step))


@torch.no_grad()
def fused_rows(call: AttentionCall, bases: Iterable[str], scratch: Scratch | None = None) -> dict[str, Tensor] | None:
    """Measures every row of a call, with memory linear in the lengths.

    The figures are those of `attnmon.metrics` of the same names on the rows of `attnmon.rows.all_rows`, to a few 1e-6
    (nats, weights; of the largest score itself); where scores are in the hundreds, to the rounding that they have in
    float32.

    Source: Shannon entropy of the weights of section 2.1 of arXiv 2508.17821, as the log-sum-exp of the scores less
    their mean; see `attnmon.metrics.attention_entropy`, `first_key_weight` and `score_max` for each of the figures.

    Must run with full-precision products (`attnmon.agreement.full_precision`).

    Args:
        call: The call.
        bases: Names without arguments, out of `BASES`.
        scratch: Memory for a copy of the keys, which the next call uses again; None: each takes its own.

    Returns:
        Each name to ``(batch, num_heads, q_len)``, float32 (float64 if the query is), on the device of the call: nats,
        shares, keys, weights and scaled scores as in `attnmon.metrics`; NaN where a row has no such figure. Padding
        rows are measured like others. None if `covers` is False, or if a query or key is not finite or so large that
        a score may overflow: then rows have to be looked at one by one.

    Example:
        >>> import torch
        >>> x = torch.zeros(1, 1, 3, 8)
        >>> call = AttentionCall("attn", x, x, x, attn_mask=None, causal_offset=0, scale=8**-0.5)
        >>> rows = fused_rows(call, ["effective_keys", "first_key_weight"])
        >>> rows["effective_keys"], rows["first_key_weight"]
        (tensor([[[1., 2., 3.]]]), tensor([[[1.0000, 0.5000, 0.3333]]]))
    """
    names = tuple(bases)
    if not _expressible(call, frozenset(names)):
        return None
    with torch.autocast(call.query.device.type, enabled=False):
        found = _figures(Walk(call, scratch or Scratch()), frozenset(names))
    return None if found is None else {name: found[name].flatten(1, 2) for name in names}


def _figures(walk: Walk, wanted: frozenset[str]) -> dict[str, Tensor] | None:
    """All quantities that are wanted, ``(batch, num_kv_heads, group, q_len)``, or None."""
    kind = walk.device.type
    wants_first = "first_key_weight" in wanted
    wants_weights = wants_first or bool(_ENTROPY & wanted)
    left: Tensor | None = None  # of all rows the weights are still to be measured
    reach: Tensor | None = None
    if wants_weights and kind in _KERNEL and suits(walk):
        left, reach = by_kernel(walk, wants_first)
    longest = float(walk.reach() if reach is None else reach)
    if not longest < walk.limits.max / 4:  # near the number that hides a key, or NaN
        return None
    sizes: list[Reduce] = [partial(largest, walk)] if "score_max" in wanted else []
    sums: list[Reduce] = []
    if wants_weights and (left is None or bool(left.any())):
        sums.append(partial(weights, walk, wants_first, 2 * longest > -walk.floor))
    if kind in _KERNEL:
        in_blocks(walk, None, _LARGE_BLOCK[kind], sizes)
        in_blocks(walk, left, _BLOCK[kind], sums)
    else:
        in_blocks(walk, None, _BLOCK[kind], sizes + sums)
    if not bool(walk.only_hides):
        return None
    blind = walk.count < 1
    found = {}
    if "score_max" in wanted:
        found["score_max"] = walk.largest.masked_fill_(blind, torch.nan)
    if wants_first:
        found["first_key_weight"] = walk.first.div_(walk.total).clamp_max_(1.0).masked_fill_(blind, torch.nan)
    if _ENTROPY & wanted:
        entropy = walk.total.log().sub_(walk.mixed.div_(walk.total)).clamp_min_(0.0)
        entropy = entropy.minimum(walk.count.log()).masked_fill_(blind, torch.nan)
        makers: dict[str, Callable[[], Tensor]] = {
            "entropy": lambda: entropy,
            "entropy_normalized": lambda: _normalized(entropy, walk.count),
            "effective_keys": entropy.exp,
            "active_share": lambda: _share(entropy, walk.count, MIN_KEYS),
        }
        found |= {name: make() for name, make in makers.items() if name in wanted}
    return found


def _expressible(call: AttentionCall, wanted: frozenset[str]) -> bool:
    """`covers`, but for the entries of a floating-point mask."""
    query, key, mask = call.query, call.key, call.attn_mask
    if not wanted <= BASES or call.softcap is not None:
        return False
    if query.device.type not in _BLOCK or query.dtype not in _DTYPES or key.dtype not in _DTYPES:
        return False
    if query.numel() == 0 or key.numel() == 0:
        return False
    if mask is None:
        return True
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask.dim() > 4 or any(size not in (1, most) for size, most in zip(mask.shape[::-1], full[::-1], strict=False)):
        return False
    return mask.dtype == torch.bool or mask.dtype in _DTYPES
