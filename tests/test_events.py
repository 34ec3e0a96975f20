"""What becomes of alerts: the state of training beside them, the history, kept batches, actions, baselines."""

import copy
import dataclasses
import json
import math
import pickle
import warnings
from contextlib import nullcontext
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.utils import clip_grad_norm_
from toys import (
    Bits,
    LanguageModule,
    MemoryLogger,
    bits_of,
    digest,
    loader,
    seed_all,
    tiny_gpt2,
    token_batches,
    trainer,
)

from attnmon import AttentionMonitor, AttentionSaturationWarning, watch
from attnmon.alerts import AlertRules, AttentionAlertError, EntropyRise, ScoreGrowth

OFF = {rule.name: None for rule in AlertRules().active()}
GROWTH = ScoreGrowth(spread=1e-3, leave_spread=1e-4, slackening=math.inf)
RULES = AlertRules(**OFF | {"score_growth": GROWTH})
LOOK = {"rules": RULES, "patience": 1, "strict": True, "actions": {"warn": "log"}}
RAISE = LOOK | {"actions": {"warn": "raise"}}
EPOCH = {"max_steps": -1, "max_epochs": 1}
TWO = {"accumulate_grad_batches": 2}
ALTERNATING = [(0, False), (1, True), (2, False), (3, True)]


def model():
    """A GPT-2 that knows no positions: where all tokens are the same, its scores have no spread."""
    net = tiny_gpt2()
    net.transformer.wpe.weight.requires_grad_(False).zero_()
    return net


def batches(count, *, calm_first=False, repeat=1):
    """Batches of which every other has a spread: an alert at one, the recovery at the next."""
    made = token_batches(count, batch=2, length=24)
    for batch in made[not calm_first :: 2]:
        batch["input_ids"] = torch.full_like(batch["input_ids"], 5)
    return [dict(batch) for batch in made for _ in range(repeat)]


class Module(LanguageModule):
    """Its rate changes with each step; keeps the rates, and what clip_grad_norm_ returned."""

    ends = ""  # "error": in the second batch, "stop": with the first

    def __init__(self, net=None):
        super().__init__(model() if net is None else net)
        self.norms, self.rates = [], []

    def training_step(self, batch, batch_idx):
        if self.ends == "error" and self.losses:
            raise RuntimeError("stop")
        self.trainer.should_stop |= self.ends == "stop"
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.norms.append(float(clip_grad_norm_(self.parameters(), 0.1)))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def validation_step(self, batch, batch_idx):
        self(**batch)


class Manual(Module):
    """Two optimizers, stepped by hand at each batch or every so many."""

    automatic_optimization = False
    every = 1

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            self.norms.append(float(clip_grad_norm_(self.parameters(), math.inf)))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return {"loss": loss.detach()}

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained[:5], lr=0.1), torch.optim.SGD(trained[5:], lr=0.2)


class Run:
    """A run under Lightning, its monitor and what two loggers got."""

    def __init__(self, tmp_path, module=None, *callbacks, data=None, fit=None, **options):
        self.module = Module() if module is None else module
        self.loggers = [MemoryLogger(), MemoryLogger()]
        self.monitor = AttentionMonitor(1, **LOOK | options)
        self.data = batches(8) if data is None else data
        arguments = {"max_steps": 4, "logger": self.loggers} | (fit or {})
        self.trainer = trainer(tmp_path, self.monitor, *callbacks, **arguments)

    def fit(self, **arguments):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from|The dirpath has changed|Be aware that when using")
            self.trainer.fit(self.module, loader(self.data), loader(token_batches(1)), **arguments)
        return self

    def __getattr__(self, name):
        return getattr(self.monitor, name)  # alerts, latest

    @property
    def logged(self):
        first, second = ([step for step, _ in logger.of("attn/")] for logger in self.loggers)
        assert first == second
        return first

    @property
    def losses(self):
        return [metrics["loss"] for _, metrics in self.loggers[0].of("loss")]


