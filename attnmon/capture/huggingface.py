"""Capture of models that attend through transformers' attention interface.

The registered attention functions are replaced, in the registries that the watched modules use, by dispatchers that
call the original with the very same arguments and then read those arguments. What a call means depends on what the
original does with them, so that is read off the function itself.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterator
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
    """One entry of one registry, replaced while anybody watches."""

    def __init__(self, interface: Any, name: str) -> None:
        self.interface = interface
        self.name = name
        self.users = 0
        self.had = False
        self.previous: Callable[..., Any] | None = None
        self.dispatcher = self._make_dispatcher()

    def _make_dispatcher(self) -> Callable[..., Any]:
        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            original = self.original(module)
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            attachments = _state.watchers(module)
            if not attachments:
                return original(module, *args, **kwargs)
            with _state.busy():  # the fused function inside is this call, not another
                result = original(module, *args, **kwargs)
            for attachment in attachments:
                _deliver(attachment, module, self.name, original, args, kwargs, result)
            return result

        return attention

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """What `module` would have called; "eager" stands for the function of its own model file."""
        if self.had and self.previous is not None:
            return self.previous
        registered = self.interface._global_mapping.get(self.name)
        return registered if registered is not None else _eager_function(type(module))

    def install(self) -> None:
        if self.users == 0:
            local = self.interface._local_mapping
            self.had = self.name in local
            self.previous = local.get(self.name)
            local[self.name] = self.dispatcher
        self.users += 1

    def release(self) -> None:
        self.users -= 1
        if self.users:
            return
        local = self.interface._local_mapping
        if local.get(self.name) is self.dispatcher:  # otherwise it was replaced after us, and stays replaced
            if self.had:
                local[self.name] = self.previous
            else:
                del local[self.name]


# One dispatcher per entry for the life of the process: compiled code is guarded by its identity, and a new one for
# every attachment would mean a new compilation for every attachment.
_SLOTS: dict[tuple[int, str], _Slot] = {}


_EAGER: weakref.WeakKeyDictionary[type, Callable[..., Any]] = weakref.WeakKeyDictionary()


def _eager_function(cls: type) -> Callable[..., Any]:
    """The eager function of the model file that `cls` comes from: what it hands the interface as its default."""
    if cls not in _EAGER:
        _EAGER[cls] = _find_eager_function(cls)
    return _EAGER[cls]


def _find_eager_function(cls: type) -> Callable[..., Any]:
    function = interface_function(cls)
    if function is not None:
        for name in _names_in_order(function.__code__):
            if name.endswith("eager_attention_forward") and name in function.__globals__:
                return function.__globals__[name]  # type: ignore[no-any-return]
    for base in cls.__mro__:
        namespace = inspect.getmodule(base)
        if namespace is not None and hasattr(namespace, "eager_attention_forward"):
            return namespace.eager_attention_forward  # type: ignore[no-any-return]
    raise LookupError(
        f"Expected the model file of `{cls.__name__}` to define `eager_attention_forward`, but it does not. "
        "Load the model with attn_implementation='sdpa'."
    )


def _names_in_order(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in_order(constant)


def install(modules: list[nn.Module]) -> Callable[[], None]:
    """Replace the attention functions that `modules` look up; the returned function puts them back."""
    wanted: dict[tuple[int, str], Any] = {}
    for module in modules:
        function = interface_function(type(module))
        if function is None:
            continue
        interface = function.__globals__["ALL_ATTENTION_FUNCTIONS"]
        for name in {"sdpa", "eager", _implementation(module)}:
            if name is None:
                continue
            if name == "eager" or name in interface:
                wanted[id(interface), name] = interface
        if "eager" not in interface:
            _eager_function(type(module))  # fill the cache now, where a missing function can still be reported
    slots = []
    for (identity, name), interface in wanted.items():
        slot = _SLOTS.get((identity, name))
        if slot is None or slot.interface is not interface:
            slot = _SLOTS[identity, name] = _Slot(interface, name)
        slot.install()
        slots.append(slot)

    def uninstall() -> None:
        for slot in slots:
            slot.release()

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
