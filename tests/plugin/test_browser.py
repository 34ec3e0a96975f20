"""The tab in a headless Chromium, against a real TensorBoard process: what people do with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin.chromium import PATIENCE, Chromium, find
from plugin.conftest import HEADS, LAYERS, RISEN, SPREAD, STEPS, figures, recovering, write_run, write_tensor
from torch.utils.tensorboard import SummaryWriter

from attnmon.metrics.entropy import MIN_KEYS
from attnmon.metrics.logits import SPREAD_KEYS
from attnmon.records import metadata, tag_of, to_json

BROWSER = find()
NEEDED = os.environ.get("CI_NEEDS_BROWSER") == "1"
OPTIONS = ("--host=127.0.0.1", "--port=0", "--reload_interval=1")
pytestmark = pytest.mark.skipif(
    BROWSER is None and not NEEDED,
    reason="no chromium here (apt install chromium); CI_NEEDS_BROWSER=1 makes that a failure",
)


class Tab:
    """TensorBoard with the tab open."""

    def __init__(self, browser: Chromium, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, fragment: str = "attnmon") -> None:
        self.browser.open("about:blank")
        self.browser.open(f"{self.url}/#{fragment}")
        self.wait("!d.querySelector('main').hidden && d.querySelectorAll('.map-note').length > 0")
        self.settle()

    def js(self, expression: str) -> Any:
        """An expression with the tab's document ``d`` and the place of its frame ``o``."""
        return self.browser.run(_inside(expression))

    def wait(self, expression: str) -> Any:
        return self.browser.wait(_inside(expression))

    def settle(self) -> None:
        self.wait("[...d.querySelectorAll('.map-note')].every((note) => note.textContent.startsWith('sample of step'))")
        self.wait("!d.querySelector('[aria-labelledby=warnings-title]').textContent.includes('Loading')")

    def words(self) -> str:
        return self.js("d.querySelector('.step-words').textContent")

    def keeps(self, **expected: str | list[str]) -> bool:
        """Whether the tab's address comes to hold these parts of the view."""
        wanted = {name: [value] if isinstance(value, str) else value for name, value in expected.items()}
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            text = self.js("f.contentWindow.location.hash.split('p.attnmon.view=')[1]") or ""
            found = urllib.parse.parse_qs(urllib.parse.unquote(text))
            if wanted.items() <= found.items():
                return True
            time.sleep(0.05)
        return False

    def place(self, layer: int, head: int, number: int = 0) -> tuple[float, float]:
        """The middle of a cell in the window."""
        left, top, width, height = self.js(
            f"(() => {{ const b = d.querySelectorAll('.map-canvas')[{number}].getBoundingClientRect();"
            " return [b.left + o.left, b.top + o.top, b.width, b.height]; })()"
        )
        wide, tall = (width - 50) / HEADS, (height - 38) / LAYERS
        return left + 44 + (head + 0.5) * wide, top + 4 + (layer + 0.5) * tall

    def colour(self, layer: int, head: int, number: int = 0) -> list[int]:
        """The colour of a cell's lower half."""
        x, y = self.place(layer, head, number)
        return self.js(
            f"(() => {{ const c = d.querySelectorAll('.map-canvas')[{number}], b = c.getBoundingClientRect();"
            f" return [...c.getContext('2d').getImageData({x} - o.left - b.left, {y} + 6 - o.top - b.top, 1, 1).data]"
            ".slice(0, 3); })()"
        )

    def click(self, layer: int, head: int, *, shift: bool = False) -> None:
        self.browser.click(*self.place(layer, head), shift=shift)

    def lines(self, count: int) -> None:
        self.wait(f"d.querySelectorAll('.chart .line').length === {count}")

    def enter(self, selector: str, value: object, event: str = "change") -> None:
        """As if somebody had chosen or typed it."""
        self.js(
            f"(() => {{ const e = d.querySelector(`{selector}`); e.value = '{value}';"
            f" e.dispatchEvent(new Event('{event}')); }})()"
        )

    def quantity(self, name: str) -> None:
        self.enter(".choice select:has(option[value=mine])", name)


def _inside(expression: str) -> str:
    return (
        "(() => { const f = [...document.querySelectorAll('iframe')].find((f) => f.src.includes('attnmon'));"
        " if (!f || !f.contentDocument?.querySelector('main')) return null;"
        f" const d = f.contentDocument, o = f.getBoundingClientRect(); return ({expression}); }})()"
    )


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    write_run(folder / "first")
    write_run(folder / "second", seed=1)
    writer = SummaryWriter(folder / "first")
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    write_run(folder / "third", figures=recovering)
    write_run(folder / "unwatched", rules_on=False)
    validations = SummaryWriter(folder / "validated")
    write_run(folder / "validated", [0], prefix="attn_val", writer=validations)
    for quantity in ("one", "two"):
        write_tensor(validations, tag_of("heads", quantity=quantity), b"{}", [[1.0]])
    write_tensor(validations, tag_of("run", "attn_val"), b"", validation_record(), 10)
    write_tensor(validations, tag_of("warnings", "attn_val"), b"", b"[", 10)
    validations.close()
    write_run(folder / "x-flat", (0, 1), rules_on=False, figures=flat)
    write_run(folder / "x-small", (0, 10), rules_on=False, figures=small)
    write_run(folder / "x-own", own_limits=True)
    write_run(folder / "x-own-2", own_limits=True, seed=1)
    write_run(folder / "x-infinite", (0, 10), rules_on=False, figures=infinite)
    warned = SummaryWriter(folder / "x-warned")
    write_run(folder / "x-warned", rules_on=False, writer=warned)
    write_tensor(warned, tag_of("warnings"), metadata("warnings"), growth_record(DROPPED), DROPPED)
    warned.close()
    return folder


DROPPED = 105  # a step with a warning and no sample


def growth_record(step: int) -> bytes:
    """A warning of wide scores."""
    layer, head = str(SPREAD[0]), SPREAD[1]
    evidence = {"quantity": "score_spread", "label": "score spread", "heads": {layer: [head]}}
    evidence |= {"figures": {layer: [11.0]}, "baselines": {layer: [None]}, "limits": {layer: [10.0]}}
    alert = {"rule": "score_growth", "title": "attention scores too large", "severity": "warn", "summary": "wide"}
    alert |= {"remedy": "less", "since": step, "heads": {layer: [head]}, "evidence": [evidence]}
    return to_json({"version": 1, "step": step, "alerts": [alert], "alarmed": {"score_growth": {layer: [head]}}})


