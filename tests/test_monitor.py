"""The engine and the plain loop: figures against the model's own weights, schedule, layers, failures, errors."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from toys import NanoModel, run_once, spread, tiny_gpt2, token_batches

from attnmon import watch


def weights_of(model, batch) -> list[np.ndarray]:
    """The model's own attention weights, layer by layer: (batch, heads, length, length) in float64."""
    twin = copy.deepcopy(model).eval().double()
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        out = twin(batch["input_ids"], attention_mask=batch.get("attention_mask"), output_attentions=True)
    return [weights.numpy() for weights in out.attentions]


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

    @pytest.mark.parametrize("padded", [False, True])
    def test_every_row_without_its_weights_gives_the_same(self, padded, monkeypatch):
        model, (batch,) = spread(tiny_gpt2()), token_batches(1)
        if padded:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, 50:] = 0
        wanted = ["entropy", "entropy_normalized", "effective_keys", "first_key_weight", "score_max"]
        arguments = {"rows": "all", "sequences": 9, "alerts": False, "quantities": wanted}
        monkeypatch.setattr("attnmon.window.Measurer.measure", lambda *_, **__: pytest.fail("weights were formed"))
        fused = run_once(model, batch, **arguments)
        monkeypatch.undo()
        monkeypatch.setattr("attnmon.fused.BASES", frozenset())
        formed = run_once(model, batch, **arguments)
        assert fused.rows_used == formed.rows_used
        assert fused.padding == formed.padding
        for quantity in wanted:
            for layer in (0, 1):
                assert fused.values[quantity][layer] == pytest.approx(formed.values[quantity][layer], rel=1e-5)
                assert fused.errors[quantity][layer] == pytest.approx(formed.errors[quantity][layer], rel=1e-3)

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
