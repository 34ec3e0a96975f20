"""The vectors that the rows of a group share, and what depends on them alone."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from attnmon.scratch import Scratch

__all__: list[str] = []

# Bytes of the largest temporary. On a CPU one that stays in the cache is several times faster than one that does not.
_BUDGET = {"cpu": 8 * 2**20}
_BUDGET_DEVICE = 256 * 2**20
# Squared distances below this share of the two squared norms are taken from the difference of the vectors.
_COINCIDENT = 1e-6


def _block_elements(device: torch.device, dtype: torch.dtype) -> int:
    """Elements of the largest temporary that the budget allows."""
    return _BUDGET.get(device.type, _BUDGET_DEVICE) // dtype.itemsize


class _Group:
    """Vectors of a few groups of rows, (G, n, d), and what depends on them alone.

    Args:
        vectors: ``(G, n, d)``.
        direct: Small differences may be looked for, and computed again.
        dense: Distances and products of all pairs, (G, n, n), may be kept; without, they are made row by row.
        whole: A group over more keys of which these are the first: what it has made is not made again.
        scratch: Memory for the temporaries of these rows; None: each takes its own.
    """

    def __init__(
        self,
        vectors: Tensor,
        direct: bool,
        dense: bool = True,
        whole: _Group | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.direct, self.dense, self._whole, self._scratch = direct, dense, whole, scratch
        self.squares: Tensor
        self.broken: Tensor
        self.any_broken: bool
        n = vectors.shape[1]
        if whole is not None:
            self.vectors, self.squares, self.broken = vectors, whole.squares[:, :n], whole.broken[:, :n]
            self.any_broken = whole.any_broken
            return
        # over each key's own row: the same for identical keys, wherever they stand
        self.squares = torch.linalg.vector_norm(vectors, dim=-1).square_()  # (G, n)
        self.broken = ~self.squares.isfinite()
        if not direct or bool(self.broken.any()):
            vectors = torch.where(self.broken[..., None], 0.0, vectors)
            self.squares = torch.where(self.broken, 0.0, self.squares)
            self.any_broken = True
        else:
            self.any_broken = False
        self.vectors = vectors

    def prefix(self, n: int) -> _Group:
        """The first n keys of each group."""
        if n == self.vectors.shape[1]:
            return self
        return _Group(self.vectors[:, :n], self.direct, self.dense, self._whole or self, self._scratch)

    def take(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor in the dtype of the vectors; the next one of this name may take its place."""
        if self._scratch is None:
            return self.vectors.new_empty(shape)
        return self._scratch.take(name, *shape, like=self.vectors)

    @property
    def table(self) -> tuple[Tensor, int]:
        """The vectors of all groups one below the other, (rows, d), and how many rows each group takes."""
        vectors = self.vectors if self._whole is None else self._whole.vectors
        return vectors.reshape(-1, vectors.shape[-1]), vectors.shape[1]

    def select(self, groups: slice) -> _Group:
        """Some of the groups."""
        if len(self.vectors) == 1 and groups.start == 0:
            return self
        return _Group(self.vectors[groups], self.direct, self.dense)

    @cached_property
    def norms(self) -> Tensor:
        """``||x_j||``, (G, n)."""
        if self._whole is not None:
            return self._whole.norms[:, : self.vectors.shape[1]]
        return self.squares.sqrt()

    @cached_property
    def largest(self) -> Tensor:
        """Largest norm of a group, (G, 1): a bound for any of its keys, visible or not."""
        return self.norms.amax(-1, keepdim=True)

    @cached_property
    def pairwise(self) -> Tensor:
        """``||x_i - x_j||``, (G, n, n), from differences: exact for near-coincident keys."""
        if self._whole is not None:
            n = self.vectors.shape[1]
            return self._whole.pairwise[:, :n, :n]
        distances: Tensor = torch.cdist(self.vectors, self.vectors, compute_mode="donot_use_mm_for_euclid_dist")
        return distances

    @cached_property
    def products(self) -> Tensor:
        """``x_i . x_j``, (G, n, n)."""
        if self._whole is not None:
            n = self.vectors.shape[1]
            return self._whole.products[:, :n, :n].contiguous()
        return torch.bmm(self.vectors, self.vectors.mT)

    @cached_property
    def double(self) -> Tensor:
        """The vectors in float64, (G, n, d)."""
        if self._whole is not None:
            return self._whole.double[:, : self.vectors.shape[1]]
        return self.vectors.double()

    def distances_from(self, index: Tensor) -> Tensor:
        """``||x_i - x_j||`` of the keys `index` (G, R) to all, (G, R, n)."""
        if self.dense and len(index) == 1:
            return self.pairwise[0].index_select(0, index[0])[None]
        if self.dense:
            groups = torch.arange(len(index), device=index.device)[:, None]
            return self.pairwise[groups, index]
        chosen = self._rows(index).double()
        own = chosen.square().sum(-1, keepdim=True) + self.double.square().sum(-1)[:, None]
        squared = torch.baddbmm(own, chosen, self.double.mT, alpha=-2)
        if self.direct:
            close = (squared < _COINCIDENT * own).nonzero()
            for part in close.split(max(1, _block_elements(index.device, torch.float64) // chosen.shape[-1])):
                g, row, key = part.unbind(-1)
                squared[g, row, key] = (chosen[g, row] - self.double[g, key]).square().sum(-1)
        return squared.clamp_min_(0).sqrt_().to(self.vectors.dtype)

    def products_from(self, group: int, index: Tensor, out: Tensor) -> Tensor:
        """``x_i . x_j`` of the keys `index` (R,) of one group to all, into `out` (R, n)."""
        if self.dense:
            return torch.index_select(self.products[group], 0, index, out=out)
        return torch.mm(self.vectors[group, index], self.vectors[group].mT, out=out)

    def _rows(self, index: Tensor) -> Tensor:
        return self.vectors.gather(1, index[..., None].expand(*index.shape, self.vectors.shape[-1]))

    @cached_property
    def closest(self) -> Tensor:
        """Smallest distance between two of the first j + 1 keys, (G, n); inf for j = 0."""
        if self._whole is not None:
            return self._whole.closest[:, : self.vectors.shape[1]]
        g, n, d = self.vectors.shape
        if self.dense:
            later = torch.ones(n, n, dtype=torch.bool, device=self.vectors.device).triu()
            return self.pairwise.masked_fill(later, torch.inf).amin(-1).cummin(-1).values
        nearest = torch.full_like(self.squares, torch.inf)
        step = max(1, _block_elements(self.vectors.device, torch.float64) // max(n, d))
        for start in range(1, n, step):
            rows = torch.arange(start, min(start + step, n), device=self.vectors.device)
            distances = self.distances_from(rows.expand(g, -1))
            distances.masked_fill_(torch.arange(n, device=rows.device) >= rows[:, None], torch.inf)
            # the pair is found by products, its distance taken from the difference
            pair = distances.argmin(-1)
            difference = self.vectors[:, start : start + step] - self._rows(pair)
            nearest[:, start : start + step] = torch.linalg.vector_norm(difference, dim=-1)
        return nearest.cummin(-1).values
