"""What the paper proves, on random rows, and what it prints but does not hold."""

from __future__ import annotations

import pytest
import torch

from attnmon import functional as F


def random_rows(count: int, n: int, d: int, sharpness: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(count, n, dtype=torch.float64, generator=generator)
    return torch.softmax(scores, -1), torch.randn(count, n, d, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize(("n", "d"), [(3, 2), (8, 3), (24, 16)])
def test_theorem_1_bounds_the_distance(n: int, d: int, sharpness: float) -> None:
    weights, vectors = random_rows(500, n, d, sharpness, n)
    result = F.top_n_distance(weights, vectors, tuple(range(1, n)))
    assert (result.distance <= result.upper_bound * (1 + 1e-12)).all()
    assert (result.expected_lower <= result.expected_upper * (1 + 1e-12)).all()


@pytest.mark.parametrize("sharpness", [0.3, 2.0])
@pytest.mark.parametrize("size", [1, 3, 10, 11])
def test_expectation_over_random_selections(size: int, sharpness: float) -> None:
    """Monte Carlo over uniformly drawn selections lies between Jensen's bounds; the printed form does not."""
    weights, vectors = (t[0] for t in random_rows(1, 12, 5, sharpness, size))
    y = weights[:, None] * vectors
    drawn = torch.rand(40_000, 12, generator=torch.Generator().manual_seed(0)).argsort(-1) < size
    point = drawn.double() @ y
    distance = ((y - point[:, None]).norm(dim=-1) * ~drawn).sum(-1)
    mean, error = distance.mean(), distance.std() / len(distance) ** 0.5
    result = F.top_n_distance(weights, vectors, size)
    assert result.expected_lower - 4 * error <= mean <= result.expected_upper + 4 * error
    assert result.expected_paper > mean + 4 * error


def test_corollary_1_bounds_the_weights() -> None:
    scores = 3 * torch.randn(500, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    low, high = F.dispersion_constants(torch.softmax(scores / 2, -1))
    largest = F.score_max(scores, 2.0)
    assert (low >= torch.exp(-2 * largest)).all()
    assert (high <= torch.exp(2 * largest)).all()


def test_corollary_3_and_where_the_printed_form_fails() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = 4 * torch.randn(2000, 12, dtype=torch.float64, generator=generator)
    scores[::4, 1] = scores[::4, 0] = scores[::4].amax(-1) + 3
    for temperature in (0.1, 0.5, 1.0, 4.0):
        spectral, frobenius, entry = (
            F.softmax_jacobian_norm(scores, temperature, norm=norm) for norm in ("spectral", "frobenius", "max")
        )
        assert (spectral <= (1 + 1e-12) / (2 * temperature)).all()
        assert (entry <= (1 + 1e-12) / (4 * temperature)).all()
        assert (entry <= spectral * (1 + 1e-12)).all()
        assert (spectral <= frobenius * (1 + 1e-12)).all()
        a = torch.softmax(scores / temperature, -1).sort(-1, descending=True).values / temperature
        assert (a[:, 1] <= spectral * (1 + 1e-12)).all()
        assert (spectral <= a[:, 0] * (1 + 1e-12)).all()
        weights = torch.softmax(scores / temperature, -1)
        lemma = F.normalizer_jacobian_bound(weights, weights / temperature, torch.ones(2000, dtype=torch.float64))
        assert (spectral <= lemma * (1 + 1e-12)).all()
        for epsilon in (1e-3, 0.1, 10.0):
            g = F.finite_difference_sensitivity(scores, temperature, epsilon, generator=generator)
            assert (g <= (1 + 1e-12) * min(1 / (2 * temperature), 2**0.5 / epsilon)).all()
    # 1/(4T) is printed as a bound of the spectral norm: a quarter of these rows, with two equal leaders, break it.
    assert (F.softmax_jacobian_norm(scores, 1.0) > 0.25).double().mean() > 0.2


def test_theorem_2_holds_on_average_and_fails_on_single_rows() -> None:
    """Means over x: the clipped form always holds, the printed one need not. Single rows break both."""
    printed_means, single_printed, single_clipped, rows = 0, 0, 0, 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        n, d, size = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((4, 25), (2, 12), (1, 4))
        )
        scores = 3 * torch.rand((), generator=generator) * torch.randn(n, dtype=torch.float64, generator=generator)
        vectors = torch.randn(200, n, d, dtype=torch.float64, generator=generator)
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
        weights = torch.softmax(scores, -1).expand(200, n)
        ratio = F.separability(weights, vectors, size).ratio
        bounds = F.separability_bounds(weights, vectors, size)
        error = 4 * ratio.std() / 200**0.5
        assert bounds.lower.mean() <= ratio.mean() + error
        assert ratio.mean() <= bounds.upper_valid.mean() + error
        printed_means += int(ratio.mean() > bounds.upper.mean())
        outside = (ratio < bounds.lower - 1e-12) | (ratio > bounds.upper + 1e-12)
        clipped = (ratio < bounds.lower - 1e-12) | (ratio > bounds.upper_valid + 1e-12)
        rows += len(ratio)
        single_printed += int(outside.sum())
        single_clipped += int(clipped.sum())
    assert printed_means > 0
    assert 0 < single_clipped < single_printed < rows
