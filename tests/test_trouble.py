"""The engine under attack: odd models and masks, errors, copies, what is left behind."""

import copy
import gc
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from toys import VOCABULARY, NanoModel, run_once, run_probe, tiny_gpt2, token_batches
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnmon import AttentionSaturationWarning, watch
from attnmon.monitor import Monitor
from attnmon.options import MonitorOptions


class TestTrouble:
    def test_no_attention(self):
        with pytest.raises(ValueError, match="Expected `model` to contain attention .* Sequential.*looked for"):
            watch(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    def test_nothing_captured_warns_once_and_gives_nothing(self):
        model = tiny_gpt2()
        with watch(model, 1) as monitor, pytest.warns(UserWarning, match="nothing.*did not run") as w:
            assert [monitor.step() for _ in range(3)] == [None] * 3
        assert len(w) == 1
        assert monitor.latest is None

    def test_too_large_n_is_nan_with_one_warning(self):
        model, (batch,) = tiny_gpt2(), token_batches(1, length=10)
        with pytest.warns(UserWarning, match=r"no sampled row sees more keys than N = 10, 20 of `top_n`") as caught:
            with watch(model, 1, alerts=False) as monitor:
                for _ in range(2):
                    model(**batch).loss.backward()
                    snapshot = monitor.step()
        assert len(caught) == 1
        assert all(map(math.isnan, snapshot.values["separability@10"][0]))
        assert not any("top_10" in tag for tag in snapshot.scalars())

    def test_one_token(self):
        model, (batch,) = tiny_gpt2(), token_batches(1, length=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch["labels"] = None
            with watch(model, 1, strict=True) as monitor:
                model(**batch).logits.mean().backward()
                snapshot = monitor.step()
        assert snapshot.values["entropy"][0] == [0.0, 0.0]
        assert all(map(math.isnan, snapshot.values["entropy_normalized"][0]))

    def test_nonfinite_rows_are_left_out_counted_and_warned_of(self):
        model, (batch,) = NanoModel(heads=(2, 2)).double(), token_batches(1)
        with torch.no_grad():
            model.blocks[1].c_attn.bias[0] = torch.inf  # the query of head 0
        with pytest.warns(AttentionSaturationWarning, match="blocks.1"):
            with watch(model, 1, strict=True, rows="all") as monitor:
                model(batch["input_ids"]).sum()
                snapshot = monitor.step()
        assert snapshot.nonfinite == {0: [0, 0], 1: [240, 0]}
        assert math.isnan(snapshot.values["entropy"][1][0])
        assert math.isfinite(snapshot.values["entropy"][1][1])
        assert snapshot.rows_used["entropy"][1] == [0, 240]
        assert snapshot.rows_skipped["entropy"][1] == [240, 0]

    def test_an_error_inside_costs_one_warning_and_switches_off(self, monkeypatch):
        model, batches = tiny_gpt2(), token_batches(3)
        monkeypatch.setattr("attnmon.window.Measurer.measure", lambda *a, **k: 1 / 0)
        with watch(model, 1) as monitor, pytest.warns(UserWarning, match="(?s)off.*ZeroDivisionError") as caught:
            for batch in batches:
                model(**batch).loss.backward()
                assert monitor.step() is None
        assert len(caught) == 1
        monkeypatch.setattr("attnmon.window.Measurer.measure", lambda *a, **k: 1 / 0)
        with watch(model, 1, strict=True) as monitor, pytest.raises(ZeroDivisionError):
            model(**batches[0])
            monitor.step()
        assert torch.overrides._len_torch_function_stack() == 0

    @pytest.mark.parametrize("inside", [False, True], ids=["after", "in_the_handler"])
    def test_a_pass_that_failed_is_not_the_sample_of_its_step(self, inside):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        with watch(model, 1, rows=96, strict=True, alerts=False) as monitor:
            model(**batch).loss.backward()
            expected = monitor.step()
        other = {name: tokens[:1, :30].flip(1) for name, tokens in batch.items()}

        def boom(*_):
            raise RuntimeError("out of memory")

        with watch(model, 1, rows=96, strict=True, alerts=False) as monitor:
            handle = model.transformer.h[1].mlp.register_forward_hook(boom)
            try:
                model(**other)
            except RuntimeError:
                handle.remove()
                if inside:
                    model(**batch).loss.backward()
            if not inside:
                model(**batch).loss.backward()
            found = monitor.step()
        assert found.layers == expected.layers
        assert found.rows_used == expected.rows_used
        assert found.values == expected.values

    def test_a_step_of_nothing_but_a_failed_pass_has_no_sample(self):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        handle = model.transformer.h[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with watch(model, 2, alerts=False) as monitor:
            with pytest.raises(ZeroDivisionError):
                model(**batch)
            handle.remove()
            with pytest.warns(UserWarning, match="measured nothing in a sampled step"):
                assert monitor.step() is None

    def test_a_model_that_returns_nothing_is_read(self):
        class Silent(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = tiny_gpt2()

            def forward(self, **batch):
                self.loss = self.model(**batch).loss

        model, (batch,) = Silent(), token_batches(1)
        with watch(model, 1, strict=True) as monitor:
            model(**batch)
            model.loss.backward()
            assert monitor.step().rows_used["entropy"][0] == [192, 192]

    def test_a_warning_made_an_error_reaches_the_user(self):
        """That is how one stops a run at a saturation."""
        model, (batch,) = tiny_gpt2(initializer_range=0.5), token_batches(1)
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight *= 1000
        with watch(model, 1) as monitor, pytest.raises(AttentionSaturationWarning, match="score"):
            model(**batch).loss.backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error", AttentionSaturationWarning)
                monitor.step()
        assert monitor.latest.alerts

    @pytest.mark.parametrize("arguments", [{}, {"rows": "all", "alerts": False, "quantities": ["entropy"]}])
    def test_a_call_that_the_arguments_do_not_explain_is_named_and_not_measured(self, arguments):
        """Attention with something on top that the query and key don't show."""

        def sharpened(module, query, key, value, attention_mask, **kwargs):
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query * 2, key, value, attention_mask, **kwargs)

        AttentionInterface.register("sharpened", sharpened)
        AttentionMaskInterface.register("sharpened", sdpa_mask)
        try:
            model, (batch,) = tiny_gpt2(initializer_range=0.5), token_batches(1)
            model.set_attn_implementation("sharpened")
            with pytest.warns(UserWarning, match="transformer.h.0.attn"):
                assert run_once(model, batch, **arguments) is None
        finally:
            del AttentionInterface._global_mapping["sharpened"]
            del AttentionMaskInterface._global_mapping["sharpened"]

    @pytest.mark.parametrize("arguments", [{}, {"rows": "all", "alerts": False, "quantities": ["entropy"]}])
    def test_a_row_that_goes_wrong_again_and_again_is_found(self, arguments):
        """Every row is compared where it is drawn, or some at each step: others each time."""

        def one_row(module, query, key, value, attention_mask, **kwargs):
            output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
            shifted = output.clone()
            shifted[:, 10] += 1
            return shifted, None

        AttentionInterface.register("one_row", one_row)
        AttentionMaskInterface.register("one_row", sdpa_mask)
        try:
            model, batches = tiny_gpt2(), token_batches(30)
            model.set_attn_implementation("one_row")
            found = []
            with warnings.catch_warnings(), watch(model, 1, **arguments) as monitor:
                warnings.simplefilter("ignore")
                for batch in batches:
                    model(**batch).loss.backward()
                    found.append(monitor.step() is None)
            assert any(found)
        finally:
            del AttentionInterface._global_mapping["one_row"]
            del AttentionMaskInterface._global_mapping["one_row"]

    @pytest.mark.parametrize(
        "arguments", [{"top_n": (1, 5)}, {"quantities": ["entropy"]}, {"rows": 24, "top_n": (1, 5)}]
    )
    def test_scores_of_minus_infinity_leave_their_rows_out(self, arguments):
        """A score is no mask, whatever it is."""

        class Overflowing(nn.Module):
            def __init__(self, seen: int):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(()))
                self.seen = seen

            def forward(self, x):
                key = x.clone()
                key[:, :, 12, 0] = torch.inf
                q, k, v = (one[:, :, : self.seen] for one in (x * self.weight, key, x))
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def run(seen):
            model = Overflowing(seen)
            with watch(model, 1, strict=True, alerts=False, **({"rows": "all"} | arguments)) as monitor:
                model(x).sum().backward()
                return monitor.step()

        x = torch.randn(2, 3, 24, 8, generator=torch.Generator().manual_seed(0))
        found, expected = run(24), run(12)
        assert (x[:, :, 12:, 0] < 0).any()
        assert found.nonfinite[0] == [24, 24, 24]
        assert found.rows_used == expected.rows_used
        for name, layers in expected.values.items():
            np.testing.assert_allclose(found.values[name][0], layers[0], rtol=1e-6, err_msg=name)

    @pytest.mark.parametrize("in_place", [False, True])
    def test_a_compiled_model_is_read_by_a_second_pass_and_by_a_probe(self, in_place):
        model, batches = NanoModel(), token_batches(3)
        plain = run_probe(model, batches[0]["input_ids"])
        compiled = model
        if in_place:
            model.compile(backend="eager")
        else:
            compiled = torch.compile(model, backend="eager")
        with watch(compiled, 1, strict=True) as monitor:
            for batch in batches:
                compiled(batch["input_ids"]).mean().backward()
                assert monitor.step().rerun
        assert run_probe(compiled, batches[0]["input_ids"]) == plain

    def test_gradient_checkpointing_counts_each_row_once(self):
        (batch,) = token_batches(1)
        plain = run_once(tiny_gpt2(), batch)
        for reentrant in (False, True):
            model = tiny_gpt2()
            model.train()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                snapshot = run_once(model, batch, alerts=False)
            assert snapshot.rows_used["entropy"] == plain.rows_used["entropy"]
            assert snapshot.values["entropy"] == plain.values["entropy"]

    def test_memory_stays_flat_over_sampled_steps(self):
        """No tensor of a sampled step outlives it."""
        model, batches = tiny_gpt2(), token_batches(30)
        counts = []
        with watch(model, 1, rows=4, alerts=False) as monitor:
            for batch in batches:
                model(**batch).loss.backward()
                model.zero_grad(set_to_none=True)
                monitor.step()
                gc.collect()
                counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        assert counts[10] == counts[20] == counts[29]

    def test_copies_and_pickles_of_an_armed_model_are_free_of_hooks(self):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        with watch(model, 1) as monitor:
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            model(**batch).loss.backward()
            assert monitor.step() is not None
        for other in copies:
            other(**batch)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_a_copy_of_armed_multihead_attention_is_clean_after_its_first_run(self):
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        with watch(layer, 1):
            other = copy.deepcopy(layer)
        x = torch.randn(2, 8, 16)
        other(x)
        assert not any("forward" in vars(module) for module in other.modules())

    def test_finite_masks_of_minus_100_hide(self):
        def attend(mask):
            class Windowed(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = nn.Parameter(torch.ones(()))

                def forward(self, x):
                    return torch.nn.functional.scaled_dot_product_attention(x * self.weight, x, x, attn_mask=mask)

            with watch(Windowed(), 1, rows="all", strict=True, top_n=(1, 5, 10)) as monitor:
                monitor._model(torch.randn(2, 1, 24, 8, generator=torch.Generator().manual_seed(0))).sum().backward()
                return monitor.step()

        causal = torch.ones(24, 24, dtype=torch.bool).tril()
        causal[:, 20:] = False  # the last four are padding
        expected = attend(causal[None, None].expand(2, 1, 24, 24))
        finite = attend(torch.where(causal, 0.0, -100.0)[None, None].expand(2, 1, 24, 24))
        assert finite.rows_used == expected.rows_used
        for name, layers in expected.values.items():
            np.testing.assert_allclose(finite.values[name][0], layers[0], rtol=1e-5, atol=1e-9, err_msg=name)

    def test_a_bias_is_no_score(self):
        """Position biases are not the query-key scores whose growth is watched."""

        class Biased(nn.Embedding):
            def forward(self, ids):
                q = super().forward(ids)[:, None]
                bias = -2.0 * (torch.arange(40)[:, None] - torch.arange(40)).abs().float()
                return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)

        with watch(Biased(VOCABULARY, 8), 1, strict=True) as monitor:
            monitor._model(token_batches(1, length=40)[0]["input_ids"]).sum().backward()
            snapshot = monitor.step()
        (spread,), (largest,) = snapshot.values["score_spread"][0], snapshot.values["score_max"][0]
        assert spread < 3
        assert largest < 20

    def test_a_negative_scale_turns_the_scores_around(self):
        class Turned(nn.Embedding):
            def forward(self, ids):
                q = super().forward(ids)[:, None]
                return torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=-0.5)

        with watch(Turned(VOCABULARY, 8), 1, strict=True) as monitor:
            monitor._model(token_batches(1)[0]["input_ids"]).sum().backward()
            snapshot = monitor.step()
        assert snapshot.temperatures == {0: 2.0}
        assert 0 < snapshot.values["jacobian@1.0"][0][0] <= 1 / (2 * 2.0)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_vmap_is_not_measured_with_a_reason(self):
        model, (batch,) = NanoModel(), token_batches(1)
        with watch(model, 1, strict=True) as monitor, pytest.warns(UserWarning, match="functorch transform"):
            torch.vmap(lambda ids: model(ids[None]))(batch["input_ids"])
            assert monitor.step() is None

    @pytest.mark.parametrize("arguments", [{}, {"tokens": "labelled"}])
    def test_a_sample_without_a_row_is_none_with_a_reason(self, arguments):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        batch["attention_mask"] = torch.zeros_like(batch["input_ids"]) + (1 if arguments else 0)
        batch["labels"] = torch.full_like(batch["labels"], -100)
        with pytest.warns(UserWarning, match="found no row to measure"):
            with watch(model, 1, **arguments) as monitor:
                for _ in range(2):
                    model(**batch)
                    assert monitor.step() is None

    def test_layers_that_do_not_exist(self):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        with pytest.warns(UserWarning, match=r"`layers` = \[99\] names none of the 2 layers that were called \(0 to 1"):
            assert run_once(model, batch, layers=[99]) is None

    def test_entered_twice(self):
        monitor = watch(tiny_gpt2())
        with monitor, pytest.raises(RuntimeError, match="entered once at a time"):
            monitor.__enter__()

    def test_pickle_and_deepcopy_leave_the_model_behind(self):
        monitor = Monitor(MonitorOptions())
        monitor.bind(tiny_gpt2())
        monitor.open(0)
        for other in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
            assert other._model is None
            assert not other.is_open
        monitor.abort()
