"""`nn.MultiheadAttention`, alone and inside torch's own layers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnmon.capture import attach, find_attention


def explain(call, module, recompute):
    """Output of `module` that a call of it implies: the recomputed heads through the output projection."""
    heads = recompute(call).transpose(1, 2).flatten(2)
    bias = module.out_proj.bias
    return F.linear(heads, module.out_proj.weight.double(), None if bias is None else bias.double())


VARIANTS = {
    "plain": {},
    "no_bias": {"bias": False},
    "kdim": {"kdim": 12, "vdim": 10},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "attn2", "attn3", "float", "mixed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_recompute_the_output(variant, masks, batch_first, capture, recompute):
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first, **VARIANTS[variant])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    k_dim, v_dim = VARIANTS[variant].get("kdim", 16), VARIANTS[variant].get("vdim", 16)
    query, key, value = torch.randn(3, 5, 16), torch.randn(3, 7, k_dim), torch.randn(3, 7, v_dim)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 4:] = True
    hidden = (torch.rand(5, 7) > 0.6) & (torch.arange(7) != 0)
    options = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "attn2": {"attn_mask": hidden},
        "attn3": {"attn_mask": hidden.repeat(12, 1, 1), "key_padding_mask": padding},
        "float": {"attn_mask": torch.randn(5, 7), "key_padding_mask": torch.randn(3, 7)},
        "mixed": {"attn_mask": torch.randn(12, 5, 7), "key_padding_mask": padding.float() * -1e9},
    }[masks]
    for train, need_weights, grad in itertools.product((True, False), (True, False), (True, False)):
        module.train(train)
        arguments = [t if batch_first else t.transpose(0, 1) for t in (query, key, value)]
        with torch.set_grad_enabled(grad):
            run = lambda: module(*arguments, need_weights=need_weights, **options)[0]  # noqa: E731, B023
            captured = capture(module, run)
            assert torch.equal(captured.result, run())
        (call,) = captured.calls
        result = captured.result if batch_first else captured.result.transpose(0, 1)
        torch.testing.assert_close(explain(call, module, recompute), result.double(), atol=1e-5, rtol=1e-4)
        assert call.valid is None  # queries are not keys here


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_self_attention_knows_its_padding(train, grad, capture, recompute):
    module = nn.MultiheadAttention(16, 4, batch_first=True).train(train)
    x = torch.randn(3, 5, 16)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.set_grad_enabled(grad):
        run = lambda: module(x, x, x, key_padding_mask=padding, need_weights=False)[0]  # noqa: E731
        captured = capture(module, run, context=frozenset({"hidden"}))
        assert torch.equal(captured.result, run())
    (call,) = captured.calls
    assert torch.equal(call.valid, ~padding)
    assert torch.equal(call.hidden, x)
    got, expected = explain(call, module, recompute)[~padding], captured.result[~padding].double()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("bias_kv", [True, False])
def test_causal_hint(bias_kv, need_weights, capture, recompute):
    module = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=bias_kv)
    x = torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    captured = capture(module, lambda: module(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0])
    (call,) = captured.calls
    assert (call.causal_offset == 0) != need_weights
    torch.testing.assert_close(explain(call, module, recompute), captured.result.double(), atol=1e-5, rtol=1e-4)


def test_unbatched(capture, recompute):
    module = nn.MultiheadAttention(16, 4)
    query, key = torch.randn(5, 16), torch.randn(7, 16)
    padding = torch.arange(7) > 4
    captured = capture(module, lambda: module(query, key, key, key_padding_mask=padding)[0])
    (call,) = captured.calls
    torch.testing.assert_close(explain(call, module, recompute)[0], captured.result.double(), atol=1e-5, rtol=1e-4)


def test_selected_sequences_only(capture, recompute):
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(4, 5, 16)
    padding = torch.rand(4, 5) > 0.7
    padding[:, 0] = False
    options = {"key_padding_mask": padding, "attn_mask": torch.rand(16, 5, 5).round().bool() & ~torch.eye(5).bool()}
    options["attn_mask"][:, :, 0] = False
    captured = capture(module, lambda: module(x, x, x, **options)[0], select=lambda batch: torch.tensor([3, 1]))
    (call,) = captured.calls
    assert call.query.shape[0] == 2
    assert torch.equal(call.valid, ~padding[[3, 1]])
    expected = captured.result[[3, 1]].double()
    torch.testing.assert_close(explain(call, module, recompute), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("pad", [True, False])
def test_transformer_encoder(pad, norm_first, grad, train, capture, recompute):
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(train)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(3, 6, 16)
    padding = torch.arange(6)[None] >= torch.tensor([4, 5, 3])[:, None] if pad else None
    with torch.set_grad_enabled(grad):
        expected = model(x, src_key_padding_mask=padding)
        captured = capture(model, lambda: model(x, src_key_padding_mask=padding))
    assert torch.equal(captured.result, expected)
    assert [call.layer for call in captured.calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [site.kind for site in find_attention(model)] == ["multihead"] * 2
    valid = torch.ones(3, 6, dtype=torch.bool) if padding is None else ~padding
    hidden = x
    for call, module in zip(captured.calls, model.layers, strict=True):
        length = call.query.shape[2]  # the nested fast path drops the columns that are padding everywhere
        assert length == 6 or length == 5
        if pad:
            assert torch.equal(call.valid, valid[:, :length])
        attended = explain(call, module.self_attn, recompute)[valid[:, :length]].float()
        rows = hidden[valid]
        if norm_first:
            rows = rows + attended
            rows = rows + module._ff_block(module.norm2(rows))
        else:
            rows = module.norm1(rows + attended)
            rows = module.norm2(rows + module._ff_block(rows))
        hidden = torch.zeros(3, 6, 16).index_put((valid,), rows)
    torch.testing.assert_close(hidden[valid], expected[valid], atol=1e-4, rtol=1e-3)


def test_transformer_decoder_layer(capture):
    model = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval()
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    captured = capture(model, lambda: model(x, memory, memory_key_padding_mask=padding))
    assert [call.layer for call in captured.calls] == ["self_attn", "multihead_attn"]
    assert captured.calls[1].valid is None


def test_fast_path_keeps_its_bits_next_to_modules_of_another_kind(capture):
    class Fused(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), Fused()).eval()
    x = torch.randn(3, 6, 16)
    with torch.no_grad():
        expected = model(x)
        captured = capture(model, lambda: model(x))
    assert torch.equal(captured.result, expected)
    assert [call.layer for call in captured.calls] == ["0.layers.0.self_attn", "0.layers.1.self_attn", "1"]


class Subclass(nn.MultiheadAttention):
    """Overrides forward and comes back to torch's function."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=True)[0]


def test_subclass_with_its_own_forward(capture, recompute):
    module = Subclass(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    captured = capture(module, lambda: module(x))
    (call,) = captured.calls
    assert [site.kind for site in find_attention(module)] == ["sdpa"]
    torch.testing.assert_close(explain(call, module, recompute), captured.result.double(), atol=1e-5, rtol=1e-4)


def test_in_projection_leaves_the_autocast_cache_alone(capture):
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)

    def step():
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            first = module(x, x, x, need_weights=False)[0]
            module(first, first, first, need_weights=False)[0].float().sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    expected = step()
    captured = capture(module, step)
    assert len(captured.calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(captured.result, expected, strict=True))


def test_existing_instance_forward_is_kept():
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    original, seen = module.forward, []

    def mine(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    module.forward = mine
    calls = []
    x = torch.randn(2, 5, 16)
    with attach(module, calls.append, pytest.fail):
        module(x, x, x)
    assert (len(calls), len(seen)) == (1, 1)
    assert module.forward is mine
