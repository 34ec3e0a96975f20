"""Capture of `torch.nn.functional.scaled_dot_product_attention` wherever a watched module calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnmon.capture import _mode, _state, multihead
from attnmon.masks import broadcast_shape
from attnmon.types import AttentionCall

if TYPE_CHECKING:
    from types import FrameType

    from attnmon.capture.attachment import Attachment, Take

__all__ = ["install"]

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class _Mode(TorchFunctionMode):
    """Sees every torch function that Python code calls while it is on the stack."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention and func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        # A compiler traces through this method: it must find nothing but the call.
        if torch.compiler.is_compiling() or _state.is_busy() or not _state.ACTIVE or _state.recomputing():
            return func(*args, **kwargs)
        output = returned = func(*args, **kwargs)
        for attachment, module, crosses in _callers(sys._getframe(1)):
            if func is F.multi_head_attention_forward:
                attachment.guard(partial(multihead.deliver_functional, attachment, module, args, kwargs))
            else:
                attachment.guard(partial(_deliver, attachment, module, crosses, args, kwargs, output))
            answer = attachment.take_answer()
            if answer is not None:
                returned = _state.in_place_of(output, answer.reshape(output.shape))
        return returned


def install() -> Callable[[], None]:
    """Start looking; the returned function stops it."""
    return _mode.push(_MODE)


_MODE = _Mode()


def _callers(frame: FrameType | None) -> list[tuple[Attachment, nn.Module, bool]]:
    """The attachments that watch the module whose method runs innermost, from `frame` outwards, with that module.

    Only a method's own ``self`` counts: a training loop that is given a model may well be running another one.
    The flag says whether the method was given two different sequences, as cross-attention is.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_argcount > 0 and code.co_varnames[0] == "self":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                attachments = _state.watchers(module)
                crosses = bool(attachments) and _two_sequences(frame)
                return [(attachment, module, crosses) for attachment in attachments]
        frame = frame.f_back
    return []


def _two_sequences(frame: FrameType) -> bool:
    code = frame.f_code
    values = [frame.f_locals.get(name) for name in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]]
    inputs = [value for value in values if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()]
    return any(
        other is not inputs[0] and other.shape[0] == inputs[0].shape[0] and other.shape[2] == inputs[0].shape[2]
        for other in inputs[1:]
    )


def _deliver(
    attachment: Attachment,
    module: nn.Module,
    crosses: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> None:
    arguments = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    if query.is_nested or key.is_nested:
        attachment.skip(attachment.layers[module], "its queries and keys are nested tensors")
        return
    if query.dim() < 2:
        return
    lead = broadcast_shape(query.shape[:-3], key.shape[:-3], value.shape[:-3]) if query.dim() > 3 else ()
    batch = query.shape[0] if query.dim() == 3 else 1
    for size in lead:
        batch *= size
    sizes = (batch, query.shape[-2], key.shape[-2])

    def build(layer: str, take: Take) -> AttentionCall | str:
        return normalize_sdpa(layer, take, arguments, lead, output)

    attachment.deliver(module, sizes, build, crosses=crosses)


def normalize_sdpa(
    layer: str, take: Take, arguments: dict[str, Any], lead: tuple[int, ...], output: Tensor | None
) -> AttentionCall | str:
    """The call that `scaled_dot_product_attention` made of `arguments`.

    Inputs of 2 or 3 dimensions have one head; further leading dimensions are sequences.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    mask = arguments.get("attn_mask")
    causal_offset = 0 if arguments.get("is_causal") else None
    scale = arguments.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    dimensions = max(query.dim(), key.dim())
    if dimensions > 3 and query.shape[-3] % key.shape[-3] and key.shape[-3] % query.shape[-3]:
        return f"it has {query.shape[-3]} query heads and {key.shape[-3]} key heads, which do not go together"

    def shaped(tensor: Tensor) -> Tensor:
        if dimensions < 4:
            tensor = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
            return take(tensor.unsqueeze(1))
        if tensor.shape[:-3] != lead:
            tensor = tensor.expand(*lead, *tensor.shape[-3:])
        return take(tensor if tensor.dim() == 4 else tensor.flatten(0, -4))

    query, key, value = shaped(query), shaped(key), shaped(value)
    if key.shape[1] > query.shape[1]:  # one query head broadcast over the keys' heads
        query = query.expand(-1, key.shape[1], -1, -1)
    if value.shape[1] != key.shape[1]:
        heads = max(value.shape[1], key.shape[1])
        key, value = (tensor.expand(-1, heads, -1, -1) for tensor in (key, value))
    if mask is not None and type(mask).__name__ == "CausalBias":
        lower_right = mask.variant.name == "LOWER_RIGHT"
        causal_offset = mask.seq_len_kv - mask.seq_len_q if lower_right else 0
        mask = None
    if mask is not None:
        mask = _shape_mask(mask.detach(), dimensions, lead, take)
    if output is not None and not arguments.get("dropout_p"):
        heads_out = output.unsqueeze(0) if output.dim() == 2 else output
        heads_out = heads_out.unsqueeze(1) if heads_out.dim() == 3 else heads_out
        output = take(heads_out if heads_out.dim() == 4 else heads_out.flatten(0, -4))
    else:
        output = None
    unknown = tuple(name for name, given in arguments.items() if name not in _PARAMETERS and given is not None)
    return AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        causal_offset=causal_offset,
        scale=scale,
        output=output,
        unexplained=unknown,
    )


def _shape_mask(mask: Tensor, dimensions: int, lead: tuple[int, ...], take: Take) -> Tensor:
    """A mask that broadcasts to inputs of `dimensions` dimensions, as one that broadcasts to the normal form."""
    if dimensions < 4:
        return take(mask.unsqueeze(1)) if mask.dim() == 3 else mask[None, None]
    while mask.dim() < dimensions:
        mask = mask.unsqueeze(0)
    if dimensions > 4:
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*lead, *mask.shape[-3:])
        mask = mask.flatten(0, -4)
    return take(mask)
