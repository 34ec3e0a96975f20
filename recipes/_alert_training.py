"""One run of alert_benchmark.py: it trains, and keeps every sample as plain arrays."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _alert_families import Family, Plant, Setup
from _alert_model import logits, make_model, reshape_attention
from _alert_tasks import make_sequences
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from attnmon import Snapshot, watch
from attnmon.alerts import ALERT_QUANTITIES

__all__ = ["Run", "load", "path_of", "save", "train"]

QUANTITIES = tuple(dict.fromkeys((*ALERT_QUANTITIES, "entropy", "first_key_weight", "separability@10", "jacobian@1.0")))
_HELD_OUT = 0.1
_PROBE_SEED = 2_000_000
_AFTER_NAN = 4  # samples more once the loss is lost

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """What a run leaves behind.

    Attributes:
        steps: Of the samples, ``(samples,)``.
        values: Quantity -> ``(samples, layers, heads)``, NaN where it was not measured.
        errors: Standard errors, likewise.
        temperatures: ``(samples, layers)``.
        nonfinite: Rows with NaN or infinite scores, ``(samples, layers, heads)``.
        loss: Of each training step.
        rate: Learning rate of each training step.
        layers: Module paths.
        about: Family, seed and text.
    """

    steps: NDArray[np.int64]
    values: Mapping[str, Array]
    errors: Mapping[str, Array]
    temperatures: Array
    nonfinite: NDArray[np.int64]
    loss: Array
    rate: Array
    layers: tuple[str, ...]
    about: Mapping[str, Any]


def path_of(folder: Path, family: Family, seed: int, text: str) -> Path:
    """Where a run lies: another description of the family is another file."""
    content = json.dumps([asdict(family.setup), family.plant and asdict(family.plant)], sort_keys=True)
    return folder / f"{family.name}-{text}-{seed}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.npz"


def save(run: Run, path: Path) -> None:
    """Write a run, whole or not at all."""
    named: dict[str, Any] = {"steps": run.steps, "temperatures": run.temperatures, "nonfinite": run.nonfinite}
    named |= {"loss": run.loss, "rate": run.rate, "about": json.dumps({"layers": run.layers, **run.about})}
    named |= {f"value {name}": array for name, array in run.values.items()}
    named |= {f"error {name}": array for name, array in run.errors.items()}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, **named)
    unfinished.replace(path)


def load(path: Path) -> Run:
    """Read a run.

    Raises:
        ValueError: The file is not one of these.
    """
    try:
        with np.load(path, allow_pickle=False) as content:
            named = {name: content[name] for name in content.files}
        about = json.loads(str(named["about"]))
        return Run(
            steps=named["steps"],
            values={name[6:]: array for name, array in named.items() if name.startswith("value ")},
            errors={name[6:]: array for name, array in named.items() if name.startswith("error ")},
            temperatures=named["temperatures"],
            nonfinite=named["nonfinite"],
            loss=named["loss"],
            rate=named["rate"],
            layers=tuple(about.pop("layers")),
            about=about,
        )
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"Expected a run of this recipe in {str(path)!r}, but reading it failed: {error!r}. Delete the file, and "
            "the run is trained again."
        ) from error


# -- training -------------------------------------------------------------------------------------------------------


class Batches:
    """Random pieces of a text, or sequences of a task, the same ones for a run and its twin.

    Args:
        text: Its bytes.
        batch: Pieces at a time.
        seed: Of their places.
        task: See `Setup`.
    """

    def __init__(self, text: bytes, batch: int, seed: int, task: str = "text") -> None:
        self.task = task
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        border = int(len(data) * (1 - _HELD_OUT))
        self.data, self.held_out, self.batch = data[:border], data[border:], batch
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, length: int) -> Tensor:
        """``(batch, length + 1)``: inputs and, one further, what is to be predicted."""
        if self.task != "text":
            return make_sequences(self.task, self.batch, length + 1, self.generator)
        places = torch.rand(self.batch, generator=self.generator)  # so that other lengths draw alike
        starts = (places * (len(self.data) - length - 1)).long()
        return torch.stack([self.data[start : start + length + 1] for start in starts.tolist()])

    def probe(self, length: int) -> Tensor:
        """Four pieces that are never trained on."""
        if self.task != "text":
            return make_sequences(self.task, 4, length, torch.Generator().manual_seed(_PROBE_SEED))
        starts = torch.linspace(0, len(self.held_out) - length, 4).long()
        return torch.stack([self.held_out[start : start + length] for start in starts.tolist()])


def train(family: Family, seed: int, texts: Mapping[str, bytes], text: str, folder: Path) -> Run:
    """Train one run, in silence: once every row is non-finite the monitor says that it has no figures.

    Args:
        family: Which.
        seed: Of weights and batches.
        texts: Name -> bytes.
        text: Name of its text.
        folder: Where pretrained weights are kept.

    Returns:
        Its samples and losses.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attnmon: no sampled row")
        return _train(family, seed, texts, text, folder)


