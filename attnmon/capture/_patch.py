"""Instance attributes that are replaced while anybody watches, and put back exactly."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["original", "replace"]


class _Patch:
    def __init__(self, module: nn.Module, attribute: str, function: Callable[..., Any]) -> None:
        self.module = module  # keeps the key of the table alive
        self.attribute = attribute
        self.had = attribute in vars(module)
        self.previous: Callable[..., Any] | None = vars(module).get(attribute)
        # A bound method: a deep copy of the module gets one that is bound to the copy.
        self.bound = types.MethodType(function, module)
        self.users = 0

    def put_back(self) -> None:
        if vars(self.module).get(self.attribute) is not self.bound:
            return  # replaced after us, and to stay so
        if self.had:
            self.module.__dict__[self.attribute] = self.previous
        else:
            del self.module.__dict__[self.attribute]


_PATCHES: dict[tuple[nn.Module, str], _Patch] = {}


def replace(modules: Iterable[nn.Module], attribute: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Make `attribute` of each module ``function`` bound to it; the returned function takes that back.

    `function` finds what it stands for with `original`. The same attribute may be replaced several times, by the same
    function, and taken back in any order.
    """
    patches = []
    for module in modules:
        patch = _PATCHES.get((module, attribute)) or _Patch(module, attribute, function)
        if patch.users == 0:
            _PATCHES[module, attribute] = patch
            module.__dict__[attribute] = patch.bound
        patch.users += 1
        patches.append(patch)

    def undo() -> None:
        for patch in patches:
            patch.users -= 1
            if patch.users == 0:
                del _PATCHES[patch.module, patch.attribute]
                patch.put_back()

    return undo


def original(module: nn.Module, attribute: str) -> Callable[..., Any]:
    """What `attribute` of `module` was; on a copy of the module, which was never replaced itself, its class's."""
    patch = _PATCHES.get((module, attribute))
    if patch is not None and patch.previous is not None:
        return patch.previous
    if patch is None:
        vars(module).pop(attribute, None)  # a copy needs it no longer
    function: Callable[..., Any] = getattr(type(module), attribute).__get__(module)
    return function
