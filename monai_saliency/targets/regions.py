"""Where on the network's output grid a target looks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from scipy import ndimage

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError

__all__ = ["Prediction", "components", "given_region", "label_region", "on_grid"]


class Prediction:
    """What the unperturbed output segments.

    Args:
        output: ``(1, C, *spatial)``.
        activation: under ``"sigmoid"`` channels overlap, and each has the voxels of a probability above one half;
            otherwise the highest channel has the voxel.
        case: the case.
    """

    def __init__(self, output: torch.Tensor, activation: str, case: Case) -> None:
        self.output = output
        self.overlapping = activation == "sigmoid"
        self.case = case

    @cached_property
    def _highest(self) -> torch.Tensor:
        if self.output.shape[1] == 1:
            raise CaseError(
                self.case.name,
                "with one output channel and activation='none' the predicted region is not "
                "defined; use activation='sigmoid' for a logit, or give `region` as a label tensor",
            )
        return self.output[0].argmax(dim=0)

    def region(self, channel: int) -> torch.Tensor:
        """The voxels of a channel, bool ``(*spatial)``."""
        return self.output[0, channel] > 0 if self.overlapping else self._highest == channel

    def channels(self) -> list[int]:
        """The channels that have a voxel, but the background: channel 0 where channels do not overlap."""
        if self.overlapping:
            return (self.output[0] > 0).flatten(1).any(dim=1).nonzero().flatten().tolist()
        return [channel for channel in self._highest.unique().tolist() if channel != 0]


def given_region(region: torch.Tensor, spatial: torch.Size, case: Case) -> torch.Tensor:
    """A user's label tensor as bool ``(*spatial)`` on the output's grid.

    Args:
        region: ``(*spatial)``, ``(1, *spatial)`` or, for a batch, ``(B, 1, *spatial)``, non-zero inside, on the grid of
            the output or of the image.
        spatial: the output's spatial shape.
        case: the case.
    """
    own = region
    if own.ndim == len(spatial) + 2:
        if len(own) > 1 and case.index >= len(own):
            raise CaseError(case.name, f"`region` holds {len(own)} label maps, one an image")
        own = own[case.index if len(own) > 1 else 0]
    if own.ndim == len(spatial) + 1 and len(own) == 1:
        own = own[0]
    if own.shape not in (spatial, case.image.shape[1:]):
        image = tuple(case.image.shape[1:])
        raise CaseError(
            case.name,
            f"`region` has shape {tuple(region.shape)}, the network's output has spatial shape {tuple(spatial)}"
            + (
                "; give the label on the output's grid"
                if image == spatial
                else f" and the image {image}; give the label on one of these grids"
            ),
        )
    return on_grid(own != 0, spatial, "the given region", case)


def label_region(values: Sequence[int] | None, spatial: torch.Size, case: Case) -> torch.Tensor:
    """Where the case's label map has one of the values (None: any but zero), bool ``(*spatial)``, on the output's grid.

    Raises:
        CaseError: when the case has no label map.
    """
    if case.labels is None:
        raise CaseError(
            case.name,
            "the region is taken from the label map, and the case has none; give it as `labels` to `explain`, or by "
            "the `label_key` of `Saliencyd`",
        )
    labels = torch.as_tensor(case.labels)[0]
    if labels.shape != case.image.shape[1:]:
        raise CaseError(
            case.name,
            f"the label map has spatial shape {tuple(labels.shape)}, the image {tuple(case.image.shape[1:])}; "
            "preprocess them alike",
        )
    if values is None:
        return on_grid(labels != 0, spatial, "the label", case)
    labels = labels if labels.is_floating_point() else labels.long()
    region = torch.isin(labels, torch.as_tensor(list(values), dtype=labels.dtype, device=labels.device))
    return on_grid(region, spatial, f"the label of value {', '.join(map(str, values))}", case)


def on_grid(region: torch.Tensor, spatial: torch.Size, what: str, case: Case) -> torch.Tensor:
    """A bool region resampled to another grid by the nearest voxel.

    Raises:
        CaseError: when nothing of it is left there.
    """
    if region.shape == spatial:
        return region
    resampled = (
        torch.nn.functional.interpolate(region[None, None].float(), tuple(spatial), mode="nearest-exact")[0, 0] > 0
    )
    if bool(region.any()) and not bool(resampled.any()):
        raise CaseError(
            case.name,
            f"{what} has {int(region.sum())} voxels on the image's grid {tuple(region.shape)} and vanishes on the "
            f"coarser grid {tuple(spatial)} of the network's output; give a larger region, or one on the output's grid",
        )
    return resampled


def components(region: torch.Tensor, limit: int, min_size: int) -> list[torch.Tensor]:
    """The connected components of a bool region ``(*spatial)``, the largest first, of equal ones the first in memory.

    Voxels that touch at a corner are connected.

    Args:
        region: on any device; it visits the CPU.
        limit: the most components.
        min_size: the least voxels of one.
    """
    found, _ = ndimage.label(region.numpy(force=True), structure=np.ones([3] * region.ndim))
    sizes = np.bincount(found.ravel())[1:]
    order = [i + 1 for i in np.argsort(-sizes, kind="stable") if sizes[i] >= min_size][:limit]
    labelled = torch.from_numpy(found).to(region.device)
    return [labelled == i for i in order]
