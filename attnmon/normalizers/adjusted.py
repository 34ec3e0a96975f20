"""Self-Adjusted Softmax: softmax times the scores, rescaled to [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnmon.masks import masked_softmax
from attnmon.metrics._lowrank import _low_rank_norm
from attnmon.normalizers._base import Normalizer, _at, _check_number

__all__ = ["SelfAdjustedSoftmax"]


@dataclass(frozen=True)
class SelfAdjustedSoftmax(Normalizer):
    r"""Softmax weights, each multiplied by where its score lies between the row's smallest and largest.

    ``w_i = g_i p_i`` with ``z = s / T``, ``p = softmax(z)``, ``g_i = (z_i - l) / (h - l)``, ``l = min(z_min, 0)`` and
    ``h = max(z_max, 0)``, over the visible keys. Where ``h = l``, that is where all visible scores are 0, g is 1, as it
    is for equal positive scores however small. The Jacobian with respect to z is
    ``diag(p / (h - l) + w) - w p^T - (p (1 - g) / (h - l)) e_min^T [z_min < 0] - (w / (h - l)) e_max^T [z_max > 0]``.

    Source: the Discussion of arXiv 2508.17821; arXiv 2502.18277.

    Reading: the rows do not sum to 1, and a row of equal negative scores has no weight at all. Where scores are close
    to 0 the Jacobian has no bound; where all are 0 the weights jump and it is NaN. With ties the smallest and the
    largest score are those of the first index.

    Args:
        temperature: Absolute temperature ``T``.

    Raises:
        TypeError: If `temperature` is not a number.
        ValueError: If `temperature` is not positive and finite.

    Example:
        >>> import torch
        >>> SelfAdjustedSoftmax().weights(torch.tensor([1.0, 1.0, -1.0]))
        tensor([0.4683, 0.4683, 0.0000])
        >>> SelfAdjustedSoftmax().jacobian_norm(torch.tensor([2.0]))
        tensor(0.)
    """

    sums_to_one: ClassVar[bool] = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._set(temperature=_check_number("temperature", self.temperature), name="sa-softmax")

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        z, low, high, _, _ = self._ends(scores, visible)
        flat = high == low
        factor = torch.where(flat, 1.0, (z - low) / torch.where(flat, 1.0, high - low))
        return factor * masked_softmax(z, visible)

    def _ends(self, scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Scores over T, 0 where not visible, l and h, (rows, 1), and the first keys with the least and most."""
        z = torch.where(visible, scores / self.temperature, 0.0)
        least, first = torch.where(visible, z, torch.inf).min(-1)
        most, last = torch.where(visible, z, -torch.inf).max(-1)
        # not clamped: at 0 that passes a gradient on
        low, high = torch.where(least < 0, least, 0.0), torch.where(most > 0, most, 0.0)
        return z, low[:, None], high[:, None], first, last

    def _norm(self, scores: Tensor, visible: Tensor, norm: str) -> Tensor:
        n = scores.shape[-1]
        z, low, high, first, last = self._ends(scores, visible)
        lows, highs = low < 0, high > 0  # which of the two follow a score
        flat = high == low
        span = torch.where(flat, 1.0, high - low)
        p = masked_softmax(z, visible)
        w = (z - low) / span * p
        # Row `bottom` is 0. Row `top` is kept as a row of its own: taken from its terms it would lose all its digits
        # where p is close to 1.
        bottom, top = _at(first, n) & lows, _at(last, n)
        others = (p * ~top).sum(-1, keepdim=True)
        p_bottom, p_top, w_top = ((x * at).sum(-1, keepdim=True) for x, at in ((p, bottom), (p, top), (w, top)))
        pull = (high - z) / span * p / span * lows  # p (1 - g) / (h - l)
        row = -w_top * p - torch.where(bottom, (pull * top).sum(-1, keepdim=True), 0.0)
        row = torch.where(top, torch.where(highs, 0.0, p_top / span) + w_top * others, row)
        row = torch.where((top & bottom).any(-1, keepdim=True), 0.0, row)
        free = visible & ~top & ~bottom
        w, pull, p_free = w * free, pull * free, p * free
        across = p + torch.where(top & highs, 1 / span, 0.0)  # J_ik = -w_i across_k, but for the diagonal and `bottom`
        inner = torch.where(bottom, 0.0, across)
        diagonal = p_free / span + w * (1 - p_free)
        column = w * p_bottom + pull
        if norm == "max":
            rest = torch.stack([diagonal, w * (inner * top).sum(-1, keepdim=True), column, row.abs()])
            value = rest.amax((0, -1))
        else:
            off = w**2 * ((inner**2).sum(-1, keepdim=True) - inner**2) + column**2
            value = (diagonal**2 + off + row**2).sum(-1).sqrt()
        if norm == "spectral":
            left = torch.stack([w, pull, top.to(w.dtype)], 1)
            right = torch.stack([-across, -bottom.to(w.dtype), row], 1)
            value = _low_rank_norm(p_free / span + w, left, right, value)
        return torch.where(flat[:, 0], torch.nan, value / self.temperature)
