"""The callback of transformers.Trainer: what is logged where and when, and what is left behind."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from toys import VOCABULARY, NanoModel, digest, random_states, run_probe, tiny_gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments

from attnmon import AttentionSaturationWarning
from attnmon.alerts import AlertRules, ScoreGrowth
from attnmon.integrations.transformers import AttentionMonitorCallback

LENGTH = 80
EVERYTHING = {"rows": "all", "sequences": 99, "strict": True}


def sequences(count: int = 12, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences of random tokens as a data set holds them."""
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def make(tmp_path, *callbacks, model=None, eval_dataset=None, kind=Trainer, **arguments) -> Trainer:
    """A quiet Trainer on the CPU that writes nothing unless it is asked to."""
    defaults = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 7,
    }
    return kind(
        tiny_gpt2() if model is None else model,
        TrainingArguments(**(defaults | arguments)),
        train_dataset=sequences(),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )


def logged(trainer: Trainer, prefix: str = "attn/") -> list[tuple[int, dict[str, float]]]:
    """What was logged under the prefix, but for what depends on the clock."""
    return [
        (entry["step"], {k: v for k, v in entry.items() if k.startswith(prefix) and "/monitor/" not in k})
        for entry in trainer.state.log_history
        if any(key.startswith(prefix) for key in entry)
    ]


