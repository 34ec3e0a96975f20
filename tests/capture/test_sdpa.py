"""Modules that call `scaled_dot_product_attention` themselves."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as fused

from attnmon.capture import attach, describe_search, find_attention


class NanoAttention(nn.Module):
    """As in nanoGPT: one projection, causal by flag."""

    def __init__(self, width=32, heads=4, dropout=0.0):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """As in litgpt: grouped queries, an explicit mask, a scale of its own, attention in a method."""

    def __init__(self, width=32, heads=4, groups=2, native=True):
        super().__init__()
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * groups * (width // heads))
        self.c_proj = nn.Linear(width, width)
        self.heads, self.groups, self.native = heads, groups, native

    def forward(self, x, mask=None):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.groups, -1)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        if not self.native:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        return self.c_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    def attend(self, q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, mask, scale=0.7, enable_gqa=self.native)


def helper(q, k, v):
    return fused(q, k, v)


class ImageAttention(nn.Module):
    """As in timm: bidirectional; through a helper function and an alias."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.c_proj(helper(q, k, v).transpose(1, 2).flatten(2))


class PartialAttention(ImageAttention):
    """The kernel as an attribute of the instance."""

    def __init__(self, width=32, heads=4):
        super().__init__(width, heads)
        self.attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.c_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attn = attention
        self.mlp = nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


def net(*attentions):
    return nn.Sequential(*[Block(attention) for attention in attentions])


MODELS = {
    "nano": lambda: net(NanoAttention(), NanoAttention(heads=2)),
    "grouped": lambda: net(GroupedAttention(), GroupedAttention(groups=1)),
    "repeated": lambda: net(GroupedAttention(native=False)),
    "image": lambda: net(ImageAttention(), ImageAttention()),
    "partial": lambda: net(PartialAttention()),
}


@pytest.mark.parametrize("name", MODELS)
def test_arguments_recompute_the_output(name, capture, recompute):
    model = MODELS[name]().eval()
    captured = capture(model, lambda: model(torch.randn(3, 7, 32)), "c_proj")
    sites = find_attention(model)
    assert [site.layer for site in sites] == [f"{i}.attn" for i in range(len(model))]
    assert [call.layer for call in captured.calls] == [site.layer for site in sites]
    for call, inner in zip(captured.calls, captured.inner, strict=True):
        inner = inner.unflatten(-1, (call.num_heads, -1)).transpose(1, 2)
        torch.testing.assert_close(recompute(call), inner.double(), atol=1e-5, rtol=1e-4)
        assert torch.equal(call.output, inner)


def test_heads_may_differ_from_layer_to_layer(capture):
    model = net(NanoAttention(heads=2), nn.Identity(), GroupedAttention(groups=1), NanoAttention(heads=8)).eval()
    captured = capture(model, lambda: model(torch.randn(2, 5, 32)))
    assert [(c.layer, c.num_heads, c.num_kv_heads) for c in captured.calls] == [
        ("0.attn", 2, 2),
        ("2.attn", 4, 1),
        ("3.attn", 8, 8),
    ]


