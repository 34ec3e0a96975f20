"""The constants and bounds of Lemmas 1 and 2, measured row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnmon.metrics._checks import _check_floating, _visible_weights

__all__ = ["DispersionConstants", "dispersion_constants", "normalizer_jacobian_bound"]


class DispersionConstants(NamedTuple):
    """The constants of Lemma 1: ``lower / n <= a_j <= upper / n``."""

    lower: Tensor
    upper: Tensor


@torch.no_grad()
def dispersion_constants(weights: Tensor, *, mask: Tensor | None = None) -> DispersionConstants:
    r"""Measure the constants between which all weights of a row lie, relative to uniform attention.

    ``C1 = n min_j a_j`` and ``C2 = n max_j a_j``, the tightest constants with ``C1/n <= a_j <= C2/n``.

    Source: Lemma 1 and Corollary 1 of arXiv 2508.17821. For softmax ``exp(-2D/T) <= C1`` and ``C2 <= exp(2D/T)``
    with ``D = max_j |s_j|``.

    Reading: both near 1, the row is uniform. ``C2`` that stays bounded while n grows is what makes attention vanish
    in long contexts.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        ``lower`` in ``[0, 1]`` and ``upper`` in ``[1, n]``, each ``(...)``; NaN where a row sees no key or is not
        finite.

    Raises:
        TypeError: If `weights` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `weights`.

    Example:
        >>> import torch
        >>> dispersion_constants(torch.tensor([0.5, 0.25, 0.25, 0.0]))
        DispersionConstants(lower=tensor(0.), upper=tensor(2.))
    """
    weights, shown, count = _visible_weights(weights, mask)
    if weights.shape[-1] == 0:
        nothing = weights.new_full(weights.shape[:-1], torch.nan)
        return DispersionConstants(nothing, nothing.clone())
    finite = weights.sum(-1).isfinite() & (count > 0)
    low = weights if shown is None else torch.where(shown > 0, weights, torch.inf)
    high = weights if shown is None else torch.where(shown > 0, weights, -torch.inf)
    return DispersionConstants(
        torch.where(finite, count * low.amin(-1), torch.nan), torch.where(finite, count * high.amax(-1), torch.nan)
    )


@torch.no_grad()
def normalizer_jacobian_bound(
    weights: Tensor, derivative: Tensor, total: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    r"""Bound the spectral norm of the Jacobian of any normaliser ``a = F(s) / sum F(s)``.

    ``||J||_2 <= (max_j |F'_j| + ||a|| ||F'||) / S`` where ``J = (diag(F') - a F'^T) / S`` and ``S = sum_j F(s_j)``.

    Source: Lemma 2 of arXiv 2508.17821.

    Reading: how strongly a change of the scores can move the weights, at most. For softmax ``F' = F / T``, and the
    exact norm of `softmax_jacobian_norm` is smaller.

    Args:
        weights: ``(..., n)``, float. The normaliser's output ``a``.
        derivative: ``(..., n)``, float. ``F'(s_j)`` at each key.
        total: ``(...)``, float. ``S``, the sum of ``F(s_j)`` over the visible keys.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        ``(...)``, weight per unit of score, at least 0; NaN where a row sees no key or is not finite.

    Raises:
        TypeError: If a tensor is not floating-point or `mask` is not bool.
        ValueError: If `mask` or `derivative` does not broadcast to `weights`.

    Example:
        >>> import torch
        >>> exps = torch.tensor([1.0, 1.0])
        >>> normalizer_jacobian_bound(exps / 2, exps, exps.sum())
        tensor(1.)
    """
    derivative = _check_floating("derivative", derivative, "(..., n)", 1)
    total = _check_floating("total", total, "(...)", 0)
    weights, shown, count = _visible_weights(weights, mask)
    if derivative.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"Expected `derivative` to have as many keys as `weights`, {weights.shape[-1]}, but got "
            f"{derivative.shape[-1]}: shape {tuple(derivative.shape)}. Pass F' at every key."
        )
    if shown is not None:
        derivative = torch.where(shown > 0, derivative, 0.0)
    if weights.shape[-1] == 0:
        return weights.new_full(weights.shape[:-1], torch.nan)
    # divided first, and by the largest: squares of F' overflow, or vanish, long before F does
    slopes = derivative.abs() / total[..., None]
    steepest = slopes.amax(-1)
    shares = torch.where(steepest[..., None] > 0, slopes / steepest[..., None], 0.0)
    bound = steepest * (1 + torch.linalg.vector_norm(weights, dim=-1) * torch.linalg.vector_norm(shares, dim=-1))
    return torch.where((count > 0) & bound.isfinite(), bound, torch.nan)
