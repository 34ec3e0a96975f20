"""The files of a report: the figures in the JSON, and a page that stands by itself."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report.runs import Run

from attnmon.report import ReportError, write_report
from attnmon.report.maps import Rows, Scale, colour_bar, heat_map, scale_of

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
        {"layer": 0, "head": 1, "status": "under alarm", "severity": "warn"},
        {"layer": 1, "head": 0, "status": "recovered", "severity": "warn"},
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
        "1 of 5 heads is under an alarm at the end of the run (1 warn), 1 was and recovered, 3 never gave a warning.",
        "entropy rising 2 warnings",
        "What it means. Attention spreads toward uniform and stops selecting.",
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
