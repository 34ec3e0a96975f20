"""Closed forms, properties, conventions and error texts of the functional forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmon import functional as F
from attnmon.metrics import SELECTION_FIELDS, jacobian_norms, selection_statistics


def everything(weights: Tensor, scores: Tensor, vectors: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Every quantity of a row but the random one, at a few N and temperatures."""
    out = selection_statistics(weights, vectors, (1, 3), mask=mask, want=SELECTION_FIELDS)
    out |= jacobian_norms(scores, (0.5, 2.0), mask=mask, norms=("spectral", "frobenius", "max"))
    out["entropy"] = F.attention_entropy(weights, mask=mask)
    out["normalized"] = F.attention_entropy(weights, mask=mask, normalize=True)
    out["effective"] = F.effective_keys(weights, mask=mask)
    out["share"] = F.active_share(weights, mask=mask, min_keys=3)
    out["participation"] = F.participation_ratio(weights, mask=mask)
    out["spread"] = F.score_spread(scores, (1.0, 2.0), mask=mask, min_keys=3)
    out["largest"] = F.score_max(scores, mask=mask)
    out["first"] = F.first_key_weight(weights, mask=mask)
    out["low"], out["high"] = F.dispersion_constants(weights, mask=mask)
    return out


def sample(seed: int, *lead: int, n: int = 20, d: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(*lead, n, dtype=torch.float64, generator=generator)
    vectors = torch.randn(*lead, n, d, dtype=torch.float64, generator=generator)
    return torch.softmax(scores, -1).to(dtype), scores.to(dtype), vectors.to(dtype)


def same(a: dict[str, Tensor], b: dict[str, Tensor], **kwargs: Any) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], equal_nan=True, msg=lambda m, name=name: f"{name}: {m}", **kwargs)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 30))
def test_masked_is_absent(seed: int, n: int) -> None:
    weights, scores, vectors = sample(seed, n=n)
    mask = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[-5:] = True  # the first keys may be hidden, as behind left padding
    weights, scores = weights.masked_fill(~mask, torch.nan), scores.masked_fill(~mask, torch.inf)
    vectors = vectors.masked_fill(~mask[:, None], torch.nan)
    same(everything(weights, scores, vectors, mask), everything(weights[mask], scores[mask], vectors[mask]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_order_of_keys_does_not_matter(seed: int) -> None:
    weights, scores, vectors = sample(seed)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    before, after = everything(weights, scores, vectors), everything(weights[order], scores[order], vectors[order])
    for name in ("ratio", "precision"):
        assert torch.equal(before[name], after[name])
    before.pop("first"), after.pop("first")
    same(before, after)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2.0**-20, 0.5, 8.0, 2.0**20]))
def test_scale_of_the_vectors(seed: int, factor: float) -> None:
    weights, _, vectors = sample(seed)
    plain, scaled = (
        selection_statistics(weights, x, (1, 3), want=SELECTION_FIELDS) for x in (vectors, factor * vectors)
    )
    for name in ("distance", "upper_bound", "expected_paper", "expected_lower", "expected_upper", "radius"):
        torch.testing.assert_close(scaled[name], factor * plain[name])
    same({k: plain[k] for k in ("ratio", "precision", "f_score", "lower", "upper")}, scaled)


def test_shift_and_temperature_of_the_scores() -> None:
    _, scores, _ = sample(3, 50)
    for norm in ("spectral", "frobenius", "max"):
        plain = F.softmax_jacobian_norm(scores, 2.0, norm=norm)
        torch.testing.assert_close(F.softmax_jacobian_norm(scores + 7.5, 2.0, norm=norm), plain)
        torch.testing.assert_close(F.softmax_jacobian_norm(4 * scores, 8.0, norm=norm) * 4, plain)
    torch.testing.assert_close(F.score_spread(scores + 100), F.score_spread(scores))


