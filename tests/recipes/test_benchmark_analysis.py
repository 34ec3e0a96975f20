"""The benchmark's loops measure what the analysis measures, and its tables come out."""

from __future__ import annotations

from pathlib import Path

import _loops
import benchmark_analysis as recipe
import numpy as np
import pytest
import torch

from attnmon.functional import (
    finite_difference_sensitivity,
    separability,
    separability_bounds,
    top_n_distance,
)


def test_the_loops_are_the_same_quantities() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, generator=generator, dtype=torch.float64) * 2
    vectors = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    weights = scores.softmax(-1)
    loop = _loops.distance(weights, vectors, (1, 5, 30))
    distances = top_n_distance(weights, vectors, (1, 5, 30))
    for name in ("distance", "upper_bound", "expected_paper"):
        np.testing.assert_allclose(loop[name], getattr(distances, name), rtol=1e-12)
    loop = _loops.separability(weights, vectors, (2, 8))
    bounds = separability_bounds(weights, vectors, (2, 8))
    np.testing.assert_allclose(loop["ratio"], separability(weights, vectors, (2, 8)).ratio)
    np.testing.assert_allclose(loop["lower"], bounds.lower, rtol=1e-9)
    np.testing.assert_allclose(loop["upper"], bounds.upper, rtol=1e-9)
    direction = torch.nn.functional.normalize(torch.randn(40, generator=generator, dtype=torch.float64), dim=-1)
    nudged = _loops.sensitivity(scores, direction, (0.5, 8.0), (1e-3, 10.0))
    expected = finite_difference_sensitivity(scores, (0.5, 8.0), (1e-3, 10.0), direction=direction)
    np.testing.assert_allclose(nudged, expected, rtol=1e-9)


def test_tables(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        recipe.benchmark_analysis(
            text=str(text_file), length=128, lengths=(64, 128), sizes=(4, 8), rows=2, n_head=2, n_embd=16, threads=1
        )
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "L = 128, 4 heads, every row, 3 lengths" in out
    assert "loop / ours" in out
    assert "Seconds over L" in out
    assert "Algorithm 3: N up to" in out
    assert "Largest memory" in out
    with pytest.raises(ValueError, match="Expected `text` to have at least 100000 tokens"):
        recipe.benchmark_analysis(text=str(text_file), length=100_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": 0}, "Expected `threads` to be at least 1, but got 0"),
        ({"length": 64}, "Expected `length` to be at least 125 for 24 `rows`"),
        ({"device": "bogus"}, "Expected `device` to be one that torch can use here, but 'bogus' failed"),
    ],
)
def test_wrong_arguments(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.benchmark_analysis(**changes)
