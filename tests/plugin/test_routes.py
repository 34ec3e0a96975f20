"""What the tab's routes answer, on a real TensorBoard application with each of its loaders."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from plugin.conftest import (
    HEADS,
    LAYERS,
    RISEN,
    SPREAD,
    STEPS,
    Board,
    figures,
    recovering,
    snapshot,
    write_run,
    write_tensor,
)
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins import base_plugin
from torch.utils.tensorboard import SummaryWriter

from attnmon.plugin import AttentionLoader
from attnmon.plugin.plugin import AttentionPlugin
from attnmon.plugin.store import Store
from attnmon.records import metadata, tag_of, to_json
from attnmon.tensorboard import TabWriter

ENTROPY = tag_of("heads", quantity="entropy_normalized")


def floats(text: str, *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(*shape)


def expected(step: int, quantity: str = "entropy_normalized", seed: int = 0) -> np.ndarray:
    return np.float32([figures(step, seed)[quantity][layer] for layer in range(LAYERS)])


def frames(board, **arguments) -> dict[int, np.ndarray]:
    found = board.json("frames", **arguments)["frames"]
    return {frame["step"]: floats(frame["data"], *frame["shape"]) for frame in found}


def test_catalogue_lists_runs_and_describes_quantities(tmp_path, board):
    for run in ("version_10", "version_2"):
        write_run(tmp_path / run)
    found = board(tmp_path).catalogue(lambda found: len(found["runs"]) == 2)
    assert found["problems"] == []
    assert [entry["run"] for entry in found["runs"]] == ["version_2", "version_10"]
    heads = [tag for tag in found["runs"][0]["tags"] if tag["kind"] == "heads"]
    assert [tag["quantity"] for tag in heads] == ["entropy_normalized", "score_spread", "mine"]  # as on the dashboard
    assert heads[0] | {"stamp": None} == {
        "kind": "heads",
        "prefix": "attn",
        "quantity": "entropy_normalized",
        "title": "Normalised entropy",
        "unit": "H / log n",
        "limits": [0.0, 1.0],
        "rise": "attention spreads over more keys: an early sign that a head saturates (paper, rule 2)",
        "fall": "attention concentrates; down to 0 with growing scores it is entropy collapse",
        "tag": ENTROPY,
        "stamp": None,
    }
    assert heads[0]["stamp"][0] == max(STEPS)


def test_frames_are_what_was_written(tmp_path, board):
    write_run(tmp_path / "run")
    one = board(tmp_path)
    one.catalogue()
    summary = one.json("summary", run="run", tag=ENTROPY, baseline=0)
    assert summary["steps"] == list(STEPS)
    assert summary["shape"] == [LAYERS, HEADS]
    assert summary["problems"] == []
    everything = np.stack([expected(step) for step in STEPS])
    np.testing.assert_allclose(summary["extent"], [np.nanmin(everything), np.nanmax(everything)], rtol=1e-6)
    np.testing.assert_allclose(summary["change"], np.nanmax(np.abs(everything - everything[0])), rtol=1e-6)
    found = frames(one, run="run", tag=ENTROPY, steps="0,150")
    assert sorted(found) == [0, 150]
    for step, frame in found.items():
        np.testing.assert_array_equal(frame, expected(step))  # the NaN at (0, 3) among them
    assert one.json("frames", run="run", tag=ENTROPY, steps="7")["missing"] == [7]
    assert one.json("summary", run="run", tag=ENTROPY, baseline=7)["change"] is None


def test_series_have_the_limits_and_marks_of_their_head(tmp_path, board):
    write_run(tmp_path / "run")
    one = board(tmp_path)
    one.catalogue()
    where = {"run": "run", "prefix": "attn", "tag": ENTROPY, "quantity": "entropy_normalized"}
    found = one.json("series", heads=f"{RISEN[0]}.{RISEN[1]},0.3,99.0", **where)
    assert found["steps"] == list(STEPS)
    risen, unmeasured, absent = found["heads"]
    np.testing.assert_array_equal(
        floats(risen["data"], -1), np.float32([figures(step)["entropy_normalized"][1][2] for step in STEPS])
    )
    assert np.isnan(floats(unmeasured["data"], -1)).all()
    assert np.isnan(floats(absent["data"], -1)).all()
    assert unmeasured["marks"] == absent["marks"] == []
    (mark,) = [mark for mark in risen["marks"] if mark["rule"] == "entropy_rise"]
    assert mark["step"] >= 100
    assert mark["figure"] == pytest.approx(0.9)
    assert mark["baseline"] < mark["limit"] < mark["figure"]
    # the same warning beside another quantity: a mark without a limit
    where |= {"tag": tag_of("heads", quantity="mine"), "quantity": "mine"}
    (other,) = [
        mark for mark in one.json("series", heads="1.2", **where)["heads"][0]["marks"] if mark["rule"] == "entropy_rise"
    ]
    assert (other["step"], other["limit"], other["baseline"]) == (mark["step"], None, None)


def test_run_has_layers_levels_and_warnings(tmp_path, board):
    write_run(tmp_path / "run")
    one = board(tmp_path)
    one.catalogue()
    found = one.json("run", run="run", prefix="attn")
    assert found["problems"] == []
    record = found["record"]
    assert record["layers"][2] == {"number": 2, "path": "model.layers.2.attn", "heads": HEADS, "temperature": 8.0}
    assert record["every_n_steps"] == 10
    assert [(level["quantity"], level["limit"]) for level in record["levels"]] == [("score_spread", 10.0)]
    growth = next(alert for alert in found["warnings"] if alert["rule"] == "score_growth")
    assert (growth["step"], growth["heads"]) == (100, {str(SPREAD[0]): [SPREAD[1]]})
    assert growth["evidence"] == ["score_spread"]
    assert growth["summary"]
    assert growth["remedy"]


def test_a_run_without_warnings_has_an_empty_list(tmp_path, board):
    write_run(tmp_path / "run", range(0, 50, 10))
    one = board(tmp_path)
    one.catalogue()
    assert one.json("run", run="run", prefix="attn")["warnings"] == []


def test_resumed_run_shows_the_later_of_repeated_steps(tmp_path, board):
    write_run(tmp_path / "run", range(0, 60, 10), seed=1)
    write_run(tmp_path / "run", range(30, 90, 10), seed=2)
    one = board(tmp_path)
    one.catalogue(lambda found: found["runs"] and found["runs"][0]["tags"][0]["stamp"][0] == 80)
    assert one.json("summary", run="run", tag=ENTROPY)["steps"] == list(range(0, 90, 10))
    found = frames(one, run="run", tag=ENTROPY, steps="20,30,50,80")
    for step, seed in ((20, 1), (30, 2), (50, 2), (80, 2)):
        np.testing.assert_array_equal(found[step], expected(step, seed=seed))


def test_changed_shape_is_shown_and_said(tmp_path, board):
    writer = SummaryWriter(tmp_path / "run")
    tab = TabWriter(writer)
    tab.write(snapshot(0, {"entropy": {0: [1.0, 2.0]}}))
    tab.write(snapshot(5, {"entropy": {0: [1.5, 2.0, 3.0], 1: [4.0]}}))
    writer.close()
    one = board(tmp_path)
    one.catalogue(lambda found: found["runs"] and found["runs"][0]["tags"][0]["stamp"][0] == 5)
    tag = tag_of("heads", quantity="entropy")
    summary = one.json("summary", run="run", tag=tag, baseline=0)
    assert "changes from 1 x 2 to 2 x 3 at step 5" in summary["problems"][0]
    assert (summary["extent"], summary["change"]) == ([1.0, 4.0], 0.5)
    found = frames(one, run="run", tag=tag, steps="0,5")
    np.testing.assert_array_equal(found[0], np.float32([[1, 2]]))
    np.testing.assert_array_equal(found[5], np.float32([[1.5, 2, 3], [4, math.nan, math.nan]]))
    series = one.json("series", run="run", prefix="attn", tag=tag, quantity="entropy", heads="1.0")
    np.testing.assert_array_equal(floats(series["heads"][0]["data"], -1), np.float32([math.nan, 4]))
    layers = one.json("run", run="run", prefix="attn")["record"]["layers"]
    assert [layer["heads"] for layer in layers] == [3, 1]  # the newest


def test_foreign_broken_and_later_data_are_named_and_harm_nothing(tmp_path, board):
    writer = SummaryWriter(tmp_path / "run")
    write_run(tmp_path / "run", writer=writer)
    heads = metadata("heads", quantity="other")
    later = to_json({"version": 99, "kind": "heads", "prefix": "attn"})
    write_tensor(writer, "foreign", b"\x08\x01", [1.0])
    write_tensor(writer, "later", later, [[1.0]])
    write_tensor(writer, "kind", to_json({"version": 1, "kind": "sound", "prefix": "attn"}), [[1.0]])
    write_tensor(writer, "nameless", to_json({"version": 1, "kind": "heads", "prefix": "attn"}), [[1.0]])
    write_tensor(writer, tag_of("heads", quantity="other"), heads, [1.0, 2.0], 300)
    write_tensor(writer, tag_of("heads", quantity="other"), heads, "text", 301)
    write_tensor(writer, tag_of("heads", quantity="other"), heads, [[3]], 302)
    write_tensor(writer, tag_of("run"), b"", b"not json", 500)
    write_tensor(writer, tag_of("warnings"), b"", to_json({"version": 1, "alerts": [{"rule": 1}]}), 500)
    write_tensor(writer, tag_of("warnings"), b"", [1.0, 2.0], 510)
    write_tensor(writer, tag_of("warnings"), b"", b'{"version":7}', 520)
    writer.close()
    one = board(tmp_path)
    found = one.catalogue(lambda found: len(found["problems"]) == 4)
    said = {problem["tag"]: problem["text"] for problem in found["problems"]}
    assert said.pop("foreign").startswith("not JSON")
    assert said == {
        "later": "version 99 of attnmon's data, where version 1 can be read: update attnmon",
        "kind": "kind 'sound' with prefix 'attn', where a kind is one of heads, limits, run, warnings",
        "nameless": "quantity None, where a name is expected",
    }
    assert one.get("summary", run="run", tag="foreign").status_code == 422
    summary = one.json("summary", run="run", tag=tag_of("heads", quantity="other"))
    assert summary["steps"] == [302]
    assert "2 of 3 samples are left out" in summary["problems"][0]
    run = one.json("run", run="run", prefix="attn")
    assert run["record"]["every_n_steps"] == 10  # the one before
    assert {alert["rule"] for alert in run["warnings"]} >= {"entropy_rise", "score_growth"}
    assert "step 500: not JSON" in run["problems"][0]
    assert "step 500: not built as expected" in run["problems"][1]
    assert "step 510: not one text but an array of shape (2,)" in run["problems"][2]
    assert "step 520: version 7" in run["problems"][3]
    assert one.json("summary", run="run", tag=ENTROPY)["problems"] == []


def test_tensor_that_tensorboard_cannot_read_costs_its_tag_only(tmp_path, board):
    writer = SummaryWriter(tmp_path / "run")
    write_run(tmp_path / "run", writer=writer)
    summary = Summary()
    value = summary.value.add(tag=tag_of("heads", quantity="entropy"))
    value.tensor.dtype = 1
    value.tensor.tensor_shape.dim.add(size=7)
    value.tensor.tensor_content = b"\0" * 5  # neither seven floats nor any number of them
    value.metadata.plugin_data.plugin_name = "attnmon"
    value.metadata.plugin_data.content = metadata("heads", quantity="entropy")
    value.metadata.data_class = 2
    writer._get_file_writer().add_summary(summary, 0)
    writer.close()
    one = board(tmp_path)
    one.catalogue(lambda found: found["runs"] and len(found["runs"][0]["tags"]) == 6)
    answer = one.get("summary", run="run", tag=tag_of("heads", quantity="entropy"))
    assert answer.status_code == 422
    assert "TensorBoard can't read this tag" in answer.text
    assert one.json("summary", run="run", tag=ENTROPY)["steps"] == list(STEPS)


def test_truncated_event_file_shows_what_came_before(tmp_path, board):
    write_run(tmp_path / "run")
    (file,) = (tmp_path / "run").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + b"\0garbage\xff")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "events.out.tfevents.0.broken").write_bytes(b"this is no event file")
    one = board(tmp_path)
    assert [entry["run"] for entry in one.catalogue()["runs"]] == ["run"]
    steps = one.json("summary", run="run", tag=ENTROPY)["steps"]
    assert 0 < len(steps) < len(STEPS)
    assert steps == list(STEPS)[: len(steps)]


def test_empty_directory_has_an_inactive_tab(tmp_path, board):
    one = board(tmp_path)
    assert one.json("catalogue") == {"runs": [], "problems": []}
    listing = one.client.get("/data/plugins_listing").json["attnmon"]
    assert (listing["enabled"], listing["tab_name"]) == (False, "Attention")
    assert one.client.get(listing["loading_mechanism"]["module_path"]).status_code == 200


def test_data_makes_the_tab_active(tmp_path, board):
    write_run(tmp_path / "run", [0])
    one = board(tmp_path)
    one.catalogue()
    assert one.client.get("/data/plugins_listing").json["attnmon"]["enabled"] is True


def test_many_large_samples(tmp_path, board):
    writer = SummaryWriter(tmp_path / "run", max_queue=1000)
    tab = TabWriter(writer)
    for step in range(1500):
        tab.write(snapshot(step, {"entropy": {layer: [float(step)] * 32 for layer in range(48)}}))
    writer.close()
    one = board(tmp_path)
    tag = tag_of("heads", quantity="entropy")
    one.catalogue(lambda found: found["runs"] and found["runs"][0]["tags"][0]["stamp"][0] == 1499)
    summary = one.json("summary", run="run", tag=tag)
    assert len(summary["steps"]) == 1000  # TensorBoard's own numbers are 100 and 10
    assert summary["steps"][-1] == 1499
    assert summary["shape"] == [48, 32]
    asked = summary["steps"][-64:]
    found = frames(one, run="run", tag=tag, steps=",".join(map(str, asked)))
    assert list(found) == asked
    assert all((frame == step).all() for step, frame in found.items())
    series = one.json("series", run="run", prefix="attn", tag=tag, quantity="entropy", heads="47.31")
    np.testing.assert_array_equal(floats(series["heads"][0]["data"], -1), np.float32(series["steps"]))


def test_new_samples_are_seen(tmp_path):
    writer = SummaryWriter(tmp_path / "run")
    write_run(tmp_path / "run", range(0, 30, 10), writer=writer)
    one = Board(tmp_path, False)
    before = one.catalogue()["runs"][0]["tags"][0]["stamp"]
    assert one.json("summary", run="run", tag=ENTROPY)["steps"] == [0, 10, 20]
    write_run(tmp_path / "run", range(30, 50, 10), writer=writer)
    writer.close()
    one.multiplexer.Reload()
    assert one.catalogue()["runs"][0]["tags"][0]["stamp"] != before
    assert one.json("summary", run="run", tag=ENTROPY)["steps"] == [0, 10, 20, 30, 40]


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_run(folder / "a/run", [0, 10])
    return Board(folder, False)


@pytest.mark.parametrize(
    ("path", "arguments", "code", "says"),
    [
        ("summary", {"tag": ENTROPY}, 400, "Expected `run` to be given, but got nothing."),
        ("summary", {"run": "a/run"}, 400, "Expected `tag` to be given"),
        ("summary", {"run": "a/run", "tag": ENTROPY, "baseline": "x"}, 400, "Expected `baseline` to be a step"),
        (
            "summary",
            {"run": "none", "tag": ENTROPY},
            404,
            "There is no tag 'attnmon/attn/entropy/normalized' in the run",
        ),
        ("summary", {"run": "a/run", "tag": "attnmon/attn/run"}, 422, "is of kind 'run', not 'heads'"),
        ("frames", {"run": "a/run", "tag": ENTROPY}, 400, "Expected `steps` to be 1 to 64 steps"),
        ("frames", {"run": "a/run", "tag": ENTROPY, "steps": "1,,2"}, 400, "but got '1,,2'"),
        ("frames", {"run": "a/run", "tag": ENTROPY, "steps": ",".join("1" * 65)}, 400, "1 to 64 steps"),
        ("series", {"run": "a/run", "prefix": "attn", "tag": ENTROPY, "quantity": "q"}, 400, "Expected `heads`"),
        ("series", {"heads": "1.2.3"}, 400, "pairs such as 3.7"),
        ("series", {"heads": "-1.2"}, 400, "pairs such as 3.7"),
        ("run", {"run": "a/run"}, 400, "Expected `prefix`"),
        ("run", {"run": "none", "prefix": "attn"}, 404, "prefix 'attn' in a run 'none'"),
        ("run", {"run": "a/run", "prefix": "none"}, 404, "prefix 'none' in a run 'a/run'"),
        (
            "series",
            {"run": "a/run", "prefix": "attn", "tag": ENTROPY, "quantity": "zzz", "heads": "0.0"},
            400,
            "Expected `quantity` to be that of the tag, 'entropy_normalized', but got 'zzz'.",
        ),
        (
            "series",
            {"run": "a/run", "prefix": "zzz", "tag": ENTROPY, "quantity": "entropy_normalized", "heads": "0.0"},
            400,
            "Expected `prefix` to be that of the tag, 'attn', but got 'zzz'.",
        ),
    ],
)
def test_bad_arguments_are_answered_in_words(settled, path, arguments, code, says):
    answer = settled.get(path, **arguments)
    assert (answer.status_code, answer.mimetype) == (code, "text/plain")
    assert says in answer.text


def test_huge_numbers_are_missing_not_faults(settled):
    assert settled.json("frames", run="a/run", tag=ENTROPY, steps="9" * 30)["missing"] == [int("9" * 30)]


def test_only_get_is_answered(settled):
    assert settled.client.post("/data/plugin/attnmon/catalogue").status_code == 405
    assert settled.client.head("/data/plugin/attnmon/catalogue").status_code == 200
    for method in ("post", "put", "delete"):
        assert getattr(settled.client, method)("/data/plugin/attnmon/static/index.js").status_code == 405


def test_a_fault_is_answered_in_words_and_logged(settled, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("attnmon.plugin.store._content", fail)
    answer = settled.get("catalogue")
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.text
    assert "secret" not in answer.text
    assert "secret" in caplog.text


def test_files_are_served_by_name_only_and_never_cached(settled):
    static = Path(__file__).parents[2] / "attnmon" / "plugin" / "static"
    kinds = {".js": "text/javascript", ".css": "text/css"}
    for file in static.iterdir():
        answer = settled.get(f"static/{file.name}")
        assert answer.status_code == 200, file
        assert (answer.mimetype, answer.data) == (kinds[file.suffix], file.read_bytes())
        assert answer.headers["Cache-Control"] == "no-cache, must-revalidate"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for path in (
        "static/../plugin.py",
        "static/%2e%2e/plugin.py",
        "static/",
        "static/nothing.js",
        "static//etc/passwd",
    ):
        assert settled.get(path).status_code == 404, path
    assert settled.get("catalogue").headers["Cache-Control"] == "no-cache, must-revalidate"


def test_modules_import_only_each_other_and_name_no_host(settled):
    static = Path(__file__).parents[2] / "attnmon" / "plugin" / "static"
    names = {file.name for file in static.iterdir()}
    for file in static.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        imported = re.findall(r'from "\./([^"]+)"', text)
        assert len(imported) == len(re.findall(r"^import ", text, re.MULTILINE)), file
        assert set(imported) <= names, file
        assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}, file
        assert not re.search(r"\binnerHTML\b|\beval\(|insertAdjacentHTML", text), file  # data never becomes markup


def test_users_number_of_samples_wins(tmp_path):
    write_run(tmp_path / "run", range(50))
    few = Board(tmp_path, False, "--samples_per_plugin=attnmon=7")
    assert few.flags.samples_per_plugin == {"attnmon": 7}
    assert len(few.json("summary", run="run", tag=ENTROPY)["steps"]) == 7
    everything = Board(tmp_path, False, "--samples_per_plugin=attnmon=0,images=3")
    assert len(everything.json("summary", run="run", tag=ENTROPY)["steps"]) == 50
    usual = Board(tmp_path, False)
    assert usual.flags.samples_per_plugin == {"attnmon": 1000}


def test_a_tab_that_cannot_be_made_leaves_tensorboard_up(tmp_path, monkeypatch, caplog):
    def fail(self, context):
        raise OSError("no such file")

    monkeypatch.setattr(AttentionPlugin, "__init__", fail)
    board = Board(tmp_path, False)
    listing = board.client.get("/data/plugins_listing").json
    assert "attnmon" not in listing
    assert "scalars" in listing
    assert "no such file" in caplog.text


def test_without_a_data_provider_there_is_no_tab(caplog):
    assert AttentionLoader().load(base_plugin.TBContext()) is None
    assert "data provider" in caplog.text


def test_json_is_strict(settled):
    def refuse(name):
        raise AssertionError(name)

    for path, arguments in (("catalogue", {}), ("summary", {"run": "a/run", "tag": ENTROPY})):
        assert json.loads(settled.get(path, **arguments).text, parse_constant=refuse)


def newest_is(step: int):
    return lambda found: (
        found["runs"] and max(tag["stamp"][0] for tag in found["runs"][0]["tags"] if tag["kind"] == "heads") == step
    )


@pytest.mark.parametrize("rules_on", [True, False])
def test_what_a_resumed_run_had_written_beyond_is_void(tmp_path, board, rules_on):
    write_run(tmp_path / "run", STEPS)  # warnings from step 100 on
    write_run(tmp_path / "run", range(35, 75, 10), rules_on=rules_on)
    one = board(tmp_path)
    one.catalogue(newest_is(190 if one.multiplexer else 65))  # the fast loader itself drops tags that go on
    summary = one.json("summary", run="run", tag=ENTROPY)
    assert summary["steps"] == [0, 10, 20, 30, 35, 45, 55, 65]
    run = one.json("run", run="run", prefix="attn")
    assert (run["warnings"], run["alarms"], run["problems"]) == ([], [], [])
    assert run["restarts"] == ([] if rules_on and not one.multiplexer else [35])
    series = one.json("series", run="run", prefix="attn", tag=ENTROPY, quantity="entropy_normalized", heads="1.2")
    assert series["heads"][0]["marks"] == []


def test_a_quantity_that_a_resumed_run_no_longer_writes_ends_there(tmp_path, board):
    first = SummaryWriter(tmp_path / "run")
    tab = TabWriter(first)
    for step in (0, 10, 20, 30):
        tab.write(snapshot(step, {"entropy": {0: [1.0]}, "mine": {0: [2.0]}}))
    first.close()
    second = SummaryWriter(tmp_path / "run", filename_suffix=".later")
    tab = TabWriter(second)
    for step in (20, 30, 40):
        tab.write(snapshot(step, {"entropy": {0: [1.0]}}))
    second.close()
    one = board(tmp_path)
    one.catalogue(newest_is(40))
    assert one.json("summary", run="run", tag=tag_of("heads", quantity="mine"))["steps"] == [0, 10]


def test_a_clock_that_is_set_back_costs_nothing(tmp_path, board, monkeypatch):
    times = iter(range(1_000_000, 0, -100))
    monkeypatch.setattr("time.time", lambda: next(times))
    write_run(tmp_path / "run")
    monkeypatch.undo()
    one = board(tmp_path)
    one.catalogue(newest_is(190))
    for quantity in ("entropy_normalized", "mine"):
        assert one.json("summary", run="run", tag=tag_of("heads", quantity=quantity))["steps"] == list(STEPS)
    assert one.json("run", run="run", prefix="attn")["warnings"]


def test_a_restart_is_seen_while_the_tab_is_open(tmp_path):
    write_run(tmp_path / "run")
    one = Board(tmp_path, False)
    before = {tag["tag"]: tag["stamp"] for tag in one.catalogue()["runs"][0]["tags"]}
    assert one.json("run", run="run", prefix="attn")["warnings"]
    write_run(tmp_path / "run", range(50, 300, 50), rules_on=False)
    one.multiplexer.Reload()
    after = {tag["tag"]: tag["stamp"] for tag in one.catalogue()["runs"][0]["tags"]}
    assert all(after[tag] != stamp for tag, stamp in before.items())  # so that the page asks again
    assert one.json("run", run="run", prefix="attn")["warnings"] == []


def test_alarms_have_a_beginning_and_an_end(tmp_path, board):
    write_run(tmp_path / "run", figures=recovering)
    one = board(tmp_path)
    one.catalogue(newest_is(190))
    found = one.json("run", run="run", prefix="attn")
    assert found["watched"] is True
    alarms = {alarm["rule"]: alarm for alarm in found["alarms"]}
    growth, rise = alarms["score_growth"], alarms["entropy_rise"]
    assert (growth["since"], growth["severity"], growth["heads"]) == (100, "warn", {str(SPREAD[0]): [SPREAD[1]]})
    assert 140 <= growth["until"] <= 190
    assert (rise["until"], rise["heads"]) == (None, {str(RISEN[0]): [RISEN[1]]})
    assert rise["since"] == next(alert["step"] for alert in found["warnings"] if alert["rule"] == "entropy_rise")


def test_whether_there_are_no_warnings_is_known_or_not(tmp_path, board):
    write_run(tmp_path / "watched", [0, 10])
    write_run(tmp_path / "off", [0, 10], rules_on=False)
    writer = SummaryWriter(tmp_path / "broken")
    write_run(tmp_path / "broken", [0, 10], writer=writer)
    write_tensor(writer, tag_of("warnings"), b"", b"[", 20)
    writer.close()
    one = board(tmp_path)
    one.catalogue(lambda found: len(found["runs"]) == 3)
    found = {run: one.json("run", run=run, prefix="attn") for run in ("watched", "off", "broken")}
    assert {run: answer["watched"] for run, answer in found.items()} == {"watched": True, "off": False, "broken": None}
    assert all(answer["warnings"] == [] for answer in found.values())


RUN = {
    "version": 1,
    "layers": [{"number": 0, "path": "a", "heads": 1, "temperature": None}],
    "not_measured": {},
    "source": "train",
    "every_n_steps": 5,
    "levels": [],
}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (to_json(RUN | {"layers": [RUN["layers"][0] | {"heads": 2_000_000_000}]}), "number of heads is 2000000000"),
        (to_json(RUN | {"layers": [RUN["layers"][0] | {"number": 9_999}]}), "where the samples are of 3 layers x 4"),
        (to_json(RUN | {"layers": [RUN["layers"][0] | {"heads": 5}]}), "layer 0 has 5 heads, where the samples"),
        (to_json(RUN | {"layers": [RUN["layers"][0] | {"heads": 9_999}] * 9_999}), "99980001 heads, where up to"),
        (to_json(RUN | {"layers": [RUN["layers"][0] | {"number": -1}]}), "number is -1"),
        (to_json(RUN).replace(b'"number":0', b'"number":1e999'), "step 300"),
        (to_json(RUN).replace(b'"number":0', b'"number":1e300'), "number is 1e+300"),
        (to_json(RUN).replace(b'"number":0', b'"number":' + b"9" * 400), "number is 9999"),
        (to_json(RUN).replace(b'"not_measured":{}', b'"not_measured":' + b"[" * 100_000), "step 300"),
        (to_json(RUN).replace(b'"not_measured":{}', b'"not_measured":[[[]]]'), "not built as expected"),
        (to_json(RUN).replace(b'"every_n_steps":5', b'"every_n_steps":1e300'), "the cadence is 1e+300"),
        (
            to_json(RUN | {"levels": [{"rule": "", "title": "", "severity": "", "quantity": "", "limit": None}]}),
            "limit",
        ),
    ],
)
def test_a_record_beyond_bounds_is_named_and_left_out(tmp_path, record, says):
    writer = SummaryWriter(tmp_path / "run")
    write_run(tmp_path / "run", writer=writer)
    write_tensor(writer, tag_of("run"), b"", record, 300)
    writer.close()
    found = Board(tmp_path, False).json("run", run="run", prefix="attn")
    assert says in "\n".join(found["problems"])
    assert found["record"] is None or found["record"]["step"] == 0
    assert found["warnings"]


def test_numbers_without_end_in_a_tags_metadata_are_none(tmp_path):
    writer = SummaryWriter(tmp_path / "run")
    content = metadata("heads", quantity="mine").replace(b"[null,null]", b"[0," + b"9" * 400 + b"]")
    write_tensor(writer, tag_of("heads", quantity="mine"), content, [[1.0]])
    writer.close()
    (tag,) = Board(tmp_path, False).catalogue()["runs"][0]["tags"]
    assert tag["limits"] == [0.0, None]


@pytest.mark.parametrize(
    ("source", "every", "expected"), [("validation", 5, None), ("validation", None, None), ("train", 5, 5)]
)
def test_validations_have_no_cadence(tmp_path, source, every, expected):
    writer = SummaryWriter(tmp_path / "run")
    write_run(tmp_path / "run", [0], writer=writer)
    write_tensor(writer, tag_of("run"), b"", to_json(RUN | {"source": source, "every_n_steps": every}), 10)
    writer.close()
    assert Board(tmp_path, False).json("run", run="run", prefix="attn")["record"]["every_n_steps"] is expected


def test_samples_that_fill_what_is_kept_are_said_to(tmp_path, board):
    write_run(tmp_path / "run", range(50))
    one = board(tmp_path, "--samples_per_plugin=attnmon=20")
    one.catalogue(newest_is(49))
    assert one.json("summary", run="run", tag=ENTROPY)["kept"] == 20
    everything = board(tmp_path, "--samples_per_plugin=attnmon=0")
    everything.catalogue(newest_is(49))
    assert everything.json("summary", run="run", tag=ENTROPY)["kept"] is None


def test_a_runs_warnings_do_not_wait_for_each_quantity(board, tmp_path, monkeypatch) -> None:
    """Each call to the fast loader takes its time, however little it asks for."""
    quantities = [f"mine_{place}" for place in range(20)]

    def many(step: int, seed: int) -> dict[str, dict[int, list[float]]]:
        return {name: {0: [0.5] * HEADS, 1: [0.5] * HEADS} for name in quantities}

    write_run(tmp_path / "run", (0, 10), figures=many)
    one = board(tmp_path)
    one.catalogue(lambda found: bool(found["runs"]) and len(found["runs"][0]["tags"]) >= 22)
    asked: list[object] = []
    data = Store._data
    monkeypatch.setattr(Store, "_data", lambda self, *rest: asked.append(rest) or data(self, *rest))
    found = one.json("run", run="run", prefix="attn")
    assert len(found["record"]["layers"]) == 2
    assert found["problems"] == []
    assert 1 <= len(asked) <= 4  # the run's record, its warnings, the samples beside them, and all newest at once


LIMITED = {"run": "run", "prefix": "attn", "tag": ENTROPY, "quantity": "entropy_normalized"}
RISE = {"rule": "entropy_rise", "title": "entropy rising", "severity": "warn", "rises": True}
OWN = tag_of("limits", quantity="entropy_normalized", rule="entropy_rise")


def test_series_have_the_limits_that_each_head_has_of_its_own(tmp_path, board):
    write_run(tmp_path / "run", own_limits=True)
    one = board(tmp_path)
    tags = {tag["tag"]: tag for tag in one.catalogue()["runs"][0]["tags"]}
    assert {name: tags[OWN][name] for name in (*RISE, "kind", "quantity")} == RISE | {
        "kind": "limits",
        "quantity": "entropy_normalized",
    }
    found = one.json("series", heads="1.2,0.3,99.0", **LIMITED)
    assert found["problems"] == []
    assert [limit["rule"] for limit in found["limits"]] == ["entropy_collapse", "entropy_rise"]
    rise = found["limits"][1]
    assert rise["steps"] == list(STEPS)
    judged, *others = (floats(data, -1) for data in rise["heads"])
    (mark,) = [mark for mark in found["heads"][0]["marks"] if mark["rule"] == "entropy_rise"]
    assert judged[STEPS.index(mark["step"])] == pytest.approx(mark["limit"], rel=0.02)
    assert all(np.isnan(other).all() for other in others)  # not measured; no such head
    other = LIMITED | {"tag": tag_of("heads", quantity="mine"), "quantity": "mine"}
    assert one.json("series", heads="1.2", **other)["limits"] == []
    assert one.get("frames", run="run", tag=OWN, steps="0").status_code == 422


def test_runs_without_limits_of_their_own_have_none(tmp_path, board):
    write_run(tmp_path / "run")
    one = board(tmp_path)
    one.catalogue()
    found = one.json("series", heads="1.2", **LIMITED)
    assert (found["limits"], found["problems"]) == ([], [])


def test_limits_that_cannot_be_read_are_named_and_cost_themselves_only(tmp_path, board):
    writer = SummaryWriter(tmp_path / "run")
    write_run(tmp_path / "run", writer=writer)
    nameless = metadata("limits", quantity="entropy_normalized", rule={"rule": "x", "title": 3})
    write_tensor(writer, "nameless", nameless, [[1.0]])
    write_tensor(writer, OWN, metadata("limits", quantity="entropy_normalized", rule=RISE), [[0.5]], 180)
    write_tensor(writer, OWN, b"", [1.0, 2.0], 190)
    writer.close()
    one = board(tmp_path)
    found = one.catalogue(lambda found: found["problems"])
    assert found["problems"] == [{"run": "run", "tag": "nameless", "text": "title 3, where a name is expected"}]
    series = one.json("series", heads="0.0,1.2", **LIMITED)
    assert len(series["heads"]) == 2
    assert [limit["steps"] for limit in series["limits"]] == [[180]]
    assert [floats(data, -1).tolist() for data in series["limits"][0]["heads"]] == [
        [0.5],
        [pytest.approx(np.nan, nan_ok=True)],
    ]
    (problem,) = series["problems"]
    assert problem["tag"] == OWN
    assert problem["text"].startswith("1 of 2 samples is left out, not being numbers of layers x heads")


def test_limits_beyond_the_step_that_a_run_went_back_to_are_void(tmp_path, board):
    write_run(tmp_path / "run", own_limits=True)
    write_run(tmp_path / "run", range(55, 100, 10), rules_on=False)
    one = board(tmp_path)
    one.catalogue(lambda found: found["runs"] and found["runs"][0]["tags"][0]["stamp"][0] in (95, 190))
    for _ in range(100):
        found = one.json("series", heads="1.2", **LIMITED)
        if found["steps"][-1] == 95:
            break
    assert found["steps"][-1] == 95
    assert {limit["steps"][-1] for limit in found["limits"]} == {50}


def test_limits_are_read_once(tmp_path, monkeypatch):
    write_run(tmp_path / "run", own_limits=True)
    one = Board(tmp_path, load_fast=False)
    one.catalogue()
    read = []
    data = Store._data
    monkeypatch.setattr(Store, "_data", lambda self, *args: read.append(args[3]) or data(self, *args))
    for heads in ("1.2", "0.0"):
        one.json("series", heads=heads, **LIMITED)
    assert read.count([OWN]) == 1


def test_a_run_without_samples_of_heads_is_named(tmp_path, board):
    writer = SummaryWriter(tmp_path / "bare")
    write_tensor(writer, tag_of("run"), metadata("run"), b"{}")
    writer.close()
    write_run(tmp_path / "run", [0])
    found = board(tmp_path).catalogue(lambda found: len(found["runs"]) == 2)
    assert found["problems"] == [
        {
            "run": "bare",
            "tag": "",
            "text": "no samples of attention heads that can be read are in this run, so it can't be chosen",
        }
    ]
