"""Models that attend through transformers' attention interface."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from toys import SMALL, spread  # noqa: E402
from transformers import (  # noqa: E402
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from attnmon.capture import attach, find_attention  # noqa: E402


def gpt2(attention="sdpa", **options):
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=1,
        attn_implementation=attention, **options,
    )  # fmt: skip
    return spread(GPT2LMHeadModel(config))


def llama(attention="sdpa", **options):
    return spread(LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attention, **options)))


def mistral(attention="sdpa"):
    return spread(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4, attn_implementation=attention)))


def gemma2(attention="eager"):
    config = Gemma2Config(
        **SMALL, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=3, attn_implementation=attention
    )
    return spread(Gemma2ForCausalLM(config))


def gpt_oss(attention="eager"):
    config = GptOssConfig(
        **SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, attn_implementation=attention
    )
    return spread(GptOssForCausalLM(config))


def bert(attention="sdpa"):
    config = BertConfig(**{k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")})
    config._attn_implementation = attention
    return spread(BertModel(config))


def t5(attention="sdpa"):
    config = T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return spread(T5ForConditionalGeneration(config))


def bart(attention="sdpa"):
    config = BartConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        attn_implementation=attention,
    )  # fmt: skip
    return spread(BartForConditionalGeneration(config))


def tokens(batch=3, length=9, pad=None):
    ids = torch.randint(3, 50, (batch, length))
    mask = torch.ones(batch, length, dtype=torch.long)
    if pad == "left":
        mask[0, :4] = 0
    elif pad == "right":
        mask[0, -4:] = 0
    return {"input_ids": ids} if pad is None else {"input_ids": ids, "attention_mask": mask}


DECODERS = [
    (gpt2, "sdpa", "c_proj"),
    (gpt2, "eager", "c_proj"),
    (llama, "sdpa", "o_proj"),
    (llama, "eager", "o_proj"),
    (mistral, "sdpa", "o_proj"),
    (mistral, "eager", "o_proj"),
    (gemma2, "eager", "o_proj"),
    (gpt_oss, "eager", "o_proj"),
]


def check(captured, recompute, valid_only=None):
    assert len(captured.calls) == len(captured.inner) > 0
    for call, inner in zip(captured.calls, captured.inner, strict=True):
        expected = inner.unflatten(-1, (call.num_heads, -1)).transpose(1, 2).double()
        got = recompute(call)
        if valid_only is not None:
            got, expected = got.transpose(1, 2)[valid_only], expected.transpose(1, 2)[valid_only]
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pad", [None, "left", "right"])
@pytest.mark.parametrize(("make", "attention", "projection"), DECODERS)
def test_arguments_recompute_the_output(make, attention, projection, pad, capture, recompute):
    model = make(attention)
    inputs = tokens(pad=pad)
    # GPT-2's MLP has a projection of the same name, twice as wide as attention's.
    captured = capture(model, lambda: model(**inputs), projection)
    captured.inner = [inner for inner in captured.inner if inner.shape[-1] == 32]
    check(captured, recompute, None if pad is None else inputs["attention_mask"].bool())
    assert not captured.skipped
    assert [call.layer for call in captured.calls] == [site.layer for site in find_attention(model)]
    for call in captured.calls:
        assert call.unexplained == ()
        assert call.output is not None
        if pad is not None:
            assert torch.equal(call.valid, inputs["attention_mask"].bool())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("weights", [True, False])
def test_scale_of_gpt2_variants(weights, attention, capture, recompute):
    model = gpt2(attention, scale_attn_weights=weights, scale_attn_by_inverse_layer_idx=True)
    captured = capture(model, lambda: model(**tokens()), "c_proj")
    captured.inner = [inner for inner in captured.inner if inner.shape[-1] == 32]
    check(captured, recompute)
    assert captured.calls[1].scale == pytest.approx(captured.calls[0].scale / 2)


def test_key_heads_are_not_repeated(capture):
    model = llama()
    call = capture(model, lambda: model(**tokens())).calls[0]
    assert (call.num_heads, call.num_kv_heads) == (4, 2)


def test_causality_under_sdpa_comes_from_the_flag(capture):
    model = llama()
    call = capture(model, lambda: model(**tokens())).calls[0]
    assert call.attn_mask is None
    assert call.causal_offset == 0


def test_softcap_window_and_scale_of_gemma2(capture):
    model = gemma2()
    calls = capture(model, lambda: model(**tokens())).calls
    assert [call.softcap for call in calls] == [2.0, 2.0]
    assert calls[0].scale == pytest.approx(3**-0.5)
    visible = [(call.attn_mask[0, 0] > -1).sum(-1).tolist() for call in calls]
    assert visible == [[1, 2, 3, 4, 4, 4, 4, 4, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def test_sink_is_one_more_key(capture):
    model = gpt_oss()
    call = capture(model, lambda: model(**tokens())).calls[0]
    assert call.key.shape[2] == 10
    assert call.key[:, :, -1].abs().max() == call.value[:, :, -1].abs().max() == 0
    sinks = model.model.layers[0].self_attn.sinks.detach()
    assert torch.equal(call.attn_mask[0, :, 3, -1], sinks)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bidirectional_and_padded(attention, capture, recompute):
    model = bert(attention)
    inputs = tokens(pad="right")
    captured = capture(model, lambda: model(**inputs), "dense")
    captured.inner = [inner for name, inner in zip(range(99), captured.inner, strict=False) if inner.shape[-1] == 32]
    captured.inner = [captured.inner[0], captured.inner[2]]  # each layer: attention's projection, then the MLP's first
    check(captured, recompute)
    assert all(call.causal_offset is None for call in captured.calls)
    assert torch.equal(captured.calls[0].valid, inputs["attention_mask"].bool())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_position_bias_of_t5(attention, capture, recompute):
    model = t5(attention)
    source, target = tokens(length=9, pad="right"), tokens(length=5)
    captured = capture(
        model, lambda: model(**source, decoder_input_ids=target["input_ids"]), "o", context=frozenset({"labels"})
    )
    check(captured, recompute)
    encoder = [call for call in captured.calls if call.layer.startswith("encoder")]
    decoder = [call for call in captured.calls if call.layer.startswith("decoder")]
    assert len(encoder) == 2
    assert len(decoder) == 4
    assert all(torch.equal(call.valid, source["attention_mask"].bool()) for call in encoder)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_cross_attention_of_different_lengths(attention, capture, recompute):
    model = bart(attention)
    source, target = tokens(length=9, pad="right"), tokens(length=5)["input_ids"]
    captured = capture(
        model, lambda: model(**source, labels=target), "out_proj", context=frozenset({"labels", "embedding", "hidden"})
    )
    check(captured, recompute)
    by_layer = {call.layer: call for call in captured.calls}
    cross = by_layer["model.decoder.layers.0.encoder_attn"]
    assert (cross.query.shape[2], cross.key.shape[2]) == (5, 9)
    assert cross.causal_offset is None
    assert torch.equal(cross.labels, target)
    encoder = by_layer["model.encoder.layers.0.self_attn"]
    assert encoder.labels is None
    assert encoder.embedding.shape == encoder.hidden.shape == cross.hidden.shape == (3, 9, 32)
    assert by_layer["model.decoder.layers.0.self_attn"].embedding.shape == (3, 5, 32)


def test_padding_of_the_encoder_is_not_taken_for_the_decoders(capture):
    model = bart()
    source, target = tokens(length=9, pad="right"), tokens(length=9)["input_ids"]
    calls = capture(model, lambda: model(**source, labels=target), context=frozenset({"labels"})).calls
    for call in calls:
        if "decoder" in call.layer:
            assert call.valid is None or call.valid.all()
            assert torch.equal(call.labels, target)
        else:
            assert torch.equal(call.valid, source["attention_mask"].bool())
            assert call.labels is None


def test_context_of_a_language_model(capture):
    model = llama()
    inputs = tokens(pad="left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    extras = frozenset({"hidden", "embedding", "labels"})
    calls = capture(model, lambda: model(**inputs, labels=labels), context=extras).calls
    embedded = model.model.embed_tokens(inputs["input_ids"])
    for call in calls:
        assert torch.equal(call.labels, labels)
        assert torch.equal(call.embedding, embedded)
    normed = model.model.layers[0].input_layernorm(embedded)
    assert torch.equal(calls[0].hidden, normed)
    assert not any(t.requires_grad for call in calls for t in (call.query, call.hidden, call.embedding, call.output))


def test_tokens_from_outside_where_the_model_is_not_told():
    model = llama()
    inputs = tokens(pad="left")
    valid = torch.rand(3, 9) > 0.5
    calls = []
    with attach(model, calls.append, pytest.fail, context=frozenset({"labels"})) as attachment:
        attachment.tokens = (valid, inputs["input_ids"])
        model(inputs["input_ids"])
        model(**inputs)
    untold, told = calls[0], calls[2]
    assert torch.equal(untold.valid, valid)
    assert torch.equal(untold.labels, inputs["input_ids"])
    assert torch.equal(told.valid, inputs["attention_mask"].bool())


def test_padding_is_read_off_the_mask_where_the_model_is_entered_below(capture):
    model = bert()
    inputs = tokens(pad="right")
    hidden = torch.randn(3, 9, 32)
    mask = inputs["attention_mask"].bool()[:, None, None, :]
    call = capture(model, lambda: model.encoder(hidden, attention_mask=mask)).calls[0]
    assert torch.equal(call.valid, inputs["attention_mask"].bool())


@pytest.mark.parametrize("make", [gpt2, llama, gpt_oss])
def test_selected_sequences_only(make, capture, recompute):
    model = make()
    inputs = tokens(pad="left")
    extras = frozenset({"hidden", "embedding", "labels"})
    run = lambda: model(**inputs, labels=inputs["input_ids"])  # noqa: E731
    whole = capture(model, run, context=extras).calls
    some = capture(model, run, context=extras, select=lambda batch: torch.tensor([2, 0])).calls
    for a, b in zip(whole, some, strict=True):
        for name in ("query", "key", "value", "valid", "labels", "hidden", "embedding", "output"):
            if getattr(a, name) is not None:
                assert torch.equal(getattr(a, name)[[2, 0]], getattr(b, name)), name
        torch.testing.assert_close(recompute(a)[[2, 0]], recompute(b))


def test_generation_captures_the_prompt_only(capture):
    model = llama()
    inputs = tokens(pad="left")
    captured = capture(model, lambda: model.generate(**inputs, max_new_tokens=4, do_sample=False))
    assert [call.query.shape[2] for call in captured.calls] == [9, 9]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_continued_with_a_cache(capture, recompute):
    model = llama()
    inputs = tokens()
    cache = model(**inputs, use_cache=True).past_key_values
    more = torch.randint(3, 50, (3, 3))
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, 10] = 0
    captured = capture(model, lambda: model(input_ids=more, attention_mask=mask, past_key_values=cache), "o_proj")
    check(captured, recompute)
    call = captured.calls[0]
    assert (call.query.shape[2], call.key.shape[2]) == (3, 12)
    assert torch.equal(call.valid, mask[:, -3:].bool())


def my_attention(module, query, key, value, attention_mask, scaling=1.0, **kwargs):
    """An eager function of nobody's."""
    weights = (query @ key.transpose(2, 3) * scaling).softmax(-1)
    return (weights @ value).transpose(1, 2), None


