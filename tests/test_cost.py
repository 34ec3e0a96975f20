"""What the monitor costs: it says so itself, keeps to a share, and costs nothing on steps that it does not sample."""

import gc
import math
import sys
import warnings

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter
from toys import LanguageModule, NanoModel, loader, tiny_gpt2, token_batches, trainer

from attnmon import AttentionMonitor, watch
from attnmon.capture import _state
from attnmon.cost import Meter, next_step
from attnmon.tensorboard import scalar_bytes


class Clock:
    """A clock that goes on when told to, and a little whenever it is looked at."""

    def __init__(self, monkeypatch, tick=0.01):
        self.now, self.tick = 0.0, tick
        monkeypatch.setattr("time.perf_counter", self.look)

    def look(self):
        self.now += self.tick
        return self.now


class TestMeter:
    def test_time_within_counts_once(self, monkeypatch):
        clock, meter = Clock(monkeypatch, tick=0.0), Meter()
        meter.start()
        clock.now += 5
        with meter.running():
            clock.now += 1
            with meter.running():
                clock.now += 2
        clock.now += 2
        assert meter.sample == 3
        assert meter.take() == 3
        assert (meter.spent, meter.sample, meter.run_time) == (3, 0, 10)

    def test_what_is_forgotten_does_not_count(self, monkeypatch):
        clock, meter = Clock(monkeypatch, tick=0.0), Meter()
        with meter.running():
            clock.now += 1
        meter.forget()
        assert meter.take() == meter.spent == 0

    def test_time_counts_where_an_error_ends_it(self, monkeypatch):
        clock, meter = Clock(monkeypatch, tick=0.0), Meter()
        with pytest.raises(ZeroDivisionError), meter.running():
            clock.now += 1
            1 / 0  # noqa: B018
        assert meter.take() == 1

    def test_a_resumed_run_goes_on_counting(self, monkeypatch):
        clock, meter = Clock(monkeypatch, tick=0.0), Meter()
        meter.start()
        with meter.running():
            clock.now += 2
        meter.take()
        clock.now += 8
        resumed = Meter()
        resumed.load_state_dict(meter.state_dict())
        clock.now += 1000  # between the runs
        resumed.start()
        clock.now += 1
        assert (resumed.spent, resumed.run_time) == (2, 11)


class TestNextStep:
    def test_without_a_limit_it_is_the_cadence(self):
        assert next_step(0, 50, None, spent=9.0, seconds=9.0, run_time=10.0, per_step=1.0) == 50
        assert next_step(70, 50, None, spent=9.0, seconds=9.0, run_time=10.0, per_step=1.0) == 100

    def test_a_limit_that_is_kept_changes_nothing(self):
        assert next_step(100, 50, 0.01, spent=0.1, seconds=0.05, run_time=100.0, per_step=1.0) == 150

    @pytest.mark.parametrize("limit", [0.001, 0.01, 0.1, 0.5])
    @pytest.mark.parametrize("every", [1, 7])
    def test_the_limit_holds_after_the_next_sample_and_would_not_a_cadence_earlier(self, limit, every):
        step, spent, seconds, per_step = 20, 4.0, 0.5, 0.25
        run = spent + (step + 1) * per_step
        following = next_step(step, every, limit, spent=spent, seconds=seconds, run_time=run, per_step=per_step)
        assert following % every == 0

        def share(at):
            return (spent + seconds) / (run + (at - step) * per_step + seconds)

        assert share(following) <= limit + 1e-12
        assert following - every <= step or share(following - every) > limit


def run(model, steps, monitor, clock, step_seconds):
    snapshots = []
    for batch in token_batches(steps):
        model(**batch).loss.backward()
        clock.now += step_seconds
        snapshots.append(monitor.step())
    return [s for s in snapshots if s is not None]


