"""The truncated model, against models whose attention was written anew with each row's largest weights only."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from toys import SMALL, NanoModel, spread, tiny_gpt2
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnmon import rows
from attnmon.analysis.intervention import EffectiveSetSize, _search, effective_set_size, truncated_loss
from attnmon.capture import _state


def gpt2(attention="sdpa"):
    return spread(tiny_gpt2(heads=4, attn_implementation=attention))


def llama(attention="sdpa"):
    return spread(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation=attention)))


def mistral(attention="sdpa"):
    config = transformers.MistralConfig(**SMALL, sliding_window=7, attn_implementation=attention)
    return spread(transformers.MistralForCausalLM(config))


def gpt_oss(attention="eager"):
    config = transformers.GptOssConfig(
        **SMALL, sliding_window=7, num_local_experts=2, num_experts_per_tok=1, attn_implementation=attention,
        experts_implementation="eager",
    )  # fmt: skip
    return spread(transformers.GptOssForCausalLM(config))


def nano():
    torch.manual_seed(0)
    return spread(NanoModel())


MODELS = {
    "gpt2-sdpa": gpt2,
    "gpt2-eager": lambda: gpt2("eager"),
    "llama-sdpa": llama,
    "llama-eager": lambda: llama("eager"),
    "mistral-sdpa": mistral,
    "gpt_oss-eager": gpt_oss,
}


@pytest.fixture(autouse=True)
def quiet():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only wait for the other threads
    yield
    torch.set_num_threads(threads)
    assert (_state.ACTIVE, _get_current_function_mode_stack()) == ([], [])


@pytest.fixture
def ids():
    return torch.randint(3, 61, (2, 24))


def own_text(model, ids):
    """Tokens that the model itself finds likely, so that it predicts them worse when anything is taken from it."""
    text = ids[:, :1]
    while text.shape[1] < ids.shape[1]:
        logits = model(text).logits[:, -1].detach()
        text = torch.cat([text, torch.multinomial((2 * logits).softmax(-1), 1)], dim=1)
    return text


def keep_largest(row, top_n, renormalize):
    """One row of weights in NumPy; the oracle of what is kept."""
    kept = np.zeros_like(row)
    chosen = sorted(range(len(row)), key=lambda j: (-row[j], j))[:top_n]
    kept[chosen] = row[chosen]
    return kept / kept.sum() if renormalize and (row > 0).sum() > top_n else kept


def oracle_attention(query, key, value, mask, scale, top_n, renormalize, sinks=None):
    """Attention in float64, row by row. `mask` is bool or additive, and says everything about visibility."""
    batch, heads, q_len, _ = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(batch, heads, q_len, value.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            scores = query[b, h].double() @ key[b, h // group].double().T * scale
            kind = mask[min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1)]
            visible = kind if kind.dtype == torch.bool else kind > -1e4
            carried = value[b, h // group].double()
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].double().expand(q_len, 1)], dim=1)
                visible = torch.cat([visible, torch.ones(q_len, 1, dtype=torch.bool)], dim=1)
                carried = torch.cat([carried, torch.zeros(1, carried.shape[1], dtype=torch.float64)])
            for i in range(q_len):
                if not visible[i].any():
                    out[b, h, i] = carried.mean(0)  # a padding query, whose output reaches nobody
                    continue
                weights = scores[i].masked_fill(~visible[i], -math.inf).softmax(0).numpy()
                out[b, h, i] = torch.from_numpy(keep_largest(weights, top_n, renormalize)) @ carried
    return out


@pytest.fixture
def oracle_of():
    """``oracle_of(model, top_n, renormalize)`` is a copy that attends as the oracle does, registered as "oracle"."""
    settings = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        sinks = getattr(module, "sinks", None)
        out = oracle_attention(query, key, value, attention_mask, scaling, sinks=sinks, **settings)
        return out.transpose(1, 2).to(query.dtype).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("oracle", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])

    def make(model, top_n, renormalize):
        settings.update(top_n=top_n, renormalize=renormalize)
        twin = copy.deepcopy(model)
        twin.config._attn_implementation = "oracle"
        return twin.eval()

    yield make
    del type(ALL_ATTENTION_FUNCTIONS)._global_mapping["oracle"]
    del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["oracle"]


def plain_loss(model, ids, mask=None):
    """Mean next-token negative log-likelihood, one sequence and token at a time."""
    options = {} if mask is None else {"attention_mask": mask.long()}
    with torch.no_grad():
        out = model(ids, **options)
    log_p = (out if isinstance(out, torch.Tensor) else out.logits).double().log_softmax(-1)
    losses = [
        -log_p[b, i, ids[b, i + 1]].item()
        for b in range(ids.shape[0])
        for i in range(ids.shape[1] - 1)
        if mask is None or (mask[b, i] and mask[b, i + 1])
    ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_attention_written_anew(name, renormalize, ids, oracle_of):
    model = MODELS[name]().double()
    for top_n in (1, 3, 12):
        expected = plain_loss(oracle_of(model, top_n, renormalize), ids)
        # Llama's eager function takes the softmax in float32, and rows that see few keys keep what it returned.
        tolerance = 1e-6 if name == "llama-eager" else 1e-9
        assert truncated_loss(model, ids, top_n, renormalize=renormalize) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2-eager", "llama-sdpa"])
def test_padded_batches(name, pad, ids, oracle_of):
    model = MODELS[name]().double()
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, slice(0, 5) if pad == "left" else slice(-5, None)] = False
    expected = plain_loss(oracle_of(model, 3, False), ids, mask)
    assert truncated_loss(model, ids, 3, mask=mask) == pytest.approx(expected, abs=1e-9)
    assert truncated_loss(model, ids, None, mask=mask) == pytest.approx(plain_loss(model, ids, mask), abs=1e-12)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_n", [1, 3, 12])
def test_module_that_calls_the_kernel_itself(top_n, renormalize, ids, monkeypatch):
    model = nano().double()
    got = truncated_loss(model, ids, top_n, renormalize=renormalize)

    def attention(q, k, v, is_causal, dropout_p):
        mask = torch.ones(1, 1, q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return oracle_attention(q, k, v, mask, q.shape[-1] ** -0.5, top_n, renormalize)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    assert got == pytest.approx(plain_loss(model, ids), abs=1e-9)


def test_ties_go_to_the_lower_index(ids, monkeypatch):
    model = nano().double()
    for block in model.blocks:
        with torch.no_grad():
            block.c_attn.weight[:16] = 0  # all scores alike
            block.c_attn.bias[:16] = 0
    got = {n: truncated_loss(model, ids, n) for n in (1, 4)}

    for n, loss in got.items():

        def attention(q, k, v, is_causal, dropout_p, n=n):
            rows = [v[:, :, : min(n, i + 1)].sum(2) / (i + 1) for i in range(v.shape[2])]
            return torch.stack(rows, dim=2)

        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", attention)
            assert loss == pytest.approx(plain_loss(model, ids), abs=1e-12)


def test_ties_in_part():
    from attnmon.analysis.intervention import _keep_largest

    weights = torch.tensor([[0.2, 0.3, 0.2, 0.1, 0.2], [0.5, 0.0, 0.0, 0.5, 0.0], [0.1, 0.2, 0.4, 0.2, 0.1]])
    expected = {
        1: [[0, 0.3, 0, 0, 0], [0.5, 0, 0, 0, 0], [0, 0, 0.4, 0, 0]],
        2: [[0.2, 0.3, 0, 0, 0], [0.5, 0, 0, 0.5, 0], [0, 0.2, 0.4, 0, 0]],
        3: [[0.2, 0.3, 0.2, 0, 0], [0.5, 0, 0, 0.5, 0], [0, 0.2, 0.4, 0.2, 0]],
        4: [[0.2, 0.3, 0.2, 0, 0.2], [0.5, 0, 0, 0.5, 0], [0.1, 0.2, 0.4, 0.2, 0]],
    }
    for top_n, kept in expected.items():
        torch.testing.assert_close(_keep_largest(weights, top_n), torch.tensor(kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*MODELS, "nano"])
def test_enough_keys_leave_the_model_whole(name, dtype, ids):
    model = (MODELS | {"nano": nano})[name]().to(dtype)
    whole = truncated_loss(model, ids, None)
    assert truncated_loss(model, ids, ids.shape[1] + (name == "gpt_oss-eager")) == whole
    assert whole == pytest.approx(plain_loss(model, ids), abs=1e-9)
    # all but one key of the longest row
    assert truncated_loss(model, ids, ids.shape[1] - 1) == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("name", ["llama-sdpa", "gpt_oss-eager"])
def test_float32_is_near_float64(name, ids):
    model = MODELS[name]()
    for top_n in (1, 4, 20):
        single = truncated_loss(model, ids, top_n)
        assert truncated_loss(copy.deepcopy(model).double(), ids, top_n) == pytest.approx(single, rel=1e-5)
    if name == "gpt_oss-eager":
        return  # its router may choose otherwise
    assert truncated_loss(copy.deepcopy(model).bfloat16(), ids, 4) == pytest.approx(
        truncated_loss(model, ids, 4), rel=0.05
    )


@pytest.mark.parametrize("name", ["llama-sdpa", "mistral-sdpa", "gpt_oss-eager"])
def test_blocks_of_rows_make_no_difference(name, ids, monkeypatch):
    model = MODELS[name]().double()
    expected = truncated_loss(model, ids, 3)
    for elements in (1, 1500):
        monkeypatch.setattr(rows, "_CHUNK_ELEMENTS", elements)
        assert truncated_loss(model, ids, 3) == pytest.approx(expected, abs=1e-12)


def test_sequences_do_not_mix(ids):
    model = llama().double()
    alone = [truncated_loss(model, ids[b : b + 1], 3) for b in range(2)]
    assert truncated_loss(model, ids, 3) == pytest.approx(sum(alone) / 2, abs=1e-12)


def test_rows_that_see_no_more_keys_are_left_alone(ids):
    windowed = mistral()  # a window of 7: all rows of every layer
    assert truncated_loss(windowed, ids, 7) == truncated_loss(windowed, ids, None)
    assert truncated_loss(windowed, ids, 6) != truncated_loss(windowed, ids, None)
    model = llama()
    assert truncated_loss(model, ids[:, :7], 7) == truncated_loss(model, ids[:, :7], None)
    assert truncated_loss(model, ids, 7) != truncated_loss(model, ids, None)


def test_sink_is_one_of_the_keys(ids):
    model = gpt_oss().double()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(50.0)  # takes all weight: one key is enough, and it is the sink
    whole = truncated_loss(model, ids, None)
    assert truncated_loss(model, ids, 1) == pytest.approx(whole, abs=1e-9)
    assert effective_set_size(model, ids).longest_row == 25


def test_size_is_the_least_that_holds_and_taus_share_losses(ids):
    model = llama()
    ids = own_text(model, ids)
    taus = (0.3, 0.001, 0.05)
    result = effective_set_size(model, ids, taus)
    assert result.tau == taus
    assert result.longest_row == 24
    assert result.loss == truncated_loss(model, ids, None) == result.losses[24]
    assert list(result.losses) == sorted(result.losses)
    assert {1, 2, 4, 8, 16, 24} <= set(result.losses)
    for size, tau in zip(result.size, taus, strict=True):
        assert all(loss <= (1 + tau) * result.loss for n, loss in result.losses.items() if n >= size)
        assert size == 1 or result.losses[size - 1] > (1 + tau) * result.loss
    for n, loss in result.losses.items():
        assert truncated_loss(model, ids, n) == loss
    one = effective_set_size(model, ids, 0.05)
    assert isinstance(one, EffectiveSetSize)
    assert (one.tau, one.size, one.renormalize) == (0.05, result.size[2], False)
    assert one.size != effective_set_size(model, ids, 0.05, renormalize=True).size


def test_given_grid(ids):
    model = llama()
    ids = own_text(model, ids)
    result = effective_set_size(model, ids, (1e-6, 0.3, 1000.0), top_n=(5, 2, 5, 3))
    assert list(result.losses) == [2, 3, 5]
    assert result.size[0] is None
    assert result.size[2] == 2
    assert effective_set_size(model, ids, 1e-9, top_n=24).size == 24


def searched(loss_of, longest, limits):
    losses, asked = {}, []

    def evaluate(n):
        asked.append(n)
        losses[n] = loss_of(n)

    _search(evaluate, losses, 1.0, limits, lambda: longest)
    assert len(asked) == len(set(asked))
    return losses, asked


@pytest.mark.parametrize("longest", [1, 2, 3, 64, 100])
def test_search_finds_the_least_of_a_falling_loss(longest):
    from attnmon.analysis.intervention import _bracket

    for least in range(1, longest + 1):
        losses, asked = searched(lambda n, least=least: 1.0 if n >= least else 2.0, longest, [1.5])
        assert _bracket(losses, 1.5) == (least - 1, least)
        assert len(asked) <= 2 * math.ceil(math.log2(longest)) + 1


def test_search_of_a_loss_that_rises_again():
    from attnmon.analysis.intervention import _bracket

    holds = {*range(5, 20), *range(40, 100)}
    losses, asked = searched(lambda n: 1.0 if n in holds else 2.0, 100, [1.5])
    assert losses[8] == losses[16] == 1.0  # N = 5 would do, but N = 32 does not
    assert _bracket(losses, 1.5) == (39, 40)
    # a second limit, whose evaluations show a failure of the first above what the first alone would have found
    loss_of = lambda n: 2.0 if n < 3 or n == 40 else 1.2 if n < 50 else 1.0  # noqa: E731
    losses, asked = searched(loss_of, 100, [1.5, 1.1])
    assert _bracket(losses, 1.1) == (49, 50)
    assert _bracket(losses, 1.5) == ((40, 41) if 40 in asked else (2, 3))
    losses, _ = searched(lambda n: math.nan if n < 7 else 1.0, 100, [1.5])
    assert _bracket(losses, 1.5) == (6, 7)


def state_of(model):
    functions = ALL_ATTENTION_FUNCTIONS
    state = {
        "modes": list(_get_current_function_mode_stack()),
        "local": dict(functions._local_mapping),
        "global": dict(functions._global_mapping),
        "registry": {key: value for key, value in vars(functions).items() if key != "_local_mapping"},
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "grad": torch.is_grad_enabled(),
        "values": [(name, tensor.double().sum().item()) for name, tensor in model.state_dict().items()],
    }
    for name, module in model.named_modules():
        state[f"{name}.dict"] = {key: id(value) for key, value in vars(module).items()}
        state[f"{name}.hooks"] = (dict(module._forward_hooks), dict(module._forward_pre_hooks), module.training)
    return state


@pytest.mark.parametrize("name", ["gpt2-eager", "llama-sdpa", "nano"])
def test_model_is_left_as_found(name, ids):
    model = (MODELS | {"nano": nano})[name]().train()
    next(iter(model.children())).eval()  # modes that differ stay different
    before = state_of(model)
    effective_set_size(model, ids, 0.1)
    truncated_loss(model, ids, 2, renormalize=True)
    assert state_of(model) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["gpt2-eager", "llama-sdpa", "nano"])
def test_model_is_left_as_found_after_an_error(name, error, ids):
    class Breaking(nn.Module):
        runs = 0

        def forward(self, x):
            Breaking.runs += 1
            if Breaking.runs == 3:
                raise error
            return x

    model = (MODELS | {"nano": nano})[name]().train()
    head = "head" if name == "nano" else "lm_head"
    setattr(model, head, nn.Sequential(Breaking(), getattr(model, head)))
    before = state_of(model)
    with pytest.raises(error):
        effective_set_size(model, ids)
    assert Breaking.runs == 3
    assert state_of(model) == before


def test_progress_goes_to_stderr(ids, capsys):
    effective_set_size(nano(), ids, top_n=(2, 3), progress=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["all keys", "N = 2", "N = 3"]
    effective_set_size(nano(), ids, top_n=2)
    assert capsys.readouterr().err == ""


def test_compiled_model_runs_as_it_was_written(ids):
    model = nano()
    compiled = torch.compile(model, backend="eager")
    assert truncated_loss(compiled, ids, 3) == truncated_loss(model, ids, 3)


def test_modules_that_never_run_are_no_obstacle(ids):
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        max_position_embeddings=64,
    )  # fmt: skip
    model = spread(transformers.BartForCausalLM(config))  # its cross-attention waits for an encoder
    assert truncated_loss(model, ids, 2) != truncated_loss(model, ids, None)


def test_logits_in_a_tuple_or_a_dict(ids):
    class Wrapped(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.model, self.kind = nano(), kind

        def forward(self, ids):
            logits = self.model(ids)
            return (logits, None) if self.kind == "tuple" else {"logits": logits}

    expected = truncated_loss(nano(), ids, 2)
    assert truncated_loss(Wrapped("tuple"), ids, 2) == truncated_loss(Wrapped("dict"), ids.int(), 2) == expected


class Attention(nn.Module):
    """One layer that attends in a way of its own."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return x + self.attend(x[:, None])[:, 0]


