"""Parts of a model that `torch.compile` has been applied to: they are left alone, or run once more for their attention.

Compiled code shows nothing of its attention, and whatever is put on its modules would compile it anew. What it is
called with can be seen from outside, though. So, where that is asked for, such a part is first run as it was written on
a copy of its arguments, with everything attached that reads uncompiled parts, and then as it was compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attnmon.capture import _mode, _patch, _state

__all__ = ["install"]


def install(roots: list[nn.Module]) -> Callable[[], None]:
    """Stand before the compiled code of `roots`; the returned function goes away again.

    A compiler would have to trace the torch function mode, for another graph and not always with success, so the mode
    is put aside while compiled code runs.
    """
    wrapped = [module for module in roots if getattr(module, "_compiled_call_impl", None) is not None]
    undo = [
        _patch.replace([module for module in roots if module not in wrapped], "forward", _forward),
        _patch.replace(wrapped, "_compiled_call_impl", _compiled_call_impl),
    ]

    def uninstall() -> None:
        while undo:
            undo.pop()()

    return uninstall


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run(self, "forward", args, kwargs)


def _compiled_call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run(self, "_compiled_call_impl", args, kwargs)


def _run(module: nn.Module, attribute: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    original = _patch.original(module, attribute)
    if torch.compiler.is_compiling():
        return original(*args, **kwargs)
    for attachment in _state.rerunners(module):
        plain = _without_sync(module, original)
        attachment.guard(partial(attachment.run_again, module, plain, args, kwargs))
    with _mode.aside():
        return original(*args, **kwargs)


def _without_sync(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """What to call in a second pass: not the wrapper that would have the processes exchange their buffers for it."""
    inner = getattr(module, "_orig_mod", None)
    return inner.module if isinstance(inner, DistributedDataParallel) else original
