"""Entropy of a row of attention weights, and the counts of attended keys derived from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnmon.metrics._base import _HeadMean
from attnmon.metrics._checks import _check_count, _check_flag, _visible_weights

__all__ = [
    "AttentionEntropy",
    "active_share",
    "attention_entropy",
    "effective_keys",
    "entropy_statistics",
    "participation_ratio",
]

ENTROPY_STATISTICS = ("entropy", "entropy_normalized", "effective_keys", "active_share")
"""What follows from the entropy of a row and the number of its visible keys."""

MIN_KEYS = 64
"""Fewest visible keys of a row whose active share counts."""


def _entropy_rows(weights: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Entropy in nats and the number of visible keys per row; NaN where a row is not finite or sees nothing."""
    weights, _, count = _visible_weights(weights, mask)
    # log(clamp) rather than xlogy: the same numbers, but its gradient at 0 is finite.
    logs = weights.clamp_min(torch.finfo(weights.dtype).tiny)
    terms = weights * logs.log() if weights.requires_grad else logs.log_().mul_(weights)
    entropy = 0.0 - terms.sum(-1)  # 0 - x: a one-hot row gives 0, not -0
    return torch.where((count > 0) & entropy.isfinite(), entropy, torch.nan), count


def _normalized(entropy: Tensor, count: Tensor) -> Tensor:
    return torch.where(count > 1, entropy / count.clamp_min(2).log(), torch.nan)


def _share(entropy: Tensor, count: Tensor, min_keys: int) -> Tensor:
    return torch.where(count >= min_keys, entropy.exp() / count.clamp_min(1), torch.nan)


def attention_entropy(weights: Tensor, *, mask: Tensor | None = None, normalize: bool = False) -> Tensor:
    r"""Measure how evenly each row spreads its attention over the keys it sees.

    ``H = -sum_j a_j log a_j`` in nats, with ``0 log 0 = 0``; normalised, ``H / log n`` with n the number of visible
    keys of that row.

    Source: Shannon entropy of the weights ``a`` of section 2.1 of arXiv 2508.17821; its practical rules speak of it.

    Reading: rising toward ``log n`` (1 if normalised) means that a head tells its keys apart less and less; falling
    toward 0 in many heads is entropy collapse, which often precedes divergence.

    Args:
        weights: ``(..., n)``, float. Attention weights, rows summing to 1 over the visible keys.
        mask: ``(..., n)``, bool, True = visible, or None if every key is visible. Weights under it are ignored,
            never renormalised.
        normalize: Divide by ``log n``.

    Returns:
        ``(...)``: nats in ``[0, log n]``, or a share in ``[0, 1]``. float32 for half types. NaN where a row sees no
        key or is not finite, and, if normalised, where it sees one key only. Differentiable.

    Raises:
        TypeError: If `weights` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `weights`.

    Example:
        >>> import torch
        >>> attention_entropy(torch.full((4,), 0.25))
        tensor(1.3863)
        >>> attention_entropy(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), normalize=True)
        tensor([0.6309, 0.0000])
    """
    _check_flag("normalize", normalize)
    entropy, count = _entropy_rows(weights, mask)
    return _normalized(entropy, count) if normalize else entropy


