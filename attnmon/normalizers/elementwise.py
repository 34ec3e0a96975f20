"""The paper's general normaliser: any non-negative function of the scores, divided by its sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnmon.metrics._base import _state_dtype
from attnmon.metrics._checks import _visible_scores
from attnmon.metrics._lowrank import _low_rank_norm
from attnmon.metrics.lemmas import normalizer_jacobian_bound
from attnmon.normalizers._base import Normalizer, _at, _usable

__all__ = ["Elementwise"]


def _check_result(name: str, result: Any, scores: Tensor) -> Tensor:
    """Check that the user's function made one floating-point value of each score."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"Expected `{name}` to return a torch.Tensor, but got {type(result).__name__}. Apply torch operations to "
            "the scores it is given."
        )
    if result.shape != scores.shape:
        raise ValueError(
            f"Expected `{name}` to return one value per score, shape {tuple(scores.shape)}, but got shape "
            f"{tuple(result.shape)}. Let it act on each score by itself, without reducing or reshaping."
        )
    if not result.is_floating_point():
        raise TypeError(
            f"Expected `{name}` to return a floating-point tensor, but got {result.dtype}. Convert its result with "
            "`.to(scores.dtype)`."
        )
    return result.to(scores.dtype)


def _total(values: Tensor) -> Tensor:
    """Sums of rows, (rows, 1), NaN where they can't be divided by."""
    total = values.sum(-1, keepdim=True)
    return torch.where(total.isfinite() & (total > 0), total, torch.nan)