def test_closed_forms() -> None:
    n = 8
    uniform, one_hot = torch.full((n,), 1 / n), torch.eye(n)[2]
    assert F.attention_entropy(uniform).item() == pytest.approx(math.log(n))
    assert F.attention_entropy(one_hot).item() == 0.0
    assert math.copysign(1, F.attention_entropy(one_hot).item()) == 1.0
    assert F.effective_keys(uniform).item() == pytest.approx(n)
    assert F.participation_ratio(one_hot).item() == 1.0
    assert F.dispersion_constants(uniform) == (pytest.approx(1), pytest.approx(1))
    # n equal weights: diag(a) - a a^T is 1/n times a projection of rank n - 1
    scores = torch.zeros(n, dtype=torch.float64)
    assert F.softmax_jacobian_norm(scores, 2.0).item() == pytest.approx(1 / (2 * n), rel=1e-14)
    assert F.softmax_jacobian_norm(scores, 2.0, norm="frobenius").item() == pytest.approx(math.sqrt(n - 1) / n / 2)
    assert F.softmax_jacobian_norm(scores, 2.0, norm="max").item() == pytest.approx((1 / n) * (1 - 1 / n) / 2)
    # two keys: 2 a (1 - a), which two equal weights bring to 1/(2T)
    assert F.softmax_jacobian_norm(torch.tensor([0.0, 0.0]), 0.1).item() == pytest.approx(5.0)
    assert F.softmax_jacobian_norm(torch.tensor([3.0]), 1.0).item() == 0.0
    # orthonormal vectors: every distance is the root of a sum of squares
    a = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    result = F.top_n_distance(a, torch.eye(3, dtype=torch.float64), (1, 2))
    assert result.distance.tolist() == pytest.approx([math.hypot(0.3, 0.5) + math.hypot(0.2, 0.5), math.sqrt(0.38)])
    # softmax as Lemma 2 sees it: F' = F / T
    exps = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    bound = F.normalizer_jacobian_bound(exps / 8, exps / 0.5, exps.sum())
    assert bound >= F.softmax_jacobian_norm(exps.log() * 0.5, 0.5)


def test_ties_go_to_the_lower_index() -> None:
    for n, dtype in ((6, torch.float32), (400, torch.float32), (6, torch.float64)):
        weights = torch.full((n,), 1 / n, dtype=dtype)
        vectors = torch.arange(1.0, n + 1, dtype=dtype)[:, None]
        expected = sum(abs(j - 6) for j in range(4, n + 1)) / n
        assert F.top_n_distance(weights, vectors, 3).distance.item() == pytest.approx(expected)


def test_sharing_vectors_changes_nothing() -> None:
    weights, _, _ = sample(0, 2, 3, 5)
    vectors = torch.randn(2, 3, 1, 20, 4, dtype=torch.float64)
    shared = selection_statistics(weights, vectors, (2, 7), want=SELECTION_FIELDS)
    copied = selection_statistics(weights, vectors.expand(2, 3, 5, 20, 4).clone(), (2, 7), want=SELECTION_FIELDS)
    same(shared, copied)
    one = torch.randn(20, 4, dtype=torch.float64)
    same(
        selection_statistics(weights, one, 2, want=SELECTION_FIELDS),
        selection_statistics(weights, one.expand(2, 3, 1, 20, 4), 2, want=SELECTION_FIELDS),
    )


