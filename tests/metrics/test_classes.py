"""One harness for every metric class: its function, merging, pickling, half precision, and its counts."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from attnmon import functional as F
from attnmon.metrics import AttentionEntropy, SeparabilityRatio, SoftmaxJacobianNorm, TopNDistance

HEADS = 3


@dataclass
class Case:
    name: str
    make: Callable[[], Any]
    function: Callable[..., Tensor]  # of one batch, per row
    columns: int | None
    vectors: bool = False
    scores: bool = False


def _selection(function: Callable[..., Any], field: str, sizes: Any) -> Callable[..., Tensor]:
    return lambda w, x, mask: getattr(function(w, x[:, :, None], sizes, mask=mask), field)


CASES = [
    Case("entropy", lambda: AttentionEntropy(HEADS), lambda w, mask: F.attention_entropy(w, mask=mask), None),
    Case(
        "entropy_normalized",
        lambda: AttentionEntropy(HEADS, normalize=True),
        lambda w, mask: F.attention_entropy(w, mask=mask, normalize=True),
        None,
    ),
    Case(
        "separability", lambda: SeparabilityRatio(HEADS), _selection(F.separability, "ratio", (5, 10)), 2, vectors=True
    ),
    Case(
        "separability_one",
        lambda: SeparabilityRatio(HEADS, top_n=2),
        _selection(F.separability, "ratio", 2),
        None,
        vectors=True,
    ),
    Case(
        "distance",
        lambda: TopNDistance(HEADS, top_n=(1, 4, 8)),
        _selection(F.top_n_distance, "distance", (1, 4, 8)),
        3,
        vectors=True,
    ),
    Case(
        "jacobian",
        lambda: SoftmaxJacobianNorm(HEADS, temperature=(0.5, 1.0)),
        lambda s, mask: F.softmax_jacobian_norm(s, (0.5, 1.0), mask=mask),
        2,
        scores=True,
    ),
    Case(
        "jacobian_frobenius",
        lambda: SoftmaxJacobianNorm(HEADS, temperature=2.0, norm="frobenius"),
        lambda s, mask: F.softmax_jacobian_norm(s, 2.0, mask=mask, norm="frobenius"),
        None,
        scores=True,
    ),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def batch(case: Case, seed: int, rows: int = 6, n: int = 24, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(2, HEADS, rows, n, generator=generator)
    mask = torch.rand(2, 1, rows, n, generator=generator) < 0.5
    mask[..., 0, :] = torch.arange(n) < 5  # too few keys for the larger N
    mask[..., 1, :] = torch.arange(n) < 1
    mask[0, :, 2] = False
    given = {"scores": scores} if case.scores else {"weights": torch.nan_to_num(torch.softmax(scores, -1)).to(dtype)}
    given |= {"vectors": torch.randn(2, HEADS, n, 7, generator=generator).to(dtype)} if case.vectors else {}
    return given | {"mask": mask}


def expected(case: Case, *batches: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, standard error, rows used and rows skipped from the function's values."""
    rows = torch.cat([case.function(*b.values()).double().transpose(0, 1).flatten(1, 2) for b in batches], 1)
    used = (~rows.isnan()).sum(1)
    mean = rows.nanmean(1)
    deviation = torch.stack(
        [
            torch.stack([c[~c.isnan()].std() for c in head.unbind(-1)]) if head.dim() > 1 else head[~head.isnan()].std()
            for head in rows
        ]
    )
    return mean, deviation / used.sqrt(), used, rows.shape[1] - used


def check(metric: Any, case: Case, *batches: dict[str, Tensor]) -> None:
    mean, error, used, skipped = expected(case, *batches)
    shape = (HEADS,) if case.columns is None else (HEADS, case.columns)
    value = metric.compute()
    assert value.shape == shape
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, mean)
    torch.testing.assert_close(metric.standard_error(), error)
    assert torch.equal(metric.rows_used, used)
    assert torch.equal(metric.rows_skipped, skipped)