def infinite(step: int, seed: int = 0) -> dict[str, dict[int, list[float]]]:
    return {"entropy_normalized": {0: [float("inf"), 0.3, -float("inf"), float("nan")]}}


def flat(step: int, seed: int = 0) -> dict[str, dict[int, list[float]]]:
    """One head, whose figures differ in the fifth digit."""
    return {"entropy_normalized": {0: [0.99998 - 7e-5 * step]}}


def small(step: int, seed: int = 0) -> dict[str, dict[int, list[float]]]:
    """Two layers of three heads: one head without figures, and a quantity without any."""
    rows = [0.3, 0.4, float("nan")]
    return {
        "entropy_normalized": {0: rows, 1: [0.5] * 3},
        "active_share": {0: [float("nan")] * 3, 1: [float("nan")] * 3},
    }


def validation_record() -> bytes:
    layer = {"number": 0, "path": "a", "heads": 4, "temperature": None}
    record = {"version": 1, "layers": [layer], "not_measured": {}, "levels": []}
    return to_json(record | {"source": "validation", "every_n_steps": None})


@pytest.fixture(scope="module")
def url(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("process") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", f"--logdir={logs}", *OPTIONS],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )
    try:
        for _ in range(1200):
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace"))
            if found or process.poll() is not None:
                break
            time.sleep(0.05)
        assert found, log.read_text(errors="replace")
        yield found.group()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if BROWSER is None:
        pytest.fail("CI_NEEDS_BROWSER=1, but there is no chromium")
    one = Chromium(BROWSER, tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def tab(browser: Chromium, url: str) -> Iterator[Tab]:
    """The tab, freshly opened; afterwards: nothing complained, and no other host was asked for anything."""
    browser.open(f"{url}/data/plugin/attnmon/catalogue")  # a small page of the same origin
    browser.wait("location.port && document.readyState === 'complete' && (sessionStorage.clear(), true)")
    browser.events.clear()
    one = Tab(browser, url)
    one.open()
    yield one
    asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert any("/data/plugin/attnmon/frames" in address for address in asked)
    assert {urllib.parse.urlsplit(address).netloc for address in asked if not address.startswith("data:")} <= {
        urllib.parse.urlsplit(url).netloc,
        "",
    }
    for event in browser.events:
        assert event["method"] != "Runtime.exceptionThrown", json.dumps(event)
        if event["method"] == "Runtime.consoleAPICalled":
            assert event["params"]["type"] != "error", json.dumps(event)
        if event["method"] == "Log.entryAdded" and not event["params"]["entry"].get("url", "").endswith("/favicon.ico"):
            assert event["params"]["entry"]["level"] != "error", json.dumps(event)


def test_opens_on_the_newest_sample_of_the_first_run(tab: Tab) -> None:
    assert tab.words().startswith(f"step {max(STEPS)} · sample {len(STEPS)} of {len(STEPS)}")
    assert tab.js("d.querySelector('#map-title').textContent") == "Normalised entropy (H / log n)"
    assert "early sign that a head saturates" in tab.js("d.querySelector('.meaning').textContent")
    assert tab.js("d.querySelector('.empty').hidden")
    assert tab.js("[...d.querySelectorAll('.keys li:not([hidden])')].map((key) => key.textContent)") == [
        "not measured",
        "under alarm",
    ]
    assert tab.keeps(run="first", prefix="attn", quantity="entropy_normalized")
    tab.browser.mouse("mouseMoved", *tab.place(*RISEN))
    words = tab.js("d.querySelector('.tip').textContent")
    assert words.startswith("Layer 1, head 2model.layers.1.attn0.9 H / log n▲ under alarm: ")
    tab.browser.mouse("mouseMoved", *tab.place(0, 3))
    assert "not measured" in tab.js("d.querySelector('.tip').textContent")


def test_slides_steps_and_plays(tab: Tab) -> None:
    late = tab.colour(*RISEN)
    tab.js(
        "(() => { const s = d.querySelector('.stepper input'); s.value = 3; s.dispatchEvent(new Event('input')); })()"
    )
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 30'")
    assert tab.words().startswith("step 30 · sample 4 of 20")
    assert tab.colour(*RISEN) != late  # 0.9 is the yellow end, and it was not there yet
    tab.js("d.querySelector('[aria-label=\"Next sample\"]').click()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 40'")
    tab.js("d.querySelector('.play').click()")
    tab.wait("Number(d.querySelector('.stepper input').value) >= 6")
    tab.js("d.querySelector('.play').click()")
    assert tab.js("d.querySelector('.play').getAttribute('aria-label')") == "Play"
    tab.js("[...d.querySelectorAll('.stepper button')].find((b) => b.textContent === 'Newest').click()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 190'")
    assert tab.colour(*RISEN) == late


def test_heads_are_compared_over_steps_and_runs(tab: Tab) -> None:
    tab.click(*RISEN)
    tab.lines(1)
    assert tab.js("d.querySelector('.legend span').textContent") == "layer 1, head 2"
    assert tab.js("d.querySelectorAll('.chart .limit').length") >= 1  # of the warning
    assert tab.js("d.querySelectorAll('.chart .mark.warn').length") >= 1
    tab.click(0, 0, shift=True)
    tab.lines(2)
    tab.js("d.querySelectorAll('.run-list input')[1].click()")
    tab.lines(4)
    tab.settle()
    assert tab.js("[...d.querySelectorAll('.map-title')].map((title) => title.textContent)") == ["first", "second"]
    assert tab.keeps(run=["first", "second"], heads="1.2_0.0")
    dashes = tab.js("[...d.querySelectorAll('.chart .line')].map((line) => line.getAttribute('stroke-dasharray'))")
    assert dashes == ["", "", "7 4", "7 4"]
    inks = tab.js("[...d.querySelectorAll('.chart .line')].map((line) => line.getAttribute('stroke'))")
    assert inks[0] == inks[2] != inks[1] == inks[3]
    tab.click(2, 1)  # without Shift: this one instead
    tab.lines(2)
    assert tab.keeps(heads="2.1")


def test_a_level_is_drawn_where_the_rule_has_one(tab: Tab) -> None:
    tab.quantity("score_spread")
    tab.click(*SPREAD)
    tab.lines(1)
    assert tab.js("d.querySelector('.level-name').textContent") == "▲ attention scores too large: 10"
    assert tab.js("[d.querySelectorAll('.chart .level').length, d.querySelectorAll('.chart .limit').length]") == [1, 0]


def test_change_since_a_baseline(tab: Tab) -> None:
    tab.js("d.querySelectorAll('.views input')[1].click()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 190, change since step 0'")
    tab.browser.mouse("mouseMoved", *tab.place(*RISEN))
    before = figures(0)["entropy_normalized"][RISEN[0]][RISEN[1]]
    words = tab.js("d.querySelector('.tip').textContent")
    assert f"+{0.9 - before:.4g} since step 0 ({before:.4g})" in words
    low, middle, high = tab.js("[...d.querySelectorAll('.ends span')].map((end) => end.textContent)")
    assert (middle, low) == ("0", high.replace("+", "-"))
    red, _, blue = tab.colour(*RISEN)
    assert red > blue  # orange: it rose
    tab.js("[...d.querySelectorAll('.base button')][0].click()")  # the step that is shown
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 190, change since step 190'")
    assert tab.keeps(base="190")


def test_a_warning_leads_to_its_step_and_heads(tab: Tab) -> None:
    tab.wait("d.querySelectorAll('.warnings .jump').length >= 2")
    count = tab.js("d.querySelectorAll('.warnings .jump').length")
    tab.enter("[aria-label='Only warnings of this rule']", "score_growth")
    tab.wait("d.querySelectorAll('.warnings .jump').length === 1")
    assert tab.js("d.querySelector('.count').textContent") == f"1 of {count}"
    tab.js("d.querySelector('.warnings .jump').click()")
    tab.lines(1)
    tab.settle()
    assert tab.keeps(step="100", heads="2.0", quantity="score_spread")
    assert tab.js("d.querySelector('.map-note').textContent") == "sample of step 100"
    assert "warning at this step" in tab.js("d.querySelector('.keys').innerText")
    tab.enter(".filters input", "nowhere", "input")
    tab.wait("d.querySelector('.warnings').textContent === 'No warning passes the filters.'")


def test_keyboard_reaches_map_and_chart(tab: Tab) -> None:
    tab.js("d.querySelector('.map-canvas').focus()")
    for _ in range(2):
        tab.browser.press("ArrowRight", 39)
    tab.browser.press("ArrowDown", 40)
    assert tab.wait("d.querySelector('[aria-live]').textContent").startswith(
        "Layer 1, head 2. model.layers.1.attn. 0.9"
    )
    tab.browser.press("Enter", 13)
    tab.lines(1)
    tab.browser.press("ArrowRight", 39)
    tab.browser.press("Enter", 13, shift=True)
    tab.lines(2)
    assert tab.keeps(heads="1.2_1.3")
    tab.js("d.querySelector('.chart').focus()")
    tab.browser.press("ArrowLeft", 37)
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 180'")
    unnamed = tab.js(
        "[...d.querySelectorAll('button, select, input, canvas, .chart')].filter((e) => !e.hidden && !(e.labels?.length"
        " || e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)"
    )
    assert unnamed == []


def test_a_link_restores_the_view(tab: Tab) -> None:
    view = "run=second&quantity=mine&step=70&heads=0.1_2.2&view=change&base=20"
    tab.open(f"attnmon&p.attnmon.view={urllib.parse.quote(view)}")
    tab.lines(2)
    assert tab.js("d.querySelector('.map-note').textContent") == "sample of step 70, change since step 20"
    assert tab.js("d.querySelector('.picker summary').textContent") == "second"
    assert tab.js("d.querySelector('#map-title').textContent") == "mine"
    # ... and the tab's own link is such a one
    link = tab.js(
        "(() => { Object.defineProperty(f.contentWindow.navigator, 'clipboard', {value: undefined});"
        " d.querySelectorAll('.actions button')[1].click(); return d.querySelector('.link').value; })()"
    ) or tab.wait("d.querySelector('.link').value")
    assert link.startswith(f"{tab.url}/#attnmon&p.attnmon.view=")
    copied = urllib.parse.parse_qs(urllib.parse.unquote(link.split("p.attnmon.view=")[1]))
    assert {"step": ["70"], "base": ["20"], "heads": ["0.1_2.2"], "run": ["second"]}.items() <= copied.items()


def test_dark_mode_follows_tensorboard(tab: Tab) -> None:
    light = tab.js("f.contentWindow.getComputedStyle(d.body).backgroundColor")
    tab.browser.run("document.body.classList.add('dark-mode')")
    tab.wait("d.documentElement.dataset.theme === 'dark'")
    dark = tab.js("f.contentWindow.getComputedStyle(d.body).backgroundColor")
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (light, dark)]
    assert brightness[0] > 600
    assert brightness[1] < 150
    tab.browser.run("document.body.classList.remove('dark-mode')")
    tab.wait("d.documentElement.dataset.theme === 'light'")


def test_new_samples_come_with_tensorboards_reload(tab: Tab, logs: Path) -> None:
    write_run(logs / "first", range(200, 230, 10))
    for _ in range(600):  # until TensorBoard itself has read them
        with urllib.request.urlopen(f"{tab.url}/data/plugin/attnmon/catalogue") as answer:
            if json.load(answer)["runs"][0]["tags"][0]["stamp"][0] == 220:
                break
        time.sleep(0.05)
    assert tab.words().startswith("step 190")
    tab.browser.run("document.querySelector('.reload-button, [aria-label*=\"eload\"]').click()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 220'")  # it follows the newest


def test_answers_that_come_late_change_nothing(tab: Tab) -> None:
    """The answer for the first choice is held back until after that for the second."""
    tab.js(
        "(() => { const w = f.contentWindow, fetch = w.fetch.bind(w); w.held = [];"
        " w.fetch = (url, more) => String(url).includes('top') || !String(url).includes('spread') ? fetch(url, more)"
        " : new Promise((go) => w.held.push(() => fetch(url, more).then(go))); })()"
    )
    tab.quantity("score_spread")
    tab.wait("f.contentWindow.held.length > 0")
    tab.quantity("mine")
    tab.wait("d.querySelector('.map-note').textContent.startsWith('sample of step')")
    before = tab.colour(0, 0)
    tab.js("(f.contentWindow.held.splice(0).forEach((go) => go()), true)")
    tab.wait(
        "f.contentWindow.performance.getEntriesByType('resource').filter((e) => e.name.includes('spread')).length > 0"
    )
    tab.browser.run("new Promise((go) => setTimeout(go, 150))")
    assert tab.js("d.querySelector('#map-title').textContent") == "mine"
    assert tab.colour(0, 0) == before


def test_other_tabs_live_on(tab: Tab) -> None:
    visible = "getComputedStyle(document.querySelector('iframe[src*=attnmon]')).visibility"
    for name, expected in (("scalars", "hidden"), ("Attention", "visible")):
        tab.browser.run(
            f"[...document.querySelectorAll('.plugin-name')].find((e) => e.textContent.trim() === '{name}').click()"
        )
        tab.browser.wait(f"{visible} === '{expected}'")
    tab.settle()
    assert tab.words().startswith("step ")


def test_an_empty_directory_says_how_to_log(browser: Chromium, tab: Tab) -> None:
    """The catalogue of an empty directory, as the tab sees it."""
    tab.js(
        "(() => { const w = f.contentWindow, fetch = w.fetch.bind(w); w.fetch = (url, more) => String(url).includes("
        "'catalogue') ? Promise.resolve(new w.Response('{\"runs\": [], \"problems\": []}')) : fetch(url, more);"
        " d.querySelector('.actions button').click(); })()"
    )
    tab.wait("!d.querySelector('.empty').hidden && d.querySelector('main').hidden")
    words = tab.js("d.querySelector('.empty').innerText")
    for expected in (
        "AttentionMonitor(",
        "TensorBoardLogger(",
        "AttentionMonitorCallback(",
        "watch(model, writer=SummaryWriter(",
    ):
        assert expected in words


def corner(tab: Tab, layer: int, head: int) -> list[int]:
    """The colour of the middle of the mark in a cell's lower left corner."""
    x, y = tab.place(layer, head)
    return tab.js(
        "(() => { const c = d.querySelector('.map-canvas'), b = c.getBoundingClientRect(),"
        f" w = (b.width - 50) / {HEADS}, h = (b.height - 38) / {LAYERS};"
        f" return [...c.getContext('2d').getImageData({x} - o.left - b.left - w / 2 + 5.5,"
        f" {y} - o.top - b.top + h / 2 - 6.5, 1, 1).data].slice(0, 3); }})()"
    )


def view(tab: Tab, text: str) -> None:
    tab.open(f"attnmon&p.attnmon.view={urllib.parse.quote(text)}")


def second_only(tab: Tab) -> None:
    for place, named in ((1, "2 runs"), (0, "second")):
        tab.js(f"d.querySelectorAll('.run-list input')[{place}].click()")
        tab.wait(f"d.querySelector('.picker summary').textContent === '{named}'")


RED = [229, 53, 43]


def test_heads_under_alarm_are_marked_and_named_until_they_recover(tab: Tab) -> None:
    for step, marked in ((90, False), (130, True), (190, False)):
        view(tab, f"run=third&quantity=score_spread&step={step}")
        assert (corner(tab, *SPREAD) == RED) is marked
        assert corner(tab, 0, 1) != RED
        tab.browser.mouse("mouseMoved", *tab.place(*SPREAD))
        words = tab.js("d.querySelector('.tip').textContent")
        assert ("under alarm: attention scores too large since step 100" in words) is marked
        keys = tab.js("[...d.querySelectorAll('.keys li:not([hidden])')].map((key) => key.textContent)")
        assert ("under alarm" in keys) is (step >= 100)  # of another head from then on
    tab.enter("[aria-label='Only warnings of this rule']", "score_growth")
    tab.wait("d.querySelectorAll('.warnings .jump').length === 1")
    assert re.fullmatch(r"Recovered at step 1[4-9]0\.", tab.js("d.querySelector('.warnings .state').textContent"))
    tab.enter("[aria-label='Only warnings of this rule']", "entropy_rise")
    tab.wait("d.querySelector('.warnings .state').textContent === 'Still under alarm.'")


def test_a_hint_is_marked_more_quietly_than_an_alarm(tab: Tab) -> None:
    tab.js(
        "(() => { const w = f.contentWindow, fetch = w.fetch.bind(w); w.fetch = async (url, more) => {"
        " const answer = await fetch(url, more); if (!String(url).includes('/run?')) return answer;"
        " const found = await answer.json(); found.alarms = [{rule: 'x', title: 'few active keys', severity: 'watch',"
        " since: 20, until: null, heads: {0: [1]}}]; return new w.Response(JSON.stringify(found)); }; })()"
    )
    second_only(tab)
    tab.settle()
    tab.wait("!d.querySelector('.key.watched').parentNode.hidden")
    assert corner(tab, 0, 1) == [255, 255, 255]
    assert tab.js("d.querySelector('.key.alarmed').parentNode.hidden")


def test_no_warnings_is_said_only_where_it_is_known(tab: Tab) -> None:
    listed = "d.querySelector('.warnings').textContent"
    view(tab, "run=unwatched")
    tab.wait("d.querySelector('.panel .notes p') !== null")
    said = "[...d.querySelectorAll('[aria-labelledby=warnings-title] .notes p')].map((note) => note.textContent)"
    assert tab.js(said) == ["No alert rules watched this data, so there are no warnings of it."]
    assert tab.js(listed) == ""
    assert tab.js("d.querySelector('.count').hidden")
    view(tab, "run=validated")
    tab.wait(f"({said}).length")
    assert tab.js(said) == ["Not all records of warnings could be read: there may be more than are listed."]
    assert tab.js(listed) == ""
    view(tab, "run=first&run=unwatched")
    tab.wait("d.querySelectorAll('.warnings .jump').length >= 2")
    assert tab.js(said) == ["unwatched: No alert rules watched this data, so there are no warnings of it."]


def test_warnings_that_are_on_their_way_or_fail_are_not_none(tab: Tab) -> None:
    tab.js(
        "(() => { const w = f.contentWindow, fetch = w.fetch.bind(w); w.fetch = (url, more) => String(url).includes("
        "'/run?') ? new Promise((go) => w.go = () => go(new w.Response('broken', {status: 500}))) : fetch(url, more);"
        " })()"
    )
    second_only(tab)
    tab.wait("Boolean(f.contentWindow.go)")
    words = "d.querySelector('[aria-labelledby=warnings-title]').textContent"
    tab.wait(f"({words}).includes('Loading the warnings')")
    assert "No warnings." not in tab.js(words)
    tab.js("(f.contentWindow.go(), true)")
    tab.wait(f"({words}).includes('could not be read')")
    assert "No warnings." not in tab.js(words)


def test_validations_name_no_cadence_and_problems_come_once_per_run(tab: Tab) -> None:
    view(tab, "run=validated")
    tab.wait("d.querySelector('.run-notes p') !== null")
    assert tab.js("d.querySelector('.run-notes').textContent") == "1 layer, sampled on validation batches."
    lines = tab.js("[...d.querySelectorAll('.problems li')].map((line) => line.textContent)")
    assert sum("2 tags: attnmon/attn/one, attnmon/attn/two" in line for line in lines) == 1
    assert tab.js("d.querySelector('.problems summary').textContent") == f"Problems with the data ({len(lines)})"


def test_a_link_to_what_is_not_here_says_so(tab: Tab) -> None:
    everything = "&".join(f"run={name}" for name in ("first", "second", "third", "unwatched", "validated"))
    view(tab, f"{everything}&run=gone&quantity=zzz&rule=zzz&severity=zzz&heads=1.2_999999.999999")
    tab.lines(4)
    notes = tab.js("[...d.querySelectorAll('main > .notes p')].map((note) => note.textContent)")
    assert notes == [
        "The link names the run gone, which is not here.",
        "The link names 5 runs, of which the first 4 are shown.",
        "The link names the quantity zzz, which is not here.",
    ]
    chosen = "[...d.querySelectorAll('.filters select')].map((e) => e.selectedOptions[0]?.textContent)"
    assert tab.js(chosen) == ["zzz (no such warning)"] * 2
    assert not tab.js("d.querySelector('.legend').textContent.includes('999999')")
    assert tab.keeps(heads="1.2")
    tab.click(0, 1)
    tab.wait("d.querySelectorAll('main > .notes p').length === 0")


def test_limits_are_written_over_the_lines(tab: Tab) -> None:
    tab.click(*RISEN)
    tab.lines(1)
    tab.click(0, 0, shift=True)
    tab.lines(2)
    tab.wait("d.querySelector('.limit-name') !== null")
    assert tab.js(
        "[...d.querySelectorAll('.chart .limit-name, .chart .level-name')].every((name) => [...d.querySelectorAll("
        "'.chart .line')].every((line) => line.compareDocumentPosition(name) & Node.DOCUMENT_POSITION_FOLLOWING))"
    )


def test_a_resumed_run_says_so(tab: Tab, logs: Path) -> None:
    write_run(logs / "third", range(55, 100, 10), rules_on=False)
    wanted = f"{tab.url}/data/plugin/attnmon/summary?run=third&tag=attnmon/attn/entropy/normalized"
    for _ in range(600):
        with urllib.request.urlopen(wanted) as answer:
            if json.load(answer)["steps"][-1] == 95:
                break
        time.sleep(0.05)
    view(tab, "run=third")
    assert tab.words().startswith("step 95 · sample 11 of 11")
    assert "(resumed at step 55)" in tab.js("d.querySelector('.run-notes').textContent")
    assert tab.js("d.querySelectorAll('.warnings .jump').length") == 0  # those of the part that is void
    assert corner(tab, *RISEN) != RED


def call(tab: Tab, module: str, expression: str) -> Any:
    """The value of an expression with a module of the tab's as ``m``."""
    return tab.browser.run(f"import('/data/plugin/attnmon/static/{module}.js').then((m) => {expression})")


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.99991, 0.99998, ["0.99992", "0.99994", "0.99996", "0.99998"]),
        (0.0, 1.0, ["0.0", "0.5", "1.0"]),
        (-3.0, 12.0, ["0", "5", "10"]),
        (0.0, 8e-6, ["0", "2e-6", "4e-6", "6e-6", "8e-6"]),
        (1.0e8, 1.3e8, ["1.0e8", "1.1e8", "1.2e8", "1.3e8"]),
        (123456.1, 123456.4, ["123456.1", "123456.2", "123456.3", "123456.4"]),
        (-1e-3, 1e-3, ["-0.0010", "-0.0005", "0.0000", "0.0005", "0.0010"]),
        (7.0, 7.0, ["7"]),
    ],
)
def test_labels_of_ticks_have_the_digits_of_their_spacing(tab: Tab, low: float, high: float, labels: list[str]) -> None:
    ticks = call(tab, "chart", f"m.ticks({low}, {high}, 4)")
    assert call(tab, "dom", f"m.tickLabels({ticks})") == labels


