"""How strongly the scores move the weights: exact norms of the softmax Jacobian."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnmon.metrics._base import _HeadMean
from attnmon.metrics._checks import _check_positive, _hidden_scores
from attnmon.metrics._group import _block_elements
from attnmon.metrics._selection import _top_candidates
from attnmon.scratch import Scratch

__all__ = ["SoftmaxJacobianNorm", "jacobian_norms", "softmax_jacobian_norm"]

_NORMS = ("spectral", "frobenius", "max")
# The largest few keys of a row enter the first estimate of the spectral norm one by one, the rest as one lump.
LEADERS = 8
# Newton's method below converges quadratically from a start that the leaders make good
_ITERATIONS = {torch.float32: 2, torch.float64: 4}


def _check_norm(norm: str) -> str:
    if norm not in _NORMS:
        raise ValueError(f"Expected `norm` to be one of 'spectral', 'frobenius', 'max', but got {norm!r}.")
    return norm


def _secular_step(total: Tensor, slope: Tensor, root: Tensor, second: Tensor) -> Tensor:
    """One step for ``g(x) = 1 / (1 - second x)`` from ``g = sum p / (x - p)`` and ``-g'`` at `root`.

    The step solves the equation with ``g`` replaced by the single pole ``weight / (x - pole)`` that has its value and
    slope at `root`. It is Newton's method on ``1 / g``, which is concave: it never oversteps the solution, and from
    below it climbs to it.
    """
    shift = total / slope
    weight = total * shift
    root = (weight + root - shift) / (1 + weight * second)
    return root.clamp_(min=1 + 4 * torch.finfo(root.dtype).eps)


def _settled(step: Tensor, bend: Tensor, root: Tensor) -> Tensor:
    """Where another step of Newton's method would change nothing.

    The error that is left after a step from an error `step` is ``|h'' / (2 h')| * step^2`` with ``h = 1 / g``. `bend`
    is a bound of the first factor, in practice ten times too large.
    """
    return bend * step * step <= 4 * torch.finfo(step.dtype).eps * root


def _spectral(
    rest: Sequence[Tensor], leaders: Tensor, first: Tensor, square: Tensor, second: Tensor, scratch: Scratch
) -> Tensor:
    r"""Largest eigenvalue of ``diag(a) - a a^T``, times Z, divided by the second largest weight's share p.

    With ``a = (1, second * rest) / Z`` and ``sum a = 1``, the secular equation ``1 = sum a_i^2 / (a_i - x)`` is the
    same as ``0 = sum a_i / (a_i - x)``, in which nothing cancels: ``sum_i rest_i / (x - rest_i) = 1 / (1 - second x)``
    in units of the second largest weight. Its solution lies in ``(1, 1 / second)``. `rest` are blocks of rows,
    (T, rows, n) each, the others (T, rows of all blocks) and `leaders` (T, rows of all blocks, leaders): the steps over
    the leaders are made for all rows and temperatures at once.
    """
    eps = torch.finfo(first.dtype).eps
    iterations = _ITERATIONS[first.dtype]
    # The keys that are not leaders, as one key of their mean weight with their total: below the true g (Jensen).
    lump = (first - leaders.sum(-1)).clamp_min(0)
    lump_square = (square - (leaders * leaders).sum(-1)).clamp_min(0)
    centre = (lump_square / lump.clamp_min(torch.finfo(first.dtype).tiny)).minimum(leaders[..., -1])
    poles = torch.cat([leaders, centre[..., None]], -1)
    masses = torch.cat([leaders, lump[..., None]], -1)
    root = ((first + square / first) / (1 + first * second)).clamp_(min=1 + 4 * eps)
    last = root
    for _ in range(iterations + 1):
        last = root
        away = root[..., None] - poles
        terms = masses / away
        root = _secular_step(terms.sum(-1), terms.div_(away).sum(-1), root, second)
    # The lump has the sum and the sum of squares of its keys, so that its part of g is right but for the square of
    # the largest of them over the root: where that is lost in rounding, the other keys need not be looked at. With
    # ``|h'' / h'| <= 2 / (x - 1)`` the last step says how far the root itself is settled.
    settled = _settled(root - last, 1 / (last - 1), root)
    active = ~(settled & (leaders[..., -1] <= math.sqrt(eps) / 2 * root))
    total, square = torch.ones_like(root), torch.ones_like(root)
    for _ in range(iterations):
        if not _sum_terms(rest, root, active.clone(), total, square, scratch):
            break
        new, bend = _full_step(root, total, square, leaders, second)
        settled = _settled(new - root, bend, new)
        root = torch.where(active, new, root)
        active = active & ~settled
    return root


def _sum_terms(
    rest: Sequence[Tensor], root: Tensor, active: Tensor, total: Tensor, square: Tensor, scratch: Scratch
) -> bool:
    """Sum and sum of squares over all keys of ``t = p / (x - p)`` for the `active` rows; False if there is none.

    Those of other rows may be left as they were. Overwrites `active`. Of many rows one temperature after the other is
    taken, which stays in the cache; few are picked out of all together.
    """
    sizes = [block.shape[1] for block in rest]
    parts = zip(rest, *(tensor.split(sizes, 1) for tensor in (root, active, total, square)), strict=True)
    any_active = False
    for block, x, wanted, sums, squares in parts:
        rows = block.shape[1]
        # Finding the rows would make the host wait for another device.
        counts = wanted.sum(-1).tolist() if block.device.type == "cpu" else [rows] * len(block)
        any_active |= any(counts)
        columns = zip(counts, block.unbind(), x[..., None].unbind(), sums.unbind(), squares.unbind(), strict=True)
        few = False
        for column, (count, part, root_of, sum_of, square_of) in enumerate(columns):
            if 2 * count > rows:  # to pick them would cost more than to go on with all
                terms = torch.sub(root_of, part, out=scratch.take("terms", *part.shape, like=part))
                torch.div(part, terms, out=terms)
                torch.sum(terms, -1, out=sum_of)
                torch.linalg.vector_norm(terms, dim=-1, out=square_of).square_()
                wanted[column] = False  # done
            few |= 0 < 2 * count <= rows
        if few:
            index = tuple(wanted.nonzero().unbind(-1))
            part = block[index]
            terms = torch.sub(x[index][:, None], part)
            torch.div(part, terms, out=terms)
            sums[index] = terms.sum(-1)
            squares[index] = torch.linalg.vector_norm(terms, dim=-1).square_()
    return any_active


def _full_step(root: Tensor, total: Tensor, square: Tensor, leaders: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A step over all keys, of which `_sum_terms` made the sums, and a bound of the bend of ``1 / g`` at `root`."""
    # -g' = sum p / (x - p)^2 = (sum t + sum t^2) / x for t = p / (x - p), and g'' / 2 = sum p / (x - p)^3 likewise
    slope = (total + square) / root
    # Of sum t^3 the leaders are known; no other key has a larger t than the last of them.
    known = leaders / (root[..., None] - leaders)
    known_square = known * known
    cube = (known_square * known).sum(-1) + known[..., -1] * (square - known_square.sum(-1)).clamp_min(0)
    curvature = (total + 2 * square + cube) / (root * root)
    return _secular_step(total, slope, root, second), (curvature / slope - slope / total).clamp_min(0)


class _Jacobian:
    """Norms of rows that come in blocks; what is one number per row is computed for the rows of all blocks at once.

    Args:
        temperatures: Absolute, or relative to that of the scores.
        norms: Which.
        scratch: Memory for what is kept of the blocks until `finish`, which is what the softmax would be at each
            temperature.
    """

    def __init__(self, temperatures: tuple[float, ...], norms: Iterable[str], scratch: Scratch) -> None:
        self._temperatures, self._norms, self._scratch = temperatures, tuple(norms), scratch
        self._rest: list[Tensor] = []
        self._top: list[Tensor] = []
        self._sums: list[tuple[Tensor, ...]] = []

    def add(self, scores: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        """Add rows, ``scores`` (rows, n) with -inf at masked keys.

        `ranked` are values and indices of the largest `LEADERS` + 1 of them, if these are known.
        """
        top, order = _top_candidates(scores, min(LEADERS + 1, scores.shape[-1])) if ranked is None else ranked
        scratch = self._scratch
        # Rows with a single key have no second score: no gap, and all that follows is 0.
        anchor = top[:, 1:2].clamp_min(torch.finfo(scores.dtype).min)
        gaps = torch.sub(scores, anchor, out=scratch.take("gaps", *scores.shape, like=scores))
        gaps.scatter_(-1, order[:, :1], -torch.inf)
        rest = scratch.take(f"rest {len(self._rest)}", len(self._temperatures), *gaps.shape, like=gaps)
        first, square = rest.new_empty(2, *rest.shape[:-1])
        columns = zip(self._temperatures, rest.unbind(), first.unbind(), square.unbind(), strict=True)
        for temperature, part, sum_of, norm_of in columns:  # one at a time stays in the cache
            torch.div(gaps, temperature, out=part).clamp_(min=_cut(gaps.dtype)).exp_()
            torch.sum(part, -1, out=sum_of)
            torch.linalg.vector_norm(part, dim=-1, out=norm_of)
        sums = [first, square]
        if "frobenius" in self._norms:
            sums.append((rest * rest).mul_(rest).sum(-1))
        self._rest.append(rest)
        missing = LEADERS + 1 - top.shape[-1]  # a key that is not there is one that is not seen
        self._top.append(torch.nn.functional.pad(top, (0, missing), value=-torch.inf) if missing else top)
        self._sums.append(tuple(sums))

    def finish(self) -> dict[str, Tensor]:
        """Name to (T, rows of all blocks)."""
        top = _joined(self._top, 0)
        first, square, *cube = (_joined(parts, 1) for parts in zip(*self._sums, strict=True))
        square = square.square()
        leaders = top - top[:, 1:2].clamp_min(torch.finfo(top.dtype).min)  # s_(1) - s_(2), 0, ...
        scale = _scale(self._temperatures, top.dtype, top.device)
        second = (-leaders[:, 0] / scale).exp_()  # the second largest weight over the largest
        z = 1 + second * first
        out: dict[str, Tensor] = {}
        for norm in self._norms:
            if norm == "spectral":
                lead = (leaders[:, 1:] / scale[..., None]).clamp_(min=_cut(top.dtype)).exp_()
                value = second * _spectral(self._rest, lead, first, square, second, self._scratch) / z
                # Clamped to the largest weight: with two equal leaders the eigenvalue is the weight itself.
                value = value.minimum(1 / z)
            elif norm == "frobenius":
                inner = first**2 + square + square * (z * z + 1 + second**2 * square) - 2 * z * second * cube[0]
                value = second * inner.clamp_min(0).sqrt() / z**2
            else:  # the largest entry is always that of the largest weight: a_2 <= 1 - a_1
                value = second * first / z**2
            value = (value / scale).masked_fill_(top[:, 1] == -torch.inf, 0.0)
            out[norm] = value.masked_fill_(~top[:, 0].isfinite(), torch.nan)  # NaN ranks first
        return out


def _cut(dtype: torch.dtype) -> float:
    """Least exponent that counts.

    Weights are taken relative to the second largest, so anything this small (masked keys too) is lost in a sum of at
    least 1; it is kept above where its cube is subnormal, which would be many times slower.
    """
    return 0.33 * math.log(torch.finfo(dtype).tiny)


@lru_cache(maxsize=64)
def _scale(temperatures: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(T, 1). A tensor made of Python numbers takes as long as a pass over a block."""
    with torch.inference_mode(False):
        return torch.tensor(temperatures, dtype=dtype, device=device)[:, None]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


@torch.no_grad()
def jacobian_norms(
    scores: Tensor,
    temperature: float | Iterable[float],
    *,
    mask: Tensor | None = None,
    norms: Iterable[str] = ("spectral",),
) -> dict[str, Tensor]:
    """Compute several norms of `softmax_jacobian_norm` from one pass over the rows.

    Args:
        scores: ``(..., n)``, float. Raw scores; -inf is a masked key.
        temperature: Absolute temperature, or several.
        mask: ``(..., n)``, bool, True = visible, or None.
        norms: Names out of ``"spectral"``, ``"frobenius"``, ``"max"``.

    Returns:
        Name to ``(...)`` or ``(..., len(temperature))``, as `softmax_jacobian_norm` returns it.

    Raises:
        TypeError: As `softmax_jacobian_norm`.
        ValueError: As `softmax_jacobian_norm`.
    """
    temperatures, single_temperature = _check_positive("temperature", temperature)
    norms = tuple(_check_norm(norm) for norm in norms)
    scores = _hidden_scores(scores, mask)
    shape, n = scores.shape[:-1], scores.shape[-1]
    flat = scores.reshape(math.prod(shape), n)
    made: dict[str, list[Tensor]] = {norm: [] for norm in norms}
    if n < 2:
        value = torch.where(flat.isfinite().any(-1), 0.0, torch.nan).to(flat.dtype).expand(len(temperatures), -1)
        made = {norm: [value] for norm in norms}
    else:
        rows = max(1, _block_elements(flat.device, flat.dtype) // ((len(temperatures) + 2) * n))
        scratch = Scratch()
        for block in flat.split(rows):
            jacobian = _Jacobian(temperatures, norms, scratch)
            jacobian.add(block)
            for norm, value in jacobian.finish().items():
                made[norm].append(value)
    lead = shape if single_temperature else (*shape, len(temperatures))
    return {norm: torch.cat(parts, -1).mT.reshape(lead) for norm, parts in made.items()}


@torch.no_grad()
def softmax_jacobian_norm(
    scores: Tensor, temperature: float | Iterable[float], *, mask: Tensor | None = None, norm: str = "spectral"
) -> Tensor:
    r"""Measure how strongly a change of the scores can move the weights of each row.

    A norm of ``J = (diag(a) - a a^T) / T`` with ``a = softmax(s / T)``: its largest eigenvalue (``"spectral"``, exact,
    from the secular equation), ``sqrt(sum_i a_i^2 ((1 - a_i)^2 + sum_{j != i} a_j^2)) / T`` (``"frobenius"``), or its
    largest entry ``max_i a_i (1 - a_i) / T`` (``"max"``). ``1 - a_i`` is taken as the sum of the other weights, so
    peaked rows lose no digits.

    Source: section 4 and Corollary 3 of arXiv 2508.17821. The printed ``1/(4T)`` bounds the largest entry; the spectral
    norm is at most ``1/(2T)``, which two equal weights attain.

    Reading: near ``1/(2T)``, small changes of query and key flip the attention; near 0, a row is saturated (one-hot)
    or uniform over many keys and passes no gradient to its scores.

    Args:
        scores: ``(..., n)``, float. Raw scores; -inf is a masked key, +inf or NaN makes the row NaN.
        temperature: Absolute temperature (``1 / scale`` is the model's own), or several.
        mask: ``(..., n)``, bool, True = visible, or None.
        norm: ``"spectral"``, ``"frobenius"`` or ``"max"``.

    Returns:
        ``(...)`` or ``(..., len(temperature))``: weight per unit of score, in ``[0, 1/(2T)]`` (spectral),
        ``[0, 1/(2T) * sqrt(n)]`` (frobenius), ``[0, 1/(4T)]`` (max). 0 for a row with one key and where it falls
        below the dtype's smallest normal number; NaN where a row sees no key or is not finite.

    Raises:
        TypeError: If `scores` is not floating-point or `mask` is not bool.
        ValueError: If `mask` does not broadcast to `scores`, `temperature` is not positive or `norm` is unknown.

    Example:
        >>> import torch
        >>> softmax_jacobian_norm(torch.zeros(2), (1.0, 0.5))
        tensor([0.5000, 1.0000])
        >>> softmax_jacobian_norm(torch.zeros(2), 1.0, norm="max")
        tensor(0.2500)
    """
    return jacobian_norms(scores, temperature, mask=mask, norms=(norm,))[norm]


class SoftmaxJacobianNorm(_HeadMean):
    r"""Mean norm of the softmax Jacobian over the rows of each head, at one or several temperatures.

    The mean over rows of `softmax_jacobian_norm`. Rows that see no key or are not finite are left out and counted.

    Source: section 4 and Corollary 3 of arXiv 2508.17821.

    Reading: see `softmax_jacobian_norm`.

    Args:
        num_heads: Number of heads, dimension 1 of what `update` is given.
        temperature: Absolute temperature, or several.
        norm: ``"spectral"``, ``"frobenius"`` or ``"max"``.
        kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        TypeError: If `num_heads` is not an integer or `temperature` not a number.
        ValueError: If `num_heads` is below 1, `temperature` is not positive or `norm` is unknown.

    Example:
        >>> import torch
        >>> metric = SoftmaxJacobianNorm(num_heads=1, temperature=(0.5, 1.0))
        >>> metric.update(torch.zeros(1, 1, 1, 2))
        >>> metric.compute()
        tensor([[1.0000, 0.5000]], dtype=torch.float64)
    """

    def __init__(
        self, num_heads: int, temperature: float | Iterable[float] = (1.0,), norm: str = "spectral", **kwargs: Any
    ) -> None:
        self_temperature, single = _check_positive("temperature", temperature)
        super().__init__(num_heads, None if single else len(self_temperature), **kwargs)
        self.temperature = self_temperature
        self.norm = _check_norm(norm)

    def update(self, scores: Tensor, mask: Tensor | None = None) -> None:
        """Add rows.

        Args:
            scores: ``(batch, num_heads, rows, n)``, float; -inf is a masked key.
            mask: Broadcastable to `scores`, bool, True = visible, or None.
        """
        self._check_rows("scores", scores)
        self._add(softmax_jacobian_norm(scores.detach(), self.temperature, mask=mask, norm=self.norm))
