"""Every per-row value against the loop oracle, for the kinds of rows on which shortcuts fail."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import reference
import torch

from attnmon import functional as F
from attnmon.metrics import jacobian_norms, selection_statistics
from attnmon.metrics._group import _Group
from attnmon.metrics._walk import consecutive_distances

KINDS = (
    "uniform", "one_hot", "tied", "all_negative", "sink", "random", "near_coincident", "identical_keys", "duplicates",
    "opposed", "two_leaders",
)  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def make_row(kind: str, n: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, n, sum(map(ord, kind))])
    scores, vectors = rng.normal(size=n), rng.normal(size=(n, d))
    if kind in ("uniform", "near_coincident", "identical_keys"):
        scores[:] = 0.0
    if kind == "one_hot":
        scores[1 % n] += 200.0
    if kind == "tied":
        scores = np.round(scores)
    if kind == "all_negative":
        scores -= 50.0
    if kind == "sink":
        scores[0] += 18.0
    if kind == "near_coincident":
        vectors = rng.normal(size=d) + 1e-3 * vectors
        scores = 1e-3 * rng.normal(size=n)
    if kind == "identical_keys":
        vectors[:] = vectors[0]
    if kind == "duplicates":
        scores, vectors = np.resize(scores[: max(n // 2, 1)], n), np.resize(vectors[: max(n // 2, 1)], (n, d))
    if kind == "opposed":
        vectors[1::2] = -vectors[: n // 2 * 2 : 2][: len(vectors[1::2])]
    if kind == "two_leaders":
        scores[:2] = 12.0
    return scores, vectors


def close(got: torch.Tensor, want: float, dtype: torch.dtype) -> bool:
    value = float(got)
    if math.isinf(want) or math.isnan(want):
        return value == want or (math.isnan(value) and math.isnan(want))
    return abs(value - want) <= TOLERANCE[dtype] * max(abs(want), 1e-3)


def stored(kind: str, n: int, d: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    scores, vectors = make_row(kind, n, d, seed)
    s = torch.tensor(scores).to(dtype)
    return s, torch.softmax(torch.tensor(scores), -1).to(dtype), torch.tensor(vectors).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("n", [2, 3, 9, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_selection_quantities(kind: str, n: int, dtype: torch.dtype) -> None:
    _, weights, vectors = stored(kind, n, 5, dtype)
    sizes = tuple(range(1, n)) if n < 10 else (1, 4, n - 2, n - 1)
    fields = F.top_n_distance(weights, vectors, sizes)._asdict() | F.separability(weights, vectors, sizes)._asdict()
    limits = F.separability_bounds(weights, vectors, sizes)._asdict()
    for column, size in enumerate(sizes):
        a, x = weights.numpy(), vectors.numpy()
        want = reference.distances(a, x, size) | reference.separability(a, x, size)
        for name, value in want.items():
            got = fields[name][column]
            assert close(got, value, dtype), f"{name}@{size}: {float(got)!r} is not {value!r}"
            if name in ("ratio", "precision"):
                assert float(got) == float(torch.tensor(value, dtype=dtype)), f"{name}@{size} is not exact"
        limit = reference.bounds(a, x, size)
        for name, value in limit.items():
            # r = 0 in exact arithmetic may be a rounding error of the last digit in floating point
            if name == "lower" and value < -1e4:
                assert limits[name][column] < -1e3
                continue
            assert close(limits[name][column], value, dtype), f"{name}@{size}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_near_coincident_keys_are_told_apart_exactly(dtype: torch.dtype) -> None:
    for seed in range(12):
        gap = 10.0 ** -(seed % 6 + 2 if dtype == torch.float64 else seed % 4 + 2)
        rng = np.random.default_rng(seed)
        vectors = torch.tensor(rng.normal(size=6) + gap * rng.normal(size=(14, 6))).to(dtype)
        weights = torch.softmax(torch.tensor(gap * rng.normal(size=14) * (seed % 2)), -1).to(dtype)
        got = F.separability(weights, vectors, (1, 3, 13))
        for column, size in enumerate((1, 3, 13)):
            want = reference.separability(weights.numpy(), vectors.numpy(), size)
            assert float(got.ratio[column]) == pytest.approx(want["ratio"], abs=1e-7), (seed, size)
            assert float(got.precision[column]) == pytest.approx(want["precision"], abs=1e-7), (seed, size)


def test_undecided_rows_go_through_the_exact_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("attnmon.metrics.separability")  # the package's name of it is the function
    seen: list[str] = []
    for name in ("_counts_again", "_decide"):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=function: seen.append(n) or f(*a))
    for dtype in (torch.float32, torch.float64):
        weights = torch.full((6,), 1 / 6, dtype=dtype)
        vectors = torch.ones(6, 4, dtype=dtype)
        result = F.separability(weights, vectors, (2, 3))
        assert result.ratio.tolist() == [0.0, 0.0]
        assert result.precision.tolist() == pytest.approx([2 / 6, 3 / 6])
        assert set(seen) == {"_counts_again", "_decide"}
        seen.clear()


# rows whose answer hangs on what float64 rounds away, or on what float32 has no exponent for
HARD = {
    "zero sink, tiny rest": ([0.9, 0.1, 1e-18], [[0.0], [1.0], [1.0]], 1),
    "tiny sink, tiny rest": ([0.9, 0.1, 1e-18], [[1e-18], [1.0], [3.0]], 1),
    "one unit in the last place apart": ([0.5, 0.5], [[1.0, 1.0], [1 + 2**-23, 1.0]], 1),
    "weights nearly equal": ([0.2, 0.2 + 2e-8, 0.2], [[1.0, 1.0]] * 3, 1),
    "zero sink, underflow": ([1.0, 1e-24], [[0.0], [1.0]], 1),
    "one huge key": ([0.3, 0.3, 0.2, 0.2], [[0.0], [1.0], [1e18], [-1.0]], 2),
    "lattice": (
        [1 / 11] * 11,
        [[2 * int(sign) - 1 for sign in f"{row:04b}"] for row in (5, 2, 5, 9, 9, 0, 6, 12, 6, 3, 9)],
        10,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("kind", HARD)
def test_rows_that_rounding_would_decide(kind: str, dtype: torch.dtype) -> None:
    weights, vectors, size = (torch.tensor(v, dtype=dtype) if isinstance(v, list) else v for v in HARD[kind])
    got = F.separability(weights, vectors, size)
    want = reference.separability(weights.double().numpy(), vectors.double().numpy(), size)
    assert float(got.ratio) == pytest.approx(want["ratio"], abs=1e-7)
    assert float(got.precision) == pytest.approx(want["precision"], abs=1e-7)
    assert float(got.radius) == pytest.approx(want["radius"], rel=1e-6, abs=1e-20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_rows_of_zero_sinks_and_lattices(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for trial in range(60):
        n = int(rng.integers(4, 14))
        lattice = trial % 2 == 1
        vectors = rng.choice([-1.0, 0.0, 1.0], size=(n, 3)) if lattice else rng.normal(size=(n, 3))
        if trial % 4 == 0:
            vectors[0] = 0.0
        # on a lattice of widely different weights, distances differ by less than 30 digits can tell
        scores = rng.normal(size=n) * rng.choice([0.0, 1.0] if lattice else [0.0, 3.0, 20.0, 40.0])
        scores[0] += 0.0 if lattice else rng.choice([0.0, 30.0])
        weights = torch.softmax(torch.tensor(scores, dtype=dtype), -1)
        stored_vectors = torch.tensor(vectors, dtype=dtype)
        sizes = sorted({1, 2, n // 2, n - 1})
        got = F.separability(weights, stored_vectors, sizes)
        for column, size in enumerate(sizes):
            want = reference.separability(weights.double().numpy(), stored_vectors.double().numpy(), size)
            assert float(got.ratio[column]) == pytest.approx(want["ratio"], abs=1e-7), (trial, size)


def test_an_answer_does_not_hang_on_what_else_is_asked() -> None:
    weights = torch.tensor([0.5, 0.5, 4e-21, 1e-21, 1e-21], dtype=torch.float64)
    vectors = torch.tensor([[-1.0], [1.0], [1.0], [1.0], [-1.0]], dtype=torch.float64)  # the leaders cancel
    assert float(F.separability(weights, vectors, 3).radius) == pytest.approx(3e-21, rel=1e-9)
    assert float(F.separability(weights, vectors, (1, 3)).radius[1]) == pytest.approx(3e-21, rel=1e-9)
    bounds = F.separability_bounds(weights, vectors, (1, 3)).lower[1], F.separability_bounds(weights, vectors, 3).lower
    assert float(bounds[0]) == pytest.approx(float(bounds[1]), rel=1e-9)

    generator = torch.Generator().manual_seed(0)  # crowds of keys that differ in their last digits, row by row
    base = torch.randn(64, generator=generator, dtype=torch.float64)
    crowd = base * (1 + torch.randint(-2, 3, (200, 64), generator=generator) * 2.0**-50)
    rows = (torch.randint(0, 3, (30, 200), generator=generator) * 1e-14).double().softmax(-1)
    together = F.separability(rows, crowd, (1, 5))
    for row in (0, 7, 29):
        alone = F.separability(rows[row], crowd, (1, 5))
        for field, value in alone._asdict().items():
            torch.testing.assert_close(getattr(together, field)[row], value, rtol=1e-12, atol=0)


def test_float32_vectors_whose_squares_underflow() -> None:
    vectors = torch.tensor([[0.0], [1.0], [3.0]])
    for size in (1e-24, 1e-30, 1e15):
        got = F.separability(torch.tensor([0.6, 0.3, 0.1]), vectors * size, 1)
        assert (float(got.ratio), float(got.precision)) == (1.0, 1.0)
        assert float(got.radius) == pytest.approx(0.3 * size, rel=1e-5)


def test_radius_of_exactly_zero() -> None:
    vectors = torch.tensor([1.0, 1, 1, -1, -1, 1], dtype=torch.float64)[:, None]
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    assert F.separability(weights, vectors, 5).radius == 0
    assert F.separability_bounds(weights, vectors, 5).lower == -math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("kind", KINDS)
def test_row_quantities(kind: str, dtype: torch.dtype) -> None:
    for n in (1, 2, 9, 40):
        scores, weights, _ = stored(kind, n, 2, dtype)
        s, a = scores.double().numpy(), weights.numpy()
        entropy = reference.entropy(a)
        assert close(F.attention_entropy(weights), entropy, dtype)
        assert close(F.attention_entropy(weights, normalize=True), entropy / math.log(n) if n > 1 else math.nan, dtype)
        assert close(F.effective_keys(weights), math.exp(entropy), dtype)
        assert close(F.active_share(weights, min_keys=9), math.exp(entropy) / n if n >= 9 else math.nan, dtype)
        assert close(F.participation_ratio(weights), reference.participation(a), dtype)
        assert close(F.score_spread(scores, 2.0), reference.spread(s) / 2 if n >= 8 else math.nan, dtype)
        assert close(F.score_max(scores, 2.0), max(abs(s)) / 2, dtype)
        assert close(F.first_key_weight(weights), float(a[0]), dtype)
        low, high = F.dispersion_constants(weights)
        assert close(low, n * float(a.min()), dtype)
        assert close(high, n * float(a.max()), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("kind", KINDS)
def test_jacobian_norms(kind: str, dtype: torch.dtype) -> None:
    temperatures = (0.05, 0.5, 1.0, 8.0)
    for n in (1, 2, 3, 12, 33):
        scores = stored(kind, n, 2, dtype)[0]
        got = jacobian_norms(scores, temperatures, norms=("spectral", "frobenius", "max"))
        for column, temperature in enumerate(temperatures):
            for name, value in reference.jacobian(scores.numpy(), temperature).items():
                result = got[name][column]
                assert close(result, value, dtype), (
                    f"{name} at T = {temperature}, n = {n}: {float(result)} is not {value}"
                )


def test_spectral_norm_of_clustered_rows() -> None:
    rng = np.random.default_rng(0)
    rows = torch.full((40, 60), -3.0, dtype=torch.float64)
    for row in rows:
        size = int(rng.integers(1, 60))
        row[:size] = torch.tensor(-0.5 * rng.random() + 1e-2 * rng.normal(size=size))
        row[0], row[1] = 6 * rng.random(), 0.3 * rng.random()
    a = torch.softmax(rows, -1)
    want = torch.linalg.eigvalsh(torch.diag_embed(a) - a[:, :, None] * a[:, None, :])[:, -1]
    for dtype in (torch.float64, torch.float32):
        got = F.softmax_jacobian_norm(rows.to(dtype), 1.0).double()
        assert ((got - want).abs() <= TOLERANCE[dtype] / 100 * want.clamp_min(1e-3)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("kind", ["uniform", "one_hot", "tied", "sink", "random"])
def test_sensitivity(kind: str, dtype: torch.dtype) -> None:
    temperatures, epsilons = (0.02, 1.0, 8.0), (1e-3, 0.1, 10.0)
    for n in (1, 2, 11):
        scores = stored(kind, n, 2, dtype)[0]
        got = F.finite_difference_sensitivity(
            scores, temperatures, epsilons, generator=torch.Generator().manual_seed(3)
        )
        draw = torch.randn(scores.shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
        for i, temperature in enumerate(temperatures):
            for j, epsilon in enumerate(epsilons):
                want = reference.sensitivity(scores.numpy(), draw.numpy(), temperature, epsilon)
                assert close(got[i, j], want, dtype), (temperature, epsilon, n, float(got[i, j]), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_grouped_masked_rows(dtype: torch.dtype) -> None:
    """The training form: rows of a group share their vectors, each row sees its own keys."""
    torch.manual_seed(5)
    n, rows = 30, 5
    vectors = torch.randn(2, 3, 1, n, 7).to(dtype)
    mask = torch.rand(2, 3, rows, n) < 0.5
    mask[0, 0, 0] = False
    mask[0, 0, 1] = torch.arange(n) == 4
    mask[:, :, 2] = torch.arange(n) < 12
    scores = 3 * torch.randn(2, 3, rows, n, dtype=torch.float64)
    weights = torch.nan_to_num(torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)).to(dtype)
    sizes = (1, 4, 9)
    spoilt = weights.masked_fill(~mask, torch.nan)
    got = F.top_n_distance(spoilt, vectors, sizes, mask=mask)._asdict()
    got |= F.separability(spoilt, vectors, sizes, mask=mask)._asdict()
    got |= F.separability_bounds(spoilt, vectors, sizes, mask=mask)._asdict()
    for index in np.ndindex(2, 3, rows):
        seen = mask[index]
        a, x = weights[index][seen].numpy(), vectors[index[:2]][0][seen].numpy()
        for column, size in enumerate(sizes):
            if len(a) <= size:
                assert all(math.isnan(value[index][column]) for value in got.values())
                continue
            want = reference.distances(a, x, size) | reference.separability(a, x, size) | reference.bounds(a, x, size)
            for name, value in want.items():
                assert close(got[name][index][column], value, dtype), (name, index, size)


def test_many_keys_and_large_selections_agree_with_double() -> None:
    """Sizes at which other code runs: two-round selection, and s_N by a product over all keys."""
    torch.manual_seed(0)
    weights = torch.softmax(2 * torch.randn(2, 6, 700), -1)
    vectors = torch.randn(2, 1, 700, 16)
    for sizes in ((1, 5, 20), (100, 3)):
        single = selection_statistics(weights, vectors, sizes, want=("ratio", "radius", "distance", "expected_paper"))
        double = selection_statistics(
            weights.double(), vectors.double(), sizes, want=("ratio", "radius", "distance", "expected_paper")
        )
        for name, value in single.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), double[name], rtol=1e-4, atol=1e-7)
        a, x = weights[1, 3].numpy(), vectors[1, 0].numpy()
        want = reference.separability(a, x, sizes[0])
        assert float(single["ratio"][1, 3, 0]) == pytest.approx(want["ratio"])
        assert float(single["radius"][1, 3, 0]) == pytest.approx(want["radius"], rel=1e-4)


def test_selection_in_float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that runs on CUDA, where no entry is looked for and computed again."""
    import attnmon.metrics._blocks as module

    def block(weights, vectors, sizes, mask, fields, result):
        group = module._Group(vectors.double(), direct=False)
        made = module._Block(weights.double(), group, mask, sizes)
        return {k: torch.where(made.defined, v, torch.nan).to(result) for k, v in fields(made).items()}

    kinds = ("uniform", "one_hot", "tied", "sink", "random", "near_coincident", "identical_keys", "duplicates")
    rows = [stored(kind, 12, 4, torch.float32) for kind in kinds]
    monkeypatch.setattr(module, "_grouped", block)
    mask = torch.ones(12, dtype=torch.bool)
    mask[3] = False
    for _, weights, vectors in rows:
        for visible in (None, mask):
            got = selection_statistics(weights, vectors, (1, 4), mask=visible, want=F.TopNDistances._fields)
            got |= selection_statistics(weights, vectors, (1, 4), mask=visible, want=F.Separability._fields)
            keep = slice(None) if visible is None else visible
            a, x = weights[keep].numpy(), vectors[keep].numpy()
            for column, size in enumerate((1, 4)):
                want = reference.distances(a, x, size) | reference.separability(a, x, size)
                for name, value in want.items():
                    assert close(got[name][column], value, torch.float32), (name, size)


