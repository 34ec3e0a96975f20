"""The engine and the plain loop: figures against the model's own weights, schedule, layers, failures, errors."""

import copy
import gc
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from toys import VOCABULARY, NanoModel, tiny_gpt2, token_batches
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnmon import AttentionSaturationWarning, watch
from attnmon.monitor import Monitor
from attnmon.options import MonitorOptions


def weights_of(model, batch) -> list[np.ndarray]:
    """The model's own attention weights, layer by layer: (batch, heads, length, length) in float64."""
    twin = copy.deepcopy(model).eval().double()
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        out = twin(batch["input_ids"], attention_mask=batch.get("attention_mask"), output_attentions=True)
    return [weights.numpy() for weights in out.attentions]


def run_once(model, batch, **arguments):
    """The Snapshot of one training step."""
    arguments = {"every_n_steps": 1, "rows": "all", "sequences": 100, "strict": True} | arguments
    with watch(model, **arguments) as monitor:
        model(**batch).loss.backward()
        return monitor.step()


def run_probe(model, ids) -> dict:
    """The figures of a probe."""
    with watch(model, 1, source="probe", probe=ids, rows="all", sequences=100, strict=True) as monitor:
        return monitor.latest.values


class TestFigures:
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_entropy_is_that_of_the_models_own_weights(self, implementation):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        model.set_attn_implementation(implementation)
        snapshot = run_once(model, batch)
        for layer, weights in enumerate(weights_of(model, batch)):
            rows = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=-1)  # (batch, heads, length)
            np.testing.assert_allclose(snapshot.values["entropy"][layer], rows.mean(axis=(0, 2)), rtol=1e-5)
            count = rows.shape[0] * rows.shape[2]
            errors = rows.std(axis=(0, 2), ddof=1) / math.sqrt(count)
            np.testing.assert_allclose(snapshot.errors["entropy"][layer], errors, rtol=1e-4)
            assert snapshot.rows_used["entropy"][layer] == [count] * 2
            # the first row of each sequence sees one key: log n is 0
            normalized = rows[:, :, 1:] / np.log(np.arange(2, 81))
            np.testing.assert_allclose(
                snapshot.values["entropy_normalized"][layer], normalized.mean(axis=(0, 2)), rtol=1e-5
            )
            assert snapshot.rows_skipped["entropy_normalized"][layer] == [3] * 2
            np.testing.assert_allclose(
                snapshot.values["first_key_weight"][layer], weights[..., 0].mean(axis=(0, 2)), rtol=1e-5
            )

    def test_jacobian_is_that_of_the_raw_scores_at_multiples_of_the_models_temperature(self):
        model, (batch,) = tiny_gpt2(), token_batches(1, batch=1, length=12)
        snapshot = run_once(model, batch, temperatures=(0.5,), top_n=(1,))
        temperature = math.sqrt(8)
        assert snapshot.temperatures == {0: pytest.approx(temperature), 1: pytest.approx(temperature)}
        weights = weights_of(model, batch)[0]
        for multiple in (0.5, 1.0):
            norms = []
            for head in range(2):
                rows = []
                for row in range(12):
                    logits = np.log(weights[0, head, row, : row + 1])
                    a = np.exp(logits / multiple)
                    a /= a.sum()
                    jacobian = (np.diag(a) - np.outer(a, a)) / (multiple * temperature)
                    rows.append(np.linalg.norm(jacobian, 2))
                norms.append(np.mean(rows))
            np.testing.assert_allclose(snapshot.values[f"jacobian@{multiple}"][0], norms, rtol=1e-4)

    def test_padding_is_left_out_on_either_side(self):
        model = tiny_gpt2()
        (batch,) = token_batches(1, batch=2, length=40)
        mask = torch.ones(2, 40, dtype=torch.int64)
        mask[0, 30:] = 0
        mask[1, :25] = 0
        batch |= {"attention_mask": mask}
        snapshot = run_once(model, batch)
        assert snapshot.padding == {0: 35, 1: 35}
        assert snapshot.rows_used["entropy"][0] == [30 + 15] * 2
        weights = weights_of(model, batch)[0]
        rows = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=-1)
        expected = np.concatenate([rows[0, :, :30], rows[1, :, 25:]], axis=1).mean(axis=1)
        np.testing.assert_allclose(snapshot.values["entropy"][0], expected, rtol=1e-5)

    def test_labelled_tokens_only(self):
        model = tiny_gpt2()
        (batch,) = token_batches(1, batch=2, length=40)
        batch["labels"][:, :30] = -100
        snapshot = run_once(model, batch, tokens="labelled")
        assert snapshot.rows_used["entropy"][0] == [20] * 2

    def test_all_quantities_have_a_figure(self):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        snapshot = run_once(model, batch, quantities=("all",), top_n=(5,), rows=8)
        for name, layers in snapshot.values.items():
            if not name.startswith(("separability_lower", "jacobian_lemma2")):
                assert all(math.isfinite(value) for heads in layers.values() for value in heads), name
        assert {"precision@5", "sensitivity@1.0,0.1", "lemma1_max", "distance_upper@5"} <= set(snapshot.values)

    def test_default_quantities(self):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        names = set(run_once(model, batch, alerts=False).values)
        plain = {"entropy", "entropy_normalized", "effective_keys", "score_spread", "score_max", "first_key_weight"}
        top_n = {f"{q}@{n}" for q in ("separability", "distance", "distance_expected") for n in (1, 5, 10, 20)}
        assert names == plain | top_n | {f"jacobian@{t}" for t in (0.1, 0.5, 1.0, 2.0)}

    @pytest.mark.parametrize("vectors", ["hidden", "embedding"])
    def test_other_vectors(self, vectors):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        by_value = run_once(model, batch)
        other = run_once(model, batch, vectors=vectors)
        assert other.values["entropy"] == by_value.values["entropy"]
        assert other.values["distance@5"] != by_value.values["distance@5"]
        assert all(math.isfinite(value) for value in other.values["distance@5"][1])

    def test_sampled_rows_estimate_all_rows(self):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        whole = run_once(model, batch).values["entropy"][1][0]
        estimates = [run_once(model, batch, rows=10, seed=seed, alerts=False) for seed in range(40)]
        values = np.array([snapshot.values["entropy"][1][0] for snapshot in estimates])
        assert abs(values.mean() - whole) < 4 * values.std(ddof=1) / math.sqrt(40)

    def test_a_model_in_half_precision_is_measured_in_float32(self):
        model, (batch,) = tiny_gpt2().bfloat16(), token_batches(1)
        snapshot = run_once(model, batch)
        weights = weights_of(model, batch)[0]  # the same parameters, in float64
        rows = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=-1)
        np.testing.assert_allclose(snapshot.values["entropy"][0], rows.mean(axis=(0, 2)), rtol=2e-2)

    def test_autocast_does_not_reach_the_figures(self):
        model, (batch,) = tiny_gpt2(), token_batches(1)
        plain = run_once(model, batch)
        with watch(model, 1, rows="all", sequences=9, strict=True) as monitor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            snapshot = monitor.step()
        np.testing.assert_allclose(snapshot.values["entropy"][0], plain.values["entropy"][0], rtol=2e-2)


