"""An analysis equals what the public functions give for each row, one by one, whatever it is cut into."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_rows import captured_rows, means
from toys import SMALL as SIZES
from toys import VOCABULARY, spread, tiny_gpt2
from transformers import (
    BertConfig,
    BertModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from attnmon.analysis import Analysis, AnalysisOptions, analyze

LENGTHS = (8, 20, 33)
SMALL = {
    "lengths": LENGTHS,
    "top_n": (1, 3, 12),
    "critical_top_n": 9,
    "separability_top_n": (1, 2, 5),
    "temperatures": (0.05, 1.0, 8.0),
    "epsilons": (1e-3, 10.0),
}


def tokens(length: int = 33, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def llama(**config) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64, **(sizes | config))
    )


def sharpened(model):
    """Larger scores than random weights give, so that rows are neither uniform nor one-hot."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name and parameter.dim() == 2:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("make", [tiny_gpt2, llama], ids=["gpt2", "llama with grouped queries"])
@pytest.mark.parametrize("vectors", ["value", "embedding", "hidden"])
@pytest.mark.parametrize("convention", ["visible", "full"])
def test_every_table_is_the_mean_of_the_functions_over_rows(make, vectors, convention):
    model = sharpened(make()).double().eval()
    options = AnalysisOptions(**SMALL, vectors=vectors, convention=convention)
    analysis = analyze(model, tokens()[0], options)
    assert analysis.heads == tuple((layer, head) for layer in range(2) for head in range(len(analysis.heads) // 2))
    for column, length in enumerate(LENGTHS):
        rows = captured_rows(model, tokens()[:, :length], vectors, normalize=vectors == "embedding")
        expected = means(rows, options)
        for (task, quantity), (value, count) in expected.items():
            found = analysis.tables[task]
            np.testing.assert_allclose(
                found.values[quantity][:, column], value, rtol=1e-9, atol=1e-12, err_msg=f"{task} {quantity} {length}"
            )
            np.testing.assert_array_equal(found.rows[quantity][:, column], count, err_msg=f"{task} {quantity}")


def test_sensitivity_stays_below_its_bounds_and_depends_on_the_seed_alone():
    model = sharpened(tiny_gpt2()).double()
    options = AnalysisOptions(**SMALL, tasks=("sensitivity",))
    first, again = (analyze(model, tokens(), options).tables["sensitivity"] for _ in range(2))
    other = analyze(model, tokens(), dataclasses.replace(options, seed=1)).tables["sensitivity"]
    g = first.values["sensitivity"]
    np.testing.assert_array_equal(g, again.values["sensitivity"])
    assert not np.array_equal(g, other.values["sensitivity"])
    temperature, epsilon = (np.array(first.axes[name]) for name in ("temperature", "epsilon"))
    bound = np.minimum(1 / (2 * temperature[:, None]), np.sqrt(2) / epsilon)
    assert (g <= bound).all()
    assert (g > 0).any()


def test_a_length_alone_is_the_same_length_among_others():
    model = sharpened(tiny_gpt2(positions=160)).double()
    options = AnalysisOptions(**SMALL | {"lengths": (33, 100, 160)})
    together = analyze(model, tokens(160), options)
    for column, length in enumerate((33, 100)):
        alone = analyze(model, tokens(160), dataclasses.replace(options, lengths=(length,)))
        for task, table in alone.tables.items():
            for quantity, values in table.values.items():
                np.testing.assert_allclose(
                    values[:, 0], together.tables[task].values[quantity][:, column], rtol=1e-9, err_msg=quantity
                )


def test_float32_is_near_float64():
    model = sharpened(tiny_gpt2(positions=160))
    sizes = {"top_n": (1, 5, 30), "critical_top_n": 40, "separability_top_n": (1, 4, 16)}
    # below, what the scores themselves lose in float32 is divided by T
    options = AnalysisOptions(lengths=(40, 160), temperatures=(0.1, 1.0, 8.0), **sizes)
    single = analyze(model, tokens(160), options)
    double = analyze(model.double(), tokens(160), options)
    for task, table in single.tables.items():
        for quantity, values in table.values.items():
            np.testing.assert_allclose(
                values, double.tables[task].values[quantity], rtol=3e-4, atol=1e-6, err_msg=f"{task} {quantity}"
            )


@pytest.mark.parametrize("convention", ["visible", "full"])
def test_memory_decides_nothing(convention):
    model = sharpened(tiny_gpt2()).double()
    options = AnalysisOptions(**SMALL, convention=convention, vectors="hidden")
    roomy = analyze(model, tokens(), options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnmon.analysis.vectors._SQUARES", 10**9)  # no array of all pairs
        patch.setattr("attnmon.analysis.engine._ELEMENTS", {"cpu": 1})  # head by head
        tight = analyze(model, tokens(), options)
    for task, table in roomy.tables.items():
        for quantity, values in table.values.items():
            np.testing.assert_allclose(
                tight.tables[task].values[quantity], values, rtol=1e-9, atol=1e-12, err_msg=f"{task} {quantity}"
            )


def test_sequences_are_averaged_by_rows():
    model = tiny_gpt2().double()
    options = AnalysisOptions(**SMALL)
    both = analyze(model, tokens(batch=2), options)
    assert not any("depends on how many follow" in note for note in both.notes)
    parts = [analyze(model, tokens(batch=2)[i], options) for i in range(2)]
    for task in ("distance", "separability", "summary"):
        for quantity, values in both.tables[task].values.items():
            single = [part.tables[task].values[quantity] for part in parts]
            np.testing.assert_allclose(values, np.mean(single, axis=0), rtol=1e-12)
            assert (both.tables[task].rows[quantity] == 2 * parts[0].tables[task].rows[quantity]).all()


def test_drawn_rows_estimate_all_of_them():
    model = sharpened(tiny_gpt2()).double()
    options = AnalysisOptions(**SMALL, tasks=("summary", "distance"))
    everything = analyze(model, tokens(), options)
    drawn = [analyze(model, tokens(), dataclasses.replace(options, rows=5, seed=seed)) for seed in range(30)]
    assert "5 drawn rows" in drawn[0].notes[0]
    entropy = [analysis.tables["summary"].values["entropy"] for analysis in drawn]
    np.testing.assert_allclose(np.mean(entropy, axis=0), everything.tables["summary"].values["entropy"], rtol=0.03)
    rows = drawn[0].tables["summary"].rows["entropy"]
    np.testing.assert_allclose(rows, np.broadcast_to(LENGTHS, rows.shape), rtol=1e-6)


def test_an_encoder_sees_all_keys_in_every_row_and_says_so():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = BertModel(config).double().eval()
    options = AnalysisOptions(**SMALL, tasks=("distance", "summary"))
    analysis = analyze(model, tokens(), options)
    assert any("bidirectional" in note for note in analysis.notes)
    assert (analysis.tables["distance"].rows["distance"][:, 0, :2] == LENGTHS[0]).all()  # no row is skipped
    for column, length in enumerate(LENGTHS):
        expected = means(captured_rows(model, tokens()[:, :length], "embedding", normalize=True), options)
        found = analysis.tables["distance"].values["distance"][:, column]
        np.testing.assert_allclose(found, expected["distance", "distance"][0], rtol=1e-9)


def test_positioned_vectors_are_token_plus_position_embeddings():
    model = tiny_gpt2().double().eval()
    options = AnalysisOptions(**SMALL, tasks=("distance",), vectors="positioned")
    found = analyze(model, tokens(), options).tables["distance"].values["distance"]
    # that is what enters the first block, whose attention sees it through its layer norm: undo nothing, compare there
    embedded = model.transformer.wte(tokens()) + model.transformer.wpe(torch.arange(33))
    rows = captured_rows(model, tokens(), "embedding", normalize=False)
    for layer in rows:
        layer.vectors = embedded.detach().expand(layer.weights.shape[0], -1, -1)
    expected = means(rows, options)["distance", "distance"][0]
    np.testing.assert_allclose(found[:, -1], expected, rtol=1e-9)


def test_positioned_vectors_of_other_models():
    torch.manual_seed(0)
    options = AnalysisOptions(**SMALL, tasks=("distance",), vectors="positioned")
    opt = (
        OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                ffn_dim=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=64,
                word_embed_proj_dim=16,
            )
        )
        .double()
        .eval()
    )  # looks its positions up two rows further down
    found = analyze(opt, tokens(), options).tables["distance"].values["distance"]
    decoder = opt.model.decoder
    rows = captured_rows(opt, tokens(), "embedding", normalize=False)
    for layer in rows:
        vectors = decoder.embed_tokens.weight[tokens()] + decoder.embed_positions.weight[2 : 2 + 33]
        layer.vectors = vectors.detach().expand(layer.weights.shape[0], -1, -1)
    np.testing.assert_allclose(found[:, -1], means(rows, options)["distance", "distance"][0], rtol=1e-9)
    with pytest.raises(ValueError, match="learned position embedding"):  # its tokens count up as positions do
        analyze(llama(), torch.arange(33), options)


@pytest.mark.parametrize("vectors", ["value", "embedding", "hidden"])
def test_attention_sinks_are_one_more_key(vectors):
    torch.manual_seed(0)
    config = {name: size for name, size in SIZES.items() if name != "head_dim"}
    model = GptOssForCausalLM(
        GptOssConfig(**config, head_dim=8, sliding_window=12, num_local_experts=2, num_experts_per_tok=1)
    )
    model = spread(model)
    options = AnalysisOptions(**SMALL, tasks=("distance", "summary"), vectors=vectors)
    together = analyze(model, tokens(), options)
    assert together.about["causal"]
    assert any("sink" in note for note in together.notes)
    assert not any("bidirectional" in note for note in together.notes)
    alone = analyze(model, tokens(), dataclasses.replace(options, lengths=(20,)))
    for task, table in alone.tables.items():
        for quantity, values in table.values.items():
            np.testing.assert_allclose(
                values[:, 0], together.tables[task].values[quantity][:, 1], rtol=2e-4, atol=1e-5, err_msg=quantity
            )
    # the first row sees itself and the sink: two keys
    assert (together.tables["distance"].rows["distance"][:, 0, 0] == LENGTHS[0]).all()


def test_rows_that_depend_on_the_length_are_run_at_each_length():
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config = Phi3Config(**SIZES | {"pad_token_id": 0}, original_max_position_embeddings=24, rope_parameters=scaling)
    torch.manual_seed(0)
    model = spread(Phi3ForCausalLM(config)).double()
    options = AnalysisOptions(**SMALL, tasks=("summary",))
    together = analyze(model, tokens(), options)
    assert any("depends on how many follow" in note for note in together.notes)
    for column, length in enumerate(LENGTHS):
        alone = analyze(model, tokens(), dataclasses.replace(options, lengths=(length,)))
        np.testing.assert_allclose(
            alone.tables["summary"].values["entropy"][:, 0],
            together.tables["summary"].values["entropy"][:, column],
            rtol=1e-9,
        )


def test_other_normalizers_change_the_weights_and_the_jacobian():
    model = sharpened(tiny_gpt2()).double()
    tasks = ("separability", "summary")
    plain, sparse, adjusted = (
        analyze(model, tokens(), AnalysisOptions(**SMALL, tasks=tasks, normalizer=name))
        for name in ("softmax", "sparsemax", "sa-softmax")
    )
    assert (sparse.tables["summary"].values["entropy"] < plain.tables["summary"].values["entropy"]).all()
    assert np.isnan(adjusted.tables["summary"].values["entropy"]).all()  # its rows do not sum to 1
    assert np.isfinite(adjusted.tables["separability"].values["ratio"]).any()
    own = np.array(plain.temperatures)[[layer for layer, _ in plain.heads], None]
    assert (plain.tables["summary"].values["jacobian"] <= 1 / (2 * own)).all()
    assert (sparse.tables["summary"].values["jacobian"] <= 1 / own + 1e-12).all()


def test_what_the_separability_leaves_out_is_said():
    model = sharpened(tiny_gpt2()).double()
    options = AnalysisOptions(**SMALL, tasks=("separability",))
    repeated = torch.cat([tokens()[0, :20], tokens()[0, :13]])
    notes = analyze(model, repeated, options).notes
    assert any("delta = 0" in note for note in notes)
    assert not any("-inf" in note for note in notes)
    distinct = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:33]
    assert not analyze(model, distinct, options).notes
    torch.nn.init.zeros_(model.transformer.wpe.weight)  # one token over and over: equal weights and equal vectors
    same = analyze(model, torch.zeros(33, dtype=torch.int64), options)
    table = same.tables["separability"]
    assert (table.rows["lower"] < table.rows["ratio"]).any()
    assert any("-inf where r = 0" in note for note in same.notes)


