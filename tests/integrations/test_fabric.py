"""`watch` around a loop that Fabric runs."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.fabric.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import digest, random_states, tiny_gpt2, token_batches

from attnmon import watch

EVERYTHING = {"rows": "all", "sequences": 99}


def train(steps=6, accumulate=1, monitored=True, precision="32-true", loggers=None, model=None, **arguments):
    """What a run computes, and the monitor."""
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision, loggers=loggers)
    model = tiny_gpt2(dropout=0.1) if model is None else model
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(7)
    losses, gradients, monitor = [], [], None
    if monitored:
        writer = fabric.loggers or None
        monitor = watch(model, writer=writer, strict=True, **({"every_n_steps": 1} | arguments)).__enter__()
    for step, batch in enumerate(token_batches(steps * accumulate)):
        syncs = (step + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not syncs):
            loss = model(**batch).loss
            fabric.backward(loss / accumulate)
        losses.append(loss.item())
        if syncs:
            gradients.append(digest([p.grad for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step()
    if monitor is not None:
        monitor.close()
    return (losses, gradients, digest(dict(model.state_dict())), random_states()), monitor


@pytest.mark.parametrize(("precision", "accumulate"), [("32-true", 1), ("bf16-mixed", 1), ("bf16-mixed", 3)])
@pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")
def test_training_is_the_same_to_the_last_bit(precision, accumulate):
    plain, _ = train(20, accumulate, monitored=False, precision=precision)
    for every in (1, 3):
        watched, monitor = train(20, accumulate, precision=precision, every_n_steps=every)
        assert watched == plain
        assert monitor.latest.step == (19 if every == 1 else 18)


def test_figures_are_those_of_the_bare_model_and_of_the_first_micro_batch():
    batches, model = token_batches(6), tiny_gpt2()
    with watch(model, 1, strict=True, **EVERYTHING) as bare:
        model(**batches[0]).loss.backward()
        bare.step()
    _, monitor = train(1, 3, model=tiny_gpt2(), **EVERYTHING)
    assert monitor.latest == bare.latest
    assert monitor.latest.layers == {0: "transformer.h.0.attn", 1: "transformer.h.1.attn"}


def test_half_precision_is_measured_in_float32():
    _, plain = train(1, model=tiny_gpt2(), **EVERYTHING)
    _, half = train(1, model=tiny_gpt2(), precision="bf16-mixed", **EVERYTHING)
    for layer, heads in plain.latest.values["entropy"].items():
        assert half.latest.values["entropy"][layer] == pytest.approx(heads, rel=1e-2)
        assert half.latest.values["entropy"][layer] != heads


def test_fabrics_own_logger_is_written_to(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    train(3, loggers=logger)
    logger.finalize("success")
    (file,) = list((tmp_path / "lightning_logs" / "version_0").iterdir())
    events = EventAccumulator(str(file), size_guidance={"tensors": 0})
    events.Reload()
    assert [event.step for event in events.Tensors("attnmon/attn/entropy")] == [0, 1, 2]
    assert [event.step for event in events.Scalars("attn/entropy/layer_00")] == [0, 1, 2]
