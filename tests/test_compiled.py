"""Training under torch.compile: the same bits with and without the monitor, and the figures of eager runs."""

import random
import shutil
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from toys import LanguageModule, loader, tiny_gpt2, token_batches, trainer

from attnmon import AttentionMonitor, watch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of names that it deprecates
    import torch._inductor.compile_fx

torch._inductor.config.compile_threads = 1  # a pool of processes takes longer to start than these models to compile
eager = partial(torch.compile, backend="aot_eager")  # compiled as far as the monitor can tell, but at once

pytestmark = [
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore", "error:attnmon"),  # the compiler has its own to say
]
STEPS = 4


@pytest.fixture(autouse=True)
def fresh_compiler():
    """One thread: with more, inductor's own code adds gradients up in an order that differs from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def seeded(dropout=0.1, **arguments):
    model = tiny_gpt2(layers=1, dropout=dropout, **arguments)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    return model


def state(model, optimizer, losses):
    """All that two runs may differ in."""
    tensors = [p.detach().clone() for p in model.parameters()]
    tensors += [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return tensors, losses, (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))


def assert_same(one, other):
    assert one[1:] == other[1:]
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def around(model, backend="inductor"):
    return torch.compile(model, backend=backend)


def in_place(model, backend="inductor"):
    model.compile(backend=backend)
    return model


def by_block(model, backend="inductor"):
    for block in model.transformer.h:
        block.compile(backend=backend)
    return model


def by_forward(model, backend="inductor"):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


COMPILE = {"around": around, "in_place": in_place, "by_block": by_block, "by_forward": by_forward}


def plain_loop(compile_model, every, model=None, batches=None):
    """A plain loop; what it leaves, and its snapshots."""
    model = seeded() if model is None else model
    compiled = compile_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, snapshots = [], []

    def step(batch):
        loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    batches = token_batches(STEPS, batch=6) if batches is None else batches
    if every is None:
        for batch in batches:
            step(batch)
    else:
        with watch(compiled, every, strict=True) as monitor:
            for batch in batches:
                step(batch)
                snapshots.append(monitor.step())
    return state(model, optimizer, losses), [s for s in snapshots if s is not None]


@pytest.mark.parametrize(
    ("how", "cadences"), [("around", (3,)), ("in_place", (1, 3)), ("by_block", (3,)), ("by_forward", (1,))]
)
def test_plain_loop(how, cadences):
    expected, _ = plain_loop(COMPILE[how], None)
    for every in cadences:
        torch._dynamo.reset()
        found, snapshots = plain_loop(COMPILE[how], every)
        assert_same(found, expected)
        assert [s.step for s in snapshots] == list(range(0, STEPS, every))
        assert all(s.rerun and len(s.layers) == 1 for s in snapshots)


@pytest.mark.parametrize("how", ["around", "in_place", "by_block"])
def test_nothing_is_compiled_anew(how):
    from torch._dynamo.utils import counters

    def graphs(every):
        torch._dynamo.reset()
        counters.clear()
        plain_loop(partial(COMPILE[how], backend="aot_eager"), every)
        return counters["stats"]["unique_graphs"]

    assert graphs(2) == graphs(None) > 0


def figures(snapshot):
    return [
        value
        for quantity in ("entropy", "score_spread", "distance@5", "jacobian@1.0")
        for layer in snapshot.values[quantity].values()
        for value in layer
    ]


@pytest.mark.parametrize("how", COMPILE)
@pytest.mark.parametrize("padded", [False, True])
def test_figures_are_those_of_the_same_run_uncompiled(how, padded):
    batches = token_batches(2, batch=6)
    if padded:
        for batch in batches:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][::2, 50:] = 0
    _, expected = plain_loop(lambda model: model, 1, seeded(dropout=0.0), batches)
    _, found = plain_loop(partial(COMPILE[how], backend="aot_eager"), 1, seeded(dropout=0.0), batches)
    for one, other in zip(found, expected, strict=True):
        assert one.layers == other.layers
        assert one.rows_used == other.rows_used
        assert one.padding == other.padding
        assert figures(one) == pytest.approx(figures(other), rel=2e-4, abs=2e-5)
        assert one.rerun
        assert not other.rerun


def test_a_compiled_step_is_looked_at_beforehand():
    def run(every):
        model = seeded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []

        @torch.compile
        def step(batch):
            loss = model(**batch).loss
            loss.backward()
            return loss

        def finish(loss):
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        batches = token_batches(STEPS, batch=6)
        if every is None:
            for batch in batches:
                finish(step(batch))
            return state(model, optimizer, losses), []
        snapshots = []
        with watch(model, every, strict=True) as monitor:
            for batch in batches:
                monitor.look(batch)
                finish(step(batch))
                snapshots.append(monitor.step())
        return state(model, optimizer, losses), [s for s in snapshots if s is not None]

    expected, _ = run(None)
    torch._dynamo.reset()
    found, snapshots = run(3)
    assert_same(found, expected)
    assert [s.step for s in snapshots] == [0, 3]
    assert all(s.rerun for s in snapshots)


def test_a_compiled_step_that_nobody_told_of_is_left_as_it_is():
    def run(every):
        model = seeded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = eager(lambda batch: model(**batch).loss)
        losses = []
        monitor = None if every is None else watch(model, every, strict=True).__enter__()
        for batch in token_batches(4):
            loss = step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if monitor is not None:
                assert monitor.step() is None
        if monitor is not None:
            monitor.close()
        return state(model, optimizer, losses)

    expected = run(None)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="inside a compiled function.*look"):
        found = run(2)
    assert_same(found, expected)


class CompiledNet(LanguageModule):
    def __init__(self, model):
        super().__init__(torch.compile(model))


class CompiledStep(LanguageModule):
    @torch.compile
    def training_step(self, batch, batch_idx):
        return self(**batch).loss


class CompiledLoss(LanguageModule):
    def __init__(self, model):
        super().__init__(model)
        self.compute = eager(self._compute)

    def _compute(self, batch):
        return self(**batch).loss

    def training_step(self, batch, batch_idx):
        return self.compute(batch)


@eager
def compiled_loss(model, batch):
    return model(**batch).loss


class CallsCompiled(LanguageModule):
    def training_step(self, batch, batch_idx):
        return compiled_loss(self.model, batch)


class HidesCompiled(LanguageModule):
    """Calls a compiled function that can't be found by reading the code."""

    def __init__(self, model):
        super().__init__(model)
        self.table = {"loss": eager(lambda batch: self.model(**batch).loss)}

    def training_step(self, batch, batch_idx):
        return self.table["loss"](batch)


