"""Accelerate: a bundle's cohort, and your own loaders, under ``accelerate launch``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import torch

from monai_saliency.distributed.base import PATIENCE, RankEngine
from monai_saliency.distributed.process_group import BatchExplainer, from_all_ranks
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.utils.arguments import require


class AccelerateEngine(RankEngine):
    """The processes that ``accelerate launch`` starts: at the end each waits for all, and one reports the figures.

    Without ``accelerate launch`` it is the plain run. The processes exchange nothing but that they are done, since
    scores meet in the store.

    Args:
        split: what the processes share, see :class:`~monai_saliency.distributed.RankEngine`.

    Raises:
        OptionalImportError: when Accelerate is not installed.
        ValueError: when there are several processes, and Accelerate takes each for the only one.
    """

    waits = True

    def __init__(self, split: str = "auto") -> None:
        self.state = _state()
        super().__init__(self.state.process_index, self.state.num_processes, split)
        self.speaks = self.state.is_main_process

    def wait(self) -> None:
        self.state.wait_for_everyone()


def local_device() -> torch.device:
    """The device that Accelerate gives this process."""
    device = _state().device
    return torch.device("cpu") if device.type == "cpu" else device


def _state() -> Any:
    """Accelerate's view of this process among the others."""
    accelerate = require("accelerate", extra="accelerate")
    # An `Accelerator` heeds this by itself, and a `PartialState` does not.
    cpu = accelerate.utils.parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = accelerate.PartialState(cpu=cpu, timeout=PATIENCE)
    _check(state.num_processes)
    return state


def _check(num_processes: int) -> None:
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started > num_processes:
        raise ValueError(
            f"{started} processes were started, and Accelerate takes each for the only one, so that each would explain "
            "everything: on the CPU, set Accelerator(cpu=True), or ACCELERATE_USE_CPU=true before the command"
        )


def explain_loader(
    accelerator: Any,
    loader: Any,
    network: Callable[..., Any],
    inferer: PerturbationInferer,
    split: str = "cases",
    write: Callable[[dict[str, Any]], Any] | None = None,
    **keys: Any,
) -> list[dict[str, Any]]:
    """Explain every image of a loader once, whatever the number of processes.

    Args:
        accelerator: the ``Accelerator``.
        loader: prepared by the accelerator; for ``split="masks"`` the loader as it is.
        network: any callable on batches ``(B, C, *spatial)``, prepared or not.
        inferer: explains images, as made by :func:`monai_saliency.rise` and the other methods.
        split: what the processes share, ``"cases"`` or ``"masks"`` (of every image).
        write: takes each row where it was made; the map is dropped afterwards.
        keys: the keys of a batch, see :class:`~monai_saliency.distributed.process_group.BatchExplainer`.

    Returns:
        the rows of all processes in the loader's order: ``case``, ``saliency`` (on the CPU) and ``explained``.
    """
    send_to_device = require("accelerate.utils", extra="accelerate").send_to_device
    _check(accelerator.num_processes)
    if isinstance(network, torch.nn.Module):
        network = accelerator.unwrap_model(network)
    explain = BatchExplainer(network, inferer, split, **keys)
    writes = split == "cases" or accelerator.is_main_process
    batches = []
    with _each_once(loader, accelerator.num_processes if split == "cases" else 1):
        for batch in loader:
            batches.append(explain(send_to_device(batch, accelerator.device)))
            for row in batches[-1]:
                row["saliency"] = row["saliency"].cpu()
                if write is not None:
                    if writes:
                        write(row)
                    del row["saliency"]
    # Batch i of the loader is the next one of process i % n.
    everyones = from_all_ranks(batches) if split == "cases" else [batches]
    return [row for each in zip_longest(*everyones, fillvalue=[]) for row in chain.from_iterable(each)]


@contextmanager
def _each_once(loader: Any, num_processes: int) -> Iterator[None]:
    """Let a prepared loader give each of its batches to one process, and none twice."""
    if num_processes == 1:
        yield
        return
    sharded = require("accelerate.data_loader", extra="accelerate").BatchSamplerShard
    samplers = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    shard = next((sampler for sampler in samplers if isinstance(sampler, sharded)), None)
    if shard is None:
        raise ValueError(
            f"{type(loader).__name__} is not shared in a way that repeats no image: give a loader prepared by the "
            "Accelerator, over a dataset with a length, with dispatch_batches=False"
        )
    before = shard.even_batches, shard.drop_last
    # `drop_last` here would leave out full batches of the last round; the loader inside keeps its own setting.
    shard.even_batches = shard.drop_last = False
    try:
        yield
    finally:
        shard.even_batches, shard.drop_last = before
