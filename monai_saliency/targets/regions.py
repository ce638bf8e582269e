"""The region that a target reads, on the grid of the network's output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from scipy import ndimage

from monai_saliency.cases import Case
from monai_saliency.utils.tensors import check_labels


class Labels:
    """Labels of one image: bool ``(C, *spatial)``, which may overlap, or the channel of each voxel ``(*spatial)``; a
    number that is not a channel means no label. Channel 0 may be background.
    """

    def __init__(self, values: torch.Tensor, background: bool) -> None:
        self.values = values
        self.overlapping = values.dtype == torch.bool
        self.background = background

    def region(self, channel: int) -> torch.Tensor:
        """The voxels of a channel, bool ``(*spatial)``."""
        return self.values[channel] if self.overlapping else self.values == channel

    def channels(self, count: int) -> list[int]:
        """The channels with a voxel, the largest first, without the background."""
        if self.overlapping:
            sizes = self.values.flatten(1).sum(dim=1)
        else:
            sizes = torch.bincount(self.values.flatten(), minlength=count)[:count]
        first = 1 if self.background else 0
        largest_first = sizes.argsort(descending=True, stable=True).tolist()
        return [channel for channel in largest_first if channel >= first and sizes[channel] > 0]


def predicted_labels(output: torch.Tensor, activation: str) -> Labels:
    """The segmentation of an output ``(1, C, *spatial)``: with ``"sigmoid"`` channels may overlap."""
    if activation == "sigmoid":
        return Labels(output[0] > 0, background=False)
    if output.shape[1] == 1:
        raise ValueError(
            "with one output channel and activation='none' the predicted region is not defined; use "
            "activation='sigmoid' for a logit, or give `region` as a label tensor"
        )
    return Labels(output[0].argmax(dim=0), background=True)


def check_region(region: Any, words: Collection[str]) -> None:
    """Refuse a region that is neither one of the words nor a label tensor."""
    if isinstance(region, (torch.Tensor, Labels)) or (isinstance(region, str) and region in words):
        return
    got = f"a {type(region).__name__}: write torch.as_tensor(...)"
    if isinstance(region, str):
        got = repr(region)
    raise ValueError(f"`region` must be {', '.join(map(repr, words))} or a label tensor, got {got}")


def given_region(region: torch.Tensor, spatial: torch.Size, case: Case) -> torch.Tensor:
    """A user's label tensor as a region on the output's grid."""
    own, image = region, case.image.shape[1:]
    while own.ndim > len(spatial) and len(own) == 1:
        own = own[0]
    if own.shape not in (spatial, image):
        raise ValueError(
            f"`region` has shape {tuple(region.shape)}, the network's output has spatial shape {tuple(spatial)} "
            f"and the image {tuple(image)}; give the label on one of these grids"
        )
    return _on_grid(own != 0, spatial)


def label_region(values: Sequence[int] | None, spatial: torch.Size, case: Case) -> torch.Tensor:
    """The region where the case's label map has one of some values, on the output's grid."""
    if case.labels is None:
        raise ValueError(
            "the region is taken from the label map, and the case has none; give it as `labels` to `explain`, or by "
            "the `label_key` of `Saliencyd`"
        )
    labels = torch.as_tensor(case.labels)[0]
    if labels.shape != case.image.shape[1:]:
        raise ValueError(
            f"the label map has spatial shape {tuple(labels.shape)}, the image {tuple(case.image.shape[1:])}; "
            "give both the same spatial transforms"
        )
    check_labels(labels)
    if values is None:
        return _on_grid(labels != 0, spatial)
    labels = labels if labels.is_floating_point() else labels.long()
    region = torch.isin(labels, torch.as_tensor(list(values), dtype=labels.dtype, device=labels.device))
    return _on_grid(region, spatial)


def _on_grid(region: torch.Tensor, spatial: torch.Size) -> torch.Tensor:
    """Resample a region to another grid, to the nearest voxel."""
    if region.shape == spatial:
        return region
    batch = region[None, None].float()
    return torch.nn.functional.interpolate(batch, tuple(spatial), mode="nearest-exact")[0, 0] > 0


def components(region: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """The connected components of a region, the largest first. Voxels that touch at a corner are connected."""
    touching = np.ones((3,) * region.ndim)
    labels, _ = ndimage.label(region.numpy(force=True), structure=touching)
    sizes = np.bincount(labels.ravel())[1:]
    largest_first = np.argsort(-sizes, kind="stable") + 1
    labelled = torch.from_numpy(labels).to(region.device)
    return [labelled == label for label in largest_first[:limit].tolist()]