@pytest.mark.parametrize(
    ("first", "last", "steps"), [(0, 1, [0, 1]), (3, 5, [3, 4, 5]), (0, 100, [0, 20, 40, 60, 80, 100]), (4, 4, [4])]
)
def test_ticks_of_steps_are_whole(tab: Tab, first: int, last: int, steps: list[int]) -> None:
    assert call(tab, "chart", f"m.ticks({first}, {last}, 5, 1)") == steps


def test_a_nearly_constant_line_has_labels_that_differ(tab: Tab) -> None:
    view(tab, "run=x-flat&heads=0.0&range=run")
    tab.lines(1)
    texts = "[...d.querySelectorAll('.chart .tick.{}')].map((tick) => tick.textContent)"
    values = tab.js(texts.format("value"))
    assert len(set(values)) == len(values) >= 3
    assert all(re.fullmatch(r"0\.9999\d|1\.00000", text) for text in values), values
    assert tab.js(texts.format("step")) == ["0", "1"]
    left = "Math.min(...[...d.querySelectorAll('.chart .tick.value')].map((tick) => tick.getBBox().x))"
    assert tab.js(left) >= 16  # beside the unit, not over it
    assert tab.js("[...d.querySelectorAll('.ends span')].map((end) => end.textContent)") == [
        "0.99991",
        "0.999945",
        "0.99998",
    ]
    assert tab.js("d.querySelector('.run-notes').textContent").startswith("1 layer, sampled")
    assert tab.js("d.querySelector('.map-canvas').getAttribute('aria-label')").startswith("Map of 1 layer by 1 head, ")


