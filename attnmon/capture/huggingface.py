"""Capture of models that attend through transformers' attention interface.

The registered attention functions are replaced, in the registries that the watched modules use, by dispatchers that
call the original with the very same arguments and then read those arguments. What a call means depends on what the
original does with them, so that is read off the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnmon.capture import _state
from attnmon.capture.attention_function import Traits, traits_of, unexplained
from attnmon.capture.discovery import interface_function
from attnmon.types import AttentionCall

if TYPE_CHECKING:
    from attnmon.capture.attachment import Attachment, Take

__all__ = ["bypassing", "install"]

_OPAQUE = ("flash", "flex", "paged")


class _Slot:
    """One entry of a registry's tables, replaced while anybody watches."""

    def __init__(self, interface: Any, table: dict[str, Any], name: str) -> None:
        self.interface = interface
        self.table = table
        self.name = name
        self.users = 0
        self.had = False
        self.previous: Callable[..., Any] | None = None
        self.replacement = self.make_replacement()

    def make_replacement(self) -> Callable[..., Any]:
        raise NotImplementedError

    def install(self) -> None:
        if self.users == 0:
            self.had = self.name in self.table
            self.previous = self.table.get(self.name)
            self.table[self.name] = self.replacement
        self.users += 1

    def release(self) -> None:
        self.users -= 1
        if self.users or self.table.get(self.name) is not self.replacement:
            return  # still needed, or replaced after us and to stay so
        if self.had:
            self.table[self.name] = self.previous
        else:
            del self.table[self.name]


class _Function(_Slot):
    """A registered attention function."""

    def make_replacement(self) -> Callable[..., Any]:
        def original() -> Callable[..., Any]:
            registered: Callable[..., Any] = self.interface._global_mapping.get(self.name)
            return self.previous if self.previous is not None else registered

        return _dispatcher(self.name, original)


