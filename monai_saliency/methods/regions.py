"""Organs, supervoxels and channels."""

from __future__ import annotations

from typing import Any

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.estimators.shapley import ShapleyScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import MakesRegions, Masks
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.coalition import CoalitionMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.supervoxels import Supervoxels, whole_image
from monai_saliency.masks.until import UntilMasks
from monai_saliency.methods.arguments import TargetLike, method
from monai_saliency.methods.random_masks import most_masks
from monai_saliency.utils.arguments import flag, sliding_inferer, whole_number

__all__ = ["region_occlusion", "channel_occlusion", "shapley"]


@method
def region_occlusion(
    num_coalitions: int | None = None,
    p1: float = 0.5,
    seed: int = 0,
    regions: MakesRegions | None = None,
    num_supervoxels: int | None = None,
    per_channel: bool = False,
    until: float | None = None,
    budget: int | None = None,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Occlusion of whole regions, organs or supervoxels: which organ?

    By default each region is hidden in turn, and its value, the same on all its voxels, is how far the score falls.
    With ``num_coalitions`` random sets of regions are hidden together, which also finds regions that replace each
    other, and the value is RISE's, centred.

    Args:
        num_coalitions: how many random sets of regions; each region is hidden in turn by default. With ``until``, sets
            of the first round.
        p1: probability in (0, 1] that a region is kept in a random set.
        seed: of random sets.
        regions: makes the regions of an image, such as ``Supervoxels(200, compactness=0.5)``; by default the
            regions of the case's label map.
        num_supervoxels: about how many regions to make of the image itself, as ``regions=Supervoxels(...)`` does.
        per_channel: hide one channel at a time, and make a map for each channel.
        until: stop when the regions' values agree this well with the values of as many other random sets, see
            :func:`rise`. By default all sets are scored.
        budget: the largest number of random sets with ``until``, 4000 by default.
        estimator: by default ``OcclusionScoring()``, or ``RISEScoring(p1)`` with ``num_coalitions``.

    Raises:
        ValueError: when a number is not a whole number of at least 1, both ``regions`` and ``num_supervoxels`` are
            given, or ``until`` is given without ``num_coalitions``.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, ClassScore
        >>> organs = torch.tensor([[[1, 1, 2, 2]]])
        >>> explain = region_occlusion(target=ClassScore([0], "none"))
        >>> network = lambda images: images[..., 1:].flatten(1).sum(1, True)
        >>> [explanation] = explain.explain(torch.ones(1, 1, 1, 4), network, cases=[Case("a", labels=organs)])
        >>> explanation.saliency.tolist()
        [[[1.0, 1.0, 2.0, 2.0]]]
    """
    if num_coalitions is not None:
        whole_number("num_coalitions", num_coalitions, 1)
    if until is not None and num_coalitions is None:
        raise ValueError("`until` needs random sets of regions: give `num_coalitions`, how many the first round has")
    makes = _regions(regions, num_supervoxels)
    masks: Masks = RegionMasks(most_masks(num_coalitions, until, budget), p1, seed, makes)
    if flag("per_channel", per_channel):
        masks = ChannelMasks(masks) if num_coalitions is None else IndependentChannelMasks(masks)
    estimator = estimator or (OcclusionScoring() if num_coalitions is None else RISEScoring(p1))
    if until is not None:
        masks = UntilMasks(masks, estimator, until, num_coalitions)
    return PerturbationInferer(masks, target, estimator, **settings)


@method
def channel_occlusion(
    *, target: TargetLike = None, estimator: Estimator | None = None, **settings: Any
) -> PerturbationInferer:
    """Occlusion of one whole channel at a time: which modality? One forward each.

    Args:
        estimator: ``OcclusionScoring()`` by default. The map of a channel is flat: the score's fall, everywhere.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = channel_occlusion(target=ClassScore([0], "none"))
        >>> weights = torch.tensor([[3.0, 1.0]])
        >>> maps = explain(torch.ones(1, 2, 4, 4), lambda images: (weights * images.mean((2, 3))).sum(1, keepdim=True))
        >>> maps[0, :, 0, 0].tolist()  # the first channel is worth three times the second
        [3.0, 1.0]
    """
    return region_occlusion(regions=whole_image, per_channel=True, target=target, estimator=estimator, **settings)


@method
def shapley(
    num_coalitions: int | None = None,
    regions: MakesRegions | None = None,
    seed: int = 0,
    num_supervoxels: int | None = None,
    background: bool = True,
    per_channel: bool = False,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Shapley values of regions (Shapley 1953): what each organ or supervoxel adds to the score, on average over all
    orders of adding them to the image.

    The values of the regions sum to the score of the image less the score of the fill. All voxels of a region get its
    value; ``shapley_values`` gives the regions' values. They are exact by default, for at most
    14 regions. Under a ``SlidingWindowInferer``, and for a target that is a mean over voxels
    (:class:`~monai_saliency.RegionScore`), only regions that meet in the patches over one voxel count: dozens of organs
    are exact too, from at most as many forwards of a patch as there are sets of the regions in it. Of a mean of the
    network's output as it is (``activation="none"``) only regions that meet in one patch count. Where too many regions
    meet, all sets inside a patch are scored as far as they can be, and random sets of the rest, which need no patch
    run again: the values of these regions are estimates then, as ``stopped`` in the summary reports, with a standard
    error.

    If the network takes a few numbers next to the image (age, laboratory values), each number can be a player like a
    region: ``inputs=DictInput("image", numbers={"clinical": {"age": 62.0, "sex": 0.5}})`` gives their baselines, see
    :class:`~monai_saliency.DictInput`. Regions and numbers then sum to the score of the case less the score of the fill
    with all baselines. The map shows the regions; ``shapley_values`` and ``regions.csv`` list both.

    Args:
        num_coalitions: how many sets of regions are scored for an estimate (KernelSHAP, Leverage SHAP: arXiv
            2410.01917): ten for each region are a good start, three the least. By default all that there are, or that
            decide the score, at most about 2^16; ten for each region where too many meet in one patch.
        regions: makes the regions of an image, such as ``Supervoxels(10)``, or ``OrganSupervoxels(10)`` of the label
            map too; by default the regions of the case's label map.
        seed: of random sets.
        num_supervoxels: about how many regions to make of the image itself, as ``regions=Supervoxels(...)`` does.
        background: whether the voxels of no region, label 0, are a region too. If not, they are always kept, and the
            sum is what all regions together add to them.
        per_channel: whether each channel of each region has a value of its own, and a map for each channel.
        estimator: ``ShapleyScoring()`` by default.

    Raises:
        ValueError: when a number is not a whole number of at least 1, or both ``regions`` and ``num_supervoxels``
            are given.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, ClassScore
        >>> organs = torch.tensor([[[1, 1, 2, 2]]])
        >>> explain = shapley(target=ClassScore([0], "none"))
        >>> network = lambda images: images.flatten(1).amax(1, keepdim=True)  # either organ is enough
        >>> [explanation] = explain.explain(torch.ones(1, 1, 1, 4), network, cases=[Case("a", labels=organs)])
        >>> explanation.saliency.tolist()
        [[[0.5, 0.5, 0.5, 0.5]]]
    """
    makes, cuts = _regions(regions, num_supervoxels), sliding_inferer(settings.get("inferer"))
    masks = CoalitionMasks(num_coalitions, seed, makes, background, per_channel, cuts)
    return PerturbationInferer(masks, target, estimator or ShapleyScoring(), **settings)


def _regions(regions: Any, num_supervoxels: int | None) -> Any:
    """A function that makes the regions of an image; None for the case's label map."""
    if num_supervoxels is None:
        return regions
    whole_number("num_supervoxels", num_supervoxels, 1)
    if regions is not None:
        raise ValueError("give `regions` or `num_supervoxels`, not both: each makes the regions of an image")
    return Supervoxels(num_supervoxels)
