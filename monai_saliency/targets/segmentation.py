"""Segmentations: how sure the network is of a region, and how much of its segmentation is left."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.targets.base import (
    ACTIVATIONS,
    BoundTarget,
    Target,
    check_activation,
    check_indices,
    check_volume,
    to_float,
)
from monai_saliency.targets.regions import Prediction, components, given_region, label_region
from monai_saliency.utils.arguments import check_option, whole_numbers
from monai_saliency.utils.boxes import Box, within

__all__ = ["DiceScore", "RegionScore"]


class _Part(NamedTuple):
    """One explained value: what it is called, its channel, and its voxels on the flattened grid, None for all."""

    label: int | str
    channel: int
    voxels: torch.Tensor | None


def _voxels(region: torch.Tensor) -> torch.Tensor:
    return region.flatten().nonzero().flatten()


class _SegmentationTarget(Target):
    """A target that compares channels with regions, which are frozen on the unperturbed output."""

    regions: tuple[str, ...]

    def __init__(
        self,
        channel: int | Sequence[int] | str,
        activation: str,
        region: str | torch.Tensor,
        label_values: Sequence[int | Sequence[int]] | None,
    ) -> None:
        activation = check_option("activation", activation, list(ACTIVATIONS))
        if isinstance(region, str) and region not in self.regions:
            raise ValueError(f"`region` must be {', '.join(map(repr, self.regions))} or a label tensor, got {region!r}")
        if isinstance(channel, str) and channel != "predicted":
            raise ValueError(f"`channel` must be an index, several, or 'predicted', got {channel!r}")
        self.channels = channel if isinstance(channel, str) else [int(c) for c in np.atleast_1d(channel)]
        self.activation = activation
        self.region = region
        self.label_values = None
        if label_values is not None:
            if isinstance(self.channels, str) or len(label_values) != len(self.channels):
                raise ValueError(f"`label_values` must have one entry for each channel, got {label_values!r}")
            self.label_values = {
                c: np.atleast_1d(values).tolist() for c, values in zip(self.channels, label_values, strict=True)
            }

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_volume(reference_output, case, type(self).__name__)
        check_activation(output, self.activation, case)
        prediction = Prediction(output, self.activation, case)
        parts: list[_Part] = []
        for channel in self._channels(output, prediction, case):
            region, what = self._region(channel, output, prediction, case)
            if region is None:
                parts.append(_Part(channel, channel, None))
                continue
            if not bool(region.any()):
                raise CaseError(
                    case.name,
                    f"{what} of channel {channel} is empty, so there is no score to explain; "
                    "choose another `channel`, give `region` as a label tensor"
                    + (", or use region='all'" if "all" in self.regions else ""),
                )
            parts += self._parts(channel, region)
        return self._bound(parts, output, case)

    def _parts(self, channel: int, region: torch.Tensor) -> list[_Part]:
        """What is explained of a channel's region, bool ``(*spatial)``."""
        return [_Part(channel, channel, _voxels(region))]

    @abstractmethod
    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, case: Case) -> BoundTarget:
        """The bound target of what is explained."""

    def _channels(self, output: torch.Tensor, prediction: Prediction, case: Case) -> Sequence[int]:
        if not isinstance(self.channels, str):
            check_indices(self.channels, output.shape[1], "channel", "channel", case)
            return self.channels
        found = prediction.channels()
        if not found:
            raise CaseError(
                case.name,
                f"the network segments nothing: the predicted region of each of its {output.shape[1]} channels (but "
                "the background) is empty; name a `channel` and give `region` as a label tensor",
            )
        return found

    def _region(
        self, channel: int, output: torch.Tensor, prediction: Prediction, case: Case
    ) -> tuple[torch.Tensor | None, str]:
        """The region, bool ``(*spatial)`` on the output's device, or None for everywhere, and what it is called."""
        if isinstance(self.region, torch.Tensor):
            return given_region(self.region, output.shape[2:], case).to(output.device), "the given region"
        if self.region == "all":
            return None, "the image"
        if self.region == "label":
            return self._label(channel, output, case), "the label's region"
        predicted = prediction.region(channel)
        if self.region == "false_positive":
            return predicted & ~self._label(channel, output, case), "the region that is predicted but not in the label"
        above = " (probability above one half)" if self.activation == "sigmoid" else ""
        return predicted, f"the predicted region{above}"

    def _label(self, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor:
        if self.label_values is not None:
            values = self.label_values[channel]
        else:
            values = [channel] if output.shape[1] > 1 else None
        return label_region(values, output.shape[2:], case).to(output.device)


class RegionScore(_SegmentationTarget):
    """The mean probability of segmentation channels inside a fixed region: the output is ``(B, C, *spatial)``.

    The region is frozen on the unperturbed output, so that a perturbation which moves the segmentation lowers the
    score instead of moving the question. With ``"false_positive"`` the map shows what makes the network see a channel
    where the label has none.

    Args:
        channel: the output channel explained, or several, each with a map of its own; ``"predicted"`` is all channels
            that the unperturbed output gives a voxel to, but the background (channel 0, unless under ``"sigmoid"``).
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``, as in :class:`ClassScore`.
        region: ``"predicted"`` (the voxels that the unperturbed output gives to the channel: the highest channel, or
            a probability above one half under ``"sigmoid"``), ``"label"`` (the channel's voxels in the case's label
            map), ``"false_positive"`` (predicted, but not in the label), ``"all"``, or a label tensor ``(*spatial)``,
            ``(1, *spatial)`` or, for a batch, ``(B, 1, *spatial)``, non-zero inside. Label maps and tensors on the
            image's grid are resampled to the output's by the nearest voxel, where that is coarser.
        label_values: which values of the case's label map belong to each channel, one or several a channel; by default
            the channel's own index, or any but zero for a network with one channel.
        components: explains each connected component of the region on its own, the largest first: at the most how
            many. None explains the region as a whole.
        min_size: components with fewer voxels on the output's grid are left out.
    """

    regions = ("predicted", "label", "false_positive", "all")

    def __init__(
        self,
        channel: int | Sequence[int] | str,
        activation: str,
        region: str | torch.Tensor = "predicted",
        *,
        label_values: Sequence[int | Sequence[int]] | None = None,
        components: int | None = None,
        min_size: int = 1,
    ) -> None:
        super().__init__(channel, activation, region, label_values)
        whole_numbers("min_size", min_size, 1)
        if components is not None:
            whole_numbers("components", components, 1)
            if isinstance(region, str) and region == "all":
                raise ValueError("`components` are those of a region, so `region` must not be 'all'")
        self.components = components
        self.min_size = min_size

    def _parts(self, channel: int, region: torch.Tensor) -> list[_Part]:
        if self.components is None:
            return super()._parts(channel, region)
        found = components(region, self.components, self.min_size)
        return [_Part(f"component {i} of class {channel}", channel, _voxels(part)) for i, part in enumerate(found, 1)]

    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, case: Case) -> BoundTarget:
        if not parts:
            raise CaseError(
                case.name, f"no component has {self.min_size} voxels, so there is no score to explain; lower `min_size`"
            )
        return _BoundRegionScore(parts, self.activation, output)


