from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import finetune
import pytest
import torch
import yaml
from finetune import CausalLM, report
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from rich.console import Console

from attnmon import AttentionMonitor

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 300, "context": 16}


def fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> None:
    """`finetune.py fit` in this process, tiny, without a config file."""
    arguments = {
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.max_steps": 2,
        "trainer.limit_val_batches": 1,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.enable_checkpointing": "false",
        "trainer.logger": "false",
        "trainer.default_root_dir": tmp_path,
        "trainer.callbacks": "attnmon.AttentionMonitor",
        "model.n_layer": 2,
        "model.n_head": 2,
        "model.n_embd": 16,
        "data.vocab_size": 300,
        "data.context": 32,
        "data.batch_size": 2,
    }
    given = [f"--{name}={value}" for name, value in arguments.items()]
    monkeypatch.setattr(sys, "argv", ["finetune.py", "fit", *given, *options])
    monkeypatch.setattr(finetune, "attention_warnings", 0)
    finetune.main()


def test_fit_reports_the_last_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(monkeypatch, tmp_path, f"--data.text={text_file}")
    output = capsys.readouterr().out
    assert "Attention at step 0, mean over the heads of a layer" in output
    assert "Attention warnings in this run: 0" in output
    assert "tensorboard" not in output  # no logger, no curves


def test_fit_a_model_from_a_directory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text_file: Path,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(monkeypatch, tmp_path, f"--data.text={text_file}", f"--model.model={model_dir}", "--data.context=64")
    assert "Attention at step 0" in capsys.readouterr().out


def test_a_context_longer_than_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_dir: Path) -> None:
    message = r"Expected `data\.context` to be at most the 64 positions of .*, but got 65\. Use --data\.context 64"
    with pytest.raises(ValueError, match=message):
        fit(monkeypatch, tmp_path, f"--model.model={model_dir}", "--data.context=65")


def test_an_unknown_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected `model` to be a hub id, a local directory or a \.gguf file"):
        fit(monkeypatch, tmp_path, "--model.model=./nowhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.0}, r"Expected `learning_rate` to be positive, but got 0\.0"),
        ({"warmup_steps": -1}, r"Expected `warmup_steps` to be 0 or more, but got -1"),
        ({"n_head": 3}, r"Expected `n_embd` to be a multiple of `n_head`, but got 16 and 3"),
    ],
)
def test_argument_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(**{**TINY, **arguments})


def test_loss_is_that_of_the_next_token() -> None:
    model = CausalLM(**TINY)
    ids = torch.randint(300, (3, 16))
    with torch.no_grad():
        probabilities = model.net(input_ids=ids).logits.double().softmax(-1)
        expected = -torch.stack([probabilities[b, t, ids[b, t + 1]].log() for b in range(3) for t in range(15)]).mean()
        assert model._loss({"input_ids": ids}).item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_matrices_decay_and_every_parameter_is_trained() -> None:
    model = CausalLM(**TINY, weight_decay=0.3)
    decayed, plain = model.configure_optimizers()["optimizer"].param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_file: Path) -> None:
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    fit(monkeypatch, tmp_path, f"--data.text={text_file}", "--threads=1")
    assert seen == [1]
    with pytest.raises(ValueError, match=r"Expected `threads` to be at least 1, but got 0"):
        fit(monkeypatch, tmp_path, "--threads=0")
    assert torch.get_num_threads() == before


def test_report_without_a_snapshot() -> None:
    console = Console(file=io.StringIO())
    report(console, AttentionMonitor())
    assert "no snapshot" in console.file.getvalue()


# -- AttentionMonitor in YAML -------------------------------------------------------------------------------------


MONITOR = """
monitor:
  class_path: attnmon.AttentionMonitor
  init_args:
    every_n_steps: 7
    source: probe
    rows: all
    sequences: 2
    tokens: labelled
    top_n: [3, 8]
    temperatures: [0.5, 1.0, 3.0]
    vectors: hidden
    normalize_vectors: true
    quantities: [entropy, separability]
    layers: [0, "net.transformer.h.*.attn"]
    alerts: true
    patience: 5
    strict: true
    seed: 3
    prefix: attn_b
    per_head: true
    images: false
    layout: false
    validation_batches: 2
"""


@pytest.mark.parametrize("text", [MONITOR, "monitor: attnmon.AttentionMonitor"], ids=["all arguments", "defaults"])
def test_monitor_survives_a_round_trip_through_yaml(text: str) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(Callback, "monitor")
    config = parser.parse_string(text)
    dumped = parser.dump(config)
    again = parser.parse_string(dumped)
    assert parser.dump(again) == dumped

    given = (yaml.safe_load(text)["monitor"] if text == MONITOR else {"init_args": {}})["init_args"]
    kept = yaml.safe_load(dumped)["monitor"]["init_args"]
    assert {name: kept[name] for name in given} == given

    monitor = parser.instantiate(again).monitor
    assert type(monitor) is AttentionMonitor
    assert monitor.latest is None
    expected = AttentionMonitor(**given)
    assert vars(monitor) | {"_monitor": None} == vars(expected) | {"_monitor": None}


@pytest.mark.parametrize("wrong", ["every_n_steps: often", "source: test", "top_n: five", "no_such_argument: 1"])
def test_wrong_yaml_is_refused(wrong: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "monitor")
    with pytest.raises(Exception, match=wrong.partition(":")[0]):
        parser.parse_string(f"monitor:\n  class_path: attnmon.AttentionMonitor\n  init_args:\n    {wrong}\n")
