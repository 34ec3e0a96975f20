"""Layers measured together: the figures, counts and refusals are those of each layer by itself."""

import dataclasses
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from toys import spread, tiny_gpt2, token_batches

from attnmon import pool, watch
from attnmon.options import MonitorOptions
from attnmon.rows import RowSampler
from attnmon.types import AttentionCall
from attnmon.window import Window, WindowOptions

HEADS, LENGTH, SIZE = 4, 96, 8
BANDED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-40)[None, None]
PADDED = torch.arange(LENGTH)[None, None, None] >= torch.tensor([0, 30, 9])[:, None, None, None]
LATER = torch.zeros(1, HEADS, LENGTH, LENGTH, dtype=torch.bool)
for head in range(HEADS):
    LATER[0, head] = torch.ones(LENGTH, LENGTH).tril(-head).bool()
    LATER[0, head, :, 0] = True


def make_call(seed: int, batch: int = 1, kv_heads: int = HEADS, checked: bool = True, **changes) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads):
        return torch.randn(batch, heads, LENGTH, SIZE, generator=generator) * 2

    call = AttentionCall(
        layer=f"layers.{seed}",
        query=tensor(HEADS),
        key=tensor(kv_heads),
        value=tensor(kv_heads),
        attn_mask=None,
        causal_offset=0,
        scale=SIZE**-0.5,
    )
    call = dataclasses.replace(call, **changes)
    if not checked:
        return call
    output = nn.functional.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=call.attn_mask,
        is_causal=call.causal_offset == 0,
        scale=call.scale,
        enable_gqa=True,
    )
    return dataclasses.replace(call, output=output)


def window_of(rows=32, sequences=4, **options) -> Window:
    options = MonitorOptions(**options)
    window = Window(
        nn.MultiheadAttention(8, 2),
        WindowOptions(options.columns(), options.vectors, False, options.tokens),
        RowSampler(rows, sequences, 0),
        lambda layer: True,
        lambda function: function(),
    )
    window.detach()
    return window


def read(calls, **arguments) -> tuple[dict[str, torch.Tensor], mock.Mock]:
    """The sums of each layer, and what was measured together."""
    window = window_of(**arguments)
    with mock.patch.object(window._pool, "_measure", wraps=window._pool._measure) as measured:
        for call in calls:
            window._on_call(call)
        window.finish()
    assert not window.not_measured
    return {layer: sums.data.clone() for layer, sums in window.sums.items()}, measured


def alone(calls, **arguments) -> dict[str, torch.Tensor]:
    with mock.patch.object(pool, "_SCORES", 0):
        found, measured = read(calls, **arguments)
    measured.assert_not_called()
    return found


def assert_same(found, expected):
    assert list(found) == list(expected)
    for layer, sums in found.items():
        assert torch.equal(sums[..., :4], expected[layer][..., :4]), layer  # rows used and skipped, their weights
        torch.testing.assert_close(sums, expected[layer], rtol=2e-5, atol=1e-5)


SETUPS = {
    "causal": [make_call(i) for i in range(5)],
    "grouped_queries": [make_call(i, kv_heads=2) for i in range(3)],
    "unchecked": [make_call(i, checked=False) for i in range(3)],
    "encoder": [make_call(i, batch=3, causal_offset=None) for i in range(3)],
    "several_sequences": [make_call(i, batch=3) for i in range(3)],
    "padded": [make_call(i, batch=3, attn_mask=PADDED, causal_offset=None) for i in range(3)],
    "banded_and_full_in_turn": [
        make_call(i, **({"attn_mask": BANDED, "causal_offset": None} if i % 2 else {})) for i in range(6)
    ],
    "a_mask_per_head": [make_call(i, attn_mask=LATER, causal_offset=None) for i in range(3)],
    "a_mask_that_only_hides": [
        make_call(i, attn_mask=torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~BANDED, -torch.inf), causal_offset=None)
        for i in range(3)
    ],
    "temperatures": [make_call(i, scale=0.2 + 0.1 * (i % 2)) for i in range(4)],
    "a_layer_twice": [dataclasses.replace(make_call(i), layer="shared") for i in range(3)],
    "other_shapes": [make_call(i, kv_heads=1 + i % 2) for i in range(4)],
    "huge_values": [dataclasses.replace(make_call(i), value=make_call(i).value * 1e13, output=None) for i in range(3)],
}


