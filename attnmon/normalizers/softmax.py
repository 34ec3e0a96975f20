"""Softmax, and softmax whose temperature falls with the length of the row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmon.masks import masked_softmax
from attnmon.metrics._checks import _visible_scores
from attnmon.metrics.jacobian import jacobian_norms, softmax_jacobian_norm
from attnmon.normalizers._base import Normalizer, _check_number

__all__ = ["ScalableSoftmax", "Softmax"]


@dataclass(frozen=True)
class Softmax(Normalizer):
    r"""The softmax of transformer attention.

    ``a_i = exp(s_i / T) / sum_j exp(s_j / T)``, with the Jacobian ``(diag(a) - a a^T) / T``.

    Source: section 2.1 and Corollary 3 of arXiv 2508.17821.

    Reading: the Jacobian's spectral norm is at most ``1/(2T)``, which two equal weights attain.

    Args:
        temperature: Absolute temperature ``T``; ``1 / scale`` is the model's own.

    Raises:
        TypeError: If `temperature` is not a number.
        ValueError: If `temperature` is not positive and finite.

    Example:
        >>> import torch
        >>> Softmax(temperature=0.5).weights(torch.zeros(2))
        tensor([0.5000, 0.5000])
        >>> Softmax(temperature=0.5).jacobian_norm(torch.zeros(2))
        tensor(1.)
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._set(temperature=_check_number("temperature", self.temperature), name="softmax")

    def weights(self, scores: Tensor, *, mask: Tensor | None = None) -> Tensor:
        scores, visible = _visible_scores(scores, mask)
        if scores.shape[-1] == 0:
            return scores
        # Shifted before it is divided: what large scores lose to rounding would come back as an error of the weights.
        return masked_softmax((scores - scores.detach().amax(-1, keepdim=True)) / self.temperature, visible)

    def jacobian_norm(self, scores: Tensor, *, mask: Tensor | None = None, norm: str = "spectral") -> Tensor:
        return softmax_jacobian_norm(scores, self.temperature, mask=mask, norm=norm)

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return self.weights(scores, mask=visible)

    def _norm(self, scores: Tensor, visible: Tensor, norm: str) -> Tensor:
        return self.jacobian_norm(scores, mask=visible, norm=norm)


@dataclass(frozen=True)
class ScalableSoftmax(Normalizer):
    r"""Softmax whose scores grow with the logarithm of the number of keys, so that long rows do not flatten.

    ``a = softmax(z)`` with ``z = s log(n) scores / T``, n the number of visible keys of that row; the Jacobian is
    ``s log(n) / T`` times that of softmax at z. A row with one key has weight 1 and Jacobian 0.

    Source: the Discussion of arXiv 2508.17821; arXiv 2501.19399.

    Reading: the larger ``s log(n)``, the sharper the row. The spectral norm is at most ``s log(n) / (2T)``.

    Args:
        s: The factor beside ``log n``, learned per head in trained models.
        temperature: Absolute temperature ``T``.

    Raises:
        TypeError: If `s` or `temperature` is not a number.
        ValueError: If `s` or `temperature` is not positive and finite.

    Example:
        >>> import torch
        >>> normalizer = ScalableSoftmax(s=0.5)
        >>> normalizer.name
        'ssmax(s=0.5)'
        >>> normalizer.weights(torch.tensor([2.0, 0.0]))  # the odds are n^(s * 2) = 2
        tensor([0.6667, 0.3333])
        >>> normalizer.jacobian_norm(torch.zeros(2))
        tensor(0.1733)
    """

    s: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._set(s=_check_number("s", self.s), temperature=_check_number("temperature", self.temperature))
        self._set(name=f"ssmax(s={self.s:g})")

    def _scaled(self, scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.s / self.temperature * visible.sum(-1, dtype=scores.dtype).log()
        shifted = torch.where(visible, scores, 0.0) - scores.detach().amax(-1, keepdim=True)
        return shifted * factor[:, None], factor

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return masked_softmax(self._scaled(scores, visible)[0], visible)

    def _norm(self, scores: Tensor, visible: Tensor, norm: str) -> Tensor:
        z, factor = self._scaled(scores, visible)
        return factor * jacobian_norms(z, 1.0, mask=visible, norms=(norm,))[norm]
