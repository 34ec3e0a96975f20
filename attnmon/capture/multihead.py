"""Capture of `nn.MultiheadAttention`, from its inputs and its own in-projection.

What it computes inside depends on mode, masks and `need_weights`, and in `nn.TransformerEncoderLayer` it may not be
called at all. Forward hooks on these modules switch torch's inference fast path off, and with it the bits of the
output; so the instances get a `forward` of their own instead, which calls the original one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmon.capture import _mode, _patch, _state
from attnmon.masks import hides
from attnmon.types import AttentionCall

if TYPE_CHECKING:
    from attnmon.capture.attachment import Attachment, Take

__all__ = ["IRREPLACEABLE", "deliver_functional", "install"]

IRREPLACEABLE = (
    "it attends inside nn.MultiheadAttention or F.multi_head_attention_forward, which project what attention returns "
    "in the same breath: that can be read, but not replaced; write the layer with F.scaled_dot_product_attention"
)

_FORWARD = inspect.signature(nn.MultiheadAttention.forward)
_FUNCTIONAL = inspect.signature(F.multi_head_attention_forward)
_LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)


_CALLED: list[set[nn.Module]] = []
"""Attention modules that ran inside the encoder layers now running, innermost last."""


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a watched instance: the original, then a look at its arguments.

    A copy of the model made meanwhile carries this function bound to the copy, where it only passes through.
    """
    original = _patch.original(self, "forward")
    if torch.compiler.is_compiling():
        return original(*args, **kwargs)
    if isinstance(self, nn.MultiheadAttention):
        return _attend(self, original, args, kwargs)
    if isinstance(self, nn.TransformerEncoderLayer):
        return _encode_layer(self, original, args, kwargs)
    with _plain_kernels(self):
        return original(*args, **kwargs)


def install(layers: dict[nn.Module, str], attentions: list[nn.Module]) -> Callable[[], None]:
    """Give the attention modules, and the encoders of torch around them, a forward that looks at its arguments."""
    chosen = set(attentions)
    for module in layers:
        if isinstance(module, nn.TransformerEncoderLayer):
            if type(module).forward is nn.TransformerEncoderLayer.forward and module.self_attn in chosen:
                chosen.add(module)
        elif isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward:
            chosen.add(module)
    return _patch.replace([module for module in layers if module in chosen], "forward", forward)


def _plain_kernels(module: nn.Module) -> AbstractContextManager[None]:
    """Takes the torch function mode aside around modules that consist of torch's own parts.

    The mode counts as an overridden tensor there, which switches the fast path off.
    """
    if _mode.is_on_top() and _is_torchs_own(module):
        return _mode.aside()
    return nullcontext()


def _is_torchs_own(module: nn.Module) -> bool:
    return all(type(part).__module__.startswith("torch.") for part in module.modules())