def test_the_model_is_left_as_it_was_found():
    model = tiny_gpt2(dropout=0.1).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    analyze(model, tokens(), AnalysisOptions(**SMALL, tasks=("summary",)))
    assert model.training
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_saved_and_loaded(tmp_path):
    analysis = analyze(tiny_gpt2(), tokens(), AnalysisOptions(**SMALL))
    analysis.save(tmp_path / "analysis.npz")
    loaded = Analysis.load(tmp_path / "analysis.npz")
    assert loaded.heads == analysis.heads
    assert loaded.layers == analysis.layers
    assert loaded.notes == analysis.notes
    assert loaded.tables["sensitivity"].axes == analysis.tables["sensitivity"].axes
    np.testing.assert_array_equal(
        loaded.tables["critical"].at("distance", top_n=3), analysis.tables["critical"].at("distance", top_n=3)
    )
    with pytest.raises(KeyError, match="Expected `top_n` to be one of"):
        loaded.tables["critical"].at("distance", top_n=77)
    with pytest.raises(KeyError, match="Expected `quantity` to be one of"):
        loaded.tables["critical"].at("nothing")
    (tmp_path / "broken.npz").write_bytes((tmp_path / "analysis.npz").read_bytes()[:500])
    with pytest.raises(ValueError, match="Run the analysis again"):
        Analysis.load(tmp_path / "broken.npz")
