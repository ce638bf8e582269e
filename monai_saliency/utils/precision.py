"""Full precision for the arithmetic of this package, whatever the user allows for the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Condition
from typing import Any

import torch

__all__ = ["accumulation_dtype", "exact_arithmetic", "network_arithmetic"]


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch autocast and TF32 off for the arithmetic inside. Never nest this with :func:`network_arithmetic`.

    Args:
        device: the device of the tensors.
    """
    with torch.autocast(device.type, enabled=False), _no_tf32 if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def network_arithmetic(device: torch.device) -> Iterator[None]:
    """Keep the user's TF32 setting during a forward.

    Waits while another thread is inside :func:`exact_arithmetic`. Never nest the two.

    Args:
        device: the device of the network.
    """
    with _no_tf32.kept_out() if device.type == "cuda" else nullcontext():
        yield


class _NoTF32:
    """Switches TF32 off while any thread is inside. The setting belongs to the whole process, not to a thread."""

    def __init__(self) -> None:
        self._lock = Condition()
        self._inside = 0
        self._kept_out = 0
        self._before: list[Any] = []

    @contextmanager
    def kept_out(self) -> Iterator[None]:
        """Keep all threads from being inside."""
        with self._lock:
            self._lock.wait_for(lambda: not self._inside)
            self._kept_out += 1
        try:
            yield
        finally:
            with self._lock:
                self._kept_out -= 1
                self._lock.notify_all()

    def __enter__(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._kept_out)
            if not self._inside:
                self._before = [getattr(owner, name) for owner, name, _ in self._switches()]
                for owner, name, off in self._switches():
                    setattr(owner, name, off)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for (owner, name, _), before in zip(self._switches(), self._before, strict=True):
                    setattr(owner, name, before)
                self._lock.notify_all()

    @staticmethod
    def _switches() -> list[tuple[Any, str, Any]]:
        matmul: Any = torch.backends.cuda.matmul
        cudnn: Any = torch.backends.cudnn
        if hasattr(matmul, "fp32_precision"):  # torch refuses a mixture of these switches and the older ones
            return [(matmul, "fp32_precision", "ieee"), (cudnn.conv, "fp32_precision", "ieee")]
        return [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]


_no_tf32 = _NoTF32()


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The data type of long sums: float64, or float32 on Apple's GPUs, which have no float64.

    Args:
        device: the device of the sums.
    """
    return torch.float32 if device.type == "mps" else torch.float64
