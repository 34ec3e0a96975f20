"""Normalisers that give most keys a weight of exactly zero: sparsemax and alpha-entmax."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from attnmon.metrics.jacobian import jacobian_norms
from attnmon.normalizers._base import Normalizer, _check_number

__all__ = ["Entmax", "Sparsemax"]

# Each step halves a bracket of length below 1: the last one is below a rounding of float64.
_STEPS = 60


def _package() -> ModuleType:
    try:
        import entmax
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Sparsemax and Entmax need the package `entmax`, which is not installed. Install it with "
            "`pip install 'attnmon[entmax]'`."
        ) from error
    module: ModuleType = entmax
    return module


def _entmax_weights(scores: Tensor, alpha: float, temperature: float) -> Tensor:
    package = _package()
    z = (scores - scores.detach().amax(-1, keepdim=True)) / temperature
    # A key more than 1 / (alpha - 1) below the largest has weight 0. Masked keys become such ones, which keeps -inf,
    # its square and their difference out of the package's sums.
    z = z.clamp_min(-2 / (alpha - 1))
    weights: Tensor
    if alpha == 2:
        weights = package.sparsemax(z, dim=-1)
    elif alpha == 1.5:
        weights = package.entmax15(z, dim=-1)
    else:
        weights = package.entmax_bisect(z, alpha, dim=-1, n_iter=_STEPS)
    return weights


def _entmax_norm(scores: Tensor, alpha: float, temperature: float, norm: str) -> Tensor:
    """Norm of ``(diag(u) - u u^T / sum u) / T``, which is ``sum u / T`` times the softmax Jacobian at ``log u``."""
    weights = _entmax_weights(scores, alpha, temperature)
    support = weights > 0
    logs = torch.where(support, (2 - alpha) * torch.where(support, weights, 1.0).log(), -torch.inf)
    return logs.exp().sum(-1) / temperature * jacobian_norms(logs, 1.0, norms=(norm,))[norm]


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    r"""The projection of the scores onto the simplex: weights that fall off linearly and reach zero.

    ``a_i = max(s_i / T - tau, 0)`` with tau such that they add up to 1; the Jacobian is
    ``(diag(u) - u u^T / sum u) / T`` with ``u_i = 1`` on the support and 0 off it.

    Source: the Discussion of arXiv 2508.17821; arXiv 1602.02068.

    Reading: the Jacobian's spectral norm is ``1/T``, twice the most that softmax can reach, wherever two keys or more
    have weight, and 0 where a single one has it all.

    Args:
        temperature: Absolute temperature ``T``.

    Raises:
        TypeError: If `temperature` is not a number.
        ValueError: If `temperature` is not positive and finite.

    Example:
        >>> import torch
        >>> scores = torch.tensor([1.0, 0.5, -1.0])
        >>> Sparsemax().weights(scores)
        tensor([0.7500, 0.2500, 0.0000])
        >>> Sparsemax().jacobian_norm(scores)
        tensor(1.)
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._set(temperature=_check_number("temperature", self.temperature), name="sparsemax")

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return _entmax_weights(scores, 2.0, self.temperature)

    def _norm(self, scores: Tensor, visible: Tensor, norm: str) -> Tensor:
        return _entmax_norm(scores, 2.0, self.temperature, norm)


@dataclass(frozen=True)
class Entmax(Normalizer):
    r"""The family between softmax (alpha toward 1) and sparsemax (alpha = 2), and beyond.

    ``a_i = max((alpha - 1) s_i / T - tau, 0)^(1 / (alpha - 1))`` with tau such that they add up to 1; the Jacobian is
    ``(diag(u) - u u^T / sum u) / T`` with ``u_i = a_i^(2 - alpha)`` on the support and 0 off it.

    Source: the Discussion of arXiv 2508.17821; arXiv 1905.05702.

    Reading: the larger alpha, the fewer keys have weight. Above 2, keys that are just about to lose theirs have a
    Jacobian without bound.

    Args:
        alpha: Above 1. 1.5 and 2 are computed by sorting, others by bisection.
        temperature: Absolute temperature ``T``.

    Raises:
        TypeError: If `alpha` or `temperature` is not a number.
        ValueError: If `alpha` is not above 1, or `temperature` not positive, or either not finite.

    Example:
        >>> import torch
        >>> normalizer = Entmax(alpha=1.5)
        >>> normalizer.name
        'entmax(1.5)'
        >>> normalizer.weights(torch.tensor([1.0, 1.0, -1.0]))
        tensor([0.5000, 0.5000, 0.0000])
        >>> normalizer.jacobian_norm(torch.tensor([1.0, 1.0, -1.0]))
        tensor(0.7071)
    """

    alpha: float = 1.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._set(alpha=_check_number("alpha", self.alpha))
        if self.alpha <= 1:
            raise ValueError(
                f"Expected `alpha` to be above 1, but got {self.alpha}. Pass e.g. alpha=1.5; alpha = 1 is Softmax."
            )
        self._set(temperature=_check_number("temperature", self.temperature), name=f"entmax({self.alpha:g})")

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return _entmax_weights(scores, self.alpha, self.temperature)

    def _norm(self, scores: Tensor, visible: Tensor, norm: str) -> Tensor:
        return _entmax_norm(scores, self.alpha, self.temperature, norm)