def test_lines_that_never_change_have_an_axis_around_them(tab: Tab) -> None:
    view(tab, "run=x-small&heads=1.0")
    tab.lines(1)
    values = tab.js("[...d.querySelectorAll('.chart .tick.value')].map((tick) => Number(tick.textContent))")
    assert min(values) < 0.5 < max(values)
    assert len(set(values)) == len(values)


def test_a_quantity_without_figures_says_so_in_place_of_map_and_chart(tab: Tab) -> None:
    tab.browser.open("about:blank")
    asked = urllib.parse.quote("run=x-small&quantity=active_share&heads=0.1")
    tab.browser.open(f"{tab.url}/#attnmon&p.attnmon.view={asked}")
    said = "No figures of this quantity: only rows that see at least 64 keys have one."
    tab.wait(f"d.querySelector('.map-note')?.textContent === '{said}'")
    tab.wait(f"d.querySelector('.no-lines').textContent === '{said}' && !d.querySelector('.no-lines').hidden")
    shown = "[...d.querySelectorAll('.map-canvas, .chart-box, .scale')].map((e) => e.getClientRects().length)"
    assert tab.js(shown) == [0, 0, 0]
    assert tab.js("d.querySelectorAll('.keys li:not([hidden])').length") == 0
    assert tab.js("d.querySelector('.legend').textContent") == "layer 0, head 1: no figures\u00d7"
    tab.enter(".choice select:has(option[value=active_share])", "entropy_normalized")
    tab.lines(1)
    tab.settle()
    assert tab.js(shown) == [1, 1, 1]
    assert tab.js("d.querySelector('.no-lines').hidden")


