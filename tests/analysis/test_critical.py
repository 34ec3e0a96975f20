"""Algorithm 3 against scipy on hand-made heads."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy.stats import ks_2samp

from attnmon.analysis import Analysis, Table, critical_top_n


def made(distance: np.ndarray, expected: np.ndarray) -> Analysis:
    """``(heads, lengths, N)``."""
    axes = {"top_n": tuple(range(1, distance.shape[2] + 1))}
    heads = tuple((0, head) for head in range(distance.shape[0]))
    table = Table(axes, {"distance": distance, "expected_paper": expected}, {})
    return Analysis(("attn",), heads, (1.0,), tuple(range(16, 16 + distance.shape[1])), {"critical": table})


def test_smallest_n_that_passes():
    rng = np.random.default_rng(0)
    expected = rng.normal(size=(60, 2, 8))
    shift = np.array([[3, 2, 1, 0.5, 0, 0, 0, 0], [3, 3, 3, 3, 3, 3, 3, 3]])
    distance = rng.normal(size=(60, 2, 8)) + shift
    for alpha in (0.01, 0.05, 0.2):
        found = critical_top_n(made(distance, expected), alpha)
        p_values = np.array(
            [[ks_2samp(distance[:, i, j], expected[:, i, j]).pvalue for j in range(8)] for i in range(2)]
        )
        np.testing.assert_array_equal(found.p_values, p_values)
        passing = np.flatnonzero(p_values[0] >= alpha)
        assert found.size == (int(passing[0]) + 1, None)
        assert found.alpha == alpha


def test_heads_without_rows_are_left_out():
    rng = np.random.default_rng(1)
    distance, expected = rng.normal(size=(2, 40, 1, 3))
    distance[::2, 0, 1] = np.nan
    distance[:, 0, 2] = np.nan
    found = critical_top_n(made(distance, expected))
    assert found.p_values[0, 1] == ks_2samp(distance[1::2, 0, 1], expected[:, 0, 1]).pvalue
    assert np.isnan(found.p_values[0, 2])


def test_wrong_arguments(monkeypatch):
    analysis = made(np.zeros((2, 1, 1)), np.zeros((2, 1, 1)))
    with pytest.raises(ValueError, match="Expected `alpha` to lie between 0 and 1, but got 1.5"):
        critical_top_n(analysis, 1.5)
    with pytest.raises(ValueError, match="Expected `analysis` to have the task 'critical'"):
        critical_top_n(Analysis(("attn",), (), (1.0,), (16,), {}))
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'attnmon\\[figures\\]'"):
        critical_top_n(analysis)
