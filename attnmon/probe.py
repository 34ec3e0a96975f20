"""Calling a model on a batch as data loaders make them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["call_model", "to_device", "tokens_of"]


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


def tokens_of(batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """Padding mask and labels ``(batch, length)`` of a batch that is a mapping; None where there is no such thing."""
    found = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("attention_mask", "labels"))
    valid, labels = (entry if isinstance(entry, Tensor) and entry.dim() == 2 else None for entry in found)
    return valid, labels
