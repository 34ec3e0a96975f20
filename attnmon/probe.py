"""Running a model on a fixed batch without leaving a trace, so that figures of different steps compare."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["call_model", "to_device", "uncompiled", "undisturbed"]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode under ``no_grad``, uncompiled, with every module's mode and the random states put back afterwards."""
    training = [(module, module.training) for module in model.modules()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    # What a probe draws from the global generators must be undone, so it is these that are kept.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        model.eval()
        with torch.random.fork_rng(devices=devices), torch.no_grad(), uncompiled():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for module, mode in training:
            module.training = mode


def uncompiled() -> AbstractContextManager[object]:
    """Within, compiled modules run as they were written."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Calls a model on a batch as data loaders make them.

    A mapping is passed as keyword arguments, those only that ``forward`` takes; a sequence as positional arguments,
    as many as ``forward`` takes; anything else as the only argument.

    Raises:
        TypeError: The model's ``forward`` can't be called so.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    try:
        if isinstance(batch, Mapping):
            anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
            names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            if not names & set(batch) and not anything:
                return model(batch)
            return model(**{k: v for k, v in batch.items() if k in names or (anything and "labels" not in k)})
        if isinstance(batch, list | tuple):
            most = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
            if any(p.kind is p.VAR_POSITIONAL for p in parameters):
                most = len(batch)
            required = sum(
                p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters
            )
            # Loaders give (input, target); a model that needs only the input gets only the input.
            return model(*batch[: max(1, min(required, most, len(batch)))])
        return model(batch)
    except TypeError as error:
        raise TypeError(
            f"Expected the probe batch ({type(batch).__name__}) to fit {type(model).__name__}.forward"
            f"{inspect.signature(model.forward)}, but got: {error}. Pass a function that runs the model instead."
        ) from error


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device; containers of the usual kinds are followed."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [to_device(value, device) for value in batch]
    return batch


ProbeFunction = Callable[[nn.Module], Any]