def events(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def assert_clean(trainer: Trainer) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert torch.overrides._len_torch_function_stack() == 0
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__name__ == "sdpa_attention_forward"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
    assert "compute_loss" not in vars(trainer)


class Bits(TrainerCallback):
    """Fingerprints of the gradients on the way."""

    def __init__(self) -> None:
        self.gradients: list[str] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(digest([p.grad for p in model.parameters()]))


class TestLogging:
    def test_through_the_trainers_log_at_the_step_of_the_parameters(self, tmp_path):
        seen = []

        class Listens(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                seen.append((state.global_step, dict(logs)))

        monitor = AttentionMonitorCallback(every_n_steps=2, strict=True)
        trainer = make(tmp_path, monitor, Listens(), max_steps=5)
        trainer.train()
        calls = [(step, logs) for step, logs in seen if "attn/entropy/layer_00" in logs]
        assert [step for step, _ in calls] == [0, 2, 4]
        assert [step for step, logs in seen if "loss" in logs] == [1, 2, 3, 4, 5]
        assert [step for step, _ in logged(trainer)] == [0, 2, 4]
        layer = monitor.latest.values["entropy"][1]
        assert calls[-1][1]["attn/entropy/layer_01"] == pytest.approx(sum(layer) / len(layer))
        assert monitor.latest.step == 4
        assert monitor.latest.layers == {0: "transformer.h.0.attn", 1: "transformer.h.1.attn"}

    def test_every_callback_gets_it_but_those_that_print(self, tmp_path, capsys):
        seen = []

        class Listens(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                seen.append(set(logs))

        trainer = make(tmp_path, AttentionMonitorCallback(1), Listens(), max_steps=1)
        before = trainer.callback_handler.callback_list
        trainer.train()
        assert any("attn/entropy/layer_00" in keys for keys in seen)
        printed = capsys.readouterr().out
        assert "loss" in printed
        assert "attn/" not in printed
        assert trainer.callback_handler.callback_list == before

    def test_tensorboard_gets_everything_in_its_own_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
        model = tiny_gpt2()
        with torch.no_grad():
            model.transformer.h[1].attn.c_attn.weight[:, :32] *= 1000  # scores past every limit
        monitor = AttentionMonitorCallback(1, per_head=True, strict=True)
        with pytest.warns(AttentionSaturationWarning):
            make(tmp_path, monitor, model=model, report_to="tensorboard", max_steps=2).train()
        assert len(list((tmp_path / "board").iterdir())) == 1
        found = events(tmp_path / "board")
        tags = found.Tags()
        assert [event.step for event in found.Scalars("train/attn/entropy/layer_01/head_01")] == [0, 1]
        assert [event.step for event in found.Tensors("attnmon/attn/entropy")] == [0, 1]
        assert found.Tensors("attnmon/attn/warnings")
        assert "train/attn/entropy/heads" in tags["images"]
        assert "train/attn/warnings/score_growth/text_summary" in tags["tensors"]
        layout = found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
        assert b"^train/attn/entropy/normalized/" in layout

    def test_bytes_are_counted(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
        make(tmp_path, AttentionMonitorCallback(1, layout=False), report_to="tensorboard", max_steps=2).train()
        (file,) = (tmp_path / "board").iterdir()
        counted = events(tmp_path / "board").Scalars("train/attn/monitor/bytes_written")[-1].value
        assert 0.5 < counted / file.stat().st_size < 1

    def test_two_monitors(self, tmp_path):
        monitors = [AttentionMonitorCallback(1, strict=True), AttentionMonitorCallback(2, prefix="second", strict=True)]
        trainer = make(tmp_path, *monitors, max_steps=3)
        trainer.train()
        assert [step for step, _ in logged(trainer)] == [0, 1, 2]
        assert [step for step, _ in logged(trainer, "second/")] == [0, 2]
        first, second = logged(trainer)[2][1], logged(trainer, "second/")[1][1]
        assert {key.partition("/")[2]: value for key, value in first.items()} == {
            key.partition("/")[2]: value for key, value in second.items()
        }
        assert_clean(trainer)


class TestWhatIsRead:
    @pytest.mark.parametrize("accumulate", [2, 3])
    def test_the_first_micro_batch_of_a_step(self, tmp_path, accumulate):
        seen = []

        class Sees(Trainer):
            def training_step(self, model, inputs, *args, **kwargs):
                if not len(seen) or len(seen[-1]) == accumulate:
                    seen.append([])
                seen[-1].append(inputs["input_ids"])
                return super().training_step(model, inputs, *args, **kwargs)

        model = tiny_gpt2()
        before = copy.deepcopy(model)
        monitor = AttentionMonitorCallback(1, **EVERYTHING)
        trainer = make(
            tmp_path, monitor, model=model, kind=Sees, max_steps=2, gradient_accumulation_steps=accumulate
        )  # fmt: skip
        trainer.train()
        assert [step for step, _ in logged(trainer)] == [0, 1]
        expected = run_probe(before, seen[0][0])["entropy"]
        assert logged(trainer)[0][1]["attn/entropy/layer_01"] == pytest.approx(sum(expected[1]) / 2, rel=1e-5)

    def test_evaluation_in_between_does_not_count(self, tmp_path):
        def run(**arguments):
            trainer = make(tmp_path, AttentionMonitorCallback(1, **EVERYTHING), max_steps=3, **arguments)
            trainer.train()
            return logged(trainer)

        plain = run()
        assert run(eval_strategy="steps", eval_steps=1, eval_on_start=True, eval_dataset=sequences(5, seed=3)) == plain

    def test_a_probe_is_the_first_evaluation_batch_or_one_of_the_users(self, tmp_path):
        held_out = sequences(5, seed=3)
        batch = {"input_ids": torch.stack([row["input_ids"] for row in held_out[:3]])}
        model = tiny_gpt2(dropout=0.3)
        expected = run_probe(copy.deepcopy(model).eval(), batch["input_ids"])["entropy"]
        seen = []
        for arguments, dataset in (({}, held_out), ({}, {"one": held_out}), ({"probe": batch}, None)):
            monitor = AttentionMonitorCallback(1, source="probe", **arguments, **EVERYTHING)
            trainer = make(tmp_path, monitor, model=copy.deepcopy(model), eval_dataset=dataset, max_steps=2)
            trainer.train()
            seen.append(logged(trainer))
            assert monitor.latest.source == "probe"
            assert len(trainer.accelerator.gradient_state.active_dataloader.dataset) == 12  # none but the training's
        assert seen[0] == seen[1] == seen[2]
        assert [step for step, _ in seen[0]] == [0, 1]
        assert seen[0][0][1]["attn/entropy/layer_00"] == pytest.approx(sum(expected[0]) / 2, rel=1e-5)

    def test_a_probe_without_evaluation_data(self, tmp_path):
        with pytest.raises(ValueError, match="Expected the Trainer to have an `eval_dataset` for source='probe'"):
            make(tmp_path, AttentionMonitorCallback(source="probe")).train()

    def test_gradient_checkpointing_counts_once(self, tmp_path):
        monitor = AttentionMonitorCallback(1, **EVERYTHING)
        make(tmp_path, monitor, max_steps=1, activation_checkpointing=True).train()
        assert monitor.latest.rows_used["entropy"][0] == [2 * LENGTH] * 2

    def test_bfloat16(self, tmp_path):
        plain, half = AttentionMonitorCallback(1, **EVERYTHING), AttentionMonitorCallback(1, **EVERYTHING)
        make(tmp_path, plain, max_steps=1).train()
        make(tmp_path, half, max_steps=1, bf16=True).train()
        for layer, heads in plain.latest.values["entropy_normalized"].items():
            assert half.latest.values["entropy_normalized"][layer] == pytest.approx(heads, rel=1e-2)
        assert half.latest.values != plain.latest.values

    @pytest.mark.filterwarnings("ignore", "error:attnmon")  # the compiler has its own to say
    @pytest.mark.parametrize("source", ["train", "probe"])
    def test_a_compiled_model_is_read_as_it_was_written(self, tmp_path, source):
        def run(**arguments):
            monitor = AttentionMonitorCallback(1, source=source, **EVERYTHING)
            trainer = make(tmp_path, monitor, eval_dataset=sequences(3, seed=3), max_steps=2, **arguments)
            trainer.train()
            return monitor.latest, trainer

        torch._dynamo.reset()
        plain, _ = run()
        compiled, trainer = run(torch_compile=True, torch_compile_backend="eager")
        assert compiled.rerun == (source == "train")
        assert compiled.layers == plain.layers
        for layer, heads in plain.values["entropy"].items():
            assert compiled.values["entropy"][layer] == pytest.approx(heads, rel=1e-5)
        assert_clean(trainer)

    @pytest.mark.filterwarnings("ignore", "error:attnmon")
    def test_a_compiled_function_around_the_model(self, tmp_path):
        class Compiled(Trainer):
            def compute_loss(self, model, inputs, *args, **kwargs):
                return torch.compile(lambda ids: model(input_ids=ids, labels=ids).loss, backend="eager")(
                    inputs["input_ids"]
                )

        torch._dynamo.reset()
        monitor = AttentionMonitorCallback(1, **EVERYTHING)
        make(tmp_path, monitor, kind=Compiled, max_steps=1).train()
        assert monitor.latest.rerun
        assert monitor.latest.rows_used["entropy"][0] == [2 * LENGTH] * 2


@pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")
class TestTheRunItself:
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"gradient_accumulation_steps": 2, "bf16": True},
            {"activation_checkpointing": True, "eval_strategy": "steps"},
        ],
        ids=["plain", "accumulated half", "checkpointed, evaluated"],
    )
    def test_training_is_the_same_to_the_last_bit(self, tmp_path, arguments):
        def run(*callbacks):
            seen = Bits()
            trainer = make(
                tmp_path, seen, *callbacks, model=tiny_gpt2(dropout=0.1), max_steps=20, eval_steps=7,
                eval_dataset=sequences(3, seed=3), **arguments,
            )  # fmt: skip
            trainer.train()
            losses = [
                {k: v for k, v in entry.items() if k in ("loss", "grad_norm", "eval_loss", "learning_rate")}
                for entry in trainer.state.log_history
            ]
            parameters = digest(dict(trainer.model.state_dict()))
            return [entry for entry in losses if entry], seen.gradients, parameters, random_states()

        plain = run()
        assert len(plain[1]) == 20
        assert run(AttentionMonitorCallback(1, strict=True)) == plain
        assert run(AttentionMonitorCallback(3, strict=True)) == plain
        assert run(AttentionMonitorCallback(3, source="probe", strict=True)) == plain

    @pytest.mark.parametrize("restore", [False, True])
    def test_a_resumed_run_goes_on_as_the_unbroken_one(self, tmp_path, restore):
        rules = AlertRules(score_growth=ScoreGrowth(spread=0.01, leave_spread=0.001, slackening=math.inf))

        def run(name, max_steps, resume=None):
            monitor = AttentionMonitorCallback(2, rows=8, rules=rules, strict=True)
            trainer = make(
                tmp_path / name, monitor, model=tiny_gpt2(dropout=0.1), max_steps=max_steps, save_strategy="steps",
                save_steps=3, lr_scheduler_type="constant", restore_callback_states_from_checkpoint=restore,
            )  # fmt: skip
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.train(resume_from_checkpoint=resume)
            told = [str(w.message) for w in caught if w.category is AttentionSaturationWarning]
            return monitor, trainer, told

        _, unbroken, told = run("unbroken", 8)
        assert told
        _, _, first = run("first", 3)
        monitor, resumed, later = run("second", 8, str(tmp_path / "first" / "out" / "checkpoint-3"))
        assert [step for step, _ in logged(unbroken)] == [0, 2, 4, 6]
        assert logged(resumed) == logged(unbroken)
        assert first + later == told  # what was said before is not said again
        assert monitor.latest.step == 6
        assert monitor in resumed.callback_handler.callbacks
        state = json.loads((tmp_path / "second" / "out" / "checkpoint-6" / "trainer_state.json").read_text())
        assert state["stateful_callbacks"]["attnmon/attn"]["order"] == ["transformer.h.0.attn", "transformer.h.1.attn"]

    def test_a_second_run_starts_anew(self, tmp_path):
        trainer = make(tmp_path, AttentionMonitorCallback(1, strict=True), max_steps=2)
        for _ in range(2):
            trainer.train()
            assert [step for step, _ in logged(trainer)] == [0, 1]

    def test_nothing_is_attached_outside_of_the_pass_that_is_read(self, tmp_path):
        looked = []

        class Look(TrainerCallback):
            def look(self, args, state, control, **kwargs):
                assert_clean(trainer)
                looked.append(state.global_step)

            on_substep_end = on_pre_optimizer_step = on_step_end = on_train_end = look

        monitor = AttentionMonitorCallback(2, strict=True)
        trainer = make(tmp_path, Look(), monitor, gradient_accumulation_steps=2)
        trainer.train()
        assert len(looked) == 4 * 3 + 1
        assert monitor.latest.step == 2

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["forward", "backward", "inputs"])
    def test_an_error_leaves_the_model_as_it_was(self, tmp_path, error, where):
        class Fails(Trainer):
            def compute_loss(self, model, inputs, *args, **kwargs):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
                if where == "forward":
                    raise error("stop")
                loss.register_hook(self.stop)
                return loss

            def stop(self, gradient):
                raise error("stop")

            def _prepare_inputs(self, inputs):
                if where == "inputs":
                    raise error("stop")
                return super()._prepare_inputs(inputs)

        monitor = AttentionMonitorCallback(1)
        trainer = make(tmp_path, monitor, kind=Fails)
        with pytest.raises(error, match="stop"):
            trainer.train()
        if where != "inputs":  # there the Trainer waits for the call that never came
            assert_clean(trainer)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
        assert torch.overrides._len_torch_function_stack() == 0
        assert monitor.latest is None
        trainer.__class__ = Trainer
        trainer.train()
        assert [step for step, _ in logged(trainer)] == [0, 1, 2, 3]
        assert_clean(trainer)

    def test_pickle_and_deepcopy(self, tmp_path):
        monitor = AttentionMonitorCallback(2, top_n=(1, 5))
        pickle.loads(pickle.dumps(monitor))
        make(tmp_path, monitor, max_steps=3).train()
        for other in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
            assert other.latest.values == monitor.latest.values
            make(tmp_path, other, max_steps=1).train()
            assert other.latest.step == 0