def by_kernel(x, **options):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True, **options)


def by_hand(x):
    if x.shape[1] > 1:
        return by_kernel(x)
    scores = (x @ x.mT).masked_fill(~torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ x


def model_of(*layers):
    return nn.Sequential(nn.Embedding(61, 16), *layers, nn.Linear(16, 61))


class Encoder(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Embedding(61, 16), nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), nn.Linear(16, 61)
        )


def bert():
    config = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
    return transformers.BertForMaskedLM(transformers.BertConfig(**config))


def gpt2_reordered():
    return tiny_gpt2(attn_implementation="eager", reorder_and_upcast_attn=True)


def broken():
    model = nano()
    model.head.weight.data.fill_(math.nan)
    return model


def test_queries_of_padding_may_see_anything(ids):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model_of()

        def forward(self, ids, attention_mask=None):
            x = self.model[0](ids)[:, None]
            mask = torch.ones(24, 24, dtype=torch.bool).tril() | (attention_mask == 0)[:, None, :, None]
            return self.model[1](F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0])

    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 20:] = False
    model = Padded()
    assert truncated_loss(model, ids, 2, mask=mask) != truncated_loss(model, ids, None, mask=mask)
    mask[0, 20:] = True
    model.forward = lambda ids, attention_mask: Padded.forward(model, ids, torch.arange(24).expand(2, -1) < 20)
    with pytest.raises(ValueError, match="whose queries see no key behind them"):
        truncated_loss(model, ids, 2, mask=mask)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (bert, r"Expected `model` to be a causal language model, .* `bert.encoder.layer.0.attention.self` do"),
        (lambda: llama().model, r"Expected `model` to return logits \(2, 24, vocabulary\) .* but got BaseModelOutput"),
        (lambda: nn.Sequential(llama().lm_head, nn.Identity()), None),
        (
            lambda: model_of(nn.Linear(16, 16)),
            r"attention that can be replaced, but got Sequential: looked for modules",
        ),
        (Encoder, r"but that of `1.self_attn` is not: it attends inside nn.MultiheadAttention"),
        (
            lambda: model_of(Attention(by_kernel), Attention(by_hand)),
            r"but that of `2` is not: it ran, and its attention was not seen",
        ),
        (
            lambda: model_of(Attention(lambda x: by_kernel(x, dropout_p=0.1))),
            r"but that of `1` is not: its output cannot be compared .* it applies dropout in eval mode",
        ),
        (gpt2_reordered, r"that of `transformer.h.0.attn` is not: `reorder_and_upcast_attn` with eager"),
        (lambda: nn.Sequential(nn.Embedding(61, 16), Attention(by_kernel)), r"to be below the size of the vocabulary"),
        (broken, None),
    ],
)
def test_models_that_cannot_be_measured(make, text, ids):
    model = make()
    before = state_of(model)
    if text is None:
        with pytest.raises((ValueError, RuntimeError)):
            effective_set_size(model, ids)
    else:
        for measure in (lambda: truncated_loss(model, ids, 2), lambda: effective_set_size(model, ids)):
            with pytest.raises(ValueError, match=f"(?s){text}"):
                measure()
    assert str(state_of(model)) == str(before)  # NaN is not equal to itself


