"""Figures of every row in one walk over the scores: the materialised computation is the oracle."""

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnmon import fused
from attnmon.fused import BASES, covers, fused_rows, kernel
from attnmon.fused import blocks as blocks_of_scores
from attnmon.masks import masked_softmax
from attnmon.metrics import entropy_statistics, first_key_weight, score_max
from attnmon.rows import all_rows
from attnmon.types import AttentionCall

ALL = sorted(BASES)
LOWEST = torch.finfo(torch.float32).min


def make_call(
    batch=2, heads=4, kv_heads=2, q_len=70, kv_len=70, head_dim=8, dtype=torch.float32, size=1.0, seed=0, **changes
) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return (torch.randn(*shape, generator=generator) * size).to(dtype)

    query = tensor(batch, heads, q_len, head_dim)
    key = tensor(batch, kv_heads, kv_len, head_dim)
    call = AttentionCall("attn", query, key, key, attn_mask=None, causal_offset=None, scale=head_dim**-0.5)
    return dataclasses.replace(call, **changes)


@torch.no_grad()
def materialised(call: AttentionCall) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {}
    for batch in all_rows(call):
        weights = masked_softmax(batch.logits, batch.mask)
        found = entropy_statistics(weights, mask=batch.mask)
        found["first_key_weight"] = first_key_weight(weights, mask=batch.mask)
        found["score_max"] = score_max(batch.scores, mask=batch.mask)
        for name, values in found.items():
            parts.setdefault(name, []).append(batch.per_head(values))
    return {name: torch.cat(values, dim=2) for name, values in parts.items()}


def check(call: AttentionCall, *, entropy: float = 1e-5) -> dict[str, torch.Tensor]:
    """`fused_rows` against the materialised computation: entropy to `entropy` nats, the others to 1e-5."""
    assert covers(call, ALL)
    rows, expected = fused_rows(call, ALL), materialised(call)
    assert rows is not None
    assert list(rows) == ALL
    for name, values in rows.items():
        assert values.dtype == expected[name].dtype, name
        assert torch.equal(values.isnan(), expected[name].isnan()), name
        atol = {"score_max": 2e-6, "entropy": entropy, "entropy_normalized": entropy}.get(name, 1e-5)
        rtol = {"score_max": 1e-5, "effective_keys": entropy}.get(name, 0.0)
        torch.testing.assert_close(values, expected[name], rtol=rtol, atol=atol, equal_nan=True, msg=name)
    assert not (rows["entropy"] < 0).any()
    assert not (rows["entropy_normalized"] > 1).any()
    assert not (rows["first_key_weight"] > 1).any()
    for name in ALL:  # each alone as beside the others
        alone = fused_rows(call, [name])
        assert alone is not None
        assert list(alone) == [name]
        assert torch.equal(alone[name].nan_to_num(-1), rows[name].nan_to_num(-1)), name
    return rows


def by_kernel(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(fused, "_KERNEL", {"cpu"})
    monkeypatch.setattr(fused, "_LARGE_BLOCK", {"cpu": (1 << 22, 128)})


def in_small_blocks(monkeypatch):
    """Blocks so small that rows, sequences and heads are all split."""
    monkeypatch.setitem(fused._BLOCK, "cpu", (700, 16))
    monkeypatch.setattr(fused, "_LARGE_BLOCK", {"cpu": (700, 16)})
    monkeypatch.setattr(blocks_of_scores, "_LEAST_ROWS", 4)
    monkeypatch.setattr(kernel, "_BIAS", (700, 16))
    monkeypatch.setattr(fused, "_READ", 700)


@pytest.fixture(params=["kernel", "kernel_in_blocks", "scores", "scores_in_blocks", "some"])
def blocks(request, monkeypatch):
    """Rows from the fused kernel alone (as on a GPU), from their scores alone (as on a CPU), and some from each."""
    if not request.param.startswith("scores"):
        by_kernel(monkeypatch)
        monkeypatch.setattr(kernel, "_LEAST_WIDTH", 1)  # the heads here are small
    if request.param.endswith("blocks") or request.param == "some":
        in_small_blocks(monkeypatch)
    if request.param.startswith("scores"):
        pass
    elif request.param == "some":
        monkeypatch.setattr(kernel, "_TOLERATED", 2.5e-6)
    else:
        monkeypatch.setattr(kernel, "_TOLERATED", math.inf)
        monkeypatch.setattr(fused, "weights", None)


@pytest.fixture(params=["cpu", "gpu"])
def device_kind(request, monkeypatch):
    """The way of a CPU, and that of a GPU with all it decides by itself."""
    if request.param == "gpu":
        by_kernel(monkeypatch)
    return request.param


def random_mask(*shape: int, share: float = 0.6) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < share


MASKS = {
    "none": None,
    "keys": random_mask(2, 1, 1, 70),
    "keys_of_heads": random_mask(2, 4, 1, 70),
    "shared": random_mask(1, 1, 70, 70),
    "sequences": random_mask(2, 1, 70, 70),
    "heads": random_mask(1, 4, 70, 70),
    "each": random_mask(2, 4, 70, 70),
    "few": random_mask(2, 4, 70, 70, share=0.02),  # rows that see nothing, or one key
    "nothing": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
    "two_dimensional": random_mask(1, 1, 70, 70)[0, 0],
    "queries": random_mask(2, 1, 70, 1).expand(2, 1, 70, 70),
    "expanded": random_mask(2, 1, 1, 70).expand(2, 4, 70, 70),
    "window": torch.ones(70, 70, dtype=torch.bool).tril().triu(-9)[None, None],
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [None, 0])
@pytest.mark.parametrize("mask", MASKS)
def test_bool_masks_of_every_shape(mask, causal):
    attn_mask = MASKS[mask]
    call = make_call(attn_mask=attn_mask, causal_offset=causal)
    if attn_mask is not None and attn_mask.dim() == 2:  # the rows of a call want four dimensions
        rows = fused_rows(call, ALL)
        whole = fused_rows(dataclasses.replace(call, attn_mask=attn_mask[None, None]), ALL)
        assert all(torch.equal(rows[name].nan_to_num(-1), whole[name].nan_to_num(-1)) for name in ALL)
        return
    before = None if attn_mask is None else attn_mask.clone()
    check(call)
    assert attn_mask is None or torch.equal(attn_mask, before)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [None, 0])
