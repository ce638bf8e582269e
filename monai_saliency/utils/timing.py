"""Timestamps of a device, the share of a run's time in which its network ran, and traces of torch's profiler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from monai.inferers import Inferer
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.monai_private import profile_all_threads

__all__ = ["BusyMeter", "Timestamp", "WatchedInferer", "stage", "trace"]


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

    def passed(self) -> bool:
        """Whether the device has reached the timestamp."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: Timestamp) -> float:
        """Seconds from an earlier timestamp of the same device to this one. Waits until this one has passed."""
        if self._event is None or earlier._event is None:
            return self._clock - earlier._clock
        self.wait()
        return earlier._event.elapsed_time(self._event) / 1000


class BusyMeter:
    """Sums the time in which a network runs.

    Sums the time spent in each :meth:`call` and in each call of a watched inferer; on CUDA, the time of the device. If
    an inferer calls the network several times, as ``SlidingWindowInferer`` does, its own work between counts as well.

    Attributes:
        images: how many images went through the network.
    """

    def __init__(self) -> None:
        self.images = 0
        self._busy = 0.0
        self._first: Timestamp | None = None
        self._last: Timestamp | None = None
        self._pending: deque[tuple[Timestamp, Timestamp]] = deque()

    @contextmanager
    def call(self, batch: torch.Tensor) -> Iterator[None]:
        """Time the block as one call of the network."""
        start = Timestamp(batch.device)
        yield
        self._last = Timestamp(batch.device)
        self._first = self._first or start
        self.images += len(batch)
        self._pending.append((start, self._last))
        self._fold(wait=False)

    def watch(self, inferer: Inferer) -> WatchedInferer:
        """An inferer with the same results, whose calls are timed."""
        return WatchedInferer(inferer, self)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the network ran."""
        self._fold(wait=True)
        return self._busy

    @property
    def wall_seconds(self) -> float:
        """Seconds from the start of the first call to the end of the last one. 0 without any call."""
        return self._last.seconds_since(self._first) if self._first and self._last else 0.0

    def _fold(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][1].passed()):
            start, end = self._pending.popleft()
            self._busy += end.seconds_since(start)

    def __str__(self) -> str:
        share = self.busy_seconds / self.wall_seconds if self.wall_seconds else 0.0
        return (
            f"network busy {100 * share:.1f} % of the {self.wall_seconds:.1f} s between its first and last forward "
            f"({self.images} images)"
        )


class WatchedInferer(Inferer):
    """An inferer whose calls are timed, see :meth:`BusyMeter.watch`."""

    def __init__(self, inferer: Inferer, meter: BusyMeter) -> None:
        super().__init__()
        self.inferer = inferer
        self.meter = meter

    def __call__(self, inputs: Any, network: Any, *args: Any, **kwargs: Any) -> Any:
        # One batch, as a tensor or as a list of images, or a dictionary of batches.
        batch = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
        batch = batch if isinstance(batch, torch.Tensor) else batch[0][None].expand(len(batch), *batch[0].shape)
        with self.meter.call(batch):
            return self.inferer(inputs, network, *args, **kwargs)


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