@every
def test_class_equals_function(case: Case) -> None:
    metric, first, second = case.make(), batch(case, 0), batch(case, 1, rows=4)
    metric.update(**first)
    check(metric, case, first)
    metric.update(**second)
    check(metric, case, first, second)
    assert metric.rows_skipped.max() > 0
    assert (metric.rows_used + metric.rows_skipped == 2 * (6 + 4)).all()
    metric.reset()
    metric.update(**second)
    check(metric, case, second)


@every
def test_split_updates_equal_one(case: Case) -> None:
    whole, parts, given = case.make(), case.make(), batch(case, 2)
    whole.update(**given)
    for row in range(6):
        parts.update(**{k: v if k == "vectors" else v[:, :, row : row + 1] for k, v in given.items()})
    torch.testing.assert_close(parts.compute(), whole.compute())
    torch.testing.assert_close(parts.standard_error(), whole.standard_error())
    assert torch.equal(parts.rows_used, whole.rows_used)


@every
def test_forward_returns_the_batch(case: Case) -> None:
    metric, first, second = case.make(), batch(case, 0), batch(case, 1)
    torch.testing.assert_close(metric(**first), expected(case, first)[0])
    torch.testing.assert_close(metric(**second), expected(case, second)[0])
    check(metric, case, first, second)


@every
def test_two_ranks_merge_by_rows(case: Case) -> None:
    """Ranks with unequal data weigh by their rows, however they are brought together."""
    first, second = batch(case, 0, rows=9), batch(case, 1, rows=3)
    ranks = [case.make(), case.make()]
    ranks[0].update(**first)
    ranks[1].update(**second)

    merged = copy.deepcopy(ranks[0])
    merged.merge_state(ranks[1])
    check(merged, case, first, second)

    # what torchmetrics does across processes, with the gathering replaced
    states = {name: [getattr(r, name).clone() for r in ranks] for name in ranks[0]._defaults}

    def gather(tensor: Tensor, group: Any) -> list[Tensor]:
        name = next(name for name in states if tensor is getattr(ranks[0], name))
        return states[name]

    ranks[0].dist_sync_fn = gather
    ranks[0].distributed_available_fn = lambda: True
    check(ranks[0], case, first, second)
    assert torch.equal(ranks[0].total, states["total"][0])  # its own state is what it was


@every
def test_pickle_and_state_dict(case: Case) -> None:
    metric, first, second = case.make(), batch(case, 0), batch(case, 1)
    metric.update(**first)
    loaded = pickle.loads(pickle.dumps(metric))
    loaded.update(**second)
    check(loaded, case, first, second)
    metric.persistent(True)
    restored = case.make()
    restored.load_state_dict(metric.state_dict())
    assert torch.equal(restored.total, metric.total)


@every
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float32])
def test_casting_the_owner_leaves_the_states(case: Case, cast: torch.dtype) -> None:
    owner = nn.ModuleDict({"metric": case.make(), "layer": nn.Linear(2, 2)})
    first, second = batch(case, 0), batch(case, 1)
    metric: Any = owner["metric"]
    metric.update(**first)
    owner.to(cast)
    metric.set_dtype(cast)
    metric.half(), metric.bfloat16()
    assert owner["layer"].weight.dtype == cast
    metric.update(**second)
    check(metric, case, first, second)
    metric.reset()
    assert metric.total.dtype == torch.float64
    assert metric.used.dtype == torch.int64


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input(case: Case, dtype: torch.dtype) -> None:
    if case.scores:
        given = batch(case, 3)
        given["scores"] = given["scores"].to(dtype)
    else:
        given = batch(case, 3, dtype=dtype)
    metric = case.make()
    metric.update(**given)
    check(metric, case, given)


