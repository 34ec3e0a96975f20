"""Wrong arguments, and models that cannot be analysed: each a message that names what came and what to do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from toys import VOCABULARY, tiny_gpt2
from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaModel

from attnmon.analysis import AnalysisOptions, analyze

TOKENS = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))
SMALL = {"lengths": (40,), "tasks": ("distance",), "top_n": (3,)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vectors": "keys"}, ValueError, "Expected `vectors` to be one of 'value', 'embedding'.*got 'keys'"),
        ({"convention": "all"}, ValueError, "Expected `convention` to be one of 'visible', 'full'"),
        ({"tasks": ("distances",)}, ValueError, "Expected `tasks` to be one of 'distance'"),
        ({"tasks": ()}, ValueError, "Expected `tasks` to name at least one"),
        ({"top_n": (0,)}, ValueError, "Expected `top_n` to be at least 1, but got 0"),
        ({"top_n": 5}, TypeError, "Expected `top_n` to be a sequence, but got 5. Use"),
        ({"top_n": (1.5,)}, TypeError, "Expected `top_n` to be integer"),
        ({"lengths": (1,)}, ValueError, "Expected `lengths` to be at least 2"),
        ({"temperatures": (0.0,)}, ValueError, "Expected `temperatures` to be positive and finite"),
        ({"epsilons": ("x",)}, TypeError, "Expected `epsilons` to hold numbers"),
        ({"rows": "some"}, ValueError, "Expected `rows` to be 'all' or a number"),
        ({"rows": 0}, ValueError, "Expected `rows` to be at least 1"),
        ({"normalize_vectors": "yes"}, TypeError, "Expected `normalize_vectors` to be True, False or None"),
        ({"normalizer": "softmin"}, ValueError, "Expected `name` to be one of 'softmax'"),
        ({"seed": -1}, ValueError, "Expected `seed` to be at least 0"),
        ({"normalizer": "sparsemax", "tasks": ("sensitivity",)}, ValueError, "without 'sensitivity'"),
    ],
)
def test_options(changes, error, message):
    with pytest.raises(error, match=message):
        AnalysisOptions(**SMALL | changes)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (TOKENS.float(), TypeError, "Expected `tokens` to be an integer tensor, but got torch.float32"),
        ([1, 2], TypeError, "but got list"),
        (TOKENS[None, None], ValueError, r"\(length,\) or \(batch, length\), but got shape \(1, 1, 40\)"),
        (TOKENS[:39], ValueError, "at least as many as the longest of `lengths`, 40, but got 39. Give a longer text"),
    ],
)
def test_tokens(tokens, error, message):
    with pytest.raises(error, match=message):
        analyze(tiny_gpt2(), tokens, AnalysisOptions(**SMALL))


def test_a_context_shorter_than_the_length():
    with pytest.raises(ValueError, match="at most the model's context of 32 positions, but got 40"):
        analyze(tiny_gpt2(positions=32), TOKENS, AnalysisOptions(**SMALL))


def test_a_table_of_positions_shorter_than_the_configuration_says():
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=40,
    )
    with pytest.raises(ValueError, match="take 40 tokens, but its forward failed.*Use shorter `lengths`"):
        analyze(RobertaModel(config), TOKENS.clamp(min=2), AnalysisOptions(**SMALL))


@pytest.mark.parametrize("name", ["top_n", "separability_top_n", "critical_top_n"])
def test_n_as_large_as_the_context(name):
    value = 40 if name == "critical_top_n" else (3, 40)
    task = {"top_n": "distance", "separability_top_n": "separability", "critical_top_n": "critical"}[name]
    options = AnalysisOptions(**SMALL | {"tasks": (task,), name: value})
    with pytest.raises(ValueError, match=f"every N in `{name}` to be below the longest length, 40, but got 40"):
        analyze(tiny_gpt2(), TOKENS, options)


def test_a_model_with_rotary_positions_has_no_position_embedding():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="learned position embedding.*Use vectors='embedding'"):
        analyze(LlamaForCausalLM(config), TOKENS, AnalysisOptions(**SMALL, vectors="positioned"))


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="Expected `model` to have attention that can be read.*looked for modules"):
        analyze(nn.Sequential(nn.Embedding(VOCABULARY, 4)), TOKENS, AnalysisOptions(**SMALL))


def test_attention_that_cannot_be_read():
    model = tiny_gpt2(attn_implementation="eager", reorder_and_upcast_attn=True)
    with pytest.raises(ValueError, match=re.escape("Load it with attn_implementation='sdpa'")):
        analyze(model, TOKENS, AnalysisOptions(**SMALL))


def test_a_part_of_the_model_that_cannot_be_read_is_named():
    model = tiny_gpt2().eval()
    block = model.transformer.h[1].attn
    forward = block.forward

    def without_attention(hidden_states, *args, **kwargs):
        return torch.zeros_like(hidden_states), None

    block.forward = without_attention
    analysis = analyze(model, TOKENS, AnalysisOptions(**SMALL))
    assert analysis.layers == ("transformer.h.0.attn",)
    block.forward = forward


def test_plain_numbers_of_any_kind():
    options = AnalysisOptions(
        lengths=np.array([16, 32]), tasks="distance", top_n=torch.tensor([1, 2]), temperatures=np.float32([0.5])
    )
    assert (options.lengths, options.tasks, options.top_n, options.temperatures) == (
        (16, 32),
        ("distance",),
        (1, 2),
        (0.5,),
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "gpt2"}, TypeError, "Expected `model` to be a torch.nn.Module, but got str"),
        ({"options": {"top_n": (1,)}}, TypeError, "Expected `options` to be an AnalysisOptions, but got dict"),
        ({"memory": "1G"}, ValueError, "Expected `memory` to be an integer of at least"),
        ({"device": "meta"}, ValueError, "Expected `device` to be one that torch can use here.*but got 'meta'"),
        ({"device": "bogus"}, ValueError, "Expected `device` to be one that torch can use here.*but got 'bogus'"),
        ({"tokens": TOKENS + 40}, ValueError, f"lie between 0 and {VOCABULARY - 1}, the model's vocabulary"),
    ],
)
def test_what_analyze_is_given(changes, error, message):
    arguments = {"model": tiny_gpt2(), "tokens": TOKENS, "options": AnalysisOptions(**SMALL)} | changes
    with pytest.raises(error, match=message):
        analyze(**arguments)
    assert all(parameter.device.type == "cpu" for parameter in getattr(arguments["model"], "parameters", list)())


def test_memory_and_device():
    with pytest.raises(ValueError, match="Expected `memory` to be an integer of at least"):
        analyze(tiny_gpt2(), TOKENS, AnalysisOptions(**SMALL), memory=1000)
