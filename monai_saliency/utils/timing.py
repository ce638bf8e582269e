"""How much of a run's time the network was at work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from monai.inferers import Inferer

__all__ = ["BusyMeter", "Moment"]


class Moment:
    """A point in time on a device: on CUDA, when the work given to it so far is done, and nothing waits for that.

    Args:
        device: whose work is timed. Others than CUDA are timed by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._clock = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._clock = time.perf_counter()

    def wait(self) -> None:
        """Return when the device is past it. Other threads go on."""
        if self._event is not None:
            self._event.synchronize()

    def passed(self) -> bool:
        """Whether the device is past it."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds from an earlier moment of the same device to this one; waits until this one has passed."""
        if self._event is None or earlier._event is None:
            return self._clock - earlier._clock
        self.wait()
        return earlier._event.elapsed_time(self._event) / 1000


class BusyMeter:
    """Adds up when the network runs.

    Counted is the time from the start to the end of each call of an inferer that :meth:`watch` gave, on CUDA as the
    device saw it. For an inferer that calls the network many times, as ``SlidingWindowInferer`` does, what it does
    between them counts as well.

    Attributes:
        images: that went through the network.
    """

    def __init__(self) -> None:
        self.images = 0
        self._busy = 0.0
        self._first: Moment | None = None
        self._last: Moment | None = None
        self._pending: deque[tuple[Moment, Moment]] = deque()

    @contextmanager
    def call(self, batch: torch.Tensor) -> Iterator[None]:
        """Count what runs inside as one call of the network on a batch ``(n, ...)``."""
        start = Moment(batch.device)
        yield
        self.add(start, Moment(batch.device), len(batch))

    def watch(self, inferer: Inferer) -> Inferer:
        """An inferer that does the same, and whose calls are counted."""
        return _Watched(inferer, self)

    def add(self, start: Moment, end: Moment, images: int) -> None:
        """Count a call that went from one moment to another, later ones last."""
        self.images += images
        self._first = self._first or start
        self._last = end
        self._pending.append((start, end))
        self._fold(wait=False)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the network ran."""
        self._fold(wait=True)
        return self._busy

    @property
    def wall_seconds(self) -> float:
        """Seconds from the start of the first call to the end of the last; 0 where there was none."""
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


class _Watched(Inferer):
    def __init__(self, inferer: Inferer, meter: BusyMeter) -> None:
        super().__init__()
        self.inferer = inferer
        self.meter = meter

    def __call__(self, inputs: Any, network: Any, *args: Any, **kwargs: Any) -> Any:
        # A batch, as a tensor or as a list of images, or several batches by name.
        batch = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
        batch = batch if isinstance(batch, torch.Tensor) else batch[0][None].expand(len(batch), *batch[0].shape)
        with self.meter.call(batch):
            return self.inferer(inputs, network, *args, **kwargs)