def test_one_pass_equals_the_separate_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    import attnmon.metrics._group as module

    weights, scores, _ = sample(1, 3, 4)
    vectors = torch.randn(3, 1, 20, 4, dtype=torch.float64)
    together = selection_statistics(weights, vectors, (1, 6), want=SELECTION_FIELDS)
    apart = F.separability(weights, vectors, (1, 6))._asdict() | F.top_n_distance(weights, vectors, (1, 6))._asdict()
    same(together, apart | F.separability_bounds(weights, vectors, (1, 6))._asdict())
    assert set(selection_statistics(weights, vectors, 1, want=["radius"])) == {"radius"}
    monkeypatch.setitem(module._BUDGET, "cpu", 4096)  # many small blocks
    same(together, selection_statistics(weights, vectors, (1, 6), want=SELECTION_FIELDS))
    assert F.softmax_jacobian_norm(scores, (1.0, 2.0)).shape == (3, 4, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    result = torch.float64 if dtype == torch.float64 else torch.float32
    weights, scores, vectors = sample(2, 3, dtype=dtype)
    for name, value in everything(weights, scores, vectors).items():
        assert value.dtype == result, name
    assert F.finite_difference_sensitivity(scores, 1.0, 0.1).dtype == result
    assert torch.equal(F.attention_entropy(weights), F.attention_entropy(weights.to(result)))


def test_shapes() -> None:
    weights, scores, vectors = sample(4, 2, 3)
    for argument, tail in ((2, ()), ((2,), (1,)), ([1, 2], (2,)), (torch.tensor([1, 2, 5]), (3,))):
        assert F.top_n_distance(weights, vectors, argument).distance.shape == (2, 3, *tail)
        assert F.separability(weights, vectors, argument).ratio.shape == (2, 3, *tail)
        assert F.separability_bounds(weights, vectors, argument).lower.shape == (2, 3, *tail)
    assert F.softmax_jacobian_norm(scores, 1.0).shape == (2, 3)
    assert F.softmax_jacobian_norm(scores, (1.0,)).shape == (2, 3, 1)
    for temperature, epsilon, tail in (
        (1.0, 0.1, ()),
        ((1.0,), 0.1, (1,)),
        (1.0, (0.1, 1, 2), (3,)),
        ((1, 2), (3,), (2, 1)),
    ):
        assert F.finite_difference_sensitivity(scores, temperature, epsilon).shape == (2, 3, *tail)
    assert F.top_n_distance(weights[:0], vectors[:0], (1, 2)).distance.shape == (0, 3, 2)
    assert F.softmax_jacobian_norm(scores[:0], 1.0).shape == (0, 3)
    assert F.attention_entropy(weights[0, 0], mask=torch.ones(7, 20, dtype=torch.bool)).shape == (7,)
    assert F.separability(weights[0, 0], vectors, 1).ratio.shape == (2, 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite(bad: float) -> None:
    weights, scores, vectors = sample(5, 4)
    clean = everything(weights, scores, vectors)
    weights[1, 3] = bad
    scores[1, 3] = bad
    dirty = everything(weights, scores, vectors)
    for name, value in dirty.items():
        masked = bad == -torch.inf and name in ("spectral", "frobenius", "max", "spread", "largest")
        assert value[1].isnan().all() != masked, name
    good = torch.tensor([True, False, True, True])
    same({k: v[good] for k, v in clean.items()}, {k: v[good] for k, v in dirty.items()})
    vectors[2, 5, 1] = bad
    assert F.top_n_distance(weights, vectors, 1).distance.isnan().tolist() == [False, True, True, False]
    sensitivity = F.finite_difference_sensitivity(scores, 1.0, 0.1)
    assert sensitivity.isnan().tolist() == [False, bad != -torch.inf, False, False]


def test_minus_infinity_is_a_mask_and_a_zero_weight_is_not() -> None:
    _, scores, vectors = sample(6, n=10)
    hidden = scores.clone()
    hidden[7:] = -torch.inf
    for norm in ("spectral", "frobenius", "max"):
        torch.testing.assert_close(
            F.softmax_jacobian_norm(hidden, 1.0, norm=norm), F.softmax_jacobian_norm(scores[:7], 1.0, norm=norm)
        )
    assert F.score_spread(hidden).isnan()
    assert F.score_spread(hidden, min_keys=7) == F.score_spread(scores[:7], min_keys=7)
    weights = torch.softmax(hidden, -1)
    assert F.attention_entropy(weights, normalize=True) == F.attention_entropy(weights) / math.log(10)
    assert F.top_n_distance(weights, vectors, 8).distance.isfinite()
    assert F.top_n_distance(weights, vectors, 8, mask=weights > 0).distance.isnan()


def test_too_few_keys_are_nan() -> None:
    weights, scores, vectors = sample(7, n=6)
    none, one = torch.zeros(6, dtype=torch.bool), torch.arange(6) == 2
    got = everything(weights, scores, vectors, none)
    assert all(value.isnan().all() for value in got.values()), got
    got = everything(weights, scores, vectors, one)
    for name in (*SELECTION_FIELDS, "normalized", "spread", "share"):
        assert got[name].isnan().all(), name
    assert all((got[name] == 0).all() for name in ("spectral", "frobenius", "max"))
    assert F.finite_difference_sensitivity(scores, 1.0, 0.1, mask=one) == 0
    assert F.finite_difference_sensitivity(scores, 1.0, 0.1, mask=none).isnan()
    two = torch.arange(6) < 2
    assert F.separability(weights, vectors, (1, 2, 3), mask=two).ratio.isnan().tolist() == [False, True, True]


def test_arguments_are_left_alone() -> None:
    weights, scores, vectors = sample(8, 3)
    copies = [t.clone() for t in (weights, scores, vectors)]
    everything(weights, scores, vectors, torch.rand(3, 20) < 0.8)
    assert all(torch.equal(a, b) for a, b in zip(copies, (weights, scores, vectors), strict=True))
    logits = scores.clone().requires_grad_()
    F.attention_entropy(torch.softmax(logits, -1)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not F.separability(torch.softmax(logits, -1), vectors, 1).ratio.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_does_not_reach_the_products(dtype: torch.dtype) -> None:
    weights, scores, vectors = sample(10, 4, dtype=dtype)
    plain = everything(weights, scores, vectors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(plain, everything(weights, scores, vectors), rtol=0, atol=0)


def test_deterministic_algorithms_and_inference_mode() -> None:
    weights, scores, vectors = sample(11, 4)
    plain = everything(weights, scores, vectors)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode():
            same(plain, everything(weights, scores, vectors), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_sensitivity_along_a_given_direction() -> None:
    scores = sample(3, 4)[1]
    direction = torch.zeros(20, dtype=torch.float64).index_fill(0, torch.tensor([2, 7]), 0.5**0.5)
    got = F.finite_difference_sensitivity(scores, (0.5, 2.0), (1e-3, 1.0), direction=direction)
    for t, temperature in enumerate((0.5, 2.0)):
        for e, epsilon in enumerate((1e-3, 1.0)):
            moved = torch.softmax((scores + epsilon * direction) / temperature, -1) - torch.softmax(
                scores / temperature, -1
            )
            torch.testing.assert_close(got[:, t, e], moved.norm(dim=-1) / epsilon, rtol=1e-9, atol=0)
    masked = torch.arange(20) < 12
    shorter = F.finite_difference_sensitivity(scores[:, :12], 0.5, 1.0, direction=direction[:12])
    found = F.finite_difference_sensitivity(scores, 0.5, 1.0, mask=masked, direction=direction)
    torch.testing.assert_close(found, shorter, rtol=1e-12, atol=0)
    with pytest.raises(
        ValueError, match="Expected `direction` to broadcast to `scores`, \\(4, 20\\), but got \\(7,\\)"
    ):
        F.finite_difference_sensitivity(scores, 0.5, 1.0, direction=torch.ones(7))
    with pytest.raises(TypeError, match="`direction`"):
        F.finite_difference_sensitivity(scores, 0.5, 1.0, direction=torch.ones(20, dtype=torch.int64))


def test_lemma_2_where_squares_overflow_or_vanish() -> None:
    for shift in (-60.0, 0.0, 45.0):
        exps = torch.exp(torch.tensor([shift, shift - 1]))
        bound = F.normalizer_jacobian_bound(exps / exps.sum(), exps, exps.sum())
        assert float(bound) == pytest.approx(1.337835, rel=1e-5)
    assert F.normalizer_jacobian_bound(torch.tensor([0.5, 0.5]), torch.zeros(2), torch.tensor(1.0)) == 0


def test_rows_without_keys_have_no_norm() -> None:
    assert F.softmax_jacobian_norm(torch.zeros(2, 0), 1.0).isnan().all()
    assert F.softmax_jacobian_norm(torch.zeros(2, 0), (1.0, 2.0)).shape == (2, 2)


def test_sensitivity_draws_from_the_generator_only() -> None:
    _, scores, _ = sample(9, 5)
    state = torch.get_rng_state()
    first, second = (
        F.finite_difference_sensitivity(scores, (0.1, 1.0), 0.1, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, F.finite_difference_sensitivity(scores, (0.1, 1.0), 0.1))


W, X, S = torch.full((2, 4), 0.25), torch.zeros(2, 4, 3), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: F.top_n_distance(W, X, 0), ValueError, "Expected `top_n` to be at least 1, but got 0."),
        (lambda: F.separability(W, X, (1, -2)), ValueError, "Expected `top_n` to be at least 1, but got -2."),
        (lambda: F.separability(W, X, ()), ValueError, "Expected `top_n` to hold at least one integer, but got none."),
        (lambda: F.separability(W, X, True), TypeError, "Expected `top_n` to hold integers, but got True."),
        (lambda: F.separability(W, X, 2.0), TypeError, "Expected `top_n` to hold integers, but got 2.0 of type float."),
        (lambda: F.separability(W, X, "5"), TypeError, "Expected `top_n` to hold integers, but got '5' of type str."),
        (
            lambda: F.separability_bounds(W, X, (1, 4)),
            ValueError,
            "Expected `top_n` to be below the number of keys, 4, so that a key is left unselected, but got 4.",
        ),
        (
            lambda: F.top_n_distance(W, X[:, :3], 1),
            ValueError,
            "Expected `vectors` to hold one vector for each of the 4 keys of `weights`, but got 3: shape (2, 3, 3)",
        ),
        (
            lambda: F.top_n_distance(W, torch.zeros(3, 4, 3), 1),
            ValueError,
            "Expected `vectors` to broadcast over the rows of `weights`, (2,), but got leading dimensions (3,).",
        ),
        (
            lambda: F.top_n_distance(W, torch.zeros(3), 1),
            ValueError,
            "Expected `vectors` to have at least 2 dimensions (..., n, d), but got 1: shape (3,).",
        ),
        (
            lambda: F.attention_entropy(torch.tensor(1.0)),
            ValueError,
            "Expected `weights` to have at least 1 dimension (..., n), but got 0: shape ().",
        ),
        (
            lambda: F.attention_entropy(W.long()),
            TypeError,
            "Expected `weights` to be a floating-point tensor (float16, bfloat16, float32 or float64), but "
            "got torch.int64. Convert it with `weights.float()`.",
        ),
        (lambda: F.separability(W, X.int(), 1), TypeError, "Expected `vectors` to be a floating-point tensor"),
        (
            lambda: F.attention_entropy([0.5, 0.5]),
            TypeError,
            "Expected `weights` to be a torch.Tensor (..., n), but got list.",
        ),
        (
            lambda: F.attention_entropy(W, mask=torch.ones(2, 4)),
            TypeError,
            "Expected `mask` to be a bool tensor, True where the key is visible, but got torch.float32.",
        ),
        (
            lambda: F.softmax_jacobian_norm(S, 1.0, mask=torch.ones(2, 5, dtype=torch.bool)),
            ValueError,
            "Expected `mask` to be broadcastable to the shape of `scores`, (2, 4), but got shape (2, 5).",
        ),
        (
            lambda: F.softmax_jacobian_norm(S, 0.0),
            ValueError,
            "Expected `temperature` to be positive and finite, but got 0.0.",
        ),
        (lambda: F.softmax_jacobian_norm(S, (1.0, -1)), ValueError, "Expected `temperature` to be positive and finite"),
        (
            lambda: F.softmax_jacobian_norm(S, math.inf),
            ValueError,
            "Expected `temperature` to be positive and finite, but got inf.",
        ),
        (
            lambda: F.softmax_jacobian_norm(S, []),
            ValueError,
            "Expected `temperature` to hold at least one number, but got none.",
        ),
        (
            lambda: F.softmax_jacobian_norm(S, "1"),
            TypeError,
            "Expected `temperature` to hold numbers, but got '1' of type str.",
        ),
        (
            lambda: F.softmax_jacobian_norm(S, True),
            TypeError,
            "Expected `temperature` to hold numbers, but got True of type bool.",
        ),
        (
            lambda: F.softmax_jacobian_norm(S, 1.0, norm="nuclear"),
            ValueError,
            "Expected `norm` to be one of 'spectral', 'frobenius', 'max', but got 'nuclear'.",
        ),
        (
            lambda: F.finite_difference_sensitivity(S, 1.0, 0),
            ValueError,
            "Expected `epsilon` to be positive and finite, but got 0.0.",
        ),
        (
            lambda: F.attention_entropy(W, normalize=1),
            TypeError,
            "Expected `normalize` to be True or False, but got 1 of type int.",
        ),
        (lambda: F.active_share(W, min_keys=0), ValueError, "Expected `min_keys` to be at least 1, but got 0."),
        (
            lambda: F.score_spread(S, min_keys=2.5),
            TypeError,
            "Expected `min_keys` to be an integer, but got 2.5 of type float.",
        ),
        (
            lambda: F.normalizer_jacobian_bound(W, S[:, :3], torch.ones(2)),
            ValueError,
            "Expected `derivative` to have as many keys as `weights`, 4, but got 3: shape (2, 3).",
        ),
        (
            lambda: selection_statistics(W, X, 1, want=["ratio", "nothing"]),
            ValueError,
            "Expected `want` to hold names out of ('ratio', 'radius'",
        ),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(text), str(caught.value)


@pytest.mark.parametrize("mask", [torch.ones(3, 1, dtype=torch.bool), torch.ones(1, dtype=torch.bool).expand(20)])
def test_a_mask_that_repeats_over_the_keys_counts_every_key(mask):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 20, generator=generator).softmax(-1)
    vectors = torch.randn(3, 20, 4, generator=generator)
    full = torch.ones(3, 20, dtype=torch.bool)
    for function in (
        lambda m: F.attention_entropy(weights, mask=m, normalize=True),
        lambda m: F.separability(weights, vectors, 5, mask=m).ratio,
        lambda m: F.top_n_distance(weights, vectors, 5, mask=m).expected_paper,
        lambda m: F.dispersion_constants(weights, mask=m).lower,
        lambda m: F.score_spread(weights.log(), mask=m),
    ):
        assert torch.equal(function(mask), function(full))


def test_rows_settled_on_their_contenders_are_as_those_settled_whole() -> None:
    """Weights that float32 all but loses, and near ties: the ratio alone takes the short way, with the others not."""
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 0.1, 1e-6):
        for lost in (True, False):
            for _ in range(100):
                n = int(torch.randint(4, 9, (), generator=generator))
                exponents = torch.rand(8, n, generator=generator)
                exponents = 36 + 10 * exponents if lost else exponents * torch.logspace(-7, 1, 8)[:, None]
                exponents[:, 0] = 0
                weights = (10.0**-exponents).sort(descending=True).values
                vectors = (torch.randn(n, 2, generator=generator) * 10).round() / 10 * size
                whole = F.separability(weights, vectors, (1, 3)).ratio
                short = selection_statistics(weights, vectors, (1, 3), want=["ratio"])["ratio"]
                torch.testing.assert_close(short, whole, rtol=0, atol=1e-6, equal_nan=True)
