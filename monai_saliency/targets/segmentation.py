"""Segmentations: the mean probability in a region, and the Dice score with it."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.targets.base import (
    ACTIVATIONS,
    BoundTarget,
    Quantity,
    Target,
    check_activation,
    check_indices,
    check_volume,
    quantity_after,
    to_float,
)
from monai_saliency.targets.regions import (
    Labels,
    check_region,
    components,
    given_region,
    label_region,
    predicted_labels,
)
from monai_saliency.utils.arguments import check_option, indices, number, whole_number
from monai_saliency.utils.boxes import Box, everywhere

__all__ = ["DiceScore", "PredictedRegionScore", "RegionScore"]


class _Part(NamedTuple):
    """One explained value: its label, its channel, and its voxels' indices in the flattened grid (None for all)."""

    label: int | str
    channel: int
    voxels: torch.Tensor | None


_WHERE = {
    "predicted": "the predicted region",
    "label": "the label's region",
    "false_positive": "the region predicted outside the label",
    "all": "the image",
    "given": "the given region",
}


def _voxels(region: torch.Tensor) -> torch.Tensor:
    return region.flatten().nonzero().flatten()


class _SegmentationTarget(Target):
    """A target that compares channels with regions. The regions are frozen on the unperturbed output."""

    regions: tuple[str, ...]

    def __init__(
        self,
        channel: int | Sequence[int] | str,
        activation: str,
        region: str | torch.Tensor,
        label_values: Sequence[int | Sequence[int]] | None,
    ) -> None:
        activation = check_option("activation", activation, list(ACTIVATIONS))
        check_region(region, self.regions)
        if isinstance(channel, str) and channel != "predicted":
            raise ValueError(f"`channel` must be an index, several, or 'predicted', got {channel!r}")
        self.channels = channel if isinstance(channel, str) else indices("channel", channel, "'predicted'")
        self.activation = activation
        self.region = region
        self.label_values = None
        if label_values is not None:
            several = isinstance(label_values, Sequence) and not isinstance(label_values, str)
            if not several or isinstance(self.channels, str) or len(label_values) != len(self.channels):
                raise ValueError(f"`label_values` must have one entry for each channel, got {label_values!r}")
            self.label_values = {
                c: indices("label_values", values) for c, values in zip(self.channels, label_values, strict=True)
            }

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_volume(reference_output, case, type(self).__name__)
        check_activation(output, self.activation, case)
        where = _WHERE[self.region if isinstance(self.region, str) else "given"]
        parts: list[_Part] = []
        for channel in self._channels(output, case):
            region = self._region(channel, output, case)
            if region is None:
                parts.append(_Part(channel, channel, None))
                continue
            if not bool(region.any()):
                raise CaseError(
                    case.name,
                    f"{where} of channel {channel} is empty, so there is no score to explain; "
                    "choose another `channel`, give `region` as a label tensor"
                    + (", or use region='all'" if "all" in self.regions else ""),
                )
            parts += self._parts(channel, region)
        return self._bound(parts, output, case, where)

    def _parts(self, channel: int, region: torch.Tensor) -> list[_Part]:
        """The values that are explained for a channel and its region, bool ``(*spatial)``."""
        return [_Part(channel, channel, _voxels(region))]

    @abstractmethod
    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, case: Case, where: str) -> BoundTarget:
        """The bound target of the explained values, with the words for their regions."""

    def _channels(self, output: torch.Tensor, case: Case) -> Sequence[int]:
        if not isinstance(self.channels, str):
            check_indices(self.channels, output.shape[1], "channel", "channel", case)
            return self.channels
        found = sorted(predicted_labels(output, self.activation, case).channels(output.shape[1]))
        if not found:
            raise CaseError(
                case.name,
                f"the network segments nothing: the predicted region of each of its {output.shape[1]} channels (but "
                "the background) is empty; name a `channel` and give `region` as a label tensor",
            )
        return found

    def _region(self, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor | None:
        """The region of a channel, bool ``(*spatial)`` on the output's device; None for all voxels."""
        if isinstance(self.region, torch.Tensor):
            return given_region(self.region, output.shape[2:], case).to(output.device)
        if self.region == "all":
            return None
        if self.region == "label":
            return self._label(channel, output, case)
        predicted = predicted_labels(output, self.activation, case).region(channel)
        return predicted & ~self._label(channel, output, case) if self.region == "false_positive" else predicted

    def _label(self, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor:
        if self.label_values is not None:
            values: list[int] | None = self.label_values[channel]
        else:
            values = [channel] if output.shape[1] > 1 else None
        return label_region(values, output.shape[2:], case).to(output.device)


class RegionScore(_SegmentationTarget):
    """The mean probability of segmentation channels inside a fixed region. The output is ``(B, C, *spatial)``.

    The region is frozen on the unperturbed output. So a perturbation that moves the segmentation lowers the score; it
    does not move the region.

    Args:
        channel: the output channel to explain, or several, each with its own map. ``"predicted"``: all channels to
            which the unperturbed output gives a voxel, without the background (channel 0; with ``"sigmoid"`` channel 0
            is not background).
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``, as for :class:`ClassScore`.
        region: one of:

            - ``"predicted"``: the voxels that the unperturbed output gives to the channel (the channel with the highest
              output; with ``"sigmoid"`` a probability above 0.5);
            - ``"label"``: the channel's voxels in the case's label map;
            - ``"false_positive"``: predicted but not in the label map, to see why the network finds something there;
            - ``"all"``: all voxels;
            - a label tensor ``(*spatial)`` or ``(1, *spatial)``, not 0 inside.

            Label maps and label tensors may lie on the image's grid: where the output's grid is coarser, they are
            resampled to the nearest voxel.
        label_values: for each channel, the value or values of the case's label map that belong to it. By default the
            channel's index; for a network with one channel, all values but 0.
        components: explain each connected component of the region separately, the largest first, at most this many.
            None explains the region as a whole.
        min_size: leave out components with fewer voxels than this, on the output's grid.

    Raises:
        ValueError: for other settings, and (from ``bind``) when the output is not a segmentation or has NaN or infinite
            values, when the region is empty or does not fit, or when the needed label map is missing.

    Example::

        >>> import torch
        >>> from monai_saliency import RegionScore
        >>> from monai_saliency.cases import Case
        >>> output = torch.tensor([[[[0.9, 0.2, 0.4]], [[0.1, 0.8, 0.6]]]])  # two channels, three voxels
        >>> bound = RegionScore(1, "none").bind(output, Case("ct_7", torch.zeros(1, 1, 3)))
        >>> round(float(bound(output)), 3)  # (0.8 + 0.6) / 2: channel 1 is predicted at two voxels
        0.7
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
        min_size = whole_number("min_size", min_size, 1)
        if components is not None:
            components = whole_number("components", components, 1)
            if isinstance(region, str) and region == "all":
                raise ValueError("`components` are parts of a region, so `region` must not be 'all'")
        self.components = components
        self.min_size = min_size

    @property
    def is_additive(self) -> bool:
        return True

    @property
    def is_linear(self) -> bool:
        return self.activation == "none"

    def _parts(self, channel: int, region: torch.Tensor) -> list[_Part]:
        if self.components is None:
            return super()._parts(channel, region)
        found = components(region, self.components, self.min_size)
        return [_Part(f"component {i} of class {channel}", channel, _voxels(part)) for i, part in enumerate(found, 1)]

    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, case: Case, where: str) -> BoundTarget:
        if not parts:
            raise CaseError(
                case.name, f"no component has {self.min_size} voxels, so there is no score to explain; lower `min_size`"
            )
        if self.components is not None:
            where = f"a component of {where}"
        return _BoundRegionScore(parts, self.activation, output, where)


class PredictedRegionScore(RegionScore):
    """A :class:`RegionScore` in the regions that somebody else's steps make of the unperturbed output, such as a
    bundle's postprocessing.
    """

    def __init__(self, channel: int | Sequence[int], activation: str, labels: Callable[[torch.Tensor], Labels]) -> None:
        super().__init__(channel, activation)
        self.labels = labels

    def _region(self, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor | None:
        return self.labels(output).region(channel)


class _BoundRegionScore(BoundTarget):
    additive = True

    def __init__(self, parts: Sequence[_Part], activation: str, reference: torch.Tensor, where: str) -> None:
        self.where = where
        self.labels = [part.label for part in parts]
        self.channels = [part.channel for part in parts]
        self.voxels = [part.voxels for part in parts]
        self.activation = activation
        # A softmax reads all channels; the other activations read only the explained ones.
        self.channels_read = None if activation == "softmax" else sorted(set(self.channels))
        self.shape = reference.shape[2:]
        self.reference = self(reference)[0]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        flat = to_float(output).flatten(2)
        scores = []
        for channel, voxels in zip(self.channels, self.voxels, strict=True):
            # The activation is applied inside the region only: a softmax of the whole volume would copy it.
            inside = flat if voxels is None else flat[:, :, voxels]
            scores.append(ACTIVATIONS[self.activation](inside)[:, channel].mean(dim=1))
        return torch.stack(scores, dim=1)

    def quantity(self) -> Quantity:
        found = quantity_after(self.activation)
        return found._replace(words=f"mean {found.words} in {self.where}")

    @functools.cached_property
    def _regions(self) -> torch.Tensor:
        """The region of each score, bool ``(K, *spatial)``."""
        found = torch.zeros(len(self.voxels), self.shape.numel(), dtype=torch.bool, device=self.reference.device)
        for row, voxels in zip(found, self.voxels, strict=True):
            row[slice(None) if voxels is None else voxels] = True
        return found.unflatten(1, self.shape)

    def reach(self) -> torch.Tensor | None:
        return None if any(voxels is None for voxels in self.voxels) else self._regions.any(dim=0)

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        values = ACTIVATIONS[self.activation](to_float(output))
        read = range(values.shape[1]) if self.channels_read is None else self.channels_read
        # Not by a list of indices, which would be copied to the device, and waited for.
        inside = torch.stack([values[:, read.index(channel)] for channel in self.channels], dim=1)
        inside = inside.masked_fill(~self._regions[everywhere(box)], 0)
        return inside.flatten(2).sum(dim=2) / self._regions.flatten(1).sum(dim=1)


class DiceScore(_SegmentationTarget):
    """The soft Dice score between the perturbed segmentation and the unperturbed one, or the label.

    With p the perturbed probabilities of a channel, and r its region (1 inside, 0 outside), the score is
    ``(2 * sum(p * r) + smooth) / (sum(p) + sum(r) + smooth)``, in [0, 1]: one minus ``monai.losses.DiceLoss``. Unlike
    :class:`RegionScore` it also falls when a perturbation adds voxels outside the region.

    Args:
        channel: the channels to explain, as for :class:`RegionScore`.
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``, as for :class:`ClassScore`.
        region: ``"predicted"``, ``"label"`` or a label tensor, as for :class:`RegionScore`. With ``"label"`` the score
            is the Dice score with the label.
        label_values: values of the label map for each channel, as for :class:`RegionScore`.
        smooth: added to numerator and denominator, at least 0. Larger values make the score of small regions vary less.
            The default is the default of ``monai.losses.DiceLoss``.

    Raises:
        ValueError: for other settings, and (from ``bind``) as for :class:`RegionScore`.

    Example::

        >>> import torch
        >>> from monai_saliency import DiceScore
        >>> from monai_saliency.cases import Case
        >>> output = torch.tensor([[[[1.0, 0.0, 0.0]], [[0.0, 1.0, 1.0]]]])  # channel 1 is predicted at two voxels
        >>> bound = DiceScore(1, "none", smooth=0).bind(output, Case("ct_7", torch.zeros(1, 1, 3)))
        >>> bound(torch.tensor([[[[0.0, 0.0, 1.0]], [[1.0, 1.0, 0.0]]]])).tolist()  # 2 * 1 / (2 + 2)
        [[0.5]]
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
        self.smooth = number("smooth", smooth, 0)

    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, case: Case, where: str) -> BoundTarget:
        return _BoundDiceScore(parts, self.activation, self.smooth, output, where)


class _BoundDiceScore(BoundTarget):
    """Quotients of two sums, constants among them: ``(inside + smooth / 2) / (all / 2 + (voxels + smooth) / 2)``."""

    labels: list[int]
    summed = True

    def __init__(
        self, parts: Sequence[_Part], activation: str, smooth: float, reference: torch.Tensor, where: str
    ) -> None:
        self.where = where
        self.labels = [part.channel for part in parts]
        self.activation = activation
        voxels = [part.voxels for part in parts if part.voxels is not None]
        self.outside = reference.new_ones(len(voxels), *reference.shape[2:], dtype=torch.bool)
        for row, each in zip(self.outside.flatten(1), voxels, strict=True):
            row[each] = False
        constants = [smooth / 2] * len(voxels) + [(len(each) + smooth) / 2 for each in voxels]
        weights = [1.0] * len(voxels) + [0.5] * len(voxels)
        self.constants, self.weights = to_float(reference).new_tensor([constants, weights])
        self.channels = torch.tensor(self.labels, device=reference.device)
        self.reference = self(reference)[0]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return self.of_sums(self.sums(output))

    def sums(self, output: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.constants, self._sums(output, self.outside), self.weights)

    def of_sums(self, sums: torch.Tensor) -> torch.Tensor:
        inside, half = sums.chunk(2, dim=1)
        return inside / half

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        return self._sums(output, self.outside[everywhere(box)]) * self.weights

    def _sums(self, output: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        """``(B, 2 * K)``, the probabilities inside and all of them."""
        values = ACTIVATIONS[self.activation](to_float(output)).index_select(1, self.channels).flatten(2)
        inside = values.masked_fill(outside.flatten(1), 0)
        return torch.cat([inside.sum(dim=2), values.sum(dim=2)], dim=1)

    def quantity(self) -> Quantity:
        return Quantity(f"Dice score of the {quantity_after(self.activation).words} with {self.where}", "0 to 1")
