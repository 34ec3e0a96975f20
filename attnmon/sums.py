"""Fixed-shape sums of one layer's figures: what is kept of the rows, and what travels between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Figures", "LayerSums", "row_sums"]

_STATS = 6  # rows used, rows skipped, sum of w, of w^2, of w x, of w x^2


class LayerSums:
    """Weighted sums per figure and head, kept on the device of the rows until the step is over.

    Args:
        num_columns: Number of figures.
        num_heads: Number of query heads.
        device: Where the rows are.

    ``data`` is ``(num_columns + 1, num_heads, 6)``: per figure the rows used and skipped, and the sums of w, w^2, w x
    and w x^2 over the used rows; in the last entry the layer's own numbers (non-finite rows, mismatches, and what
    `add_call` adds). Everything in it adds up over calls, chunks and ranks. float64 wherever the device has it.
    """

    def __init__(self, num_columns: int, num_heads: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # what is made in it can't be added to outside
            self.data = torch.zeros(num_columns + 1, num_heads, _STATS, dtype=_wide(device), device=device)

    def add_rows(self, values: Tensor, weight: Tensor) -> None:
        """Adds rows; arguments as for `row_sums`."""
        self.add(row_sums(values, weight).sum(1))

    def add(self, sums: Tensor) -> None:
        """Adds what `row_sums` made of one sequence or of several together, ``(num_columns, num_heads, 6)``."""
        self.data[:-1] += sums

    def add_nonfinite(self, rows: Tensor) -> None:
        """Adds rows with a NaN or infinite score, ``(num_heads,)``."""
        self.data[-1, :, 0] += rows

    def add_mismatch(self, mismatch: Tensor) -> None:
        """Adds whether a call's own output contradicts the captured arguments, a scalar."""
        self.data[-1, :, 1] += mismatch

    def add_call(self, padding: Tensor, temperature: float) -> None:
        """Adds what belongs to a whole call.

        Args:
            padding: Scalar, padding positions left aside.
            temperature: The model's own temperature in this call.
        """
        extra = self.data[-1]
        extra[:, 2] += padding
        extra[:, 3] += temperature
        extra[:, 4] += 1


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def row_sums(values: Tensor, weight: Tensor) -> Tensor:
    """What `LayerSums` keeps of the rows of each sequence, ``(num_columns, batch, num_heads, 6)``.

    Args:
        values: ``(num_columns, batch, num_heads, rows)``; NaN or infinite = this row has no such figure.
        weight: ``(batch, rows)``; how many rows each stands for, 0 = not a row.
    """
    weight = weight.to(_wide(values.device))
    row = (weight > 0).to(weight.dtype)
    finite = values * 0 == 0
    used = finite.to(weight.dtype)
    x = torch.where(finite, values, 0).to(weight.dtype)
    # Sums as products: the weight of what is not a row is 0.
    counts = used @ torch.stack([row, weight, weight * weight], -1)
    by_weight = weight[..., None]
    skipped = row.sum(-1)[:, None, None] - counts[..., :1]
    return torch.cat([counts[..., :1], skipped, counts[..., 1:], x @ by_weight, (x * x) @ by_weight], -1)


@dataclass(frozen=True)
class Figures:
    """One layer's sums as plain numbers: ``[figure][head]`` means, standard errors, rows used and skipped."""

    means: list[list[float]]
    errors: list[list[float]]
    used: list[list[int]]
    skipped: list[list[int]]
    nonfinite: list[int]
    mismatched: bool
    padding: int
    temperature: float

    @classmethod
    def from_sums(cls, data: Tensor) -> Figures:
        """Finishes the sums of a layer (on the CPU, after all ranks were added up).

        The standard error treats the rows as a simple random sample; with unequal weights the number of rows is
        replaced by the effective one, ``(sum w)^2 / sum w^2``.
        """
        used, skipped, w, w2, wx, wx2 = data[:-1].double().unbind(-1)
        extra = data[-1].tolist()
        calls = max(extra[0][4], 1.0)
        means = torch.where(w > 0, wx / w, torch.nan)
        variance = (wx2 / w - means * means).clamp_min(0.0) * used / (used - 1)
        errors = torch.where((used < 2) | (w <= 0), torch.nan, (variance * w2).sqrt() / w)
        return cls(
            means=_plain(means),
            errors=_plain(errors),
            used=used.long().tolist(),
            skipped=skipped.long().tolist(),
            nonfinite=[int(head[0]) for head in extra],
            mismatched=extra[0][1] > 0,
            padding=int(extra[0][2]),
            temperature=extra[0][3] / calls,
        )


def _plain(figures: Tensor) -> list[list[float]]:
    """As Python numbers; there is one NaN only, so that equal figures compare as equal."""
    return [[math.nan if math.isnan(value) else value for value in row] for row in figures.tolist()]
