"""What the capture tests share: a reference that recomputes a call, and a check that nothing stays behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from attnmon.capture import attach
from attnmon.types import AttentionCall


def _recompute(call: AttentionCall) -> Tensor:
    """Output of a call by the definition in `AttentionCall`, float64, one head at a time."""
    batch, num_heads, q_len, _ = call.query.shape
    kv_len = call.key.shape[2]
    group = num_heads // call.num_kv_heads
    out = torch.zeros(batch, num_heads, q_len, call.value.shape[3], dtype=torch.float64)
    mask = None if call.attn_mask is None else call.attn_mask.expand(batch, num_heads, q_len, kv_len)
    for b in range(batch):
        for h in range(num_heads):
            key, value = call.key[b, h // group].double(), call.value[b, h // group].double()
            scores = call.query[b, h].double() @ key.T * call.scale
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask[b, h], float("-inf"))
            elif mask is not None:
                scores = scores + mask[b, h].double()
            if call.causal_offset is not None:
                i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
                scores = scores.masked_fill(j > i + call.causal_offset, float("-inf"))
            out[b, h] = scores.softmax(-1).nan_to_num(0.0) @ value
    return out


@pytest.fixture
def recompute() -> Callable[[AttentionCall], Tensor]:
    """Recomputes the output of a call, ``(batch, num_heads, q_len, v_head_dim)``."""
    return _recompute


class Captured:
    """A run of a model under capture: the calls, the skipped layers, and the inputs of its output projections."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.skipped: dict[str, list[str]] = {}
        self.inner: list[Tensor] = []
        self.result: object = None

    def skip(self, layer: str, reason: str) -> None:
        self.skipped.setdefault(layer, []).append(reason)


@pytest.fixture
def capture() -> Callable[..., Captured]:
    """``capture(model, run, projection)`` runs ``run()`` attached.

    `projection` is the last part of the name of the layers that the heads' outputs go into, whose inputs are the
    independent witness of what the attention computed.
    """

    def run_captured(model: nn.Module, run: Callable[[], object], projection: str | None = None, **options) -> Captured:
        captured = Captured()
        handles = []
        for name, module in model.named_modules():
            if projection is not None and name.rpartition(".")[2] == projection:
                hook = lambda _, args: captured.inner.append(args[0].detach().clone())  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook))
        try:
            with attach(model, captured.calls.append, captured.skip, **options):
                captured.result = run()
        finally:
            for handle in handles:
                handle.remove()
        return captured

    return run_captured


def _trace(model: nn.Module) -> dict[str, object]:
    """Everything about `model`, and about the process, that capture touches."""
    state: dict[str, object] = {"modes": list(_get_current_function_mode_stack())}
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"):
            state[f"{name}.{kind}"] = dict(getattr(module, kind))
        for kind in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"):
            state[f"{name}.{kind}"] = dict(getattr(module, kind))
        state[f"{name}.dict"] = {key: id(value) for key, value in vars(module).items()}
    with contextlib.suppress(ImportError):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

        state["global"] = dict(functions._global_mapping)
        state["local"] = dict(functions._local_mapping)
        state["registry"] = {key: value for key, value in vars(functions).items() if key != "_local_mapping"}
    return state


@pytest.fixture
def trace() -> Callable[[nn.Module], dict[str, object]]:
    """Snapshot of what capture may touch, to compare before and after."""
    return _trace


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test may leave a mode or an attachment behind."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only wait for the other threads
    yield
    torch.set_num_threads(threads)
    from attnmon.capture import _state

    left = list(_state.ACTIVE), _get_current_function_mode_stack()
    for attachment in left[0]:  # so that the next test starts clean
        attachment.detach()
    assert left == ([], [])
