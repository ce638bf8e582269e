"""Tensors with and without meta data, on the device and in the memory of the host, and boxes in them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor

from monai_saliency.utils.monai_private import tree_map

#: a box in a volume: one slice with start and stop for each spatial axis
Box = tuple[slice, ...]


def plain(value: Any) -> Any:
    """The plain tensor of a MetaTensor, which shares its memory. Anything else is returned unchanged."""
    return value.as_tensor() if isinstance(value, MetaTensor) else value


def copied(value: Any) -> Any:
    """A copy of a tensor, plain and without a derivative. Anything else is returned unchanged."""
    return plain(value).detach().clone() if isinstance(value, torch.Tensor) else value


def shape_in_words(value: Any) -> str:
    """A tensor's shape, or the type of anything else."""
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def finite_between(fill: torch.Tensor, image: torch.Tensor) -> bool:
    """Whether each voxel of an image has a finite distance to what replaces it. Where the image or the fill is NaN or
    infinite, it has none.
    """
    return bool(torch.isfinite(image - fill).all())


def blend(
    fill: torch.Tensor, image: torch.Tensor, share: torch.Tensor, is_finite: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``share * image + (1 - share) * fill``, exact where the share is 0 or 1."""
    out = torch.lerp(fill, image, share, out=out)
    if is_finite:
        return out
    # 0 * NaN and 0 * infinity are NaN, and so is infinity - infinity, which lerp computes for a large share.
    kept = torch.where((share == 1) | (image.isinf() & (share > 0)), image, out)
    return torch.where(share == 0, fill, kept, out=out)


def checked_label(label: Any, spatial: Sequence[int], channels: int = 1) -> torch.Tensor:
    """The one check of labels: those of an image as a plain tensor, whole numbers ``(1, *spatial)``, or 0 and 1
    ``(channels, *spatial)`` where a network's output with so many channels may have one for each. ValueError for
    anything else.
    """
    label = torch.as_tensor(plain(label))
    if label.ndim == len(spatial):
        label = label[None]
    if label.shape[1:] != tuple(spatial):
        raise ValueError(
            f"the label map has shape {tuple(label.shape)}, the image needs one of {(1, *spatial)}: "
            "take it through the image's own spatial transforms, with nearest-neighbour interpolation"
        )
    if len(label) not in (1, channels):
        raise ValueError(
            f"the label has {len(label)} channels, and must have {f'1 or {channels}' if channels > 1 else 1} here: "
            "make one label map of one-hot labels, background first, by `label.int().argmax(0, keepdim=True)` (of a "
            "batch by `labels.int().argmax(1, keepdim=True)`), or take one channel, such as `label[1:2]`"
        )
    if label.is_floating_point():
        _check_whole(label)
    if len(label) > 1 and not bool(((label == 0) | (label == 1)).all()):
        raise ValueError(
            f"a label with {len(label)} channels must have 0 and 1 in each, and it has {listed(label)}: write "
            "`(label > 0).float()` if each channel of it is the label of one channel of the output"
        )
    return label


def _check_whole(label: torch.Tensor) -> None:
    """Refuse values that are not whole numbers, or that their type does not tell apart."""
    wrong = label[~torch.isfinite(label) | (label != label.round())]
    if len(wrong):
        raise ValueError(
            f"the label map has values that are not whole numbers, NaN or infinity: {len(wrong)} voxels, the first is "
            f"{float(wrong[0])}. Give 0 to what has no label, and resample labels by nearest neighbour, such as by "
            '`Spacingd(["image", "label"], pixdim, mode=["bilinear", "nearest"])`'
        )
    limit = 2 / torch.finfo(label.dtype).eps
    if bool((label.abs() > limit).any()):
        raise ValueError(
            "the label map has values that are too large for its type: "
            f"{str(label.dtype).removeprefix('torch.')} tells whole numbers apart up to {limit:.0f}. Load it as "
            "float64 or as whole numbers"
        )


def listed(label: torch.Tensor) -> str:
    """The values of a label in words, at most the first ten."""
    values = label.long().unique().tolist()
    return ", ".join(map(str, values[:10])) + (", ..." if len(values) > 10 else "")


def with_meta_of(image: torch.Tensor, values: torch.Tensor) -> MetaTensor:
    """A MetaTensor of other values with a copy of an image's meta data."""
    made = MetaTensor(plain(values)).copy_meta_from(image)
    # MONAI copies only the outermost level: both tensors would share one affine. deepcopy takes a header's many small
    # tensors apart.
    made.__dict__ = tree_map(lambda part: part.clone() if torch.is_tensor(part) else deepcopy(part), made.__dict__)
    return made


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation ``(n,)`` of rows ``(n, N)``, in [-1, 1]; NaN where all values of a row are equal."""
    ours = first - first.mean(1, keepdim=True)
    theirs = second - second.mean(1, keepdim=True)
    size = ((ours**2).sum(1) * (theirs**2).sum(1)).sqrt()
    both_vary = _vary(first) & _vary(second)
    return torch.where(both_vary, (ours * theirs).sum(1) / size, torch.nan)


def _vary(rows: torch.Tensor) -> torch.Tensor:
    """Whether a row ``(n, N)`` has different values, bool ``(n,)``."""
    return (rows != rows[:, :1]).any(1)


def to_device(values: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A small array on a device, copied without waiting for the work that the device still has to do."""
    host = torch.from_numpy(values).to(dtype)
    if device.type == "cuda":  # only pinned memory is copied while the host goes on
        host = host.pin_memory()
    return host.to(device, non_blocking=device.type != "mps")


def columns(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """A copy of some columns of ``(B, n)``. As an index, a list would be copied to the device, which waits for it."""
    return torch.stack([values[:, place] for place in places], dim=1)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of the host."""
    # Only CUDA defines when a copy that does not wait can be read.
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)


def keep_freed_memory(device: torch.device | str = "cpu") -> bool:
    """Let this program keep the memory that it frees, for what it takes next.

    glibc gives a large block, such as the output of a convolution over a volume, back to the system as soon as it is
    freed, and takes a new one for the next. The system fills each new one with zeros, page by page, when it is written
    first. A network that runs thousands of times can spend a third of its time so. Results are the same to the bit.
    What is kept grows by the holes between blocks.

    It holds for the whole program and cannot be undone.

    Example::

        >>> keep_freed_memory("cuda")
        False

    Args:
        device: where the network runs. On another one than the CPU nothing is done: its memory is torch's.

    Returns:
        whether it is so now: only with glibc, the C library of most Linux systems.

    Source: mallopt(3) of the Linux manual pages, M_MMAP_MAX and M_TRIM_THRESHOLD, and glibc's <malloc.h>.
    """
    if torch.device(device).type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(-4, 0) and library.mallopt(-1, -1))  # M_MMAP_MAX, M_TRIM_THRESHOLD


def tight(inside: np.ndarray, frame: Box) -> Box | None:
    """The smallest box around what is inside, bool of the shape of a larger box, in the coordinates of that box; None
    where nothing is inside.
    """
    places = inside.nonzero()
    if not len(places[0]):
        return None
    starts = [side.start + int(along.min()) for side, along in zip(frame, places, strict=True)]
    stops = [side.start + int(along.max()) + 1 for side, along in zip(frame, places, strict=True)]
    return tuple(map(slice, starts, stops))


def within(box: Box, frame: Box) -> Box:
    """A box in the coordinates of a larger box around it."""
    return tuple(
        slice(side.start - outer.start, side.stop - outer.start) for side, outer in zip(box, frame, strict=True)
    )


def everywhere(box: Box) -> Box:
    """A box in all channels."""
    return (slice(None), *box)
