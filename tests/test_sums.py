"""Sums: means and standard errors as written down by hand, and as split over calls."""

import math

import pytest
import torch

from attnmon.sums import Figures, LayerSums


def figures(*parts) -> Figures:
    sums = LayerSums(parts[0][0].shape[0], parts[0][0].shape[2], torch.device("cpu"))
    for values, weight in parts:
        sums.add_rows(values, weight)
        sums.add_call(torch.tensor(0), 8.0)
    return Figures.from_sums(sums.data)


def test_mean_and_error_of_equal_weights():
    values = torch.tensor([1.0, 2.0, 4.0, 9.0]).reshape(1, 1, 1, 4)
    result = figures((values, torch.full((1, 4), 16.0)))
    assert result.means == [[4.0]]
    deviation = math.sqrt(((1 - 4) ** 2 + (2 - 4) ** 2 + 0 + (9 - 4) ** 2) / 3)
    assert result.errors[0][0] == pytest.approx(deviation / 2)
    assert (result.used, result.skipped) == ([[4]], [[0]])
    assert result.temperature == 8.0


def test_weights_count_rows_of_long_sequences_more():
    values = torch.tensor([[0.0, 0.0], [3.0, 3.0]]).reshape(1, 2, 1, 2)
    result = figures((values, torch.tensor([[2.0, 2.0], [1.0, 1.0]])))
    assert result.means == [[1.0]]


def test_undefined_rows_are_skipped_and_counted_and_absent_rows_are_neither():
    values = torch.tensor([1.0, math.nan, math.inf, 3.0, 100.0]).reshape(1, 1, 1, 5)
    result = figures((values, torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])))
    assert result.means == [[2.0]]
    assert (result.used, result.skipped) == ([[2]], [[2]])


def test_nothing_used_is_nan_not_zero():
    result = figures((torch.full((1, 1, 2, 3), math.nan), torch.ones(1, 3)))
    assert all(map(math.isnan, result.means[0] + result.errors[0]))
    assert result.used == [[0, 0]]


def test_split_calls_equal_one():
    values = torch.randn(3, 4, 2, 10, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(4, 10, generator=torch.Generator().manual_seed(1)) + 0.1
    whole = figures((values, weight))
    split = figures((values[:, :1], weight[:1]), (values[:, 1:], weight[1:]))
    assert whole.used == split.used
    torch.testing.assert_close(torch.tensor(whole.means), torch.tensor(split.means))
    torch.testing.assert_close(torch.tensor(whole.errors), torch.tensor(split.errors))
