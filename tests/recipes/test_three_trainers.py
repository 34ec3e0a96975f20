"""Three trainers on the same batches: the same figures, and a difference that would be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import three_trainers as recipe

SETTINGS: dict[str, Any] = {"steps": 4, "every_n_steps": 2, "batch_size": 2, "context": 32, "rows": 8}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe.torch, "set_num_threads", lambda count: None)


def test_the_three_report_the_same(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 300}
    assert recipe.three_trainers(text=str(text_file), **SETTINGS, **sizes) == 0
    output = capsys.readouterr().out
    assert "Step 2, mean over the heads of a layer" in output
    assert "figures, to the last digit, at steps 0, 2." in output
    assert "1  H / log n" in output


def test_a_model_from_a_directory(text_file: Path, model_dir: Path) -> None:
    assert recipe.three_trainers(str(model_dir), str(text_file), **SETTINGS) == 0


def test_another_figure_or_another_weight_is_seen(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def otherwise(module: Any, batches: Any, options: Any) -> recipe.Reported:
        return recipe.with_fabric(module, batches[::-1], options)

    monkeypatch.setitem(recipe.TRAINERS, "Fabric", otherwise)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 300}
    assert recipe.three_trainers(text=str(text_file), **SETTINGS, **sizes) == 1
    output = capsys.readouterr().out
    assert "The weights that Fabric trained are not those of Lightning." in output
    assert "Fabric: not the figures that Lightning reports." in output
    assert "transformers.Trainer:" not in output


@pytest.mark.parametrize("name", ["steps", "every_n_steps", "threads"])
def test_argument_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"Expected `{name}` to be at least 1, but got 0"):
        recipe.three_trainers(**{name: 0})