def _attend(module: nn.MultiheadAttention, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for called in _CALLED:
        called.add(module)
    attachments = [attachment for attachment in _state.watchers(module) if not attachment.replaces]
    with _plain_kernels(module), _state.busy():
        output = original(*args, **kwargs)
    for attachment in attachments:
        attachment.guard(partial(_deliver_module, attachment, module, args, kwargs))
    return output


def _deliver_module(attachment: Attachment, module: nn.MultiheadAttention, args: Any, kwargs: Any) -> None:
    given = _FORWARD.bind(module, *args, **kwargs)
    given.apply_defaults()
    _deliver(attachment, module, _of_module(module, given.arguments))


def _encode_layer(layer: nn.TransformerEncoderLayer, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    called: set[nn.Module] = set()
    attention = layer.self_attn
    attachments = [attachment for attachment in _state.watchers(attention) if not attachment.replaces]
    _CALLED.append(called)
    try:
        with _plain_kernels(layer):
            output = original(*args, **kwargs)
    finally:
        _CALLED.remove(called)
    standard = type(layer)._sa_block is nn.TransformerEncoderLayer._sa_block
    if attention not in called and standard:  # the fast path goes around the attention module
        for attachment in attachments:
            attachment.guard(partial(_deliver_layer, attachment, layer, args, kwargs))
    return output


def _deliver_layer(attachment: Attachment, layer: nn.TransformerEncoderLayer, args: Any, kwargs: Any) -> None:
    given = _LAYER.bind(layer, *args, **kwargs)
    given.apply_defaults()
    _deliver(attachment, layer.self_attn, _of_encoder_layer(layer, given.arguments))


def _of_module(module: nn.MultiheadAttention, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the functional form, sequences first, that a call of `module` stands for."""
    query, key, value = given["query"], given["key"], given["value"]
    same = query is key
    if module.batch_first and query.dim() == 3 and not query.is_nested:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return {
        "query": query,
        "key": key,
        "value": value,
        "self_attention": same,
        "num_heads": module.num_heads,
        "in_proj_weight": module.in_proj_weight,
        "in_proj_bias": module.in_proj_bias,
        "bias_k": module.bias_k,
        "bias_v": module.bias_v,
        "add_zero_attn": module.add_zero_attn,
        "use_separate_proj_weight": not module._qkv_same_embed_dim,
        "q_proj_weight": module.q_proj_weight,
        "k_proj_weight": module.k_proj_weight,
        "v_proj_weight": module.v_proj_weight,
        "key_padding_mask": given["key_padding_mask"],
        "attn_mask": given["attn_mask"],
        "need_weights": given["need_weights"],
        "is_causal": given["is_causal"],
    }


def _of_encoder_layer(layer: nn.TransformerEncoderLayer, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the fast path of an encoder layer takes its attention's from."""
    source = given["src"].detach()
    padding = given["src_key_padding_mask"]
    with torch.no_grad():
        if source.is_nested:  # the encoder has dropped the padding and its mask
            lengths = source._nested_tensor_size()[:, 0].to(source.device)
            source = source.to_padded_tensor(0.0)
            padding = torch.arange(source.shape[1], device=source.device)[None] >= lengths[:, None]
        if layer.norm_first:
            source = F.layer_norm(source, source.shape[-1:], layer.norm1.weight, layer.norm1.bias, layer.norm1.eps)
    inputs = {
        "query": source,
        "key": source,
        "value": source,
        "key_padding_mask": padding,
        "attn_mask": given["src_mask"],
        "need_weights": False,
        "is_causal": given["is_causal"] and given["src_mask"] is not None,
    }
    return _of_module(layer.self_attn, inputs)


def deliver_functional(
    attachment: Attachment, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Hand on a direct call of `F.multi_head_attention_forward` made by `module`."""
    if attachment.replaces:
        attachment.skip(attachment.layers[module], IRREPLACEABLE)
        return
    bound = _FUNCTIONAL.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given["static_k"] is not None or given["static_v"] is not None:
        attachment.skip(attachment.layers[module], "`static_k` and `static_v` bring keys from outside")
        return
    given["self_attention"] = given["query"] is given["key"]
    _deliver(attachment, module, given)


def _deliver(attachment: Attachment, module: nn.Module, given: dict[str, Any]) -> None:
    if given["query"].is_nested or given["key"].is_nested:
        attachment.skip(attachment.layers[module], "its inputs are nested tensors")
        return
    if given["query"].dim() == 2:
        given = dict(given)
        for name in ("query", "key", "value"):
            given[name] = given[name].unsqueeze(1)
        if given["key_padding_mask"] is not None:
            given["key_padding_mask"] = given["key_padding_mask"].unsqueeze(0)
    batch, q_len, kv_len = given["query"].shape[1], given["query"].shape[0], given["key"].shape[0]
    attachment.deliver(
        module,
        (batch, q_len, kv_len),
        lambda layer, take: _normalize(layer, take, given),
        crosses=not given["self_attention"],
    )


def _normalize(layer: str, take: Take, given: dict[str, Any]) -> AttentionCall:
    num_heads = given["num_heads"]
    source = [take(given[name], dim=1) for name in ("query", "key", "value")]
    query, key, value = _project(source, given)
    batch = take.size
    key_padding_mask, attn_mask = given["key_padding_mask"], given["attn_mask"]
    causal_offset = None
    # The hint replaces the mask only where nothing else has to be merged into it, as in F.multi_head_attention_forward.
    if given["is_causal"] and attn_mask is not None and key_padding_mask is None and not given["need_weights"]:
        causal_offset, attn_mask = 0, None
    appended = 0
    if given["bias_k"] is not None:
        key, value = (
            torch.cat([tensor, given[name].detach().to(tensor.dtype).expand(1, batch, -1)])
            for tensor, name in ((key, "bias_k"), (value, "bias_v"))
        )
        appended += 1
    if given["add_zero_attn"]:
        key, value = (torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]) for tensor in (key, value))
        appended += 1
    heads = [tensor.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for tensor in (query, key, value)]
    allowed = []
    valid = None
    if attn_mask is not None:
        attn_mask = attn_mask.detach()
        if attn_mask.dim() == 3:  # (batch * num_heads, q_len, kv_len)
            attn_mask = take(attn_mask.unflatten(0, (-1, num_heads)))
        else:
            attn_mask = attn_mask[None, None]
        allowed.append(attn_mask)
    if key_padding_mask is not None:
        padding = take(key_padding_mask)
        allowed.append(padding[:, None, None, :])
        if given["self_attention"]:
            valid = ~padding if padding.dtype == torch.bool else ~hides(padding)
    return AttentionCall(
        layer=layer,
        query=heads[0],
        key=heads[1],
        value=heads[2],
        attn_mask=_merge(allowed, appended, query.dtype),
        causal_offset=causal_offset,
        scale=heads[0].shape[-1] ** -0.5,
        valid=valid,
        hidden=source[1].transpose(0, 1),
    )


def _project(source: list[Tensor], given: dict[str, Any]) -> list[Tensor]:
    """The module's own in-projection, ``(length, batch, embed_dim)`` each.

    Weights are detached first: autocast would otherwise cache their casts without a graph, for the model to find.
    """
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"].detach() for name in ("q", "k", "v")]
    else:
        weights = list(given["in_proj_weight"].detach().chunk(3))
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.detach().chunk(3))
    return [F.linear(tensor, weight, b) for tensor, weight, b in zip(source, weights, biases, strict=True)]


def _merge(masks: list[Tensor], appended: int, dtype: torch.dtype) -> Tensor | None:
    """One mask in attnmon's polarity out of masks in torch's (True = may NOT attend, or additive)."""
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        merged = ~masks[0]
        for mask in masks[1:]:
            merged = merged & ~mask
        return F.pad(merged, (0, appended), value=True)
    merged = torch.zeros((), dtype=dtype, device=masks[0].device)
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
        merged = merged + mask
    return F.pad(merged, (0, appended), value=0.0)