class Direct(nn.Module):
    """Calls the kernel with what it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


def qkv(*lead, q_len=4, kv_len=6, dim=8, v_dim=5):
    return torch.randn(*lead, q_len, dim), torch.randn(*lead, kv_len, dim), torch.randn(*lead, kv_len, v_dim)


MASKS = {
    "none": lambda lead: {},
    "causal": lambda lead: {"is_causal": True},
    "bool": lambda lead: {"attn_mask": torch.rand(4, 6) > 0.3},
    "float": lambda lead: {"attn_mask": torch.randn(*lead, 4, 6)},
    "rows": lambda lead: {"attn_mask": torch.randn(*lead[:-1], 1, 1, 6) if len(lead) > 1 else torch.randn(6)[None]},
    "scale": lambda lead: {"scale": 0.25},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (3, 4, 2), (2, 3, 2, 2)])
def test_every_number_of_dimensions(lead, mask, capture, recompute):
    model = Direct()
    q, k, v = qkv(*lead)
    options = MASKS[mask](lead)
    captured = capture(model, lambda: model(q, k, v, **options))
    (call,) = captured.calls
    heads = lead[-1] if len(lead) > 1 else 1
    expected = captured.result.reshape(-1, heads, 4, 5)
    assert torch.equal(call.output, expected)
    torch.testing.assert_close(recompute(call), expected.double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lead", [(3,), (3, 2), (3, 4, 2)])
def test_selection_with_a_mask_per_sequence(lead, capture, recompute):
    model = Direct()
    q, k, v = qkv(*lead)
    mask = torch.randn(*lead, 4, 6)
    captured = capture(model, lambda: model(q, k, v, attn_mask=mask), select=lambda batch: torch.tensor([batch - 1, 1]))
    (call,) = captured.calls
    assert call.query.shape[0] == call.attn_mask.shape[0] == 2
    torch.testing.assert_close(recompute(call), call.output.double(), atol=1e-5, rtol=1e-4)


def test_upper_left_causality_sees_nothing_above_the_diagonal(capture, recompute):
    model = Direct()
    q, k, v = qkv(2, 2)
    call = capture(model, lambda: model(q, k, v, is_causal=True)).calls[0]
    assert call.causal_offset == 0
    torch.testing.assert_close(recompute(call)[:, :, 0], v[:, :, 0].double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("make", "offset"), [(causal_upper_left, 0), (causal_lower_right, 2)])
def test_causal_bias_objects(make, offset, capture, recompute):
    model = Direct()
    q, k, v = qkv(2, 2)
    captured = capture(model, lambda: model(q, k, v, make(4, 6)))
    (call,) = captured.calls
    assert (call.causal_offset, call.attn_mask) == (offset, None)
    torch.testing.assert_close(recompute(call), captured.result.double(), atol=1e-5, rtol=1e-4)


def test_batch_of_one_is_broadcast(capture, recompute):
    model = Direct()
    q, k, v = qkv(3, 2)
    captured = capture(model, lambda: model(q[:1], k, v[:, :1]))
    (call,) = captured.calls
    torch.testing.assert_close(recompute(call), captured.result.double(), atol=1e-5, rtol=1e-4)


def test_dropout_hides_the_output_but_not_the_scores(capture):
    model = net(NanoAttention(dropout=0.5)).train()
    (call,) = capture(model, lambda: model(torch.randn(2, 5, 32))).calls
    assert call.output is None


def test_padding_from_the_mask_but_not_from_a_cross_attention(capture):
    class Reader(nn.Module):  # nothing in its name says that it looks elsewhere
        def forward(self, x, memory, mask):
            return scaled_dot_product_attention(x[:, None], memory[:, None], memory[:, None], mask)

    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0, 3:] = False
    mask = keep[:, None, None, :]
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    model = GroupedAttention()
    assert torch.equal(capture(model, lambda: model(torch.randn(2, 5, 32), mask)).calls[0].valid, keep)
    cross = Reader()
    assert capture(cross, lambda: cross(x, memory, mask)).calls[0].valid is None


def test_own_model_with_attention_mask_argument(capture):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 32)
            self.position = nn.Embedding(5, 32)
            self.attn = GroupedAttention()

        def forward(self, ids, attention_mask=None, labels=None):
            x = self.embed(ids) + self.position(torch.arange(5)[None])
            return self.attn(x, None if attention_mask is None else attention_mask[:, None, None, :].bool())

    model = Model()
    ids = torch.randint(0, 11, (2, 5))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    extras = frozenset({"embedding", "hidden", "labels"})
    (call,) = capture(model, lambda: model(ids, mask, labels=ids), context=extras).calls
    assert torch.equal(call.valid, mask.bool())
    assert torch.equal(call.labels, ids)
    assert torch.equal(call.embedding, model.embed(ids))
    assert call.hidden.shape == (2, 5, 32)


def test_calls_from_elsewhere_are_not_the_models():
    model, other = net(NanoAttention()), net(NanoAttention())
    calls = []
    with attach(model, calls.append, pytest.fail):
        other(torch.randn(2, 5, 32))
        F.scaled_dot_product_attention(*qkv(2, 2))
    assert calls == []


def test_attention_of_the_observer_is_not_captured():
    model = net(NanoAttention())
    calls = []

    def observe(call):
        calls.append(call)
        F.scaled_dot_product_attention(call.query, call.key, call.value)

    with attach(model, observe, pytest.fail):
        model(torch.randn(2, 5, 32))
    assert len(calls) == 1


def test_module_found_by_nobody_is_captured_all_the_same(capture):
    kernel = F.scaled_dot_product_attention

    class Hidden(nn.Module):
        def forward(self, x):
            return {"attend": kernel}["attend"](x, x, x)

    class Deeper(nn.Module):
        kernels = ()

        def forward(self, x):
            return self.kernels[0](x, x, x)

    model = Deeper()
    model.kernels = [kernel]
    assert find_attention(model) == []
    assert len(capture(model, lambda: model(torch.randn(1, 2, 5, 8))).calls) == 1
    assert len(find_attention(Hidden())) == 1  # through the closure


def test_search_says_what_it_found_instead():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert find_attention(model) == []
    text = describe_search(model)
    assert "scaled_dot_product_attention" in text
    assert "found 3 modules of types Linear x2, Sequential" in text


def test_shared_module_is_one_site():
    attention = NanoAttention()
    assert [site.layer for site in find_attention(net(attention, attention))] == ["0.attn"]


def test_wrappers_leave_no_trace_in_the_names():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    block = Block(NanoAttention())
    block.attn = nn.Module()
    block.attn._checkpoint_wrapped_module = NanoAttention()
    assert [site.layer for site in find_attention(Wrapper(block))] == ["attn"]
    named = nn.Module()
    named.module = nn.Module()
    named.inner = nn.Module()
    named.inner.module = NanoAttention()
    assert [site.layer for site in find_attention(named)] == ["inner.module"]


def test_unreadable_kernels_are_reported(capture):
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def forward(self, x):
            return flex_attention(x, x, x)

    model = nn.Sequential(Flexible())
    captured = capture(model, lambda: None)
    assert "flex_attention" in captured.skipped["0"][0]
    assert "flex_attention" in describe_search(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_reported(capture):
    model = Direct()
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    nested = nested.transpose(1, 2)
    captured = capture(model, lambda: model(nested, nested, nested))
    assert captured.calls == []
    assert "nested" in captured.skipped[""][0]
