"""Replacing what a module's attention returns."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnmon.capture import attach, find_attention
from attnmon.capture.attention_function import traits_of

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402


def gpt2(attention="sdpa"):
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=1,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def llama(attention="sdpa"):
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class Direct(nn.Module):
    """Calls the kernel with what it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


class Own(nn.Module):
    """As small models write it; notes how the output lies in memory."""

    strides: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.o_proj = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 50)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.strides.append(y.stride())
        return self.o_proj(y.transpose(1, 2).flatten(2))


MODELS = {
    "gpt2-sdpa": (gpt2, "c_proj"),
    "gpt2-eager": (lambda: gpt2("eager"), "c_proj"),
    "llama-sdpa": (llama, "o_proj"),
    "llama-eager": (lambda: llama("eager"), "o_proj"),
    "own": (Own, "o_proj"),
}


@pytest.fixture(params=MODELS)
def case(request):
    make, projection = MODELS[request.param]
    return make().eval(), projection


@pytest.fixture
def ids():
    return torch.randint(0, 50, (3, 9))


def run(model, ids):
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


def ignore(call):
    pass


@pytest.mark.parametrize("answer", ["none", "own"])
def test_its_own_output_changes_no_bit(case, ids, answer, trace):
    model, _ = case
    expected = run(model, ids)
    before = trace(model)
    calls = []
    replace = lambda call: calls.append(call) or (call.output if answer == "own" else None)  # noqa: E731
    with attach(model, ignore, pytest.fail, replace=replace):
        assert torch.equal(run(model, ids), expected)
    assert trace(model) == before
    assert calls
    assert torch.equal(run(model, ids), expected)


def test_the_answer_takes_the_place_of_the_output(case, ids, capture):
    model, projection = case
    answers = []

    def replace(call):
        answers.append(torch.randn(3, 4, 9, 8, dtype=torch.float64))
        return answers[-1]

    captured = capture(model, lambda: run(model, ids), projection, replace=replace)
    inner = [inner for inner in captured.inner if inner.shape[-1] == 32]  # GPT-2's MLP has a projection of that name
    assert len(inner) == len(answers) == len(captured.calls) > 0
    for call, got, answer in zip(captured.calls, inner, answers, strict=True):
        expected = answer.float()
        assert torch.equal(got.unflatten(-1, (4, 8)).transpose(1, 2), expected)
        assert not torch.equal(call.output, expected)  # what is read is the module's own
    assert not captured.skipped


def test_layout_in_memory_is_kept(ids):
    model = Own()
    run(model, ids)
    strides = model.strides[-1]
    assert strides != (288, 72, 8, 1)  # else there is nothing to keep
    with attach(model, ignore, pytest.fail, replace=lambda call: torch.zeros(3, 4, 9, 8)):
        run(model, ids)
    assert model.strides[-1] == strides


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (3, 4, 2), (2, 3, 2, 2)])
def test_every_number_of_dimensions(lead):
    model = Direct()
    q, k, v = torch.randn(*lead, 4, 8), torch.randn(*lead, 6, 8), torch.randn(*lead, 6, 5)
    with attach(model, ignore, pytest.fail, replace=lambda call: 2 * call.output):
        assert torch.equal(model(q, k, v), 2 * F.scaled_dot_product_attention(q, k, v))


def test_weights_beside_the_output_are_passed_on(ids):
    model = llama("eager")
    plain = model(ids, output_attentions=True).attentions
    with attach(model, ignore, pytest.fail, replace=lambda call: torch.zeros(3, 4, 9, 8)):
        attentions = model(ids, output_attentions=True).attentions
    assert torch.equal(attentions[0], plain[0])


def test_no_gradient_flows_through_the_answer(ids):
    model = Own()
    with attach(model, ignore, pytest.fail, replace=lambda call: call.output.requires_grad_()):
        model(ids).sum().backward()
    assert model.o_proj.weight.grad is not None
    assert model.qkv.weight.grad is None


def test_single_queries_of_a_generation_are_replaced_too(ids):
    model = llama()
    lengths = []
    replace = lambda call: lengths.append(call.query.shape[2])  # noqa: E731
    with attach(model, ignore, pytest.fail, replace=replace):
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert lengths == [9, 9, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["llama-sdpa", "own"])
def test_the_last_attachment_prevails_and_all_see_the_original(name, ids):
    make, projection = MODELS[name]
    model = make().eval()
    inner, seen = [], []
    hook = lambda _, args: inner.append(args[0])  # noqa: E731
    layer = projection if name == "own" else f"model.layers.0.self_attn.{projection}"
    model.get_submodule(layer).register_forward_pre_hook(hook)
    run(model, ids)
    reader = attach(model, lambda call: seen.append(call.output), pytest.fail)
    first = attach(model, lambda call: seen.append(call.output), pytest.fail, replace=lambda call: call.output + 1)
    second = attach(model, lambda call: seen.append(call.output), pytest.fail, replace=lambda call: call.output + 2)
    run(model, ids)
    assert all(torch.equal(output, seen[0]) for output in seen[:3])
    torch.testing.assert_close(inner[1], inner[0] + 2)
    second.detach()
    run(model, ids)
    torch.testing.assert_close(inner[2], inner[0] + 1)
    first.detach()
    run(model, ids)
    assert torch.equal(inner[3], inner[0])
    reader.detach()