class Plain(LanguageModule):
    def training_step(self, batch, batch_idx):
        return self(**batch).loss


def compiled_module(model):
    return torch.compile(Plain(model))


LIGHTNING = {
    "net": CompiledNet,
    "module": compiled_module,
    "step": CompiledStep,
    "attribute": CompiledLoss,
    "function": CallsCompiled,
    "hidden": HidesCompiled,
}


def fit(tmp_path, make, every, dropout=0.1, **arguments):
    model = seeded(dropout)
    module = make(model)
    snapshots = []

    class Keeping(AttentionMonitor):
        def _log(self, trainer, snapshot, prefix):
            snapshots.append(snapshot)

    callbacks = [] if every is None else [Keeping(every, strict=True)]
    run = trainer(tmp_path, *callbacks, max_steps=STEPS, **arguments)
    run.fit(module, loader(token_batches(STEPS, batch=6)))
    return state(model, run.optimizers[0], []), snapshots


@pytest.mark.parametrize("how", LIGHTNING)
def test_lightning(how, tmp_path):
    expected, _ = fit(tmp_path, LIGHTNING[how], None)
    for every in (1, 3) if how == "module" else (3,):
        torch._dynamo.reset()
        found, snapshots = fit(tmp_path, LIGHTNING[how], every)
        assert_same(found, expected)
        assert [s.step for s in snapshots] == list(range(0, STEPS, every))
        assert all(s.rerun and len(s.layers) == 1 for s in snapshots)


def test_lightning_figures(tmp_path):
    _, expected = fit(tmp_path, Plain, 1, dropout=0.0)
    _, found = fit(tmp_path, lambda model: eager(Plain(model)), 1, dropout=0.0)
    for one, other in zip(found, expected, strict=True):
        assert one.layers == other.layers
        assert figures(one) == pytest.approx(figures(other), rel=2e-3, abs=2e-4)


def test_a_second_pass_that_fails_says_how_to_help(tmp_path):
    class Shifted(CompiledStep):
        def forward(self, tokens):
            raise NotImplementedError

        @eager
        def training_step(self, batch, batch_idx):
            return self.model(**batch).loss

    with pytest.warns(UserWarning, match="(?s)switched off.*Override AttentionMonitor.run_probe"):
        trainer(tmp_path, AttentionMonitor(1), max_steps=3).fit(Shifted(seeded()), loader(token_batches(3)))


