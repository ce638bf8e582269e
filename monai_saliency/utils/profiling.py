"""Where a run's time goes: a trace of torch.profiler, with the stages of explaining named in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import (
    ProfilerActivity,
    _ExperimentalConfig,
    profile,
    record_function,
    schedule,
    tensorboard_trace_handler,
)

__all__ = ["stage", "trace"]

_WARM_UP, _ACTIVE, _LONGEST = 3, 10, 100  # forwards


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Name what runs inside, in a trace."""
    if _current is not None:
        _current.entered(name)
    with record_function(f"saliency: {name}"):
        yield
    if _current is not None:
        _current.left(name)


@contextmanager
def trace(folder: str | Path) -> Iterator[None]:
    """Trace excerpts of what runs inside, in all threads, for TensorBoard's profiler or Perfetto.

    So that it stays small, whatever a case's number of masks, it is of two excerpts, a file each: of 10 network batches
    near the start, and from the end of a case until its map is saved and 10 more batches are done. A short run has one
    file, with all of this.

    Args:
        folder: where the files go.
    """
    global _current
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    # Loading and saving have threads of their own.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=2),
        on_trace_ready=tensorboard_trace_handler(str(folder), use_gzip=True),
        experimental_config=everywhere,
    ) as profiler:
        _current = _Excerpts(profiler)
        try:
            yield
        finally:
            _current = None


class _Excerpts:
    """Takes the profiler from warming up to recording and back, twice, as stages begin."""

    def __init__(self, profiler: profile) -> None:
        self.profiler = profiler
        self.finished = 0
        self.recording = self.saved = False
        self.forwards = 0

    def entered(self, name: str) -> None:
        if self.finished == 2 or name not in {"forward", "map"}:
            return
        # Every other name may come from another thread than the profiler's.
        if self._ends(name) if self.recording else self._begins(name):
            self.profiler.step()
            self.finished += self.recording
            self.recording, self.saved, self.forwards = not self.recording, False, 0
        self.forwards += name == "forward"

    def left(self, name: str) -> None:
        self.saved |= name == "save"

    def _begins(self, name: str) -> bool:
        return name == "map" or (self.finished == 0 and self.forwards >= _WARM_UP)

    def _ends(self, name: str) -> bool:
        enough = self.forwards >= _ACTIVE and (self.saved or self.finished == 0)
        return name == "forward" and (enough or self.forwards >= _LONGEST)


_current: _Excerpts | None = None
