"""What every metric asks of its arguments, and the error texts that say so."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnmon.masks import broadcast_shape, distinct, hide

__all__: list[str] = []

_HALF = (torch.float16, torch.bfloat16)


def _check_floating(name: str, tensor: Tensor, dims: str, least: int) -> Tensor:
    """Return a floating-point `tensor` (half types as float32) that has at least `least` dimensions."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"Expected `{name}` to be a torch.Tensor {dims}, but got {type(tensor).__name__}. Convert it with "
            "torch.as_tensor."
        )
    if not tensor.is_floating_point():
        raise TypeError(
            f"Expected `{name}` to be a floating-point tensor (float16, bfloat16, float32 or float64), but got "
            f"{tensor.dtype}. Convert it with `{name}.float()`."
        )
    if tensor.dim() < least:
        raise ValueError(
            f"Expected `{name}` to have at least {least} dimension{'s' if least > 1 else ''} {dims}, but got "
            f"{tensor.dim()}: shape {tuple(tensor.shape)}. Add the missing dimensions with `unsqueeze`."
        )
    return tensor.float() if tensor.dtype in _HALF or tensor.element_size() < 4 else tensor


def _check_mask(mask: Tensor | None, tensor: Tensor, name: str) -> Tensor | None:
    """Check that `mask` is bool (True = visible) and broadcasts with `tensor` to the same number of keys."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"Expected `mask` to be a bool tensor, True where the key is visible, but got {came}. "
            "Convert it, e.g. `mask != 0` for ones and zeros, `mask == 0` for an additive mask."
        )
    try:
        shape = broadcast_shape(mask.shape, tensor.shape)
    except RuntimeError:
        shape = torch.Size((-1,))
    if mask.dim() < 1 or shape[-1] != tensor.shape[-1]:
        raise ValueError(
            f"Expected `mask` to be broadcastable to the shape of `{name}`, {tuple(tensor.shape)}, but got shape "
            f"{tuple(mask.shape)}. The last dimension is the key, the one before it the row."
        )
    return mask.expand(*mask.shape[:-1], tensor.shape[-1])


def _check_top_n(top_n: int | Iterable[int], n: int | None = None) -> tuple[tuple[int, ...], bool]:
    """Return `top_n` as a tuple, and whether it was a single number; `n` is the number of keys, if known."""
    single = not _is_sequence(top_n)
    values: list[int] = []
    for item in [top_n] if single else top_n:  # type: ignore[union-attr]
        if isinstance(item, bool):
            raise TypeError(f"Expected `top_n` to hold integers, but got {item!r}. Pass e.g. top_n=(5, 10).")
        try:
            values.append(operator.index(item))  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(
                f"Expected `top_n` to hold integers, but got {item!r} of type {type(item).__name__}. "
                "Pass e.g. top_n=(5, 10)."
            ) from None
    if not values:
        raise ValueError("Expected `top_n` to hold at least one integer, but got none. Pass e.g. top_n=(5, 10).")
    if min(values) < 1:
        raise ValueError(f"Expected `top_n` to be at least 1, but got {min(values)}. Pass e.g. top_n=(5, 10).")
    if n is not None and max(values) >= n:
        raise ValueError(
            f"Expected `top_n` to be below the number of keys, {n}, so that a key is left unselected, but got "
            f"{max(values)}. Pass smaller values of `top_n`, or rows over more keys."
        )
    return tuple(values), single


def _check_positive(name: str, value: float | Iterable[float]) -> tuple[tuple[float, ...], bool]:
    """Return a positive, finite number or sequence of them as a tuple, and whether it was a single number."""
    single = not _is_sequence(value)
    values: list[float] = []
    for item in [value] if single else value:  # type: ignore[union-attr]
        try:
            if isinstance(item, (bool, str)):
                raise TypeError
            number = float(item)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise TypeError(
                f"Expected `{name}` to hold numbers, but got {item!r} of type {type(item).__name__}. "
                f"Pass e.g. {name}=(0.5, 1.0)."
            ) from None
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"Expected `{name}` to be positive and finite, but got {number}. Pass e.g. {name}=1.0.")
        values.append(number)
    if not values:
        raise ValueError(f"Expected `{name}` to hold at least one number, but got none. Pass e.g. {name}=(0.5, 1.0).")
    return tuple(values), single


def _check_count(name: str, value: int, least: int) -> int:
    """Check that a plain integer argument is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected `{name}` to be an integer, but got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")
    return value


