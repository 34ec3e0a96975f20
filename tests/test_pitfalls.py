"""What fails in the field (the numbers are those of the project's list of pitfalls), where no other test has it."""

import gc
import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import (
    SMALL,
    VOCABULARY,
    LanguageModule,
    MemoryLogger,
    ValidatedModule,
    loader,
    run_once,
    spread,
    tiny_gpt2,
    token_batches,
    trainer,
)
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnmon import AttentionMonitor, watch
from attnmon.capture import attach


def weights_of(model, **inputs) -> list[np.ndarray]:
    """The model's own weights in float64, (batch, query heads, length, length)."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model.double().eval()(**inputs, output_attentions=True).attentions
    model.float().set_attn_implementation(implementation)
    return [weights.numpy() for weights in attentions]


def entropies(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.maximum(weights, 1e-300))).sum(-1)


def llama(**options):
    torch.manual_seed(0)
    return spread(LlamaForCausalLM(LlamaConfig(**SMALL, **options)))


def padded_batch(side: str) -> dict[str, torch.Tensor]:
    (batch,) = token_batches(1, batch=3, length=24)
    mask = torch.ones(3, 24, dtype=torch.int64)
    mask[0, slice(0, 7) if side == "left" else slice(17, 24)] = 0
    return batch | {"attention_mask": mask}


@pytest.mark.parametrize("returned", [None, (), torch.zeros(2, 4, 24), torch.full((2, 4, 24, 24), torch.nan)])
def test_1_returned_weights_are_never_read(returned):
    """A function that gives log-sum-exps, nothing, or rubbish beside its output."""

    def rubbish(*args, **kwargs):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)[0], returned

    AttentionInterface.register("rubbish", rubbish)
    AttentionMaskInterface.register("rubbish", sdpa_mask)
    try:
        model, (batch,) = llama(), token_batches(1, batch=2, length=24)
        expected = run_once(model, batch).values
        model.set_attn_implementation("rubbish")
        assert run_once(model, batch).values == expected
    finally:
        del AttentionInterface._global_mapping["rubbish"]
        del AttentionMaskInterface._global_mapping["rubbish"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_3_a_padded_batch_gives_the_same_bits_under_capture(attention, side):
    model, batch = llama(attn_implementation=attention), padded_batch(side)
    calls = []

    def step():
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        return [output.logits.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = step()
    with attach(model, calls.append, pytest.fail):
        assert all(map(torch.equal, step(), plain))
    assert len(calls) == 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_4_figures_are_those_before_dropout(attention):
    (batch,) = token_batches(1)
    model = tiny_gpt2(layers=1, attn_implementation=attention)
    expected = run_once(model.train(), batch).values
    model.transformer.h[0].attn.attn_dropout.p = 0.9
    model.config.attn_pdrop = 0.9
    torch.manual_seed(0)
    assert not torch.equal(model(**batch).logits, model(**batch).logits)
    assert run_once(model, batch).values == expected


def test_6_heads_are_query_heads_in_their_order():
    model, (batch,) = llama(), token_batches(1, batch=2, length=24)
    values = run_once(model, batch).values["entropy"]
    for layer, weights in enumerate(weights_of(model, input_ids=batch["input_ids"])):
        assert weights.shape[1] == 4
        np.testing.assert_allclose(values[layer], entropies(weights).mean((0, 2)), rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_7_a_uniform_row_of_a_window_has_the_entropy_of_the_window(attention):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5, attn_implementation=attention))
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    (batch,) = token_batches(1, batch=2, length=24)
    snapshot = run_once(model, batch, top_n=(1, 4))
    keys = np.minimum(np.arange(24) + 1, 5)
    for layer in (0, 1):
        assert snapshot.values["entropy_normalized"][layer] == pytest.approx([1.0] * 4, rel=1e-6)
        assert snapshot.values["effective_keys"][layer] == pytest.approx([keys.mean()] * 4, rel=1e-6)
        assert snapshot.rows_used["separability@4"][layer] == [2 * (24 - 4)] * 4  # rows that see a fifth key


@pytest.mark.parametrize("side", ["left", "right"])
def test_8_padding_rows_and_padding_keys_are_in_no_figure(side):
    model, batch = llama(), padded_batch(side)
    snapshot = run_once(model, batch)
    # each sequence by itself, without its padding: positions are relative in this model
    alone = [ids[mask.bool()][None] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    weights = [weights_of(model, input_ids=ids) for ids in alone]
    for layer in (0, 1):
        rows = np.concatenate([entropies(sequence[layer])[0] for sequence in weights], axis=1)
        np.testing.assert_allclose(snapshot.values["entropy"][layer], rows.mean(axis=1), rtol=1e-4)
    assert snapshot.padding == {0: 7, 1: 7}


def test_9_labelled_rows_are_those_whose_label_counts():
    model, (batch,) = llama(), token_batches(1, batch=3, length=24)
    batch["labels"][:, :12] = -100
    batch["labels"][1, 15:] = -100
    snapshot = run_once(model, batch, tokens="labelled")
    rows = entropies(weights_of(model, input_ids=batch["input_ids"])[1]).transpose(0, 2, 1)
    expected = rows[(batch["labels"] != -100).numpy()].mean(0)
    np.testing.assert_allclose(snapshot.values["entropy"][1], expected, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_10_scores_beyond_float16_are_measured(dtype):
    """q . k reaches 10^6, where float16 ends at 65504; most weights are 0, whose p log p is NaN if made naively."""

    class Cast(torch.nn.Embedding):
        def forward(self, ids):
            q = (super().forward(ids)[:, None] * 400).to(dtype)
            k = super().forward(ids)[:, None].to(dtype)
            self.q, self.k = q.detach(), k.detach()
            # what a model with a scale of its own does, so that its own arithmetic does not overflow
            return torch.nn.functional.scaled_dot_product_attention(q * 1e-2, k, k, scale=1.0, is_causal=True)

    torch.manual_seed(0)
    model = Cast(VOCABULARY, 8)
    torch.nn.init.normal_(model.weight, std=8.0)
    with watch(model, 1, rows="all", strict=True, alerts=False) as monitor:
        model(token_batches(1, length=40)[0]["input_ids"]).float().sum().backward()
        snapshot = monitor.step()
    scores = (model.q * 1e-2).double() @ model.k.double().mT
    assert (model.q.double() @ model.k.double().mT).abs().max() > 65504
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).numpy()
    assert snapshot.nonfinite == {0: [0]}
    np.testing.assert_allclose(snapshot.values["entropy"][0], entropies(weights).mean((0, 2)), rtol=1e-3)
    visible = scores.masked_fill(hidden, 0).abs().amax(-1)
    assert snapshot.values["score_max"][0] == pytest.approx([visible.mean().item()], rel=1e-3)


class Shapes(TorchDispatchMode):
    """The largest number of dimensions of a given size in any tensor that is made."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.most = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, sum(n == self.size for n in tensor.shape))
        return result


