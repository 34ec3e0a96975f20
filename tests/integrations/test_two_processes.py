"""Two processes (gloo, on the CPU) under other trainers than Lightning's: their sums meet, and one of them logs."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing as mp
import os
import pickle
import socket
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor

import lightning as L
import pytest
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from lightning.fabric.strategies import DDPStrategy
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import SequentialSampler
from toys import VOCABULARY, digest, tiny_gpt2

from attnmon import AttentionSaturationWarning, watch
from attnmon.alerts import AlertRules, ScoreGrowth

RULES = AlertRules(active_set=None, score_growth=ScoreGrowth(spread=0.001, leave_spread=0.0005, slackening=math.inf))
EVERYTHING = {"rows": "all", "sequences": 99, "strict": True, "rules": RULES}
LENGTH, STEPS = 70, 3


def tokens(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def with_transformers(world: int, folder: str, monitored: bool, fsdp: bool) -> dict:
    """A run of `transformers.Trainer` with four sequences to a step, however many processes there are."""
    from transformers import Trainer, TrainingArguments

    from attnmon.integrations.transformers import AttentionMonitorCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    if fsdp:
        shard_on_the_cpu()
    monitor = AttentionMonitorCallback(1, **EVERYTHING)
    sharding = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4 // world,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(sharding if fsdp else {}),
    )
    trainer = InOrder(tiny_gpt2(), arguments, train_dataset=tokens(12), callbacks=[monitor] if monitored else [])
    trainer.train()
    assert any(isinstance(module, FSDPModule) for module in trainer.model.modules()) == fsdp
    history = trainer.state.log_history
    return {
        "steps": [entry["step"] for entry in history if "attn/entropy/layer_00" in entry],
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "latest": monitor.latest,
        "parameters": digest(dict(trainer.model.state_dict())),
    }


def shard_on_the_cpu() -> None:
    """accelerate shards on accelerators only, though torch can do so on the CPU as well: have it forget the kind."""
    init = AcceleratorState.__init__

    def forgetful(self, *args, fsdp_plugin=None, **kwargs):
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = forgetful


def with_fabric(world: int, folder: str, monitored: bool, fsdp: bool) -> dict:
    """The same by a loop under Fabric."""
    del folder, fsdp
    strategy = DDPStrategy(process_group_backend="gloo") if world > 1 else "auto"
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = tiny_gpt2()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, monitor = [], watch(model, 1, **EVERYTHING)
    rows, share = tokens(12), 4 // world
    for step in range(STEPS):
        if monitored and step == 0:
            monitor.__enter__()
        mine = rows[4 * step + share * fabric.global_rank :][:share]
        ids = torch.stack([row["input_ids"] for row in mine])
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach()).item())
        optimizer.step()
        optimizer.zero_grad()
        if monitored:
            monitor.step()
    monitor.close()
    return {
        "steps": [0, 1, 2],
        "losses": losses,
        "latest": monitor.latest,
        "parameters": digest(dict(model.state_dict())),
    }


def serve(rank: int, world: int, port: int, job: str, arguments: tuple, pipe) -> None:
    if world > 1:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "NODE_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "LOCAL_WORLD_SIZE": f"{world}"}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = globals()[job](world, *arguments)
        told = any(warning.category is AttentionSaturationWarning for warning in caught)
        pipe.send_bytes(pickle.dumps({**result, "told": told}))
    except BaseException:
        pipe.send_bytes(pickle.dumps(traceback.format_exc()))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run(world: int, job, *arguments) -> list[dict]:
    """The results of all processes."""
    context, processes, pipes = mp.get_context("spawn"), [], []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(rank, world, port, job.__name__, arguments, there), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        with ThreadPoolExecutor(world) as pool:
            results = list(pool.map(lambda pipe: pickle.loads(pipe.recv_bytes()), pipes))
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    assert all(isinstance(result, dict) for result in results), "\n".join(map(str, results))
    return results


@pytest.mark.parametrize(
    ("job", "fsdp"),
    [(with_transformers, False), (with_transformers, True), (with_fabric, False)],
    ids=["transformers ddp", "transformers fsdp", "fabric ddp"],
)
def test_two_processes_measure_as_one_does_and_train_as_without(tmp_path, job, fsdp):
    (alone,) = run(1, job, str(tmp_path / "alone"), True, False)
    both = run(2, job, str(tmp_path / "both"), True, fsdp)
    plain = run(2, job, str(tmp_path / "plain"), False, fsdp)
    for rank, result in enumerate(both):
        assert result["steps"] == [0, 1, 2]
        assert result["latest"].step == 2
        assert result["latest"].rows_used == alone["latest"].rows_used
        for quantity, layers in alone["latest"].values.items():
            for layer, heads in layers.items():
                assert result["latest"].values[quantity][layer] == pytest.approx(heads, rel=2e-3, abs=1e-6, nan_ok=True)
        assert (result["losses"], result["parameters"]) == (plain[rank]["losses"], plain[rank]["parameters"])
    # by their texts: a NaN that has come through a file is not the one NaN of this process any more
    first, second = (repr(dataclasses.replace(result["latest"], cost=None)) for result in both)
    assert first == second
    assert [result["told"] for result in both] == [True, False]  # both know, the first says so
