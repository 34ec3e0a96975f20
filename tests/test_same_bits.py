"""A run with the monitor is the run without it, to the last bit: losses, gradients, parameters, optimizers, generators.

Each set-up is run three times from one seed: without a monitor, with one that samples every step, and with one that
samples every third.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from toys import (
    VOCABULARY,
    Bits,
    MemoryLogger,
    NanoModel,
    ValidatedModule,
    bits_of,
    digest,
    loader,
    seed_all,
    spread,
    tiny_gpt2,
    token_batches,
    trainer,
)

from attnmon import AttentionMonitor, AttentionSaturationWarning, watch
from attnmon.alerts import AlertRules, EntropyRise

STEPS = 20
SIZE = {"batch": 2, "length": 24}
RULES = AlertRules(entropy_rise=EntropyRise(severity="warn", share=0.1, leave_share=0.05, min_rise=0.01))

pytestmark = pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")


# -- models -----------------------------------------------------------------------------------------------------------


def gpt2(attention: str = "sdpa") -> nn.Module:
    return tiny_gpt2(dropout=0.1, use_cache=False, attn_implementation=attention).train()


def checkpointed(reentrant: bool) -> nn.Module:
    model = gpt2()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model


class Predicts(nn.Module):
    """A model that gives logits only, called as language models are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.model(input_ids)
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def nano() -> nn.Module:
    return Predicts(NanoModel(heads=(2, 4), dropout=0.1))


def encoder() -> nn.Module:
    """torch's own layers, whose attention is `nn.MultiheadAttention`."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Predicts(nn.Sequential(nn.Embedding(VOCABULARY, 16), body, nn.Linear(16, VOCABULARY)))


# -- Lightning --------------------------------------------------------------------------------------------------------


class Momentum(ValidatedModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(ValidatedModule):
    """Two optimizers, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self(**batch).loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return torch.optim.AdamW(parameters[:9], lr=1e-2), torch.optim.SGD(parameters[9:], lr=0.05, momentum=0.9)


class Generates(ValidatedModule):
    """Draws tokens in its validation."""

    def validation_step(self, batch, batch_idx):
        self.log(
            "drawn", self.model.generate(batch["input_ids"][:, :6], max_new_tokens=4, do_sample=True).float().sum()
        )
        super().validation_step(batch, batch_idx)


@dataclass(frozen=True)
class Setup:
    """A way to train, and what its monitors are asked for."""

    model: Callable[[], nn.Module] = gpt2
    module: type[ValidatedModule] = ValidatedModule
    trainer: dict[str, Any] = field(default_factory=dict)
    monitors: Sequence[dict[str, Any]] = ({},)

    def run(self, tmp_path, every_n_steps: int | None) -> dict[str, Any]:
        """Fingerprints of a run, which had monitors that really measured unless `every_n_steps` is None."""
        seed_all()
        module = self.module(self.model())
        seen, logger = Bits(), MemoryLogger()
        monitors = []
        if every_n_steps is not None:
            monitors = [AttentionMonitor(every_n_steps, strict=True, **arguments) for arguments in self.monitors]
        arguments = {"max_steps": STEPS, "val_check_interval": 5, "num_sanity_val_steps": 1, **self.trainer}
        batches = STEPS * arguments.get("accumulate_grad_batches", 1)
        fit = trainer(tmp_path, seen, *monitors, logger=logger, **arguments)
        fit.fit(module, loader(token_batches(batches, **SIZE)), loader(token_batches(2, seed=9, **SIZE)))
        for monitor in monitors:
            steps = [step for step, _ in logger.of(f"{monitor.prefix}/")]
            assert steps == list(range(0, STEPS, every_n_steps))
            assert_measured(monitor.latest, steps[-1])
            if monitor.validation_batches:
                assert_measured(monitor.latest_validation, STEPS - 1)
        return bits_of(seen, module, fit.optimizers)


def assert_measured(snapshot, step: int) -> None:
    assert snapshot.step == step
    assert sorted(snapshot.layers) == [0, 1]
    assert all(isfinite(value) for heads in snapshot.values["entropy"].values() for value in heads)
    assert all(used > 0 for heads in snapshot.rows_used["distance@5"].values() for used in heads)


def only_on_a_gpu(setup: Setup):
    reason = "float16 autocast needs a GPU: on the CPU Lightning runs bfloat16 instead"
    return pytest.param(setup, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason=reason))


