"""Memory that one temporary after the other takes, and which is not given back in between."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Scratch"]


class Scratch:
    """Memory for the large temporaries of one block of rows after the other, by name.

    Fresh memory costs a page fault per 4 KiB, which is as much as the arithmetic of one pass over it. Whoever takes a
    name again overwrites what was there.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape, in the dtype and on the device of `like`."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            with torch.inference_mode(False):  # what is made in it can't be written to outside
                buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)