class TestMaxOverhead:
    def test_samples_less_often_and_says_so_once(self, monkeypatch):
        clock, model = Clock(monkeypatch), tiny_gpt2()
        with watch(model, 2, max_overhead=0.1, alerts=False, strict=True) as monitor:
            with pytest.warns(UserWarning, match="less often than every 2 steps.*max_overhead=0.1") as caught:
                snapshots = run(model, 60, monitor, clock, 0.1)
        assert len(caught) == 1
        steps = [s.step for s in snapshots]
        assert steps[0] == 0
        assert 2 < len(steps) < 20
        assert all(step % 2 == 0 for step in steps)
        assert all(s.cost.share_of_run <= 0.11 for s in snapshots[3:])  # once the pace of the run is known
        assert [s.step + s.cost.every_n_steps for s in snapshots[:-1]] == steps[1:]

    def test_a_cheap_monitor_keeps_its_cadence(self, monkeypatch):
        clock, model = Clock(monkeypatch), tiny_gpt2()
        with watch(model, 2, max_overhead=0.1, alerts=False, strict=True) as monitor:
            assert [s.step for s in run(model, 7, monitor, clock, 100.0)] == [0, 2, 4, 6]

    def test_a_resumed_run_keeps_to_it(self, monkeypatch):
        clock, model = Clock(monkeypatch), tiny_gpt2()
        with warnings.catch_warnings(), watch(model, 1, max_overhead=0.02, alerts=False) as monitor:
            warnings.simplefilter("ignore")
            (first,) = run(model, 1, monitor, clock, 0.1)
            state = monitor.state_dict()
        following = first.cost.every_n_steps
        assert following > 3
        with watch(model, 1, max_overhead=0.02, alerts=False) as monitor:
            monitor.load_state_dict(state)
            snapshots = run(model, following + 1, monitor, clock, 0.1)
        assert [s.step for s in snapshots] == [following]

    @pytest.mark.parametrize("limit", [None, 0.5])
    @pytest.mark.parametrize(("before", "after", "expected"), [(50, 2, [8, 10, 12]), (3, 2, [8, 10, 12]), (2, 5, [10])])
    def test_a_resumed_run_takes_up_another_cadence_at_once(self, monkeypatch, limit, before, after, expected):
        clock, model = Clock(monkeypatch), tiny_gpt2()
        with watch(model, before, max_overhead=limit, alerts=False) as monitor:
            run(model, 8, monitor, clock, 100.0)
            state = monitor.state_dict()
        with watch(model, after, max_overhead=limit, alerts=False) as monitor:
            monitor.load_state_dict(state)
            assert [s.step for s in run(model, 6, monitor, clock, 100.0)] == expected

    @pytest.mark.parametrize("value", [0, -0.1, 1.5, "1%", True, math.nan])
    def test_what_is_no_share_is_refused(self, value):
        with pytest.raises(ValueError, match="Expected `max_overhead` to be None or a share"):
            AttentionMonitor(max_overhead=value)


class TestCostOfASample:
    def test_seconds_and_shares(self, monkeypatch):
        clock, model = Clock(monkeypatch, tick=0.0), tiny_gpt2()
        measure = "attnmon.window.Measurer.measure"
        from attnmon.window import Measurer

        original = Measurer.measure

        def slow(*args, **kwargs):
            clock.now += 2  # both layers together
            return original(*args, **kwargs)

        monkeypatch.setattr(measure, slow)
        with watch(model, 2, alerts=False, strict=True) as monitor:
            snapshots = []
            for batch in token_batches(3, batch=1):
                model(**batch).loss.backward()
                clock.now += 8
                snapshots.append(monitor.step())
        first, _, third = (s and s.cost for s in snapshots)
        assert (first.seconds, first.share_of_step, first.share_of_run) == (2, 0.25, 0.2)
        assert (third.seconds, third.share_of_step) == (2, 0.25)
        assert third.share_of_run == pytest.approx(4 / 28)
        assert first.every_n_steps == third.every_n_steps == 2

    def test_it_is_logged(self, tmp_path):
        model = tiny_gpt2()
        with watch(model, 1, alerts=False) as monitor:
            model(**token_batches(1)[0]).loss.backward()
            scalars = monitor.step().scalars(prefix="a")
        names = ("seconds", "share_of_step", "share_of_run", "every_n_steps")
        assert all(scalars[f"a/monitor/{name}"] > 0 for name in names)

    def test_a_probe_has_no_step_to_be_compared_with(self):
        model = tiny_gpt2()
        with watch(model, 1, source="probe", probe=token_batches(1)[0]) as monitor:
            assert math.isnan(monitor.latest.cost.share_of_step)
            assert "attn/monitor/share_of_step" not in monitor.latest.scalars()