@pytest.mark.parametrize("hidden", [-math.inf, LOWEST, -1e9, -1e4])
@pytest.mark.parametrize("mask", ["keys", "sequences", "few", "expanded"])
def test_float_masks_that_only_hide(mask, hidden, causal):
    visible = MASKS[mask]
    bias = torch.zeros(visible.shape).masked_fill(~visible, hidden)
    check(make_call(attn_mask=bias, causal_offset=causal))


def test_small_numbers_hide_beside_a_zero():
    bias = torch.zeros(1, 1, 1, 70).masked_fill(~MASKS["keys"][:1], -100.0)
    check(make_call(attn_mask=bias))
    # Beside a causal limit the zero may be out of sight, and then they hide nothing.
    assert not covers(make_call(attn_mask=bias, causal_offset=0), ALL)
    assert fused_rows(make_call(attn_mask=bias, causal_offset=0), ALL) is None


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["keys", "rows"])
def test_padding(side, form):
    valid = torch.ones(2, 70, dtype=torch.bool)
    valid[1, :40] = False
    valid = valid if side == "left" else valid.flip(1)
    mask = valid[:, None, None]
    causal = 0
    if form == "rows":
        mask, causal = mask & torch.ones(70, 70, dtype=torch.bool).tril(), None
    rows = check(make_call(attn_mask=mask, causal_offset=causal, valid=valid))
    assert rows["entropy"].isnan().any() == (side == "left")
    if side == "left":
        assert (rows["first_key_weight"][1, :, 40] == 1).all()  # the first real token


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("offset", [None, 0, 30, 5, -20, -100, 200])
@pytest.mark.parametrize("mask", [None, "keys"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 70), (70, 40)])
def test_lengths_and_offsets(q_len, kv_len, mask, offset):
    attn_mask = None if mask is None else MASKS[mask][..., :kv_len]
    check(make_call(q_len=q_len, kv_len=kv_len, causal_offset=offset, attn_mask=attn_mask))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("head_dim", [8, 20, 5, 1])
