"""The overhead recipe times what it says, in turn, and its tables come out. No test looks at a time."""

from __future__ import annotations

import csv
import gc
import json
from pathlib import Path
from typing import Any

import _overhead
import _overhead_events
import _overhead_models
import numpy as np
import overhead as recipe
import pytest
import torch
from _overhead import Spread, Table, Variant
from _overhead_models import AttentionStack, Training, make_gpt2

from attnmon import watch
from attnmon.functional import attention_entropy

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "length": 64,
    "batch": 2,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "vocab_size": 64,
    "repeats": 2,
    "warmup": 1,
    "lengths": (32, 48),
    "rows": (4, 8),
    "heads": (1, 2),
    "top_n_counts": (1, 2),
    "temperature_counts": (1, 2),
    "event_samples": 2,
    "device": "cpu",
}


def training(precision: str = "fp32") -> Training:
    torch.manual_seed(0)
    return Training(make_gpt2(2, 2, 16, 64, 32, 0.0, CPU), torch.randint(64, (2, 32)), precision)


# -- the whole ------------------------------------------------------------------------------------------------------


def test_every_table_has_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "overhead.json"
    recipe.overhead(**SIZES, output=str(path))
    out = capsys.readouterr().out
    written = json.loads(path.read_text(encoding="utf-8"))
    assert f"torch {torch.__version__}" in out
    assert written["machine"]["device"] == "cpu"
    tables = written["tables"]
    rows = [[row[table["columns"][0]] for row in table["rows"]] for table in tables]
    assert rows == [
        ["no monitor", "monitor, not sampled", "monitor, sampled", "eager: entropy, top 20"],
        [
            "a sample, ms",
            "by the monitor's own clock, ms",
            "the same, % of the rest of its step",
            "its share of a run with one every 50 steps, %",
        ],
        ["fused forward", "entropy, first key", "and score max", "n x n weights by hand"],
        ["32", "48"],
        ["4", "8"],
        ["1", "2"],
        ["1", "2"],
        ["1", "2"],
        ["a layer's", "a layer's and each head's"],
    ]
    for table in tables:
        assert table["title"] in out
        for row in table["rows"]:
            for name in table["columns"][1:]:
                cell = row[name]
                numbers = list(cell.values()) if isinstance(cell, dict) else [cell]
                assert np.isfinite(numbers).all()
                assert numbers == sorted(numbers)  # low, median, high
    steps, _, every_row, *_, files = tables
    assert steps["rows"][0]["ratio to no monitor"] == 1
    assert steps["rows"][1]["extra memory, MiB"] == 0  # nothing is attached
    assert steps["rows"][2]["extra memory, MiB"] > 0
    assert every_row["rows"][1]["extra memory, MiB"] > 0
    plain, per_head = files["rows"]
    assert per_head["scalars a sample"] > plain["scalars a sample"] > 200
    assert per_head["scalars, MiB"] > 5 * plain["scalars, MiB"]


def test_parts_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    recipe.overhead("naive", **SIZES)
    out = capsys.readouterr().out
    assert "no monitor" in out
    assert "eager: entropy, top 20" in out
    for absent in ("monitor, sampled", "What a sample adds", "Every row", "Growth", "Event file"):
        assert absent not in out
    recipe.overhead("step, rows_all", **SIZES, precision="bf16")
    out = capsys.readouterr().out
    assert "precision bf16" in out
    assert "monitor, sampled" in out
    assert "Every row" in out
    for absent in ("eager", "Growth", "Event file"):
        assert absent not in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": "step,speed"}, "Expected `parts` to name some of step, rows_all, .*, but got 'speed'"),
        ({"parts": []}, "Expected `parts` to name some of .*, but got none"),
        ({"repeats": 1}, "Expected `repeats` to be at least 2, but got 1"),
        ({"warmup": 0}, "Expected `warmup` to be at least 1, but got 0"),
        ({"length": 31}, "Expected `length` to be at least 32, but got 31"),
        ({"lengths": []}, "Expected `lengths` to have at least one entry"),
        ({"heads": [4, 0]}, "Expected `heads` to be at least 1, but got 0"),
        ({"n_embd": 15}, "Expected `n_embd` to be a multiple of `n_head`, but got 15 and 2"),
        ({"rows": [65]}, "Expected `rows` to be at most `length`, 64, but got 65"),
        ({"top_n_counts": [13]}, "Expected `top_n_counts` to be below `length` / 5"),
        ({"threads": 0}, "Expected `threads` to be at least 1, but got 0"),
        ({"device": "bogus"}, "Expected `device` to be one that torch can use here, but 'bogus' failed"),
        ({"output": "table.txt"}, "Expected `output` to end in .md, .csv, .json, but got 'table.txt'"),
        ({"output": f"{__file__}/table.md"}, "Expected `output` to lie in a folder, but making"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "measure", lambda *_: pytest.fail("it got as far as measuring"))
    with pytest.raises(ValueError, match=message):
        recipe.overhead(**{**SIZES, **changes})


# -- what is timed --------------------------------------------------------------------------------------------------


