"""``torchrun``: its processes share a cohort."""

from __future__ import annotations

import os

import torch.distributed as dist

from monai_saliency.distributed.base import PATIENCE, Cohort, RankEngine


class TorchrunEngine(RankEngine):
    """The processes that ``torchrun`` starts: at the end each waits for all, and the first reports the figures.

    Without ``torchrun`` it is the plain run. The processes exchange nothing but that they are done, since scores meet
    in the store. So a process that ends early can be started again by ``--max-restarts``.

    Args:
        split: what the processes share, see :class:`~monai_saliency.distributed.RankEngine`.
    """

    waits = True

    def __init__(self, split: str = "auto") -> None:
        super().__init__(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), split)
        self.speaks = self.rank == 0

    def run(self, cohort: Cohort) -> None:
        # A bundle for several GPUs may have made a group, whose timeout suits training.
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None
        super().run(cohort)

    def wait(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)
        elif self.world_size > 1:
            # Only now: while there is a group, handlers of a bundle that gather values wait for all processes.
            dist.init_process_group("gloo", timeout=PATIENCE)
            dist.barrier()
            dist.destroy_process_group()
