"""Every YAML under configs does what its own header says, shortened to two steps or a few tokens."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))
RECIPES = {
    "alert_benchmark": "alert_benchmark",
    "finetune": "finetune",
    "figures": "reproduce_figures",
    "compare_normalizers": "compare_normalizers",
    "overhead": "overhead",
    "three_trainers": "three_trainers",
    "try_warnings": "try_warnings",
}  # configs/<folder>/<name>.yaml to recipes/<script>.py


def of(folder: str) -> list[Path]:
    return [config for config in CONFIGS if config.parent.name == folder]


def header_command(config: Path) -> list[str]:
    first_line = (ROOT / config).read_text(encoding="utf-8").partition("\n")[0]
    return shlex.split(first_line.removeprefix("# "))


def test_configs_are_found() -> None:
    assert len(CONFIGS) >= 11
    assert sorted(CONFIGS) == sorted(config for folder in RECIPES for config in of(folder))  # each one is run below


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_header_is_the_run_command(config: Path) -> None:
    command = header_command(config)
    assert command[0] == "python"
    assert (ROOT / command[1]).is_file()
    assert command[-2:] == ["--config", config.as_posix()]
    assert Path(command[1]).stem == RECIPES[config.parent.name]


def run_header(config: Path, *options: str, nodes: int = 1) -> subprocess.CompletedProcess[str]:
    """The header's command with more options, on every node; it has to succeed, and to warn of nothing."""
    command = [sys.executable, *header_command(config)[1:], *options]
    # an address that nothing listens on: a run that asks the hub fails at once rather than hanging
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    if nodes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with ThreadPoolExecutor(nodes) as pool:
        runs = list(pool.map(lambda node: run_node(command, environment | {"NODE_RANK": str(node)}), range(nodes)))
    for run in runs[1:]:
        assert "Attention at step" not in run.stdout  # the first node reports for all
    return runs[0]


def run_node(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # nothing that a reader of the output would have to wonder about
    odd = [line for line in run.stderr.splitlines() if "Warning" in line and "AttentionSaturationWarning" not in line]
    assert not odd, run.stderr
    return run


@pytest.mark.parametrize("config", of("finetune"), ids=str)
def test_finetune(config: Path, tmp_path: Path, model_dir: Path, text_file: Path) -> None:
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
    nodes = written["trainer"].get("num_nodes", 1)  # all of them on this machine
    if written["trainer"]["accelerator"] != "cpu":  # as on the GPU, with gloo in place of nccl
        devices = 2 if "strategy" in written["trainer"] and nodes == 1 else 1
        options += ["--trainer.accelerator=cpu", f"--trainer.devices={devices}"]
    if written["model"].get("model"):
        options += [f"--model.model={model_dir}"]

    run = run_header(config, *options, nodes=nodes)
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


@pytest.mark.parametrize("config", of("figures"), ids=str)
def test_reproduce_figures(config: Path, tmp_path: Path, model_dir: Path, text_file: Path) -> None:
    written = yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))
    options = [
        f"--text={text_file}",
        "--offset=3",
        "--lengths=[16,32]",
        "--top_n=[1,5,10]",
        "--critical_top_n=12",
        "--separability_top_n=[1,2,16]",
        "--train_steps=2",
        f"--out={tmp_path}",
    ]
    if written["model"] is not None:
        options.append(f"--model={model_dir}")
    run = run_header(config, *options)
    assert "The paper's claims on" in run.stdout
    assert str(tmp_path / "verdict.md") in run.stdout
    for figure in ("1", "2a", "2b", "2c", "3", "4"):
        for ending in ("png", "svg", "csv"):
            assert (tmp_path / f"figure_{figure}.{ending}").stat().st_size > 500
    assert (tmp_path / "verdict.md").is_file()
    assert (tmp_path / "verdict.json").is_file()
    assert (tmp_path / "analysis.npz").is_file()


