"""Finished parts of an analysis on disk, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Part", "Parts", "digest_model", "digest_tokens"]

# What a configuration says of where a model came from rather than of what it is.
_NAMES_ONLY = frozenset({"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"})

Part = dict[str, np.ndarray]
"""Quantity to sums, and ``<quantity>/rows`` to counts: ``(heads, segments, *axes)``; ``seconds`` is a scalar."""


class Parts:
    """Parts below one folder; each has a file that is either whole or not there.

    Args:
        folder: Where; None keeps nothing.
        common: What all parts depend on.
    """

    def __init__(self, folder: str | Path | None, common: dict[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        self._common = common
        self._broken = False

    def load(self, task: str, grid: dict[str, Any], name: str) -> Part | None:
        """What was kept under that name, or None. A file that cannot be read is as good as missing."""
        if self.folder is None:
            return None
        try:
            path = self._path(task, grid, name)
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except Exception:  # whatever zipfile, zlib or NumPy make of damaged bytes
            return None

    def save(self, task: str, grid: dict[str, Any], name: str, part: Part) -> None:
        """Keep a part; a disk that is full or read-only is reported once, and the analysis goes on without it."""
        if self.folder is None or self._broken:
            return
        path = self._path(task, grid, name)
        partial = path.with_suffix(f".{os.getpid()}.partial")  # another run may keep the same part
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez(file, **part)  # type: ignore[arg-type]
            partial.replace(path)
        except OSError as error:
            self._broken = True
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            warnings.warn(
                f"Parts of the analysis are no longer kept: writing {str(path)!r} failed: {error}. The run goes on, "
                "but if it is interrupted, it starts again from the parts kept so far.",
                stacklevel=2,
            )

    def _path(self, task: str, grid: dict[str, Any], name: str) -> Path:
        text = json.dumps([self._common, task, grid], sort_keys=True)
        folder = Path() if self.folder is None else self.folder
        return folder / f"{task}-{hashlib.sha256(text.encode()).hexdigest()[:12]}" / f"{name}.npz"


def digest_model(model: nn.Module) -> str:
    """SHA-256 of a model's class, configuration, parameters and buffers, those that are never saved among them."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict):
        kept = {name: value for name, value in to_dict().items() if name not in _NAMES_ONLY}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_tokens(tokens: Tensor) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(np.ascontiguousarray(tokens.cpu().numpy().astype("<i8")).tobytes()).hexdigest()