class TestFigures:
    @pytest.mark.parametrize("calls", SETUPS.values(), ids=SETUPS)
    @pytest.mark.parametrize("quantities", [None, ["default", "precision", "radius", "jacobian_frobenius"]])
    def test_are_those_of_each_layer_by_itself(self, calls, quantities):
        found, measured = read(calls, quantities=quantities)
        assert measured.call_count < len(calls) * len(calls[0].query)
        assert_same(found, alone(calls, quantities=quantities))

    def test_hold_for_valid_tokens_and_unequal_lengths(self):
        valid = torch.ones(3, LENGTH, dtype=torch.bool)
        valid[1, :60] = valid[2, 20:] = False
        calls = [make_call(i, batch=3, valid=valid) for i in range(3)]
        assert_same(read(calls)[0], alone(calls))

    @pytest.mark.parametrize("limit", ["_SCORES", "_NUMBERS", "_WAITING"])
    def test_do_not_depend_on_the_budgets(self, limit):
        calls = [make_call(i, batch=2) for i in range(6)]
        expected = alone(calls)
        counts = []
        for budget in (60_000, 100_000, 10**9):
            with mock.patch.object(pool, limit, budget):
                found, measured = read(calls)
            counts.append(measured.call_count)
            assert_same(found, expected)
        assert counts[0] > counts[-1]

    @pytest.mark.parametrize(
        "quantities", [["sensitivity"], ["default", "separability_lower"], ["lemma1_min", "entropy"]]
    )
    def test_of_other_quantities_are_made_layer_by_layer(self, quantities):
        calls = [make_call(i) for i in range(2)]
        found, measured = read(calls, quantities=quantities)
        measured.assert_not_called()
        assert found["layers.0"].isfinite().all()


class TestWhatIsNotSimple:
    @pytest.mark.parametrize(
        "changes",
        [
            {"softcap": 5.0},
            {"attn_mask": torch.randn(1, HEADS, LENGTH, LENGTH)},
            {"query": torch.full((1, HEADS, LENGTH, SIZE), torch.nan)},
            {"query": torch.randn(1, HEADS, LENGTH, SIZE).double(), "key": make_call(0).key.double()},
        ],
        ids=["softcap", "bias", "nan", "float64"],
    )
    def test_is_measured_by_itself_beside_the_others(self, changes):
        odd = make_call(1, checked=False, **changes)
        calls = [make_call(0), odd, make_call(2)]
        found, measured = read(calls)
        assert [len(together.args[0].sums) for together in measured.call_args_list] == [2]
        assert_same(found, alone(calls))

    def test_one_sequence_of_several_is_not_finite(self):
        spoilt = make_call(1, batch=3, checked=False)
        spoilt.query[1, 2, 5:] = torch.inf
        calls = [make_call(0, batch=3, checked=False), spoilt]
        found, _ = read(calls, rows="all", quantities=["default"])
        assert found["layers.1"][-1, :, 0].tolist() == [0, 0, LENGTH - 5, 0]
        assert found["layers.0"][-1, :, 0].tolist() == [0, 0, 0, 0]
        assert_same(found, alone(calls, rows="all", quantities=["default"]))

    def test_a_contradicted_output_is_that_of_its_layer_alone(self):
        calls = [make_call(i) for i in range(4)]
        calls[2] = dataclasses.replace(calls[2], output=calls[2].output * 1.01)
        found, measured = read(calls)
        assert measured.call_count == 1
        assert [float(sums[-1, 0, 1]) for sums in found.values()] == [0, 0, 1, 0]

    def test_inference_mode_before_and_after(self):
        calls = [make_call(i) for i in range(4)]
        window = window_of()
        for index, call in enumerate(calls):
            with torch.inference_mode(index % 2 == 0):
                window._on_call(call)
        window.finish()
        assert_same({layer: sums.data for layer, sums in window.sums.items()}, alone(calls))