class Averages(Trainer):
    """Keeps a metric of its own, which it adds to what is logged and then begins anew."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gathered = []

    def compute_loss(self, *args, **kwargs):
        self.gathered.append(float(self.state.global_step))
        return super().compute_loss(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        super().log({**logs, "mine": sum(self.gathered)}, *args, **kwargs)
        self.gathered.clear()


class Asks(TrainerCallback):
    """Asks for a log at some steps."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        control.should_log |= state.global_step in (1, 2)


class Evaluates(TrainerCallback):
    """Evaluates when a step begins, before the step's own batch is seen."""

    trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.evaluate()


class TestWhatTheRunLogs:
    """With and without the monitor the run logs the same of its own."""

    @staticmethod
    def own(tmp_path, *callbacks, **options):
        trainer = make(tmp_path, *callbacks, **options)
        trainer.train()
        return [
            {key: row[key] for key in ("step", "loss", "mine") if key in row}
            for row in trainer.state.log_history
            if "loss" in row
        ]

    def test_metrics_that_a_trainer_gathers_between_logs(self, tmp_path):
        options = {"kind": Averages, "logging_steps": 2}
        without = self.own(tmp_path, **options)
        assert [row["mine"] for row in without] == [1.0, 5.0]
        assert self.own(tmp_path, AttentionMonitorCallback(1, strict=True), **options) == without

    def test_a_log_that_another_callback_asked_for(self, tmp_path):
        without = self.own(tmp_path, Asks(), logging_strategy="no")
        assert [row["step"] for row in without] == [2, 3]
        monitor = AttentionMonitorCallback(1, strict=True)
        assert self.own(tmp_path, Asks(), monitor, logging_strategy="no") == without