@pytest.mark.parametrize("dense", [True, False], ids=["all pairs kept", "row by row"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_every_n_in_one_walk(dtype: torch.dtype, dense: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    groups, rows, n, d = 3, 12, 30, 5
    weights = (2 * torch.randn(groups, rows, n, generator=generator)).softmax(-1)
    vectors = torch.randn(groups, n, d, generator=generator)
    vectors[1] = vectors[1, :1]  # a token that is repeated,
    weights[1] = (1e-4 * torch.randn(rows, n, generator=generator)).softmax(-1)  # and hardly told apart
    vectors[2] = vectors[2, :1] + 1e-4 * vectors[2]
    weights[2, ::2] = weights[1, ::2]
    weights, vectors = weights.to(dtype), vectors.to(dtype)
    causal = torch.arange(n) <= torch.arange(rows)[:, None] + 15
    for visible in (None, causal):
        mask = None if visible is None else visible.expand(groups, rows, n)
        found = consecutive_distances(weights, _Group(vectors, True, dense), mask, n)
        expected = F.top_n_distance(weights.double(), vectors.double()[:, None], range(1, n), mask=visible)
        for name, values in found.items():
            assert values[..., -1].isnan().all()  # no row sees more than n keys
            tolerance = {"rtol": 1e-9 if dtype == torch.float64 else 1e-4, "atol": 1e-12}
            torch.testing.assert_close(values[..., :-1].double(), getattr(expected, name), equal_nan=True, **tolerance)


def test_distances_made_row_by_row() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 40, 6, generator=generator, dtype=torch.float64)
    vectors[0, 20:] = vectors[0, :20] + 1e-9 * vectors[0, 20:]
    kept, made = _Group(vectors, True, True), _Group(vectors, True, False)
    index = torch.arange(40)[None]
    torch.testing.assert_close(made.distances_from(index), kept.distances_from(index), rtol=1e-7, atol=1e-15)
    torch.testing.assert_close(made.closest, kept.closest, rtol=1e-7, atol=0)
    torch.testing.assert_close(made.prefix(25).closest, kept.prefix(25).closest, rtol=1e-7, atol=0)


def test_a_nudge_beyond_the_exponential() -> None:
    scores = torch.tensor([0.0, -75 * 2**-10])
    got = F.finite_difference_sensitivity(scores, 2**-10, 0.0625, direction=torch.tensor([0.0, 1.0]))
    assert float(got) == pytest.approx(3.77910e-4, rel=1e-5)
