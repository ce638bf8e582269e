"""Controls: maps made without the network. A metric that they pass cannot judge a map."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from monai_saliency.fills.simple import BlurFill
from monai_saliency.metrics.base import SaliencyMetric, check_one_grid, checked_maps
from monai_saliency.utils.arguments import instance
from monai_saliency.utils.tensors import plain

#: the names of the controls
CONTROLS = ("random", "intensity", "edges", "blurred")


@dataclass(frozen=True)
class Controlled:
    """A metric of maps, and the same metric of the controls.

    Attributes:
        metric: the metric's name.
        higher_is_better: its direction.
        value: of the maps: the mean over cases and maps; NaN where nothing could be measured.
        controls: of each control, by its name.
    """

    metric: str
    higher_is_better: bool
    value: float
    controls: Mapping[str, float]

    @property
    def passed_by(self) -> tuple[str, ...]:
        """The controls that are at least as good as the maps: with any, a good metric is no evidence for a map."""
        if self.higher_is_better:
            return tuple(name for name, value in self.controls.items() if value >= self.value)
        return tuple(name for name, value in self.controls.items() if value <= self.value)


def controls(images: torch.Tensor, saliency: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    """The four controls of a batch.

    - ``random``: independent normal numbers;
    - ``intensity``: the scan itself, the mean of its channels;
    - ``edges``: the length of the scan's gradient, by central differences, the mean of its channels;
    - ``blurred``: the map itself, blurred by a Gaussian of 2 voxels.

    Args:
        images: ``(B, C, *spatial)``, 2D or 3D.
        saliency: the maps ``(B, K, *spatial)``.
        seed: of the random maps, which are drawn on the CPU and depend on this and on their own image only.

    Returns:
        maps like ``saliency``, on its device, by the name of the control.

    Raises:
        ValueError: when images and maps are not of one batch and one grid, or when maps are not finite.
    """
    maps = checked_maps(saliency)
    scans = plain(images)
    check_one_grid(maps, scans)
    scans = scans.to(maps)
    return {
        "random": torch.stack([_noise(maps[0], scan, seed) for scan in scans]),
        "intensity": scans.mean(1, keepdim=True).expand_as(maps).clone(),
        "edges": _edges(scans).expand_as(maps).clone(),
        "blurred": BlurFill(2.0)(maps),
    }


def with_controls(
    metric: SaliencyMetric, saliency: torch.Tensor, y: torch.Tensor, images: torch.Tensor, seed: int = 0
) -> Controlled:
    """Measure maps and their controls by one metric.

    Args:
        metric: any metric of this room.
        saliency: the maps ``(B, K, *spatial)``.
        y: what the metric compares maps with: label maps, or the images once more.
        images: the scans ``(B, C, *spatial)`` for the controls.
        seed: of the random map.

    Returns:
        the means, and which controls pass.

    Raises:
        ValueError: when the arguments are not of one batch and one grid.

    Example::

        >>> from monai_saliency.metrics.plausibility import AUPRC
        >>> label = torch.zeros(1, 1, 16, 16)
        >>> label[..., 4:8, 4:8] = 1
        >>> bright = label + 0.1 * torch.rand(1, 1, 16, 16)  # the lesion is the brightest part of the scan
        >>> saliency = label + torch.rand(1, 1, 16, 16)  # found, with some noise
        >>> "intensity" in with_controls(AUPRC(), saliency, label, bright).passed_by
        True
    """
    instance("metric", metric, SaliencyMetric, "a metric such as AUPRC()")
    means = {}
    for name, maps in {"map": saliency, **controls(images, saliency, seed)}.items():
        means[name] = float(metric.compute(maps, y).double().nanmean())
    return Controlled(type(metric).__name__, metric.higher_is_better, means.pop("map"), means)


def _noise(like: torch.Tensor, scan: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal numbers of the shape of ``like``, drawn by the seed and the scan's voxels."""
    digest = hashlib.sha256(f"{seed} ".encode() + scan.cpu().double().contiguous().numpy().tobytes()).digest()
    draw = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)


def _edges(scans: torch.Tensor) -> torch.Tensor:
    """The length of the gradient of scans ``(B, C, *spatial)``, the mean of their channels: ``(B, 1, *spatial)``."""
    axes = [axis for axis in range(2, scans.ndim) if scans.shape[axis] > 1]
    slopes = torch.gradient(scans, dim=axes) if axes else [torch.zeros_like(scans)]
    return torch.stack([*slopes]).square().sum(0).sqrt().mean(1, keepdim=True)
