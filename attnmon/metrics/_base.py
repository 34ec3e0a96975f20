"""The state that all metric classes share: sums, sums of squares and counts of rows, per head."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from attnmon.metrics._checks import _check_count, _check_floating

__all__: list[str] = []


def _mean_update(values: Tensor, heads_dim: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum, sum of squares, number and number of left-out (NaN) rows of `values` (batch, heads, rows, K), per head."""
    missing = values.isnan()
    kept = torch.where(missing, 0.0, values).to(_state_dtype(values.device))
    dims = tuple(i for i in range(values.dim() - 1) if i != heads_dim)
    skipped = missing.sum(dims)
    rows = values[..., 0].numel() // max(values.shape[heads_dim], 1)
    return kept.sum(dims), (kept * kept).sum(dims), rows - skipped, skipped


def _mean_compute(total: Tensor, used: Tensor) -> Tensor:
    """Mean per head; NaN where no row was used."""
    return torch.where(used > 0, total / used.clamp_min(1), torch.nan)


def _error_compute(total: Tensor, squares: Tensor, used: Tensor) -> Tensor:
    """Standard error of the mean over rows drawn independently; NaN below two rows."""
    count = used.clamp_min(2).to(total.dtype)
    spread = (squares / count - (total / count) ** 2).clamp_min(0)
    return torch.where(used > 1, (spread / (count - 1)).sqrt(), torch.nan)


def _state_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class _HeadMean(Metric):
    """Mean of a per-row quantity over rows, for each head and each value of the metric's argument.

    The states are sums, so `merge_state`, `forward` and the reduction over ranks are all additions and every row
    weighs the same wherever it was seen. They stay float64 (float32 on a device without it) and int64 whatever the
    module that owns the metric is cast to.
    """

    is_differentiable = False
    higher_is_better: bool | None = None
    full_state_update = False

    total: Tensor
    squares: Tensor
    used: Tensor
    skipped: Tensor

    def __init__(self, num_heads: int, columns: int | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads = _check_count("num_heads", num_heads, 1)
        self._columns = columns  # None: the argument was a number, which drops its dimension
        self._error: Tensor | None = None
        self._counts: tuple[Tensor, Tensor] | None = None
        shape = (num_heads, columns or 1)
        self.add_state("total", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("squares", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("used", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("skipped", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def _check_rows(self, name: str, tensor: Tensor) -> None:
        _check_floating(name, tensor, "(batch, num_heads, rows, n)", 1)
        if tensor.dim() != 4:
            raise ValueError(
                f"Expected `{name}` to have 4 dimensions (batch, num_heads, rows, n), but got {tensor.dim()}: shape "
                f"{tuple(tensor.shape)}. Add the missing dimensions with `unsqueeze`."
            )
        if tensor.shape[1] != self.num_heads:
            raise ValueError(
                f"Expected `{name}` to have {self.num_heads} heads in dimension 1, as `num_heads` says, but got "
                f"{tensor.shape[1]}: shape {tuple(tensor.shape)}. Pass num_heads={tensor.shape[1]} or select the heads."
            )

    def _check_vectors(self, vectors: Tensor) -> None:
        _check_floating("vectors", vectors, "(batch, num_heads, n, d)", 1)
        if vectors.dim() != 4 or vectors.shape[1] not in (1, self.num_heads):
            raise ValueError(
                f"Expected `vectors` to have shape (batch, {self.num_heads}, n, d), but got {tuple(vectors.shape)}. "
                "Expand grouped key-value heads first, e.g. `vectors.repeat_interleave(groups, dim=1)`."
            )

    def _add(self, values: Tensor) -> None:
        """Add the rows of `values` (batch, heads, rows, columns); NaN marks a row that is left out."""
        total, squares, used, skipped = _mean_update(values.detach())
        self.total += total.to(self.total.device)
        self.squares += squares.to(self.total.device)
        self.used += used.to(self.total.device)
        self.skipped += skipped.to(self.total.device)

    def compute(self) -> Tensor:
        """Mean over the rows used so far; NaN for a head of which no row was used."""
        # Kept while the states are those of all ranks, so that what belongs to this mean can be read afterwards
        # without another collective call.
        self._error = _error_compute(self.total, self.squares, self.used)
        self._counts = (self.used.clone(), self.skipped.clone())
        return self._shape(_mean_compute(self.total, self.used))

    def standard_error(self) -> Tensor:
        """Standard error of `compute()`, the rows taken as a simple random sample; NaN below two rows.

        Returns:
            A tensor of the shape and unit of `compute()`, at least 0. It calls `compute()`, so with several ranks
            every one of them must call it.
        """
        self.compute()
        error = self._error if self._error is not None else _error_compute(self.total, self.squares, self.used)
        return self._shape(error)

    @property
    def rows_used(self) -> Tensor:
        """Rows in the mean, int64, in the shape of `compute()`: over all ranks once it ran, of this one before."""
        return self._shape(self._current_counts()[0])

    @property
    def rows_skipped(self) -> Tensor:
        """Rows left out because the quantity is undefined or not finite there; like `rows_used`."""
        return self._shape(self._current_counts()[1])

    def _current_counts(self) -> tuple[Tensor, Tensor]:
        if self._computed is not None and self._counts is not None:
            return self._counts
        return self.used, self.skipped

    def _shape(self, values: Tensor) -> Tensor:
        return values.squeeze(-1) if self._columns is None else values

    def reset(self) -> None:
        """Forget all rows."""
        super().reset()
        self._error = None
        self._counts = None

    def set_dtype(self, dst_type: str | torch.dtype) -> _HeadMean:
        """Return the metric unchanged: half-precision sums of thousands of rows would be wrong."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Any = "") -> _HeadMean:
        def move(tensor: Tensor) -> Tensor:
            try:
                moved = fn(tensor)
            except TypeError:  # a device without float64
                return fn(tensor.float())
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(move, exclude_state)
        return self

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def quiet(*args: Any, **kwargs: Any) -> Any:
            if self.update_count:
                return wrapped(*args, **kwargs)
            with warnings.catch_warnings():  # NaN is the documented answer before the first update
                warnings.filterwarnings("ignore", message=r"The ``compute`` method of metric", category=UserWarning)
                return wrapped(*args, **kwargs)

        return quiet
