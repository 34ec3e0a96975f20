"""This process among those of the run."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["distributed", "rank"]


def distributed() -> bool:
    """Whether the run has several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """The number of this process, 0 where there is only one."""
    return dist.get_rank() if distributed() else 0