def test_heads_and_their_size(heads, kv_heads, head_dim):
    check(make_call(heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal_offset=0))
    check(make_call(heads=heads, kv_heads=kv_heads, head_dim=head_dim, attn_mask=random_mask(1, heads, 70, 70)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [None, 0])
def test_dtypes(dtype, causal):
    rows = check(make_call(dtype=dtype, causal_offset=causal, attn_mask=MASKS["sequences"]))
    assert rows["entropy"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_keys_that_are_a_view_of_another_order():
    call = make_call(causal_offset=0)
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (call.query, call.key)]
    check(dataclasses.replace(call, query=turned[0], key=turned[1]))


@pytest.mark.parametrize("scale", [-0.35, 2.0, 1e-3])
def test_scales(scale):
    check(make_call(scale=scale, causal_offset=0, attn_mask=MASKS["keys"]))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kv_len", [1, 2, 63, 64])
@pytest.mark.parametrize("q_len", [1, 2])
def test_few_keys_and_queries(q_len, kv_len):
    rows = check(make_call(q_len=q_len, kv_len=kv_len))
    check(make_call(q_len=q_len, kv_len=kv_len, causal_offset=kv_len - q_len))
    assert rows["entropy_normalized"].isnan().all() == (kv_len < 2)
    assert rows["active_share"].isnan().all() == (kv_len < 64)
    if kv_len == 1:
        assert (rows["entropy"] == 0).all()
        assert (rows["first_key_weight"] == 1).all()


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("causal", [None, 0])
def test_large_scores_are_as_exact_as_in_float64(causal, small, monkeypatch):
    """Scores with a spread of about 100: rounding of the scores themselves is all that is left."""
    if small:
        in_small_blocks(monkeypatch)
    call = make_call(size=10.0, head_dim=16, scale=0.25, causal_offset=causal)
    exact = materialised(dataclasses.replace(call, query=call.query.double(), key=call.key.double()))
    assert exact["score_max"].max() > 250
    rows = check(call, entropy=1e-4)
    rounding = 4 * torch.finfo(torch.float32).eps * exact["score_max"]
    assert ((rows["entropy"] - exact["entropy"]).abs() <= rounding).all()
    assert ((rows["first_key_weight"] - exact["first_key_weight"]).abs() <= rounding).all()


def test_sinks_and_one_hot_rows(device_kind, monkeypatch):
    """The first key far above the rest: what the fused kernel's own product loses (5e-5 nats) is kept."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 1024, 16, generator=generator) / 8
    key = torch.randn(1, 4, 1024, 16, generator=generator)
    key[:, :, 0] *= 20
    query = query + key[:, :, :1] * 0.0025
    call = AttentionCall("attn", query, key, key, attn_mask=None, causal_offset=0, scale=1.0)
    exact = materialised(dataclasses.replace(call, query=query.double(), key=key.double()))
    rows = check(call)
    assert (exact["first_key_weight"] > 0.999).float().mean() > 0.1
    assert (rows["entropy"] - exact["entropy"]).abs().max() < 5e-6
    assert (rows["first_key_weight"] - exact["first_key_weight"]).abs().max() < 5e-6
    if device_kind == "gpu":
        with monkeypatch.context() as patch:  # the kernel by itself, to see that the case is one
            patch.setattr(kernel, "_TOLERATED", math.inf)
            alone = fused_rows(call, ["entropy"])
        assert (alone["entropy"] - exact["entropy"]).abs().max() > 1e-5
    one_hot = check(dataclasses.replace(call, query=query * 0 + key[:, :, :1]))
    assert one_hot["entropy"].max() < 1e-30
    assert (one_hot["first_key_weight"] == 1).all()
    elsewhere = check(dataclasses.replace(call, query=query * 0 - key[:, :, :1], causal_offset=None))
    assert elsewhere["first_key_weight"].max() < 1e-30


@pytest.mark.usefixtures("device_kind")
def test_uniform_rows():
    call = make_call(causal_offset=0, query=torch.zeros(2, 4, 70, 8))
    rows = check(call)
    count = torch.arange(1.0, 71).expand(2, 4, 70)
    torch.testing.assert_close(rows["effective_keys"], count)
    torch.testing.assert_close(rows["first_key_weight"], 1 / count)
    assert (rows["score_max"] == 0).all()


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_rows_that_are_not_finite_are_left_to_the_caller(name, value):
    call = make_call(causal_offset=0)
    tensor = getattr(call, name).clone()
    tensor[1, 1, 3, 2] = value
    call = dataclasses.replace(call, **{name: tensor, "scale": 1e15})
    assert fused_rows(call, ALL) is None


BIAS = torch.randn(1, 4, 70, 70, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes",
    [
        {"softcap": 20.0},
        {"attn_mask": BIAS},
        {"attn_mask": BIAS[:, :, :1]},
        {"attn_mask": torch.full((1, 1, 1, 70), -3.0)},
        {"attn_mask": torch.full((1, 1, 1, 70), math.nan)},
        {"attn_mask": torch.ones(1, 1, 1, 70, dtype=torch.uint8)},
        {"attn_mask": torch.ones(1, 1, 1, 60, dtype=torch.bool)},
        {"query": torch.zeros(2, 4, 70, 8, dtype=torch.int64)},
        {"query": torch.zeros(2, 4, 70, 8, device="meta")},
        {"query": torch.zeros(2, 4, 0, 8)},
        {"key": torch.zeros(2, 2, 0, 8)},
    ],
    ids=["softcap", "bias", "key_bias", "constant", "nan", "uint8", "short", "int64", "meta", "no_query", "no_key"],
)
@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("causal", [None, 0])
def test_what_is_not_covered(changes, causal):
    call = make_call(causal_offset=causal, **changes)
    assert not covers(call, ["entropy"])
    assert fused_rows(call, ["entropy"]) is None


@pytest.mark.usefixtures("device_kind")
def test_other_quantities_are_not_covered():
    assert covers(make_call(), [])
    assert fused_rows(make_call(), []) == {}
    for name in ("separability", "score_spread", "entropy@1"):
        assert not covers(make_call(), ["entropy", name])
        assert fused_rows(make_call(), ["entropy", name]) is None


@pytest.mark.usefixtures("device_kind")
def test_neither_gradients_nor_autocast_reach_inside():
    call = make_call(causal_offset=0)
    plain = fused_rows(call, ALL)
    tracked = dataclasses.replace(call, query=call.query.clone().requires_grad_())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = fused_rows(tracked, ALL)
    for name in ALL:
        assert not rows[name].requires_grad
        assert torch.equal(rows[name].nan_to_num(-1), plain[name].nan_to_num(-1))


def random_rows(kind: str, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(1, 2, *shape, generator=generator)

    length = 512
    query, key = normal(length, head_dim) / head_dim**0.5, normal(length, head_dim)
    if kind == "common":  # what all keys share
        key = key + 5 * normal(1, head_dim)
    elif kind == "small_sink":
        common = normal(1, head_dim)
        query = query - 1.5 * common / head_dim**0.5
        key = key + 2 * common
        key[:, :, 0] = 0
    elif kind == "big_sink":
        key[:, :, 0] *= 20
        query = query + 0.02 * key[:, :, :1] / head_dim**0.5
    elif kind == "low_rank":
        basis = normal(4, head_dim)
        query, key = normal(length, 4) @ basis / head_dim**0.5 / 2, normal(length, 4) @ basis / 2
    elif kind == "heavy":
        key = key * normal(1, head_dim).exp()
    elif kind == "opposed":  # pairs of keys that cancel in the mean key
        apart = 10 * normal(length // 2, head_dim)
        key = torch.cat([key[:, :, ::2] + apart, key[:, :, ::2] - apart], dim=2)
        query = query * 0.3
    return query, key


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("kind", ["normal", "common", "small_sink", "big_sink", "low_rank", "heavy", "opposed"])
def test_rounding_stays_below_what_is_tolerated(kind, head_dim, scale):
    """Against float64: as good as the materialised computation, or within 5e-6."""
    query, key = random_rows(kind, head_dim)
    call = AttentionCall("attn", query, key, key, attn_mask=None, causal_offset=0, scale=scale)
    exact = materialised(dataclasses.replace(call, query=query.double(), key=key.double()))
    own = materialised(call)
    rows = fused_rows(call, ["entropy", "first_key_weight"])
    for name in ("entropy", "first_key_weight"):
        error, of_float32 = (rows[name] - exact[name]).abs(), (own[name] - exact[name]).abs()
        assert error.max() < 5e-6 + 2 * of_float32.max(), name


class Largest(TorchDispatchMode):
    """The largest memory behind any tensor that an operation returns, in elements."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                elements = max(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
                self.elements = max(self.elements, elements)
        return out


LENGTH = 2048


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("form", ["causal", "keys", "bool", "float", "heads"])
def test_no_tensor_has_two_sequence_dimensions(form, monkeypatch):
    monkeypatch.setitem(fused._BLOCK, "cpu", (1 << 17, 64))
    monkeypatch.setattr(fused, "_LARGE_BLOCK", {"cpu": (1 << 17, 64)})
    monkeypatch.setattr(kernel, "_BIAS", (1 << 17, 512))
    monkeypatch.setattr(fused, "_READ", 1 << 17)
    heads, kv_heads = 4, 2
    mask = {
        "causal": None,
        "keys": torch.ones(1, 1, 1, LENGTH, dtype=torch.bool),
        "bool": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril(),
        "float": torch.zeros(1, 1, LENGTH, LENGTH).masked_fill_(
            ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), LOWEST
        ),
        "heads": torch.ones(1, heads, LENGTH, LENGTH, dtype=torch.bool).tril(),
    }[form]
    call = make_call(
        batch=1,
        heads=heads,
        kv_heads=kv_heads,
        q_len=LENGTH,
        kv_len=LENGTH,
        head_dim=16,
        attn_mask=mask,
        causal_offset=0 if form in ("causal", "keys") else None,
    )
    with Largest([call.query, call.key] + ([] if mask is None else [mask])) as largest:
        assert covers(call, ALL)
        rows = fused_rows(call, ALL)
    assert rows is not None
    assert largest.elements <= 2 * (1 << 17)  # both buffers; two sequence dimensions are 1 << 22
