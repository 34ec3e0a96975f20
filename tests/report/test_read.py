"""What was written is read again: figures, warnings and the ends of alarms, from whatever the files have left."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from report.runs import Run, event_file
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from attnmon.alerts import AlertEngine, AlertRules, EntropyRise
from attnmon.records import metadata, tag_of
from attnmon.report import ReportError, read_run, write_report


def _add(writer: SummaryWriter, tag: str, value: object, step: int, content: bytes, plugin: str = "attnmon") -> None:
    summary = Summary()
    entry = summary.value.add(tag=tag, tensor=make_tensor_proto(value))
    entry.metadata.plugin_data.plugin_name = plugin
    entry.metadata.plugin_data.content = content
    entry.metadata.data_class = 2
    writer._get_file_writer().add_summary(summary, step)


def test_figures_are_where_they_were(plain):
    run = read_run(plain)
    section = run.sections["attn"]
    series = section.quantities["entropy_normalized"]
    assert (section.samples, section.steps, section.cadence, section.source) == (3, (0, 20), ((10, 0),), "train")
    assert series.steps.tolist() == [0, 10, 20]
    np.testing.assert_allclose(series.values[1], [[0.01, 0.02], [0.11, 0.12]], atol=1e-6)
    np.testing.assert_allclose(series.first, [[0.0, 0.01], [0.1, 0.11]], atol=1e-6)
    np.testing.assert_allclose(series.last, [[0.02, 0.03], [0.12, 0.13]], atol=1e-6)
    np.testing.assert_allclose(series.layer_means[:, 1], [0.105, 0.115, 0.125], atol=1e-6)
    assert series.low_step.tolist() == [[0, 0], [0, 0]]
    assert series.high_step.tolist() == [[20, 20], [20, 20]]
    assert series.furthest_step == 20
    assert (series.title, series.unit) == ("Normalised entropy", "H / log n")
    assert [(layer.number, layer.path, layer.heads, layer.temperature) for layer in section.layers.values()] == [
        (0, "h.0.attn", 2, 8.0), (1, "h.1.attn", 2, 8.0),
    ]  # fmt: skip
    assert section.cost["share_of_run"].values.tolist() == pytest.approx([0.001] * 3)
    assert run.loss is not None
    assert (run.loss.tag, run.loss.values.tolist()) == ("train/loss", [5, 4, 3])
    assert run.notes == section.notes == ()


def test_what_was_not_measured_is_nan_and_left_out_of_every_figure(tmp_path):
    run = Run(tmp_path)
    for step, first in ((0, math.nan), (10, 0.4), (20, 0.2), (30, math.nan)):
        run.sample(step, {"entropy_normalized": {0: [first, math.nan], 1: [0.5]}}, {"cross": "another kernel"})
    section = read_run(run.close()).sections["attn"]
    series = section.quantities["entropy_normalized"]
    assert series.first[0, 0] == pytest.approx(0.4)
    assert np.isnan(series.last[0, 0])  # not measured at the end: 0.2 is the figure of step 20
    assert (series.first_step[0, 0], series.last_step[0, 0], series.last_step[0, 1]) == (10, 20, -1)
    assert (series.low_step[0, 0], series.high_step[0, 0], series.low_step[0, 1]) == (20, 10, -1)
    assert np.isnan(series.first[0, 1])
    assert section.exists.tolist() == [[True, True], [True, False]]  # not measured is there, beyond the layer is not
    assert section.not_measured == {"cross": "another kernel"}


def _wave(step: int, layer: int, head: int) -> float:
    """Head 1 of layer 0 rises, recovers and rises again; head 0 of layer 1 rises and recovers; the others rest."""
    if (layer, head) == (0, 1):
        return 0.9 if 50 <= step < 120 or step >= 200 else 0.3
    if (layer, head) == (1, 0):
        return 0.95 if 80 <= step < 150 else 0.2
    return 0.4


@pytest.mark.parametrize("counted", [True, False])
def test_ends_of_alarms_are_the_engines_own(tmp_path, counted):
    run = Run(tmp_path, scalars=counted)
    engine, ends = run.engine, {}
    for step in range(0, 300, 10):
        before = engine.alarmed()["entropy_rise"]
        run.sample(step, {"entropy_normalized": {layer: [_wave(step, layer, h) for h in (0, 1)] for layer in (0, 1)}})
        for layer, heads in before.items():
            for head in set(heads) - set(engine.alarmed()["entropy_rise"].get(layer, ())):
                ends[layer, head] = step
    section = read_run(run.close()).sections["attn"]
    assert [(a.rule, a.layer, a.head, a.since, a.start, a.end) for a in section.alarms] == [
        ("entropy_rise", 0, 1, 50, 70, ends[0, 1]),
        ("entropy_rise", 1, 0, 80, 100, ends[1, 0]),
        ("entropy_rise", 0, 1, 200, 220, None),
    ]
    assert {place: status.under for place, status in section.status().items()} == {(0, 1): True, (1, 0): False}
    assert [alert["step"] for alert in section.alerts] == [70, 100, 220]


def test_ends_agree_with_the_engine_on_noise(tmp_path):
    """Many heads, all rules, noise around the limits: the heads under alarm are those of the engine."""
    noise = random.Random(3)
    run = Run(tmp_path)
    levels = [[noise.uniform(0.1, 0.6) for _ in range(8)] for _ in range(4)]
    for step in range(0, 600, 10):
        trouble = 200 <= step < 350 or step > 500
        figures = {
            layer: [
                level + (0.4 if trouble and head % 2 else 0.0) + noise.gauss(0, 0.03) for head, level in enumerate(row)
            ]
            for layer, row in enumerate(levels)
        }
        active = {layer: [0.1 * (1 - value) for value in row] for layer, row in figures.items()}
        run.sample(step, {"entropy_normalized": figures, "active_share": active})
    expected = {
        (rule, layer, head)
        for rule, layers in run.engine.alarmed().items() for layer, heads in layers.items() for head in heads
    }  # fmt: skip
    section = read_run(run.close()).sections["attn"]
    assert {(a.rule, a.layer, a.head) for a in section.alarms if a.end is None} == expected
    assert {rule for rule, _, _ in expected} == {"entropy_rise", "active_set"}
    assert any(alarm.end is not None for alarm in section.alarms)


def test_other_numbers_of_a_rule_are_not_taken_for_its_own(tmp_path):
    rules = AlertRules(entropy_rise=EntropyRise(share=0.5, leave_share=0.45, patience=1), active_set=None)
    run = Run(tmp_path, engine=AlertEngine(rules, patience=2), rules=rules)
    for step, value in enumerate([0.2, 0.2, 0.7, 0.7, 0.55, 0.55, 0.55]):
        run.sample(step, {"entropy_normalized": {0: [value, 0.2]}})
    assert run.engine.alarmed()["entropy_rise"] == {}
    (alarm,) = read_run(run.close()).sections["attn"].alarms
    assert alarm.end == 5  # after two samples below 0.565, whatever the leave level


def test_heads_warned_of_in_another_file_are_under_alarm(tmp_path):
    engine = Run(tmp_path / "lost").engine
    lost = Run(tmp_path / "lost", engine=engine)
    lost.samples((0, 10, 20, 30, 40), lambda step, layer, head: 0.2 if step < 10 else 0.9, {0: 1})
    resumed = Run(tmp_path / "kept", engine=engine)
    resumed.samples((50, 60, 70, 80), lambda step, layer, head: 0.2, {0: 1})
    (alarm,) = read_run(resumed.close()).sections["attn"].alarms
    assert (alarm.rule, alarm.severity, alarm.quantity, alarm.start, alarm.end) == ("entropy_rise", "watch", "", 50, 70)


def test_a_resumed_run_counts_the_last_time_of_each_step(tmp_path):
    """Died after step 50, resumed from step 30 in a second file: what came after 30 in the first is void."""
    first = Run(tmp_path, suffix=".a")
    first.samples((0, 10, 20, 30, 40, 50), lambda step, layer, head: 0.2 if step < 20 else 0.9, {0: 2})
    first.writer.add_scalar("loss", 9.0, 50)
    first.close()
    files = list(tmp_path.iterdir())
    second = Run(tmp_path, suffix=".b")
    second.samples((30, 40), lambda step, layer, head: 0.5, {0: 2})
    second.writer.add_scalar("loss", 1.0, 30)
    second.close()
    # Named by their second and suffix: the first file has to come first
    assert sorted(tmp_path.iterdir())[0] == files[0]
    run = read_run(tmp_path)
    section = run.sections["attn"]
    series = section.quantities["entropy_normalized"]
    assert series.steps.tolist() == [0, 10, 20, 30, 40]
    assert series.values[:, 0, 0].tolist() == pytest.approx([0.2, 0.2, 0.9, 0.5, 0.5])
    assert [alert["step"] for alert in section.alerts] == []  # the warning at 40 was of a future that did not come
    assert section.counts["entropy_rise"].steps.tolist() == [0, 10, 20, 30, 40]
    assert "resumed at step 30" in section.notes[0]
    assert len(run.files) == 2
    assert run.loss is not None
    assert run.loss.steps.tolist() == [30]


def test_of_a_step_that_comes_twice_the_last_counts(tmp_path):
    """Resumed at the very step at which it had stopped."""
    for suffix, steps, value in ((".a", (0, 10), 0.2), (".b", (10, 20), 0.4)):
        run = Run(tmp_path, suffix=suffix)
        run.samples(steps, lambda *_, value=value: value, {0: 2})
        run.close()
    section = read_run(tmp_path).sections["attn"]
    series = section.quantities["entropy_normalized"]
    assert series.steps.tolist() == [0, 10, 20]
    assert series.values[:, 0, 0].tolist() == pytest.approx([0.2, 0.4, 0.4])
    assert section.cost["seconds"].steps.tolist() == [0, 10, 20]


def test_a_resumed_run_under_a_trainers_own_name(tmp_path):
    """Scalars go by another numbering there, and resume at a step of their own."""
    for suffix, steps, count in ((".a", (0, 10, 20, 30), 5.0), (".b", (20,), 1.0)):
        run = Run(tmp_path, suffix=suffix, scalars=False)
        for step in steps:
            run.writer.add_scalar("train/attn/warnings/entropy_rise", count, step + 1)
            run.samples((step,), lambda *_: 0.3, {0: 2})
        run.close()
    section = read_run(tmp_path).sections["attn"]
    assert section.quantities["entropy_normalized"].steps.tolist() == [0, 10, 20]
    counts = section.counts["entropy_rise"]
    assert (counts.steps.tolist(), counts.values.tolist()) == ([1, 11, 21], [5, 5, 1])


def test_a_file_that_is_cut_off_gives_what_stands_before(plain):
    path = event_file(plain)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    run = read_run(plain)
    assert 1 <= run.sections["attn"].samples <= 3
    assert "could not be read" in run.notes[0]
    assert path.name in run.notes[0]


def test_a_broken_record_ends_its_file_only(tmp_path):
    first = Run(tmp_path, suffix=".a")
    first.samples((0, 10), lambda *_: 0.2, {0: 2})
    first.close()
    path = event_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[-30] ^= 0xFF
    path.write_bytes(content)
    second = Run(tmp_path, suffix=".b")
    second.samples((20,), lambda *_: 0.4, {0: 2})
    second.close()
    run = read_run(tmp_path)
    assert run.sections["attn"].quantities["entropy_normalized"].steps.tolist() == [0, 20]
    assert len(run.notes) == 1


def test_foreign_data_and_later_versions_are_named_and_left_out(plain):
    writer = SummaryWriter(plain, filename_suffix=".x")
    _add(writer, "attnmon/attn/mine", np.zeros((2, 2), np.float32), 0, b"\xff\xfe")
    _add(
        writer, "attnmon/attn/later", np.zeros((2, 2), np.float32), 0, b'{"version":99,"kind":"heads","prefix":"attn"}'
    )
    _add(writer, "attnmon/attn/odd", np.zeros((2, 2), np.float32), 0, b'{"version":1,"kind":"songs","prefix":"attn"}')
    _add(
        writer,
        tag_of("heads", quantity="score_max"),
        np.zeros(3, np.float32),
        0,
        metadata("heads", quantity="score_max"),
    )
    _add(writer, tag_of("heads", quantity="entropy"), b"text", 0, metadata("heads", quantity="entropy"))
    _add(writer, "attnmon/attn/else", np.zeros((2, 2), np.float32), 0, b"", plugin="histograms")
    writer.close()
    run = read_run(plain)
    assert list(run.sections["attn"].quantities) == ["entropy_normalized"]
    for part in (
        "'attnmon/attn/mine' was left out: not JSON",
        "version 99",
        "'songs'",
        "float32 of shape (3,)",
        "of shape ()",
    ):
        assert sum(part in note for note in run.notes) == 1, (part, run.notes)


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("warnings", {"version": 1, "step": 0, "alerts": [{"rule": "entropy_rise"}]}),
        ("warnings", {"version": 1, "alerts": None}),
        ("run", {"version": 1, "layers": [{"number": "x", "path": "p", "heads": 1, "temperature": 1}]}),
        ("run", {"version": 2}),
    ],
)
def test_broken_records_are_named_and_left_out(tmp_path, kind, record):
    run = Run(tmp_path)
    run.samples((0,), lambda *_: 0.2, {0: 2})
    _add(run.writer, tag_of(kind), json.dumps(record).encode(), 10, metadata(kind))
    found = read_run(run.close())
    assert found.sections["attn"].quantities["entropy_normalized"].samples == 1
    assert sum("was left out" in note for note in found.notes) == 1


def test_a_tag_whose_shape_changed_is_padded(tmp_path):
    run = Run(tmp_path)
    run.sample(0, {"entropy_normalized": {0: [0.1, 0.2]}})
    run.sample(10, {"entropy_normalized": {0: [0.1, 0.2, 0.3], 1: [0.4]}})
    series = read_run(run.close()).sections["attn"].quantities["entropy_normalized"]
    assert series.values.shape == (2, 2, 3)
    np.testing.assert_allclose(series.values[0], [[0.1, 0.2, np.nan], [np.nan] * 3], atol=1e-6)
    np.testing.assert_allclose(series.first, [[0.1, 0.2, 0.3], [0.4, np.nan, np.nan]], atol=1e-6)


@pytest.mark.parametrize("per_head", [True, False])
def test_scalars_serve_where_there_are_no_tensors(tmp_path, per_head):
    run = Run(tmp_path, tensors=False, per_head=per_head)
    for step in (0, 10):
        run.sample(step, {"separability@10": {0: [0.2, 0.4], 1: [0.6, 0.8 + step / 100]}})
    section = read_run(run.close()).sections["attn"]
    series = section.quantities["separability@10"]
    assert section.per_head is per_head
    expected = [[0.2, 0.4], [0.6, 0.9]] if per_head else [[0.3], [0.75]]
    np.testing.assert_allclose(series.last, expected, atol=1e-6)
    assert series.title == "Separability Ns/N, N = 10"
    assert "Read from scalars" in section.notes[0]
    assert section.counts["entropy_rise"].values.tolist() == [0, 0]
    assert section.layers[1].path == ""


def test_prefixes_are_sections_and_a_trainers_own_name_is_none(tmp_path):
    run = Run(tmp_path, prefix="attn_val", source="validation")
    run.samples((0,), lambda *_: 0.2, {0: 2})
    run.close()
    run = Run(tmp_path, scalars=False, suffix=".b")
    for step in (0, 10):
        for tag in ("warnings/entropy_rise", "entropy/normalized/layer_00"):
            run.writer.add_scalar(f"train/attn/{tag}", 0.0, step)
        run.samples((step,), lambda *_: 0.3, {0: 2})
    found = read_run(run.close()).sections
    assert list(found) == ["attn", "attn_val"]
    assert found["attn_val"].source == "validation"
    assert found["attn"].counts["entropy_rise"].tag == "train/attn/warnings/entropy_rise"


def test_csv_of_lightning_serves_too(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "attn/entropy/layer_00,attn/entropy/layer_01,epoch,step,train_loss\n"
        "1.5,2.5,0,0,\n,,0,0,3.0\n1.25,,0,10,\nnan,2.0,0,20,\n,,0,,1\n"
    )
    run = read_run(tmp_path)
    series = run.sections["attn"].quantities["entropy"]
    assert series.steps.tolist() == [0, 10, 20]
    np.testing.assert_array_equal(series.values[..., 0], np.float32([[1.5, 2.5], [1.25, np.nan], [np.nan, 2.0]]))
    assert run.loss is not None
    assert run.loss.tag == "train_loss"
    assert run.notes == ("metrics.csv: rows without a step were left out.",)


def test_a_large_run_is_thinned_but_judged_by_every_sample(tmp_path):
    run = Run(tmp_path)
    for step in range(101):
        run.sample(step, {"entropy_normalized": {0: [0.9 if step == 33 else 0.2, 0.3]}})
    section = read_run(run.close(), max_values=40).sections["attn"]
    series = section.quantities["entropy_normalized"]
    assert series.steps.tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100]
    assert series.values.shape == (14, 1, 2)
    assert (series.samples, int(series.high_step[0, 0])) == (101, 33)
    assert series.high[0, 0] == pytest.approx(0.9)
    assert series.furthest_step == 33
    assert "1 in 8" in section.notes[0]


def test_the_newest_description_counts_and_changes_of_cadence_are_kept(tmp_path):
    run = Run(tmp_path)
    run.samples((0,), lambda *_: 0.2, {0: 2})
    run.every_n_steps = 25
    run.samples((25, 50), lambda *_: 0.2, {0: 2, 1: 2})
    section = read_run(run.close()).sections["attn"]
    assert section.cadence == ((10, 0), (25, 25))
    assert list(section.layers) == [0, 1]


def test_which_run_is_taken(tmp_path, plain):
    logs = tmp_path / "lightning_logs"
    shutil.copytree(plain, logs / "version_0")
    run = read_run(logs)
    assert run.name == str(Path("lightning_logs", "version_0"))
    assert "version_0" in run.notes[0]
    shutil.copytree(plain, logs / "version_1")
    with pytest.raises(ReportError, match="holds 2: .*version_0, .*version_1.* Name one"):
        read_run(logs)
    shutil.copytree(plain, logs / "version_0" / "hparams")
    assert "hparams" in read_run(logs / "version_0").notes[0]


def test_what_holds_no_run_is_named(tmp_path, plain):
    with pytest.raises(ReportError, match="does not exist"):
        read_run(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="found none in"):
        read_run(tmp_path / "empty")
    with pytest.raises(ReportError, match=r"is a file. Pass its folder"):
        read_run(event_file(plain))
    writer = SummaryWriter(tmp_path / "other")
    writer.add_scalar("train/loss", 1.0, 0)
    writer.close()
    with pytest.raises(ReportError, match=r"attention data, but 1 file has none.*AttentionMonitor.*SummaryWriter"):
        read_run(tmp_path / "other")
    with pytest.raises(ValueError, match="max_values"):
        read_run(plain, max_values=0)


def test_a_head_that_died_has_no_last_figure(tmp_path):
    run = Run(tmp_path)
    for step, dead in ((0, 0.3), (10, 0.4), (20, math.nan)):
        run.sample(step, {"entropy_normalized": {0: [dead, 0.5], 1: [dead]}})
    series = read_run(run.close(), max_values=1).sections["attn"].quantities["entropy_normalized"]
    np.testing.assert_allclose(series.last, [[np.nan, 0.5], [np.nan, np.nan]], atol=1e-6)
    assert series.last_step.tolist() == [[10, 20], [10, -1]]
    assert series.lost == {0: [0], 1: [0]}
    assert np.isnan(series.change[0, 0])


def _warned_and_gone_back(folder: Path, *, scalars: bool) -> Path:
    """A run that warned at step 50, resumed from 10 without rules, and with no scalars but its cost, or none."""
    first = Run(folder, suffix=".a")
    first.samples((20, 30, 40, 50), lambda step, layer, head: 0.2 if step < 30 else 0.9, {0: 2})
    first.close()
    second = Run(folder, suffix=".b", scalars=False, judged=False)
    for step in (10, 20):
        second.samples((step,), lambda *_: 0.5, {0: 2})
        if scalars:
            second.writer.add_scalar("attn/monitor/seconds", 0.1, step)
    return second.close()


@pytest.mark.parametrize("scalars", [True, False])
def test_rules_are_not_on_by_what_is_void(tmp_path, scalars):
    section = read_run(_warned_and_gone_back(tmp_path, scalars=scalars)).sections["attn"]
    assert section.quantities["entropy_normalized"].steps.tolist() == [10, 20]
    assert section.counts == {}
    assert section.alerts_on is False
    assert list(section.cost) == (["seconds"] if scalars else [])


def test_a_validation_has_no_cadence(tmp_path):
    run = Run(tmp_path, prefix="attn_val", source="validation", every_n_steps=5)
    run.samples((0, 7), lambda *_: 0.2, {0: 2})
    run.close()
    run = Run(tmp_path, suffix=".b")
    run.samples((0, 10), lambda *_: 0.2, {0: 2})
    record = {"version": 1, "layers": [], "not_measured": {}, "source": "probe", "every_n_steps": None, "levels": []}
    _add(run.writer, tag_of("run"), json.dumps(record).encode(), 10, metadata("run"))
    found = read_run(run.close())
    assert found.notes == ()
    assert found.sections["attn_val"].cadence == ()
    assert found.sections["attn"].cadence == ((10, 0),)
    assert found.sections["attn"].source == "probe"


_RUN = {"version": 1, "not_measured": {}, "source": "train", "every_n_steps": 10, "levels": []}
_LAYER = {"number": 0, "path": "h.0.attn", "heads": 2, "temperature": 8.0}
_ALERT = {
    "step": 0, "rule": "entropy_rise", "title": "t", "severity": "warn", "heads": {"0": [1]}, "layers": {"0": "p"},
    "since": 0, "samples": 3, "summary": "s", "remedy": "r",
    "evidence": [
        {
            "quantity": "entropy_normalized", "label": "e", "heads": {"0": [1]}, "figures": {"0": [0.9]},
            "baselines": {"0": [None]}, "limits": {"0": [0.8]}, "limit_text": "l",
        }
    ],
}  # fmt: skip


def _warned(**changes: object) -> dict:
    return {"version": 1, "step": 0, "alerts": [{**_ALERT, **changes}], "alarmed": {"entropy_rise": {"0": [1]}}}


def _evidence(**changes: object) -> dict:
    return _warned(evidence=[{**_ALERT["evidence"][0], **changes}])


_BROKEN = {
    "deep": ("run", "[" * 100_000),
    "layer": ("run", {**_RUN, "layers": [{**_LAYER, "number": 1_000_000_000}]}),
    "layer_below_0": ("run", {**_RUN, "layers": [{**_LAYER, "number": -1}]}),
    "half_a_layer": ("run", {**_RUN, "layers": [{**_LAYER, "number": 0.5}]}),
    "infinite_layer": ("run", json.dumps({**_RUN, "layers": [{**_LAYER, "number": 7}]}).replace("7", "1e999")),
    "heads": ("run", {**_RUN, "layers": [{**_LAYER, "heads": 2_000_000_000}]}),
    "temperature": ("run", {**_RUN, "layers": [{**_LAYER, "temperature": 10**400}]}),
    "cadence": ("run", {**_RUN, "layers": [_LAYER], "every_n_steps": 10**30}),
    "level": ("run", {**_RUN, "layers": [], "levels": [{"limit": 10**400, "rule": "", "title": "", "quantity": ""}]}),
    "half_a_letter": ("run", {**_RUN, "layers": [{**_LAYER, "path": "\ud800"}]}),
    "warned_head": ("warnings", _warned(heads={"0": [2]})),
    "warned_layer": ("warnings", _warned(heads={"7": [0]})),
    "layer_path": ("warnings", _warned(layers={"-1": "p"})),
    "since": ("warnings", _warned(since=10**400)),
    "figure_is_a_text": ("warnings", _evidence(figures={"0": ["0.9"]})),
    "large_figure": ("warnings", _evidence(limits={"0": [10**400]})),
    "evidence_head": ("warnings", _evidence(heads={"0": [10**30]})),
    "alarmed_head": ("warnings", {**_warned(), "alarmed": {"entropy_rise": {"0": [999_999]}}}),
    "alarmed_below_0": ("warnings", {**_warned(), "alarmed": {"entropy_rise": {"0": [-1]}}}),
    "half_a_letter_of_a_rule": ("warnings", {**_warned(), "alarmed": {"\udfff": {"0": [1]}}}),
}


@pytest.mark.parametrize("case", _BROKEN)
def test_records_beyond_all_bounds_are_named_and_left_out(tmp_path, case):
    """And the report is written: nothing of them reaches it."""
    kind, record = _BROKEN[case]
    run = Run(tmp_path)
    run.samples((0,), lambda *_: 0.2, {0: 2, 1: 1})
    content = record if isinstance(record, str) else json.dumps(record)
    _add(run.writer, tag_of(kind), content.encode(), 10, metadata(kind))
    found = read_run(run.close())
    section = found.sections["attn"]
    (note,) = found.notes
    assert f"The record of {tag_of(kind)!r} at step 10 was left out" in note
    assert len(note) < 400
    assert (list(section.layers), section.exists.sum(), section.status()) == ([0, 1], 3, {})
    assert section.unread == (kind == "warnings")
    assert write_report(tmp_path).exists()


def test_a_record_at_the_bounds_is_taken(tmp_path):
    """The records above are broken in one place only."""
    run = Run(tmp_path)
    run.samples((0,), lambda *_: 0.2, {0: 2, 1: 1})
    _add(run.writer, tag_of("run"), json.dumps({**_RUN, "layers": [_LAYER]}).encode(), 10, metadata("run"))
    _add(run.writer, tag_of("warnings"), json.dumps(_warned()).encode(), 10, metadata("warnings"))
    found = read_run(run.close())
    assert found.notes == ()
    assert list(found.sections["attn"].status()) == [(0, 1)]


@pytest.mark.parametrize(
    "changes",
    [{"limits": [0, 10**400]}, {"limits": 7}, {"limits": [1]}, {"limits": [{}, 2]}, {"limits": [1.0, 0.0]}],
)
def test_broken_ends_of_a_scale_give_way_to_the_known_ones(tmp_path, changes):
    run = Run(tmp_path)
    content = json.dumps({**json.loads(metadata("heads", quantity="entropy_normalized")), **changes}).encode()
    _add(run.writer, tag_of("heads", quantity="entropy_normalized"), np.zeros((1, 2), np.float32), 0, content)
    series = read_run(run.close()).sections["attn"].quantities["entropy_normalized"]
    assert series.limits == (0.0, 1.0)


def test_a_broken_shape_does_not_fill_the_memory(plain):
    writer = SummaryWriter(plain, filename_suffix=".x")
    summary = Summary()
    tag = tag_of("heads", quantity="entropy_normalized")
    tensor = make_tensor_proto(np.float32([[1.0]]))
    tensor.ClearField("tensor_content")
    tensor.float_val.append(1.0)
    for dim in tensor.tensor_shape.dim:
        dim.size = 10**7
    summary.value.add(tag=tag, tensor=tensor)
    writer._get_file_writer().add_summary(summary, 30)
    writer.close()
    run = read_run(plain)
    assert run.sections["attn"].quantities["entropy_normalized"].steps.tolist() == [0, 10, 20]
    assert "says that it has 100000000000000 figures" in run.notes[0]


def test_somebody_elses_sample_adds_no_heads(tmp_path):
    """Nor does a figure beyond the heads of a layer."""
    run = Run(tmp_path)
    run.samples((0, 10, 20), lambda *_: 0.2, {0: 2, 1: 4})
    tag = tag_of("heads", quantity="entropy_normalized")
    for step, shape in ((30, (5, 12)), (40, (2, 4))):
        content = metadata("heads", quantity="entropy_normalized")
        _add(run.writer, tag, np.ones(shape, np.float32), step, content)
    section = read_run(run.close()).sections["attn"]
    series = section.quantities["entropy_normalized"]
    assert section.exists.tolist() == [[True, True, False, False], [True] * 4]
    assert series.steps.tolist() == [0, 10, 20, 40]
    np.testing.assert_array_equal(series.last, np.float32([[1, 1, np.nan, np.nan], [1, 1, 1, 1]]))
    assert f"1 of 5 samples of {tag!r} was left out" in section.notes[0]


def test_a_record_that_fits_no_sample_takes_nothing_away(tmp_path):
    run = Run(tmp_path)
    tag, content = tag_of("heads", quantity="entropy_normalized"), metadata("heads", quantity="entropy_normalized")
    _add(run.writer, tag_of("run"), json.dumps({**_RUN, "layers": [_LAYER]}).encode(), 0, metadata("run"))
    for step in (0, 10):
        _add(run.writer, tag, np.ones((2, 4), np.float32), step, content)
    section = read_run(run.close()).sections["attn"]
    assert section.exists.sum() == 8
    assert "fewer layers or heads" in section.notes[0]


def test_a_loss_that_is_not_a_number_is_kept_from_csv_too(tmp_path):
    (tmp_path / "metrics.csv").write_text("attn/entropy/layer_00,step,train_loss\n1.5,0,2.0\n1.4,10,nan\n")
    run = read_run(tmp_path)
    assert run.loss is not None
    np.testing.assert_array_equal(run.loss.values, [2.0, np.nan])


def test_rules_that_fell_silent_say_nothing_of_the_end(tmp_path):
    first = Run(tmp_path, suffix=".a")
    first.samples(range(0, 60, 10), lambda *_: 0.2, {0: 2})
    first.close()
    assert read_run(tmp_path).sections["attn"].notes == ()
    second = Run(tmp_path, suffix=".b", scalars=False, judged=False)
    second.samples(range(40, 100, 10), lambda *_: 0.2, {0: 2})
    notes = read_run(second.close()).sections["attn"].notes
    assert "last heard of at step 30, though the samples go on to step 90" in notes[1]


def test_warnings_of_a_later_version_are_not_none(tmp_path):
    run = Run(tmp_path, scalars=False, judged=False)
    run.samples((0, 10), lambda *_: 0.2, {0: 2})
    _add(run.writer, tag_of("warnings"), b"{}", 10, b'{"version":99,"kind":"warnings","prefix":"attn"}')
    section = read_run(run.close()).sections["attn"]
    assert (section.unread, section.alerts_on, section.heads_known) == (1, True, False)


def test_limits_that_rules_have_learned_are_passed_over(tmp_path):
    run = Run(tmp_path)
    run.samples((0, 10), lambda *_: 0.2, {0: 2})
    about = {"quantity": "entropy_normalized", "rule": "entropy_rise"}
    tag = tag_of("limits", **about)
    _add(run.writer, tag, np.ones((1, 2), np.float32), 10, metadata("limits", quantity="entropy_normalized"))
    found = read_run(run.close())
    assert found.notes == ()
    assert found.sections["attn"].notes == ()
    assert list(found.sections["attn"].quantities) == ["entropy_normalized"]
