"""Which modules of a model attend, found by reading the model, without running it."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import nn

from attnmon.rerun import sharded_modules

__all__ = [
    "AttentionSite",
    "anything_compiled",
    "clean_name",
    "compiled_modules",
    "compiled_roots",
    "describe_search",
    "find_attention",
    "is_compiled_function",
    "named_layers",
    "tensor_parallel",
    "unsupported_kernels",
]

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module")
_KERNELS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_KERNEL_OBJECTS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_UNSUPPORTED = frozenset(
    {"flex_attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func", "varlen_attn"}
)
_MAX_DEPTH = 4  # calls followed from a method of the module to the kernel
_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class AttentionSite:
    """One module that attends.

    Attributes:
        layer: Path of the module in the model, without the prefixes that wrappers add.
        kind: How it attends: through transformers' attention interface (``"huggingface"``), as an
            `nn.MultiheadAttention` (``"multihead"``) or by calling torch's fused attention itself (``"sdpa"``).
        class_name: Name of the module's class.
    """

    layer: str
    kind: Literal["huggingface", "multihead", "sdpa"]
    class_name: str


def clean_name(name: str) -> str:
    """Path of a module without the segments that DDP, FSDP, `torch.compile` and checkpoint wrappers insert.

    ``module`` is such a segment only at the front: a user's own submodule may be called so.
    """
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS or part == "module")


def named_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of `model` with its clean path, in module order; a shared module has its first path only."""
    return {module: clean_name(name) for name, module in model.named_modules()}


def find_attention(model: nn.Module) -> list[AttentionSite]:
    """Modules of `model` whose attention can be captured, in module order.

    A module counts if its own code, or a plain Python function that this code reaches in a few steps, attends; a
    container that only holds such a module does not count.

    Args:
        model: Any module, wrapped (DDP, FSDP, `torch.compile`) or not. It is not run.

    Returns:
        One entry per attending module; empty if none was found.
    """
    sites = []
    for module, layer in named_layers(model).items():
        kind = site_kind(module)
        if kind is not None:
            sites.append(AttentionSite(layer, kind, type(module).__name__))
    return sites


def site_kind(module: nn.Module) -> Literal["huggingface", "multihead", "sdpa"] | None:
    """How `module` itself attends, or None."""
    if isinstance(module, nn.MultiheadAttention):
        return "multihead" if type(module).forward is nn.MultiheadAttention.forward else "sdpa"
    if _library(type(module)) == "torch":
        return None
    if interface_function(type(module)) is not None and getattr(module, "config", None) is not None:
        return "huggingface"
    return "sdpa" if _reaches(module, _KERNELS, _KERNEL_OBJECTS) else None


def unsupported_kernels(model: nn.Module) -> dict[str, str]:
    """Layers that call an attention kernel which can't be captured, with the name of that kernel."""
    found = {}
    for module, layer in named_layers(model).items():
        if _library(type(module)) is not None or isinstance(module, nn.MultiheadAttention):
            continue
        if _reaches(module, _UNSUPPORTED, ()) and site_kind(module) is None:
            named = (name for name in sorted(_UNSUPPORTED) if _reaches(module, frozenset({name}), ()))
            found[layer] = next(named, "a kernel")
    return found


def describe_search(model: nn.Module) -> str:
    """What was looked for in `model` and what is there instead, for the error when nothing attends."""
    counts: dict[str, int] = {}
    for module in named_layers(model):
        counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in common[:8])
    more = f" and {len(common) - 8} more types" if len(common) > 8 else ""
    unsupported = unsupported_kernels(model)
    also = ""
    if unsupported:
        layer, kernel = next(iter(unsupported.items()))
        also = f" {len(unsupported)} of them call `{kernel}` (first: `{layer}`), which cannot be captured."
    return (
        "looked for modules that attend through transformers' attention interface, nn.MultiheadAttention, and modules "
        "that call torch.nn.functional.scaled_dot_product_attention; "
        f"found {sum(counts.values())} modules of types {shown}{more}.{also}"
    )


def compiled_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that `torch.compile` has been applied to; the root's path is ``""``.

    Attention inside them is captured only by running them once more (see `attnmon.capture.attach`), or under
    ``torch.compiler.set_stance("force_eager")``, entered before `attach`. Code that compiles a function around the
    model, rather than the model, can't be seen from the model.
    """
    return list(dict.fromkeys(clean_name(name) for name, module in model.named_modules() if _is_compiled(module)))


def compiled_roots(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that `torch.compile` has been applied to, if their compiled code would run now."""
    roots = [module for module in model.modules() if _is_compiled(module)]
    if roots:
        from torch._dynamo import eval_frame

        if getattr(getattr(eval_frame, "_stance", None), "stance", None) == "force_eager":
            return []
    inside = {part for root in roots for part in root.modules() if part is not root}
    return [root for root in roots if root not in inside]


def _is_compiled(module: nn.Module) -> bool:
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return is_compiled_function(vars(module).get("forward", type(module).forward))


def anything_compiled() -> bool:
    """Whether any code has been compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and any(sum(counter.values()) > 0 for counter in utils.counters.values())


def tensor_parallel(module: nn.Module, *tensors: Any) -> bool:
    """Whether the heads of a module that is attending now are spread over processes.

    Its parameters are sharded tensors then. Those of fully sharded modules are gathered while they run, but for
    submodules that are fully sharded by themselves and have run already.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None:
        return False
    if any(isinstance(tensor, distributed.DTensor) for tensor in tensors):
        return True
    gathered = {part for own in sharded_modules(module) if own is not module for part in own.modules()}
    return any(
        isinstance(parameter, distributed.DTensor) and any(placement.is_shard() for placement in parameter.placements)
        for part in module.modules()
        if part not in gathered
        for parameter in part.parameters(recurse=False)
    )


