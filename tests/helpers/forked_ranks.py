"""Ranks of a Gloo process group, forked from the test, so that they start at once."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """What a function of the rank gives on each rank, or the exception that it raises there.

    Raises:
        TimeoutError: when a rank has not ended after a minute.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run, args=(rank, world_size, function, folder)) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        if any(process.is_alive() for process in processes):
            for process in processes:
                process.kill()
            raise TimeoutError("a rank waits for ever")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run(rank: int, world_size: int, function: Callable[[int], Any], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/group", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    try:
        result = function(rank)
    except Exception as error:
        result = error
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
