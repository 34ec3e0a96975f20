"""What the scores themselves show: their spread, their size, and the weight of the first key."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attnmon.metrics._checks import _check_count, _check_positive, _visible_values, _visible_weights

__all__ = ["first_key_weight", "score_max", "score_spread"]


SPREAD_KEYS = 8
"""Fewest visible keys of a row whose spread counts."""


@torch.no_grad()
def score_spread(
    scores: Tensor,
    temperature: float | Iterable[float] = 1.0,
    *,
    mask: Tensor | None = None,
    min_keys: int = SPREAD_KEYS,
) -> Tensor:
    r"""Measure how far apart the scaled scores of each row are.

    The population standard deviation (divisor n) of ``s / T`` over the visible keys of a row, for rows with
    ``n >= min_keys``.

    Source: not in the paper; it separates the causes of a change in entropy. A shift of the scores leaves it alone.

    Reading: at most about 7 in healthy pretrained models; collapse and score growth take it past 10, a drift toward
    0 means that the head becomes uniform.

    Args:
        scores: ``(..., n)``, float. Scores; -inf is a masked key.
        temperature: Absolute temperature, or several. 1.0 for scores that are already scaled.
        mask: ``(..., n)``, bool, True = visible, or None.
        min_keys: Fewest visible keys of a row that counts.

    Returns:
        ``(...)`` or ``(..., len(temperature))``, at least 0, no unit. NaN where a row sees fewer keys than
        `min_keys` or is not finite.

    Raises:
        TypeError: If `scores` is not floating-point, `mask` is not bool or `min_keys` is not an integer.
        ValueError: If `mask` does not broadcast to `scores`, `temperature` is not positive, or `min_keys` is below 1.

    Example:
        >>> import torch
        >>> score_spread(torch.tensor([0.0, 8.0] * 4), 8.0)
        tensor(0.5000)
    """
    temperatures, single = _check_positive("temperature", temperature)
    _check_count("min_keys", min_keys, 1)
    kept, shown, count = _visible_values(scores, mask)
    centred = (kept - (kept.sum(-1) / count.clamp_min(1))[..., None]).mul_(shown)
    spread, count = _spread(centred, count.clamp_min(1))[..., None], count[..., None]
    spread = torch.where((count >= min_keys) & spread.isfinite(), spread, torch.nan)
    return _over_temperatures(spread, temperatures, single)


@torch.no_grad()
def score_max(scores: Tensor, temperature: float | Iterable[float] = 1.0, *, mask: Tensor | None = None) -> Tensor:
    r"""Find the largest scaled score of each row, in absolute value.

    ``max_j |s_j| / T``.

    Source: ``D / T`` of Corollary 1 of arXiv 2508.17821, which bounds every weight by ``exp(-2D/T)/n <= a <=
    exp(2D/T)/n``; the attention logit of the training literature.

    Reading: growth past 100 is where QK-clip acts by default in Megatron-LM and MaxText.

    Args:
        scores: ``(..., n)``, float. Scores; -inf is a masked key.
        temperature: Absolute temperature, or several. 1.0 for scores that are already scaled.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        ``(...)`` or ``(..., len(temperature))``, at least 0, no unit. NaN where a row sees no key or is not finite.

    Raises:
        TypeError: If `scores` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `scores` or `temperature` is not positive.

    Example:
        >>> import torch
        >>> score_max(torch.tensor([1.0, -16.0, 2.0]), (1.0, 8.0))
        tensor([16.,  2.])
    """
    temperatures, single = _check_positive("temperature", temperature)
    kept, _, count = _visible_values(scores, mask)
    if kept.shape[-1] == 0:
        largest = kept.new_full((*kept.shape[:-1], 1), torch.nan)
    else:
        largest = torch.maximum(kept.amax(-1, keepdim=True), -kept.amin(-1, keepdim=True)) + 0.0  # never -0
    largest = torch.where((count[..., None] > 0) & largest.isfinite(), largest, torch.nan)
    return _over_temperatures(largest, temperatures, single)


@torch.no_grad()
def first_key_weight(weights: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Read the weight of the first visible key of each row, where attention sinks form.

    ``a_j`` at the lowest index j that the row sees: behind left padding, that is the first real token.

    Source: attention sink (Xiao et al. 2023); the rows on which comparing distances fails in arXiv 2508.17821.

    Reading: near 1, a head rests on its first key and does little; many such heads are normal in trained models.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        ``(...)``: weight in ``[0, 1]``; NaN where a row sees no key or is not finite.

    Raises:
        TypeError: If `weights` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `weights`.

    Example:
        >>> import torch
        >>> first_key_weight(torch.tensor([0.9, 0.1, 0.0]))
        tensor(0.9000)
        >>> first_key_weight(torch.tensor([0.0, 0.4, 0.6]), mask=torch.tensor([False, True, True]))
        tensor(0.4000)
    """
    weights, shown, count = _visible_weights(weights, mask)
    n = weights.shape[-1]
    if n == 0:
        return weights.new_full(weights.shape[:-1], torch.nan)
    finite = weights.sum(-1).isfinite() & (count > 0)
    if shown is None:
        return torch.where(finite, weights[..., 0], torch.nan)
    ramp = torch.arange(n, 0, -1, device=weights.device, dtype=weights.dtype)
    first = (n - (shown * ramp).amax(-1, keepdim=True)).long().clamp_max(n - 1).expand(*weights.shape[:-1], 1)
    return torch.where(finite, weights.gather(-1, first).squeeze(-1), torch.nan)


def _spread(centred: Tensor, count: Tensor) -> Tensor:
    """Standard deviation of rows ``(..., n)`` less their mean, 0 where hidden, over `count` keys each: ``(...)``."""
    return _spread_of(centred.sum(-1), torch.linalg.vector_norm(centred, dim=-1), count)


def _spread_of(left: Tensor, size: Tensor, count: Tensor) -> Tensor:
    """The same from the sum of such a row and its Euclidean norm.

    The mean was rounded, which shows where large scores are nearly equal: what is left of it is taken off again.
    """
    left = left / count
    square = size / count.sqrt()
    return torch.where(left.abs() > 1e-4 * square, (square * square - left * left).clamp_min(0).sqrt(), square)


def _over_temperatures(values: Tensor, temperatures: tuple[float, ...], single: bool) -> Tensor:
    values = values / values.new_tensor(temperatures)
    return values.squeeze(-1) if single else values
