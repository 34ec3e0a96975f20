"""What all ways of measuring every row of a call share: its numbers, which keys a row sees, the sums of its rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmon.masks import distinct, hides
from attnmon.scratch import Scratch
from attnmon.types import AttentionCall

__all__ = ["Walk", "by_key_head", "first_visible", "norms", "only_hides"]


class Walk:
    """What is measured of one call.

    Heads are grouped by the key head they read: what is kept per row is ``(batch, num_kv_heads, group, q_len)``.

    Args:
        call: The call.
        scratch: Memory for copies of the keys and for blocks of scores.

    Attributes:
        shape: ``(batch, num_kv_heads, group, q_len)``.
        query: ``(batch, num_kv_heads, group, q_len, head_dim)``.
        key: ``(batch, num_kv_heads, kv_len, head_dim)``.
        count: How many keys each row sees, broadcastable to `shape`. Of a mask, which is counted where it is read,
            there is only room for it.
        total: Of each row, with weights relative to any one number: their sum.
        mixed: The sum of weight times logarithm of the weight.
        first: The weight of the first key.
        largest: Apart from these, the largest absolute score.
        floor: The lowest exponent of a weight.
        only_hides: Whether the entries of an additive mask that have been read all are 0 or hide.
    """

    def __init__(self, call: AttentionCall, scratch: Scratch) -> None:
        self.scratch = scratch
        batch, heads, q_len, _ = call.query.shape
        kv_heads, self.kv_len = call.key.shape[1:3]
        self.device = call.query.device
        self.dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
        self.limits = torch.finfo(self.dtype)
        self.scale = call.scale
        self.query = call.query.detach().to(self.dtype).unflatten(1, (kv_heads, heads // kv_heads))
        self.key = call.key.detach().to(self.dtype)
        self.mask = by_key_head(call)
        self.offset = call.causal_offset
        self.shape = (batch, kv_heads, heads // kv_heads, q_len)
        self.count = self._count()
        self.total, self.mixed, self.first, self.largest = self.query.new_empty(4, *self.shape)
        # Below this a weight is no normal number any more, and the vectorised exp falls back to a slow path.
        self.floor = math.ceil(math.log(self.limits.tiny))
        self._futures: dict[tuple[int, int, int], Tensor] = {}
        self.only_hides = torch.ones((), dtype=torch.bool, device=self.device)

    def _count(self) -> Tensor:
        """How many keys each row sees, broadcastable to ``(batch, num_kv_heads, group, q_len)``.

        Of a mask, which is counted where it is read, there is only room for it.
        """
        if self.mask is not None:
            return torch.empty(self.shape, device=self.device, dtype=self.dtype)
        if self.offset is None:
            return torch.full((1, 1, 1, 1), self.kv_len, device=self.device, dtype=self.dtype)
        first = self.offset + 1
        count = torch.arange(first, first + self.shape[-1], device=self.device, dtype=self.dtype)
        return count.clamp_(0, self.kv_len)[None, None, None]

    def reach(self) -> Tensor:
        """What no score is above, a scalar; NaN if something is not finite."""
        reach: Tensor = norms(self.query.flatten(1, 2)).amax() * abs(self.scale) * norms(self.key).amax()
        return reach

    def causal(self, lo: int, hi: int) -> tuple[int, int, Tensor | None]:
        """How many keys some row of a block sees, from which on not all of them do, and there: 1.0 = not seen."""
        if self.offset is None:
            return self.kv_len, self.kv_len, None
        keys = min(self.kv_len, max(1, hi + self.offset))
        tail = min(keys, max(0, lo + self.offset + 1))
        if tail == keys:
            return keys, tail, None
        kind = (hi - lo, keys - tail, lo + self.offset - tail)  # the same for most blocks
        if kind not in self._futures:
            rows, columns, first = kind
            last = torch.arange(first, first + rows, device=self.device)
            self._futures[kind] = (torch.arange(columns, device=self.device) > last[:, None]).to(self.dtype)
        return keys, tail, self._futures[kind]

    def shown(
        self, heads: tuple[slice, slice], lo: int, hi: int, keys: int, tail: int, future: Tensor | None
    ) -> Tensor | None:
        """Mask and causality of a block as 1.0 = visible, ``(batch or 1, kv_heads or 1, group or 1, rows or 1, keys)``.

        None without a mask. `heads`: which sequences and key heads; what these share is made, and counted, for all.
        """
        if self.mask is None:
            return None
        at = tuple(part if size > 1 else slice(None) for part, size in zip(heads, self.mask.shape, strict=False))
        mask = self.mask[at]
        mask = mask[:, :, :, lo:hi] if mask.shape[3] > 1 else mask
        if mask.dtype != torch.bool:
            self.only_hides &= only_hides(mask, self.offset is not None)
            mask = mask == 0
        shown = mask[..., :keys].to(self.dtype)  # a copy: the model's own mask stays as it is
        if future is not None:
            shown = shown.expand(*shown.shape[:3], hi - lo, keys).contiguous()
            shown[..., tail:] *= 1 - future
        self.count[(*at, slice(None), slice(lo, hi))] = shown.sum(-1)
        return shown


def norms(vectors: Tensor) -> Tensor:
    """Euclidean lengths, ``(batch, heads, rows, dim)`` to ``(batch, heads, rows)``."""
    # With rows before heads this takes half as long, however the vectors lie.
    found: Tensor = torch.linalg.vector_norm(vectors.transpose(1, 2), dim=-1)
    return found.transpose(1, 2)


def first_visible(shown: Tensor) -> Tensor:
    """Index of the first visible key, ``(..., keys)`` to ``(...)`` int64 (the last key where none is)."""
    keys = shown.shape[-1]
    ramp = torch.arange(keys, 0, -1, device=shown.device, dtype=shown.dtype)
    return (keys - (shown * ramp).amax(-1)).long().clamp_max(keys - 1)


def by_key_head(call: AttentionCall) -> Tensor | None:
    """The mask as a view, ``(batch or 1, num_kv_heads or 1, group or 1, q_len or 1, kv_len)``."""
    if call.attn_mask is None:
        return None
    mask = call.attn_mask.detach()
    mask = mask[(None,) * (4 - mask.dim())]
    mask = distinct(mask.expand(*mask.shape[:3], call.key.shape[2]))
    if mask.shape[1] == 1:
        return mask[:, :, None]
    grouped: Tensor = mask.unflatten(1, (call.num_kv_heads, call.num_heads // call.num_kv_heads))
    return grouped


def only_hides(bias: Tensor, alone: bool) -> Tensor:
    """Whether all of an additive mask ``(..., n)`` is 0 or hides; `alone`: without regard to the row it stands in.

    Beside a causal limit the largest entry of a row may belong to a key that it does not see.
    """
    hidden = hides(bias[..., None])[..., 0] if alone else hides(bias)
    return ((bias == 0) | hidden).all()