def steps(alerts):
    return [(alert.step, alert.ended) for alert in alerts]


def plain(alerts):
    return [alert.plain() for alert in alerts]  # in which NaN equals NaN


class TestTheStateOfTraining:
    def test_loss_and_gradient_norm_before_clipping(self, tmp_path):
        run = Run(tmp_path).fit()
        assert steps(run.alerts) == ALTERNATING
        assert [alert.loss for alert in run.alerts] == run.module.losses == run.losses
        assert [alert.grad_norm for alert in run.alerts] == pytest.approx(run.module.norms)
        assert min(run.module.norms) > 0.1  # to which they are clipped
        assert f"Training: loss {run.losses[0]:.2f}, gradient norm" in run.alerts[0].message
        assert run.latest.recoveries == run.alerts[-1:]

    def test_accumulated_gradients_and_a_schedule(self, tmp_path):
        run = Run(tmp_path, data=batches(4, repeat=2), fit=TWO).fit()
        assert steps(run.alerts) == ALTERNATING
        assert [alert.loss for alert in run.alerts] == pytest.approx(run.losses)
        assert [alert.grad_norm for alert in run.alerts] == pytest.approx(run.module.norms)
        assert [alert.learning_rate for alert in run.alerts] == run.module.rates

    @pytest.mark.parametrize("module", [Module, Manual])
    def test_a_probe_gets_what_its_step_comes_to(self, tmp_path, module):
        run = Run(tmp_path, module(), source="probe", fit=EPOCH).fit()
        assert steps(run.alerts) == [(0, False)]
        assert run.alerts[0].loss == run.module.losses[0]
        assert run.logged == list(range(8))

    def test_manual_optimization_with_two_optimizers(self, tmp_path):
        run = Run(tmp_path, Manual(), fit=EPOCH, data=batches(4)).fit()
        assert steps(run.alerts) == ALTERNATING
        assert [alert.loss for alert in run.alerts] == run.module.losses
        assert {alert.learning_rate for alert in run.alerts} == {0.2}
        assert [alert.grad_norm for alert in run.alerts] == pytest.approx(run.module.norms)

    def test_no_norm_of_another_step(self, tmp_path):
        module = Manual()
        module.every = 2
        calm, spread = batches(2, calm_first=True)
        run = Run(tmp_path, module, data=[calm, calm, spread], fit=EPOCH).fit()
        assert [(alert.step, alert.grad_norm) for alert in run.alerts] == [(2, None)]

    def test_a_validation_in_the_middle_of_a_step_changes_nothing(self, tmp_path):
        without = Run(tmp_path, fit=TWO | {"max_steps": 2}).fit()
        run = Run(tmp_path, fit=TWO | {"max_steps": 2, "val_check_interval": 1}, validation_batches=1).fit()
        assert plain(run.alerts) == plain(without.alerts)
        assert [step for step, _ in run.loggers[0].of("attn_val/")] == [0, 0, 1, 1]

    @pytest.mark.parametrize(("ends", "source"), [("error", "train"), ("error", "probe"), ("stop", "train")])
    def test_a_step_that_is_not_finished_loses_nothing(self, tmp_path, ends, source):
        run = Run(tmp_path, source=source, fit=TWO)
        run.module.ends = ends
        with pytest.raises(RuntimeError, match="stop") if ends == "error" else nullcontext():
            run.fit()
        assert (steps(run.alerts), run.logged, run.trainer.global_step) == ([(0, False)], [0], 0)
        assert run.latest.alerts == run.alerts

    def test_nor_the_batch_nor_the_call(self, tmp_path):
        seen, kept = [], tmp_path / "kept"
        run = Run(tmp_path, keep_batches=str(kept), on_alert=seen.append, fit=TWO)
        run.module.ends = "error"
        with pytest.raises(RuntimeError, match="stop"):
            run.fit()
        assert (tuple(seen), len(list(kept.iterdir()))) == (run.alerts, 1)

    def test_rates_that_are_no_number_do_no_harm(self):
        with watch(model(), 1, **LOOK) as monitor:
            for batch, rate in zip(batches(2), (torch.tensor(0.25), [0.25]), strict=True):
                monitor._model(**batch)
                monitor.step(learning_rate=rate)
        assert [bool(alert.message) for alert in monitor.alerts] == [True, True]
        json.dumps(monitor.state_dict())


@pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")
class TestTheRunItself:
    OPTIONS = LOOK | {"actions": None, "on_alert": print}
    SETUPS = {  # noqa: RUF012
        "accumulated": (Module, TWO | {"val_check_interval": 3}, {"validation_batches": 1}),
        "probe": (Module, {}, {"source": "probe"}),
        "manual": (Manual, EPOCH, {}),
    }

    @pytest.mark.parametrize("setup", SETUPS)
    def test_keeps_its_bits(self, tmp_path, setup):
        module, fit, options = self.SETUPS[setup]

        def bits(*monitors):
            seed_all()
            seen, made = Bits(), module(tiny_gpt2(dropout=0.1))
            fitter = trainer(tmp_path, seen, *monitors, **{"max_steps": 4} | fit)
            fitter.fit(made, loader(batches(8)), loader(token_batches(1)))
            return bits_of(seen, made, fitter.optimizers) | {"logged": made.losses}

        monitor = AttentionMonitor(1, **self.OPTIONS | options, keep_batches=str(tmp_path / "kept"))
        assert bits(monitor) == bits()
        assert monitor.alerts

    def test_a_plain_loop(self, tmp_path):
        def loop(**options):
            seed_all()
            net, known = model(), []
            optimizer = torch.optim.AdamW(net.parameters())
            with watch(net, 1, **options) as monitor:
                for step, batch in enumerate(batches(4)):
                    loss = net(**batch).loss
                    loss.backward()
                    norm = clip_grad_norm_(net.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                    monitor.step(loss=loss, grad_norm=norm, learning_rate=1e-3, batch=batch)
                    known.append((step, loss.item(), norm.item(), 1e-3))
            return monitor, known, digest(dict(net.state_dict())), digest(torch.get_rng_state())

        monitor, known, *bits = loop(**self.OPTIONS, keep_batches=str(tmp_path / "kept"))
        assert [(a.step, a.loss, a.grad_norm, a.learning_rate) for a in monitor.alerts] == known
        assert monitor.latest.recoveries == monitor.alerts[-1:]
        assert [known, *bits] == list(loop(alerts=False)[1:])


class TestActions:
    def test_stop_and_raise_and_on_from_a_checkpoint(self, tmp_path):
        def run(name, action):
            keep = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            fit = {"enable_checkpointing": True, "max_epochs": -1}
            return Run(tmp_path, None, keep, fit=fit, data=batches(2, calm_first=True), actions={"warn": action})

        unbroken = run("unbroken", "log").fit()
        assert steps(unbroken.alerts) == [(1, False), (2, True), (3, False)]

        stopped = run("stop", "stop")
        with pytest.warns(AttentionSaturationWarning, match="attention scores too large"):
            stopped.fit()
        assert (stopped.trainer.global_step, stopped.logged) == (2, [0, 1])
        last = tmp_path / "stop" / "step=2.ckpt"
        assert digest(torch.load(last)["state_dict"]) == digest(dict(stopped.module.state_dict()))
        resumed = run("resumed", "log").fit(ckpt_path=last)
        assert (plain(resumed.alerts), resumed.logged) == (plain(unbroken.alerts), [2, 3])

        broken = run("raise", "raise")
        with pytest.raises(AttentionAlertError, match="attention scores too large") as caught:
            broken.fit()
        assert caught.value.alerts == broken.alerts
        assert (broken.alerts[0].loss, broken.logged) == (broken.module.losses[1], [0, 1])
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in broken.module.modules())

    def loop(self, action, until, state=None):
        """A plain loop that ends at an error if there is more to come; logged steps, the error's alerts, monitor."""
        net, logger, errors = model(), MemoryLogger(), []
        with watch(net, 1, **LOOK | {"actions": {"warn": action}}, writer=logger) as monitor:
            if state is not None:
                monitor.load_state_dict(state)
            for batch in batches(6, calm_first=True)[monitor.step_count : until]:
                net(**batch)
                try:
                    monitor.step(loss=1.0)
                except AttentionAlertError as error:
                    errors += error.alerts
                    if until < 6:
                        break
        return [step for step, _ in logger.calls], errors, monitor

    def test_a_plain_loop_stops_raises_and_resumes(self):
        logged, _, unbroken = self.loop("log", 6)
        with pytest.warns(AttentionSaturationWarning):
            assert [self.loop("stop", until)[2].should_stop for until in (1, 2, 6)] == [False, True, True]
        before, errors, broken = self.loop("raise", 5)
        assert (before, steps(errors)) == ([0, 1], [(1, False)])
        after, _, resumed = self.loop("log", 6, json.loads(json.dumps(broken.state_dict())))
        assert before + after == logged
        assert plain(resumed.alerts) == plain(unbroken.alerts)

    def test_a_plain_loop_goes_on_after_an_error(self):
        assert self.loop("raise", 6)[0] == [0, 1, 2, 3, 4, 5]
        monitor = watch(model(), 1, source="probe", probe=batches(1)[0], **RAISE)
        with pytest.raises(AttentionAlertError):
            monitor.__enter__()
        with monitor:  # the alarm is known now
            assert steps(monitor.alerts) == [(0, False)]

    def test_one_warning_for_each_alert_and_a_call_for_each_event(self, tmp_path):
        seen = []
        with pytest.warns(AttentionSaturationWarning) as caught:
            run = Run(tmp_path, actions=None, on_alert=seen.append).fit()
        told = [str(w.message) for w in caught if w.category is AttentionSaturationWarning]
        assert told == [alert.message for alert in run.alerts if not alert.ended]
        assert tuple(seen) == run.alerts
        assert steps(seen) == ALTERNATING

    def test_none_for_what_is_only_worth_a_look(self, tmp_path):
        rules = AlertRules(**OFF | {"score_growth": dataclasses.replace(GROWTH, severity="watch")})
        run = Run(tmp_path, actions=None, rules=rules, keep_batches=str(tmp_path / "kept")).fit()
        assert steps(run.alerts) == ALTERNATING
        assert not (tmp_path / "kept").exists()

    def test_a_warning_made_an_error_stops_the_run(self, tmp_path):
        run = Run(tmp_path, actions=None)
        with pytest.raises(AttentionSaturationWarning, match="attention scores too large"):
            run.fit()  # warnings are errors in these tests
        assert (run.alerts[0].loss, run.logged) == (run.module.losses[0], [0])

    @pytest.mark.parametrize("what", ["on_alert", "keep_batches"])
    def test_what_fails_there_costs_one_warning(self, tmp_path, what):
        (tmp_path / "file").write_text("")
        option = {what: (lambda _: 1 / 0) if what == "on_alert" else str(tmp_path / "file" / "kept")}
        run = Run(tmp_path, **option, strict=False)
        with pytest.warns(UserWarning, match=f"(?s)attnmon could not write to {what}.*Error") as caught:
            run.fit()
        assert sum("attnmon" in str(w.message) for w in caught) == 1
        assert (steps(run.alerts), run.logged) == (ALTERNATING, [0, 1, 2, 3])
        with pytest.raises((ZeroDivisionError, OSError)):
            Run(tmp_path, **option).fit()

    def test_from_yaml_and_back(self):
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--callback", type=pl.Callback)
        options = {"actions": {"watch": "warn"}, "on_alert": "builtins.repr", "keep_batches": "kept"}
        text = json.dumps({"callback": {"class_path": "attnmon.AttentionMonitor", "init_args": options}})
        config = parser.parse_string(text)  # JSON is YAML
        again = parser.parse_string(parser.dump(config, skip_unset=False))
        for made in (parser.instantiate(config).callback, parser.instantiate(again).callback):
            assert made._options.action_of() == {"watch": "warn", "warn": "warn", "critical": "warn"}
            assert (made._options.on_alert, made._options.keep_batches) == (repr, "kept")


