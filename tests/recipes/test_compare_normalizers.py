"""The comparison of normalisers: numbers, figure, wrong arguments."""

from __future__ import annotations

import csv
from pathlib import Path

import compare_normalizers as recipe
import numpy as np
import pytest
from matplotlib.image import imread

from attnmon.analysis import Analysis, Table

NAMES = ("softmax", "sparsemax", "sa-softmax")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, text_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("out")
    settings = {"lengths": (16, 48), "normalizers": NAMES, "top_n": 3, "rows": "all", "progress": False}
    assert recipe.compare_normalizers(str(model_dir), str(text_file), out=str(folder), **settings) == 0
    return folder


def test_numbers(run: Path) -> None:
    with (run / "normalizers.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(NAMES) * 3 * 4 * 2  # quantities, heads, lengths

    def values(normalizer: str, quantity: str) -> np.ndarray:
        found = [x["value"] for x in lines if (x["normalizer"], x["quantity"]) == (normalizer, quantity)]
        return np.array(found, dtype=float)

    assert np.isnan(values("sa-softmax", "entropy")).all()
    assert (values("sparsemax", "entropy") <= values("softmax", "entropy")).all()
    temperature = 8**0.5  # of heads of 8 numbers
    assert (values("softmax", "jacobian") <= 1 / (2 * temperature)).all()
    assert (values("sparsemax", "jacobian") <= 1 / temperature).all()
    for name in NAMES:
        assert ((values(name, "ratio") > 0) & (values(name, "ratio") <= 1)).all()


def test_figure_and_parts(run: Path, model_dir: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    height, width = imread(run / "normalizers.png").shape[:2]
    assert height > 600
    assert width > 1700
    before = (run / "normalizers.svg").read_bytes()
    parts = {path: path.stat().st_mtime_ns for path in (run / "parts").rglob("*.npz")}
    settings = {"lengths": (16, 48), "normalizers": NAMES, "top_n": 3, "rows": "all", "progress": False}
    recipe.compare_normalizers(str(model_dir), str(text_file), out=str(run), **settings)
    assert {path: path.stat().st_mtime_ns for path in (run / "parts").rglob("*.npz")} == parts
    assert (run / "normalizers.svg").read_bytes() == before
    out = capsys.readouterr().out
    assert "Median over heads, L = 48" in out
    assert "sa-softmax" in out


def test_what_is_not_defined_is_named() -> None:
    nothing = np.full((2, 2), np.nan)
    tables = {
        "separability": Table({"top_n": (3,)}, {"ratio": np.ones((2, 2, 1))}, {}),
        "summary": Table({}, {"entropy": nothing, "jacobian": np.ones((2, 2))}, {}),
    }
    analysis = Analysis(("attn",), ((0, 0), (0, 1)), (1.0,), (16, 32), tables)
    figure = recipe.draw({"odd": analysis}, 3)
    assert any("not defined: odd" in text.get_text() for text in figure.axes[1].texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizers": ["softmin"]}, "Expected `name` to be one of 'softmax'"),
        ({"normalizers": []}, "Expected `normalizers` to name at least one"),
        ({"lengths": [16, 128]}, "at most the 64 positions"),
        ({"top_n": 48}, "below the longest length, 48"),
        ({"threads": 0}, "Expected `threads` to be at least 1"),
        ({"device": "meta"}, "Expected `device` to be one that torch can use here, but 'meta' failed"),
        ({"out": __file__}, "Expected `out` to be a folder, but making"),
    ],
)
def test_wrong_arguments(changes: dict, message: str, tmp_path: Path, model_dir: Path, text_file: Path) -> None:
    settings = {"lengths": [16, 48], "top_n": 3, "progress": False, "out": str(tmp_path)} | changes
    with pytest.raises(ValueError, match=message):
        recipe.compare_normalizers(str(model_dir), str(text_file), **settings)


def test_a_missing_package_is_said_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "find_spec", lambda name: None)
    monkeypatch.setattr(recipe, "load_text", lambda *_: pytest.fail("it got as far as the text"))
    with pytest.raises(ModuleNotFoundError, match="pip install 'attnmon\\[entmax\\]'"):
        recipe.compare_normalizers(normalizers=["softmax", "entmax(1.3)"])
