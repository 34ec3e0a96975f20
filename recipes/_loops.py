"""The paper's Algorithms 1 to 5 for one row, written down as they are defined: what the benchmark compares with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def distance(weights: Tensor, vectors: Tensor, top_n: Sequence[int]) -> dict[str, list[float]]:
    """Algorithms 1 and 2: distance, upper bound and printed expectation of one row.

    Args:
        weights: ``(n,)`` over the visible keys.
        vectors: ``(n, d)``.
        top_n: N, each below n.
    """
    n = len(weights)
    order = torch.sort(weights, descending=True, stable=True).indices
    found: dict[str, list[float]] = {"distance": [], "upper_bound": [], "expected_paper": []}
    centre = weights @ vectors
    for size in top_n:
        chosen, rest = order[:size], order[size:]
        selected = weights[chosen] @ vectors[chosen]
        found["distance"].append((weights[rest, None] * vectors[rest] - selected).norm(dim=-1).sum().item())
        total = weights[chosen].sum()
        gap = torch.cdist(vectors[rest], vectors[chosen]).max()
        longest = vectors[chosen].norm(dim=-1).max()
        bound = (1 - total) * gap + longest * (total * (n - size) - (1 - total))
        found["upper_bound"].append(bound.item())
        k = size / (n - 1)
        found["expected_paper"].append(
            (n - size) / n * ((weights[:, None] + k) * vectors - centre).norm(dim=-1).sum().item()
        )
    return found


def separability(weights: Tensor, vectors: Tensor, top_n: Sequence[int]) -> dict[str, list[float]]:
    """Algorithm 4: Ns/N and Theorem 2's bounds (the upper one as printed) of one row."""
    order = torch.sort(weights, descending=True, stable=True).indices
    found: dict[str, list[float]] = {"ratio": [], "lower": [], "upper": []}
    apart = torch.cdist(vectors, vectors)
    apart.fill_diagonal_(torch.inf)
    half = apart.min() ** 2 / 2
    radius_of_sphere = vectors.norm(dim=-1).max()
    for size in top_n:
        chosen, rest = order[:size], order[size:]
        selected = weights[chosen] @ vectors[chosen]
        distances = (weights[:, None] * vectors - selected).norm(dim=-1)
        radius = distances[rest].min()
        found["ratio"].append((distances[chosen] < radius).double().mean().item())
        own = weights[chosen]
        linear, square = own.sum() - own, (own**2).sum() - own**2
        xi = ((radius_of_sphere**2 - half) * linear**2 + half * square).clamp_min(0).sqrt()
        found["lower"].append((1 - xi.sum() / (radius * size)).item())
        found["upper"].append(torch.exp(-((radius - xi) ** 2) / (16 * radius_of_sphere**2)).mean().item())
    return found


def sensitivity(
    scores: Tensor, direction: Tensor, temperatures: Sequence[float], epsilons: Sequence[float]
) -> list[list[float]]:
    """Algorithm 5: g over the temperatures and epsilons of one row, for one unit direction ``(n,)``."""
    found = []
    for temperature in temperatures:
        plain = torch.softmax(scores / temperature, -1)
        nudged = [torch.softmax((scores + epsilon * direction) / temperature, -1) for epsilon in epsilons]
        found.append([((b - plain).norm() / epsilon).item() for b, epsilon in zip(nudged, epsilons, strict=True)])
    return found
