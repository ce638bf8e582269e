"""Segmentations: the mean probability in a region, and the Dice score with it."""

from __future__ import annotations

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import NothingToExplain
from monai_saliency.targets.base import (
    ACTIVATIONS,
    SCALES,
    BoundTarget,
    Quantity,
    Target,
    check_activation,
    check_indices,
    check_probabilities,
    check_volume,
    log_odds_of,
    log_probabilities,
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
from monai_saliency.utils.arguments import check_option, indices, indices_or_word, whole_number
from monai_saliency.utils.tensors import Box, columns, everywhere

logger = logging.getLogger(__name__)

_SMOOTH = 1e-5  # of a Dice score, as in monai.losses.DiceLoss


class _Part(NamedTuple):
    """One explained value: its label, its channel, and its voxels in the flattened grid."""

    label: int | str
    channel: int
    voxels: torch.Tensor | slice


class _SegmentationTarget(Target):
    """A target that compares channels with regions. The regions are frozen on the unperturbed output."""

    regions: tuple[str, ...]

    def __init__(
        self,
        channel: int | Sequence[int] | str,
        activation: str,
        region: str | torch.Tensor | Labels = "predicted",
        *,
        label_values: Sequence[int | Sequence[int]] | None = None,
    ) -> None:
        check_region(region, self.regions)
        self.channel = indices_or_word("channel", channel, ["predicted"])
        self.activation = check_option("activation", activation, list(ACTIVATIONS))
        self.region = region
        self.label_values: dict[int, list[int]] = {}
        if label_values is not None:
            channels = [] if isinstance(self.channel, str) else self.channel
            if not isinstance(label_values, Sequence) or not channels or len(label_values) != len(channels):
                raise ValueError(f"`label_values` must have one entry for each channel, got {label_values!r}")
            for index, values in zip(channels, label_values, strict=True):
                self.label_values[index] = indices("label_values", values)

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        output = check_volume(reference_output, case, type(self).__name__)
        check_activation(output, self.activation, case)
        name = self.region if isinstance(self.region, str) else "given"
        if isinstance(self.region, Labels):
            name = "predicted"
        where = "the image" if name == "all" else f"the {name.replace('_', ' ')} region"
        parts: list[_Part] = []
        empty = []
        for channel in self._channels(output, case):
            region = self._region(channel, output, case)
            if bool(region.any()):
                parts += self._parts(channel, region)
            else:
                empty.append(channel)
        if empty:
            self._refuse_empty(empty, where, case, has_others=bool(parts))
        return self._bound(parts, output, where)

    def _refuse_empty(self, channels: Sequence[int], where: str, case: Case, has_others: bool) -> None:
        """Refuse channels whose region is empty. What the network predicts nowhere, and a label map without a finding,
        are nothing to explain, and leave the maps of other channels; another empty region is a wrong setting.
        """
        what = f"{where} of channel {', '.join(map(str, channels))} is empty"
        is_labelled = self.region == "label" and bool(torch.as_tensor(case.labels).any())
        if is_labelled or isinstance(self.region, torch.Tensor):
            raise ValueError(
                f"{what}, so it has no score to explain; choose another `channel`, or give `region` as a label tensor"
            )
        if not has_others:
            advice = "; region='all' explains the mean over the image" * ("all" in self.regions)
            raise NothingToExplain(case.name, what + advice)
        logger.warning("case %s: %s: no map explains it", case.name, what)

    def _parts(self, channel: int, region: torch.Tensor) -> list[_Part]:
        """The values that are explained for a channel and its region, bool ``(*spatial)``."""
        if bool(region.all()):
            return [_Part(channel, channel, slice(None))]
        return [_Part(channel, channel, region.flatten().nonzero().flatten())]

    @abstractmethod
    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, where: str) -> BoundTarget:
        """The bound target of the explained values, with the words for their regions."""

    def _channels(self, output: torch.Tensor, case: Case) -> Sequence[int]:
        if not isinstance(self.channel, str):
            check_indices(self.channel, output.shape[1], "channel", "channel")
            return self.channel
        predicted = predicted_labels(output, self.activation).channels(output.shape[1])
        if not predicted:
            raise NothingToExplain(
                case.name,
                f"the network segments nothing: the predicted region of each of its {output.shape[1]} channels (but "
                "the background) is empty",
            )
        return sorted(predicted)

    def _region(self, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor:
        """The region of a channel, bool ``(*spatial)`` on the output's device."""
        if isinstance(self.region, Labels):
            return self.region.region(channel)
        if isinstance(self.region, torch.Tensor):
            return given_region(self.region, channel, output, case).to(output.device)
        if self.region == "all":
            return output.new_ones(output.shape[2:], dtype=torch.bool)
        if self.region == "label":
            return self._label(channel, output, case)
        predicted = predicted_labels(output, self.activation).region(channel)
        return predicted & ~self._label(channel, output, case) if self.region == "false_positive" else predicted

    def _label(self, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor:
        """Where the case's label map has the channel, bool ``(*spatial)`` on the output's device and grid."""
        values = self.label_values.get(channel)
        return label_region(values, channel, output, self.activation, case).to(output.device)


class RegionScore(_SegmentationTarget):
    """The mean probability of segmentation channels inside a fixed region. The output is ``(B, C, *spatial)``.

    The region is frozen on the unperturbed output. So a perturbation that moves the segmentation lowers the score; it
    does not move the region.

    Args:
        channel: the output channel to explain, or several, each with its own map. Of several in their predicted
            regions those are explained that have a voxel there. ``"predicted"``: all channels with a voxel in the
            unperturbed output, without the background (channel 0; with ``"sigmoid"`` channel 0 is not background).
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``, as for :class:`ClassScore`.
        region: one of:

            - ``"predicted"``: the voxels that the unperturbed output gives to the channel (the channel with the highest
              output; with ``"sigmoid"`` a probability above 0.5);
            - ``"label"``: the channel's voxels in the label map, or its own channel of a label with one for each;
            - ``"false_positive"``: predicted but not in the label map, to see why the network finds something there;
            - ``"all"``: all voxels;
            - a label tensor ``(*spatial)`` or ``(1, *spatial)``, not 0 inside, or ``(C, *spatial)``, 1 inside;
            - the ``Labels`` that somebody else's steps, such as a bundle's postprocessing, make of the unperturbed
              output.

            Label maps and label tensors may lie on the image's grid: where the output's grid is coarser, they are
            resampled to the nearest voxel.
        label_values: for each channel, the value or values of the case's label map that belong to it. By default the
            channel's index, where the label map has no other values; for a network with one channel, all values but 0.
            With ``"sigmoid"`` and several channels they must be given.
        components: explain each connected component of the region separately, the largest first, at most this many.
            None explains the region as a whole.
        scale: ``"probability"``: the mean probability, which is a sum over voxels, as exact Shapley values of many
            organs need it. ``"log_odds"``: the log-odds of the mean probability. The default is not that of
            :class:`ClassScore`: a mean over voxels falls with each voxel that is lost, and so does not saturate.

    Raises:
        NothingToExplain: from ``bind``, when the region of each channel is empty: predicted nowhere, no false positive,
            or a label map of zeros. A channel without a region among others is reported, and has no map.
        ValueError: for other settings, and (from ``bind``) when the output is not a segmentation or has NaN or infinite
            values, when the region does not fit, is a label tensor of zeros or not in a label map that has others, or
            when the needed label map is missing.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, RegionScore
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
        region: str | torch.Tensor | Labels = "predicted",
        *,
        label_values: Sequence[int | Sequence[int]] | None = None,
        components: int | None = None,
        scale: str = "probability",
    ) -> None:
        super().__init__(channel, activation, region, label_values=label_values)
        self.scale = check_option("scale", scale, SCALES)
        self.components = None if components is None else whole_number("components", components, 1)

    def _parts(self, channel: int, region: torch.Tensor) -> list[_Part]:
        if self.components is None:
            return super()._parts(channel, region)
        parts = []
        for number, component in enumerate(components(region, self.components), 1):
            (part,) = super()._parts(channel, component)
            parts.append(part._replace(label=f"component {number} of class {channel}"))
        return parts

    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, where: str) -> BoundTarget:
        if self.components is not None:
            where = f"a component of {where}"
        in_log_odds = self.scale == "log_odds"
        if in_log_odds:
            check_probabilities(_BoundRegionScore(parts, self.activation, output, where)(output))
        return _BoundRegionScore(parts, self.activation, output, where, in_log_odds)


class _BoundRegions(BoundTarget):
    """Scores of channels in regions."""

    def __init__(self, parts: Sequence[_Part], activation: str, reference: torch.Tensor, where: str) -> None:
        self.where = where
        self.activation = activation
        self.labels = [part.label for part in parts]
        self.channels = [part.channel for part in parts]
        self.voxels = [part.voxels for part in parts]
        self.shape, self.device = reference.shape[2:], reference.device

    @functools.cached_property
    def regions(self) -> torch.Tensor:
        """The region of each score, bool ``(K, *spatial)``."""
        regions = torch.zeros(len(self.voxels), self.shape.numel(), dtype=torch.bool, device=self.device)
        for row, voxels in zip(regions, self.voxels, strict=True):
            row[voxels] = True
        return regions.unflatten(1, self.shape)


class _BoundRegionScore(_BoundRegions):
    def __init__(
        self,
        parts: Sequence[_Part],
        activation: str,
        reference: torch.Tensor,
        where: str,
        in_log_odds: bool = False,
    ) -> None:
        super().__init__(parts, activation, reference, where)
        self.in_log_odds = in_log_odds
        self.additive = not in_log_odds
        self.linear = self.additive and activation == "none"
        # A softmax reads all channels; the other activations read only the explained ones.
        self.channels_read = None if activation == "softmax" else sorted(set(self.channels))

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        flat = to_float(output).flatten(2)
        scores = []
        for channel, voxels in zip(self.channels, self.voxels, strict=True):
            # The activation is applied inside the region only: a softmax of the whole volume would copy it.
            inside = flat[:, :, voxels]
            if self.in_log_odds:  # of the means of the probability and of its complement, whose counts cancel
                own, rest = log_probabilities(inside, self.activation, channel)
                scores.append(own.logsumexp(dim=1) - rest.logsumexp(dim=1))
            else:
                scores.append(ACTIVATIONS[self.activation](inside)[:, channel].mean(dim=1))
        return torch.stack(scores, dim=1)

    def quantity(self) -> Quantity:
        plain = quantity_after(self.activation)
        plain = plain._replace(words=f"mean {plain.words} in {self.where}")
        return log_odds_of(plain, self.activation) if self.in_log_odds else plain

    def uninformed(self) -> list[float]:
        return [0.0 if self.quantity().unit == "probability" else math.nan] * len(self.labels)

    def reach(self) -> torch.Tensor | None:
        if any(isinstance(voxels, slice) for voxels in self.voxels):
            return None
        return self.regions.any(dim=0)

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        values = ACTIVATIONS[self.activation](to_float(output))
        places: Sequence[int] = self.channels
        if self.channels_read is not None:
            places = [self.channels_read.index(channel) for channel in self.channels]
        inside = columns(values, places).masked_fill(~self.regions[everywhere(box)], 0)
        return inside.flatten(2).sum(dim=2) / self.regions.flatten(1).sum(dim=1)


class DiceScore(_SegmentationTarget):
    """The soft Dice score between the perturbed segmentation and the unperturbed one, or the label.

    With p the perturbed probabilities of a channel, and r its region (1 inside, 0 outside), the score is
    ``(2 * sum(p * r) + 1e-5) / (sum(p) + sum(r) + 1e-5)``, in [0, 1]: one minus ``monai.losses.DiceLoss``. Unlike
    :class:`RegionScore` it also falls when a perturbation adds voxels outside the region.

    Args:
        channel: the channels to explain, as for :class:`RegionScore`.
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``, as for :class:`ClassScore`.
        region: ``"predicted"``, ``"label"`` or a label tensor, as for :class:`RegionScore`. With ``"label"`` the score
            is the Dice score with the label.
        label_values: values of the label map for each channel, as for :class:`RegionScore`.

    Raises:
        ValueError: for other settings, and (from ``bind``) as for :class:`RegionScore`.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, DiceScore
        >>> output = torch.tensor([[[[1.0, 0.0, 0.0]], [[0.0, 1.0, 1.0]]]])  # channel 1 is predicted at two voxels
        >>> bound = DiceScore(1, "none").bind(output, Case("ct_7", torch.zeros(1, 1, 3)))
        >>> score = bound(torch.tensor([[[[0.0, 0.0, 1.0]], [[1.0, 1.0, 0.0]]]]))  # 2 * 1 / (2 + 2)
        >>> round(float(score), 3)
        0.5
    """

    regions = ("predicted", "label")

    def _bound(self, parts: Sequence[_Part], output: torch.Tensor, where: str) -> BoundTarget:
        return _BoundDiceScore(parts, self.activation, output, where)


class _BoundDiceScore(_BoundRegions):
    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        values = ACTIVATIONS[self.activation](to_float(output)).flatten(2)
        scores = []
        for channel, voxels in zip(self.channels, self.voxels, strict=True):
            inside = values[:, channel, voxels]
            sizes = values[:, channel].sum(dim=1) + inside.shape[1]
            scores.append((2 * inside.sum(dim=1) + _SMOOTH) / (sizes + _SMOOTH))
        return torch.stack(scores, dim=1)

    def quantity(self) -> Quantity:
        return Quantity(f"Dice score of the {quantity_after(self.activation).words} with {self.where}", "0 to 1")