class _BoundRegionScore(BoundTarget):
    additive = True

    def __init__(self, parts: Sequence[_Part], activation: str, reference: torch.Tensor) -> None:
        self.labels = [part.label for part in parts]
        self.channels = [part.channel for part in parts]
        self.voxels = [part.voxels for part in parts]
        self.activation = activation
        # A softmax reads all channels, other activations each its own.
        self.channels_read = None if activation == "softmax" else sorted(set(self.channels))
        self.shape = reference.shape[2:]
        self.reference = self(reference)[0]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        flat = to_float(output).flatten(2)
        scores = []
        for channel, voxels in zip(self.channels, self.voxels, strict=True):
            # Only the region's voxels are activated: a softmax of the whole volume would cost a copy of it.
            inside = flat if voxels is None else flat[:, :, voxels]
            scores.append(ACTIVATIONS[self.activation](inside)[:, channel].mean(dim=1))
        return torch.stack(scores, dim=1)

    def reach(self) -> torch.Tensor | None:
        reach = torch.zeros(self.shape, dtype=torch.bool, device=self.reference.device)
        for voxels in self.voxels:
            if voxels is None:
                return None
            reach.view(-1)[voxels] = True
        return reach

    @functools.cached_property
    def _inside(self) -> list[tuple[Box, torch.Tensor | None]]:
        """For each score the box around its region and the region within it, None for everywhere."""
        found: list[tuple[Box, torch.Tensor | None]] = []
        for voxels in self.voxels:
            if voxels is None:
                found.append((tuple(slice(0, size) for size in self.shape), None))
                continue
            places = torch.unravel_index(voxels, self.shape)
            box = tuple(slice(int(along.min()), int(along.max()) + 1) for along in places)
            region = torch.zeros([side.stop - side.start for side in box], dtype=torch.bool, device=voxels.device)
            region[tuple(along - side.start for along, side in zip(places, box, strict=True))] = True
            found.append((box, region))
        return found

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        values = to_float(output)
        scores = []
        for channel, voxels, (frame, region) in zip(self.channels, self.voxels, self._inside, strict=True):
            common = tuple(
                slice(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
                for a, b in zip(box, frame, strict=True)
            )
            here = (slice(None), slice(None), *within(common, box))
            place = channel if self.channels_read is None else self.channels_read.index(channel)
            inside = ACTIVATIONS[self.activation](values[here])[:, place]
            if region is not None:
                inside = torch.where(region[within(common, frame)], inside, 0)
            count = self.shape.numel() if voxels is None else len(voxels)
            scores.append(inside.flatten(1).sum(dim=1) / count)
        return torch.stack(scores, dim=1)


class DiceScore(_SegmentationTarget):
    """How much of a segmentation is left: the soft Dice score with what the unperturbed image gives.

    With p the perturbed probabilities of a channel and r its region, 1 inside and 0 outside:
    ``(2 * sum(p * r) + smooth) / (sum(p) + sum(r) + smooth)``, in [0, 1]. Unlike :class:`RegionScore` it also falls
    where a perturbation adds voxels outside of the region.

    Args:
        channel: see :class:`RegionScore`.
        activation: see :class:`RegionScore`.
        region: see :class:`RegionScore`; ``"label"`` gives the Dice score with the label instead.
        label_values: see :class:`RegionScore`.
        smooth: keeps the score of small regions from jumping; that of ``monai.losses.DiceLoss`` by default.
    """

    regions = ("predicted", "label")

    def __init__(
        self,
        channel: int | Sequence[int] | str,
        activation: str,
        region: str | torch.Tensor = "predicted",
        *,
        label_values: Sequence[int | Sequence[int]] | None = None,
        smooth: float = 1e-5,
    ) -> None:
        super().__init__(channel, activation, region, label_values)
        if smooth < 0:
            raise ValueError(f"`smooth` must be at least 0, got {smooth}")
        self.smooth = float(smooth)

    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, case: Case) -> BoundTarget:
        return _BoundDiceScore(parts, self.activation, self.smooth, output)


class _BoundDiceScore(BoundTarget):
    labels: list[int]

    def __init__(self, parts: Sequence[_Part], activation: str, smooth: float, reference: torch.Tensor) -> None:
        self.labels = [part.channel for part in parts]
        self.voxels = [part.voxels for part in parts if part.voxels is not None]
        self.activation = activation
        self.smooth = smooth
        self.reference = self(reference)[0]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        probabilities = ACTIVATIONS[self.activation](to_float(output)).flatten(2)
        scores = []
        for channel, voxels in zip(self.labels, self.voxels, strict=True):
            inside = probabilities[:, channel, voxels].sum(dim=1)
            total = probabilities[:, channel].sum(dim=1) + len(voxels)
            scores.append((2 * inside + self.smooth) / (total + self.smooth))
        return torch.stack(scores, dim=1)
