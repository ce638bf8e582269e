"""Discs and balls that are hidden in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.squared_difference import SquaredDifferenceScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.masks.channel import ChannelMasks
from monai_saliency.masks.sliding_radial import SlidingRadialMasks
from monai_saliency.methods.checks import check_unit
from monai_saliency.targets import Target
from monai_saliency.utils.arguments import flag

__all__ = ["sliding_radial", "squared_difference"]


def sliding_radial(
    radius: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    sigma: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    per_channel: bool = False,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Occlusion by discs or balls that slide over the image, crisp or blurred (xaitk-saliency's ``SlidingRadial``).

    Args:
        radius: half axes of the ellipsoid, one number or one per axis; a sixteenth of each axis by default.
        stride: step from centre to centre, one number or one per axis; the radius by default.
        sigma: standard deviation of the Gaussian that blurs a mask, one number or one per axis; crisp by default.
        window_unit: of all three: ``"voxel"`` (of the network's input) or ``"mm"``.
        per_channel: hide one channel at a time, and make a map for each channel.
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: when ``window_unit`` is another word, or a size is out of range.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = sliding_radial(2, stride=1, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 9, 9), lambda images: images[:, :, 4, 6])
        >>> divmod(int(saliency.argmax()), 9)
        (4, 6)
    """
    check_unit(window_unit)
    masks: Masks = SlidingRadialMasks(radius, stride, sigma, window_unit)
    masks = ChannelMasks(masks) if flag("per_channel", per_channel) else masks
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), **settings)


def squared_difference(
    radius: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    sigma: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Perturbation saliency (Greydanus et al., ICML 2018): discs or balls that slide over the image, and half the
    squared change of the score. The value has no sign and is not in the score's unit.

    The paper's own settings are those of a small image: ``radius=1, stride=5, sigma=5``, and the fill ``BlurFill(3)``.

    Args:
        radius: half axes of the ellipsoid, one number or one per axis; a sixteenth of each axis by default.
        stride: step from centre to centre, one number or one per axis; the radius by default.
        sigma: standard deviation of the Gaussian that blurs a mask, one number or one per axis; crisp by default.
        window_unit: of all three: ``"voxel"`` (of the network's input) or ``"mm"``.
        target: which number is explained.
        estimator: ``SquaredDifferenceScoring()`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: when ``window_unit`` is another word, or a size is out of range.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = squared_difference(1, stride=1, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 7, 7), lambda images: -images[:, :, 3, 4])
        >>> divmod(int(saliency.argmax()), 7), float(saliency.min())
        ((3, 4), 0.0)
    """
    check_unit(window_unit)
    masks = SlidingRadialMasks(radius, stride, sigma, window_unit)
    return PerturbationInferer(masks, target, estimator or SquaredDifferenceScoring(), **settings)
