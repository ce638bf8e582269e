"""Lightning: ``Trainer.predict`` over images, over the masks of one image, and over a bundle's cohort."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from monai.utils import CommonKeys
from torch.utils.data.distributed import DistributedSampler

from monai_saliency.distributed import base
from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.distributed.batches import BatchExplainer
from monai_saliency.distributed.process_group import alone, wait_for_all
from monai_saliency.distributed.ranks import PATIENCE, RankEngine
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.utils.arguments import require

__all__ = ["LightningEngine", "SaliencyModule", "local_device"]

lightning: Any = require("lightning.pytorch", extra="lightning")
strategies: Any = require("lightning.pytorch.strategies", extra="lightning")
# `Any` for mypy, since Lightning need not be installed.
LightningModule: Any = lightning.LightningModule


class SaliencyModule(LightningModule):
    """Explains the batches of ``Trainer.predict``, on one device or on several, under any strategy that keeps the whole
    network on each device (such as ``ddp``, not one that shards it).

    Example::

        module = SaliencyModule(network, ms.rise(1000, target=ms.ClassScore("predicted", "softmax")))
        trainer = Trainer(devices=4, strategy="ddp", logger=False)
        for batch in trainer.predict(module, loader, ckpt_path="last.ckpt"):
            for case, maps in zip(batch["case"], batch["saliency"]):
                ...

    A checkpoint may be one of this module, or of the module that the network was trained in, by ``ckpt_path`` or by
    :meth:`load_from_checkpoint` (with ``network`` and ``inferer``). In the training module the network has another
    name, such as ``self.model``, so that its weights begin with another prefix. The prefix is found, as the only one
    under which the checkpoint has all of the network's weights. The checkpoint's other weights are left out.

    Args:
        network: any callable on batches ``(B, C, *spatial)``.
        inferer: explains images, as made by :func:`monai_saliency.rise` and the other methods.
        split: what devices share: ``"cases"``, each explains the batches that Lightning's sampler gives it; or
            ``"masks"``, each scores its share of the masks of every image, and has all maps. Then every device must see
            every batch: ``Trainer(use_distributed_sampler=False)``.
        image_key: the key of the network's input, in batches that are dictionaries.
        case_key: the key of the cases' names; where a batch lacks it, the names of the cases' files are used.
        label_key: the key of label maps ``(B, 1, *spatial)``, for masks and targets that are made of regions.
        held_keys: the keys of the network's other inputs, which the inferer's ``inputs`` passes on under these names.
        checkpoint_prefix: the prefix of the network's weights in a checkpoint, such as ``"ema_model."``, needed if the
            checkpoint holds several sets of them.
    """

    def __init__(
        self,
        network: Callable[..., Any],
        inferer: PerturbationInferer,
        split: str = "cases",
        image_key: str = CommonKeys.IMAGE,
        case_key: str = "case",
        label_key: str | None = None,
        held_keys: Sequence[str] = (),
        checkpoint_prefix: str | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.checkpoint_prefix = checkpoint_prefix
        self._explain = BatchExplainer(network, inferer, split, image_key, case_key, label_key, held_keys)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **settings: Any) -> SaliencyModule:
        """A module with the network's weights from a checkpoint."""
        # Arguments that are not given would be taken from the training module's, where a name is the same.
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(cls).parameters.items()
            if parameter.default is not parameter.empty
        }
        return super().load_from_checkpoint(checkpoint_path, **{**defaults, **settings})

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> dict[str, list[Any]]:
        """Explain a batch."""
        rows = self._explain(batch)
        return {key: [row[key] for row in rows] for key in ("case", "saliency", "explained")}

    def on_predict_start(self) -> None:
        """Refuse loaders that share images, if devices share masks."""
        if self._explain.split != "masks" or self.trainer.world_size == 1:
            return
        loaders = self.trainer.predict_dataloaders
        for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
            samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
            samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
            if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
                raise ValueError(
                    "devices share the masks of each image (split='masks'), so each must see every batch, and the "
                    "loader's DistributedSampler shares the images: set Trainer(use_distributed_sampler=False), and "
                    "leave such a sampler out of the loader; or choose split='cases'"
                )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the network's weights out of a checkpoint, whatever their prefix is there."""
        wanted = self.network.state_dict() if isinstance(self.network, torch.nn.Module) else {}
        if not wanted:
            checkpoint["state_dict"] = {}
            return
        held = checkpoint["state_dict"]
        prefixes = [self.checkpoint_prefix] if self.checkpoint_prefix is not None else _prefixes(wanted, held)
        fitting = [prefix for prefix in prefixes if all(prefix + name in held for name in wanted)]
        if len(fitting) != 1:
            asked = "" if self.checkpoint_prefix is None else f" under the prefix {self.checkpoint_prefix!r}"
            found = f"weights that begin with {next(iter(held), None)!r}"
            if fitting:
                found = f"them under each of {fitting}: choose one by `checkpoint_prefix`"
            raise ValueError(
                f"the checkpoint must hold the network's {len(wanted)} weights ({next(iter(wanted))}, ...){asked}, "
                f"once; it holds {found}"
            )
        checkpoint["state_dict"] = {f"network.{name}": held[fitting[0] + name] for name in wanted}


