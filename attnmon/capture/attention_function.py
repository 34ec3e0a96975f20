"""What an attention function of transformers does with its arguments, read off its code.

A call can be captured from its arguments only as far as it is known which of them change the weights. The functions
of transformers differ from model to model, so the question is asked of the function that is called.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Traits", "traits_of", "unexplained"]

_STANDARD = frozenset({"module", "query", "key", "value", "attention_mask", "dropout", "scaling"})
_HONOURED = frozenset({"is_causal", "position_bias", "softcap", "sinks"})
# Arguments that describe the call to kernels or callers of another kind; no attention function changes weights by them.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
    | {"num_items_in_batch", "past_key_values", "past_key_value", "position_embeddings", "deterministic", "layer_idx"}
)
# Everything that the eager functions of transformers 5.24 mention. A new name may be a new way to change the weights.
_VOCABULARY = frozenset(
    {"torch", "nn", "functional", "F", "matmul", "transpose", "softmax", "dropout", "training", "contiguous", "dtype"}
    | {"to", "float32", "repeat_kv", "num_key_value_groups", "size", "head_dim", "tanh", "sinks", "cat", "reshape"}
    | {"expand", "shape", "max", "values", "type", "float", "logsumexp", "view", "sigmoid", "unsqueeze", "getattr"}
    | {"maybe_autocast", "device", "hasattr"}
)


@dataclass(frozen=True)
class Traits:
    """What an attention function does with its arguments, read off its code."""

    described: str  # for messages
    kind: str  # "sdpa", "eager", or "unknown"
    parameters: frozenset[str]  # named
    ignores_rest: bool  # what only its ** takes cannot matter, because it never looks at that
    rest_names: frozenset[str]  # string constants: names it may look up in its **
    reads_mask: bool
    module_sinks: bool
    head_dim_default: bool
    strange: tuple[str, ...]  # why its arguments alone do not explain it


@functools.lru_cache(maxsize=512)
def traits_of(function: Callable[..., Any], is_eager: bool) -> Traits:
    """Traits of `function`; `is_eager` says that it was called for the implementation "eager"."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", "") or ""
    described = f"{module}.{getattr(function, '__qualname__', repr(function))}"
    if not isinstance(code, types.CodeType):
        return Traits(described, "unknown", frozenset(), False, frozenset(), True, False, False, (described,))
    parameters = inspect.signature(function).parameters
    rest = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    named = frozenset(name for name in parameters if name != rest)
    read = _locals_read(code)
    names = frozenset(code.co_names)
    own = module.partition(".")[0] == "transformers"
    strange: tuple[str, ...]
    if own and module.endswith("integrations.sdpa_attention") and code.co_name == "sdpa_attention_forward":
        kind, strange = "sdpa", ()
    elif is_eager:
        kind = "eager"
        strange = tuple(sorted(names - _VOCABULARY)) if own else (described,)
    else:
        kind, strange = "unknown", (described,)
    return Traits(
        described=described,
        kind=kind,
        parameters=named,
        ignores_rest=rest is None or rest not in read,
        rest_names=frozenset(c for c in code.co_consts if isinstance(c, str)) if rest in read else frozenset(),
        reads_mask="attention_mask" in read or not own,
        module_sinks=kind == "eager" and "sinks" in names and "sinks" not in named,
        head_dim_default="head_dim" in names,
        strange=strange,
    )


def _locals_read(code: types.CodeType) -> frozenset[str]:
    read: set[str] = set(code.co_cellvars)
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_FAST"):
            value = instruction.argval
            read.update(value if isinstance(value, tuple) else (value,))
    return frozenset(read)


def unexplained(traits: Traits, arguments: dict[str, Any]) -> tuple[str, ...]:
    """Names of the arguments given that the normal form does not express, although the function may use them.

    A function whose body is not known to be plain softmax attention is named as well.
    """
    names = []
    for name, value in arguments.items():
        if value is None or name in _STANDARD or name in _HARMLESS:
            continue
        if name in traits.parameters:
            # Causality and windows reach an eager function in its mask, whatever else it is told of them.
            matters = name not in _HONOURED and not (name == "sliding_window" and traits.kind == "eager")
        elif traits.kind == "sdpa":
            matters = name in traits.rest_names and name != "softcap"  # which it refuses
        elif traits.kind == "eager":
            matters = not traits.ignores_rest
        else:
            matters = name not in _HONOURED
        if matters:
            names.append(name)
    return (*names, *traits.strange)
