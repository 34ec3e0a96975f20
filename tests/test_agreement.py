"""Whether a module's own output is the one that captured arguments give."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from attnmon import agreement
from attnmon.agreement import disagrees
from attnmon.masks import hide
from attnmon.rows import RowSampler, row_batches
from attnmon.types import AttentionCall

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LENGTH = 40


def make_call(dtype: torch.dtype, size: float = 1.0, mask: torch.Tensor | None = None) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    query = (size * torch.randn(3, 4, LENGTH, 8, generator=generator)).to(dtype)
    key, value = torch.randn(2, 3, 2, LENGTH, 8, generator=generator).to(dtype)
    causal = mask is None
    own = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=True)
    return AttentionCall("attn", query, key, value, mask, 0 if causal else None, 8**-0.5, output=own)


def verdict(call: AttentionCall) -> bool:
    batches = row_batches(call, RowSampler(4, 3, "a key"))
    return any(bool(disagrees(call.output, rows, hide(rows.logits, rows.mask).softmax(-1))) for rows in batches)


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_no_contradiction(dtype, size):
    assert not verdict(make_call(dtype, size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_explained_is_one(dtype):
    call = make_call(dtype)
    assert verdict(dataclasses.replace(call, output=1.5 * call.output))
    assert verdict(dataclasses.replace(call, output=-call.output))
    assert verdict(dataclasses.replace(call, scale=3 * call.scale))
    assert verdict(dataclasses.replace(call, causal_offset=None))
    one_head = call.output.clone()
    one_head[:, 2] += 1
    assert verdict(dataclasses.replace(call, output=one_head))


def test_rows_that_see_nothing_say_nothing():
    mask = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[1, :, :, :] = False
    call = make_call(torch.float32, mask=mask)
    for filler in (0.0, 7.0, torch.nan):
        output = call.output.clone()
        output[1] = filler
        assert not verdict(dataclasses.replace(call, output=output))
        output[2] += 1
        assert verdict(dataclasses.replace(call, output=output))


def test_nan_that_the_arguments_do_not_give_is_a_contradiction():
    call = make_call(torch.float32)
    output, value = call.output.clone(), call.value.clone()
    output[1] = torch.nan
    assert verdict(dataclasses.replace(call, output=output))
    value[1] = torch.nan
    assert not verdict(dataclasses.replace(call, output=output, value=value))


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_short_way_says_what_the_long_one_says(dtype, size, monkeypatch):
    """For errors from far below to far above what is allowed for."""
    call = make_call(dtype, size)
    noise = torch.randn(call.output.shape, generator=torch.Generator().manual_seed(1))
    errors = [10.0**exponent for exponent in range(-9, 2)]
    off = [dataclasses.replace(call, output=call.output + (error * noise).to(dtype)) for error in errors]
    found = [verdict(one) for one in off]
    assert found[-1]
    assert not found[0]
    monkeypatch.setattr(agreement, "_plainly_agrees", lambda own, recomputed: False)
    assert [verdict(one) for one in off] == found