class TestSchedule:
    def test_steps_and_nothing_attached_between(self):
        model, batches = NanoModel(), token_batches(7)
        sampled = []
        with watch(model, every_n_steps=3, strict=True) as monitor:
            for step, batch in enumerate(batches):
                assert monitor._monitor.is_open == (step % 3 == 0)
                assert torch.overrides._len_torch_function_stack() == (step % 3 == 0)
                model(batch["input_ids"]).mean().backward()
                snapshot = monitor.step()
                if snapshot is not None:
                    sampled.append(snapshot.step)
        assert sampled == [0, 3, 6]
        assert monitor.latest.step == 6

    def test_one_training_pass_per_step_is_read(self):
        """Further micro-batches and evaluation in between add no rows."""
        model, batches = tiny_gpt2(), token_batches(3)
        with watch(model, 1, rows="all", sequences=9) as monitor:
            with torch.no_grad():
                model(**batches[2])
            for batch in batches[:2]:
                model(**batch).loss.backward()
            snapshot = monitor.step()
        assert snapshot.rows_used["entropy"][0] == [3 * 80] * 2
        assert snapshot.values["entropy"] == run_once(model, batches[0]).values["entropy"]

    def test_probe_compares_like_with_like(self):
        model, (probe, *batches) = tiny_gpt2(dropout=0.5).train(), token_batches(4)
        with watch(model, 1, source="probe", probe=probe, strict=True) as monitor:
            first = monitor.latest
            model(**batches[0]).loss.backward()
            second = monitor.step()
            assert model.training
        assert (first.step, second.step) == (0, 1)
        assert first.values == second.values  # no optimizer step, other training batch, dropout off
        assert first.source == "probe"

    def test_probe_leaves_random_states_and_modes_alone(self):
        model, (probe,) = tiny_gpt2(dropout=0.5).train(), token_batches(1)
        model.transformer.h[0].eval()
        modes = [module.training for module in model.modules()]
        state = torch.get_rng_state()
        with watch(model, 1, source="probe", probe=lambda m: (m(**probe), torch.rand(5), np.random.rand())):
            pass
        assert torch.equal(state, torch.get_rng_state())
        assert modes == [module.training for module in model.modules()]

    def test_state_goes_on_where_it_was(self):
        model, batches = tiny_gpt2(), token_batches(4)

        def steps(monitor, part):
            return [monitor.step() for batch in part if model(**batch).loss.backward() is None]

        with watch(model, 1, rows=8) as whole:
            unbroken = steps(whole, batches)
        with watch(model, 1, rows=8) as first:
            steps(first, batches[:2])
            state = pickle.loads(pickle.dumps(first.state_dict()))
        with watch(model, 1, rows=8) as second:
            second.load_state_dict(state)
            resumed = steps(second, batches[2:])
        assert [s.step for s in resumed] == [2, 3]
        assert [s.values for s in resumed] == [s.values for s in unbroken[2:]]


