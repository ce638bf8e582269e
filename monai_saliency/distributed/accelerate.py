"""Accelerate: a bundle's cohort, and your own loaders, under ``accelerate launch``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch
from monai.utils import CommonKeys

from monai_saliency.distributed.base import Cohort
from monai_saliency.distributed.batches import BatchExplainer
from monai_saliency.distributed.process_group import alone, from_all_ranks, told_to_all, wait_for_all
from monai_saliency.distributed.ranks import PATIENCE, RankEngine
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.utils.arguments import require

__all__ = ["AccelerateEngine", "explain_loader", "local_device"]

# of the images of a batch, see `BatchExplainer`
Rows = list[dict[str, Any]]


class AccelerateEngine(RankEngine):
    """The processes that ``accelerate launch`` starts: at the end each waits for all, and one reports the figures.

    Without ``accelerate launch`` it is the plain run. The processes exchange nothing but that they are done, since
    scores meet in the store.

    Args:
        split: what the processes share, see :class:`~monai_saliency.distributed.ranks.RankEngine`.

    Raises:
        OptionalImportError: when Accelerate is not installed.
        ValueError: when there are several processes, and Accelerate takes each for the only one.
    """

    waits = True

    def __init__(self, split: str = "auto") -> None:
        self.state = _state()
        super().__init__(self.state.process_index, self.state.num_processes, split)
        self.speaks = self.state.is_main_process

    def run(self, cohort: Cohort) -> None:
        with alone():
            super().run(cohort)
        wait_for_all(self.state.wait_for_everyone)


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
    image_key: str = CommonKeys.IMAGE,
    case_key: str = "case",
    label_key: str | None = None,
    held_keys: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Explain every image of a prepared loader once, whatever the number of processes."""
    send_to_device = require("accelerate.utils", extra="accelerate").send_to_device
    _check(accelerator.num_processes)
    if isinstance(network, torch.nn.Module):
        network = accelerator.unwrap_model(network)
    explain = BatchExplainer(network, inferer, split, image_key, case_key, label_key, held_keys)
    writes = split == "cases" or accelerator.is_main_process

    def explain_here(batch: Any) -> Rows:
        return explain(send_to_device(batch, accelerator.device))

    with _shared(loader, split, accelerator.num_processes):
        share = _share_batches if split == "cases" else _share_masks
        batches = share(loader, explain_here, partial(_take, write=write, writes=writes))
    return [row for rows in batches for row in rows]


def _take(rows: Rows, write: Callable[[dict[str, Any]], Any] | None, writes: bool) -> Rows:
    """Rows of a batch with maps in the host's memory; written and without maps if there is a ``write``."""
    for row in rows:
        row["saliency"] = row["saliency"].cpu()
        if write is not None:
            if writes:
                write(row)
            del row["saliency"]
    return rows


def _share_batches(loader: Any, explain: Callable[[Any], Rows], take: Callable[[Rows], Rows]) -> list[Rows]:
    """Explain this process's batches; the rows of all processes, in the loader's order."""
    with told_to_all():
        batches = [take(explain(batch)) for batch in loader]
    # Batch i of the loader is the next one of process i % n.
    return list(chain.from_iterable(zip_longest(*from_all_ranks(batches), fillvalue=[])))


def _share_masks(loader: Any, explain: Callable[[Any], Rows], take: Callable[[Rows], Rows]) -> list[Rows]:
    """Explain every batch together with the other processes; its rows."""
    given, batches = iter(loader), []
    while True:
        with told_to_all():
            batch = next(given, None)
        if batch is None:
            break
        rows = explain(batch)  # all processes meet in it
        with told_to_all():
            batches.append(take(rows))
    from_all_ranks(None)
    return batches


@contextmanager
def _shared(loader: Any, split: str, num_processes: int) -> Iterator[None]:
    """Let a prepared loader give each of its batches to one process, or to every process, and none twice."""
    module = require("accelerate.data_loader", extra="accelerate")
    samplers = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    shard = next((sampler for sampler in samplers if isinstance(sampler, module.BatchSamplerShard)), None)
    iterable = isinstance(getattr(loader, "dataset", None), module.IterableDatasetShard)
    if num_processes > 1 and (
        isinstance(loader, module.DataLoaderDispatcher) or iterable or (shard is None and split == "cases")
    ):
        raise ValueError(
            f"{type(loader).__name__} is not shared in a way that repeats no image: give a loader prepared by the "
            "Accelerator, over a dataset with a length, with dispatch_batches=False"
        )
    if shard is None:
        yield
        return
    before = dict(vars(shard))
    # `drop_last` here would leave out full batches of the last round; the loader inside keeps its own setting.
    shard.even_batches = shard.drop_last = False
    if split == "masks":
        shard.num_processes, shard.process_index = 1, 0
    try:
        yield
    finally:
        vars(shard).update(before)
