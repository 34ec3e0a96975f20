"""The files of a report: the figures in the JSON, and a page that stands by itself."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report.runs import Run, event_file
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

from attnmon.metrics.entropy import MIN_KEYS
from attnmon.metrics.logits import SPREAD_KEYS
from attnmon.records import tag_of
from attnmon.report import ReportError, write_report
from attnmon.report.curves import Line, curves, sparkline
from attnmon.report.maps import Rows, Scale, colour_bar, heat_map, scale_of
from attnmon.report.text import number, tick_labels, why_none

HOSTILE = "<img src=x onerror=alert(1)>\"'&</script>"


class _Page(HTMLParser):
    """Elements and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.opened.append((tag, dict(attributes)))
        if tag not in {"meta", "br", "img", "path", "rect"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"path", "rect"}:
            assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, text: str) -> None:
        if not self._open or self._open[-1] not in {"script", "style"}:
            self.words.append(text)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def _page(path: Path) -> _Page:
    page = _Page(path.read_text(encoding="utf-8"))
    assert page._open == []
    return page


def _rising(folder: Path, **options) -> Path:
    """Head 1 of layer 0 is under alarm at the end, head 0 of layer 1 has recovered."""
    run = Run(folder, **options)

    def figure(step: int, layer: int, head: int) -> float:
        if (layer, head) == (0, 1):
            return 0.9 if step >= 100 else 0.3
        return 0.9 if (layer, head) == (1, 0) and 50 <= step < 100 else 0.3

    run.samples(range(0, 200, 10), figure, {0: 2, 1: 3})
    run.writer.add_scalar("train_loss", 2.5, 0)
    run.writer.add_scalar("train_loss", 1.5, 190)
    return run.close()


def _strict(path: Path) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_json_holds_the_figures(tmp_path):
    page = write_report(_rising(tmp_path / "run"))
    assert page == tmp_path / "run" / "attention_report.html"
    content = _strict(page.with_suffix(".json"))
    assert content["format"] == "attnmon.report"
    (run,) = content["runs"]
    section = run["sections"]["attn"]
    series = section["quantities"]["entropy_normalized"]
    assert series["first"] == [[0.3, 0.3, None], [0.3, 0.3, 0.3]]
    assert series["last"] == [[0.3, 0.9, None], [0.3, 0.3, 0.3]]
    assert series["high_step"][0] == [0, 100, -1]
    assert series["steps"] == list(range(0, 200, 10))
    assert series["values"][10][0] == [0.3, 0.9, None]
    assert section["status"] == [
        {"layer": 0, "head": 1, "status": "under alarm", "severity": "watch"},
        {"layer": 1, "head": 0, "status": "recovered", "severity": "watch"},
    ]
    assert [(alarm["layer"], alarm["start"], alarm["end"]) for alarm in section["alarms"]] == [
        (1, 70, 120),
        (0, 120, None),
    ]
    assert section["alerts"][0]["remedy"].startswith("more heads")
    assert run["loss"] == {"tag": "train_loss", "steps": [0, 190], "values": [2.5, 1.5]}
    assert section["heads_under_alarm"]["entropy_rise"]["values"][-1] == 1
    assert content["comparisons"] == []


def test_page_says_what_happened(tmp_path):
    page = _page(write_report(_rising(tmp_path / "run")))
    for part in (
        "1 of 5 heads is under an alarm at the end of the run (1 watch), 1 was earlier and recovered, 3 never gave a ",
        "entropy rising 2 warnings",
        "What it means. Attention spreads toward uniform and selects less.",
        "Remedy. More heads (narrower ones)",
        "step 120: head 1 of layer 0 (h.0.attn) beyond the limit since step 100",
        "train_loss 2.5 at step 0, 1.5 at step 190",
        "every 10 steps",
        "training batches",
        "0.10% of the run's time",
        "no such head",
        "step 70: most under alarm (1 head)",
    ):
        assert part in page.text, part
    maps = [attributes for tag, attributes in page.opened if tag == "svg" and attributes.get("class") == "map"]
    assert maps[0]["data-v"] == (
        "never warned,entropy rising since step 100 and still under alarm,x;"
        "entropy rising since step 50 and recovered by step 120,never warned,never warned"
    )
    assert [one["data-v"] for one in maps[1:4]] == [
        "0.3,0.3,x;0.3,0.3,0.3",  # first
        "0.3,0.3,x;0.9,0.3,0.3",  # most under alarm: step 70, the first of several with one head
        "0.3,0.9,x;0.3,0.3,0.3",  # last
    ]