def is_compiled_function(value: Any) -> bool:
    """Whether `value` is a function that `torch.compile` has been applied to."""
    return hasattr(value, "_torchdynamo_orig_callable") and not isinstance(value, nn.Module)


def _library(cls: type) -> str | None:
    root = cls.__module__.partition(".")[0]
    return root if root == "torch" else None


def _own_functions(cls: type) -> Iterator[types.FunctionType]:
    """Functions defined by `cls` and its bases, without those of torch and of transformers' base model."""
    for base in cls.__mro__:
        if base is object or _library(base) == "torch" or base.__module__ == "transformers.modeling_utils":
            continue
        for attribute in vars(base).values():
            function = _plain(attribute)
            if function is not None:
                yield function


def _plain(value: Any) -> types.FunctionType | None:
    """The plain Python function under descriptors, partials, bound methods and `functools.wraps`."""
    for _ in range(8):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        elif hasattr(value, "__wrapped__") and not isinstance(value, (type, nn.Module)):
            value = value.__wrapped__
        else:
            break
    return value if isinstance(value, types.FunctionType) else None


def _code_names(code: types.CodeType) -> frozenset[str]:
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _code_names(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def _code_names_cached(code: types.CodeType) -> frozenset[str]:
    return _code_names(code)


_INTERFACE_FUNCTIONS: weakref.WeakKeyDictionary[type, types.FunctionType | None] = weakref.WeakKeyDictionary()
_REACHES: weakref.WeakKeyDictionary[type, dict[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def interface_function(cls: type) -> types.FunctionType | None:
    """The method of `cls` that asks transformers' attention interface for its function, or None."""
    if cls not in _INTERFACE_FUNCTIONS:
        _INTERFACE_FUNCTIONS[cls] = _find_interface_function(cls)
    return _INTERFACE_FUNCTIONS[cls]


def _find_interface_function(cls: type) -> types.FunctionType | None:
    for function in _own_functions(cls):
        if (
            "ALL_ATTENTION_FUNCTIONS" in _code_names_cached(function.__code__)
            and "ALL_ATTENTION_FUNCTIONS" in function.__globals__
        ):
            return function
    return None


def _class_reaches(cls: type, names: frozenset[str], objects: tuple[Callable[..., Any], ...]) -> bool:
    known = _REACHES.setdefault(cls, {})
    if names not in known:
        seen: set[int] = set()
        known[names] = any(_mentions(f, names, objects, _MAX_DEPTH, seen, cls) for f in _own_functions(cls))
    return known[names]


def _reaches(module: nn.Module, names: frozenset[str], objects: tuple[Callable[..., Any], ...]) -> bool:
    if _class_reaches(type(module), names, objects):
        return True
    seen: set[int] = set()
    for value in vars(module).values():  # self.attend = partial(F.scaled_dot_product_attention, ...)
        if not callable(value) or isinstance(value, (nn.Module, type)):
            continue
        if _is_kernel(value, objects) or _mentions(value, names, objects, _MAX_DEPTH, seen, type(module)):
            return True
    return False


def _is_kernel(value: Any, objects: tuple[Callable[..., Any], ...]) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    return any(value is kernel for kernel in objects)


def _mentions(
    value: Any,
    names: frozenset[str],
    objects: tuple[Callable[..., Any], ...],
    depth: int,
    seen: set[int],
    cls: type,
) -> bool:
    """Whether the code of `value`, or of the plain functions it can reach, names one of the kernels."""
    wrapper = value if isinstance(value, types.FunctionType) else None
    function = _plain(value)
    if function is None or id(function) in seen:
        return False
    seen.add(id(function))
    if _code_names_cached(function.__code__) & names:
        return True
    if depth == 0:
        return False
    for reached in _reachable(function, cls):
        if _is_kernel(reached, objects) or _mentions(reached, names, objects, depth - 1, seen, cls):
            return True
    if wrapper is not None and wrapper is not function:  # a decorator may attend as well
        return any(_mentions(reached, names, objects, depth - 1, seen, cls) for reached in _reachable(wrapper, cls))
    return False


def _reachable(function: types.FunctionType, cls: type) -> Iterator[Any]:
    """Functions that `function` may call: by global name, through a module, from its closure or its defaults."""
    names = _code_names_cached(function.__code__)
    candidates: list[Any] = []
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                candidates += [vars(value).get(attribute) for attribute in names]
        else:
            candidates.append(value)
    for cell in function.__closure__ or ():
        try:
            candidates.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    candidates += list(function.__defaults__ or ()) + list((function.__kwdefaults__ or {}).values())
    for candidate in candidates:
        if candidate is None or isinstance(candidate, (nn.Module, type)):
            continue
        if any(candidate is kernel for kernel in _KERNEL_OBJECTS) or isinstance(candidate, functools.partial):
            yield candidate
            continue
        plain = _plain(candidate)
        if plain is None:
            continue
        library = (getattr(plain, "__module__", None) or "").partition(".")[0] in _LIBRARIES
        # A model file of a library is read like any other; its shared machinery is not.
        if not library or plain.__module__ == cls.__module__:
            yield candidate


_PARAMETERS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def forward_parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of the module's forward, without ``self``; empty if they can't be read."""
    cls = type(module)
    if "forward" in vars(module):  # an instance's own
        return _parameters(module.forward)
    if cls not in _PARAMETERS:
        _PARAMETERS[cls] = _parameters(cls.forward)[1:]
    return _PARAMETERS[cls]


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