def test_variants_take_turns_after_the_warm_up() -> None:
    calls: list[str] = []
    collects: list[bool] = []

    def run() -> None:
        calls.append("b")
        collects.append(gc.isenabled())

    a = Variant("a", lambda: calls.append("a"))
    b = Variant("b", run, lambda: calls.append("before"), lambda: calls.append("after"))
    c = Variant("c", lambda: calls.append("c"))
    pairs = _overhead.alternate(a, [b, c], 3, 2, CPU)
    around_b = ["before", "b", "after"]
    warm_up = ["a", "a", *around_b, *around_b, "c", "c"]
    forth, back = ["a", *around_b, "a", "c"], [*around_b, "a", "c", "a"]
    assert calls == warm_up + forth + back + forth
    assert {name: (len(pair.plain), len(pair.ours)) for name, pair in pairs.items()} == {"b": (3, 3), "c": (3, 3)}
    assert collects == [True, True, False, False, False]  # never while the clock runs
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_pairs_not_medians_are_compared() -> None:
    pairs = _overhead.Pairs([1.0, 2.0, 4.0], [1.5, 3.0, 6.0])
    assert pairs.ratio() == Spread(1.5, 1.5, 1.5)
    assert pairs.extra_ratio() == Spread(0.5, 0.5, 0.5)
    assert pairs.extra() == Spread(750.0, 1000.0, 1500.0)
    assert pairs.milliseconds() == Spread(2250.0, 3000.0, 4500.0)


def test_sampled_steps_are_sampled_and_the_others_are_not() -> None:
    train = training()
    watching, idle = watch(train.model, every_n_steps=2, alerts=False), watch(train.model, every_n_steps=recipe.NEVER)
    ours = _overhead_models.sampled("ours", watching, train.step)
    never = _overhead_models.unsampled("never", idle, train.step)
    seen = []
    for _ in range(3):
        ours()
        never()
        seen.append((watching.latest.step, idle.latest.step))
    assert seen == [(0, 0), (2, 0), (4, 0)]
    assert watching.step_count == 6
    assert idle.step_count == 3
    assert not train.model._forward_hooks
    _overhead_models.check_measured([watching], 2)
    with pytest.raises(RuntimeError, match="Expected the monitor to measure 3 layers, but it measured 2"):
        _overhead_models.check_measured([watching], 3)
    with pytest.raises(RuntimeError, match="measured nothing"):
        _overhead_models.check_measured([watch(train.model)], 2)


def test_by_hand_is_what_the_monitor_measures() -> None:
    train = training()
    train.materialise()
    asked = {"rows": "all", "sequences": 2, "quantities": ["entropy"], "alerts": False}
    with watch(train.model, every_n_steps=1, **asked) as monitor:
        by_hand = train.step_by_hand()
        snapshot = monitor.step()
    train.fuse()
    for layer, figures in enumerate(by_hand):
        np.testing.assert_allclose(figures[0], snapshot.values["entropy"][layer], rtol=1e-4)
    weights = torch.rand(2, 3, 8, 8).tril().softmax(-1)
    entropy, top = _overhead_models.figures_by_hand(weights)
    torch.testing.assert_close(entropy, attention_entropy(weights).mean(dim=(0, 2)))
    torch.testing.assert_close(top, torch.ones(3))  # of 8 keys the top 20 are all


def test_the_stack_runs_the_fused_kernel_alone() -> None:
    torch.manual_seed(0)
    net = AttentionStack((2, 3, 16, 4), 2, CPU, torch.float32, trains=True)
    query, key, value = net.inputs
    torch.testing.assert_close(
        net(), torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    )
    net.forward_and_backward()
    assert all(tensor.grad is None for tensor in net.inputs)
    net.by_hand()
    assert not list(net.parameters())


def test_peak_memory_is_of_the_run_alone() -> None:
    kept = []

    def run() -> None:
        first = torch.ones(256, 1024)
        second = first + 1  # both at once: 2 MiB
        del first
        kept.append(second)
        torch.ones(128, 1024)

    mib = 2**20
    assert abs(_overhead.peak_memory(Variant("run", run), CPU) - 2 * mib) < mib // 100
    assert abs(_overhead.peak_memory(Variant("run", run, before=run), CPU) - 2 * mib) < mib // 100
    assert _overhead.peak_memory(Variant("nothing", lambda: None), CPU) == 0


def test_every_byte_of_an_event_file_is_counted(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    train = training()
    writer = SummaryWriter(str(tmp_path))
    with watch(train.model, every_n_steps=1, alerts=False, writer=writer) as monitor:
        for _ in range(2):
            train.step()
            snapshot = monitor.step()
    writer.close()
    (path,) = tmp_path.iterdir()
    sizes = _overhead_events.record_sizes(path)
    assert sum(map(sum, sizes.values())) == path.stat().st_size
    assert len(sizes["scalar"]) == 2 * (len(snapshot.scalars()) + 1)  # and the bytes written
    assert len(sizes["image"]) == 2 * len(snapshot.values)
    assert len(sizes["tab"]) == 2
    assert sizes["tab"][1] < sizes["tab"][0]
    assert len(sizes["other"]) >= 2  # the file's version and the arrangement


# -- how it is shown ------------------------------------------------------------------------------------------------


def test_tables_are_written(tmp_path: Path) -> None:
    table = Table("Title, L = 8", ("step", "ms", "keys"), [("plain", Spread(1.0, 1234.5, 0.12345), 7)])
    facts = {"device": "cpu", "torch": "2"}
    for ending in _overhead.FORMATS:
        _overhead.write_tables(tmp_path / f"t{ending}", facts, [table])
    assert (tmp_path / "t.md").read_text(encoding="utf-8") == (
        "device cpu, torch 2\n\n**Title, L = 8**\n\n"
        "| step | ms | keys |\n| --- | --- | --- |\n| plain | 1234 (1 to 0.123) | 7 |\n"
    )
    (line,) = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["tables"][0]["rows"]
    assert line == {"step": "plain", "ms": {"low": 1.0, "median": 1234.5, "high": 0.12345}, "keys": 7}
    with (tmp_path / "t.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["column"] for line in lines] == ["ms", "keys"]
    assert [line["value"] for line in lines] == ["1234.5", "7"]
    assert [line["upper_quartile"] for line in lines] == ["0.12345", ""]
