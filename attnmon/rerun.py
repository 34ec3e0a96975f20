"""Running something a second time without a trace: no gradients, no dropout, no compiler, every random state kept."""

from __future__ import annotations

import copy
import enum
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["CannotCopyError", "sharded_modules", "take_sequences", "uncompiled", "undisturbed"]

_SCALARS = (bool, int, float, complex, str)
_PLAIN = (*_SCALARS, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode under ``no_grad``, uncompiled, with what a pass may change put back afterwards.

    That is: every module's mode, its buffers, its attributes that are numbers, strings or None, its random generators,
    and the random states of Python, NumPy and torch. What a model keeps elsewhere (in lists, in files, in hooks of
    others) is its own.
    """
    modules = list(model.modules())
    kept = [_state_of(module) for module in modules]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    # What a pass draws from the global generators must be undone, so it is these that are kept.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        model.eval()
        with torch.random.fork_rng(devices=devices), torch.no_grad(), uncompiled():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for module, state in zip(modules, kept, strict=True):
            _put_back(module, *state)
        for module in sharded_modules(model):  # left gathered after a forward, for the backward that follows
            module.reshard()


def _state_of(module: nn.Module) -> tuple[dict[str, Any], list[Any], list[Any]]:
    plain = {k: v for k, v in vars(module).items() if v is None or isinstance(v, _SCALARS)}
    generators = [(v, v.get_state()) for v in vars(module).values() if isinstance(v, torch.Generator)]
    buffers = [
        (name, buffer, None if buffer is None or buffer.is_inference() else (buffer._version, buffer.detach().clone()))
        for name, buffer in module._buffers.items()
    ]
    return plain, generators, buffers


def _put_back(module: nn.Module, plain: dict[str, Any], generators: list[Any], buffers: list[Any]) -> None:
    module.__dict__.update(plain)
    for generator, state in generators:
        generator.set_state(state)
    for name, buffer, kept in buffers:
        module._buffers[name] = buffer
        if kept is not None and buffer._version != kept[0]:
            with torch.no_grad():
                buffer.copy_(kept[1])


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules of `model` that `torch.distributed.fsdp.fully_shard` has been applied to."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def uncompiled() -> AbstractContextManager[object]:
    """Within, compiled modules and functions run as they were written."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class CannotCopyError(TypeError):
    """An argument can be changed by who gets it, and can't be copied."""


def take_sequences(tree: Any, select: Callable[[int], Tensor | None]) -> tuple[Any, int | None, Tensor | None]:
    """Copies of the tensors in a tree of arguments, of some sequences only where it is clear what these are.

    The first tensor with two or more dimensions is taken to be ``(batch, length, ...)`` if it holds whole numbers, or
    if a mask ``(batch, length)`` or ``(batch, heads, rows, length)`` comes with it: activations alone may as well be
    ``(length, batch, ...)``. Tensors of as many rows are cut; those with one row, or one dimension of ``length``,
    belong to all sequences. If any tensor is of another kind, one is ``(batch, length, length)``, or ``batch`` equals
    ``length``, all of them are kept whole.

    Args:
        tree: Tensors in lists, tuples, mappings, and objects that hold such (key-value caches), which are copied.
        select: Given ``batch``, the indices to keep (1-D, int64, on the CPU), or None for all.

    Returns:
        The tree with copies in place of its tensors, detached; ``batch``, None if there is no such tensor; and the
        indices that were kept, None for all.

    Raises:
        CannotCopyError: The tree holds an object that can't be copied, or that holds a module.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.arange(6).view(3, 2), "lengths": torch.tensor([2, 1, 2])}
        >>> take_sequences(batch, lambda size: torch.tensor([0, 2]))[0]
        {'input_ids': tensor([[0, 1],
                [4, 5]]), 'lengths': tensor([2, 2])}
    """
    leaves, form = pytree.tree_flatten(tree)
    inside = {id(leaf): list(_tensors(leaf, set())) for leaf in leaves if not isinstance(leaf, Tensor)}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors = [tensor for tensor in (*tensors, *chain.from_iterable(inside.values())) if tensor.dim() > 0]
    first = next((tensor for tensor in tensors if tensor.dim() > 1), None)
    index = batch = None
    if first is not None:
        batch, length = first.shape[:2]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        clear = batch != length and all(shape[0] in (batch, 1) or shape == (length,) for shape in shapes)
        clear = clear and (batch, length, length) not in shapes
        known = not first.is_floating_point() or any(
            (shape == (batch, length) and not tensor.is_floating_point())
            or (len(shape) == 4 and shape[0] == batch and shape[3] == length)
            for shape, tensor in zip(shapes, tensors, strict=True)
        )
        index = select(batch) if clear and known else None

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if index is not None and tensor.dim() > 0 and tensor.shape[0] == batch:
            return tensor.index_select(0, index.to(tensor.device, non_blocking=True))
        return tensor.clone()

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copied(leaf)
        if leaf is None or isinstance(leaf, _PLAIN) or callable(leaf):
            return leaf
        try:  # its tensors may be part of a graph, of which there are no deep copies
            return copy.deepcopy(leaf, {id(tensor): copied(tensor) for tensor in inside[id(leaf)]})
        except Exception as error:
            raise CannotCopyError(type(leaf).__name__) from error

    return pytree.tree_unflatten([copy_leaf(leaf) for leaf in leaves], form), batch, index


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors that an object holds, in its attributes and in containers of the usual kinds."""
    if id(value) in seen or value is None or isinstance(value, (type, *_PLAIN)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        raise CannotCopyError(type(value).__name__)
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(_tensors(item, seen) for item in value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from chain.from_iterable(_tensors(item, seen) for item in value)
    elif not callable(value):
        yield from _tensors(getattr(value, "__dict__", None), seen)
