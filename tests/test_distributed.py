"""Two processes: their sums meet, and neither waits for the other."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from toys import tiny_gpt2, token_batches

from attnmon import watch
from attnmon.metrics import AttentionEntropy, SeparabilityRatio, TopNDistance


def rank_batch(rank: int) -> dict[str, torch.Tensor]:
    """Batches of unequal size."""
    return token_batches(1, batch=1 + 2 * rank, length=70, seed=rank)[0]


def worker(rank: int, folder: str, job: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    try:
        torch.save(JOBS[job](rank), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def measure(rank: int) -> list:
    """Three steps: figures of both ranks' rows."""
    model, snapshots = tiny_gpt2(), []
    with watch(model, 1, rows="all", sequences=9, strict=True) as monitor:
        for _ in range(3):
            model(**rank_batch(rank)).loss.backward()
            snapshots.append(monitor.step().values)
    return snapshots


def all_padding(rank: int) -> list:
    """Rank 1 brings nothing but padding, then does not run the model at all."""
    model, snapshots = tiny_gpt2(), []
    batch = rank_batch(rank)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"]) if rank == 0 else torch.zeros_like(batch["input_ids"])
    with watch(model, 1, rows="all", sequences=9, strict=True) as monitor:
        for step in range(2):
            if rank == 0 or step == 0:
                model(**batch).loss.backward()
            snapshots.append(monitor.step().values)
    return snapshots


def one_fails(rank: int) -> list:
    """An error on one rank switches both off, with nobody left waiting."""
    import warnings

    from attnmon import window

    model, snapshots = tiny_gpt2(), []
    with warnings.catch_warnings(record=True) as caught, watch(model, 1) as monitor:
        warnings.simplefilter("always")
        for step in range(3):
            if rank == 1 and step == 1:
                window.measure = lambda *a, **k: 1 / 0
            model(**rank_batch(rank)).loss.backward()
            snapshots.append(monitor.step() is not None)
        return [*snapshots, sum("switched off" in str(w.message) for w in caught)]


def rank_rows(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and vectors of unequal numbers of rows."""
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(1 + rank, 3, 4 + rank, 12, generator=generator).softmax(-1)
    return weights, torch.randn(1 + rank, 3, 12, 5, generator=generator)


def update_classes(rows: list) -> list:
    """Mean, error and counts of the metric classes after these updates."""
    results = []
    for metric, take in [(AttentionEntropy(3), 1), (SeparabilityRatio(3, (2, 5)), 2), (TopNDistance(3, (2, 5)), 2)]:
        for update in rows:
            metric.update(*update[:take])
        results += [metric.compute(), metric.standard_error(), metric.rows_used, metric.rows_skipped]
    return results


def classes(rank: int) -> list:
    """torchmetrics sums over the ranks by itself."""
    return update_classes([rank_rows(rank)])


JOBS = {"measure": measure, "all_padding": all_padding, "one_fails": one_fails, "classes": classes}


def run(tmp_path, job: str) -> list:
    mp.spawn(worker, (str(tmp_path), job), nprocs=2)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]


def same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, layers in one.items():
        for layer, heads in layers.items():
            for a, b in zip(heads, other[name][layer], strict=True):
                assert a == pytest.approx(b, rel=1e-6, abs=1e-9) or (math.isnan(a) and math.isnan(b)), name


def single(batch: dict[str, torch.Tensor]) -> dict:
    model = tiny_gpt2()
    with watch(model, 1, rows="all", sequences=9, strict=True) as monitor:
        model(**batch).loss.backward()
        return monitor.step().values


def test_figures_are_those_of_one_process_that_saw_all_rows(tmp_path):
    first, second = run(tmp_path, "measure")
    together = {key: torch.cat([rank_batch(0)[key], rank_batch(1)[key]]) for key in ("input_ids", "labels")}
    expected = single(together)
    for step in range(3):
        same(first[step], expected)
        same(second[step], expected)


def test_a_rank_with_nothing_but_padding_and_one_without_a_forward(tmp_path):
    first, second = run(tmp_path, "all_padding")
    expected = single(rank_batch(0))
    for step in range(2):
        same(first[step], expected)
        same(second[step], expected)


def test_a_failure_on_one_rank_switches_both_off(tmp_path):
    first, second = run(tmp_path, "one_fails")
    assert first == [True, False, False, 1]
    assert second == [True, False, False, 0]  # the first process warns for all


def test_metric_classes_merge_over_ranks(tmp_path):
    expected = update_classes([rank_rows(0), rank_rows(1)])
    for results in run(tmp_path, "classes"):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)
