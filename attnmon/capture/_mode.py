"""One torch function mode, shared by all attachments, on the stack of this thread while any of them needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

__all__ = ["aside", "is_on_top", "push"]

_pushed: TorchFunctionMode | None = None
_users = 0


def push(mode: TorchFunctionMode) -> Callable[[], None]:
    """Put the mode on the stack, unless it is there; the returned function takes it off when nobody else needs it."""
    global _pushed, _users
    if _users == 0:
        _push_mode(mode)
        _pushed = mode
    _users += 1
    return _release


def _release() -> None:
    global _pushed, _users
    _users -= 1
    if _users:
        return
    mode, _pushed = _pushed, None
    if mode not in _get_current_function_mode_stack():
        return  # detached by another thread: it stays where it is and, with nobody watching, idles
    above: list[Any] = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    while above:  # whoever pushed a mode after ours expects to find it on top
        _push_mode(above.pop())


def is_on_top() -> bool:
    """Whether the mode is the one that torch functions meet first."""
    if _pushed is None:
        return False
    stack = _get_current_function_mode_stack()
    return bool(stack) and stack[-1] is _pushed


@contextmanager
def aside() -> Iterator[None]:
    """Within, torch functions run as they would without the mode (if no other lies above it)."""
    if not is_on_top():
        yield
        return
    mode = _pop_mode()
    try:
        yield
    finally:
        _push_mode(mode)
