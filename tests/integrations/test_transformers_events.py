"""What becomes of alerts under transformers.Trainer: the state of training beside them, actions, the history."""

import copy
import json
import math
import pickle

import pytest
import torch
from torch.utils.data import SequentialSampler
from toys import digest, random_states, tiny_gpt2, token_batches
from transformers import Trainer, TrainingArguments

from attnmon import AttentionSaturationWarning, watch
from attnmon.alerts import AlertRules, AttentionAlertError, EntropyRise, ScoreGrowth
from attnmon.integrations.transformers import AttentionMonitorCallback

OFF = {rule.name: None for rule in AlertRules().active()}
RULES = AlertRules(**OFF | {"score_growth": ScoreGrowth(spread=1e-3, leave_spread=1e-4, slackening=math.inf)})
LOOK = {"rules": RULES, "patience": 1, "strict": True, "actions": {"warn": "log"}}
ALTERNATING = [(0, False), (1, True), (2, False), (3, True)]


class InOrder(Trainer):
    """Takes its sequences as they come."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def make(tmp_path, *callbacks, model=None, repeat=1, **arguments) -> Trainer:
    """Every other step has scores without a spread: an alert at one, the recovery at the next."""
    if model is None:
        model = tiny_gpt2()
        model.transformer.wpe.weight.requires_grad_(False).zero_()  # equal tokens get equal scores
    rows = []
    for number, batch in enumerate(token_batches(4, batch=2, length=24)):
        ids = torch.full_like(batch["input_ids"], 5) if number % 2 else batch["input_ids"]
        rows += [{"input_ids": row, "labels": row} for row in ids] * repeat
    defaults = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_grad_norm": 0.1}
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    quiet |= {"output_dir": str(tmp_path / "out"), "dataloader_pin_memory": False}
    arguments = TrainingArguments(**defaults | quiet | arguments)
    return InOrder(model, arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=list(callbacks))


def steps(alerts):
    return [(alert.step, alert.ended) for alert in alerts]


def plain(alerts):
    return [alert.plain() for alert in alerts]  # in which NaN equals NaN


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("key", ["loss", "learning_rate", "grad_norm"])
def test_the_state_of_training_is_as_the_trainer_logs_it(tmp_path, accumulate, key):
    monitor = AttentionMonitorCallback(1, **LOOK)
    trainer = make(tmp_path, monitor, repeat=accumulate, gradient_accumulation_steps=accumulate)
    trainer.train()
    assert steps(monitor.alerts) == ALTERNATING
    known = [getattr(alert, key) for alert in monitor.alerts]
    if (key, accumulate) == ("loss", 2):  # of which a batch has a part only
        assert known == [None] * 4
    else:
        assert known == pytest.approx(logged(trainer, key), rel=1e-4)
    assert monitor.latest.recoveries == monitor.alerts[-1:]


@pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")
@pytest.mark.parametrize("source", ["train", "probe"])
def test_training_keeps_its_bits(tmp_path, source):
    def bits(*callbacks):
        model = tiny_gpt2(dropout=0.1)
        trainer = make(tmp_path, *callbacks, model=model, repeat=2, gradient_accumulation_steps=2)
        trainer.train()
        own = [logged(trainer, key) for key in ("loss", "grad_norm", "learning_rate")]
        return own, digest(dict(model.state_dict())), random_states()

    options = {"source": source, "actions": None, "on_alert": print, "keep_batches": str(tmp_path / "kept")}
    monitor = AttentionMonitorCallback(1, **LOOK | options)
    assert bits(monitor) == bits()
    assert monitor.alerts


@pytest.mark.parametrize(("source", "accumulate"), [("train", 2), ("probe", 1), ("probe", 2)])
def test_stop_ends_the_run_after_the_step_and_on_from_its_checkpoint(tmp_path, source, accumulate):
    arguments = {"repeat": accumulate, "gradient_accumulation_steps": accumulate}
    monitor = AttentionMonitorCallback(1, source=source, **LOOK | {"actions": {"warn": "stop"}})
    trainer = make(tmp_path, monitor, save_strategy="steps", save_steps=1, **arguments)
    with pytest.warns(AttentionSaturationWarning, match="attention scores too large"):
        trainer.train()
    assert trainer.state.global_step == 1
    resumed = AttentionMonitorCallback(1, **LOOK)
    make(tmp_path, resumed, **arguments).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert steps(resumed.alerts) == ALTERNATING


def test_raise_comes_after_the_sample_is_logged(tmp_path):
    monitor = AttentionMonitorCallback(2, **LOOK | {"actions": {"warn": "raise"}})
    trainer = make(tmp_path, monitor)
    with pytest.raises(AttentionAlertError, match="attention scores too large") as caught:
        trainer.train()
    assert caught.value.alerts == monitor.alerts
    assert len(logged(trainer, "attn/entropy/layer_00")) == 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())


def test_a_batch_for_a_replay(tmp_path):
    monitor = AttentionMonitorCallback(1, **LOOK, keep_batches=str(tmp_path / "kept"))
    trainer = make(tmp_path, monitor)
    start = copy.deepcopy(trainer.model)
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step_000000.pt", "step_000002.pt"]
    kept = torch.load(tmp_path / "kept" / "step_000000.pt")
    assert kept["alerts"] == plain(monitor.alerts[:1])
    with watch(start, 1, **LOOK) as replay:
        start(**kept["batch"])
        replay.step()
    assert replay.alerts[0].evidence[0].figures == monitor.alerts[0].evidence[0].figures


def test_the_history_of_a_resumed_run_and_of_copies(tmp_path):
    def run(name, max_steps, resume=None):
        seen = []
        monitor = AttentionMonitorCallback(1, **LOOK, on_alert=seen.append)
        arguments = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        make(tmp_path / name, monitor, max_steps=max_steps, **arguments).train(resume_from_checkpoint=resume)
        assert plain(pickle.loads(pickle.dumps(monitor)).alerts) == plain(copy.deepcopy(monitor).alerts)
        assert plain(monitor.alerts)[-len(seen) :] == plain(seen)
        return plain(copy.deepcopy(monitor).alerts)

    unbroken, first = run("unbroken", 7), run("first", 3)
    checkpoint = tmp_path / "first" / "out" / "checkpoint-3"
    assert len(unbroken) == 7
    assert run("second", 7, str(checkpoint)) == unbroken
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["attnmon/attn"]["history"] == first == unbroken[:3]


def test_baselines_from_run_to_run(tmp_path):
    rules = AlertRules(**OFF | {"entropy_rise": EntropyRise(share=0.3, leave_share=0.1, min_rise=0.01, sigmas=0)})
    options, path = LOOK | {"rules": rules, "actions": {"watch": "raise"}}, str(tmp_path / "baselines.json")
    learns = AttentionMonitorCallback(1, **options)
    with pytest.raises(ValueError, match="Expected baselines to have been learned"):
        learns.save_baselines(path)
    make(tmp_path, learns, model=tiny_gpt2(initializer_range=0.5), max_steps=1).train()
    learns.save_baselines(path)
    make(tmp_path, AttentionMonitorCallback(1, **options), model=tiny_gpt2(), max_steps=1).train()
    with pytest.raises(AttentionAlertError, match="entropy rising in all 4 heads of the model"):
        make(tmp_path, AttentionMonitorCallback(1, **options, baselines=path), model=tiny_gpt2()).train()
