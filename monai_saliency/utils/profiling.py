"""A trace of torch.profiler, with the stages of explaining named in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.monai_private import is_profiled, profile_all_threads

__all__ = ["stage", "trace"]

_FORWARDS = 50  # the trace has this many network batches

_profiler: profile | None = None
_lock = Lock()


def stage(name: str) -> AbstractContextManager[Any]:
    """Name the work inside the block in a trace, at no cost where no profiler runs. A ``"forward"`` is one step of
    the trace.
    """
    if name == "forward" and _profiler is not None:
        with _lock:
            if _profiler is not None:
                _profiler.step()
    return record_function(f"saliency: {name}") if is_profiled() else nullcontext()


@contextmanager
def trace(folder: str | Path) -> Iterator[None]:
    """Trace the first 50 network batches of explaining, in all threads, for TensorBoard's profiler or Perfetto.

    A trace of more would be too large to open. If a case has fewer masks than these batches hold, its map and the
    writing of its map are in the trace as well.

    Example::

        with trace("out/trace"):
            maps = inferer(images, network)

    Args:
        folder: the folder of the trace file.

    Raises:
        ValueError: when the folder is no path.
    """
    global _profiler
    path = a_path("profile", folder)
    with profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()],
        schedule=schedule(wait=0, warmup=1, active=_FORWARDS, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(path), use_gzip=True),
        experimental_config=profile_all_threads(),
    ) as _profiler:
        try:
            yield
        finally:
            _profiler = None