def _prefixes(wanted: Any, held: Any) -> list[str]:
    """Possible prefixes of a network's weights in a checkpoint."""
    first = next(iter(wanted))
    return [name.removesuffix(first) for name in held if name == first or name.endswith(f".{first}")]


def local_device(accelerator: str = "auto") -> torch.device:
    """The device of this process, see :func:`monai_saliency.distributed.local_device`."""
    return torch.device("cpu") if accelerator == "cpu" else base.local_device()


class LightningEngine(Engine):
    """The processes that Lightning starts, by ``Trainer.predict``: at the end each waits for all, and the first reports
    the figures.

    Each process is started by the same command as the first, and explains its share of the cohort in one step, so that
    cases load ahead of the network. The processes exchange nothing but that they are done, since scores meet in the
    store. Lightning writes nothing.

    Args:
        strategy: Lightning's strategy, by name or as an object. It must start its processes by the command line
            (``"ddp"``), since a cohort cannot be copied into another process.
        devices: processes of each node; ``"auto"`` for as many as it has GPUs. On CPUs give a number.
        accelerator: Lightning's accelerator, such as ``"cpu"``.
        num_nodes: the number of nodes.
        split: what the processes share, see :class:`~monai_saliency.distributed.ranks.RankEngine`.

    Raises:
        ValueError: when the strategy starts its processes in another way.
    """

    def __init__(
        self,
        strategy: Any = "ddp",
        devices: Any = "auto",
        accelerator: str = "auto",
        num_nodes: int = 1,
        split: str = "auto",
    ) -> None:
        if isinstance(strategy, str) and any(word in strategy for word in ("spawn", "fork", "notebook")):
            raise ValueError(
                f"`strategy` must start its processes by the command line again, as 'ddp' does: {strategy!r} copies "
                "this one, and a cohort cannot be copied"
            )
        if strategy in ("auto", "ddp"):
            # Gloo, since nothing is exchanged: a process that waits leaves its GPU alone, and hears when another dies.
            strategy = strategies.DDPStrategy(process_group_backend="gloo", timeout=PATIENCE)
        self.strategy = strategy
        self.devices = devices
        self.accelerator = accelerator
        self.num_nodes = num_nodes
        self.split = split

    def run(self, cohort: Cohort) -> None:
        for name in ("lightning.pytorch", "lightning.fabric"):
            # It reports its devices, and gives tips.
            logging.getLogger(name).setLevel(logging.WARNING)
        trainer = lightning.Trainer(
            accelerator=self.accelerator,
            devices=self.devices,
            num_nodes=self.num_nodes,
            strategy=self.strategy,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            # Shares are made here: Lightning's own sampler refuses to have fewer cases than processes.
            use_distributed_sampler=False,
            # Tensors made in that mode go to threads that save and draw, which are not in it.
            inference_mode=False,
        )
        standing = dist.is_initialized()
        share = _Share(cohort, self.split)
        cohort.expect()
        try:
            trainer.predict(share, range(1), return_predictions=False)
        except SystemExit:
            if share.interrupted:
                # Lightning turns it into an exit without a message.
                raise KeyboardInterrupt from None
            raise
        self.speaks = trainer.is_global_zero
        wait_for_all(trainer.strategy.barrier)
        if dist.is_initialized() and not standing:
            dist.destroy_process_group()


class _Share(LightningModule):
    """Explains this process's share of a cohort in a single step."""

    def __init__(self, cohort: Cohort, split: str) -> None:
        super().__init__()
        self.cohort = cohort
        self.split = split
        self.interrupted = False

    def predict_step(self, batch: Any, batch_idx: int = 0) -> int:
        given, used = self.trainer.strategy.root_device, torch.device(self.cohort.evaluator.state.device)
        if given.type == "cuda" and given != used:
            raise ValueError(
                f"Lightning gives this process {given}, and the network is on {used}: give `devices` as a number, and "
                "choose GPUs by CUDA_VISIBLE_DEVICES"
            )
        try:
            with alone():
                RankEngine(self.trainer.global_rank, self.trainer.world_size, self.split).run(self.cohort)
        except KeyboardInterrupt:
            self.interrupted = True
            raise
        return len(self.cohort.explained)
