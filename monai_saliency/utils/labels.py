"""The one check of a label, in whatever way it comes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.utils.tensors import plain


def checked_label(label: Any, spatial: Sequence[int], channels: int = 1) -> torch.Tensor:
    """A label of an image as a plain tensor: whole numbers ``(1, *spatial)``, or 0 and 1 ``(channels, *spatial)``.

    Args:
        label: an array or tensor, with its channels first or ``(*spatial)``.
        spatial: the image's spatial shape.
        channels: how many channels the network's output has. A label may have as many, as one-hot labels do, each for
            its own. 1 where one label map is needed.

    Raises:
        ValueError: when it has another grid or number of channels, or other values.
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
            f"the label has {len(label)} channels, and must have {f'1 or {channels}' if channels > 1 else 1} here: if "
            "it is one-hot, background first, make one label map of it by `label.int().argmax(0, keepdim=True)` (of a "
            'batch `labels.int().argmax(1, keepdim=True)`, in a pipeline `AsDiscreted("label", argmax=True)`); else '
            "take the channel that is meant, such as `label[1:2]`"
        )
    _check_numbers(label)
    if len(label) > 1 and not bool(((label == 0) | (label == 1)).all()):
        raise ValueError(
            f"a label with {len(label)} channels must have 0 and 1 in each, and it has {listed(label)}: write "
            "`(label > 0).float()` if each channel of it is the label of one channel of the output"
        )
    return label


def _check_numbers(label: torch.Tensor) -> None:
    """Refuse values that are not whole numbers."""
    if not label.is_floating_point() or not label.numel():
        return
    limit = 2 / torch.finfo(label.dtype).eps
    wrong = label[~torch.isfinite(label)]
    if len(wrong):
        raise ValueError(
            f"the label map has values that are not whole numbers, NaN or infinity: {len(wrong)} voxels, the first is "
            f"{float(wrong[0])}. Give 0 to what has no label"
        )
    between = label[label != label.round()]
    if len(between):
        raise ValueError(
            f"the label map has values that are not whole numbers: {len(between)} voxels, the first is "
            f"{float(between[0]):.4g}. Resample it by nearest neighbour, such as "
            '`Spacingd(["image", "label"], pixdim, mode=["bilinear", "nearest"])`'
        )
    if float(label.abs().max()) > limit:
        raise ValueError(
            "the label map has values that are too large for its type: "
            f"{str(label.dtype).removeprefix('torch.')} tells whole numbers apart up to {limit:.0f}. Load it as "
            "float64 or as whole numbers"
        )


def listed(label: torch.Tensor) -> str:
    """The values of a label in words, at most the first ten."""
    values = label.long().unique().tolist()
    return ", ".join(map(str, values[:10])) + (", ..." if len(values) > 10 else "")