class TestWhichCallIsRead:
    def test_not_an_evaluation_that_comes_before_the_batch(self, tmp_path):
        def run(*more):
            monitor = AttentionMonitorCallback(2, **EVERYTHING)
            trainer = make(tmp_path, monitor, *more, eval_dataset=sequences(3, seed=1))
            for callback in more:
                callback.trainer = trainer
            trainer.train()
            return logged(trainer)

        assert run(Evaluates()) == run()

    def test_not_that_of_another_model(self, tmp_path):
        class Distils(Trainer):
            teacher = tiny_gpt2()

            def training_step(self, model, inputs, *args, **kwargs):
                self.compute_loss(self.teacher, {name: value[:1] for name, value in inputs.items()})
                return super().training_step(model, inputs, *args, **kwargs)

        ours, theirs = (make(tmp_path, AttentionMonitorCallback(1, **EVERYTHING), kind=k) for k in (Distils, Trainer))
        ours.train()
        theirs.train()
        assert logged(ours) == logged(theirs)
        assert_clean(ours)

    def test_an_error_before_the_batch_leaves_nothing_that_reads_later(self, tmp_path):
        class Fails(Trainer):
            fails = True

            def training_step(self, *args, **kwargs):
                if self.fails and self.state.global_step == 2:
                    raise KeyboardInterrupt
                return super().training_step(*args, **kwargs)

        def monitors():
            options = {"rows": 8, "sequences": 1, "strict": True}
            return AttentionMonitorCallback(1, **options), AttentionMonitorCallback(2, prefix="b", **options)

        broken, whole = make(tmp_path, *monitors(), kind=Fails), make(tmp_path, *monitors())
        start = copy.deepcopy(broken.model.state_dict())
        with pytest.raises(KeyboardInterrupt):
            broken.train()
        broken.evaluate(sequences(3))
        assert not any(c._monitor.is_open for c in broken.callback_handler.callbacks if hasattr(c, "_monitor"))
        broken.model.load_state_dict(start)
        broken.fails, broken.optimizer, broken.lr_scheduler = False, None, None
        torch.manual_seed(7)
        broken.train()
        whole.train()
        assert logged(broken) == logged(whole)
        assert logged(broken, "b/") == logged(whole, "b/")

    def test_a_step_that_passes_by_compute_loss_is_named(self, tmp_path):
        class Direct(Trainer):
            def training_step(self, model, inputs, *args, **kwargs):
                loss = model(**self._prepare_inputs(inputs)).loss
                self.accelerator.backward(loss)
                return loss.detach()

        monitor = AttentionMonitorCallback(1)
        with pytest.warns(UserWarning, match="attnmon measured nothing in a sampled step"):
            make(tmp_path, monitor, kind=Direct, max_steps=1).train()

    def test_a_callback_that_is_added_in_mid_training(self, tmp_path):
        late = AttentionMonitorCallback(1, strict=True)

        class Adds(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    self.trainer.add_callback(late)

        adds = Adds()
        adds.trainer = make(tmp_path, adds)
        adds.trainer.train()
        assert [step for step, _ in logged(adds.trainer)] == [2, 3]


class TestTrouble:
    def test_a_callback_that_fails_does_not_keep_the_others_from_it(self, tmp_path):
        seen = []

        class Broken(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                if "attn/entropy/layer_00" in logs:
                    raise OSError("disk full")

        class Listens(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                seen.extend([state.global_step] * ("attn/entropy/layer_00" in logs))

        with pytest.warns(UserWarning, match="could not write to callback Broken"):
            make(tmp_path, Broken(), Listens(), AttentionMonitorCallback(1)).train()
        assert seen == [0, 1, 2, 3]

    def test_two_of_one_prefix(self, tmp_path):
        with pytest.raises(ValueError, match="two have 'attn'"):
            make(tmp_path, AttentionMonitorCallback(1), AttentionMonitorCallback(2)).train()

    @pytest.mark.parametrize("prefix", ["eval_attn", "test_attn"])
    def test_a_prefix_that_loggers_take_for_evaluation(self, prefix):
        with pytest.raises(ValueError, match="not to begin with 'eval_' or 'test_'"):
            AttentionMonitorCallback(1, prefix=prefix)

    def test_an_error_of_the_monitor_costs_a_warning(self, tmp_path, monkeypatch):
        def run(*callbacks):
            trainer = make(tmp_path, *callbacks, model=tiny_gpt2(dropout=0.1))
            trainer.train()
            return digest(dict(trainer.model.state_dict()))

        plain = run()
        monkeypatch.setattr("attnmon.window.Window._add", lambda *_: 1 / 0)
        with pytest.warns(UserWarning, match="(?s)switched off.*Traceback.*ZeroDivisionError") as caught:
            assert run(AttentionMonitorCallback(1)) == plain
        assert sum("attnmon" in str(w.message) for w in caught) == 1
        with pytest.raises(ZeroDivisionError):
            run(AttentionMonitorCallback(1, strict=True))

    def test_a_failing_log_costs_a_warning(self, tmp_path):
        class Full(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                if "attn/entropy/layer_00" in logs:
                    raise OSError("No space left on device")

        monitor = AttentionMonitorCallback(1)
        with pytest.warns(UserWarning, match="(?s)could not write to callback Full.*No space left") as caught:
            make(tmp_path, monitor, Full(), max_steps=3).train()
        assert sum("attnmon" in str(w.message) for w in caught) == 1
        assert monitor.latest.step == 2

    def test_no_attention(self, tmp_path):
        class Linear(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(1, 1)

            def forward(self, input_ids, labels=None):
                return {"loss": self.layer(input_ids.float()[..., None]).mean()}

        with pytest.raises(ValueError, match="Expected `model` to contain attention"):
            make(tmp_path, AttentionMonitorCallback(), model=Linear()).train()

    def test_a_model_of_ones_own(self, tmp_path):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = NanoModel()

            def forward(self, input_ids, labels=None):
                return {"loss": nn.functional.cross_entropy(self.net(input_ids).flatten(0, 1), labels.flatten())}

        monitor = AttentionMonitorCallback(1, **EVERYTHING)
        make(tmp_path, monitor, model=Own(), max_steps=1).train()
        assert monitor.latest.layers == {0: "net.blocks.0", 1: "net.blocks.1"}

    def test_outside_of_a_trainer(self):
        with pytest.raises(RuntimeError, match="Expected AttentionMonitorCallback to be called by the transformers"):
            AttentionMonitorCallback().on_train_begin(None, None, None)

    @pytest.mark.parametrize(("argument", "value"), [("prefix", "a/"), ("every_n_steps", 0), ("top_n", ())])
    def test_wrong_arguments_fail_in_the_constructor(self, argument, value):
        with pytest.raises(ValueError, match=f"Expected `{argument}`"):
            AttentionMonitorCallback(**{argument: value})

    def test_wrong_flags_fail_in_the_constructor(self):
        with pytest.raises(TypeError, match="Expected `images` to be True or False"):
            AttentionMonitorCallback(images=1)


@pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")
class TestReportTo:
    """The Trainer's own callbacks, with the real libraries, offline."""

    def test_wandb(self, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb")
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WANDB_LOG_MODEL", "false")
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)  # the library's own
            wandb.teardown()  # what it remembers of the environment is older than this test
            monitor = AttentionMonitorCallback(2, strict=True)
            make(tmp_path, monitor, report_to="wandb", max_steps=3).train()
            summary = dict(wandb.run.summary)
            wandb.finish()
        expected = monitor.latest.scalars()["attn/entropy/layer_01"]
        assert summary["train/attn/entropy/layer_01"] == pytest.approx(expected)

    @pytest.mark.parametrize("uri", ["sqlite:///{}/mlflow.db", "file:{}/mlruns"], ids=["database", "files"])
    def test_mlflow(self, tmp_path, monkeypatch, uri):
        mlflow = pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(tmp_path))
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's own
            mlflow.set_tracking_uri(uri.format(tmp_path))
            monitor = AttentionMonitorCallback(2, per_head=True, strict=True)
            make(tmp_path, monitor, report_to="mlflow", max_steps=3).train()
            run = mlflow.last_active_run()
            key = "attn/entropy/layer_01_head_01"
            (first, second) = mlflow.MlflowClient().get_metric_history(run.info.run_id, key)
        assert (first.step, second.step) == (0, 2)
        assert second.value == pytest.approx(monitor.latest.values["entropy"][1][1])