class TestLayers:
    def test_named_by_path_numbered_by_call(self):
        model, (batch,) = NanoModel(heads=(2, 4)), token_batches(1)
        with watch(model, 1) as monitor:
            model(batch["input_ids"]).mean().backward()
            snapshot = monitor.step()
        assert snapshot.layers == {0: "blocks.0", 1: "blocks.1"}
        assert [len(snapshot.values["entropy"][layer]) for layer in (0, 1)] == [2, 4]

    @pytest.mark.parametrize("layers", [[1], ["transformer.h.1.*"]])
    def test_a_choice_of_layers_keeps_the_numbers(self, layers):
        model, (batch,) = tiny_gpt2(layers=3), token_batches(1)
        assert run_once(model, batch, layers=layers).layers == {1: "transformer.h.1.attn"}

    def test_a_pattern_that_fits_nothing(self):
        with pytest.raises(ValueError, match=r"Expected every name in `layers` to match .* got 'h\.9\.\*'; there are"):
            watch(tiny_gpt2(), layers=["h.9.*"])


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
        monkeypatch.setattr("attnmon.window.measure", lambda *a, **k: 1 / 0)
        with watch(model, 1) as monitor, pytest.warns(UserWarning, match="(?s)off.*ZeroDivisionError") as caught:
            for batch in batches:
                model(**batch).loss.backward()
                assert monitor.step() is None
        assert len(caught) == 1
        monkeypatch.setattr("attnmon.window.measure", lambda *a, **k: 1 / 0)
        with watch(model, 1, strict=True) as monitor, pytest.raises(ZeroDivisionError):
            model(**batches[0])
        assert torch.overrides._len_torch_function_stack() == 0

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

    def test_a_call_that_the_arguments_do_not_explain_is_named_and_not_measured(self):
        """Attention with something on top that the query and key don't show."""

        def sharpened(module, query, key, value, attention_mask, **kwargs):
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query * 2, key, value, attention_mask, **kwargs)

        AttentionInterface.register("sharpened", sharpened)
        AttentionMaskInterface.register("sharpened", sdpa_mask)
        try:
            model, (batch,) = tiny_gpt2(initializer_range=0.5), token_batches(1)
            model.set_attn_implementation("sharpened")
            with pytest.warns(UserWarning, match="transformer.h.0.attn"):
                assert run_once(model, batch) is None
        finally:
            del AttentionInterface._global_mapping["sharpened"]
            del AttentionMaskInterface._global_mapping["sharpened"]

    @pytest.mark.parametrize("in_place", [False, True])
    def test_a_compiled_model_says_so_and_is_read_by_a_probe(self, in_place):
        model, batches = NanoModel(), token_batches(3)
        plain = run_probe(model, batches[0]["input_ids"])
        compiled = model
        if in_place:
            model.compile(backend="eager")
        else:
            compiled = torch.compile(model, backend="eager")
        with (
            watch(compiled, 1) as monitor,
            pytest.warns(UserWarning, match="compiled.*source='probe'") as caught,
        ):
            for batch in batches:
                compiled(batch["input_ids"]).mean().backward()
                assert monitor.step() is None
        assert len(caught) == 1
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


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("every_n_steps", 0, "Expected `every_n_steps` to be a whole number of at least 1, but got 0"),
        ("every_n_steps", 2.5, "Expected `every_n_steps` to be a whole number of at least 1, but got 2.5"),
        ("every_n_steps", True, "Expected `every_n_steps`"),
        ("rows", 0, "Expected `rows` to be a whole number of at least 1 or 'all', but got 0"),
        ("rows", "some", "Expected `rows`"),
        ("sequences", -1, "Expected `sequences`"),
        ("top_n", (5, 0), "Expected `top_n` to be a whole number of at least 1, but got 0"),
        ("top_n", (1.5,), "Expected `top_n` to be a whole number of at least 1, but got 1.5"),
        ("top_n", (), "Expected `top_n` to name at least one"),
        ("temperatures", (0.0,), "Expected every entry of `temperatures` to be a positive finite number, but got 0.0"),
        ("temperatures", (-1.0,), "Expected every entry of `temperatures`"),
        ("temperatures", (math.nan,), "Expected every entry of `temperatures`"),
        ("source", "test", "Expected `source` to be one of 'train', 'probe', but got 'test'"),
        ("vectors", "key", "Expected `vectors` to be one of 'value', 'hidden', 'embedding', but got 'key'"),
        ("tokens", "all", "Expected `tokens`"),
        ("quantities", ("entropie",), "but got 'entropie'. Did you mean 'entropy'"),
        ("quantities", ("separability@x",), "to carry a whole N >= 1, as in 'separability@10', but got"),
        ("quantities", ("entropy@3",), "to carry no argument"),
        ("quantities", ("jacobian@-1",), "a positive multiple"),
        ("patience", 0, "Expected `patience`"),
    ],
)
def test_wrong_arguments(argument, value, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(").replace("`", "`")):
        MonitorOptions(**{argument: value})


def test_a_number_means_a_list_of_one():
    options = MonitorOptions(top_n=5, temperatures=0.5, epsilons=0.01)
    assert (options.top_n, options.temperatures, options.epsilons) == ((5,), (0.5,), (0.01,))


@pytest.mark.parametrize("argument", ["alerts", "strict", "normalize_vectors"])
def test_flags_are_flags(argument):
    with pytest.raises(TypeError, match=f"Expected `{argument}` to be True or False, but got 'yes'"):
        MonitorOptions(**{argument: "yes"})


def test_what_is_not_a_model_or_a_state_or_a_writer():
    with pytest.raises(TypeError, match="Expected `model` to be a torch.nn.Module, but got int"):
        watch(3)
    with pytest.raises(ValueError, match="Expected `state_dict` to be one that a monitor returned"):
        watch(tiny_gpt2()).load_state_dict({"a": 1})
    with pytest.raises(TypeError, match="Expected `writer` to be a SummaryWriter or None, but got int"):
        watch(tiny_gpt2(), writer=3)


def test_a_string_where_a_list_belongs():
    with pytest.raises(TypeError, match="Expected `quantities` to be a list or tuple, but got 'entropy'"):
        MonitorOptions(quantities="entropy")


def test_probe_without_a_batch():
    with pytest.raises(ValueError, match="Expected `probe` to be a batch or a function"):
        watch(tiny_gpt2(), source="probe")


def test_vocabulary_is_what_the_batches_draw_from():
    assert token_batches(1)[0]["input_ids"].max() < VOCABULARY