class _Default(_Slot):
    """The way to a function that is not registered: "eager", which each model file brings along itself."""

    def make_replacement(self) -> Callable[..., Any]:
        dispatchers: dict[Callable[..., Any], Callable[..., Any]] = {}

        def get_interface(attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            if self.previous is not None:
                function = self.previous(attn_implementation, default)
            else:
                function = type(self.interface).get_interface(self.interface, attn_implementation, default)
            if function is not default or default is None:
                return function  # type: ignore[no-any-return]
            if default not in dispatchers:
                dispatchers[default] = _dispatcher("eager", lambda: default)
            return dispatchers[default]

        return get_interface


def _dispatcher(name: str, original: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """An attention function that does what ``original()`` does, and shows the calls of watched modules."""

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = original()
        if torch.compiler.is_compiling():
            return function(module, *args, **kwargs)
        attachments = _state.watchers(module)
        if not attachments:
            return function(module, *args, **kwargs)
        with _state.busy():  # the fused function inside is this call, not another
            result = returned = function(module, *args, **kwargs)
        for attachment in attachments:
            attachment.guard(partial(_deliver, attachment, module, name, function, args, kwargs, result))
            answer = attachment.take_answer()
            if answer is not None:
                returned = _replaced(attachment, module, result, answer, returned)
        return returned

    return attention


# One replacement per entry for the life of the process: compiled code is guarded by its identity, and a new one for
# every attachment would mean a new compilation for every attachment.
_SLOTS: dict[tuple[int, str], _Slot] = {}


def install(modules: list[nn.Module]) -> Callable[[], None]:
    """Replace the attention functions that `modules` look up; the returned function puts them back."""
    wanted: dict[tuple[int, str], Any] = {}
    for module in modules:
        function = interface_function(type(module))
        if function is None:
            continue
        interface = function.__globals__["ALL_ATTENTION_FUNCTIONS"]
        for name in {"sdpa", "eager", _implementation(module)}:
            if name is not None and name in interface:
                wanted[id(interface), name] = interface
        if hasattr(type(interface), "get_interface"):
            wanted[id(interface), "get_interface"] = interface
    slots = []
    for (identity, name), interface in wanted.items():
        slot = _SLOTS.get((identity, name))
        if slot is None or slot.interface is not interface:
            if name == "get_interface":
                slot = _Default(interface, vars(interface), name)
            else:
                slot = _Function(interface, interface._local_mapping, name)
            _SLOTS[identity, name] = slot
        slot.install()
        slots.append(slot)

    def uninstall() -> None:
        while slots:
            slots.pop().release()

    return uninstall


def bypassing(layers: dict[nn.Module, str]) -> Iterator[tuple[str, str]]:
    """Layers that are set to attend without the interface, with the reason."""
    for module, layer in layers.items():
        around = getattr(module, "reorder_and_upcast_attn", False) is True
        if around and hasattr(module, "_upcast_and_reordered_attn") and _implementation(module) == "eager":
            reason = "`reorder_and_upcast_attn` with eager attention does not go through the attention interface"
            yield layer, f"{reason}; load the model with attn_implementation='sdpa'"


def _implementation(module: nn.Module) -> str | None:
    named = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return named if isinstance(named, str) else None


def _replaced(attachment: Attachment, module: nn.Module, result: Any, answer: Tensor, otherwise: Any) -> Any:
    """`result` with `answer` as its heads' outputs, in the layout of the interface: (batch, q_len, num_heads, d)."""
    answer = answer.transpose(1, 2)
    output = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(output, Tensor) or output.shape != answer.shape:
        came = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"as {type(output).__name__}"
        attachment.skip(
            attachment.layers[module],
            f"its attention function returns the heads' outputs {came}, where {tuple(answer.shape)} is expected",
        )
        return otherwise
    output = _state.in_place_of(output, answer)
    return (output, *result[1:]) if isinstance(result, tuple) else output


_POSITIONAL = ("query", "key", "value", "attention_mask")


def _deliver(
    attachment: Attachment,
    module: nn.Module,
    name: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    if any(word in name for word in _OPAQUE):
        attachment.skip(
            attachment.layers[module],
            f"attention implementation {name!r} keeps its masks to itself; load the model with "
            "attn_implementation='sdpa' (or 'eager') to monitor it",
        )
        return
    traits = traits_of(original, name == "eager")
    arguments = dict(kwargs)
    parameters = [n for n in inspect.signature(original).parameters if n != "module"] if len(args) > 4 else _POSITIONAL
    arguments.update(zip(parameters, args, strict=False))
    query, key = arguments.get("query"), arguments.get("key")
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() == 4 and key.dim() == 4):
        attachment.skip(attachment.layers[module], "its queries and keys do not have 4 dimensions")
        return
    sizes = (max(query.shape[0], key.shape[0]), query.shape[2], key.shape[2])
    attachment.deliver(module, sizes, lambda layer, take: _normalize(layer, take, module, traits, arguments, result))


def _normalize(
    layer: str, take: Take, module: nn.Module, traits: Traits, arguments: dict[str, Any], result: Any
) -> AttentionCall | str:
    query, key, value = (take(arguments[name]) for name in ("query", "key", "value"))
    batch, num_heads, q_len, head_dim = max(query.shape[0], key.shape[0]), *query.shape[1:]
    if key.shape[1] == 0 or num_heads % key.shape[1] or value.shape[1] != key.shape[1]:
        return f"it has {num_heads} query heads, {key.shape[1]} key heads and {value.shape[1]} value heads"
    query, key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (query, key, value))
    scaling = arguments.get("scaling")
    if scaling is None:
        default = getattr(module, "head_dim", head_dim) if traits.head_dim_default else head_dim
        scaling = default**-0.5
    if isinstance(scaling, Tensor) and scaling.numel() != 1:
        return f"its `scaling` is a tensor of shape {tuple(scaling.shape)} rather than a number"
    mask = arguments.get("attention_mask") if traits.reads_mask else None
    if mask is not None and not isinstance(mask, Tensor):
        return f"its `attention_mask` is a {type(mask).__name__}, which cannot be read as a tensor"
    kv_len = key.shape[2]
    bias = arguments.get("position_bias") if traits.kind == "unknown" or "position_bias" in traits.parameters else None
    if mask is not None:
        mask = mask.detach()
        if mask.dim() == 2 and mask.shape != (q_len, kv_len) and mask.shape[0] == arguments["query"].shape[0]:
            return f"its `attention_mask` has 2 dimensions {tuple(mask.shape)}, where 4 are expected"
        mask = take(mask[(None,) * (4 - mask.dim())]) if mask.dim() <= 4 else mask
        if mask.dim() != 4:
            return f"its `attention_mask` has {mask.dim()} dimensions, where 4 are expected"
        if traits.kind == "eager" and not mask.is_floating_point():
            mask = mask.to(query.dtype)  # added to the scores as the numbers they are
    causal_offset = None
    if traits.kind != "eager":
        is_causal = arguments.get("is_causal")
        is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if mask is None and is_causal and q_len > 1:
            # The flag aligns to the upper left and, with a longer key side, the function drops the rest of the keys.
            causal_offset = 0
            if kv_len > q_len:
                kv_len = q_len
                key, value = key[:, :, :q_len], value[:, :, :q_len]
                bias = bias[..., :q_len] if bias is not None else None
    if bias is not None:
        mask = _add_bias(take(bias), mask, key.dtype)
    if mask is not None and mask.shape[-1] > kv_len:
        mask = mask[..., :kv_len]
    sinks = _sinks(module, traits, arguments, take)
    if sinks is not None:
        key, value, mask = _append_sinks(sinks, query, key, value, mask)
    softcap = arguments.get("softcap") if "softcap" in traits.parameters else None
    return AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        causal_offset=causal_offset,
        scale=float(scaling),
        softcap=None if softcap is None else float(softcap),
        output=_output(module, traits, arguments, result, take, query, value),
        unexplained=unexplained(traits, arguments),
    )