def test_the_reasons_are_those_of_the_measures(tab: Tab) -> None:
    expected = {
        "active_share": f"at least {MIN_KEYS} keys",
        "score_spread": f"at least {SPREAD_KEYS} keys",
        "separability@10": "more than 10 keys",
        "jacobian@1.0": "",
    }
    for quantity, words in expected.items():
        assert (words or "nothing") in (call(tab, "view", f"m.whyNone('{quantity}')") or "nothing")


def test_the_legend_leaves_out_heads_that_a_run_does_not_have(tab: Tab) -> None:
    view(tab, "run=first&run=x-small&heads=0.0_0.2_2.0_1.3")
    tab.lines(6)
    names = "[...d.querySelectorAll('.legend li')].map((e) => e.textContent)"
    tab.wait(f"({names}).some((name) => name.includes('no figures'))")
    assert tab.js(names) == [
        "layer 0, head 0 in first\u00d7",
        "layer 0, head 0 in x-small",
        "layer 0, head 2 in first\u00d7",
        "layer 0, head 2 in x-small: no figures",
        "layer 2, head 0 in first\u00d7",
        "layer 1, head 3 in first\u00d7",
    ]
    assert "layer 2, head 0 in x-small" not in tab.js("d.querySelector('.chart').getAttribute('aria-label')")
    view(tab, "run=x-small&run=first&heads=2.0")  # the button stands at the first run that has the head
    tab.wait("d.querySelector('.legend').textContent === 'layer 2, head 0 in first\u00d7'")
    tab.js("d.querySelector('.legend button').click()")
    tab.wait("d.querySelector('.legend').hidden")