def effective_keys(weights: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Count the keys that each row effectively attends to.

    ``exp(H)``, the perplexity of the row.

    Source: exponential of the entropy, as in `attention_entropy`.

    Reading: n for a uniform row, 1 for a one-hot row, m for a row spread evenly over m keys.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        ``(...)``: keys, in ``[1, n]``; NaN where a row sees no key or is not finite.

    Raises:
        TypeError: If `weights` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `weights`.

    Example:
        >>> import torch
        >>> effective_keys(torch.tensor([0.5, 0.5, 0.0, 0.0]))
        tensor(2.)
    """
    return _entropy_rows(weights, mask)[0].exp()


def active_share(weights: Tensor, *, mask: Tensor | None = None, min_keys: int = MIN_KEYS) -> Tensor:
    r"""Measure the share of its visible keys that each row effectively attends to.

    ``exp(H) / n``, for rows with ``n >= min_keys`` only: in a short row a large share says nothing.

    Source: rule 1 of the practical rules of arXiv 2508.17821, which puts the limit at about 6 % of the context.

    Reading: above about 0.06 the paper finds no separation any more.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        mask: ``(..., n)``, bool, True = visible, or None.
        min_keys: Fewest visible keys of a row that counts.

    Returns:
        ``(...)``: share in ``(0, 1]``; NaN where a row sees fewer keys than `min_keys` or is not finite.

    Raises:
        TypeError: If `weights` is not floating-point, `mask` is not bool or `min_keys` is not an integer.
        ValueError: If `mask` does not broadcast to `weights`, or `min_keys` is below 1.

    Example:
        >>> import torch
        >>> active_share(torch.full((128,), 1 / 128))
        tensor(1.)
        >>> active_share(torch.full((8,), 1 / 8))
        tensor(nan)
    """
    _check_count("min_keys", min_keys, 1)
    entropy, count = _entropy_rows(weights, mask)
    return _share(entropy, count, min_keys)


def participation_ratio(weights: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Count the attended keys by the second moment of the weights.

    ``1 / sum_j a_j^2``.

    Source: inverse participation ratio of the weights ``a`` of section 2.1 of arXiv 2508.17821.

    Reading: like `effective_keys`, but governed by the large weights alone; at most ``exp(H)``.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        ``(...)``: keys, in ``[1, n]``; NaN where a row sees no key or is not finite.

    Raises:
        TypeError: If `weights` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `weights`.

    Example:
        >>> import torch
        >>> participation_ratio(torch.tensor([0.5, 0.5, 0.0, 0.0]))
        tensor(2.)
    """
    weights, _, _ = _visible_weights(weights, mask)
    moment = (weights * weights).sum(-1)
    return torch.where(moment.isfinite() & (moment > 0), 1 / moment, torch.nan)


def entropy_statistics(weights: Tensor, *, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Compute everything that follows from the entropy in one pass, for whoever wants several.

    Args:
        weights: ``(..., n)``, float. Attention weights.
        mask: ``(..., n)``, bool, True = visible, or None.

    Returns:
        ``"entropy"``, ``"entropy_normalized"``, ``"effective_keys"`` and ``"active_share"`` to ``(...)``, as
        `attention_entropy`, `effective_keys` and `active_share` return them.

    Raises:
        TypeError: If `weights` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `weights`.
    """
    return _statistics(*_entropy_rows(weights, mask))


def _statistics(entropy: Tensor, count: Tensor) -> dict[str, Tensor]:
    """Everything named in `ENTROPY_STATISTICS`, from the entropies of rows and how many keys they see."""
    return {
        "entropy": entropy,
        "entropy_normalized": _normalized(entropy, count),
        "effective_keys": entropy.exp(),
        "active_share": _share(entropy, count, MIN_KEYS),
    }


class AttentionEntropy(_HeadMean):
    r"""Mean entropy of the rows of each head, over as many updates as wanted.

    The mean over rows of `attention_entropy`. Rows where it is undefined are left out and counted.

    Source: Shannon entropy of the weights ``a`` of section 2.1 of arXiv 2508.17821.

    Reading: see `attention_entropy`.

    Args:
        num_heads: Number of heads, dimension 1 of what `update` is given.
        normalize: Average ``H / log n`` instead of ``H``.
        kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        TypeError: If `num_heads` is not an integer or `normalize` not a bool.
        ValueError: If `num_heads` is below 1.

    Example:
        >>> import torch
        >>> metric = AttentionEntropy(num_heads=2)
        >>> metric.update(torch.full((1, 2, 3, 4), 0.25))
        >>> metric.compute()
        tensor([1.3863, 1.3863], dtype=torch.float64)
        >>> metric.rows_used
        tensor([3, 3])
    """

    def __init__(self, num_heads: int, normalize: bool = False, **kwargs: Any) -> None:
        super().__init__(num_heads, None, **kwargs)
        self.normalize = _check_flag("normalize", normalize)

    def update(self, weights: Tensor, mask: Tensor | None = None) -> None:
        """Add rows.

        Args:
            weights: ``(batch, num_heads, rows, n)``, float.
            mask: Broadcastable to `weights`, bool, True = visible, or None.
        """
        self._check_rows("weights", weights)
        with torch.no_grad():
            self._add(attention_entropy(weights.detach(), mask=mask, normalize=self.normalize)[..., None])
