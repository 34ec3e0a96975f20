"""Normalisers against 50-digit loops and dense Jacobians; conventions, names and error texts."""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

import attnmon.metrics._group as group
from attnmon.functional import attention_entropy, softmax_jacobian_norm
from attnmon.metrics._lowrank import _low_rank_norm
from attnmon.normalizers import (
    Elementwise,
    Entmax,
    Normalizer,
    ScalableSoftmax,
    SelfAdjustedSoftmax,
    Softmax,
    Sparsemax,
    normalizer_from_name,
)

NORMS = ("spectral", "frobenius", "max")
Oracle = Callable[[list[Any]], tuple[list[Any], list[list[Any]]]]


def _softmax(z: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    exps = [mpmath.exp(x - max(z)) for x in z]
    a = [e / mpmath.fsum(exps) for e in exps]
    return a, [[a[i] * ((i == k) - a[k]) for k in range(len(z))] for i in range(len(z))]


def _scale(jacobian: list[list[Any]], factor: Any) -> list[list[Any]]:
    return [[factor * x for x in row] for row in jacobian]


def oracle_softmax(temperature: float) -> Oracle:
    def compute(s: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        a, jacobian = _softmax([x / mpmath.mpf(temperature) for x in s])
        return a, _scale(jacobian, 1 / mpmath.mpf(temperature))

    return compute


def oracle_scalable(factor: float, temperature: float) -> Oracle:
    def compute(s: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        sharp = mpmath.mpf(factor) * mpmath.log(len(s)) / mpmath.mpf(temperature)
        a, jacobian = _softmax([x * sharp for x in s])
        return a, _scale(jacobian, sharp)

    return compute


def oracle_entmax(alpha: float, temperature: float) -> Oracle:
    def compute(s: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        power = mpmath.mpf(alpha) - 1
        z = [power * (x - max(s)) / mpmath.mpf(temperature) for x in s]

        def at(tau: Any) -> list[Any]:
            # a key at the threshold itself has weight 0, but for what the bisection leaves
            return [(x - tau) ** (1 / power) if x - tau > 1e-20 else mpmath.mpf(0) for x in z]

        near = np.array([float(x) for x in z])
        left, right = -1.0, 0.0
        for _ in range(50):  # powers of doubles are a hundred times faster
            middle = (left + right) / 2
            total = (np.maximum(near - middle, 0) ** (1 / float(power))).sum()
            left, right = (middle, right) if total >= 1 else (left, middle)
        low, high = mpmath.mpf(left) - mpmath.mpf(10) ** -12, mpmath.mpf(right) + mpmath.mpf(10) ** -12
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if mpmath.fsum(at(middle)) >= 1 else (low, middle)
        a = at(low)
        u = [w ** (1 - power) if w > 0 else mpmath.mpf(0) for w in a]
        total = mpmath.fsum(u)
        jacobian = [[u[i] * ((i == k) - u[k] / total) for k in range(len(s))] for i in range(len(s))]
        return a, _scale(jacobian, 1 / mpmath.mpf(temperature))

    return compute


def oracle_adjusted(temperature: float) -> Oracle:
    def compute(s: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        z = [x / mpmath.mpf(temperature) for x in s]
        p, soft = _softmax(z)
        low, high = min(min(z), 0), max(max(z), 0)
        span = high - low
        # derivatives of low and high; ties go to the first index
        d_low = [int(low < 0 and k == z.index(min(z))) for k in range(len(z))]
        d_high = [int(high > 0 and k == z.index(max(z))) for k in range(len(z))]
        g = [(x - low) / span for x in z]
        jacobian = []
        for i in range(len(z)):
            row = []
            for k in range(len(z)):
                slope = ((i == k) - d_low[k]) / span - (z[i] - low) * (d_high[k] - d_low[k]) / span**2
                row.append(slope * p[i] + g[i] * soft[i][k])
            jacobian.append(row)
        return [x * y for x, y in zip(g, p, strict=True)], _scale(jacobian, 1 / mpmath.mpf(temperature))

    return compute


def oracle_elementwise(function: Callable[[Any], Any], derivative: Callable[[Any], Any]) -> Oracle:
    def compute(s: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        values, slopes = [function(x) for x in s], [derivative(x) for x in s]
        total = mpmath.fsum(values)
        a = [v / total for v in values]
        return a, [[slopes[k] * ((i == k) - a[i]) / total for k in range(len(s))] for i in range(len(s))]

    return compute


def raised_square(s: Tensor) -> Tensor:
    return (0.1 * s) ** 2 + 1e-3


def bump(s: Tensor) -> Tensor:
    return 1 / (1 + s**2)


CASES: dict[str, tuple[Normalizer, Oracle]] = {
    "softmax": (Softmax(2.0), oracle_softmax(2.0)),
    "sparsemax": (Sparsemax(), oracle_entmax(2, 1)),
    "sparsemax/T": (Sparsemax(3.0), oracle_entmax(2, 3)),
    "entmax15": (Entmax(1.5, 0.5), oracle_entmax(1.5, 0.5)),
    "entmax1.1": (Entmax(1.1), oracle_entmax(1.1, 1)),
    "entmax1.7": (Entmax(1.7, 2.0), oracle_entmax(1.7, 2)),
    "entmax2.5": (Entmax(2.5), oracle_entmax(2.5, 1)),
    "ssmax": (ScalableSoftmax(), oracle_scalable(1, 1)),
    "ssmax/s": (ScalableSoftmax(0.3, 2.0), oracle_scalable(0.3, 2)),
    "sa-softmax": (SelfAdjustedSoftmax(), oracle_adjusted(1)),
    "sa-softmax/T": (SelfAdjustedSoftmax(4.0), oracle_adjusted(4)),
    "exp": (Elementwise(torch.exp), oracle_elementwise(mpmath.exp, mpmath.exp)),
    "softplus": (
        Elementwise(softplus),
        oracle_elementwise(lambda x: mpmath.log(1 + mpmath.exp(x)), lambda x: 1 / (1 + mpmath.exp(-x))),
    ),
    "square": (
        Elementwise(raised_square, lambda s: 0.02 * s),
        oracle_elementwise(
            lambda x: (mpmath.mpf(0.1) * x) ** 2 + mpmath.mpf(1e-3), lambda x: 2 * mpmath.mpf(0.1) ** 2 * x
        ),
    ),
    "bump": (Elementwise(bump), oracle_elementwise(lambda x: 1 / (1 + x**2), lambda x: -2 * x / (1 + x**2) ** 2)),
}


def rows(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(12, dtype=torch.float64, generator=generator)
    one_hot = torch.full((12,), 0.1, dtype=torch.float64).index_fill(0, torch.tensor([7]), 30)
    sink = plain.index_fill(0, torch.tensor([0]), 9)
    made = [
        plain,
        5 * plain,
        torch.full((12,), 0.7, dtype=torch.float64),
        torch.full((12,), -0.7, dtype=torch.float64),
        one_hot,
        (2 * plain).round() / 2 + 0.25,
        -plain.abs() - 0.5,
        plain.abs() + 0.5,
        sink,
        sink - 13,
        1e-3 * sink,
        1 + 1e-7 * plain,
        plain[:1],
        plain[:2],
        plain[:2] - 4,
        plain[:3].abs(),
    ]
    return [row.to(dtype) for row in made]


def dense_norms(jacobian: Any) -> dict[str, float]:
    matrix = jacobian.numpy() if isinstance(jacobian, Tensor) else np.array(jacobian, dtype=np.float64)
    return {"spectral": np.linalg.norm(matrix, 2), "frobenius": np.linalg.norm(matrix), "max": np.abs(matrix).max()}


def close(got: Tensor, want: Any, tolerance: float) -> None:
    want = torch.as_tensor(np.array(want, dtype=np.float64))
    error = (got.double() - want).abs() / want.abs().clamp_min(1e-3)
    assert (error <= tolerance).all(), (error.max().item(), got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case: str, dtype: torch.dtype) -> None:
    normalizer, oracle = CASES[case]
    tolerance = 3e-10 if dtype == torch.float64 else 5e-6
    given = rows(dtype)
    batch = torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=-torch.inf)
    with mpmath.workdps(50):
        expected = [oracle([mpmath.mpf(x) for x in row.double().tolist()]) for row in given]
    got = normalizer.weights(batch)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, (weights, _) in zip(got, expected, strict=True):
        close(row[: len(weights)], weights, tolerance)
        assert (row[len(weights) :] == 0).all()
    for norm in NORMS:
        value = normalizer.jacobian_norm(batch, norm=norm)
        assert value.dtype == got.dtype
        close(value, [dense_norms(jacobian)[norm] for _, jacobian in expected], tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_jacobian_is_that_of_the_weights(case: str) -> None:
    normalizer, _ = CASES[case]
    generator = torch.Generator().manual_seed(1)
    for shift in (-2.0, 0.0, 2.0, None):
        scores = torch.randn(40, dtype=torch.float64, generator=generator) + (shift or 0.0)
        if shift is None and case.startswith("sa-"):  # ties at both ends
            scores[[3, 8, 9]], scores[[5, 6]] = 3.0, -3.0
        jacobian = torch.autograd.functional.jacobian(normalizer.weights, scores)
        for norm, want in dense_norms(jacobian).items():
            close(normalizer.jacobian_norm(scores, norm=norm), want, 1e-10)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(CASES)))
def test_masked_is_absent(seed: int, case: str) -> None:
    normalizer, _ = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(2, 1, 2, 15, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 2, 15, generator=generator) < 0.6
    mask[..., 7] = True
    scores[1, 0, 1, 11] = -torch.inf
    full = scores.expand(2, 3, 2, 15).masked_fill(~mask, torch.nan)
    weights = normalizer.weights(full, mask=mask)
    norms = {norm: normalizer.jacobian_norm(full, mask=mask, norm=norm) for norm in NORMS}
    assert weights.shape == (2, 3, 2, 15)
    for where in np.ndindex(2, 3, 2):
        kept = mask[where[1:]] & (full[where] != -torch.inf)
        assert (weights[where][~kept] == 0).all()
        torch.testing.assert_close(weights[where][kept], normalizer.weights(full[where][kept]), rtol=1e-12, atol=1e-14)
        for norm, value in norms.items():
            assert value.shape == (2, 3, 2)
            torch.testing.assert_close(
                value[where], normalizer.jacobian_norm(full[where][kept], norm=norm), rtol=1e-10, atol=1e-14
            )


@pytest.mark.parametrize("case", CASES)
def test_rows_that_can_not_be_normalised(case: str) -> None:
    normalizer, _ = CASES[case]
    scores = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(5, 6, dtype=torch.bool)
    scores[0, 1], scores[1, 1] = torch.nan, torch.inf
    mask[:2, 4:] = False
    scores[2] = -torch.inf
    mask[3] = False
    clean = normalizer.weights(scores[4])
    weights = normalizer.weights(scores, mask=mask)
    assert weights[:2, :4].isnan().all()
    assert (weights[:2, 4:] == 0).all()
    assert (weights[2:4] == 0).all()
    assert torch.equal(weights[4], clean)
    for norm in NORMS:
        value = normalizer.jacobian_norm(scores, mask=mask, norm=norm)
        assert value.isnan().tolist() == [True, True, True, True, False]
        assert torch.equal(value[4], normalizer.jacobian_norm(scores[4], norm=norm))
        assert normalizer.jacobian_norm(scores[:3], norm=norm).isnan().all()
        assert normalizer.jacobian_norm(scores[:0], norm=norm).shape == (0,)
        if case != "softmax":
            assert normalizer.jacobian_norm(torch.zeros(2, 0), norm=norm).isnan().tolist() == [True, True]
    assert normalizer.weights(scores[:0]).shape == (0, 6)
    assert normalizer.weights(torch.zeros(2, 0)).shape == (2, 0)


@pytest.mark.parametrize("case", CASES)
def test_one_key(case: str) -> None:
    normalizer, _ = CASES[case]
    scores = torch.tensor([[3.0, 1.0], [-3.0, 1.0]])
    mask = torch.tensor([True, False])
    expected = [[1.0, 0.0], [0.0 if case.startswith("sa-") else 1.0, 0.0]]
    assert normalizer.weights(scores, mask=mask).tolist() == expected
    for norm in NORMS:
        assert normalizer.jacobian_norm(scores, mask=mask, norm=norm).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("case", CASES)
def test_blocks_layouts_and_arguments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    normalizer, _ = CASES[case]
    scores = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(3)).mT
    copy = scores.clone()
    whole = {norm: normalizer.jacobian_norm(scores, norm=norm) for norm in NORMS}
    assert torch.equal(scores, copy)
    monkeypatch.setitem(group._BUDGET, "cpu", 16384)
    for norm, value in whole.items():
        torch.testing.assert_close(value, normalizer.jacobian_norm(copy, norm=norm))
    with torch.inference_mode():
        torch.testing.assert_close(whole["spectral"], normalizer.jacobian_norm(copy))
        torch.testing.assert_close(normalizer.weights(copy), normalizer.weights(scores))
    copy.requires_grad_()
    assert not normalizer.jacobian_norm(copy).requires_grad
    normalizer.weights(copy).square().sum().backward()
    assert copy.grad.isfinite().all()


def test_softmax_is_the_functional_one() -> None:
    scores = 5 * torch.randn(7, 30, generator=torch.Generator().manual_seed(4))
    mask = torch.rand(7, 30, generator=torch.Generator().manual_seed(5)) < 0.5
    for norm in NORMS:
        want = softmax_jacobian_norm(scores, 0.3, mask=mask, norm=norm)
        assert torch.equal(Softmax(0.3).jacobian_norm(scores, mask=mask, norm=norm), want)
    shifted = Softmax(0.1).weights(scores + 1000)  # the sum rounds, the softmax doesn't
    torch.testing.assert_close(shifted, ((scores + 1000).double() / 0.1).softmax(-1).float(), rtol=1e-5, atol=1e-9)


def test_what_the_spectral_norm_can_reach() -> None:
    scores = torch.randn(200, 16, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for temperature in (0.5, 2.0):
        sparse = Sparsemax(temperature)
        several = (sparse.weights(scores) > 0).sum(-1) > 1
        assert several.any()
        assert (~several).any() or temperature > 1
        want = torch.where(several, 1 / temperature, 0.0).double()
        torch.testing.assert_close(sparse.jacobian_norm(scores), want, rtol=1e-12, atol=0)
        soft = Softmax(temperature)
        assert (soft.jacobian_norm(scores) <= 1 / (2 * temperature)).all()
        assert soft.jacobian_norm(torch.zeros(2, dtype=torch.float64)) == 1 / (2 * temperature)


def test_entmax_contains_its_relatives() -> None:
    scores = torch.randn(20, 50, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    assert torch.equal(Entmax(2.0, 3.0).weights(scores), Sparsemax(3.0).weights(scores))
    for alpha in (1.5, 2.0):  # sorting against bisection
        torch.testing.assert_close(
            Entmax(alpha).weights(scores), Entmax(alpha + 1e-12).weights(scores), rtol=0, atol=1e-10
        )
    torch.testing.assert_close(Entmax(1 + 1e-6).weights(scores), scores.softmax(-1), rtol=1e-4, atol=0)
    near = Entmax(1 + 1e-6).jacobian_norm(scores)
    torch.testing.assert_close(near, Softmax().jacobian_norm(scores), rtol=1e-4, atol=0)


@pytest.mark.parametrize("normalizer", [Sparsemax(), Entmax(), Entmax(1.2), Entmax(1.5, 1e-3)])
def test_far_scores_do_not_disturb_sparse_weights(normalizer: Normalizer) -> None:
    scores = torch.tensor([0.0, -3e-4, -1e4, 1.0, -1e300, 1.0 - 2e-4, -torch.inf], dtype=torch.float64)
    kept = torch.tensor([3, 5, 0, 1])
    torch.testing.assert_close(normalizer.weights(scores)[kept], normalizer.weights(scores[kept]), rtol=1e-14, atol=0)
    assert normalizer.weights(scores).sum() == pytest.approx(1, rel=1e-14)
    assert normalizer.weights(torch.tensor([3e38, -3e38])).tolist() == [1.0, 0.0]


def test_scalable_softmax_counts_visible_keys() -> None:
    scores = torch.tensor([1.0, 0.0, 5.0, -torch.inf], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True])
    odds = ScalableSoftmax(s=2.0).weights(scores, mask=mask)
    assert odds.tolist() == pytest.approx([0.8, 0.2, 0.0, 0.0])


def test_self_adjusted_softmax_conventions() -> None:
    normalizer = SelfAdjustedSoftmax()
    assert not normalizer.sums_to_one
    assert all(made.sums_to_one for made, _ in CASES.values() if not isinstance(made, SelfAdjustedSoftmax))
    scores = torch.randn(50, 9, generator=torch.Generator().manual_seed(8))
    total = normalizer.weights(scores).sum(-1)
    assert (total < 1 - 1e-3).all()
    # all scores 0: as for equal positive ones; there the weights jump
    zeros = torch.zeros(2, 3)
    mask = torch.tensor([True, True, False])
    assert normalizer.weights(zeros, mask=mask).tolist() == [[0.5, 0.5, 0.0]] * 2
    assert normalizer.weights(torch.full((2,), 1e-30)).tolist() == [0.5, 0.5]
    assert normalizer.weights(torch.full((2,), -1e-30)).tolist() == [0.0, 0.0]
    assert all(normalizer.jacobian_norm(zeros, norm=norm).isnan().all() for norm in NORMS)
    # a masked score moves neither end
    hidden = normalizer.weights(torch.tensor([1.0, 2.0, -9.0, 9.0]), mask=torch.tensor([True, True, False, False]))
    assert torch.equal(hidden[:2], normalizer.weights(torch.tensor([1.0, 2.0])))


@pytest.mark.parametrize("case", ["sa-softmax", "exp", "softmax", "ssmax", "entmax1.1"])
def test_peaked_rows_lose_no_digits(case: str) -> None:
    normalizer, oracle = CASES[case]
    row = torch.tensor([0.3, -0.2, 28.0, 0.1], dtype=torch.float64) * (0.2 if case == "entmax1.1" else 1)
    with mpmath.workdps(50):
        _, jacobian = oracle([mpmath.mpf(x) for x in row.tolist()])
    for norm, want in dense_norms(jacobian).items():
        assert normalizer.jacobian_norm(row, norm=norm).item() == pytest.approx(want, rel=1e-9, abs=0)


def test_elementwise_exp_is_softmax() -> None:
    generator = torch.Generator().manual_seed(9)
    normalizer = Elementwise(torch.exp, torch.exp)
    assert normalizer.name == "exp"
    for scale in (0.0, 1e-9, 1e-4, 1.0, 6.0):
        scores = scale * torch.randn(4, 1500, generator=generator, dtype=torch.float64)
        scores[1] = scores[1].round()
        scores[2, 3] += 8
        torch.testing.assert_close(normalizer.weights(scores), Softmax().weights(scores), rtol=1e-12, atol=0)
        for norm in NORMS:
            want = Softmax().jacobian_norm(scores, norm=norm)
            torch.testing.assert_close(normalizer.jacobian_norm(scores, norm=norm), want, rtol=2e-10, atol=0)


def test_lemma_2_bounds_the_norm() -> None:
    scores = 2 * torch.randn(30, 25, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    mask = torch.rand(30, 25, generator=torch.Generator().manual_seed(11)) < 0.7
    for function in (torch.exp, softplus, raised_square, bump):
        normalizer = Elementwise(function)
        bound = normalizer.lemma2_bound(scores, mask=mask)
        assert bound.shape == (30,)
        assert (normalizer.jacobian_norm(scores, mask=mask) <= bound).all()
        row, seen = scores[3], mask[3]
        x = row[seen].requires_grad_()
        values = function(x)
        (slope,) = torch.autograd.grad(values.sum(), x)
        want = (slope.abs().max() + (values / values.sum()).norm() * slope.norm()) / values.sum()
        torch.testing.assert_close(bound[3], want.detach(), rtol=1e-12, atol=0)
    assert Elementwise(softplus).lemma2_bound(scores.bfloat16()).dtype == torch.float32
    bad = torch.tensor([[torch.nan, 1.0], [-torch.inf, -torch.inf], [0.0, 0.0]])
    assert Elementwise(softplus).lemma2_bound(bad).isnan().tolist() == [True, True, False]


def test_elementwise_leaves_no_gradients() -> None:
    slope = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    normalizer = Elementwise(lambda s: softplus(slope * s))
    assert normalizer.name == "elementwise"
    scores = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    want = normalizer.jacobian_norm(scores)
    with torch.no_grad():
        assert torch.equal(normalizer.jacobian_norm(scores), want)
        assert not normalizer.weights(scores).requires_grad
    for value in (want, normalizer.lemma2_bound(scores)):
        assert not value.requires_grad
    assert slope.grad is None
    assert scores.grad is None
    (slope_grad,) = torch.autograd.grad(normalizer.weights(scores)[0, 0], slope)
    assert slope_grad != 0  # the weights follow the function's own parameters


def test_elementwise_rows_without_a_sum() -> None:
    square = Elementwise(lambda s: s.relu() ** 2)
    scores = torch.tensor([[-1.0, -2.0, 3.0], [-1.0, 1.0, 3.0]])
    mask = torch.tensor([True, True, False])
    weights = square.weights(scores, mask=mask)
    assert weights[0].isnan().tolist() == [True, True, False]
    assert weights[1].tolist() == [0.0, 1.0, 0.0]
    for norm in NORMS:
        assert square.jacobian_norm(scores, mask=mask, norm=norm).isnan().tolist() == [True, False]
    assert square.lemma2_bound(scores, mask=mask).isnan().tolist() == [True, False]
    assert Elementwise(torch.exp).weights(torch.tensor([800.0, 0.0])).isnan().all()  # overflows
    # F is not asked about hidden scores
    asked: list[Tensor] = []

    def root(s: Tensor) -> Tensor:
        asked.append(s)
        return s.sqrt()

    scores, mask = torch.tensor([4.0, -4.0, -torch.inf, 9.0]), torch.tensor([True, False, True, True])
    assert Elementwise(root).weights(scores, mask=mask).tolist() == pytest.approx([0.4, 0.0, 0.0, 0.6])
    assert Elementwise(root).jacobian_norm(scores, mask=mask).isfinite()
    assert all((s > 0).all() for s in asked)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 4), st.sampled_from(["spread", "tied", "near", "zero"])
)
def test_low_rank_norm_against_dense(seed: int, n: int, rank: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    d, left, right = (
        torch.randn(3, *size, n, generator=generator, dtype=torch.float64) for size in ((), (rank,), (rank,))
    )
    d = {"spread": d, "tied": d.sign(), "near": 1 + 1e-9 * d, "zero": 0 * d}[kind]
    left[1] *= 10.0 ** torch.randint(-12, 3, (rank, 1), generator=generator)
    right[2, 0] = 0
    dense = torch.diag_embed(d) + left.mT @ right
    got = _low_rank_norm(d, left, right, torch.linalg.matrix_norm(dense))
    torch.testing.assert_close(got, torch.linalg.matrix_norm(dense, 2), rtol=3e-10, atol=0)


def test_low_rank_norm_where_there_is_none() -> None:
    one = torch.ones(3, 1, 2, dtype=torch.float64)
    frobenius = torch.tensor([0.0, math.inf, math.nan], dtype=torch.float64)
    torch.testing.assert_close(_low_rank_norm(one[:, 0], one, one, frobenius), frobenius, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_entropy_takes_the_weights(case: str) -> None:
    normalizer, _ = CASES[case]
    entropy = attention_entropy(normalizer.weights(torch.randn(4, 10, generator=torch.Generator().manual_seed(12))))
    assert entropy.isfinite().all()


NAMED = [
    ("softmax", Softmax(), "softmax"),
    ("sparsemax", Sparsemax(), "sparsemax"),
    ("entmax15", Entmax(1.5), "entmax(1.5)"),
    ("entmax(1.3)", Entmax(1.3), "entmax(1.3)"),
    ("entmax(2)", Entmax(2), "entmax(2)"),
    ("ssmax", ScalableSoftmax(), "ssmax(s=1)"),
    ("ssmax(0.5)", ScalableSoftmax(0.5), "ssmax(s=0.5)"),
    ("ssmax(1e-05)", ScalableSoftmax(1e-5), "ssmax(s=1e-05)"),
    ("sa-softmax", SelfAdjustedSoftmax(), "sa-softmax"),
]


@pytest.mark.parametrize(("name", "normalizer", "label"), NAMED)
def test_names(name: str, normalizer: Normalizer, label: str) -> None:
    assert normalizer_from_name(name) == normalizer
    assert normalizer.name == label
    assert normalizer_from_name(label) == normalizer
    warm = normalizer_from_name(name, temperature=8)
    assert warm == dataclasses.replace(normalizer, temperature=8.0)
    assert warm != normalizer


@pytest.mark.parametrize("case", CASES)
def test_values_not_objects(case: str) -> None:
    normalizer, _ = CASES[case]
    with pytest.raises(dataclasses.FrozenInstanceError):
        normalizer.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        normalizer.temperature = 2.0
    assert hash(dataclasses.replace(normalizer)) == hash(normalizer)
    assert dataclasses.replace(normalizer) == normalizer
    if case != "square":  # which holds a lambda
        again = pickle.loads(pickle.dumps(normalizer))
        assert again == normalizer
        assert again.name == normalizer.name
        scores = torch.randn(10)
        assert torch.equal(again.weights(scores), normalizer.weights(scores))
    assert repr(normalizer).startswith(type(normalizer).__name__ + "(")


def test_a_given_name() -> None:
    assert Elementwise(torch.exp, name="mine").name == "mine"
    assert Elementwise(torch.nn.ReLU()).name == "ReLU"
    assert Elementwise(bump).name == "bump"
    assert Elementwise(bump) == Elementwise(bump)
    assert Elementwise(bump) != Elementwise(bump, name="other")


@pytest.mark.parametrize("normalizer", [Sparsemax(), Entmax(), Entmax(1.2)])
def test_without_entmax(normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    for call in (normalizer.weights, normalizer.jacobian_norm):
        with pytest.raises(ModuleNotFoundError) as caught:
            call(torch.zeros(3))
        assert "pip install 'attnmon[entmax]'" in str(caught.value)
    assert Softmax().weights(torch.zeros(2)).tolist() == [0.5, 0.5]


Z = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Softmax(0.0), ValueError, "Expected `temperature` to be positive and finite, but got 0.0."),
        (lambda: Sparsemax("1"), TypeError, "Expected `temperature` to hold numbers, but got '1' of type str."),
        (lambda: Softmax((1.0, 2.0)), TypeError, "Expected `temperature` to be a single number, but got (1.0, 2.0)."),
        (lambda: Entmax(1.0), ValueError, "Expected `alpha` to be above 1, but got 1.0. Pass e.g. alpha=1.5;"),
        (lambda: Entmax(-2.0), ValueError, "Expected `alpha` to be positive and finite, but got -2.0."),
        (lambda: ScalableSoftmax(s=-1), ValueError, "Expected `s` to be positive and finite, but got -1.0."),
        (lambda: SelfAdjustedSoftmax(math.inf), ValueError, "Expected `temperature` to be positive and finite"),
        (
            lambda: Sparsemax().jacobian_norm(Z, norm="nuclear"),
            ValueError,
            "Expected `norm` to be one of 'spectral', 'frobenius', 'max', but got 'nuclear'.",
        ),
        (
            lambda: Sparsemax().weights(Z.long()),
            TypeError,
            "Expected `scores` to be a floating-point tensor (float16, bfloat16, float32 or float64), but got "
            "torch.int64.",
        ),
        (
            lambda: SelfAdjustedSoftmax().weights(Z, mask=torch.ones(2, 4)),
            TypeError,
            "Expected `mask` to be a bool tensor, True where the key is visible, but got torch.float32.",
        ),
        (
            lambda: ScalableSoftmax().jacobian_norm(Z, mask=torch.ones(5, dtype=torch.bool)),
            ValueError,
            "Expected `mask` to be broadcastable to the shape of `scores`, (2, 4), but got shape (5,).",
        ),
        (lambda: Elementwise(3), TypeError, "Expected `function` to be callable, from a tensor of scores to one of"),
        (lambda: Elementwise(torch.exp, 3), TypeError, "Expected `derivative` to be callable, from a tensor"),
        (lambda: Elementwise(torch.exp, name=3), TypeError, "Expected `name` to be a string, but got 3 of type int."),
        (
            lambda: Elementwise(lambda s: s.tolist()).weights(Z),
            TypeError,
            "Expected `function` to return a torch.Tensor, but got list. Apply torch operations",
        ),
        (
            lambda: Elementwise(lambda s: s.sum(-1)).weights(Z),
            ValueError,
            "Expected `function` to return one value per score, shape (2, 4), but got shape (2,). Let it act",
        ),
        (
            lambda: Elementwise(lambda s: s > 0).weights(Z),
            TypeError,
            "Expected `function` to return a floating-point tensor, but got torch.bool. Convert its result",
        ),
        (
            lambda: Elementwise(torch.tanh).weights(Z - 1),
            ValueError,
            "Expected `function` to return values of at least 0, but got -0.761594 at score -1. Take e.g.",
        ),
        (
            lambda: Elementwise(torch.tanh).lemma2_bound(Z - 1),
            ValueError,
            "Expected `function` to return values of at least 0, but got -0.761594 at score -1.",
        ),
        (
            lambda: Elementwise(torch.ones_like).jacobian_norm(Z),
            ValueError,
            "Expected `function` to be differentiable by autograd, but its result does not depend on the scores",
        ),
        (
            lambda: Elementwise(torch.exp, lambda s: 1.0).jacobian_norm(Z),
            TypeError,
            "Expected `derivative` to return a torch.Tensor, but got float.",
        ),
        (
            lambda: Elementwise(torch.exp, lambda s: s[:1]).jacobian_norm(Z),
            ValueError,
            "Expected `derivative` to return one value per score, shape (2, 4), but got shape (1, 4).",
        ),
        *(
            (
                lambda name=name: normalizer_from_name(name),
                ValueError,
                "Expected `name` to be one of 'softmax', 'sparsemax', 'entmax15', 'entmax(ALPHA)' with ALPHA above 1, "
                f"'ssmax', 'ssmax(S)' with S above 0, 'sa-softmax', but got {name!r}.",
            )
            for name in ("sofmax", "entmax", "entmax()", "entmax(s=2)", "ssmax(-1)", "ssmax(1", "", None, 3)
        ),
        (lambda: normalizer_from_name("entmax(1)"), ValueError, "Expected `alpha` to be above 1, but got 1.0."),
        (lambda: normalizer_from_name("softmax", -1.0), ValueError, "Expected `temperature` to be positive"),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(text), str(caught.value)