def test_a_long_legend_scrolls_and_says_so(tab: Tab) -> None:
    hint = "d.querySelector('.legend + .hint')"
    view(tab, "run=first&heads=0.0")
    tab.lines(1)
    assert tab.js(f"{hint}.hidden")
    heads = "_".join(f"{layer}.{head}" for layer in range(2) for head in range(4))
    view(tab, f"run=first&run=second&run=third&run=unwatched&heads={heads}")
    tab.lines(32)
    assert tab.js(f"{hint}.hidden ? '' : {hint}.textContent") == "32 lines: scroll their names to see all."
    box = "(() => {{ const e = d.querySelector('.legend'); {}; return [e.tabIndex, Math.round(e.scrollTop)]; }})()"
    tabs, top = tab.js(box.format("e.scrollTop = 1e6"))
    assert tabs == 0
    assert top > 0


OWN_LIMITS = "[...d.querySelectorAll('.chart .own-limit-name')].map((name) => name.textContent)"
DRAWN_LIMITS = "d.querySelectorAll('.chart .own-limit').length"
TIP = "d.querySelector('.tip').textContent"
STEP_NOTE = "d.querySelector('.step-note').textContent"


def hover_chart(tab: Tab, share: float) -> str:
    """What the tooltip says at a share of the chart's width, at its upper edge."""
    left, top, width = tab.js(
        "(() => { const a = d.querySelector('.chart .axis').getBoundingClientRect(),"
        " b = d.querySelector('.chart').getBoundingClientRect(); return [a.left + o.left, b.top + o.top, a.width]; })()"
    )
    tab.browser.mouse("mouseMoved", left + share * width, top + 3)
    return tab.js(TIP)


def changed(tab: Tab, script: str) -> None:
    """Answers of the routes, changed by the body of a function of `path`, `found` and the window `w`."""
    tab.js(
        "(() => { const w = f.contentWindow, fetch = w.fetch.bind(w); w.fetch = async (url, more) => {"
        " const answer = await fetch(url, more), path = String(url), found = await answer.clone().json();"
        f" {script}; return new w.Response(JSON.stringify(found)); }}; }})()"
    )


def test_a_heads_own_limits_are_drawn_over_the_steps(tab: Tab) -> None:
    view(tab, f"run=x-own&heads={RISEN[0]}.{RISEN[1]}")
    tab.lines(1)
    assert tab.js(OWN_LIMITS) == [
        "\u25a0 own limit, entropy collapse: 0.05",
        "\u25b2 own limit, entropy rising: 0.5929",
    ]
    assert tab.js(DRAWN_LIMITS) == 2
    # the warning's own line of the same limit is left out; what it had learned stays
    assert tab.js("['.limit', '.baseline'].map((kind) => d.querySelectorAll('.chart ' + kind).length)") == [0, 1]
    looks = "[...d.querySelectorAll('.chart {}')].map((e) => f.contentWindow.getComputedStyle(e).strokeDasharray)"
    assert not {*tab.js(looks.format(".own-limit"))} & {"none", *tab.js(looks.format(".line"))}
    assert "has of its own" in tab.js("d.querySelector('.chart-box + .hint').textContent")
    assert "\u25b2 own limit 0.5929 (entropy rising)" in hover_chart(tab, 1.0)
    view(tab, f"run=first&heads={RISEN[0]}.{RISEN[1]}")  # written without
    tab.lines(1)
    assert tab.js(f"[{DRAWN_LIMITS}, d.querySelectorAll('.chart .limit').length]") == [0, 1]
    assert tab.js("d.querySelector('.chart-box + .hint').hidden")


