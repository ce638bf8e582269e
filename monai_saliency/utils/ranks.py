"""The rank of this process."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["rank_of"]


def rank_of(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """The rank of this process, and the number of ranks. Without a process group: 0 and 1."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in `group`: call this on the group's own ranks only")
    return rank, dist.get_world_size(group)