class TestKeptBatches:
    def test_can_be_replayed(self, tmp_path):
        module = Module()
        start = copy.deepcopy(module.model)
        run = Run(tmp_path, module, keep_batches=str(tmp_path / "kept")).fit()
        assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step_000000.pt", "step_000002.pt"]
        kept = torch.load(tmp_path / "kept" / "step_000000.pt")
        assert (kept["step"], kept["alerts"]) == (0, plain(run.alerts[:1]))
        with watch(start, 1, **LOOK) as replay:
            replay.step(loss=start(**kept["batch"]).loss)
        assert replay.alerts[0].loss == run.alerts[0].loss
        assert replay.alerts[0].evidence[0].figures == run.alerts[0].evidence[0].figures

    def test_without_what_lies_beside_them_in_memory(self, tmp_path):
        net, tokens = model(), torch.randint(61, (2, 100_000))
        with watch(net, 1, **LOOK, keep_batches=str(tmp_path / "kept")) as monitor:
            net(tokens[:, :24])
            monitor.step(batch=tokens[:, :24])
        (file,) = (tmp_path / "kept").iterdir()
        assert torch.equal(torch.load(file)["batch"], tokens[:, :24])
        assert file.stat().st_size < 50_000

    def test_as_they_came(self, tmp_path):
        class Takes(Module):
            def training_step(self, batch, batch_idx):
                return self.model(labels=batch.pop("labels"), **batch).loss

        Run(tmp_path, Takes(), keep_batches=str(tmp_path / "kept"), fit={"max_steps": 1}).fit()
        assert set(torch.load(tmp_path / "kept" / "step_000000.pt")["batch"]) == {"input_ids", "labels"}

    def test_two_monitors_and_a_second_run_leave_each_others_files_alone(self, tmp_path):
        batch = batches(1)[0]
        for expected in (
            {"step_000000.pt", "step_000000_2.pt"},
            {f"step_000000{n}.pt" for n in ("", "_2", "_3", "_4")},
        ):
            net = model()
            with (
                watch(net, 1, **LOOK, keep_batches=str(tmp_path)) as one,
                watch(net, 1, **LOOK, keep_batches=str(tmp_path)) as other,
            ):
                net(**batch)
                for monitor in (one, other):
                    monitor.step(batch=batch)
            assert {path.name for path in tmp_path.iterdir()} == expected

    def test_of_any_kind_that_a_loader_gives(self, tmp_path):
        @dataclasses.dataclass
        class Item:
            ids: torch.Tensor
            weight: np.ndarray

        class Pair(NamedTuple):
            item: Item
            name: str

        net, ids = model(), batches(1)[0]["input_ids"]
        batch = [Pair(Item(ids, np.array([1.5, 2.5])), "first"), {"count": np.int64(3), "words": np.array(["a", "b"])}]
        with watch(net, 1, **LOOK, keep_batches=str(tmp_path)) as monitor:
            net(ids)
            monitor.step(batch=batch)
        first, second = torch.load(tmp_path / "step_000000.pt")["batch"]  # which trusts no file
        assert torch.equal(first["item"]["ids"], ids)
        assert first["item"]["weight"].tolist() == [1.5, 2.5]
        assert (first["name"], second) == ("first", {"count": 3, "words": ["a", "b"]})

    def test_a_loop_that_passes_none_is_told_so_once(self, tmp_path):
        net, batch = model(), batches(1)[0]
        with (
            pytest.warns(UserWarning, match=r"keeps no batch in .*monitor\.step\(batch=batch\)") as caught,
            watch(net, 1, **LOOK, keep_batches=str(tmp_path)) as monitor,
        ):
            for _ in range(3):
                net(**batch)
                monitor.step()
        assert len(caught) == 1

    def test_a_probe_is_what_was_looked_at(self, tmp_path):
        net, batch = model(), batches(1)[0]
        with watch(net, 1, source="probe", probe=batch, **LOOK, keep_batches=str(tmp_path)) as monitor:
            monitor.step()
        assert torch.equal(torch.load(tmp_path / "step_000000.pt")["batch"]["input_ids"], batch["input_ids"])

    def test_a_sample_is_written_before_its_batch(self, tmp_path):
        net, batch, logger = model(), batches(1)[0], MemoryLogger()
        (tmp_path / "file").write_text("")
        with watch(net, 1, **LOOK, keep_batches=str(tmp_path / "file" / "kept"), writer=logger) as monitor:
            net(**batch)
            with pytest.raises(OSError):
                monitor.step(batch=batch)
        assert [step for step, _ in logger.calls] == [0]