def test_loss_that_is_not_finite(ids):
    with pytest.raises(ValueError, match="Expected the loss of the whole model to be finite, but got nan"):
        effective_set_size(broken(), ids)


def test_function_that_is_not_known_is_refused(ids, oracle_of):
    model = oracle_of(llama(), 100, False)
    with pytest.raises(ValueError, match=r"`model.layers.0.self_attn` is not: its attention may depend on .*attention"):
        truncated_loss(model, ids, 2)


def test_output_that_its_arguments_do_not_give_is_refused(ids):
    class Bending(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 1.01 if func is F.scaled_dot_product_attention else out

    with Bending(), pytest.raises(ValueError, match=r"`blocks.0` is not: the output recomputed .* is not the one"):
        truncated_loss(nano(), ids, 2)


IDS = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tau": 0.0}, ValueError, "Expected `tau` to be positive and finite, but got 0.0"),
        ({"tau": (0.1, -1)}, ValueError, "Expected `tau` to be positive and finite, but got -1.0"),
        ({"tau": "5%"}, TypeError, "Expected `tau` to hold numbers, but got '5%'"),
        ({"top_n": 0}, ValueError, "Expected `top_n` to be at least 1, but got 0"),
        ({"top_n": (3, 2.5)}, TypeError, "Expected `top_n` to hold integers, but got 2.5"),
        ({"renormalize": 1}, TypeError, "Expected `renormalize` to be True or False, but got 1"),
        ({"progress": "yes"}, TypeError, "Expected `progress` to be True or False"),
        ({"tokens": IDS.float()}, TypeError, "Expected `tokens` to be a tensor of integers (batch, length), but got"),
        ({"tokens": [[1, 2]]}, TypeError, "but got list. Pass the tokenizer's `input_ids`"),
        ({"tokens": IDS[0]}, ValueError, "but got shape (24,). Add a batch dimension"),
        ({"tokens": IDS[:, :1]}, ValueError, "with a length of at least 2, so that there is a next token, but got"),
        ({"mask": torch.ones(2, 24)}, TypeError, "Expected `mask` to be a bool tensor, True where there is a token"),
        ({"mask": torch.ones(2, 23) > 0}, ValueError, "the shape of `tokens`, (2, 24), but got (2, 23)"),
        ({"mask": IDS < 0}, ValueError, "Expected `mask` to leave at least one pair of neighbouring tokens"),
        ({"mask": torch.arange(24).expand(2, -1) > 3}, ValueError, "to have padding on the right only"),
        ({"model": 3}, TypeError, "Expected `model` to be a torch.nn.Module, but got int"),
    ],
)
def test_errors_name_what_came(arguments, error, text):
    with pytest.raises(error) as caught:
        effective_set_size(**({"model": nano(), "tokens": IDS} | arguments))
    assert text in str(caught.value)


def test_several_sizes_at_once_are_refused(ids):
    with pytest.raises(TypeError, match=r"Expected `top_n` to be one integer or None, but got \(1, 2\)"):
        truncated_loss(nano(), ids, (1, 2))