class TestAfterTheCall:
    def test_the_model_may_write_to_its_tensors(self):
        calls = [make_call(i) for i in range(3)]
        expected = alone(calls)
        window = window_of()
        for call in calls:
            window._on_call(call)
            for tensor in (call.query, call.key, call.value, call.output):
                tensor.fill_(torch.nan)
        window.finish()
        assert_same({layer: sums.data for layer, sums in window.sums.items()}, expected)

    def test_nothing_of_the_model_is_held(self):
        made = make_call(0)
        arrays = [getattr(made, name).numpy().copy() for name in ("query", "key", "value", "output")]
        gone = [weakref.ref(array) for array in arrays]  # a storage holds the array that it was made from
        call = dataclasses.replace(
            made, **dict(zip(("query", "key", "value", "output"), map(torch.from_numpy, arrays), strict=True))
        )
        window = window_of()
        window._on_call(call)
        del arrays, call
        assert window._pool._held > 0
        assert [reference() for reference in gone] == [None] * 4

    def test_a_pass_without_gradients_does_not_count_beside_one_with(self):
        model, (batch,) = spread(tiny_gpt2(positions=LENGTH)).train(), token_batches(1)
        with watch(model, 1, alerts=False) as monitor:
            model(**batch).loss.backward()
            expected = monitor.step()
        other = {"input_ids": batch["input_ids"].flip(1)}
        with watch(model, 1, alerts=False) as monitor:
            with torch.no_grad():
                model(**other)
            model(**batch).loss.backward()
            found = monitor.step()
        assert found.values == expected.values
        assert found.rows_used == expected.rows_used


EVERY_ROW = {"rows": "all", "quantities": ["entropy", "first_key_weight"], "alerts": False}


class TestEveryRowWithoutItsWeights:
    def calls(self):
        padded = torch.ones(3, LENGTH, dtype=torch.bool)
        padded[1, 60:] = False
        return [
            make_call(0, batch=3),
            make_call(1, batch=3, valid=padded),
            make_call(2),
            dataclasses.replace(make_call(3), layer="layers.2"),
            make_call(4, query=make_call(4).query.double(), key=make_call(4).key.double(), checked=False),
            make_call(5),
        ]

    @pytest.mark.parametrize("budget", [0, 1000, 10**9])
    def test_sums_of_several_layers_are_those_of_each(self, budget):
        found = {}
        for limit in (0, budget):
            with mock.patch("attnmon.window._UNSUMMED", limit):
                found[limit], measured = read(self.calls(), **EVERY_ROW)
            measured.assert_not_called()
        expected = found[0]
        for layer, sums in found[budget].items():
            torch.testing.assert_close(sums, expected[layer], rtol=1e-12, atol=0)
        assert expected["layers.1"][0, :, 0].tolist() == [3 * LENGTH - 36] * HEADS
        assert expected["layers.2"][0, :, 0].tolist() == [2 * LENGTH] * HEADS

    def test_inference_mode_before_and_after(self):
        window = window_of(**EVERY_ROW)
        for index, call in enumerate(self.calls()):
            with torch.inference_mode(index % 2 == 0), torch.no_grad():
                window._on_call(call)
        window.finish()
        expected, _ = read(self.calls(), **EVERY_ROW)
        for layer, sums in window.sums.items():
            torch.testing.assert_close(sums.data, expected[layer], rtol=1e-12, atol=0)
