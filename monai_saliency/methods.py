"""The methods, each named by its four parts: masks, fill, target and estimator. Read them beside the papers.

All take the same further arguments, passed on to :class:`~monai_saliency.inferers.inferer.PerturbationInferer`:

- ``target``: which number is explained (:mod:`monai_saliency.targets`);
- ``fill``: what replaces hidden voxels (:mod:`monai_saliency.fills`), zeros by default;
- ``estimator``: how scores become a map (:mod:`monai_saliency.estimators`), the method's own by default;
- ``inferer``: the MONAI inferer that runs the network on a batch, ``SimpleInferer`` by default;
- ``mask_batch_size``: perturbed images in one network batch, at the most;
- ``inputs``: how the network takes several inputs, and which are perturbed (:mod:`monai_saliency.networks.inputs`);
- ``output``: which part of a structured output is read (:mod:`monai_saliency.networks.outputs`);
- ``progress``: shows a progress bar;
- ``patch_memory``: under a ``SlidingWindowInferer``, what is remembered of its patches
  (:mod:`monai_saliency.inferers.patches`); False to run whole images for every mask.

Those with ``per_channel`` make a map for each channel of the image (:mod:`monai_saliency.masks.channel`): which
modality
mattered, where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from monai.inferers import SlidingWindowInferer

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.patch_window import PatchWindowMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.masks.supervoxels import whole_image
from monai_saliency.targets import Target
from monai_saliency.utils.arguments import check_option

__all__ = ["channel_occlusion", "choose", "patch_windows", "region_occlusion", "rise", "sliding_window"]

T = TypeVar("T")


def rise(
    num_masks: int = 1000,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
    per_channel: bool = False,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """RISE (Petsiuk et al., BMVC 2018), debiased unless another estimator is given.

    Args:
        num_masks: how many masks. The map's noise falls with its square root.
        grid_size: cells along each axis, one number or one per axis: finer cells, finer maps, more masks needed.
        p1: probability in [0, 1] that a cell is kept.
        seed: of the masks.
        per_channel: whether each channel has masks of its own, drawn independently, and so a map of its own.
        target: which number is explained.
        estimator: ``RISEScoring(p1)`` by default; ``RISEScoring()`` is the paper's plain form.
        settings: see this module's page.
    """
    masks: Masks = RISEMasks(num_masks, grid_size, p1, seed)
    masks = IndependentChannelMasks(masks) if per_channel else masks
    return PerturbationInferer(masks, target, estimator or RISEScoring(p1), **settings)


def sliding_window(
    window_size: float | Sequence[float],
    stride: float | Sequence[float] | None = None,
    unit: str = "voxel",
    per_channel: bool = False,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Sliding-window occlusion (Zeiler and Fergus, ECCV 2014, section 4.2).

    Args:
        window_size: the hidden box's edge, one number or one per axis.
        stride: step, one number or one per axis; half of the window by default.
        unit: of both: ``"voxel"`` or ``"mm"``.
        per_channel: whether each window hides one channel at a time.
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default.
        settings: see this module's page.
    """
    masks: Masks = SlidingWindowMasks(window_size, stride, unit)
    masks = ChannelMasks(masks) if per_channel else masks
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), **settings)


def patch_windows(
    inferer: SlidingWindowInferer,
    divide: int = 1,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Sliding-window occlusion on the grid of a sliding-window model's patches: the cheapest map of such a model.

    Each window touches the fewest patches, and only those are run (:mod:`monai_saliency.inferers.patches`): with half
    overlap,
    volumes of 128^3 and patches of 48^3, 6 of 125 on average, against 16 for windows of that size elsewhere.

    Args:
        inferer: runs the network, and says where patches lie.
        divide: windows for each step from patch to patch along each axis: 2 halves their edges, for a finer map.
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default.
        settings: see this module's page.
    """
    masks = PatchWindowMasks(inferer, divide)
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), inferer=inferer, **settings)


def region_occlusion(
    num_masks: int | None = None,
    p1: float = 0.5,
    seed: int = 0,
    regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
    per_channel: bool = False,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Occlusion of whole regions, organs or supervoxels: which organ?

    By default each region is hidden in turn, and its value, the same on all its voxels, is how far the score falls.
    With ``num_masks`` random coalitions of regions are hidden together, which also finds regions that stand in for
    each other, and the value is RISE's, debiased.

    Args:
        num_masks: how many random coalitions; None to hide each region in turn.
        p1: probability in [0, 1] that a region is kept in a random coalition.
        seed: of random coalitions.
        regions: makes the regions of an image, such as ``Supervoxels(200)``; by default they are the case's label map.
        per_channel: whether each channel has masks of its own.
        target: which number is explained.
        estimator: by default ``OcclusionScoring()``, or ``RISEScoring(p1)`` with ``num_masks``.
        settings: see this module's page.
    """
    masks: Masks = RegionMasks(num_masks, p1, seed, regions)
    if per_channel:
        masks = ChannelMasks(masks) if num_masks is None else IndependentChannelMasks(masks)
    default = OcclusionScoring() if num_masks is None else RISEScoring(p1)
    return PerturbationInferer(masks, target, estimator or default, **settings)


def channel_occlusion(*, target: Target, estimator: Estimator | None = None, **settings: Any) -> PerturbationInferer:
    """Occlusion of one whole channel at a time: which modality? One forward each.

    Args:
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default; a channel's map then is flat, its drop everywhere.
        settings: see this module's page.
    """
    return region_occlusion(regions=whole_image, per_channel=True, target=target, estimator=estimator, **settings)


def choose(name: str, options: Mapping[str, T], what: str = "method") -> T:
    """What a config names, such as one of its methods.

    Raises:
        ValueError: when there is none of that name.
    """
    return check_option(what, name, options)
