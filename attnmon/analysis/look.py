"""What is to be known of a model and its tokens before anything long runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from attnmon.analysis.options import AnalysisOptions
from attnmon.capture import attach, describe_search
from attnmon.rows import rows_at
from attnmon.types import AttentionCall

__all__ = [
    "LOOK",
    "Layer",
    "Look",
    "check_lengths",
    "check_tokens",
    "count_sinks",
    "look_at",
    "moved",
    "run_model",
    "sinks_first",
]

LOOK = 32
"""Tokens of the first look."""


@dataclass(frozen=True)
class Layer:
    """One attention call of a forward pass."""

    name: str
    num_heads: int
    temperature: float


@dataclass
class Look:
    """What a short forward pass shows of a model."""

    layers: list[Layer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    causal: bool = True
    sinks: bool = False
    queries: list[Tensor] = field(default_factory=list)


def look_at(model: nn.Module, tokens: Tensor) -> Look:
    """Run the model on a few tokens to learn what it is made of."""
    look = Look()

    def on_call(call: AttentionCall) -> None:
        if not 0 < abs(call.scale) < float("inf"):
            raise ValueError(f"Expected `{call.layer}` to have a temperature, but its scale is {call.scale}.")
        with torch.no_grad():
            call, sinks = sinks_first(call)
            positions = torch.arange(call.query.shape[2], device=call.query.device)
            batch = rows_at(call, positions, call.key.shape[2])
            later = torch.arange(batch.mask.shape[-1], device=positions.device) > positions[:, None] + sinks
            look.causal &= not bool((batch.per_head(batch.mask) & later).any())
            look.sinks |= sinks > 0
            look.queries.append(call.query[0, :, :LOOK].clone())
        look.layers.append(Layer(call.layer, call.num_heads, call.temperature))

    with attach(model, on_call, look.skipped.__setitem__):
        run_model(model, tokens)
    if not look.layers:
        reasons = "; ".join(f"`{layer}`: {reason}" for layer, reason in look.skipped.items())
        raise ValueError(
            "Expected `model` to have attention that can be read, but "
            + (f"none was: {reasons}. Load it with attn_implementation='sdpa'." if reasons else describe_search(model))
        )
    return look


def count_sinks(call: AttentionCall) -> int:
    """How many of the last keys are attention sinks, which capture appends with zero keys and values."""
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    if kv_len <= q_len or bool(call.key[:, :, q_len:].any()) or bool(call.value[:, :, q_len:].any()):
        return 0
    return kv_len - q_len


def sinks_first(call: AttentionCall) -> tuple[AttentionCall, int]:
    """The call with its attention sinks, which capture appends as zero keys, at the front, and how many they are."""
    sinks = count_sinks(call)
    if not sinks:
        return call, 0
    mask = call.attn_mask

    def rolled(tensor: Tensor | None, dim: int) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.roll(sinks, dims=dim)

    moved_call = replace(
        call,
        key=call.key.roll(sinks, dims=2),
        value=call.value.roll(sinks, dims=2),
        attn_mask=rolled(mask, -1),
        causal_offset=None if call.causal_offset is None else call.causal_offset + sinks,
        hidden=rolled(call.hidden, 1),
        embedding=rolled(call.embedding, 1),
    )
    return moved_call, sinks


def run_model(model: nn.Module, tokens: Tensor) -> None:
    """Run the model on tokens as it takes them, without a key-value cache."""
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        model(input_ids=tokens, **({"use_cache": False} if "use_cache" in names else {}))
    else:
        model(tokens)


@contextmanager
def moved(model: nn.Module, device: str | torch.device | None) -> Iterator[torch.device]:
    """The model on a device while it lasts; gives the device."""
    first = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
    home = torch.device("cpu") if first is None else first.device
    try:
        target = home if device is None else torch.device(device)
        if target.type == "meta":
            raise RuntimeError("a meta device holds no numbers")
        torch.zeros(1, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"Expected `device` to be one that torch can use here, such as 'cpu', but got {device!r}: {error}"
        ) from error
    if target == home:
        yield home
        return
    try:
        model.to(target)
        yield target
    finally:
        model.to(home)


def check_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens as ``(batch, length)`` int64."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"Expected `tokens` to be an integer tensor, but got {kind}. Tokenise the text first.")
    if tokens.dim() not in (1, 2) or 0 in tokens.shape:
        raise ValueError(f"Expected `tokens` to be (length,) or (batch, length), but got shape {tuple(tokens.shape)}.")
    find = getattr(model, "get_input_embeddings", None)
    try:
        known = getattr(find() if callable(find) else None, "num_embeddings", None)
    except NotImplementedError:
        known = None
    if isinstance(known, int) and not 0 <= int(tokens.min()) <= int(tokens.max()) < known:
        raise ValueError(
            f"Expected `tokens` to lie between 0 and {known - 1}, the model's vocabulary, but got "
            f"{int(tokens.min())} to {int(tokens.max())}. Use the model's own tokenizer."
        )
    return tokens.long() if tokens.dim() == 2 else tokens.long()[None]


def check_lengths(model: nn.Module, tokens: Tensor, options: AnalysisOptions) -> tuple[int, ...]:
    """The lengths, ascending, if model and tokens have as many positions and every N lies below the longest."""
    available = tokens.shape[1]
    if options.lengths is None:
        lengths = tuple(sorted({*(2**k for k in range(5, 32) if 2**k <= available), available}))
    else:
        lengths = tuple(options.lengths)
    longest = lengths[-1]
    if longest > available:
        raise ValueError(
            f"Expected `tokens` to be at least as many as the longest of `lengths`, {longest}, but got {available}. "
            "Give a longer text or shorter lengths."
        )
    config = getattr(model, "config", None)
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if isinstance(context, int) and 0 < context < longest:
        raise ValueError(
            f"Expected `lengths` to be at most the model's context of {context} positions, but got {longest}. "
            f"Use lengths up to {context}."
        )
    sizes = {"distance": ("top_n", options.top_n), "separability": ("separability_top_n", options.separability_top_n)}
    sizes["critical"] = ("critical_top_n", (options.critical_top_n,))
    for task, (name, values) in sizes.items():
        if task in options.tasks and max(values) >= longest:
            raise ValueError(
                f"Expected every N in `{name}` to be below the longest length, {longest}, but got {max(values)}: no "
                f"row would have an unselected key. Use N up to {longest - 1}, or longer lengths."
            )
    return lengths
