"""Lightning: ``Trainer.predict`` over images or over the masks of each image, and a bundle's cohort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from monai_saliency.distributed import base
from monai_saliency.distributed.base import PATIENCE, Cohort, RankEngine
from monai_saliency.distributed.process_group import BatchExplainer
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.utils.arguments import require

# `Any` for mypy, since Lightning need not be installed.
LightningModule: Any = require("lightning.pytorch", extra="lightning").LightningModule
fabric: Any = require("lightning.fabric", extra="lightning")


class SaliencyModule(LightningModule):
    """Explains the batches of ``Trainer.predict``, on one device or on several, under any strategy that keeps the whole
    network on each device (such as ``ddp``, not one that shards it).

    Example::

        network = Trained.load_from_checkpoint("last.ckpt").model  # of your own module
        module = SaliencyModule(network, ms.rise(1000, target=ms.ClassScore("predicted", "softmax")))
        trainer = Trainer(devices=4, strategy="ddp", logger=False)
        for batch in trainer.predict(module, loader):
            for case, maps in zip(batch["case"], batch["saliency"]):
                ...

    Args:
        network: any callable on batches ``(B, C, *spatial)``.
        inferer: explains images, as made by :func:`monai_saliency.rise` and the other methods.
        split: what devices share: ``"cases"``, each explains the batches that Lightning's sampler gives it; or
            ``"masks"``, each scores its share of the masks of every image, and has all maps. Then every device must see
            every batch: ``Trainer(use_distributed_sampler=False)``.
        keys: the keys of a batch, see :class:`~monai_saliency.distributed.process_group.BatchExplainer`.
    """

    def __init__(
        self, network: Callable[..., Any], inferer: PerturbationInferer, split: str = "cases", **keys: Any
    ) -> None:
        super().__init__()
        self.network = network
        self._explain = BatchExplainer(network, inferer, split, **keys)

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> dict[str, list[Any]]:
        """Explain a batch."""
        rows = self._explain(batch)
        return {key: [row[key] for row in rows] for key in ("case", "saliency", "explained")}


def local_device(accelerator: str = "auto") -> torch.device:
    """The device of this process, see :func:`monai_saliency.distributed.local_device`."""
    return torch.device("cpu") if accelerator == "cpu" else base.local_device()


class LightningEngine(RankEngine):
    """The processes that Lightning starts: at the end each waits for all, and the first reports the figures.

    Each process is started by the same command as the first. The processes exchange nothing but that they are done,
    since scores meet in the store.

    Args:
        strategy: a strategy of ``lightning.fabric``, by name or as an object. It must start its processes by the
            command line (``"ddp"``), since a cohort cannot be copied into another process.
        devices: the number of processes of each node; ``"auto"`` for as many as it has GPUs. Choose GPUs by
            ``CUDA_VISIBLE_DEVICES``.
        accelerator: Lightning's accelerator, such as ``"cpu"``.
        num_nodes: the number of nodes.
        split: what the processes share, see :class:`~monai_saliency.distributed.RankEngine`.
    """

    waits = True

    def __init__(
        self,
        strategy: Any = "ddp",
        devices: Any = "auto",
        accelerator: str = "auto",
        num_nodes: int = 1,
        split: str = "auto",
    ) -> None:
        super().__init__(0, 1, split)
        if not isinstance(devices, int) and devices != "auto":
            raise ValueError(
                f"`devices` must be a number, got {devices!r}: choose GPUs by CUDA_VISIBLE_DEVICES before the command"
            )
        if strategy in ("auto", "ddp"):
            # Gloo, since nothing is exchanged: a process that waits leaves its GPU alone, and hears when another dies.
            strategy = fabric.strategies.DDPStrategy(process_group_backend="gloo", timeout=PATIENCE)
        self._settings = {"strategy": strategy, "devices": devices, "accelerator": accelerator, "num_nodes": num_nodes}

    def run(self, cohort: Cohort) -> None:
        standing = dist.is_initialized()
        self._fabric = fabric.Fabric(**self._settings)
        self._fabric.launch()
        self.rank, self.world_size = self._fabric.global_rank, self._fabric.world_size
        self.speaks = self.rank == 0
        super().run(cohort)
        if dist.is_initialized() and not standing:
            dist.destroy_process_group()

    def wait(self) -> None:
        self._fabric.barrier()
