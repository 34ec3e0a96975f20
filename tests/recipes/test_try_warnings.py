"""What the recipe does to a model, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import try_warnings as recipe
from transformers import GPT2Config, GPT2LMHeadModel


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_layer=3, n_head=2, n_embd=16))


def sequences() -> torch.Tensor:
    return torch.randint(0, 50, (6, 32), generator=torch.Generator().manual_seed(0))


def run(**changes: object) -> recipe.Outcome:
    """A few steps of the tiny model, with scores of a size that training gives them."""
    net = tiny()
    for block in net.transformer.h:
        block.attn.c_attn.weight.data.mul_(40.0)
    arguments = {"batch": 2, "steps": 8, "rate": 1e-5, "every_n_steps": 2, "name": "x", "layer": None, "factor": 1.0}
    return recipe.fine_tune(net, sequences(), **{**arguments, "from_step": 3, **changes})


def test_only_what_is_planted_is_warned_of() -> None:
    healthy, cut = run(), run(factor=20.0)
    assert list(healthy.alerts) == []
    first = cut.alerts[0]
    assert (first.step, first.heads) == (4, {1: (0, 1)})
    assert {alert.rule for alert in cut.alerts if alert.step == 4} == {"score_growth", "sharp_temperature"}
    assert first.loss == pytest.approx(cut.losses[4])
    assert first.learning_rate == pytest.approx(1e-5 * 0.5)  # the fifth of ten steps of warm-up
    assert [sample.temperatures[1] for sample in cut.samples] == pytest.approx([8**0.5] * 2 + [8**0.5 / 20] * 2)
    assert healthy.losses[:3] == cut.losses[:3]
    text = recipe.summary([healthy, cut])
    assert text.row_count == 2


def test_the_layer_can_be_chosen() -> None:
    assert run(factor=20.0, layer=2).alerts[0].heads == {2: (0, 1)}
    with pytest.raises(ValueError, match="Expected `layer` to be one of the 3 of the model, but got 3"):
        run(factor=20.0, layer=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 8}, "Expected `length` to be at least 16, but got 8"),
        ({"steps": 5}, "Expected `steps` to be at least 10, but got 5"),
        ({"batch": 0}, "Expected `batch` to be at least 1, but got 0"),
        ({"from_step": 100}, "Expected `from_step` to lie below the 100 `steps`, but got 100"),
    ],
)
def test_bad_arguments(changes: dict[str, int], message: str, model_dir: Path) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.try_warnings(model=str(model_dir), **changes)
