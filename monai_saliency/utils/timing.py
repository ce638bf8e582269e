"""Points in the work of a device, and traces of torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.monai_private import profile_all_threads


class Timestamp:
    """A point in the work of a device. Making one never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached the timestamp. Other threads continue."""
        if self._event is not None:
            self._event.synchronize()


_FORWARDS = 50  # the trace has this many network batches

_profiler: profile | None = None


def stage(name: str) -> AbstractContextManager[Any]:
    """Name the work inside the block in a trace. A ``"forward"`` is one step of the trace."""
    profiler = _profiler
    if name == "forward" and profiler is not None:
        profiler.step()
    return record_function(f"saliency: {name}")


@contextmanager
def trace(folder: str | Path) -> Iterator[None]:
    """Trace the first 50 network batches of explaining, in all threads, for TensorBoard's profiler or Perfetto.

    A trace of more would be too large to open. If a case has fewer masks than these batches hold, its map and the
    writing of its map are in the trace as well.

    Args:
        folder: the folder of the trace file.

    Raises:
        ValueError: when the folder is not a path.
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