def _add_bias(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(dtype).min)
    return bias + mask


def _sinks(module: nn.Module, traits: Traits, arguments: dict[str, Any], take: Take) -> Tensor | None:
    """Logits of the attention sinks, ``(1 or batch, num_heads, 1 or q_len, sinks)``."""
    if traits.module_sinks:
        sinks = getattr(module, "sinks", None)
        return None if sinks is None else sinks.detach().reshape(1, -1, 1, 1)
    if "sinks" in traits.parameters and arguments.get("sinks") is not None:
        return take(arguments["sinks"])
    return None


def _append_sinks(
    sinks: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sinks as keys: a zero key and a zero value whose score is the sink's logit, given as a bias."""
    count = sinks.shape[-1]
    _, num_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    key, value = (torch.cat([t, t.new_zeros(*t.shape[:2], count, t.shape[3])], dim=2) for t in (key, value))
    if mask is None:
        mask = query.new_zeros(1, 1, 1, 1)
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    rows = max(mask.shape[0], sinks.shape[0])
    dtype = torch.promote_types(mask.dtype, sinks.dtype)
    left = mask.to(dtype).expand(rows, num_heads, q_len, kv_len)
    right = sinks.to(dtype).expand(rows, num_heads, q_len, count)
    return key, value, torch.cat([left, right], dim=-1)


def _output(
    module: nn.Module,
    traits: Traits,
    arguments: dict[str, Any],
    result: Any,
    take: Take,
    query: Tensor,
    value: Tensor,
) -> Tensor | None:
    """The heads' outputs, unless dropout has changed them."""
    if arguments.get("dropout") and not (traits.kind == "eager" and not module.training):
        return None
    output = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(output, Tensor):
        return None
    expected = (arguments["query"].shape[2], query.shape[1], value.shape[3])
    if output.dim() != 4 or output.shape[1:] != expected:
        return None
    return take(output).transpose(1, 2)