def test_a_part_with_odd_arguments_is_named():
    class Cache:
        def __init__(self):
            self.lock = threading.Lock()

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_gpt2()

        def forward(self, cache, **batch):
            return self.model(**batch).loss

    model = Odd()
    compiled = torch.compile(model, backend="eager")
    with watch(compiled, 1) as monitor, pytest.warns(UserWarning, match="can't be run once more on a Cache"):
        compiled(Cache(), **token_batches(1)[0]).backward()
        assert monitor.step() is None


def test_compiled_code_that_shows_nothing_is_soon_left_alone():
    """What is attached would have it compiled anew at each sample, until the compiler refuses."""
    from torch._dynamo.utils import counters

    def run(every):
        torch._dynamo.reset()
        counters.clear()
        model = seeded()
        step = torch.compile(lambda batch: model(batch["input_ids"]).logits.mean(), fullgraph=True, backend="aot_eager")
        losses = []
        monitor = None if every is None else watch(model, every, strict=True).__enter__()
        for batch in token_batches(12):
            loss = step(batch)
            loss.backward()
            losses.append(loss.item())
            if monitor is not None:
                monitor.step()
        if monitor is not None:
            monitor.close()
        return losses, counters["stats"]["unique_graphs"]

    expected, graphs = run(None)
    with pytest.warns(UserWarning, match="compiled module than the one that is watched") as caught:
        found, more = run(1)
    assert found == expected
    assert more <= graphs + 2
    assert len([w for w in caught if "attnmon" in str(w.message)]) == 1


class Counting(torch.nn.Module):
    """State that forward moves on: a buffer, a number, a generator of its own."""

    def __init__(self):
        super().__init__()
        self.attend = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        self.calls += 1
        self.count += 1
        noise = torch.rand((), generator=self.generator)
        return self.attend(x).mean() * self.calls * noise


@pytest.mark.parametrize("how", ["second_pass", "probe"])
def test_what_forward_counts_is_put_back(how):
    def run(watched):
        torch.manual_seed(0)
        model = Counting()
        compiled = torch.compile(model, backend="eager") if how == "second_pass" else model
        x = torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(0))
        arguments = {"source": "probe", "probe": x} if how == "probe" else {}
        losses = []
        monitor = watch(compiled, 1, top_n=(1, 2), alerts=False, strict=True, **arguments) if watched else None
        if monitor is not None:
            monitor.__enter__()
        for _ in range(4):
            losses.append(compiled(x).item())
            if monitor is not None:
                monitor.step()
        if monitor is not None:
            assert monitor.latest is not None
            monitor.close()
        return losses, model.calls.item(), model.count

    assert run(True) == run(False)


@pytest.mark.parametrize("masked", [False, True])
def test_sequences_behind_positions_are_not_cut(masked):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 32, 0.0), 1)
    x = torch.randn(24, 6, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(24) if masked else None

    def figures_of(module):
        with watch(module, 1, sequences=4, alerts=False, strict=True) as monitor:
            module(x, mask=mask).sum().backward()
            return monitor.step()

    expected, found = figures_of(model), figures_of(torch.compile(model, backend="eager"))
    assert found.rows_used == expected.rows_used
    assert found.values["entropy"][0] == pytest.approx(expected.values["entropy"][0], rel=1e-5)


def test_compiled_parts_without_attention_are_not_run_again(tmp_path):
    calls = []

    class Loss(torch.nn.Module):
        def forward(self, logits):
            if not torch.compiler.is_compiling():
                calls.append("eager")
            return logits.mean()

    class Parts(LanguageModule):
        """A compiled loss beside attention that is not, in a module without a forward that would take the batch."""

        def __init__(self):
            super().__init__(seeded())
            self.loss = torch.compile(Loss(), backend="aot_eager")
            self.reduce = eager(torch.nn.functional.relu)

        def forward(self):
            raise NotImplementedError

        def training_step(self, batch, batch_idx):
            return self.loss(self.reduce(self.model(**batch).logits))

    monitor = AttentionMonitor(1, strict=True, alerts=False)
    trainer(tmp_path, monitor, max_steps=2).fit(Parts(), loader(token_batches(2)))
    assert len(monitor.latest.layers) == 1
    assert not monitor.latest.rerun
    assert calls == []
