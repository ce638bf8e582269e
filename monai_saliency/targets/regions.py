"""The region that a target reads, on the grid of the network's output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from scipy import ndimage

from monai_saliency.cases import Case
from monai_saliency.utils.tensors import checked_label, listed


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


def given_region(region: torch.Tensor, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor:
    """The region of a channel of an output ``(1, C, *spatial)`` in a user's label tensor, on the output's grid."""
    own, spatial, image = region, output.shape[2:], case.image.shape[1:]
    while own.ndim > len(spatial) and len(own) == 1:
        own = own[0]
    grid = own.shape[-len(spatial) :]
    if grid not in (spatial, image) or own.ndim > len(spatial) + 1:
        raise ValueError(
            f"`region` has shape {tuple(region.shape)}, the network's output has spatial shape {tuple(spatial)} "
            f"and the image {tuple(image)}; give the label on one of these grids"
        )
    label = checked_label(own, grid, output.shape[1])
    return _on_grid(label[channel if len(label) > 1 else 0] != 0, spatial)


def label_region(
    values: Sequence[int] | None, channel: int, output: torch.Tensor, activation: str, case: Case
) -> torch.Tensor:
    """The region of a channel of an output ``(1, C, *spatial)`` in the case's label map, on the output's grid: where it
    has one of some values. Where they are None, and not known from the label itself, it is refused.
    """
    if case.labels is None:
        raise ValueError(
            "the region is taken from the label map, and the case has none; give it as `labels` to `explain`, or by "
            "the `label_key` of `Saliencyd`"
        )
    count, spatial = output.shape[1], output.shape[2:]
    label = checked_label(case.labels, case.image.shape[1:], count if values is None else 1)
    if values is None and len(label) == count:
        return _on_grid(label[channel] != 0, spatial)
    label = label[0].long()
    if values is None:
        # Sigmoid channels may overlap, and the first may be background or not: no number is known to be theirs.
        numbers = 1 if activation == "sigmoid" else count
        if not bool(((label >= 0) & (label < numbers)).all()):
            own = listed(label[label != 0])
            raise ValueError(
                f"the label map has the values {listed(label)}, and it is not known which of them belong to channel "
                f"{channel} of {count}: give them, such as `label_values={f'[[{own}]]' if ',' in own else f'[{own}]'}` "
                f"for one channel, or give a label with {count} channels of 0 and 1"
            )
        values = [channel] if numbers > 1 else []
    region = torch.isin(label, torch.as_tensor(list(values), dtype=label.dtype, device=label.device))
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