@pytest.mark.parametrize("config", of("compare_normalizers"), ids=str)
def test_compare_normalizers(config: Path, tmp_path: Path, model_dir: Path, text_file: Path) -> None:
    written = yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))
    options = [f"--text={text_file}", "--offset=3", "--lengths=[16,32]", "--top_n=3", "--rows=4", f"--out={tmp_path}"]
    options += ["--train_steps=2"] if written["model"] is None else [f"--model={model_dir}"]
    run = run_header(config, *options)
    for name in written["normalizers"]:
        assert f"│ {name} " in run.stdout
    for ending in ("png", "svg", "csv"):
        assert (tmp_path / f"normalizers.{ending}").stat().st_size > 500


@pytest.mark.parametrize("config", of("overhead"), ids=str)
def test_overhead(config: Path, tmp_path: Path) -> None:
    options = ["--length=64", "--batch=1", "--n_layer=2", "--n_head=2", "--n_embd=16", "--vocab_size=64"]
    options += ["--repeats=2", "--warmup=1", "--lengths=[32,48]", "--rows=[4,8]", "--heads=[1,2]", "--event_samples=1"]
    options += ["--top_n_counts=[1,2]", "--temperature_counts=[1,2]", "--device=cpu", "--threads=1"]
    run = run_header(config, *options, f"--output={tmp_path / 'overhead.md'}")
    assert not run.stderr, run.stderr
    written = (tmp_path / "overhead.md").read_text(encoding="utf-8")
    for title in ("Training step", "What a sample adds", "Every row", "Growth of a sample", "Event file"):
        assert title in run.stdout
        assert f"**{title}" in written
    for row in ("no monitor", "monitor, not sampled", "monitor, sampled", "eager: entropy, top 20", "fused forward"):
        assert f"│ {row} " in run.stdout


@pytest.mark.parametrize("config", of("three_trainers"), ids=str)
def test_three_trainers(config: Path, text_file: Path) -> None:
    options = [f"--text={text_file}", "--steps=3", "--every_n_steps=2", "--batch_size=2", "--context=32", "--rows=8"]
    run = run_header(config, *options)
    assert "figures, to the last digit, at steps 0, 2." in run.stdout


@pytest.mark.parametrize("config", of("alert_benchmark"), ids=str)
def test_alert_benchmark(config: Path, tmp_path: Path, text_file: Path) -> None:
    written = yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))
    options = ["--families=growth_head,inf_head", "--score_seeds=[100]", "--steps=10", f"--output={tmp_path}"]
    if written["tune_seeds"]:
        options += ["--tune_seeds=[0]", f"--text={text_file}", "--jobs=1"]
    run = run_header(config, *options)
    assert not run.stderr, run.stderr
    for title in ("Kinds of failure", "Families", "Signals of", "Misses and false alarms"):
        assert title in run.stdout
    runs = 12 if written["tune_seeds"] else 3  # two planted families and their twin, two texts and two seeds
    assert len(list((tmp_path / "runs").glob("*.npz"))) == runs
    assert f"{runs} of {runs}: " in run.stdout
    assert (tmp_path / "results.md").is_file()
    assert (tmp_path / "results.json").is_file()


@pytest.mark.parametrize("config", of("try_warnings"), ids=str)
def test_try_warnings(config: Path, tmp_path: Path, model_dir: Path, text_file: Path) -> None:
    written = yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))
    options = [f"--text={text_file}", "--length=32", "--steps=10", "--from_step=4", "--every_n_steps=2"]
    options += [f"--output={tmp_path}"] if written["model"] is None else [f"--model={model_dir}"]
    run = run_header(config, *options)
    assert f"rate {written['rate']:g}: done" in run.stdout
    assert "T / 20 in a layer from step 4: done" in run.stdout
    assert "first warning" in run.stdout
    assert "softmax temperature too sharp" in run.stdout or written["model"] is not None  # its scores are next to 0
