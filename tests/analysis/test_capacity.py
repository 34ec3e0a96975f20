"""Heads needed, against the definition in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from attnmon.analysis.capacity import heads_needed


@pytest.mark.parametrize("separability", ["0.01", "0.1", "0.5", "0.55", "0.75", "0.9", "0.999"])
@pytest.mark.parametrize("share", ["0.01", "0.19", "0.271", "0.5", "0.75", "0.9375", "0.99", "0.999999"])
def test_least_number_by_definition(separability, share):
    p, q = Fraction(separability), Fraction(share)
    heads = next(h for h in range(10_000) if 1 - (1 - p) ** h >= q)
    assert heads_needed(float(separability), float(share)) == heads


def test_extremes():
    assert heads_needed(0.3, 0.0) == 0
    assert heads_needed(1, 0) == 0
    assert heads_needed(1.0, 0.999) == 1
    assert heads_needed(0.999, 1e-12) == 1
    assert heads_needed(1e-15, 0.5) == pytest.approx(0.6931471805599453e15, rel=1e-12)
    assert heads_needed(torch.tensor(0.5), 0.99) == 7


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 0.9), ValueError, "Expected `separability` to be above 0 and at most 1, but got 0.0"),
        ((0.5, 1.0), ValueError, "Expected `share` to be at least 0 and below 1, but got 1.0"),
        ((1.5, 0.9), ValueError, "Expected `separability` to be a share between 0 and 1, but got 1.5"),
        ((0.5, float("nan")), ValueError, "Expected `share` to be a share between 0 and 1, but got nan"),
        ((True, 0.9), TypeError, "Expected `separability` to be a number, but got True of type bool"),
        ((torch.ones(2), 0.9), TypeError, "of type Tensor. Average a tensor over heads"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error) as caught:
        heads_needed(*arguments)
    assert text in str(caught.value)