class TestTheFormerLearningRate:
    def run(self, rates, state=None):
        net = model()
        with watch(net, 1, **LOOK) as monitor:
            if state is not None:
                monitor.load_state_dict(state)
            data = batches(len(rates) + monitor.step_count + 1, calm_first=True)
            for rate in rates:
                net(**data[monitor.step_count])
                monitor.step(learning_rate=rate)
        return monitor

    def test_is_named_where_it_was_changed(self):
        calm = self.run([1e-3, 1e-3, 1.9e-3, 1e-3])
        assert [alert.former_rate for alert in calm.alerts] == [None] * 3
        alerts = self.run([1e-3, 0.05, 0.05, 0.05]).alerts
        assert [(alert.former_rate, alert.former_rate_step) for alert in alerts] == [(1e-3, 0)] * 3
        assert "learning rate 0.05 (it was 0.001 at step 0)." in alerts[0].message
        assert self.run([1e-3, *[0.05] * 12]).alerts[-1].former_rate is None  # long ago

    def test_is_known_after_a_restart(self):
        whole, part = self.run([1e-3, 0.05, 0.05, 0.05]), self.run([1e-3])
        rest = self.run([0.05, 0.05, 0.05], json.loads(json.dumps(part.state_dict())))
        assert plain(rest.alerts) == plain(whole.alerts)

    def test_in_lightning(self, tmp_path):
        class Jumps(Module):
            def configure_optimizers(self):
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.01 if step < 1 else 1.0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        run = Run(tmp_path, Jumps(), data=batches(2, calm_first=True), fit={"max_epochs": -1}).fit()
        assert (run.alerts[0].step, run.alerts[0].learning_rate) == (1, 0.1)
        assert (run.alerts[0].former_rate, run.alerts[0].former_rate_step) == (pytest.approx(1e-3), 0)


