"""Attaching changes nothing that the model computes, and detaching leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from attnmon.capture import attach, compiled_modules

transformers = pytest.importorskip("transformers")

EXTRAS = frozenset({"hidden", "embedding", "labels"})


class Own(nn.Module):
    """A module of the user's, with dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attn = OwnAttention()

    def forward(self, ids):
        return self.attn(self.embed(ids))


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        dropout = 0.3 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Torch(nn.Module):
    """A module of torch's, with dropout and padding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 32, 0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids):
        return self.encoder(self.embed(ids))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.torch = Own(), Torch()

    def forward(self, ids):
        return self.own(ids).sum() + self.torch(ids)


def gpt2(attention="sdpa"):
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=1,
        attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS = {"sdpa": gpt2, "eager": lambda: gpt2("eager"), "own": Own, "torch": Torch, "both": Both}


def run(model, ids):
    out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def ids():
    return torch.randint(0, 50, (3, 9))


@pytest.mark.parametrize("train", [True, False])
def test_output_and_gradients_keep_their_bits(model, ids, train):
    model.train(train)

    def step():
        model.zero_grad()
        torch.manual_seed(1)
        out = run(model, ids)
        out.square().sum().backward()
        return [out.detach()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = step()
    calls = []
    select = lambda batch: torch.tensor([0, 2])  # noqa: E731
    with attach(model, calls.append, pytest.fail, context=EXTRAS, select=select):
        got = step()
    assert calls
    assert len(got) == len(expected) > 1
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inference_keeps_its_bits(model, ids):
    model.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            expected = run(model, ids)
            calls = []
            with attach(model, calls.append, pytest.fail, context=EXTRAS):
                assert torch.equal(run(model, ids), expected)
        assert calls


def test_generator_is_not_touched(model, ids):
    model.eval()
    state = torch.get_rng_state()
    with attach(model, lambda call: None, pytest.fail, context=EXTRAS):
        run(model, ids)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_stays_after_success(model, ids, trace):
    before = trace(model)
    attachment = attach(model, lambda call: None, pytest.fail, context=EXTRAS)
    assert trace(model) != before
    run(model, ids)
    attachment.detach()
    assert trace(model) == before
    attachment.detach()
    assert trace(model) == before
    pickle.loads(pickle.dumps(model))


class _Stop(Exception):
    pass


@pytest.mark.parametrize("error", [_Stop, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["observer", "model", "between"])
def test_nothing_stays_after_an_error(model, ids, trace, error, where):
    before = trace(model)

    def observe(call):
        if where == "observer":
            raise error

    class Raising(nn.Module):
        def forward(self, *args, **kwargs):
            raise error

    if where == "model":
        last = [name for name, child in model.named_modules() if not list(child.children())][-1]
        parent = model.get_submodule(last.rpartition(".")[0])
        healthy = getattr(parent, last.rpartition(".")[2])
        setattr(parent, last.rpartition(".")[2], Raising())
        before = trace(model)

    def train():
        with attach(model, observe, pytest.fail, context=EXTRAS):
            run(model, ids)
            raise error

    with pytest.raises(error):
        train()
    assert trace(model) == before
    if where == "model":
        setattr(parent, last.rpartition(".")[2], healthy)
    calls = []
    with attach(model, calls.append, pytest.fail, context=EXTRAS):
        run(model, ids)
    assert calls


def test_failing_to_attach_leaves_nothing(model, trace, monkeypatch):
    from attnmon.capture import attachment

    before = trace(model)
    monkeypatch.setattr(attachment, "unsupported_kernels", lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attach(model, lambda call: None, pytest.fail, context=EXTRAS)
    assert trace(model) == before


def test_call_of_another_model_is_not_attributed_to_the_loops(ids):
    """The loop below has the watched model as its first argument, and runs another."""

    def loop(model, other):
        return run(other, ids)

    student, teacher = Own(), Own()
    calls = []
    with attach(student, calls.append, pytest.fail):
        loop(student, teacher)
        assert calls == []
        student.teacher = [teacher]  # inside, but not a part
        student.forward = lambda ids: student.teacher[0](ids)
        run(student, ids)
        assert calls == []


def test_unknown_context_is_refused(model):
    with pytest.raises(ValueError, match=r"Expected `context` .* got \['weights'\]"):
        attach(model, lambda call: None, pytest.fail, context=frozenset({"weights"}))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("name", ["sdpa", "both"])
def test_detaching_in_any_order(name, order, ids, trace):
    first, second = MODELS[name](), MODELS[name]()
    before = trace(first), trace(second)
    calls = [[], [], []]
    watched = [first, second, first]
    attachments = [attach(m, calls[i].append, pytest.fail) for i, m in enumerate(watched)]
    for gone, index in enumerate([*order, None]):
        for seen in calls:
            seen.clear()
        run(first, ids)
        run(second, ids)
        for i in range(3):
            assert (len(calls[i]) > 0) == (i not in order[:gone])
        assert len(calls[0]) == len(calls[2]) or len(calls[0]) * len(calls[2]) == 0
        if index is not None:
            attachments[index].detach()
    assert (trace(first), trace(second)) == before


def test_modes_of_others_stay_where_they_are(ids):
    class Other(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = Own()
    calls = []
    attachment = attach(model, calls.append, pytest.fail)
    with Other() as other:
        run(model, ids)
        attachment.detach()
        from torch.overrides import _get_current_function_mode_stack

        assert _get_current_function_mode_stack() == [other]
    assert len(calls) == 1


def test_registry_entry_replaced_meanwhile_is_not_ours_to_restore(ids):
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    original = functions["sdpa"]

    def mine(*args, **kwargs):
        return original(*args, **kwargs)

    model = gpt2()
    attachment = attach(model, lambda call: None, pytest.fail)
    functions["sdpa"] = mine
    try:
        attachment.detach()
        assert functions["sdpa"] is mine
    finally:
        del functions["sdpa"]
    assert functions["sdpa"] is original


def test_local_registration_of_the_user_is_used_and_put_back(ids):
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    original, used = functions["sdpa"], []

    def mine(*args, **kwargs):
        used.append(1)
        return original(*args, **kwargs)

    functions["sdpa"] = mine
    try:
        model = gpt2().eval()
        calls = []
        with attach(model, calls.append, pytest.fail):
            run(model, ids)
        assert functions._local_mapping == {"sdpa": mine}
    finally:
        del functions["sdpa"]
    assert len(used) == len(calls) == 2
    assert "mine" in calls[0].unexplained[0]
    assert calls[0].output is not None


def test_each_call_is_captured_once(model, ids):
    calls = []
    with attach(model, calls.append, pytest.fail):
        run(model, ids)
    layers = [call.layer for call in calls]
    assert len(layers) == len(set(layers))


def test_paused(model, ids):
    calls = []
    with attach(model, calls.append, pytest.fail) as attachment:
        attachment.paused = True
        run(model, ids)
        assert calls == []
        attachment.paused = False
        run(model, ids)
        assert calls


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_forward_counts_once(name, reentrant, ids):
    model = MODELS[name]()
    if hasattr(model, "gradient_checkpointing_enable"):
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        model.train()
        forward = lambda: run(model, ids)  # noqa: E731
    else:
        start = torch.zeros(1, requires_grad=True)
        forward = lambda: checkpoint(lambda s: run(model, ids) + s, start, use_reentrant=reentrant)  # noqa: E731
    counts = []
    calls = []
    with attach(model, calls.append, pytest.fail):
        out = forward()
        counts.append(len(calls))
        out.sum().backward()
        counts.append(len(calls))
    assert counts[0] == counts[1] == len({call.layer for call in calls}) > 0


@pytest.mark.parametrize("name", ["sdpa", "own", "both"])
@pytest.mark.filterwarnings("ignore", "error:attnmon")  # the compiler has its own to say
def test_compiled_model_is_left_alone(name, ids):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = MODELS[name]().eval()
    compiled = torch.compile(model, backend="aot_eager")
    assert compiled_modules(compiled) == [""]
    assert compiled_modules(model) == []
    skipped = []
    with torch.no_grad():
        before = run(compiled, ids)
        counters.clear()
        for _ in range(3):
            with attach(compiled, pytest.fail, lambda layer, reason: skipped.append((layer, reason)), context=EXTRAS):
                assert torch.equal(run(compiled, ids), before)
            assert torch.equal(run(compiled, ids), before)
        assert counters["stats"]["unique_graphs"] == 0  # no recompilation
        assert "compiled" in skipped[0][1]
        calls = []
        with torch.compiler.set_stance("force_eager"), attach(compiled, calls.append, pytest.fail):
            run(compiled, ids)
    assert {call.layer for call in calls} == {layer for layer, _ in skipped}
    assert not any("_orig_mod" in call.layer for call in calls)
    torch._dynamo.reset()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.filterwarnings("ignore", "error:attnmon")  # the compiler has its own to say
def test_model_compiled_in_part(in_place, ids, trace):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = Both()
    model.second = Own()
    model.eval()
    if in_place:
        model.own.attn.compile(fullgraph=True, backend="aot_eager")
    else:
        model.own.attn = torch.compile(model.own.attn, fullgraph=True, backend="aot_eager")
    both = lambda: run(model, ids) + run(model.second, ids).sum()  # noqa: E731
    assert compiled_modules(model) == ["own.attn"]
    with torch.no_grad():
        expected = both()
        counters.clear()
        before = trace(model)
        calls, skipped = [], []
        with attach(model, calls.append, lambda layer, reason: skipped.append(layer), context=EXTRAS):
            assert torch.equal(both(), expected)
        assert trace(model) == before
        assert torch.equal(both(), expected)
    assert counters["stats"]["unique_graphs"] == 0
    assert skipped == ["own.attn"]
    assert [call.layer for call in calls] == [
        "torch.encoder.layers.0.self_attn",
        "torch.encoder.layers.1.self_attn",
        "second.attn",
    ]
    torch._dynamo.reset()


def test_copy_made_while_attached_is_a_model_of_its_own(model, ids):
    model.eval()
    with torch.no_grad():
        expected = run(model, ids)
        calls = []
        with attach(model, calls.append, pytest.fail, context=EXTRAS):
            twin = copy.deepcopy(model)
            revived = pickle.loads(pickle.dumps(model))
            for other in (twin, revived):  # the mode may choose other kernels for a model that is not watched
                torch.testing.assert_close(run(other, ids), expected)
            assert calls == []
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(run(model, ids), expected)
        assert not torch.equal(run(twin, ids), expected)


def test_no_model_is_kept(ids):
    """One that is detached can go; while attached, no batch leaves anything behind but its last embeddings."""
    for make in MODELS.values():
        model = make()
        attachment = attach(model, lambda call: None, pytest.fail, context=EXTRAS)
        run(model, ids).sum().backward()
        before = _count_tensors()
        for _ in range(20):
            run(model, ids).sum().backward()
        assert _count_tensors() <= before
        attachment.detach()
        ref = weakref.ref(model)
        del model, attachment
        gc.collect()
        assert ref() is None


def _count_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_calls_carry_no_graph(model, ids):
    calls = []
    with attach(model, calls.append, pytest.fail, context=EXTRAS):
        run(model, ids).sum().backward()
    for call in calls:
        for value in vars(call).values():
            assert not (isinstance(value, torch.Tensor) and value.requires_grad)