def test_11_the_default_figures_need_no_tensor_with_two_sequence_dimensions():
    """Not even for a moment: a sample of rows is all that is formed."""
    model, (batch,) = llama(), token_batches(1, batch=2, length=53)
    with Shapes(53) as plain:
        model(**batch).loss.backward()
    with watch(model, 1, rows=8, strict=True) as monitor, Shapes(53) as monitored:
        model(**batch).loss.backward()
        assert monitor.step() is not None
    assert plain.most == monitored.most == 1


def test_11_no_tensor_with_two_sequence_dimensions_outlives_its_call():
    model, (batch,) = llama(), token_batches(1, batch=2, length=53)
    with watch(model, 1, rows="all", quantities=["all"], strict=True) as monitor:
        loss = model(**batch).loss
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        assert not [tensor.shape for tensor in tensors if list(tensor.shape).count(53) > 1]
        loss.backward()
        assert monitor.step() is not None


def test_12_memory_is_flat_over_200_steps():
    model, batches = tiny_gpt2(), token_batches(5, batch=2, length=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = []
    with watch(model, 1, rows=8, strict=True) as monitor:
        for step in range(200):
            model(**batches[step % 5]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert monitor.step() is not None
            if step % 50 == 49:
                gc.collect()
                tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
                held.append((len(tensors), sum(t.numel() for t in tensors)))
    assert held[1] == held[2] == held[3]


def test_14_what_is_not_measured_is_absent_from_the_loggers(tmp_path):
    class ByHand(torch.nn.Module):
        """Has attention that can be found, and does not use it."""

        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            self.embed = torch.nn.Embedding(VOCABULARY, 8)

        def forward(self, ids):
            return self.embed(ids)

    class Module(LanguageModule):
        def training_step(self, batch, batch_idx):
            return self.model(batch["input_ids"]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger, monitor = MemoryLogger(), AttentionMonitor(1)
    with pytest.warns(UserWarning, match="measured nothing in a sampled step.*attention") as caught:
        trainer(tmp_path, monitor, logger=logger, max_steps=3).fit(Module(ByHand()), loader(token_batches(3)))
    assert sum("attnmon" in str(w.message) for w in caught) == 1
    assert logger.of("attn") == []
    assert monitor.latest is None


def test_14_a_figure_that_no_row_has_is_absent_and_not_zero(tmp_path):
    logger = MemoryLogger()
    monitor = AttentionMonitor(1, top_n=(1, 20), alerts=False)
    with pytest.warns(UserWarning, match="no sampled row sees more keys than N = 20"):
        trainer(tmp_path, monitor, logger=logger, max_steps=2).fit(
            LanguageModule(), loader(token_batches(2, length=12))
        )
    for _, metrics in logger.of("attn"):
        assert not any("top_20" in key for key in metrics)
        assert any("top_1/" in key for key in metrics)
        assert all(math.isfinite(value) for value in metrics.values())


def test_20_the_sanity_check_neither_logs_nor_counts(tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append((trainer.sanity_checking, monitor.latest_validation is None, list(logger.of("attn"))))

    logger, monitor = MemoryLogger(), AttentionMonitor(1, validation_batches=2, strict=True)
    trainer(tmp_path, Look(), monitor, logger=logger, max_steps=2, num_sanity_val_steps=2).fit(
        ValidatedModule(), loader(token_batches(2)), loader(token_batches(2, seed=5))
    )
    assert seen[0] == (True, True, [])
    assert len(logger.of("attn_val/")) == 1


@pytest.mark.filterwarnings("ignore::attnmon.AttentionSaturationWarning")
def test_24_a_sample_of_12_layers_keeps_the_budget_of_the_docstring(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run")
    module, monitor = LanguageModule(tiny_gpt2(layers=12, heads=12)), AttentionMonitor(1)

    class Size(pl.Callback):
        def __init__(self):
            self.files = []

        def on_train_batch_end(self, *_):
            logger.experiment.flush()
            self.files.append(sum(path.stat().st_size for path in (tmp_path / "run").rglob("events*")))

    size = Size()
    trainer(tmp_path, monitor, size, logger=logger, max_steps=13).fit(module, loader(token_batches(13, batch=1)))
    assert 250 <= len(monitor.latest.scalars()) <= 310
    with_images, without = size.files[5] - size.files[4], size.files[12] - size.files[11]
    images = len(monitor.latest.values)
    assert without < 45_000
    assert (with_images - without) / images < 16_000


def test_25_the_users_module_gets_no_state(tmp_path):
    module, monitor = LanguageModule(), AttentionMonitor(1, strict=True)
    before = list(module.state_dict()), [name for name, _ in module.named_modules()]
    during = []

    class Look(pl.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            during.append((list(pl_module.state_dict()), [name for name, _ in pl_module.named_modules()]))

    trainer(tmp_path, monitor, Look(), max_steps=2).fit(module, loader(token_batches(2)))
    assert during == [before, before]


@pytest.mark.parametrize("where", ["attnmon.window.Window._add", "attnmon.sums.LayerSums.add"])
def test_28_an_error_inside_leaves_the_run_and_its_bits(tmp_path, monkeypatch, where):
    def run(*callbacks):
        module = LanguageModule(tiny_gpt2(dropout=0.1))
        torch.manual_seed(7)
        trainer(tmp_path, *callbacks, max_steps=4).fit(module, loader(token_batches(4)))
        return module

    plain = run()
    monkeypatch.setattr(where, lambda *_: 1 / 0)
    monitor = AttentionMonitor(1)
    with pytest.warns(UserWarning, match="(?s)switched off.*Traceback.*ZeroDivisionError") as caught:
        module = run(monitor)
    assert sum("attnmon" in str(w.message) for w in caught) == 1
    assert module.losses == plain.losses
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert monitor.latest is None
    with pytest.raises(ZeroDivisionError):
        run(AttentionMonitor(1, strict=True))
