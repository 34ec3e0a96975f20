"""See the warnings at work on a model of yours: fine-tune it as it should be, then with something wrong, twice.

    python recipes/try_warnings.py --config configs/try_warnings/demo.yaml

The arguments of `try_warnings` are the schema of the YAML files and of the command line; ``--help`` lists them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _models import check_model, choose_device, encode, load_model, train_small_model
from _text import load_pretrained, load_text
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from attnmon import AttentionSaturationWarning, Snapshot, watch
from attnmon.alerts import Alert

_WARM_UP = 10  # steps
_SMALL = {
    "vocab_size": 1024,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "train_steps": 300,
    "batch_size": 16,
    "learning_rate": 3e-3,
    "seed": 0,
}


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
        name: What is wrong with it.
        losses: Of each step.
        alerts: Of level warn and above.
        watched: Number of those of level watch.
        samples: Its samples.
    """

    name: str
    losses: Sequence[float]
    alerts: Sequence[Alert]
    watched: int
    samples: Sequence[Snapshot]


def try_warnings(
    model: str | None = None,
    text: str | None = None,
    checksum: str | None = None,
    length: int = 256,
    batch: int = 2,
    steps: int = 100,
    rate: float = 2e-5,
    rate_factor: float = 100.0,
    temperature_factor: float = 20.0,
    layer: int | None = None,
    from_step: int = 31,
    every_n_steps: int = 10,
    device: str | None = None,
    output: str = "runs/try_warnings",
) -> None:
    """Fine-tune a model three times on a text: at a sane rate, at that times a factor, and with a layer's T cut.

    Args:
        model: Hub id, local directory or ``.gguf`` file; null: a small GPT-2 that is trained here first.
        text: File or address; null: the documentation that Python carries.
        checksum: SHA-256 that the text must have.
        length: Tokens per sequence.
        batch: Sequences per step.
        steps: Optimizer steps of each run.
        rate: Peak learning rate of AdamW, after ten steps of warm-up; sane for this model.
        rate_factor: By which it is multiplied in the second run, from its first step on.
        temperature_factor: By which the softmax temperature of one layer is divided in the third.
        layer: That layer; null: the one in the middle.
        from_step: Step from which it is.
        every_n_steps: Steps between two samples.
        device: ``"cpu"``, ``"cuda"``; null: a GPU if there is one.
        output: Folder for the small model, which is trained once.

    Raises:
        ValueError: An argument is out of its range, or the model's temperature can't be reached.
    """
    for name, value, least in (("length", length, 16), ("batch", batch, 1), ("steps", steps, 10)):
        if value < least:
            raise ValueError(f"Expected `{name}` to be at least {least}, but got {value}.")
    if not 0 <= from_step < steps:
        raise ValueError(f"Expected `from_step` to lie below the {steps} `steps`, but got {from_step}.")
    disable_progress_bar()
    if model is None:
        model = train_small_model(Path(output) / "model", {**_SMALL, "context": length}, text, checksum, True)
    check_model(model, length)
    content, _ = load_text(text, checksum)
    tokens = encode(load_pretrained(AutoTokenizer, model), content, 0, min(steps * batch, 200) * length)
    place = choose_device(device)
    runs = [
        (f"rate {rate:g}", rate, 1.0),
        (f"rate {rate * rate_factor:g}", rate * rate_factor, 1.0),
        (f"T / {temperature_factor:g} in a layer from step {from_step}", rate, temperature_factor),
    ]
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=160)
    outcomes = []
    for name, speed, factor in runs:
        net = load_model(model)
        torch.nn.Module.to(net, place)
        batches = tokens.view(-1, length)
        outcomes.append(
            fine_tune(net, batches.to(place), batch, steps, speed, every_n_steps, name, layer, factor, from_step)
        )
        console.print(f"{name}: done", soft_wrap=True)
    console.print(summary(outcomes))
    for outcome in outcomes:
        for alert in outcome.alerts:
            console.print(f"{outcome.name}, step {alert.step}, {alert.severity}: {alert.message}", soft_wrap=True)


def fine_tune(
    net: PreTrainedModel,
    sequences: Tensor,
    batch: int,
    steps: int,
    rate: float,
    every_n_steps: int,
    name: str,
    layer: int | None,
    factor: float,
    from_step: int,
) -> Outcome:
    """Train with the monitor on, its Python warnings held back: the caller prints them."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    losses: list[float] = []
    samples: list[Snapshot] = []
    net.train()
    with warnings.catch_warnings(), watch(net, every_n_steps, strict=True) as monitor:
        warnings.simplefilter("ignore", AttentionSaturationWarning)
        for step in range(steps):
            if factor != 1.0 and step == from_step:
                sharpen(net, samples[0], layer, factor)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / _WARM_UP)
            chosen = [(step * batch + place) % len(sequences) for place in range(batch)]
            ids = sequences[chosen]
            logits = net(input_ids=ids, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            snapshot = monitor.step(loss=loss, grad_norm=norm, learning_rate=optimizer.param_groups[0]["lr"])
            samples += [] if snapshot is None else [snapshot]
        raised = [alert for alert in monitor.alerts if not alert.ended]
    loud = [alert for alert in raised if alert.severity != "watch"]
    return Outcome(name, losses, loud, len(raised) - len(loud), samples)


def sharpen(net: nn.Module, sample: Snapshot, layer: int | None, factor: float) -> None:
    """Divide one layer's softmax temperature.

    Raises:
        ValueError: There is no such layer, or its scale is not the attribute that transformers' models have.
    """
    number = len(sample.layers) // 2 if layer is None else layer
    if number not in sample.layers:
        raise ValueError(f"Expected `layer` to be one of the {len(sample.layers)} of the model, but got {number}.")
    module = net.get_submodule(sample.layers[number])
    scaling = getattr(module, "scaling", None)
    if not isinstance(scaling, float):
        raise ValueError(
            f"Expected {sample.layers[number]} to have a number `scaling`, as transformers' models have, but "
            f"{type(module).__name__} has {scaling!r}. Give another model."
        )
    module.scaling = scaling * factor  # type: ignore[assignment]  # a plain attribute of the module


def summary(outcomes: Sequence[Outcome]) -> Table:
    """One line per run."""
    table = Table("run", "loss, first and last", "score spread, largest head", "first warning", "heads", "watch only")
    for outcome in outcomes:
        spreads = [
            figure
            for sample in outcome.samples
            for row in sample.values["score_spread"].values()
            for figure in row
            if figure == figure
        ]
        first = min(outcome.alerts, key=lambda alert: alert.step, default=None)
        table.add_row(
            outcome.name,
            f"{outcome.losses[0]:.2f} {outcome.losses[-1]:.2f}",
            f"{max(spreads, default=float('nan')):.3g}",
            "none" if first is None else f"{first.rule} at step {first.step}",
            "" if first is None else where(first),
            str(outcome.watched),
        )
    return table


def where(alert: Alert) -> str:
    """How many heads an alert names, and of which layer if it is one."""
    if len(alert.heads) == 1:
        ((layer, heads),) = alert.heads.items()
        return f"{len(heads)} of layer {layer}"
    return f"{alert.num_heads} of {len(alert.heads)} layers"


if __name__ == "__main__":
    try:
        auto_cli(try_warnings, as_positional=False)
    except (ValueError, ModuleNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