def test_the_page_reaches_for_nothing(tmp_path):
    path = write_report([_rising(tmp_path / "a"), _rising(tmp_path / "b")])
    text, page = path.read_text(encoding="utf-8"), _page(path)
    assert path.name == "attention_comparison.html"
    assert not re.search(r"(?i)\b(?:https?|ftp|wss?):|//[a-z0-9.-]+\.[a-z]{2,}", text)
    assert not re.search(r"(?i)@import|url\(|fetch\(|XMLHttpRequest|importScripts", text)
    for tag, attributes in page.opened:
        assert tag not in {"img", "link", "iframe", "object", "embed", "base", "image", "use", "audio", "video"}
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    policy = next(a["content"] for tag, a in page.opened if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    targets = {attributes.get("id") for _, attributes in page.opened}
    links = [attributes["href"][1:] for tag, attributes in page.opened if tag == "a"]
    assert links
    assert set(links) <= targets


def test_text_from_the_run_stays_text(tmp_path):
    run = Run(tmp_path / "x<b>", paths={0: HOSTILE, 1: "h"}, source=HOSTILE)
    for step in range(0, 100, 10):
        values = {"entropy_normalized": {0: [0.9 if step > 30 else 0.2]}, HOSTILE: {1: [1.0]}}
        run.sample(step, values, {HOSTILE: HOSTILE})
    run.writer.add_scalar(f"loss{HOSTILE}", 1.0, 0)
    folder = run.close()
    other = Run(tmp_path / "b", paths={0: HOSTILE + "2"})
    other.samples((0,), lambda *_: 0.1, {0: 2})
    for path in (write_report(folder), write_report([folder, other.close()])):
        text, page = path.read_text(encoding="utf-8"), _page(path)
        assert "<img" not in text
        assert {tag for tag, _ in page.opened}.isdisjoint({"img", "b>"})
        assert not [a for _, a in page.opened if "onerror" in a]
        assert [tag for tag, _ in page.opened].count("script") == 2
        assert HOSTILE in page.text
        _strict(path.with_suffix(".json"))


def test_two_runs_are_compared(tmp_path):
    first = _rising(tmp_path / "a")
    second = Run(tmp_path / "b", every_n_steps=20, paths={0: "h.0.attn", 1: "h.9.attn"})
    second.samples(range(0, 240, 20), lambda *_: 0.5, {0: 2, 1: 3})
    validation = Run(tmp_path / "b", prefix="attn_val", source="validation", suffix=".v")
    validation.samples((0,), lambda *_: 0.5, {0: 2})
    validation.close()
    path = write_report([first, second.close()], tmp_path / "out")
    assert path == tmp_path / "out" / "attention_comparison.html"
    page, content = _page(path), _strict(path.with_suffix(".json"))
    (entry,) = content["comparisons"]
    part = entry["differences"]["entropy_normalized"]
    assert entry["pairs"] == [[0, 0]]
    assert part["common_steps"] == list(range(0, 200, 20))
    assert part["heads_end"] == [[0.2, -0.4, None]]
    assert part["layers_common"][0] == [0.2]
    for words in (
        "Layers that only run A has: 1 (h.1.attn).",
        "Layers that only run B has: 1 (h.9.attn).",
        "The cadences differ",
        "Only run B has this prefix",
        "B less A, mean of each layer, at the 10 common steps",
    ):
        assert words in page.text, words


def test_layer_means_alone_make_a_page(tmp_path):
    page = _page(write_report(_rising(tmp_path / "run", tensors=False)))
    assert "only the means over each layer's heads were logged" in page.text
    assert "Heads that changed most" not in page.text
    assert "Health of the heads" in page.text  # the counts were logged
    assert "never gave a warning" not in page.text  # which heads, was not


def test_without_warnings_and_counts_nothing_is_said_of_health(tmp_path):
    run = Run(tmp_path / "run", scalars=False, judged=False)
    run.samples((0, 10), lambda *_: 0.3, {0: 2})
    page = _page(write_report(run.close()))
    assert "the rules were off" in page.text
    assert "never warned" not in page.text


def test_not_measured_and_no_such_head_look_different():
    rows = Rows("s", ["0", "1"])
    values, exists = np.float32([[0.5, math.nan], [1.0, math.nan]]), np.array([[True, True], [True, False]])
    picture = heat_map(values, exists, Scale(0.0, 1.0), rows, label="entropy")
    assert [len(re.findall(f'class="{look}"', picture)) for look in ("nan", "stroke", "absent", "c6", "c11")] == [1] * 5
    assert 'data-v="0.5,;1,x"' in picture
    bar = colour_bar(Scale(0.0, 1.0), "nats", missing=True, absent=True)
    assert "not measured" in bar
    assert "no such head" in bar


def test_one_head_far_away_does_not_take_the_scale():
    values = np.append(np.linspace(0, 1, 200), 50.0)
    scale = scale_of(values)
    assert (scale.below, scale.above) == (False, True)
    assert scale.high == pytest.approx(0.98, abs=0.02)
    assert "and more" in colour_bar(scale, "")
    assert scale_of(np.linspace(0, 1, 200)) == Scale(0.0, 1.0)
    assert scale_of(np.array([math.nan])) == Scale(0.0, 1.0)


def test_only_a_report_is_written_over(tmp_path, plain):
    path = write_report(plain)
    assert write_report(plain) == path
    other = tmp_path / "mine.html"
    other.write_text("<p>my page</p>")
    with pytest.raises(ReportError, match=r"mine\.html is something else"):
        write_report(plain, other)
    assert other.read_text() == "<p>my page</p>"
    assert not other.with_suffix(".json").exists()
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(ReportError, match=r"data\.json is something else"):
        write_report(plain, tmp_path / "data.html")
    assert not (tmp_path / "data.html").exists()


def test_one_run_or_two(plain):
    for count in (0, 3):
        with pytest.raises(ReportError, match=f"one folder or two, but got {count}"):
            write_report([plain] * count)


def _died(folder: Path, **options) -> Path:
    """Head 1 of layer 0 rises, and is not a number from step 40 on; layer 2 is never measured."""
    run = Run(folder, **options)
    for step in range(0, 60, 10):
        rows = {0: [0.25, math.nan if step >= 40 else 0.5 + step / 100], 1: [math.nan if step >= 40 else 0.75]}
        run.sample(step, {"entropy_normalized": {**rows, 2: [math.nan]}, "active_share": {0: [math.nan, math.nan]}})
        run.writer.add_scalar("train_loss", math.nan if step >= 40 else 2.5, step)
    return run.close()


def test_a_head_that_died_is_said_to_have(tmp_path):
    path = write_report(_died(tmp_path / "run"))
    page, content = _page(path), _strict(path.with_suffix(".json"))
    series = content["runs"][0]["sections"]["attn"]["quantities"]["entropy_normalized"]
    assert series["last"] == [[0.25, None], [None, None], [None, None]]
    assert series["last_step"] == [[50, 30], [30, -1], [-1, -1]]
    assert series["layers"]["last"] == [0.25, None, None]
    assert "No figure at the last sample, though there were some up to step 30: 2 heads [layer 1 " in page.text
    assert "1 h.1.attn 0.75 \u2013 \u2013 0.75 (head 0, step 0) 0.75 (head 0, step 0)" in page.text
    assert "0.25 (head 0, step 0) 0.8 (head 1, step 30)" in page.text
    assert "0 1 0.5 0.8" not in page.text  # among the heads that changed most from first to last


def test_a_first_figure_says_where_it_is_from(tmp_path):
    run = Run(tmp_path)
    for step in (0, 10, 20):
        run.sample(step, {"entropy_normalized": {0: [0.25, math.nan if step < 10 else 0.5]}})
    page = _page(write_report(run.close()))
    assert "0 h.0.attn 0.375 (up to step 10) 0.375" in page.text
    assert "0 1 0.5 (step 10) 0.5 0" in page.text


@pytest.mark.parametrize("samples", [1, 6])
def test_runs_with_gaps_are_compared(tmp_path, samples):
    """A layer, a quantity and a head without any figure, and one head that has none at the end."""
    other = Run(tmp_path / "b")
    for step in range(0, 10 * samples, 10):
        other.sample(step, {"entropy_normalized": {0: [0.5, 0.5], 1: [0.5], 2: [0.5]}, "active_share": {0: [0.5, 0.5]}})
    a, b = _died(tmp_path / "a"), other.close()
    for runs in ([a, a], [a, b], [b, a]):
        path = write_report(runs, tmp_path / "out.html")
        page = _page(path)
        assert "B less A" in page.text
        assert ("Run A: No figure at the last sample" in page.text) == (runs[0] == a)
        assert ("Run B: No figure at the last sample" in page.text) == (runs[1] == a)
        _strict(path.with_suffix(".json"))
    page = _page(write_report([a, b], tmp_path / "out.html"))
    assert "1 \u2013 0.5 \u2013" in page.text  # the row of layer 1 stays, though it has no difference


def test_a_chart_of_nothing_is_empty():
    nothing = np.full(3, np.nan)
    for picture in (
        curves(np.array([0, 10, 20]), [Line(nothing, "a")], label="x", band=(nothing, nothing)),
        curves(np.array([], dtype=np.int64), [Line(np.array([]), "a")], label="x"),
        sparkline(nothing, 0.0, 1.0),
    ):
        assert 'd=""' in picture


def test_a_loss_that_is_not_a_number_is_called_so(tmp_path):
    page = _page(write_report(_died(tmp_path)))
    assert "train_loss 2.5 at step 0, NaN at step 50; not finite 2 times, from step 40 on" in page.text


def test_a_validation_shows_no_cadence(tmp_path):
    run = Run(tmp_path, prefix="attn_val", source="validation", every_n_steps=5)
    run.samples((0, 7), lambda *_: 0.2, {0: 2})
    page = _page(write_report(run.close()))
    assert "every 5 steps" not in page.text
    assert "cadence when validations ran" in page.text


_NOT_HERE = "the warnings themselves are not in these files"


def test_counts_without_warnings_are_no_clean_bill(tmp_path):
    """As the CSV logger keeps them: scalars only."""
    a, b = _rising(tmp_path / "a", tensors=False), _rising(tmp_path / "b", tensors=False, per_head=True)
    for folder in (a, b):
        path = write_report(folder)
        page = _page(path)
        assert page.text.count(_NOT_HERE) == 2  # at the health and at the list
        for words in ("0 warnings", "None is recorded", "never warned", "never gave a warning"):
            assert words not in page.text, words
        assert "entropy rising \u2013 1 (step 70) 1" in page.text
        assert _strict(path.with_suffix(".json"))["runs"][0]["sections"]["attn"]["alerts_complete"] is False
    page = _page(write_report([a, b]))
    assert f"health {_NOT_HERE} {_NOT_HERE}" in page.text
    assert "never gave a warning" not in page.text


def _spoiled(folder: Path, which: int) -> Path:
    """`_rising` with one, or all (-1), of its records of warnings broken."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = event_file(_rising(folder))
    events = [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]
    found = [value for event in events for value in event.summary.value if value.tag == tag_of("warnings")]
    assert len(found) == 3  # at the first sample and with each warning
    for value in found if which < 0 else found[which : which + 1]:
        value.tensor.string_val[0] = b"{"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
    return folder


@pytest.mark.parametrize("which", [-1, 1])
def test_warnings_that_could_not_be_read_are_no_clean_bill(tmp_path, which):
    page = _page(write_report(_spoiled(tmp_path / "run", which)))
    assert "the rules were off" not in page.text
    assert ("3 records of" if which < 0 else "The record of") in page.text
    assert "left out" in page.text
    assert "Which heads are or were under alarm is not fully known" in page.text
    assert (_NOT_HERE if which < 0 else "These are not all: others are not in these files") in page.text
    assert "never warned" not in page.text
    assert "never gave a warning" not in page.text
    assert ("at least 1 warning" in page.text) == (which == 1)


def test_without_a_recovery_none_is_spoken_of(tmp_path):
    run = Run(tmp_path)
    run.samples((0, 10), lambda *_: 0.2, {0: 2})
    page = _page(write_report(run.close()))
    assert "0 of 2 heads are under an alarm at the end of the run, 2 never gave a warning." in page.text


def test_where_all_heads_warned_none_never_did(tmp_path):
    run = Run(tmp_path)
    run.samples(range(0, 100, 10), lambda step, layer, head: 0.2 if step < 50 else 0.9, {0: 2})
    page = _page(write_report(run.close()))
    assert "2 of 2 heads are under an alarm at the end of the run (2 watch)." in page.text


def test_runs_of_one_name_are_told_apart(tmp_path, plain):
    places = [tmp_path / side / "logs" / "version_0" for side in ("left", "right")]
    for place in places:
        shutil.copytree(plain, place)
    path = write_report(places, tmp_path / "out.html")
    names = [str(Path(side, "logs", "version_0")) for side in ("left", "right")]
    assert f"<title>Attention of {names[0]} and {names[1]}</title>" in path.read_text(encoding="utf-8")
    assert [run["name"] for run in _strict(path.with_suffix(".json"))["runs"]] == names
    path = write_report([places[0], plain], tmp_path / "out.html")
    assert "Attention of version_0 and plain" in _page(path).text
    path = write_report([places[0], places[0].parent / ".." / "logs" / "version_0"], tmp_path / "out.html")
    assert "Attention of version_0 and version_0" in _page(path).text  # there is nothing to tell apart


def test_a_very_long_path_is_cut_in_tables_and_wraps_elsewhere(tmp_path):
    long = "block." * 400 + "attn"
    run = Run(tmp_path, paths={0: long})
    run.samples(range(0, 100, 10), lambda step, layer, head: 0.9 if step >= 50 and head else 0.2, {0: 2, 1: 1})
    path = write_report(run.close())
    page = _page(path)
    assert "head 1 of layer 0 (block.block.block.block.block.block.\u2026" in page.text
    titled = [attributes for tag, attributes in page.opened if tag == "code" and attributes.get("title") == long]
    assert titled
    assert page.text.count(long) <= 5  # the warnings, and once what was watched
    style = path.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert re.search(r"main\{[^}]*overflow-wrap:anywhere", style)
    assert re.search(r"td code\{[^}]*white-space:normal", style)


def test_colours_go_from_end_to_end_of_what_a_quantity_can_be(tmp_path):
    run = Run(tmp_path)
    for step in (0, 10):
        values = {0: [0.3, 0.4]}
        run.sample(step, {"entropy_normalized": values, "score_max": values, "mine": values})
    folder = run.close()
    assert _bars(write_report(folder)) == [("0", "1"), ("0", "0.4"), ("0.3", "0.4")]
    assert _bars(write_report([folder, folder]))[:2] == [("0", "1"), ("0", "0")]


def _bars(path: Path) -> list[tuple[str, str]]:
    """Ends of the colour scales."""
    found = re.findall(r'<p class="bar"><span>(.+?)</span>.*?<span>([^ ]+?)(?: .*?)?</span>', path.read_text("utf-8"))
    return [(low, high) for low, high in found if "<" not in low]


def test_a_figure_beyond_the_limits_is_said_to_be(tmp_path):
    values = np.float32([0.2, 0.4])
    assert scale_of(values, limits=(0.0, 1.0)) == Scale(0.0, 1.0)
    assert scale_of(values, limits=(0.0, None)) == Scale(0.0, pytest.approx(0.4))
    assert scale_of(np.float32([-0.5, 1.00001]), limits=(0.0, 1.0)) == Scale(0.0, 1.0, below=True)
    assert scale_of(np.float32([np.nan]), limits=(1.0, None)) == Scale(1.0, 2.0)


@pytest.mark.parametrize("name", ["page.HTML", "page.Html"])
def test_the_letters_of_a_suffix_may_be_large(plain, tmp_path, name):
    assert write_report(plain, tmp_path / name) == tmp_path / name
    assert (tmp_path / "page.json").exists()
    assert write_report(plain, tmp_path / "page.JSON", page=False) == tmp_path / "page.JSON"


def test_an_empty_name_is_no_folder(plain, tmp_path, monkeypatch):
    """As an unset variable of a shell gives it: nothing must be read or written where one happens to be."""
    monkeypatch.chdir(plain)
    before = sorted(plain.iterdir())
    for empty in ("", " "):
        with pytest.raises(ReportError, match="`output` .* empty name"):
            write_report(plain, empty)
        with pytest.raises(ReportError, match="`run_dir` .* empty name"):
            write_report(empty)
    assert sorted(plain.iterdir()) == before


def test_a_time_that_no_calendar_has_is_not_recorded(tmp_path):
    run = Run(tmp_path)
    run.samples((0,), lambda *_: 0.2, {0: 2})
    run.writer.add_scalar("train_loss", 1.0, 0, walltime=1e300)
    assert "recorded not recorded" in _page(write_report(run.close())).text


def _labels(picture: str, kind: str) -> list[str]:
    return re.findall(f'<text class="tick {kind}"[^>]*>([^<]*)</text>', picture)


def test_a_nearly_constant_curve_has_labels_that_differ():
    picture = curves(np.array([0, 1]), [Line(np.float32([0.99998, 0.99991]), "a")], label="x")
    values = [text for text in _labels(picture, "end") if text != "step"]
    assert values == ["0.99992", "0.99994", "0.99996", "0.99998"]
    assert _labels(picture, "mid") == ["0", "1"]


def test_a_constant_curve_has_an_axis_around_it():
    for level in (0.0, 0.3, 1.0, 2.5e7):
        picture = curves(np.array([5]), [Line(np.array([level]), "a")], label="x")
        values = [float(text.replace("\u2212", "-")) for text in _labels(picture, "end") if text != "step"]
        assert min(values) < level < max(values)
        assert len(set(values)) == len(values)
        assert _labels(picture, "mid") == ["5"]


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0.0, 2e-6, 4e-6], ["0", "2e-6", "4e-6"]),
        ([1.0e8, 1.1e8], ["1.0e8", "1.1e8"]),
        ([-0.001, 0.0, 0.001], ["\u22120.001", "0.000", "0.001"]),
        ([123456.1, 123456.2], ["123456.1", "123456.2"]),
        ([7.0], ["7"]),
    ],
)
def test_labels_of_ticks_have_the_digits_of_their_spacing(ticks, labels):
    assert tick_labels(ticks) == labels


def test_wide_labels_stay_in_the_picture():
    picture = curves(np.array([0, 1]), [Line(np.array([123456.71, 123456.74]), "a")], label="x")
    ends = [(float(x), len(text)) for x, text in re.findall(r'end" x="([\d.]+)"[^>]*>([\d.]{5,})<', picture)]
    assert ends
    assert all(x - 5.5 * length > 0 for x, length in ends)


def test_figures_that_are_close_to_each_other_are_told_apart(tmp_path):
    run = Run(tmp_path / "run")
    run.samples((0, 1), lambda step, layer, head: 0.99998 - 7e-5 * step - 1e-6 * head, {0: 2})
    for step in (0, 1):
        run.writer.add_scalar("train_loss", 2.5 - step / 4096, step)
    folder = run.close()
    page = _page(write_report(folder))
    assert "train_loss 2.5 at step 0, 2.499756 at step 1" in page.text
    assert "mean of the layers 0.9999795 to 0.9999095" in page.text
    assert "0 1 0.999979 0.999909 " in page.text  # among the heads that changed most
    assert 'data-v="0.99991,0.999909"' in write_report(folder).read_text(encoding="utf-8")
    assert number(0.3, 1e-30) == "0.3"


def _without_figures(folder: Path, share: float) -> Path:
    run = Run(folder)
    for step in (0, 10):
        rows = {"entropy_normalized": {0: [0.2 + step / 100]}, "active_share": {0: [share]}, "mine": {0: [math.nan]}}
        run.sample(step, rows)
        run.writer.add_scalar("train_loss", math.nan, step)
    return run.close()


def test_a_quantity_without_figures_takes_one_line(tmp_path):
    empty, full = _without_figures(tmp_path / "a", math.nan), _without_figures(tmp_path / "b", 0.5)
    path = write_report(empty)
    page = _page(path)
    assert "Active share exp(H) / n not measured: only rows that see at least 64 keys have one" in page.text
    assert "mine not measured: no sample has a figure" in page.text
    html = path.read_text(encoding="utf-8")
    assert html.count('class="curves"') == 1  # of the entropy: none of the loss either
    assert "mean of the layers \u2013" not in page.text
    assert html.count("furthest from the first") <= 2  # of the entropy, and in its label
    page = _page(write_report([empty, full]))
    assert "Active share exp(H) / n not measured in run A: only rows" in page.text
    assert "mine not measured in either run: no sample has a figure" in page.text
    assert "\u22121 " not in page.text


def test_without_a_common_figure_no_difference_is_drawn(tmp_path):
    """Both have figures, but not in the same layers."""
    for name, rows in (("a", {0: [0.5], 1: [math.nan]}), ("b", {0: [math.nan], 1: [0.5]})):
        run = Run(tmp_path / name)
        for step in (0, 10):
            run.sample(step, {"entropy_normalized": rows})
        run.close()
    path = write_report([tmp_path / "a", tmp_path / "b"])
    page = _page(path)
    assert "there is no difference to show" in page.text
    assert "No layer has a figure in both runs at a common step." in page.text
    compared = path.read_text(encoding="utf-8").partition('<h2 id="A-attn"')[0]
    assert 'class="curves"' not in compared


def test_the_reasons_are_those_of_the_measures():
    assert f"at least {MIN_KEYS} keys" in why_none("active_share")
    assert f"at least {SPREAD_KEYS} keys" in why_none("score_spread")
    assert "more than 10 keys" in why_none("f_score@10")


def test_one_thing_is_not_called_several(tmp_path):
    run = Run(tmp_path / "run", every_n_steps=1)
    run.samples((0,), lambda *_: 0.9, {0: 1})
    run.writer.add_scalar("train_loss", math.nan, 0)
    folder = run.close()
    for runs in (folder, [folder, folder]):
        text = _page(write_report(runs, tmp_path / "out.html")).text
        wrong = re.findall(r"\b1 (?:layers|heads|samples|warnings|times|steps|records|files)\b", text)
        assert wrong == []
        assert "1 layer, 1 head" in text
        assert "0 of 1 head are under an alarm" in text
        assert "cadence every step" in text
        assert "not finite 1 time, from step 0 on" in text