def _check_flag(name: str, value: bool) -> bool:
    """Check a yes-or-no argument."""
    if not isinstance(value, bool):
        raise TypeError(f"Expected `{name}` to be True or False, but got {value!r} of type {type(value).__name__}.")
    return value


def _is_sequence(value: Any) -> bool:
    if isinstance(value, Tensor) or hasattr(value, "ndim"):
        return bool(value.ndim > 0)
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))


def _zeroed(values: Tensor, mask: Tensor, shown: Tensor) -> Tensor:
    """`values` with 0 where `mask` is False; `shown` is the mask as 0.0 and 1.0."""
    if values.device.type == "cpu":  # a product is ten times faster there than a choice, but 0 * nan is nan
        product = values * shown
        if bool(product.detach().sum().isfinite()):
            return product
    return torch.where(mask, values, 0.0)


def _hidden_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with -inf where a key is not visible."""
    scores = _check_floating("scores", scores, "(..., n)", 1)
    mask = _check_mask(mask, scores, "scores")
    return scores if mask is None else hide(scores, mask)


def _visible_weights(weights: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weights with 0 under the mask, the mask as 0.0 and 1.0 that broadcasts (or None), and the visible keys per row.

    The count has the dtype of the weights, so that what is divided by it stays there.
    """
    weights = _check_floating("weights", weights, "(..., n)", 1)
    mask = _check_mask(mask, weights, "weights")
    if mask is None:
        count = torch.full(weights.shape[:-1], float(weights.shape[-1]), dtype=weights.dtype, device=weights.device)
        return weights, None, count
    shape = broadcast_shape(weights.shape, mask.shape)
    mask = distinct(mask)
    shown = mask.to(weights.dtype)
    weights = _zeroed(weights, mask, shown).expand(shape)
    return weights, shown, shown.sum(-1).expand(weights.shape[:-1])


def _visible_scores(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores with -inf where a key is not visible, and which keys are: True under the mask and above -inf.

    A row with +inf or NaN at a visible key is non-finite; what that makes NaN is up to the caller.
    """
    scores = _check_floating("scores", scores, "(..., n)", 1)
    mask = _check_mask(mask, scores, "scores")
    visible = scores != -math.inf  # True for NaN
    if mask is not None:
        visible = visible & mask
        scores = torch.where(visible, scores, -math.inf)
    return scores, visible


def _visible_values(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with 0 where a key is not visible, which keys are, as 0.0 and 1.0 that broadcast, and their number."""
    scores = _check_floating("scores", scores, "(..., n)", 1)
    mask = _check_mask(mask, scores, "scores")
    shape = scores.shape if mask is None else broadcast_shape(scores.shape, mask.shape)
    mask = None if mask is None else distinct(mask)
    if scores.device.type == "cpu" and bool(scores.sum().isfinite()):  # none is -inf: the mask alone hides keys
        shown = scores.new_ones(shape[-1]) if mask is None else mask.to(scores.dtype)
        kept = scores if mask is None else scores * shown
    else:
        visible = scores != -math.inf if mask is None else (scores != -math.inf) & mask
        shown = visible.to(scores.dtype)
        lowest = torch.finfo(scores.dtype).min  # times 0 is 0, where -inf would be NaN
        kept = _zeroed(scores.clamp_min(lowest), visible, shown)
    return kept.expand(shape), shown, shown.sum(-1).expand(shape[:-1])