class Interfaced(nn.Module):
    """Hands what it is given to the attention interface."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self):
        super().__init__()
        self.config = LlamaConfig(attn_implementation="sdpa")

    def forward(self, query, key, value, mask=None, **options):
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, my_attention)
        return function(self, query, key, value, mask, **options)[0]


@pytest.mark.parametrize("biased", [True, False])
def test_flag_with_more_keys_than_queries_drops_the_rest(biased, capture, recompute):
    model = Interfaced()
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 5)
    options = {"position_bias": torch.randn(1, 3, 4, 7)} if biased else {}
    captured = capture(model, lambda: model(query, key, value, **options))
    (call,) = captured.calls
    assert call.key.shape[2] == call.value.shape[2] == 4
    assert call.causal_offset == 0
    expected = captured.result.transpose(1, 2)
    torch.testing.assert_close(recompute(call), expected.double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["one query", "not causal", "bool", "bool and bias", "heads", "scaling"])
def test_ways_to_call_the_interface(case, capture, recompute):
    model = Interfaced()
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 5)
    mask = torch.rand(2, 1, 4, 7) > 0.4
    mask[..., 0] = True
    arguments, options = {
        "one query": ((query[:, :, :1], key, value), {}),
        "not causal": ((query, key, value), {"is_causal": False}),
        "bool": ((query, key, value, mask), {}),
        "bool and bias": ((query, key, value, mask), {"position_bias": torch.randn(1, 3, 4, 7)}),
        "heads": ((query, key, value, torch.randn(2, 3, 4, 7)), {}),
        "scaling": ((query, key, value, mask), {"scaling": 0.1, "dropout": 0.0}),
    }[case]
    captured = capture(model, lambda: model(*arguments[:4], **options))
    (call,) = captured.calls
    expected = captured.result.transpose(1, 2)
    assert torch.equal(call.output, expected)
    torch.testing.assert_close(recompute(call), expected.double(), atol=1e-5, rtol=1e-4)


def test_eager_function_of_any_name(capture, recompute):
    model = Interfaced()
    model.config._attn_implementation = "eager"
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8)
    captured = capture(model, lambda: model(query, key, key, scaling=0.3))
    (call,) = captured.calls
    assert "my_attention" in call.unexplained[0]
    torch.testing.assert_close(recompute(call), captured.result.transpose(1, 2).double(), atol=1e-5, rtol=1e-4)


def test_scaling_per_head_is_reported(capture):
    model = Interfaced()
    model.config._attn_implementation = "eager"
    query = torch.randn(2, 3, 4, 8)

    captured = capture(model, lambda: model(query, query, query, scaling=torch.rand(3, 1, 1)))
    assert captured.calls == []
    assert "`scaling` is a tensor of shape (3, 1, 1)" in captured.skipped[""][0]


def test_kernel_below_the_interface_is_not_a_second_call():
    class Own(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(Interfaced(), Own())
    x = torch.randn(2, 3, 4, 8)
    layers = []

    def observe(call):
        layers.append(call.layer)
        nn.functional.scaled_dot_product_attention(call.query, call.key, call.value)  # nor is the observer's own

    with attach(model, observe, pytest.fail):
        model[1](model[0](x, x, x))
    assert layers == ["0", "1"]


def test_one_token_is_not_a_decode_step(capture):
    model = llama()
    calls = capture(model, lambda: [model(**tokens(length=1)) for _ in range(2)]).calls
    assert [call.query.shape[2] for call in calls] == [1] * 4


def test_dropout_hides_the_output_but_not_the_call(capture):
    model = gpt2("eager", attn_pdrop=0.5).train()
    calls = capture(model, lambda: model(**tokens())).calls
    assert [call.output for call in calls] == [None, None]
    assert capture(model.eval(), lambda: model(**tokens())).calls[0].output is not None


def test_gpt2_reordered_attention_is_reported(capture):
    model = gpt2("eager", reorder_and_upcast_attn=True)
    captured = capture(model, lambda: model(**tokens()))
    assert captured.calls == []
    assert "reorder_and_upcast_attn" in captured.skipped["transformer.h.1.attn"][0]


def test_flex_attention_is_reported_once_per_layer(capture):
    model = llama()
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    name = "my_flex"
    ALL_ATTENTION_FUNCTIONS.register(name, original)
    try:
        model.config._attn_implementation = name
        captured = capture(model, lambda: [model(**tokens()) for _ in range(2)])
    finally:
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[name]
    assert captured.calls == []
    assert list(captured.skipped) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(len(reasons) == 1 and "my_flex" in reasons[0] for reasons in captured.skipped.values())


@pytest.fixture
def warm_attention():
    """A registered attention function that has an argument of its own."""

    def warm(module, query, key, value, attention_mask, scaling=None, dropout=0.0, temperature=2.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        scores = query @ key.transpose(2, 3) * scaling / temperature
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, float("-inf"))
        weights = nn.functional.dropout(scores.softmax(-1), p=dropout, training=module.training)
        return (weights @ value).transpose(1, 2).contiguous(), None

    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    ALL_ATTENTION_FUNCTIONS.register("warm", warm)
    ALL_MASK_ATTENTION_FUNCTIONS.register("warm", sdpa_mask)
    yield warm
    del mapping["warm"]
    del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["warm"]


def test_unknown_function_is_named_and_comes_with_its_output(warm_attention, capture, recompute):
    model = llama()
    model.config._attn_implementation = "warm"
    captured = capture(model, lambda: model(**tokens(), temperature=3.0), "o_proj")
    call = captured.calls[0]
    assert call.unexplained[0] == "temperature"
    assert "warm" in call.unexplained[1]
    inner = captured.inner[0].unflatten(-1, (4, -1)).transpose(1, 2)
    assert torch.equal(call.output, inner)
    assert (recompute(call) - inner).abs().max() > 1e-3  # the output does not confirm it


def test_unknown_function_under_dropout_is_skipped(warm_attention, capture):
    model = llama(attention_dropout=0.5).train()
    model.config._attn_implementation = "warm"
    captured = capture(model, lambda: model(**tokens(), temperature=3.0))
    assert captured.calls == []
    assert "`temperature`" in captured.skipped["model.layers.0.self_attn"][0]


def test_local_registry_of_a_model_file(capture, recompute):
    config = transformers.DogeConfig(**SMALL, attn_implementation="sdpa")
    model = spread(transformers.DogeForCausalLM(config))
    from transformers.models.doge import modeling_doge

    before = dict(modeling_doge.ALL_ATTENTION_FUNCTIONS._local_mapping)
    captured = capture(model, lambda: model(**tokens()), "o_proj")
    check(captured, recompute)
    assert modeling_doge.ALL_ATTENTION_FUNCTIONS._local_mapping == before


def test_unwatched_models_pass_through():
    watched, other = llama(), llama()
    inputs = tokens()
    expected = other(**inputs).logits
    calls = []
    with attach(watched, calls.append, pytest.fail):
        assert torch.equal(other(**inputs).logits, expected)
    assert calls == []


def test_only_the_attending_layers_are_sites():
    sites = find_attention(gpt2())
    assert [(s.layer, s.kind, s.class_name) for s in sites] == [
        ("transformer.h.0.attn", "huggingface", "GPT2Attention"),
        ("transformer.h.1.attn", "huggingface", "GPT2Attention"),
    ]