def records(folder):
    """Tag and bytes on disk of every record of the event files in a folder."""
    for path in folder.rglob("events*"):
        for record in RawEventFileLoader(str(path)).Load():
            for value in Event.FromString(record).summary.value[:1]:  # the tab's data are several in one record
                yield value.tag, len(record) + 16


class TestBytes:
    @pytest.mark.parametrize("step", [0, 1, 127, 128, 300_000])
    def test_scalars_take_what_is_said(self, step, tmp_path):
        tags = ["a", "attn/entropy/layer_03", "x" * 130]
        with SummaryWriter(tmp_path) as writer:
            for tag in tags:
                writer.add_scalar(tag, 0.5, step)
        assert scalar_bytes(tags, step) == sum(size for _, size in records(tmp_path))

    def test_a_run_counts_all_that_it_writes(self, tmp_path):
        model = tiny_gpt2()
        with SummaryWriter(tmp_path) as writer, watch(model, 1, writer=writer, alerts=False) as monitor:
            for batch in token_batches(3):
                model(**batch).loss.backward()
                monitor.step()
        counted = EventAccumulator(str(tmp_path)).Reload().Scalars("attn/monitor/bytes_written")[-1].value
        found = list(records(tmp_path))
        last = max(place for place, (tag, _) in enumerate(found) if tag == "attn/monitor/bytes_written")
        assert counted == sum(size for tag, size in found[: last + 1] if tag.startswith("attn")) > 10_000


def trace(function):
    """Every Python function that is entered, in order."""
    entered = []

    def note(frame, event, argument):
        if event == "call":
            entered.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    gc.collect()
    gc.disable()  # what it would call comes when it will
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered


def attached(model):
    """Everything that something could hang on."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    hooks = [
        ["forward" in vars(m), *(len(getattr(m, name)) for name in vars(m) if name.endswith("hooks"))]
        for m in model.modules()
    ]
    stacks = (len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack()))
    return hooks, stacks, dict(ALL_ATTENTION_FUNCTIONS._local_mapping), len(_state.ACTIVE)


@pytest.mark.parametrize("make", [lambda: tiny_gpt2(dropout=0.1), NanoModel], ids=["gpt2", "own"])
class TestUnsampledSteps:
    def test_run_the_very_same_code(self, make):
        model, batch = make(), token_batches(1)[0]

        def step():
            output = model(**batch).loss if hasattr(model, "config") else model(batch["input_ids"]).mean()
            output.backward()

        step()
        bare, nothing = trace(step), attached(model)
        with watch(model, 2, strict=True) as monitor:
            sampled = trace(step)
            assert monitor.step() is not None
            assert attached(model) == nothing
            assert trace(step) == bare
            assert monitor.step() is None
            assert sampled != bare
        assert attached(model) == nothing

    def test_in_lightning_too(self, make, tmp_path):
        model = make()
        seen, nothing = [], attached(model)

        class Module(LanguageModule):
            def training_step(self, batch, batch_idx):
                seen.append(attached(model) == nothing)
                return model(**batch).loss if hasattr(model, "config") else model(batch["input_ids"]).mean()

        trainer(tmp_path, AttentionMonitor(3, strict=True), max_steps=7).fit(Module(model), loader(token_batches(7)))
        assert seen == [step % 3 != 0 for step in range(7)]
        assert torch.overrides._len_torch_function_stack() == 0