SETUPS = {
    "sdpa": Setup(),
    "eager": Setup(lambda: gpt2("eager")),
    "from_scratch": Setup(nano, monitors=[{"validation_batches": 1}]),
    "multihead": Setup(encoder, monitors=[{"validation_batches": 2}]),
    "checkpointed": Setup(lambda: checkpointed(reentrant=False)),
    "checkpointed_reentrant": Setup(lambda: checkpointed(reentrant=True)),
    "accumulation": Setup(trainer={"accumulate_grad_batches": 2}),
    "bf16-mixed": Setup(trainer={"precision": "bf16-mixed"}),
    "bf16-true": Setup(trainer={"precision": "bf16-true"}),
    "64-true": Setup(trainer={"precision": "64-true"}),
    "16-mixed": only_on_a_gpu(Setup(lambda: gpt2("eager"), trainer={"precision": "16-mixed", "accelerator": "gpu"})),
    "clipped_by_norm": Setup(trainer={"gradient_clip_val": 0.1}),
    "clipped_by_value": Setup(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "momentum": Setup(module=Momentum),
    "manual": Setup(module=Manual, trainer={"max_steps": 2 * STEPS}),
    "generation": Setup(module=Generates, monitors=[{"validation_batches": 1}]),
    "probe": Setup(monitors=[{"source": "probe"}]),
    "probe_of_multihead": Setup(encoder, monitors=[{"source": "probe"}]),
    "probe_bf16": Setup(trainer={"precision": "bf16-mixed"}, monitors=[{"source": "probe"}]),
    "hidden": Setup(monitors=[{"vectors": "hidden"}]),
    "embedding": Setup(monitors=[{"vectors": "embedding"}]),
    "labelled": Setup(monitors=[{"tokens": "labelled"}]),
    "all_rows": Setup(monitors=[{"rows": "all", "sequences": 9}]),
    "few_rows": Setup(monitors=[{"rows": 12, "sequences": 1}]),
    "all_quantities": Setup(monitors=[{"quantities": ["all"]}]),
    "two_monitors": Setup(monitors=[{"vectors": "hidden"}, {"prefix": "probe", "source": "probe"}]),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_lightning_trains_to_the_same_bits(setup, tmp_path):
    without = setup.run(tmp_path, None)
    assert len(without["validations"]) > 1
    for every_n_steps in (1, 3):
        assert setup.run(tmp_path, every_n_steps) == without


# -- plain loops ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """The same without Lightning. A scaler goes with float16."""

    model: Callable[[], nn.Module] = gpt2
    momentum: bool = False
    autocast: torch.dtype | None = None
    micro_batches: int = 1
    clip: float | None = None
    monitor: dict[str, Any] = field(default_factory=dict)

    def run(self, every_n_steps: int | None) -> dict[str, Any]:
        seed_all()
        model, seen, sampled = self.model(), Bits(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if self.momentum:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=self.autocast == torch.float16)
        batches = iter(token_batches(STEPS * self.micro_batches, **SIZE))
        (held_out,) = token_batches(1, seed=9, **SIZE)
        monitor = None if every_n_steps is None else watch(model, every_n_steps, strict=True, **self.monitor)
        with nullcontext() if monitor is None else monitor:
            for step in range(STEPS):
                for _ in range(self.micro_batches):
                    with torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None):
                        loss = model(**next(batches)).loss
                    scaler.scale(loss).backward()
                    seen.losses.append(digest(loss))
                scaler.unscale_(optimizer)
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                seen.gradients.append(digest([p.grad for p in model.parameters()]))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if step % 5 == 0:
                    with torch.no_grad():
                        seen.validations.append(digest(model.eval()(**held_out).logits))
                    model.train()
                if monitor is not None and monitor.step() is not None:
                    sampled.append(monitor.latest.step)
        if monitor is not None:
            first = every_n_steps if "probe" in self.monitor else 0  # entering the block made the first probe
            assert sampled == list(range(first, STEPS + bool(first), every_n_steps))
            assert_measured(monitor.latest, sampled[-1])
        return bits_of(seen, model, [optimizer]) | {"scaler": digest(scaler.state_dict())}


PROBE = token_batches(1, seed=5, **SIZE)[0]

LOOPS = {
    "sdpa": Loop(),
    "eager": Loop(lambda: gpt2("eager")),
    "from_scratch": Loop(nano),
    "multihead": Loop(encoder),
    "checkpointed": Loop(lambda: checkpointed(reentrant=False)),
    "checkpointed_reentrant": Loop(lambda: checkpointed(reentrant=True)),
    "micro_batches": Loop(micro_batches=2),
    "bfloat16": Loop(autocast=torch.bfloat16),
    "float16": Loop(autocast=torch.float16),
    "clipped": Loop(clip=0.1),
    "momentum": Loop(momentum=True),
    "probe": Loop(monitor={"source": "probe", "probe": PROBE}),
    "probe_in_training_mode": Loop(monitor={"source": "probe", "probe": lambda model: model.train()(**PROBE)}),
    "hidden": Loop(monitor={"vectors": "hidden"}),
    "all_rows": Loop(monitor={"rows": "all", "sequences": 9, "quantities": ["all"]}),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_plain_loop_trains_to_the_same_bits(loop):
    without = loop.run(None)
    for every_n_steps in (1, 3):
        assert loop.run(every_n_steps) == without


# -- resuming ---------------------------------------------------------------------------------------------------------


class Resumable:
    """Batches that go on in mid-epoch where a checkpoint left them, as Lightning asks of a loader for that."""

    def __init__(self, batches) -> None:
        self.batches = batches
        self.first = self.given = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        first, self.first = self.first, 0
        for index in range(first, len(self.batches)):
            self.given = index + 1
            yield self.batches[index]

    def state_dict(self):
        return {"given": self.given % len(self.batches)}

    def load_state_dict(self, state):
        self.first = state["given"]


class KeepsGenerator(ValidatedModule):
    """Saves the state of the generator that its dropout draws from; so much weight decay that attention gets flat."""

    restored = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["generator"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        self.restored = checkpoint["generator"]

    def on_train_start(self):
        if self.restored is not None:
            torch.set_rng_state(self.restored)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=6.0)


class KeepsGeneratorByHand(Manual, KeepsGenerator):
    def configure_optimizers(self):
        parameters = list(self.parameters())
        return [torch.optim.AdamW(part, lr=0.02, weight_decay=6.0) for part in (parameters[:9], parameters[9:])]


@dataclass(frozen=True)
class Course:
    """A run of 12 steps, or its first half, or its second half from the checkpoint of the first."""

    folder: Path
    way: str
    source: str
    per_epoch: int
    every_n_steps: int | None = None

    def run(self, name: str, steps: int = 12, after: str | None = None):
        """Fingerprints, what was logged, and what was warned."""
        seed_all()
        module = (KeepsGeneratorByHand if self.way == "manual" else KeepsGenerator)(spread(gpt2()).train())
        accumulate = 1 + (self.way == "accumulation")
        optimizers = 1 + (self.way == "manual")  # the Trainer counts a step for each
        seen, logger = Bits(), MemoryLogger()
        folder = self.folder / str(self.every_n_steps)
        keep = ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=6 * optimizers, save_top_k=-1)
        callbacks = [seen, keep]
        if self.every_n_steps is not None:
            callbacks += [AttentionMonitor(self.every_n_steps, source=self.source, rows=8, strict=True, rules=RULES)]
        fit = trainer(
            self.folder, *callbacks, logger=logger, max_steps=steps * optimizers, max_epochs=-1,
            enable_checkpointing=True, accumulate_grad_batches=accumulate, check_val_every_n_epoch=None,
            val_check_interval=99,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("ignore", "The dirpath has changed|Using ModelCheckpoint with manual")
            warnings.simplefilter("always", AttentionSaturationWarning)
            fit.fit(
                module,
                Resumable(token_batches(self.per_epoch * accumulate, **SIZE)),
                loader(token_batches(1, seed=9, **SIZE)),
                ckpt_path=None if after is None else folder / after / f"step={6 * optimizers}.ckpt",
            )
        logged = [
            (
                step,
                {key: value for key, value in metrics.items() if not key.startswith("attn/monitor/")},
            )  # by the clock
            for step, metrics in logger.of("attn/")
        ]
        return bits_of(seen, module, fit.optimizers), logged, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("way", "source", "per_epoch"),
    [
        ("automatic", "train", 3),
        ("automatic", "train", 4),
        ("automatic", "probe", 4),
        ("accumulation", "train", 4),
        ("manual", "train", 4),
        ("manual", "probe", 3),
    ],
)  # an epoch of 3 batches ends at the checkpoint, one of 4 goes on
def test_a_resumed_run_is_the_unbroken_one(tmp_path, way, source, per_epoch):
    plain, _, _ = Course(tmp_path, way, source, per_epoch).run("unbroken")
    for every_n_steps in (1, 3):
        course = Course(tmp_path, way, source, per_epoch, every_n_steps)
        unbroken, logged, warned = course.run("unbroken")
        assert unbroken == plain
        _, logged_before, warned_before = course.run("first", steps=6)
        resumed, logged_after, warned_after = course.run("second", after="first")
        assert logged_before + logged_after == logged
        assert [step for step, _ in logged] == list(range(0, 12, every_n_steps))
        assert warned_before + warned_after == warned
        assert warned_after
        for kind in ("losses", "gradients"):
            half = len(plain[kind]) // 2
            assert resumed[kind] == plain[kind][half:]
        for kind in ("parameters", "optimizers", "torch"):
            assert resumed[kind] == plain[kind]
