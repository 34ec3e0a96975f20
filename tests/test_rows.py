"""Rows: the draws, and scores, masks and heads as torch's own attention has them."""

import dataclasses

import pytest
import torch

from attnmon.masks import hides, masked_softmax
from attnmon.rows import RowSampler, all_rows, row_batches, take_rows
from attnmon.types import AttentionCall


def make_call(
    batch=2, heads=4, kv_heads=2, q_len=12, kv_len=12, head_dim=8, dtype=torch.float32, seed=0, **changes
) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    call = AttentionCall(
        layer="attn",
        query=tensor(batch, heads, q_len, head_dim),
        key=tensor(batch, kv_heads, kv_len, head_dim),
        value=tensor(batch, kv_heads, kv_len, head_dim),
        attn_mask=None,
        causal_offset=None,
        scale=head_dim**-0.5,
    )
    return dataclasses.replace(call, **changes)


def outputs(call: AttentionCall, sampler: RowSampler) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The attention output of each row, its position and its weight, put together over the chunks."""
    parts = []
    for batch in row_batches(call, sampler):
        weights = masked_softmax(batch.logits, batch.mask)
        parts.append((batch.per_head(weights @ batch.values), batch.positions, batch.weight))
    out, positions, weight = zip(*parts, strict=True)
    return torch.cat(out, dim=2), torch.cat(positions, dim=1), torch.cat(weight, dim=1)


def torch_output(call: AttentionCall) -> torch.Tensor:
    mask = call.attn_mask
    if call.causal_offset is not None:
        q_len, kv_len = call.query.shape[2], call.key.shape[2]
        causal = torch.ones(q_len, kv_len, dtype=torch.bool).tril(call.causal_offset)
        if mask is None:
            mask = causal
        else:
            mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)
    return torch.nn.functional.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=mask, scale=call.scale, enable_gqa=True
    )


BIAS = torch.randn(2, 4, 12, 12, generator=torch.Generator().manual_seed(5))
KEYS = torch.rand(2, 1, 1, 12, generator=torch.Generator().manual_seed(6)) > 0.3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal_offset": 0},
        {"attn_mask": KEYS},
        {"attn_mask": BIAS},
        {"attn_mask": BIAS[:1, :, :1], "causal_offset": 0},
        {"attn_mask": torch.where(KEYS, 0.0, torch.finfo(torch.float32).min)},
        {"attn_mask": torch.where(KEYS, 0.0, -1e9), "scale": 0.7},
        {"attn_mask": torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)[None, None]},
    ],
    ids=["full", "causal", "keys", "bias", "broadcast", "finfo_min", "minus_1e9", "window"],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_give_torchs_own_output(changes, kv_heads):
    call = make_call(kv_heads=kv_heads, **changes)
    out, positions, _ = outputs(call, RowSampler(5, 4, "key"))
    torch.testing.assert_close(out, take_rows(torch_output(call), positions), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0, 5])
def test_causal_offset_with_longer_keys(offset):
    call = make_call(kv_len=17, causal_offset=offset)
    out, positions, _ = outputs(call, RowSampler("all", 4, "key"))
    torch.testing.assert_close(out, take_rows(torch_output(call), positions), rtol=1e-5, atol=1e-5)
    for batch in row_batches(call, RowSampler("all", 4, "key")):
        visible = batch.per_head(batch.mask.sum(dim=-1))
        assert (visible == batch.positions[:, None] + offset + 1).all()
        future = torch.arange(17) > (batch.positions + offset)[:, None, :, None]
        weights = batch.per_head(masked_softmax(batch.logits, batch.mask))
        assert (weights.masked_select(future) == 0).all()


def test_softcap():
    call = make_call(softcap=1.5, causal_offset=0)
    scores = call.query @ call.key.repeat_interleave(2, dim=1).mT * call.scale
    scores = 1.5 * torch.tanh(scores / 1.5)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    expected = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ call.value.repeat_interleave(2, dim=1)
    out, positions, _ = outputs(call, RowSampler("all", 4, 0))
    torch.testing.assert_close(out, take_rows(expected, positions), rtol=1e-5, atol=1e-5)


def test_bf16_is_measured_in_float32():
    (batch,) = row_batches(make_call(dtype=torch.bfloat16), RowSampler(4, 4, 0))
    assert batch.logits.dtype == batch.values.dtype == torch.float32
    (batch,) = row_batches(make_call(dtype=torch.float64), RowSampler(4, 4, 0))
    assert batch.logits.dtype == torch.float64


def test_chunks_change_nothing(monkeypatch):
    call = make_call(q_len=40, kv_len=40, causal_offset=0)
    whole, positions, weight = outputs(call, RowSampler("all", 4, 0))
    monkeypatch.setattr("attnmon.rows._CHUNK_ELEMENTS", 2 * 4 * 40 * 7)
    assert len(list(row_batches(call, RowSampler("all", 4, 0)))) == 6
    out, chunk_positions, chunk_weight = outputs(call, RowSampler("all", 4, 0))
    torch.testing.assert_close(out, whole)
    assert torch.equal(positions, chunk_positions)
    assert torch.equal(weight, chunk_weight)


def test_nonfinite_rows_are_found():
    call = make_call(causal_offset=0)
    call.query[0, 1, 3] = torch.nan
    call.key[1, 1, 5] = torch.inf  # heads 2 and 3 read it, from position 5 on
    (batch,) = row_batches(call, RowSampler("all", 4, 0))
    expected = torch.ones(2, 4, 12, dtype=torch.bool)
    expected[0, 1, 3] = False
    expected[1, 2:, 5:] = False
    assert torch.equal(batch.finite, expected)


def test_nan_in_an_additive_mask_is_not_taken_for_hidden():
    mask = torch.zeros(1, 1, 12, 12)
    mask[0, 0, 4, 2] = torch.nan
    (batch,) = row_batches(make_call(attn_mask=mask), RowSampler("all", 4, 0))
    assert not batch.finite[:, :, 4].any()
    assert batch.finite[:, :, 5].all()


NEAR = [0.0, -3.0, -40.0]
FAR = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("bias", "hidden"),
    [
        ([0.0, -100.0, -100.0], [False, True, True]),
        ([5.0, -2.0, -95.0, -102.0], [False, False, True, True]),  # a position bias with a mask on top
        ([-0.5 * distance for distance in range(300)], [False] * 300),  # a bias that falls with the distance
        ([*NEAR, -60.0, -100.0], [False] * 5),
        ([*NEAR, -60.0, -100.0, -1e4, FAR, -torch.inf], [False] * 5 + [True] * 3),
        ([*NEAR, -100.0, FAR], [False] * 3 + [True] * 2),
        ([-100.0, -100.0], [False, False]),
        ([FAR, FAR], [True, True]),
        ([torch.nan, 0.0, -100.0], [False, False, False]),
    ],
)
def test_what_hides_in_an_additive_mask(bias, hidden):
    """A bias that reaches far without a gap is a bias, however small the weights that it leaves."""
    assert hides(torch.tensor([bias, bias[::-1]])).tolist() == [hidden, hidden[::-1]]


class TestPositions:
    def test_padding_is_never_drawn_and_short_sequences_are_read_whole(self):
        valid = torch.ones(3, 100, dtype=torch.bool)
        valid[0, :90] = False  # left padding: 10 tokens
        valid[1] = False
        positions, weight = RowSampler(16, 4, "k").positions(3, 100, valid, torch.device("cpu"))
        assert positions[0, :10].tolist() == list(range(90, 100))
        assert weight[0].tolist() == [1.0] * 10 + [0.0] * 6
        assert weight[1].tolist() == [0.0] * 16
        assert weight[2].tolist() == [100 / 16] * 16
        assert (positions[2].diff() >= 0).all()

    def test_one_row_from_each_stratum(self):
        positions, _ = RowSampler(10, 4, "k").positions(5, 100, None, torch.device("cpu"))
        assert torch.equal(positions // 10, torch.arange(10).expand(5, 10))

    def test_every_position_is_equally_likely(self):
        """37 positions in 16 strata: shares of boundary positions must add up."""
        counts = torch.zeros(37)
        for key in range(3000):
            positions, _ = RowSampler(16, 1, key).positions(1, 37, None, torch.device("cpu"))
            counts += positions[0].bincount(minlength=37)
        # 3000 draws with probability 16/37 each: a standard deviation of about 0.021 in these units
        assert ((counts / 3000 * 37 / 16 - 1).abs() < 0.1).all()

    def test_mean_over_rows_is_unbiased(self):
        figure = torch.linspace(0, 1, 37) ** 2
        means = []
        for key in range(2000):
            positions, weight = RowSampler(8, 1, key).positions(1, 37, None, torch.device("cpu"))
            means.append((figure[positions] * weight).sum() / weight.sum())
        estimate = torch.stack(means)
        error = estimate.std() / 2000**0.5
        assert abs(estimate.mean() - figure.mean()) < 4 * error

    def test_same_key_same_rows_and_other_key_other_rows(self):
        first, again, other = (RowSampler(8, 2, key) for key in [(0, "train", 5), (0, "train", 5), (0, "train", 6)])
        device = torch.device("cpu")
        assert torch.equal(first.select(50), again.select(50))
        assert torch.equal(first.positions(2, 99, None, device)[0], again.positions(2, 99, None, device)[0])
        assert not torch.equal(again.positions(2, 99, None, device)[0], other.positions(2, 99, None, device)[0])

    def test_the_same_sequences_and_rows_for_every_layer(self):
        sampler = RowSampler(8, 2, 0)
        assert sampler.select(2) is None
        assert sampler.select(10).shape == (2,)
        assert torch.equal(sampler.select(10), sampler.select(10))
        first = sampler.positions(2, 64, None, torch.device("cpu"))[0]
        assert torch.equal(first, sampler.positions(2, 64, None, torch.device("cpu"))[0])

    def test_global_random_state_is_left_alone(self):
        before = torch.get_rng_state()
        sampler = RowSampler(8, 2, 0)
        sampler.select(10)
        sampler.positions(2, 64, None, torch.device("cpu"))
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("elements", [1, 700, 10**6])
def test_all_rows_come_in_order_and_with_padding(elements, monkeypatch):
    monkeypatch.setattr("attnmon.rows._CHUNK_ELEMENTS", elements)
    call = make_call(causal_offset=0, valid=torch.rand(2, 12) > 0.5)
    batches = list(all_rows(call))
    assert (len(batches) > 1) == (elements < 10**6)
    positions = torch.cat([batch.positions for batch in batches], dim=1)
    assert torch.equal(positions, torch.arange(12).expand(2, 12))
    assert all((batch.weight == 1).all() for batch in batches)
    out = [batch.per_head(masked_softmax(batch.logits, batch.mask) @ batch.values) for batch in batches]
    torch.testing.assert_close(torch.cat(out, dim=2), torch_output(call))
