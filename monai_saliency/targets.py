"""Which number of the network's output is explained.

A target holds the user's settings. :meth:`Target.bind` sees one case's unperturbed output and freezes what the
question refers to (the predicted class, the predicted region), so that every perturbed output is asked the same.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monai_saliency.errors import CaseError

__all__ = ["BoundTarget", "Case", "ClassScore", "RegionScore", "Target"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda output: output.softmax(dim=1),
    "sigmoid": torch.sigmoid,
    "none": lambda output: output,
}


@dataclass(frozen=True)
class Case:
    """One image under explanation.

    Attributes:
        name: what errors call it, the file's name where there is one.
        image: ``(C, *spatial)``, unperturbed, in the network's input space.
        index: its place in the batch that was given.
        labels: its label map ``(1, *spatial)``, where it has one.
        spacing: voxel sizes in mm, one per spatial axis, where they are known.
    """

    name: str
    image: torch.Tensor
    index: int = 0
    labels: torch.Tensor | None = None
    spacing: Sequence[float] | None = None


class BoundTarget(ABC):
    """A target with everything that depends on the case frozen."""

    #: what each of the K scores is: class or channel indices
    labels: Sequence[int]

    @abstractmethod
    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        """Scores ``(B, K)`` of network outputs ``(B, ...)``."""

    def describe(self) -> dict[str, Any]:
        """What the network made of the unperturbed case, for a summary: ``prediction`` and its ``probability``."""
        return {}


class Target(ABC):
    """Settings of a target."""

    @abstractmethod
    def bind(self, reference_output: torch.Tensor, case: Case) -> BoundTarget:
        """Freeze what the question refers to.

        Args:
            reference_output: the network's output of the unperturbed case, ``(1, ...)``.
            case: the case.

        Raises:
            ValueError: when the output is not what the target reads, or the case has nothing to explain.
        """


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {sorted(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]


def _check_output(output: Any, case: Case, target: str, spatial: bool) -> None:
    """Refuse what is not ``(1, C)``, or ``(1, C, *spatial)`` for targets that read volumes."""
    if not isinstance(output, torch.Tensor):
        raise CaseError(
            case.name,
            f"{target} reads a tensor, the network gave a {type(output).__name__}; "
            "wrap the network so that it returns the tensor to be explained",
        )
    if spatial and output.ndim != case.image.ndim + 1:
        raise CaseError(
            case.name,
            f"{target} reads a segmentation of shape (B, C, *spatial), the network gave "
            f"{_shape(output)}" + ("; use ClassScore for a classifier" if output.ndim == 2 else ""),
        )
    if not spatial and output.ndim != 2:
        raise CaseError(
            case.name,
            f"{target} reads one row of class scores an image, shape (B, classes), the network "
            f"gave {_shape(output)}" + ("; use RegionScore for a segmentation" if output.ndim > 3 else ""),
        )
    if not bool(torch.isfinite(output).all()):
        raise CaseError(
            case.name,
            "the network's output of the unperturbed image is NaN or infinite in places; check the network's weights "
            "and the preprocessing of this case",
        )


def _shape(output: torch.Tensor) -> str:
    return f"({', '.join(['B', *map(str, output.shape[1:])])})"


def _check_activation(output: torch.Tensor, activation: str, case: Case) -> None:
    """Refuse a softmax of one channel, and warn where an activation is applied to what looks like probabilities."""
    if activation == "none":
        return
    if activation == "softmax" and output.shape[1] == 1:
        raise CaseError(
            case.name,
            "the softmax of one channel is 1 whatever the network says; "
            "use activation='sigmoid' for a single logit or 'none' for a probability",
        )
    probable = bool(((output >= 0) & (output <= 1)).all())
    if activation == "softmax":
        probable = probable and bool(((output.sum(dim=1) - 1).abs() < 1e-3).all())
    if probable:
        warnings.warn(
            f"case {case.name}: the network's output already looks like probabilities, and a {activation} of it "
            "flattens the scores; use activation='none' if the network ends in one",
            stacklevel=3,
        )


def _computed(output: torch.Tensor) -> torch.Tensor:
    """The output in a precision that scores can be compared in (autocast networks give half)."""
    return output if output.dtype in (torch.float32, torch.float64) else output.float()


class ClassScore(Target):
    """The score of whole-image classes: the network's output is ``(B, classes)``.

    Args:
        classes: a list of class indices, ``"predicted"`` (the highest score of the unperturbed image) or ``"all"``.
            One map is made for each.
        activation: what turns the output into scores: ``"softmax"``, ``"sigmoid"``, or ``"none"`` where the network
            ends in one already, or to explain logits. Never guessed; a warning is given where it is applied to what
            looks like probabilities.
    """

    def __init__(self, classes: Sequence[int] | int | str, activation: str) -> None:
        _activation(activation)
        if isinstance(classes, str):
            if classes not in ("predicted", "all"):
                raise ValueError(f"`classes` must be a list of indices, 'predicted' or 'all', got {classes!r}")
        else:
            classes = [int(c) for c in np.atleast_1d(classes)]
            if not classes:
                raise ValueError("`classes` must name at least one class, got an empty list")
        self.classes: list[int] | str = classes
        self.activation = activation

    def bind(self, reference_output: torch.Tensor, case: Case) -> BoundTarget:
        _check_output(reference_output, case, "ClassScore", spatial=False)
        output = _computed(reference_output)
        _check_activation(output, self.activation, case)
        # A copy: the output may live in a buffer that the next batch overwrites.
        scores = _ACTIVATIONS[self.activation](output)[0].clone()
        if isinstance(self.classes, str):
            classes = list(range(len(scores))) if self.classes == "all" else [int(scores.argmax())]
        else:
            classes = self.classes
            for index in classes:
                if not 0 <= index < len(scores):
                    raise CaseError(
                        case.name,
                        f"class {index} is out of range: the network gives {len(scores)} classes, "
                        f"so `classes` must be in [0, {len(scores) - 1}]",
                    )
        return _BoundClassScore(classes, self.activation, scores)


class _BoundClassScore(BoundTarget):
    def __init__(self, classes: list[int], activation: str, reference: torch.Tensor) -> None:
        self.labels = classes
        self.activation = activation
        self.reference = reference

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[self.activation](_computed(output))[:, self.labels]

    def describe(self) -> dict[str, Any]:
        if len(self.reference) == 1:
            score = float(self.reference)
            return {"prediction": int(score > 0.5), "probability": max(score, 1 - score)}
        predicted = int(self.reference.argmax())
        return {"prediction": predicted, "probability": float(self.reference[predicted])}


class RegionScore(Target):
    """The mean probability of segmentation channels inside a fixed region: the output is ``(B, C, *spatial)``.

    The region is frozen on the unperturbed output, so that a perturbation which moves the segmentation lowers the
    score instead of moving the question.

    Args:
        channel: the output channel explained, or several, each with a map of its own.
        region: ``"predicted"`` (the voxels that the unperturbed output gives to the channel: the highest channel, or
            a probability above one half under ``"sigmoid"``), ``"all"``, or a label tensor ``(*spatial)``,
            ``(1, *spatial)`` or, for a batch, ``(B, 1, *spatial)``, on the output's grid, non-zero inside.
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``, as in :class:`ClassScore`.
    """

    def __init__(self, channel: int | Sequence[int], activation: str, region: str | torch.Tensor = "predicted") -> None:
        _activation(activation)
        if isinstance(region, str) and region not in ("predicted", "all"):
            raise ValueError(f"`region` must be 'predicted', 'all' or a label tensor, got {region!r}")
        self.channels = [int(c) for c in np.atleast_1d(channel)]
        self.region = region
        self.activation = activation

    def bind(self, reference_output: torch.Tensor, case: Case) -> BoundTarget:
        _check_output(reference_output, case, "RegionScore", spatial=True)
        output = _computed(reference_output)
        _check_activation(output, self.activation, case)
        for channel in self.channels:
            if not 0 <= channel < output.shape[1]:
                raise CaseError(
                    case.name,
                    f"channel {channel} is out of range: the network gives {output.shape[1]} "
                    f"channels, so `channel` must be in [0, {output.shape[1] - 1}]",
                )
        regions = [self._region(channel, output, case) for channel in self.channels]
        return _BoundRegionScore(self.channels, self.activation, regions, output)

    def _region(self, channel: int, output: torch.Tensor, case: Case) -> torch.Tensor | None:
        """Where the mean is taken: bool ``(*spatial)``, or None for everywhere."""
        if isinstance(self.region, torch.Tensor):
            region, spatial = self.region.to(output.device), output.shape[2:]
            if region.ndim == len(spatial) + 2:
                if len(region) > 1 and case.index >= len(region):
                    raise CaseError(case.name, f"`region` holds {len(region)} label maps, one an image")
                region = region[case.index if len(region) > 1 else 0]
            if region.ndim == len(spatial) + 1 and len(region) == 1:
                region = region[0]
            if region.shape != spatial:
                raise CaseError(
                    case.name,
                    f"`region` has shape {tuple(self.region.shape)}, the network's output has "
                    f"spatial shape {tuple(spatial)}; give the label on the output's grid",
                )
            region, what = region != 0, "the given region"
        elif self.region == "all":
            return None
        elif self.activation == "sigmoid":
            region, what = output[0, channel] > 0, "the predicted region (probability above one half)"
        elif output.shape[1] > 1:
            region, what = output[0].argmax(dim=0) == channel, "the predicted region"
        else:
            raise CaseError(
                case.name,
                "with one output channel and activation='none' the predicted region is not "
                "defined; use activation='sigmoid' for a logit, or give `region` as a label tensor",
            )
        if not bool(region.any()):
            raise CaseError(
                case.name,
                f"{what} of channel {channel} is empty, so there is no score to explain; "
                "choose another `channel`, give `region` as a label tensor, or use region='all'",
            )
        return region


class _BoundRegionScore(BoundTarget):
    def __init__(
        self, channels: list[int], activation: str, regions: list[torch.Tensor | None], reference: torch.Tensor
    ) -> None:
        self.labels = channels
        self.activation = activation
        self.voxels = [None if region is None else region.flatten().nonzero().flatten() for region in regions]
        self.reference = self(reference)[0]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        flat = _computed(output).flatten(2)
        scores = []
        for channel, voxels in zip(self.labels, self.voxels, strict=True):
            # Only the region's voxels are activated: a softmax of the whole volume would cost a copy of it.
            inside = flat if voxels is None else flat[:, :, voxels]
            scores.append(_ACTIVATIONS[self.activation](inside)[:, channel].mean(dim=1))
        return torch.stack(scores, dim=1)

    def describe(self) -> dict[str, Any]:
        best = int(self.reference.argmax())
        return {"prediction": self.labels[best], "probability": float(self.reference[best])}