@every
def test_before_the_first_update(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric = case.make()
        assert metric.compute().isnan().all()
        assert metric.standard_error().isnan().all()
        assert metric.rows_used.sum() == 0
        # an empty batch, and one in which no row counts
        given = batch(case, 0)
        metric.update(**{k: v[:0] for k, v in given.items()})
        given["mask"] = torch.zeros_like(given["mask"])
        metric.update(**given)
        assert metric.compute().isnan().all()
        assert (metric.rows_skipped == 12).all()


@every
def test_no_graph_is_kept(case: Case) -> None:
    metric, given = case.make(), batch(case, 0)
    for name in set(given) - {"mask"}:
        given[name].requires_grad_()
    metric.update(**given)
    assert not metric.total.requires_grad
    assert metric.total.grad_fn is None
    metric(**given)
    assert not metric.total.requires_grad


@every
def test_one_bad_row_is_left_out(case: Case) -> None:
    metric, given = case.make(), batch(case, 0)
    name = "scores" if case.scores else "weights"
    given["mask"][..., 3, 2] = True
    given[name][1, 0, 3, 2] = torch.nan
    metric.update(**given)
    check(metric, case, given)
    assert metric.compute().isfinite().all()


@every
def test_wrong_shapes(case: Case) -> None:
    metric, given = case.make(), batch(case, 0)
    name = "scores" if case.scores else "weights"
    with pytest.raises(
        ValueError, match=rf"Expected `{name}` to have 4 dimensions \(batch, num_heads, rows, n\), but got 3"
    ):
        metric.update(**{**given, name: given[name][0]})
    with pytest.raises(ValueError, match=rf"Expected `{name}` to have 3 heads in dimension 1, .* but got 2"):
        metric.update(**{**given, name: given[name][:, :2]})
    with pytest.raises(TypeError, match=rf"Expected `{name}` to be a floating-point tensor"):
        metric.update(**{**given, name: given[name].int()})
    if case.vectors:
        with pytest.raises(
            ValueError, match=r"Expected `vectors` to have shape \(batch, 3, n, d\), but got \(2, 2, 24, 7\)"
        ):
            metric.update(**{**given, "vectors": given["vectors"][:, :2]})
    assert metric.rows_used.sum() == 0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: AttentionEntropy(0), ValueError, "Expected `num_heads` to be at least 1, but got 0."),
        (lambda: AttentionEntropy(2.0), TypeError, "Expected `num_heads` to be an integer, but got 2.0 of type float."),
        (lambda: AttentionEntropy(2, normalize="yes"), TypeError, "Expected `normalize` to be True or False"),
        (lambda: SeparabilityRatio(2, top_n=()), ValueError, "Expected `top_n` to hold at least one integer"),
        (lambda: TopNDistance(2, top_n=(0, 5)), ValueError, "Expected `top_n` to be at least 1, but got 0."),
        (lambda: SoftmaxJacobianNorm(2, temperature=0), ValueError, "Expected `temperature` to be positive and finite"),
        (lambda: SoftmaxJacobianNorm(2, norm="l1"), ValueError, "Expected `norm` to be one of"),
    ],
)
def test_bad_arguments(make: Callable[[], Metric], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value).startswith(text)


def test_in_a_collection() -> None:
    collection = MetricCollection(
        {"plain": AttentionEntropy(HEADS), "normalized": AttentionEntropy(HEADS, normalize=True)}, compute_groups=False
    )
    given = batch(CASES[0], 0)
    collection.update(**given)
    values = collection.compute()
    assert not torch.equal(values["plain"], values["normalized"])


def test_standard_error_of_large_numbers() -> None:
    """The spread of rows far from 0 is not lost: sums of squares are float64."""
    metric = SoftmaxJacobianNorm(1, temperature=1.0)
    values = 1000 + torch.linspace(0, 1, 400, dtype=torch.float64)
    metric._add(values.reshape(1, 1, -1, 1))
    assert metric.standard_error().item() == pytest.approx((values.std() / 20).item(), rel=1e-6)
