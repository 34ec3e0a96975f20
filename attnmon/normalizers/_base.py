"""What all normalisers share: rows that can't be normalised, dtypes, blocks of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnmon.metrics._base import _state_dtype
from attnmon.metrics._checks import _check_positive, _visible_scores
from attnmon.metrics._group import _block_elements
from attnmon.metrics.jacobian import _check_norm

__all__ = ["Normalizer"]

# Vectors of n numbers that a row needs at once while the norm of its Jacobian is computed.
_VECTORS = 16


def _check_number(name: str, value: float) -> float:
    """Return a positive, finite number as a float."""
    values, single = _check_positive(name, value)
    if not single:
        raise TypeError(f"Expected `{name}` to be a single number, but got {value!r}. Pass e.g. {name}=1.0.")
    return values[0]


def _at(index: Tensor, n: int) -> Tensor:
    """Where each row has its `index` (rows,), as (rows, n) bool."""
    return torch.arange(n, device=index.device) == index[:, None]


@dataclass(frozen=True)
class Normalizer(ABC):
    """A map from the scores of a row to its attention weights.

    Attributes:
        name: Short label for plots and tables, such as ``"entmax(1.5)"``.
        sums_to_one: Whether the weights of a row add up to 1. Where they don't, they have no entropy.
    """

    sums_to_one: ClassVar[bool] = True
    name: str = field(init=False, repr=False)

    def _set(self, **values: Any) -> None:
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def weights(self, scores: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Compute the weights of each row.

        Args:
            scores: ``(..., n)``, float. Raw scores; -inf is a masked key, +inf or NaN makes the row NaN.
            mask: ``(..., n)``, bool, True = visible, or None. Scores under it are ignored.

        Returns:
            ``(..., n)``, float32 for half types: weights in ``[0, 1]``, exactly 0 where a key is masked; a row that
            sees no key is all 0, a row that is not finite is NaN where it is visible. Differentiable.

        Raises:
            TypeError: If `scores` is not floating-point or `mask` is not bool.
            ValueError: If `mask` does not broadcast to `scores`.
            ModuleNotFoundError: If the normaliser needs a package that is not installed.
        """
        scores, visible = _visible_scores(scores, mask)
        good = _usable(scores, visible)
        kept = torch.zeros_like(scores)
        if bool(good.any()):
            kept[good] = self._weights(scores[good].to(_state_dtype(scores.device)), visible[good]).to(scores.dtype)
        return torch.where(visible, torch.where(good[..., None], kept, torch.nan), 0.0)

    @torch.no_grad()
    def jacobian_norm(self, scores: Tensor, *, mask: Tensor | None = None, norm: str = "spectral") -> Tensor:
        """Measure how strongly a change of the scores can move the weights of each row.

        A norm of the Jacobian of `weights` with respect to `scores`: its largest singular value (``"spectral"``), the
        root of the sum of its squared entries (``"frobenius"``), or its largest entry by magnitude (``"max"``).

        Args:
            scores: ``(..., n)``, float. Raw scores; -inf is a masked key, +inf or NaN makes the row NaN.
            mask: ``(..., n)``, bool, True = visible, or None.
            norm: ``"spectral"``, ``"frobenius"`` or ``"max"``.

        Returns:
            ``(...)``, float32 for half types: weight per unit of score, at least 0; NaN where a row sees no key or is
            not finite.

        Raises:
            TypeError: If `scores` is not floating-point or `mask` is not bool.
            ValueError: If `mask` does not broadcast to `scores` or `norm` is unknown.
            ModuleNotFoundError: If the normaliser needs a package that is not installed.
        """
        _check_norm(norm)
        scores, visible = _visible_scores(scores, mask)
        good = _usable(scores, visible)
        out = scores.new_full(good.shape, torch.nan)
        if bool(good.any()):
            wide = _state_dtype(scores.device)
            step = max(1, _block_elements(scores.device, wide) // (_VECTORS * scores.shape[-1]))
            blocks = zip(scores[good].split(step), visible[good].split(step), strict=True)
            out[good] = torch.cat([self._norm(s.to(wide), v, norm) for s, v in blocks]).to(out.dtype)
        return out

    @abstractmethod
    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Weights ``(rows, n)`` of finite scores, float64 and -inf where not `visible`; each row sees a key."""

    @abstractmethod
    def _norm(self, scores: Tensor, visible: Tensor, norm: str) -> Tensor:
        """Norms ``(rows,)`` of the Jacobian, of the same rows as `_weights`."""


def _usable(scores: Tensor, visible: Tensor) -> Tensor:
    """Which rows see a key and are finite where they are visible, (...)."""
    return (scores.isfinite() | ~visible).all(-1) & visible.any(-1)
