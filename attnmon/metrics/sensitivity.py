"""What a random nudge of the scores does to the weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attnmon.metrics._checks import _check_floating, _check_positive, _visible_scores

__all__ = ["finite_difference_sensitivity"]


def _sensitivity_rows(
    scores: Tensor, visible: Tensor, direction: Tensor, temperatures: tuple[float, ...], epsilons: tuple[float, ...]
) -> Tensor:
    """``(..., len(temperatures), len(epsilons))`` for unit vectors `direction` (..., n), 0 at masked keys."""
    top = scores.amax(-1, keepdim=True)
    gaps = scores - top  # -inf where masked
    leading = direction.gather(-1, scores.argmax(-1, keepdim=True))
    # Softmax does not see a common shift: moving the largest weight's own nudge to 0 leaves no cancelling terms.
    relative = torch.where(visible, direction - leading, 0.0)
    highest = 0.6 * torch.finfo(scores.dtype).max ** 0.5
    limit = torch.tensor(highest, dtype=torch.float64).log().item()
    farthest = relative.amax(-1)
    columns = []
    for temperature in temperatures:
        weights = torch.softmax(gaps / temperature, -1)
        for epsilon in epsilons:
            growth = torch.mul(relative, epsilon / temperature).clamp_(max=limit).expm1_()
            shift = (weights * growth).sum(-1, keepdim=True)
            change = growth.sub_(shift).mul_(weights)
            value = torch.linalg.vector_norm(change, dim=-1) / (1 + shift.squeeze(-1))
            beyond = farthest * (epsilon / temperature) >= limit
            if scores.device.type != "cpu" or bool(beyond.any()):
                value = torch.where(beyond, _plain_change(gaps, relative, temperature, epsilon), value)
            columns.append(value / epsilon)
    return torch.stack(columns, -1).reshape(*scores.shape[:-1], len(temperatures), len(epsilons))


def _plain_change(gaps: Tensor, relative: Tensor, temperature: float, epsilon: float) -> Tensor:
    """Length of the change of the weights, as the difference of two softmaxes: for nudges whose exponential overflows.

    In float64 where the device has it: a key may be pushed as far as that and still weigh little.
    """
    wide = gaps.dtype if gaps.device.type == "mps" else torch.float64
    plain = gaps.to(wide) / temperature
    nudged = torch.softmax(plain + relative.to(wide) * (epsilon / temperature), -1)
    change: Tensor = torch.linalg.vector_norm(nudged - torch.softmax(plain, -1), dim=-1)
    return change.to(gaps.dtype)


def _check_direction(direction: Tensor, scores: Tensor) -> Tensor:
    direction = _check_floating("direction", direction, "(..., n)", 1).to(scores.dtype)
    try:
        return direction.expand(scores.shape)
    except RuntimeError:
        raise ValueError(
            f"Expected `direction` to broadcast to `scores`, {tuple(scores.shape)}, but got {tuple(direction.shape)}. "
            "Pass one number per key, or leave it out for a random direction."
        ) from None


@torch.no_grad()
def finite_difference_sensitivity(
    scores: Tensor,
    temperature: float | Iterable[float],
    epsilon: float | Iterable[float],
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    direction: Tensor | None = None,
) -> Tensor:
    r"""Measure how far a random nudge of the scores moves the weights of each row.

    ``g(T, eps) = || softmax((s + eps v) / T) - softmax(s / T) ||_2 / eps`` with ``v`` a random unit vector over the
    visible keys, one per row, the same for every temperature and epsilon.

    Source: eq. 14 and Algorithm 5 of arXiv 2508.17821, which averages it over the rows of a head and takes the
    maximum over heads.

    Reading: follows ``1/T`` for small T. It never exceeds ``min(1/(2T), sqrt(2)/eps)``; a random direction finds far
    less than the worst one, which `softmax_jacobian_norm` gives.

    Args:
        scores: ``(..., n)``, float. Raw scores; -inf is a masked key, +inf or NaN makes the row NaN.
        temperature: Absolute temperature, or several.
        epsilon: Length of the nudge, in units of the raw scores, or several.
        mask: ``(..., n)``, bool, True = visible, or None.
        generator: Source of the directions; the global generator if None.
        direction: ``(..., n)``, float, broadcastable: nudge along this instead, ``eps`` times it as it stands (of unit
            length over the visible keys for the paper's g), or None.

    Returns:
        ``(..., len(temperature), len(epsilon))``, a number dropping its own dimension: weight per unit of score, at
        least 0. 0 for a row with one key; NaN where a row sees no key or is not finite.

    Raises:
        TypeError: If `scores` or `direction` is not floating-point, or `mask` is not bool.
        ValueError: If `mask` or `direction` does not broadcast to `scores`, or `temperature` or `epsilon` is not
            positive.

    Example:
        >>> import torch
        >>> g = finite_difference_sensitivity(torch.zeros(2), (1.0, 0.1), 1e-3, generator=torch.manual_seed(0))
        >>> g.shape, bool((g <= torch.tensor([0.5, 5.0])).all())
        (torch.Size([2]), True)
    """
    temperatures, single_temperature = _check_positive("temperature", temperature)
    epsilons, single_epsilon = _check_positive("epsilon", epsilon)
    scores, visible = _visible_scores(scores, mask)
    if scores.shape[-1] == 0:
        value = scores.new_full((*scores.shape[:-1], len(temperatures), len(epsilons)), torch.nan)
    else:
        usable = (visible.any(-1) & scores.amax(-1).isfinite())[..., None]
        visible = visible & usable
        scores = torch.where(visible, scores, -torch.inf).masked_fill(~usable, 0.0)
        if direction is None:
            device = scores.device if generator is None else generator.device
            draw = torch.randn(scores.shape, generator=generator, dtype=scores.dtype, device=device).to(scores.device)
            direction = torch.nn.functional.normalize(torch.where(visible, draw, 0.0), dim=-1, eps=1e-30)
        else:
            direction = _check_direction(direction, scores)
        value = _sensitivity_rows(scores, visible, direction, temperatures, epsilons)
        value = torch.where(usable[..., None], value, torch.nan)
    if single_epsilon:
        value = value.squeeze(-1)
    return value.squeeze(len(scores.shape) - 1) if single_temperature else value
