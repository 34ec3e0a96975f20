"""The largest singular value of a diagonal plus a low-rank matrix, without forming it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__: list[str] = []

# Each step halves a bracket. Its ends first differ by a factor sqrt(n), after the coarse steps by less than `_MARGIN`
# (for n up to 10^6), within which the fine steps find the place again.
_COARSE, _FINE = 30, 22
_MARGIN = 1e-6


@torch.no_grad()
def _low_rank_norm(diagonal: Tensor, left: Tensor, right: Tensor, frobenius: Tensor) -> Tensor:
    r"""Find the largest singular value of ``J = diag(d) + U V^T`` for many rows at once, in O(n) per row and step.

    The singular values of J are the positive eigenvalues of ``[[0, J], [J^T, 0]]``. By Haynsworth's inertia additivity
    the number of them above x is ``#{|d_i| > x} + neg(K) - r``, where neg counts negative eigenvalues and
    ``K = [[0, I], [I, 0]] - sum_i p_i p_i^T / (x - |d_i|) - sum_i q_i q_i^T / (x + |d_i|)``, with
    ``p_i, q_i = (u_i, +-sign(d_i) v_i) / sqrt 2`` from the rows of U and V. x is bisected.

    K is as large as ``1 / (x - |d_i|)``: its rounding errors hide a solution nearer than 1e-8 to some ``|d_i|``, where
    tied keys put it. There the first sum is kept in factors, R from a QR decomposition, and the eigenvalues counted are
    those of ``[[I, R], [R^T, K']]``, which is as large as the root of that.

    Args:
        diagonal: ``(rows, n)``, float64, d. J should not be much smaller than its terms: cancellation costs digits.
        left: ``(rows, r, n)``, float64, the columns of U.
        right: ``(rows, r, n)``, float64, the columns of V.
        frobenius: ``(rows,)``, float64, the Frobenius norm of J, between which and its ``1/sqrt(n)`` the result lies.

    Returns:
        ``(rows,)``; `frobenius` itself where that is 0 or not finite.

    Example:
        >>> import torch
        >>> ones = torch.ones(1, 1, 3, dtype=torch.float64)  # the identity plus a matrix of ones
        >>> _low_rank_norm(ones[0], ones, ones, torch.full((1,), 18**0.5, dtype=torch.float64))
        tensor([4.0000], dtype=torch.float64)
    """
    usable = frobenius.isfinite() & (frobenius > 0)
    unit = torch.where(usable, frobenius, 1.0)[:, None]
    d = torch.where(usable[:, None], diagonal / unit, 0.0)
    u = torch.where(usable[:, None, None], left / unit[..., None], 0.0)
    v = torch.where(usable[:, None, None], right, 0.0)
    # U and V are given the same scale, column by column, which is what the eigenvalues of K are best computed at
    sizes = torch.linalg.vector_norm(torch.stack([u, v]), dim=-1, keepdim=True)
    ratio = torch.where((sizes > 0).all(0), (sizes[1] / sizes[0]).sqrt(), 0.0)
    u, v = u * ratio, torch.where(ratio > 0, v / ratio, 0.0)
    sign = torch.where(d < 0, -1.0, 1.0)[:, None]
    poles = d.abs()
    near, far = (torch.cat([u, side * sign * v], 1) / math.sqrt(2) for side in (1, -1))
    high = torch.ones_like(frobenius) * (1 + 4 * torch.finfo(d.dtype).eps)
    low = high / math.sqrt(max(d.shape[-1], 1)) * (1 - 8 * torch.finfo(d.dtype).eps)
    for step in range(_COARSE + _FINE):
        if step == _COARSE:
            low, high = low * (1 - _MARGIN), high * (1 + _MARGIN)
        x = (low + high) / 2
        above = _count(x[:, None], poles, near, far, step >= _COARSE) > 0
        low, high = torch.where(above, x, low), torch.where(above, high, x)
    return torch.where(usable, high * unit[:, 0], frobenius)


def _count(x: Tensor, poles: Tensor, near: Tensor, far: Tensor, fine: bool) -> Tensor:
    """How many singular values of each row lie above `x` (rows, 1)."""
    gap = x - poles
    gap = torch.where(gap == 0, torch.finfo(x.dtype).eps * x, gap)
    size = near.shape[1]
    rank = size // 2
    swap = torch.eye(size, dtype=x.dtype, device=x.device).roll(rank, 0)
    inner = swap - (far * (1 / (x + poles))[:, None]) @ far.mT
    offset = (gap < 0).sum(-1) - rank
    if not fine:
        return offset + _negative(inner - (near * (1 / gap)[:, None]) @ near.mT)
    scale = gap.abs().rsqrt()
    for side in (1.0, -1.0):
        chosen = gap * side > 0
        if not bool(chosen.any()):
            continue
        factor = torch.linalg.qr((near * (scale * chosen)[:, None]).mT, mode="r").R
        corner = side * torch.eye(factor.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
        border = torch.cat([factor, factor.new_zeros(*factor.shape[:2], inner.shape[-1] - size)], -1)
        inner = torch.cat([torch.cat([inner, border.mT], -1), torch.cat([border, corner], -1)], 1)
        offset = offset - (factor.shape[1] if side < 0 else 0)
    return offset + _negative(inner)


def _negative(matrix: Tensor) -> Tensor:
    eigenvalues: Tensor = torch.linalg.eigvalsh(matrix)
    return (eigenvalues < 0).sum(-1)