class TestWhatIsCarriedOn:
    def test_the_newest_of_the_history_through_json(self, monkeypatch):
        monkeypatch.setattr("attnmon.events._KEPT", 3)
        net, other = model(), watch(model(), 1, **LOOK)
        with watch(net, 1, **LOOK) as monitor:
            for batch in batches(5):
                net(**batch)
                monitor.step(loss=math.nan)
        assert steps(monitor.alerts) == [(2, False), (3, True), (4, False)]
        other.load_state_dict(json.loads(json.dumps(monitor.state_dict(), allow_nan=False)))
        assert plain(other.alerts) == plain(monitor.alerts)
        assert math.isnan(other.alerts[0].loss)

    def test_copies_and_pickles(self, tmp_path):
        run = Run(tmp_path, on_alert=print, keep_batches=str(tmp_path / "kept"))
        pickle.loads(pickle.dumps(run.monitor))
        run.fit()
        for other in (pickle.loads(pickle.dumps(run.monitor)), copy.deepcopy(run.monitor)):
            assert plain(other.alerts) == plain(run.alerts)
            trainer(tmp_path, other, max_steps=1).fit(Module(), loader(batches(1)), loader(batches(1)))
            assert steps(other.alerts) == [(0, False)]  # a new run
        assert steps(run.alerts) == ALTERNATING

    def test_baselines_of_another_model_are_said_to_fit_nothing(self, tmp_path):
        path = tmp_path / "made" / "baselines.json"  # the folder is not there
        net, batch = model(), batches(2)[1]
        with watch(net, 1) as monitor:
            net(**batch)
            monitor.step()
        monitor.save_baselines(path)
        saved = path.read_text()
        for old, new, said in (
            ("transformer.h", "blocks", r"fit 0 of the 4 heads .*blocks.0.attn, blocks.1.attn.*transformer.h.0.attn"),
            ("transformer.h.1", "transformer.h.7", "fit 2 of the 4 heads"),
        ):
            path.write_text(saved.replace(old, new))
            net = model()
            with pytest.warns(UserWarning, match=said) as caught, watch(net, 1, baselines=path) as monitor:
                for _ in range(2):
                    net(**batch)
                    monitor.step()
            assert len(caught) == 1

    def test_baselines(self, tmp_path):
        def run(net, **options):
            return Run(tmp_path, Module(net), rules=rules, fit={"max_steps": 1}, **options).fit()

        rules = AlertRules(**OFF | {"entropy_rise": EntropyRise(share=0.3, leave_share=0.1, min_rise=0.01, sigmas=0)})
        selective, path = tiny_gpt2(initializer_range=0.5), str(tmp_path / "baselines.json")
        run(copy.deepcopy(selective)).save_baselines(path)
        assert not run(tiny_gpt2()).alerts
        assert not run(selective, baselines=path).alerts
        (alert,) = run(tiny_gpt2(), baselines=path).alerts
        assert (alert.step, alert.rule, alert.num_heads) == (0, "entropy_rise", 4)
        for monitor in (AttentionMonitor(), AttentionMonitor(alerts=False), watch(model())):
            with pytest.raises(ValueError, match="Expected (baselines|rules) to have .*learned"):
                monitor.save_baselines(path)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"actions": {"warning": "stop"}}, ValueError, r"Expected `actions` to map severities \(watch, warn, critical"),
        ({"actions": {"warn": "email"}}, ValueError, r"actions \(log, warn, stop, raise\), but got {'warn': 'email'}"),
        ({"on_alert": "print"}, TypeError, "Expected `on_alert` to be None or a function of one Alert, but got str"),
        ({"keep_batches": True}, TypeError, r"Expected `keep_batches` to be None or a folder, but got True \(bool\)"),
        ({"baselines": "no/such/file"}, ValueError, "Expected `baselines` to be a file that .* 'no/such/file' failed"),
        ({"keep_batches": __file__}, ValueError, "Expected `keep_batches` to be a folder, but .* is a file"),
        ({"alerts": False, "on_alert": print}, ValueError, "Expected `on_alert` to be None where alerts=False"),
        (
            {"alerts": False, "keep_batches": "kept"},
            ValueError,
            "Expected `keep_batches` to be None where alerts=False",
        ),
        ({"baselines": [1]}, ValueError, "Expected `baselines` to be what a monitor saved, but got list"),
    ],
)
def test_wrong_arguments(options, error, text):
    for make in (AttentionMonitor, lambda **options: watch(model(), **options)):
        with pytest.raises(error, match=text):
            make(**options)