def test_of_several_lines_one_has_its_own_limits_drawn(tab: Tab) -> None:
    view(tab, "run=x-own&run=x-own-2&heads=0.0_2.0_1.2")
    tab.lines(6)
    marked = "[...d.querySelectorAll('.legend .own')].map((item) => item.textContent)"
    assert tab.js(marked) == ["layer 1, head 2 in x-own\u00d7"]
    assert tab.js(f"{OWN_LIMITS}.length") == 2
    assert "Point at another name above" in tab.js("d.querySelector('.chart-box + .hint').textContent")
    axis = tab.js("[...d.querySelectorAll('.chart .tick.value')].map((tick) => tick.textContent)")
    tab.js("(d.querySelectorAll('.legend li')[1].dispatchEvent(new PointerEvent('pointerenter')), true)")
    tab.wait(f"{marked}[0] === 'layer 0, head 0 in x-own-2'")
    assert tab.js(f"{OWN_LIMITS}[1]") != "\u25b2 own limit, entropy rising: 0.5929"
    assert axis == tab.js("[...d.querySelectorAll('.chart .tick.value')].map((tick) => tick.textContent)")
    tab.js("(d.querySelectorAll('.legend li')[1].dispatchEvent(new PointerEvent('pointerleave')), true)")
    tab.wait(f"{marked}[0].startsWith('layer 1, head 2')")
    tab.browser.click(
        *tab.js(
            "(() => { const b = d.querySelector('#map-title').getBoundingClientRect();"
            " return [b.left + 5 + o.left, b.top + 5 + o.top]; })()"
        )
    )
    tab.js("d.querySelectorAll('.legend button')[1].focus()")  # as the keyboard does
    tab.wait(f"{marked}[0].startsWith('layer 2, head 0')")


def test_moving_the_step_leaves_the_lines_alone(tab: Tab) -> None:
    view(tab, "run=x-own&heads=1.2")
    tab.lines(1)
    tab.js("d.querySelector('.chart .own-limit').same = true")
    tab.js("d.querySelector('[aria-label=\"Previous sample\"]').click()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 180'")
    assert tab.js("d.querySelector('.chart .own-limit').same")


def test_limits_far_away_are_named_at_the_edge(tab: Tab) -> None:
    view(tab, f"run=x-own&quantity=score_spread&heads={SPREAD[0]}.{SPREAD[1]}")
    tab.lines(1)
    (name,) = tab.js(OWN_LIMITS)
    assert re.fullmatch("\u2191 \u25b2 own limit, attention scores too large: \\d{3}(\\.\\d+)?", name)
    assert tab.js(DRAWN_LIMITS) == 0
    assert max(tab.js("[...d.querySelectorAll('.chart .tick.value')].map((tick) => Number(tick.textContent))")) < 20


def test_limits_beyond_a_quantitys_ends_are_not_drawn(tab: Tab) -> None:
    changed(  # one to 1.08, the other to a hint
        tab,
        "for (const one of found.limits ?? []) if (one.rises) one.heads = [w.btoa('\\x71\\x3d\\x8a\\x3f'.repeat(20))];"
        " else one.severity = 'watch'",
    )
    tab.js("d.querySelector('.run-list input[value=x-own]').click()")
    tab.wait("d.querySelector('.picker summary').textContent === '2 runs'")
    tab.js("d.querySelector('.run-list input[value=first]').click()")
    tab.wait("d.querySelector('.picker summary').textContent === 'x-own'")
    tab.settle()
    tab.click(*RISEN)
    tab.lines(1)
    assert tab.js(OWN_LIMITS) == ["\u25cb own limit, entropy collapse: 0.05"]
    assert float(tab.js("f.contentWindow.getComputedStyle(d.querySelector('.chart .own-limit')).opacity")) < 1  # a hint
    assert tab.js("d.querySelector('.chart-box + .hint').textContent").endswith(
        "Not drawn: entropy rising, whose limit Normalised entropy can't reach here."
    )
    assert "entropy rising" not in hover_chart(tab, 0.3)


def test_a_warning_whose_sample_is_not_kept_leads_to_the_next_and_says_so(tab: Tab) -> None:
    changed(tab, "if ('kept' in found) found.kept = 20")
    tab.js("d.querySelector('.run-list input[value=x-warned]').click()")
    tab.wait("d.querySelector('.picker summary').textContent === '2 runs'")
    tab.js("d.querySelector('.run-list input[value=first]').click()")
    tab.wait("d.querySelectorAll('.warnings .jump').length === 1")
    tab.js("d.querySelector('.warnings .jump').click()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 110'")
    assert tab.js(STEP_NOTE) == f"The sample of step {DROPPED} is not kept: this is step 110."
    tab.wait("d.querySelector('.tip').hidden")
    tab.lines(1)
    x, y = tab.js(
        "(() => { const b = d.querySelector('.chart .mark').getBoundingClientRect();"
        " return [b.left + b.width / 2 + o.left, b.top + b.height / 2 + o.top]; })()"
    )
    tab.browser.mouse("mouseMoved", x, y)
    assert tab.js(TIP).startswith(f"Step {DROPPED}")
    assert "\u25b2 attention scores too large" in tab.js(TIP)
    tab.js("d.querySelector('[aria-label=\"Next sample\"]').click()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 120'")
    assert tab.js(STEP_NOTE) == ""
    tab.browser.click(x, y)
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 110'")
    assert tab.js(STEP_NOTE) == f"The sample of step {DROPPED} is not kept: this is step 110."


def test_a_step_that_no_run_has_is_said(tab: Tab) -> None:
    for asked, shown in ((105, 110), (1000, 190)):
        view(tab, f"run=second&step={asked}")
        assert tab.js(STEP_NOTE) == f"There is no sample of step {asked}: this is step {shown}."
        assert tab.js("d.querySelector('.map-note').textContent") == f"sample of step {shown}"


