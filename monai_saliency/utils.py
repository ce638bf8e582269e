"""Small things that several modules need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from threading import Condition
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from monai.data import MetaTensor
from monai.utils import OptionalImportError

__all__ = [
    "Box",
    "accumulation_dtype",
    "exact_arithmetic",
    "network_arithmetic",
    "per_axis",
    "plain",
    "positive_numbers",
    "rank_of",
    "require",
    "to_host",
    "voxels_of_mm",
    "whole_numbers",
    "with_meta_of",
    "within",
]

#: part of a volume: one slice with start and stop for each spatial axis
Box = tuple[slice, ...]


def within(box: Box, frame: Box) -> Box:
    """A box as it lies in a frame around it: its voxels counted from the frame's first."""
    return tuple(
        slice(side.start - outer.start, side.stop - outer.start) for side, outer in zip(box, frame, strict=True)
    )


def whole_numbers(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number, or several, of at least ``least``.

    Raises:
        ValueError: naming the parameter.
    """
    numbers = np.atleast_1d(np.asarray(value))
    if not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}")


def positive_numbers(name: str, value: Any) -> None:
    """Refuse what is not a finite number above 0, or several.

    Raises:
        ValueError: naming the parameter.
    """
    numbers = np.atleast_1d(np.asarray(value))
    if numbers.dtype.kind not in "iuf" or not bool((np.isfinite(numbers) & (numbers > 0)).all()):
        raise ValueError(f"`{name}` must be a number above 0, got {value!r}")


def per_axis(name: str, value: Any, spatial_shape: Sequence[int]) -> tuple[Any, ...]:
    """A size given as one number or one per axis, as one per axis of ``spatial_shape``.

    Raises:
        ValueError: when the number of sizes is not the number of axes.
    """
    sizes = np.atleast_1d(np.asarray(value)).tolist()
    if len(sizes) == 1:
        sizes = sizes * len(spatial_shape)
    if len(sizes) != len(spatial_shape):
        raise ValueError(
            f"`{name}` must be one number or one per spatial axis, got {value} for an image of spatial shape "
            f"{tuple(spatial_shape)}"
        )
    return tuple(sizes)


def voxels_of_mm(sizes: Sequence[float], spacing: Sequence[float] | None) -> tuple[int, ...]:
    """Sizes in mm as the nearest whole numbers of voxels, one per axis: half a voxel rounds up, and none below one.

    Args:
        sizes: in mm, one per axis.
        spacing: voxel sizes in mm, one per axis.

    Raises:
        ValueError: when the voxel sizes are not known.
    """
    if spacing is None:
        raise ValueError(
            "sizes in mm need the image's voxel sizes, which are unknown: give a MetaTensor with its affine (as "
            "LoadImaged does) or `spacings`, or give the sizes in voxels"
        )
    # Voxel sizes are rounded in files, and worked out of oblique affines.
    return tuple(max(1, int(round(size / edge, 4) + 0.5)) for size, edge in zip(sizes, spacing, strict=True))


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Full precision for our own products, whatever the user allows for the network (autocast, TF32)."""
    with torch.autocast(device.type, enabled=False), _no_tf32 if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def network_arithmetic(device: torch.device) -> Iterator[None]:
    """What the user allows for the network, where several threads explain at once: none of them has TF32 switched off
    for its own products meanwhile. Not to be entered where :func:`exact_arithmetic` is, nor the other way round.
    """
    with _no_tf32.kept_out() if device.type == "cuda" else nullcontext():
        yield


class _NoTF32:
    """Switches TF32 off for the whole process, whose setting it is, while any thread is inside."""

    def __init__(self) -> None:
        self._lock = Condition()
        self._inside = 0
        self._kept_out = 0
        self._before: list[Any] = []

    @contextmanager
    def kept_out(self) -> Iterator[None]:
        """While any thread is in this, none is inside."""
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
        if hasattr(matmul, "fp32_precision"):  # the older switches must not be mixed with these
            return [(matmul, "fp32_precision", "ieee"), (cudnn.conv, "fp32_precision", "ieee")]
        return [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]


_no_tf32 = _NoTF32()


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The type long sums are kept in: float64, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def plain(value: Any) -> Any:
    """The plain tensor of a MetaTensor, on the same memory; anything else as it is."""
    return value.as_tensor() if isinstance(value, MetaTensor) else value


def with_meta_of(image: torch.Tensor, values: torch.Tensor) -> MetaTensor:
    """A MetaTensor of other values with meta data like an image's, where that has any, but of its own."""
    taken = MetaTensor(plain(values)).copy_meta_from(image)
    # MONAI copies the outermost level alone, so that an edit of one affine would move the other.
    taken.__dict__ = deepcopy(taken.__dict__)
    return taken


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the host's memory. From CUDA it is on its way: wait for a moment noted after this call, as
    :class:`monai_saliency.timing.Moment` does, before reading it.
    """
    # Other devices promise nothing of a copy that does not wait.
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)


def require(module: str, extra: str) -> ModuleType:
    """Import a module of one of our extras.

    Args:
        module: its dotted name.
        extra: the extra of ``pyproject.toml`` that installs it.

    Raises:
        OptionalImportError: with the pip command, when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise OptionalImportError(f'{name} is not installed: pip install "monai-saliency[{extra}]"') from error


def rank_of(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank and the number of ranks: 0 and 1 without a process group.

    Args:
        group: the default group where None.

    Raises:
        ValueError: when this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in `group`: call this on the group's own ranks only")
    return rank, dist.get_world_size(group)
