"""Timestamps of a device, the share of a run's time spent in its network, and traces of torch's profiler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.monai_private import profile_all_threads

__all__ = ["BusyMeter", "Timestamp", "stage", "trace"]


class Timestamp:
    """A point in time on a device. Making one never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._clock = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._clock = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has reached the timestamp. Other threads continue."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Timestamp) -> float:
        """Seconds from an earlier timestamp of the same device to this one. Waits until this one has passed."""
        if self._event is None or earlier._event is None:
            return self._clock - earlier._clock
        self.wait()
        return earlier._event.elapsed_time(self._event) / 1000


_WAITING = 64  # calls of the network whose time is not read yet


class BusyMeter:
    """Sums the time a network runs during explanations; on CUDA, the time of the device.

    Attributes:
        images: how many images or patches went through the network.
    """

    def __init__(self) -> None:
        self.images = 0
        self._busy = 0.0
        self._calls: deque[tuple[Timestamp, Timestamp]] = deque()
        self._first: Timestamp | None = None

    @contextmanager
    def call(self, batch: torch.Tensor) -> Iterator[None]:
        """Time the block as one call of the network."""
        start = Timestamp(batch.device)
        yield
        self._first = self._first or start
        self.images += len(batch)
        self._calls.append((start, Timestamp(batch.device)))
        while len(self._calls) > _WAITING:  # by now the device has passed it
            began, ended = self._calls.popleft()
            self._busy += ended.seconds_since(began)

    def __str__(self) -> str:
        if self._first is None:
            return "network not run"
        wall = self._calls[-1][1].seconds_since(self._first)
        busy = self._busy + sum(end.seconds_since(start) for start, end in self._calls)
        return (
            f"network busy {100 * busy / wall if wall else 0:.1f} % of the {wall:.1f} s between its first and last "
            f"forward ({self.images} images, with the predictions, checks and padding)"
        )


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

    Example::

        with trace("out/trace"):
            maps = inferer(images, network)

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