def test_the_focus_outlives_what_is_rebuilt(tab: Tab) -> None:
    focused = "d.activeElement.getAttribute('aria-label') ?? (d.activeElement.value || d.activeElement.textContent)"
    tab.js("(d.querySelector('.picker').open = true, d.querySelectorAll('.run-list input')[1].focus())")
    tab.browser.press(" ", 32)
    tab.wait("d.querySelector('.picker summary').textContent === '2 runs'")
    assert tab.js("[d.activeElement.tagName, d.activeElement.value]") == ["INPUT", "second"]
    tab.browser.press("Escape", 27)
    assert not tab.js("d.querySelector('.picker').open")
    view(tab, "run=first&view=change&step=50&base=20&heads=0.0_1.2")
    tab.lines(2)
    tab.js("(() => { const b = d.querySelectorAll('.base button')[0]; b.focus(); b.click(); })()")
    tab.wait("d.querySelector('.base').textContent.startsWith('since step 50')")
    assert tab.js(focused) == "Set to this step"
    tab.js("(() => { const b = d.querySelectorAll('.base button')[1]; b.focus(); b.click(); })()")
    tab.wait("d.querySelector('.base').textContent.startsWith('since the first sample')")
    assert tab.js(focused) == "Set to this step"  # "Reset" can't be pressed any longer
    tab.js("(() => { const b = d.querySelector('.legend button'); b.focus(); b.click(); })()")
    tab.lines(1)
    assert tab.js(focused) == "Remove layer 1, head 2"
    tab.js("(() => { const b = d.querySelector('.legend button'); b.focus(); b.click(); })()")
    tab.wait("d.querySelector('.legend').hidden")
    assert tab.js("d.activeElement.className") == "map-canvas"
    view(tab, "run=first&step=10")
    tab.js("(() => { const b = d.querySelector('[aria-label=\"Previous sample\"]'); b.focus(); b.click(); })()")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 0'")
    assert tab.js(focused) == "Step"


def drops_a_sample(tab: Tab, stamp: str) -> None:
    """The first list of samples is one that TensorBoard has gone on from: step 100 is kept no longer."""
    view(tab, "run=first&step=100")
    changed(
        tab,
        "if (path.endsWith('catalogue')) { w.lists = (w.lists ?? 0) + 1;"
        f" for (const run of found.runs) for (const tag of run.tags) tag.stamp = {stamp}; }}"
        " if (w.lists && path.includes('summary')) { const at = found.steps.indexOf(100);"
        " found.steps.splice(at, 1); found.wall_times.splice(at, 1); }"
        " if (path.includes('frames')) { found.frames = found.frames.filter(({step}) => step !== 100);"
        " if (path.includes('100')) found.missing = [100]; }",
    )
    tab.quantity("score_spread")


def test_a_sample_that_was_dropped_meanwhile_gives_way_to_the_next(tab: Tab) -> None:
    drops_a_sample(tab, "[...tag.stamp, 'later']")
    tab.wait("d.querySelector('.map-note').textContent === 'sample of step 110'")
    tab.wait(f"{STEP_NOTE} === 'There is no sample of step 100: this is step 110.'")
    assert tab.js("f.contentWindow.lists") == 1


def test_a_sample_that_stays_away_is_asked_for_a_few_times_only(tab: Tab) -> None:
    drops_a_sample(tab, "tag.stamp")
    tab.wait("d.querySelector('.map-note').textContent === 'TensorBoard no longer keeps this sample.'")
    tab.browser.run("new Promise((go) => setTimeout(go, 300))")
    assert tab.js("f.contentWindow.lists") == 1


def test_data_of_a_later_version_is_not_called_none(tab: Tab) -> None:
    later = "version 2 of attnmon's data, where version 1 can be read: update attnmon"
    problems = json.dumps([{"run": "new", "tag": f"attnmon/attn/{name}", "text": later} for name in ("a", "b")])
    changed(tab, f"if (path.endsWith('catalogue')) {{ found.runs = []; found.problems = {problems}; }}")
    tab.js("d.querySelector('.actions button').click()")
    tab.wait("!d.querySelector('.empty').hidden && d.querySelector('main').hidden")
    words = tab.js("d.querySelector('.empty').innerText")
    assert words.startswith("Attention data that can't be read")
    assert f"There is data of attnmon in this log directory, but none that can be shown: {later}." in words
    assert "No attention data yet" not in words
    assert "Nothing of it is in this log directory" not in words
    assert "new (2 tags: attnmon/attn/a, attnmon/attn/b)" in words  # the box is open


def test_a_remembered_view_of_another_directory_is_dropped(tab: Tab) -> None:
    for kept, legend, notes in (
        ("run=good&step=30&heads=1.2", "", 0),
        ("run=first&run=good&heads=1.2", "layer 1, head 2\u00d7", 0),
    ):
        tab.browser.open(f"{tab.url}/data/plugin/attnmon/catalogue")
        tab.browser.wait("location.port && document.readyState === 'complete'")
        tab.browser.run(f"sessionStorage.setItem('attnmon.view', '{kept}')")
        tab.open()
        assert tab.js("d.querySelectorAll('main > .notes p').length") == notes
        assert tab.js("d.querySelector('.legend').textContent") == legend
        assert not tab.words().startswith("step 30 ")


def test_the_address_that_the_tab_wrote_itself_is_no_link(tab: Tab) -> None:
    """Open by itself, where the address is the tab's own."""
    page = f"{tab.url}/data/plugin_entry.html?name=attnmon"
    notes = "[...document.querySelectorAll('main > .notes p')].map((note) => note.textContent)"
    tab.browser.open(f"{page}#p.attnmon.view=run%3Dgood")
    ready = "document.querySelector('.map-note')?.textContent.startsWith('sample of step')"
    tab.browser.wait(ready)
    assert tab.browser.run(notes) == ["The link names the run good, which is not here."]
    tab.browser.wait("history.state?.attnmon?.startsWith('run=first')")
    tab.browser.run(
        "(history.replaceState({attnmon: 'run=good'}, '', `${location.pathname}${location.search}"
        "#p.attnmon.view=run%3Dgood`), window.old = true, location.reload())"
    )
    tab.browser.wait(f"!window.old && {ready}")
    assert tab.browser.run(notes) == []


def test_infinite_figures_are_called_so(tab: Tab) -> None:
    view(tab, "run=x-infinite")
    left, top, width = tab.js(
        "(() => { const b = d.querySelector('.map-canvas').getBoundingClientRect();"
        " return [b.left + o.left, b.top + o.top, b.width]; })()"
    )
    for head, words in enumerate(("infinite", "0.3 H / log n", "-infinite", "not measured")):
        tab.browser.mouse("mouseMoved", left + 44 + (head + 0.5) * (width - 50) / 4, top + 10)
        assert tab.js("d.querySelector('.tip .figure').textContent") == words
    assert tab.js("[...d.querySelectorAll('.keys li:not([hidden])')].map((key) => key.textContent)") == [
        "not measured",
        "\u221einfinite",
    ]
