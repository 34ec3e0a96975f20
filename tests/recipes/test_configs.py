"""Every YAML under configs does what its own header says, shortened to two steps."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))


def header_command(config: Path) -> list[str]:
    first_line = (ROOT / config).read_text(encoding="utf-8").partition("\n")[0]
    return shlex.split(first_line.removeprefix("# "))


def test_configs_are_found() -> None:
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_header_is_the_run_command(config: Path) -> None:
    command = header_command(config)
    assert command[0] == "python"
    assert (ROOT / command[1]).is_file()
    assert command[-2:] == ["--config", config.as_posix()]
    assert Path(command[1]).stem == config.parent.name  # configs/<recipe>/<name>.yaml


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_run(config: Path, tmp_path: Path, model_dir: Path, text_file: Path) -> None:
    written = yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))
    options = [
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=1",
        "--trainer.val_check_interval=2",
        "--trainer.enable_progress_bar=false",
        f"--trainer.logger.init_args.save_dir={tmp_path}",
        f"--data.text={text_file}",
        "--data.context=32",
        "--data.batch_size=2",
    ]
    if written["trainer"]["accelerator"] != "cpu":  # as on the GPU, with gloo in place of nccl
        devices = 2 if "strategy" in written["trainer"] else 1
        options += ["--trainer.accelerator=cpu", f"--trainer.devices={devices}"]
    if written["model"].get("model"):
        options += [f"--model.model={model_dir}"]

    command = [sys.executable, *header_command(config)[1:], *options]
    # an address that nothing listens on: a run that asks the hub fails at once rather than hanging
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert run.returncode == 0, run.stdout + run.stderr

    # nothing that a reader of the output would have to wonder about
    odd = [line for line in run.stderr.splitlines() if "Warning" in line and "AttentionSaturationWarning" not in line]
    assert not odd, run.stderr
    assert "Attention at step 0" in run.stdout
    assert "tensorboard --logdir" in run.stdout

    logs = tmp_path / written["trainer"]["logger"]["init_args"]["name"] / "version_0"
    assert len(list(logs.glob("events.out.tfevents.*"))) == 1
    events = EventAccumulator(str(logs), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()
    assert "train_loss" in tags["scalars"] or "val_loss" in tags["scalars"]
    for family in ("entropy", "separability", "distance", "jacobian", "logits"):
        assert any(tag.startswith(f"attn/{family}/") for tag in tags["scalars"]), (family, tags)
    assert any(tag.startswith("attn/") for tag in tags["images"])
