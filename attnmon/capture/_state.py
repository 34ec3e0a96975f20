"""What all ways of capturing share: who is watching, and when not to look."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from attnmon.capture.attachment import Attachment

ACTIVE: list[Attachment] = []
"""Attachments that are in force, in the order they were made."""


class _Busy(threading.local):
    depth = 0


_BUSY = _Busy()


@contextmanager
def busy() -> Iterator[None]:
    """Within, attention calls are part of a call that is being captured already, or are our own."""
    _BUSY.depth += 1
    try:
        yield
    finally:
        _BUSY.depth -= 1


def is_busy() -> bool:
    """Whether this thread is inside `busy`."""
    return _BUSY.depth > 0


def in_place_of(own: Tensor, answer: Tensor) -> Tensor:
    """`answer` in the dtype and the layout in memory of `own`, whose shape it has."""
    return torch.empty_like(own).copy_(answer)


def recomputing() -> bool:
    """Whether autograd is running backward here: then a forward is a gradient checkpoint being recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def watchers(module: nn.Module) -> list[Attachment]:
    """Attachments that want the call which `module` is making now."""
    if _BUSY.depth > 0 or not ACTIVE or recomputing():
        return []
    return [attachment for attachment in ACTIVE if not attachment.paused and module in attachment.layers]


def rerunners(root: nn.Module) -> list[Attachment]:
    """Attachments that want the compiled part `root`, which is being called, run once more for them."""
    if _BUSY.depth > 0 or not ACTIVE or recomputing():
        return []
    return [attachment for attachment in ACTIVE if not attachment.paused and root in attachment.roots]