def test_multihead_attention_is_reported_at_once():
    model = nn.ModuleDict({"a": nn.TransformerEncoderLayer(8, 2, 8), "b": Direct(), "c": nn.MultiheadAttention(8, 2)})
    skipped, replaced = {}, []
    replace = lambda call: replaced.append(call.layer)  # noqa: E731
    x = torch.randn(3, 2, 8)
    model.eval()
    with attach(model, ignore, skipped.__setitem__, replace=replace):
        assert list(skipped) == ["a.self_attn", "c"]
        for inference in (True, False):
            with torch.set_grad_enabled(not inference):
                model["a"](x)
                model["b"](x, x, x)
                model["c"](x, x, x)
    assert replaced == ["b", "b"]
    assert "write the layer with F.scaled_dot_product_attention" in skipped["c"]


def test_multihead_function_is_reported():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = [nn.MultiheadAttention(8, 2)]

        def forward(self, x):
            m = self.inner[0]
            return F.multi_head_attention_forward(
                x, x, x, 8, 2, m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, None
            )[0]

    model = Functional()
    x = torch.randn(3, 2, 8)
    expected = model(x)
    skipped = {}
    with attach(model, ignore, skipped.__setitem__, replace=pytest.fail):
        assert torch.equal(model(x), expected)
    assert "F.multi_head_attention_forward" in skipped[""]


def odd_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Returns the heads' outputs side by side."""
    weights = torch.matmul(query, key.transpose(2, 3)).softmax(-1)
    return torch.matmul(weights, value).transpose(1, 2).reshape(2, 4, 24), None


@pytest.mark.parametrize("known", [True, False])
def test_another_layout_is_reported(known, monkeypatch):
    if known:
        monkeypatch.setattr(odd_attention, "__module__", "transformers.models.odd")

    class Interfaced(nn.Module):
        is_causal = False

        def __init__(self):
            super().__init__()
            self.config = transformers.LlamaConfig(attn_implementation="eager")

        def forward(self, x):
            function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, odd_attention)
            return function(self, x, x, x, None)[0]

    model = Interfaced()
    x = torch.randn(2, 3, 4, 8)
    expected = model(x)
    skipped = {}
    traits_of.cache_clear()
    with attach(model, ignore, skipped.__setitem__, replace=lambda call: torch.zeros(2, 3, 4, 8)):
        assert torch.equal(model(x), expected)
    traits_of.cache_clear()
    # a function that may do anything is not even handed on without an output to check it by
    assert ("of shape (2, 4, 24), where (2, 4, 3, 8) is expected" if known else "odd_attention") in skipped[""]


def test_module_found_by_nobody_is_replaced_beside_others(ids):
    class Deeper(nn.Module):
        kernels = ()

        def forward(self, x):
            return self.kernels[0](x, x, x)

    model = nn.ModuleList([llama(), Deeper()])
    model[1].kernels = [F.scaled_dot_product_attention]
    assert len(find_attention(model)) == 2
    layers = []
    with attach(model, ignore, pytest.fail, replace=lambda call: layers.append(call.layer)):
        run(model[0], ids)
        model[1](torch.randn(1, 2, 5, 8))
    assert layers == ["0.model.layers.0.self_attn", "0.model.layers.1.self_attn", "1"]


def test_answers_of_another_shape_are_refused(case, ids, trace):
    model, _ = case
    before = trace(model)
    with pytest.raises(
        ValueError, match=r"Expected `replace` .* shape \(3, 4, 9, 8\), or None .* shape \(3, 9, 4, 8\)"
    ):
        with attach(model, ignore, pytest.fail, replace=lambda call: call.output.transpose(1, 2)):
            run(model, ids)
    with pytest.raises(ValueError, match="but got str at `"):
        with attach(model, ignore, pytest.fail, replace=lambda call: "no"):
            run(model, ids)
    assert trace(model) == before


def test_selected_sequences_cannot_be_replaced():
    with pytest.raises(ValueError, match="Expected `replace` without `select`"):
        attach(Own(), ignore, pytest.fail, select=lambda batch: None, replace=lambda call: None)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_after_an_error(case, ids, error, trace):
    model, _ = case
    before = trace(model)
    expected = run(model, ids)

    def replace(call):
        raise error

    with pytest.raises(error), attach(model, ignore, pytest.fail, replace=replace):
        run(model, ids)
    assert trace(model) == before
    assert torch.equal(run(model, ids), expected)