def _train(family: Family, seed: int, texts: Mapping[str, bytes], text: str, folder: Path) -> Run:
    setup, plant = family.setup, family.plant
    torch.manual_seed(seed)
    longest = 4 * setup.context
    net = make_model(setup, longest)
    if setup.pretrained:
        pretrain(net, setup, seed, texts[text], folder / f"pretrained-{text}-{seed}-{_sizes(setup)}.pt")
        torch.manual_seed(seed)
    own = next(other for name, other in texts.items() if name != text) if setup.other_text else texts[text]
    batches = Batches(own, setup.batch, seed, setup.task)
    optimizer = make_optimizer(net, setup.rate)
    length, after = setup.context, _AFTER_NAN * setup.every
    probe = batches.probe(length)
    samples: list[Snapshot] = []
    losses: list[float] = []
    rates: list[float] = []
    options: dict[str, Any] = {"quantities": QUANTITIES, "alerts": False, "seed": seed, "strict": True}
    monitor = watch(net, setup.every, source=setup.source, probe=lambda model: logits(model, probe), **options)
    net.train()
    if plant is not None and plant.step == 0:
        reshape_attention(net, plant, 0)  # in the first sample already
    with monitor:
        if monitor.latest is not None:
            samples.append(monitor.latest)
        for step in range(setup.steps):
            rate = schedule(setup, step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            if plant is not None and step >= plant.step:
                plant_in_optimizer(plant, optimizer, setup)
                if step:
                    reshape_attention(net, plant, step)
                if plant.what == "context":
                    length = int(setup.context * plant.size)
                    probe = batches.probe(length)
            losses.append(train_step(net, optimizer, batches.next(length), plant))
            rates.append(optimizer.param_groups[0]["lr"])
            snapshot = monitor.step()
            if snapshot is not None:
                samples.append(snapshot)
            if len(losses) >= after and not math.isfinite(losses[-after]):
                break
    about = {"family": family.name, "seed": seed, "text": text}
    return as_run(samples, losses, rates, about)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, plant: Plant | None = None) -> float:
    """Forward, backward, clipping, optimizer; the loss before it."""
    loss = cross_entropy(logits(net, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if plant is not None and plant.hidden:
        for parameter in net.parameters():
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)
    clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def make_optimizer(net: nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW, query and key projections in a group of their own where the model has them apart."""
    marked = (".query.", ".key.")
    named = [(any(mark in name for mark in marked), value) for name, value in net.named_parameters()]
    groups = [{"params": [value for mine, value in named if mine == own]} for own in (False, True)]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, weight_decay=0.01, fused=True)


def schedule(setup: Setup, step: int) -> float:
    """The healthy learning rate of a step."""
    if step < setup.warmup:
        return setup.rate * (step + 1) / setup.warmup
    if not setup.cosine:
        return setup.rate
    done = (step - setup.warmup) / (setup.steps - setup.warmup)
    return setup.rate * (0.55 + 0.45 * math.cos(math.pi * done))


def plant_in_optimizer(plant: Plant, optimizer: torch.optim.Optimizer, setup: Setup) -> None:
    """Rates and weight decay of a planted step."""
    query_key = optimizer.param_groups[-1]
    if plant.what == "query_key_rate":
        query_key["lr"] *= plant.size
    elif plant.what == "query_key_decay":
        query_key["weight_decay"] = plant.size
    elif plant.what in ("rate", "no_warmup"):
        for group in optimizer.param_groups:
            group["lr"] = plant.size * (setup.rate if plant.what == "no_warmup" else group["lr"])


def _sizes(setup: Setup) -> str:
    content = json.dumps({**asdict(setup), "rate": 0, "other_text": 0, "steps": 0, "warmup": 0, "every": 0})
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def pretrain(net: nn.Module, setup: Setup, seed: int, text: bytes, path: Path) -> None:
    """Give the model the weights that fine-tuning starts from, trained now or kept from an earlier run."""
    if path.is_file():
        net.load_state_dict(torch.load(path, weights_only=True))
        return
    batches = Batches(text, setup.batch, seed + 1_000_000, setup.task)  # other batches than the run itself
    optimizer = make_optimizer(net, setup.pretrained_rate)
    net.train()
    for step in range(setup.pretrained):
        for group in optimizer.param_groups:
            group["lr"] = setup.pretrained_rate * min(1.0, (step + 1) / 20)
        train_step(net, optimizer, batches.next(setup.context))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")  # another process may be at the same
    torch.save(net.state_dict(), unfinished)
    unfinished.replace(path)


# -- samples --------------------------------------------------------------------------------------------------------


def as_run(
    samples: Sequence[Snapshot], losses: Sequence[float], rates: Sequence[float], about: Mapping[str, Any]
) -> Run:
    """The samples as arrays."""
    paths = {number: path for sample in samples for number, path in sample.layers.items()}
    heads = max(len(row) for sample in samples for rows in sample.values.values() for row in rows.values())
    shape = (len(samples), len(paths), heads)
    values = {name: np.full(shape, np.nan) for sample in samples for name in sample.values}
    errors = {name: np.full(shape, np.nan) for name in values}
    temperatures, nonfinite = np.full(shape[:2], np.nan), np.zeros(shape, dtype=np.int64)
    for index, sample in enumerate(samples):
        for arrays, found in ((values, sample.values), (errors, sample.errors)):
            for name, rows in found.items():
                for layer, row in rows.items():
                    arrays[name][index, layer, : len(row)] = row
        for layer, temperature in sample.temperatures.items():
            temperatures[index, layer] = temperature
        for layer, counts in sample.nonfinite.items():
            nonfinite[index, layer, : len(counts)] = counts
    return Run(
        steps=np.array([sample.step for sample in samples]),
        values=values,
        errors=errors,
        temperatures=temperatures,
        nonfinite=nonfinite,
        loss=np.array(losses),
        rate=np.array(rates),
        layers=tuple(paths[number] for number in sorted(paths)),
        about=about,
    )
