"""Full precision for the arithmetic of this package, whatever the user allows for the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch

# How far two runs of a network on the same image may differ in other batches, relative to the largest value of the
# output. Libraries choose their kernels by the batch size, and each kernel sums in its own order: a deep network in
# float32 differs by 1e-6 to 1e-5 then. Each bound leaves a factor of ten for networks that amplify it. Rows that depend
# on each other differ by far more: a softmax over a batch of two by a half.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_COARSEST = 1e-1  # any narrower type
# Settings of float32 on CUDA without TF32.
_EXACT = ("ieee", "none")


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch autocast, and TF32 in matrix products, off for the arithmetic inside, which has no convolutions."""
    is_cast = torch.amp.is_autocast_available(device.type)
    with (
        torch.autocast(device.type, enabled=False) if is_cast else nullcontext(),
        _no_tf32 if device.type == "cuda" else nullcontext(),
    ):
        yield


def chosen_arithmetic() -> list[str]:
    """The user's choices that change a network's rounding: autocast in this thread, and TF32."""
    choices = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            choices.append(f"{device} {torch.get_autocast_dtype(device)}")
    return choices + _no_tf32.chosen()


def is_shared(device: torch.device) -> bool:
    """Whether :func:`exact_arithmetic` changes what a network computes in another thread meanwhile."""
    return device.type == "cuda" and _no_tf32.chosen()[0] not in _EXACT


class _NoTF32:
    """Switches TF32 off while any thread is inside. The setting belongs to the whole process, not to a thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._before = ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.matmul.fp32_precision
                torch.backends.cuda.matmul.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.matmul.fp32_precision = self._before

    def chosen(self) -> list[str]:
        """The user's precision of matrix products and of convolutions in float32, also while a thread is inside."""
        cudnn: Any = torch.backends.cudnn
        with self._lock:
            products = self._before if self._inside else torch.backends.cuda.matmul.fp32_precision
        return [products, cudnn.conv.fp32_precision]


_no_tf32 = _NoTF32()


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The data type of long sums: float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def rounding_of(
    network: Any, device: torch.device, autocast: torch.dtype | None = None, image: torch.dtype | None = None
) -> Callable[[torch.dtype], float]:
    """How far two runs of a network on the same image may differ by rounding alone, by the type of its output."""
    inside = _types_in(network, autocast, image)
    has_tf32 = device.type == "cuda" and any(setting not in _EXACT for setting in _no_tf32.chosen())

    def rounding(output: torch.dtype) -> float:
        coarsest = max(_ROUNDING.get(dtype, _COARSEST) for dtype in (output, *inside))
        if has_tf32 and coarsest >= _ROUNDING[torch.float32]:
            return max(coarsest, _ROUNDING[torch.float16])  # TF32 has the mantissa of float16
        return coarsest

    return rounding


def score_precision(network: Any, *dtypes: torch.dtype | None) -> float:
    """How far rounding may put a score off, relative to the largest score, given the network's precision."""
    precision = 0.0
    for dtype in _types_in(network, *dtypes):
        roundings = 0.5 if dtype in (torch.float16, torch.bfloat16) else 8
        precision = max(precision, roundings * torch.finfo(dtype).eps)
    return precision


def _types_in(network: Any, *dtypes: torch.dtype | None) -> set[torch.dtype]:
    """The floating-point types of a module's parameters, the one it is cast to, and others."""
    known = {*dtypes, getattr(network, "computes_in", None)}
    if isinstance(network, torch.nn.Module):
        known |= {parameter.dtype for parameter in network.parameters()}
    return {dtype for dtype in known if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