@dataclass(frozen=True, init=False)
class Elementwise(Normalizer):
    r"""A non-negative function of each score, divided by its sum over the visible keys.

    ``a_i = F(s_i) / S`` with ``S = sum_j F(s_j)``; the Jacobian is ``(diag(F') - a F'^T) / S``.

    Source: section 2.1 and Lemma 2 of arXiv 2508.17821.

    Reading: what a normaliser of your own does to the weights, beside softmax (``F = exp``), and whether its Jacobian
    stays within the bound of Lemma 2.

    F is called on the scores of some rows, ``(rows, n)`` float64, where masked keys repeat the row's largest visible
    score. It must treat each score by itself. A row where F is zero everywhere, or not finite, is NaN. Nothing is
    shifted: F should not overflow (``exp`` does above 709).

    Args:
        function: F, from a tensor to a tensor of the same shape; values at least 0.
        derivative: F', likewise; None takes it by autograd.
        name: Label; None takes the function's own name.

    Raises:
        TypeError: If `function` or `derivative` is not callable or `name` not a string; when used, if they return
            anything but a floating-point tensor.
        ValueError: When used, if they return another shape or F a negative value, or if `derivative` is None and
            autograd finds none.

    Example:
        >>> import torch
        >>> normalizer = Elementwise(torch.nn.functional.softplus)
        >>> normalizer.name
        'softplus'
        >>> normalizer.weights(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])
        >>> square = Elementwise(lambda s: s.relu() ** 2, name="relu2")
        >>> scores = torch.tensor([1.0, 1.0])
        >>> square.jacobian_norm(scores), square.lemma2_bound(scores)
        (tensor(1.), tensor(2.))
    """

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor] | None
    name: str = field()

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        derivative: Callable[[Tensor], Tensor] | None = None,
        name: str | None = None,
    ) -> None:
        for label, value in (("function", function), ("derivative", derivative)):
            if not callable(value) and (value is not None or label == "function"):
                raise TypeError(
                    f"Expected `{label}` to be callable, from a tensor of scores to one of the same shape, but got "
                    f"{value!r} of type {type(value).__name__}. Pass e.g. torch.exp."
                )
        if name is None:
            name = getattr(function, "__name__", type(function).__name__)
            name = "elementwise" if name == "<lambda>" else name
        if not isinstance(name, str):
            raise TypeError(
                f"Expected `name` to be a string, but got {name!r} of type {type(name).__name__}. Pass e.g. name='exp'."
            )
        self._set(function=function, derivative=derivative, name=name)

    def _values(self, scores: Tensor, visible: Tensor, *, slopes: bool = False) -> tuple[Tensor, Tensor]:
        """F and, if asked for, F' at each key, 0 where it is not visible."""
        x = torch.where(visible, scores, scores.detach().amax(-1, keepdim=True))
        by_autograd = slopes and self.derivative is None
        # A tensor made in inference mode takes no part in autograd
        inference = torch.is_inference_mode_enabled() and not by_autograd
        with torch.inference_mode(inference), torch.set_grad_enabled(torch.is_grad_enabled() or by_autograd):
            if slopes:
                x = x.detach().clone().requires_grad_(by_autograd)
            values = _check_result("function", self.function(x), x)
            slope = torch.zeros_like(x)
            if by_autograd:
                found = torch.autograd.grad(values.sum(), x, allow_unused=True)[0] if values.requires_grad else None
                if found is None:
                    raise ValueError(
                        "Expected `function` to be differentiable by autograd, but its result does not depend on the "
                        "scores by differentiable operations. Pass `derivative`, a function that returns F' at each "
                        "score."
                    )
                slope = found
        if slopes and self.derivative is not None:
            slope = _check_result("derivative", self.derivative(x), x)
        negative = visible & (values < 0)
        if bool(negative.any()):
            where = values.detach().masked_fill(~negative, 0.0).argmin()
            raise ValueError(
                f"Expected `function` to return values of at least 0, but got {values.flatten()[where].item():g} at "
                f"score {x.flatten()[where].item():g}. Take e.g. its `exp()` or `clamp_min(0)`."
            )
        return torch.where(visible, values, 0.0), torch.where(visible, slope.detach(), 0.0)

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        values, _ = self._values(scores, visible)
        return values / _total(values)

    def _norm(self, scores: Tensor, visible: Tensor, norm: str) -> Tensor:
        values, slope = self._values(scores, visible, slopes=True)
        total = _total(values)
        a, f = values / total, slope / total
        # The row of the largest weight is kept as a row of its own: taken from diag(f) - a f^T it would lose all its
        # digits where that weight is close to 1. All others are at most 1/2.
        top = _at(a.argmax(-1), a.shape[-1])
        others = (a * ~top).sum(-1, keepdim=True)
        row = torch.where(top, f * others, -(a * top).sum(-1, keepdim=True) * f)
        a, d = a * ~top, f * ~top
        diagonal = d * (1 - a)
        if norm == "max":  # |J_kk| = |f_k| sum_{i != k} a_i is no less than any |J_ik| = |f_k| a_i
            return torch.where(top, row, diagonal).abs().amax(-1)
        off = a**2 * ((f**2).sum(-1, keepdim=True) - f**2)
        value = (diagonal**2 + off + row**2).sum(-1).sqrt()
        if norm == "frobenius":
            return value
        left, right = torch.stack([-a, top.to(a.dtype)], 1), torch.stack([f, row], 1)
        return _low_rank_norm(d, left, right, value)

    @torch.no_grad()
    def lemma2_bound(self, scores: Tensor, *, mask: Tensor | None = None) -> Tensor:
        r"""Bound the spectral norm of the Jacobian by Lemma 2.

        ``||J||_2 <= (max_j |F'_j| + ||a|| ||F'||) / S``.

        Source: Lemma 2 of arXiv 2508.17821.

        Args:
            scores: ``(..., n)``, float. Raw scores; -inf is a masked key, +inf or NaN makes the row NaN.
            mask: ``(..., n)``, bool, True = visible, or None.

        Returns:
            ``(...)``, float32 for half types: weight per unit of score, at least ``jacobian_norm``; NaN where a row
            sees no key, is not finite, or F is zero everywhere.

        Raises:
            TypeError: If `scores` is not floating-point, `mask` is not bool, or F returns no floating-point tensor.
            ValueError: If `mask` does not broadcast to `scores`, or F returns another shape or a negative value.
        """
        scores, visible = _visible_scores(scores, mask)
        good = _usable(scores, visible)
        out = scores.new_full(good.shape, torch.nan)
        if bool(good.any()):
            seen = visible[good]
            values, slope = self._values(scores[good].to(_state_dtype(scores.device)), seen, slopes=True)
            total = _total(values)
            out[good] = normalizer_jacobian_bound(values / total, slope, total[:, 0], mask=seen).to(out.dtype)
        return out
