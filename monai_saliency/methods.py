"""The methods, each named by its four parts: masks, fill, target and estimator. Read them beside the papers.

Each is a function whose own settings come first, then ``*, target, estimator=None, **settings``. Its signature is the
one place where a method is written: configs, the overlay, the SLURM job and the tracker read its ids, defaults and help
from there (:mod:`monai_saliency.bundle.chosen_method`). A function of your own with such a signature works wherever
these do, by its dotted path.

``settings`` are the arguments that all methods share. They are passed on to
:class:`~monai_saliency.inferers.inferer.PerturbationInferer`:

- ``fill``: what replaces hidden voxels (:mod:`monai_saliency.fills`), zeros by default;
- ``inferer``: the MONAI inferer that runs the network on a batch, ``SimpleInferer`` by default;
- ``mask_batch_size``: perturbed images in one network batch, at most;
- ``inputs``: how the network takes several inputs, and which are perturbed (:mod:`monai_saliency.networks.inputs`);
- ``output``: which part of a structured output is read (:mod:`monai_saliency.networks.outputs`);
- ``progress``: whether to show a progress bar;
- ``patch_memory``: under a ``SlidingWindowInferer``, what is remembered of its patches
  (:mod:`monai_saliency.inferers.patches`); False runs whole images for every mask.

Example::

    def my_method(size: int = 5, *, target, estimator=None, **settings):
        '''Windows beside each other.'''
        return PerturbationInferer(SlidingWindowMasks(size, size), target, estimator or OcclusionScoring(), **settings)

    # python -m monai.bundle run ... --method my_package.my_method --size 7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from monai.inferers import Inferer

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.hierarchical import HierarchicalScoring
from monai_saliency.estimators.hsic import HSICScoring
from monai_saliency.estimators.minimal import MinimalRegionScoring
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.estimators.sobol import SobolScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.unwrapped import inside_of
from monai_saliency.masks.base import Masks
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.grid import GridMasks
from monai_saliency.masks.hierarchical import HierarchicalMasks
from monai_saliency.masks.minimal import MinimalMasks
from monai_saliency.masks.patch_window import PatchWindowMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.masks.sobol import SobolMasks
from monai_saliency.masks.supervoxels import Supervoxels, whole_image
from monai_saliency.targets import Target
from monai_saliency.utils.arguments import flag, whole_number

__all__ = [
    "rise",
    "sliding_window",
    "patch_windows",
    "hierarchical_occlusion",
    "region_occlusion",
    "channel_occlusion",
    "hsic",
    "sobol",
    "minimal_region",
]


def rise(
    num_masks: int = 1000,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
    per_channel: bool = False,
    form: str = "centred",
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """RISE (Petsiuk et al., BMVC 2018): random masks, and how far keeping a voxel raises the score.

    Args:
        num_masks: how many masks. The map's noise falls with the square root of this number.
        grid_size: cells along each axis, one number or one per axis: finer cells, finer maps, more masks needed.
        p1: probability in (0, 1] that a cell is kept.
        seed: of the random masks.
        per_channel: draw masks for each channel independently, and make a map for each channel.
        form: ``"centred"``, or a published form for comparison: ``"debiased"`` or ``"plain"``
            (:class:`~monai_saliency.RISEScoring`).
        target: which number is explained.
        estimator: ``RISEScoring(p1, form)`` by default.
        settings: shared by all methods, see the top of this module.
    """
    masks: Masks = RISEMasks(num_masks, grid_size, p1, seed)
    masks = IndependentChannelMasks(masks) if flag("per_channel", per_channel) else masks
    return PerturbationInferer(masks, target, estimator or RISEScoring(p1, form), **settings)


def sliding_window(
    window_size: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    per_channel: bool = False,
    smooth: float | Sequence[float] = 0,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Sliding-window occlusion (Zeiler and Fergus, ECCV 2014, section 4.2).

    Args:
        window_size: edge of the hidden box, one number or one per axis; an eighth of each axis by default.
        stride: step from window to window, one number or one per axis; half of the window by default.
        window_unit: of both: ``"voxel"`` (of the network's input) or ``"mm"``.
        per_channel: hide one channel at a time, and make a map for each channel.
        smooth: width in voxels over which the edge of a window rises, one number or one per axis; crisp by default.
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: when ``window_unit`` is another word.
    """
    _check_unit(window_unit)
    masks: Masks = SlidingWindowMasks(window_size, stride, window_unit, smooth)
    masks = ChannelMasks(masks) if flag("per_channel", per_channel) else masks
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), **settings)


def patch_windows(
    inferer: Inferer,
    divide: int | None = None,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Sliding-window occlusion on the grid of a sliding-window model's patches: the cheapest map of such a model.

    Each window touches the fewest patches, and only those are run (:mod:`monai_saliency.inferers.patches`): with half
    overlap, volumes of 128^3 and patches of 48^3, 6 of 125 on average, against 16 for windows of that size elsewhere.

    Args:
        inferer: runs the network: a ``SlidingWindowInferer``, or an inferer that holds one. It decides where patches
            lie.
        divide: windows for each step from patch to patch along each axis: 2 halves their edges, for a finer map. By
            default as many as cost at most 50 predictions of the image.
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default.
        settings: shared by all methods, see the top of this module.
    """
    masks = PatchWindowMasks(inside_of(inferer) or inferer, divide)  # type: ignore[arg-type]
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), inferer=inferer, **settings)


def hierarchical_occlusion(
    window_size: float | Sequence[float] | None = None,
    levels: int = 4,
    keep: float = 0.08,
    window_unit: str = "voxel",
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Windows that are halved in rounds where hiding them lets the score fall most: a fine map from few forwards (HiPe,
    Cooper et al., arXiv 2103.05108).

    Under a ``SlidingWindowInferer`` the windows lie on the grid of its patches, as those of :func:`patch_windows`.

    Args:
        window_size: edge of a window of the first level, one number or one per axis. By default there are about 64;
            under a ``SlidingWindowInferer`` it is the step from patch to patch.
        levels: how many sizes, each half as long as the one before.
        keep: share of a level's windows that is refined.
        window_unit: of ``window_size``: ``"voxel"`` (of the network's input) or ``"mm"``.
        target: which number is explained.
        estimator: ``HierarchicalScoring()`` by default.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: when ``window_unit`` is another word.
    """
    _check_unit(window_unit)
    cuts = inside_of(settings.get("inferer"))
    masks = HierarchicalMasks(window_size, levels, keep, window_unit, cuts)
    return PerturbationInferer(masks, target, estimator or HierarchicalScoring(), **settings)


def region_occlusion(
    num_coalitions: int | None = None,
    p1: float = 0.5,
    seed: int = 0,
    regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
    num_supervoxels: int | None = None,
    per_channel: bool = False,
    smooth: float | Sequence[float] = 0,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Occlusion of whole regions, organs or supervoxels: which organ?

    By default each region is hidden in turn, and its value, the same on all its voxels, is how far the score falls.
    With ``num_coalitions`` random sets of regions are hidden together, which also finds regions that stand in for each
    other, and the value is RISE's, centred.

    Args:
        num_coalitions: how many random sets of regions; each region is hidden in turn by default.
        p1: probability in (0, 1] that a region is kept in a random set.
        seed: of random sets.
        regions: makes the regions of an image, such as ``Supervoxels(200, compactness=0.5)``; by default they are those
            of the case's label map.
        num_supervoxels: about how many regions to make of the image itself, as ``regions=Supervoxels(...)`` does.
        per_channel: hide one channel at a time, and make a map for each channel.
        smooth: width in voxels over which the edge of a region rises, one number or one per axis; crisp by default.
            With it, a map changes inside a region, near its edge.
        target: which number is explained.
        estimator: by default ``OcclusionScoring()``, or ``RISEScoring(p1)`` with ``num_coalitions``.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: when a number is not a whole number of at least 1, or both ``regions`` and ``num_supervoxels`` are
            given.
    """
    if num_coalitions is not None:
        whole_number("num_coalitions", num_coalitions, 1)
    if num_supervoxels is not None:
        whole_number("num_supervoxels", num_supervoxels, 1)
        if regions is not None:
            raise ValueError("give `regions` or `num_supervoxels`, not both: each makes the regions of an image")
        regions = Supervoxels(num_supervoxels)
    masks: Masks = RegionMasks(num_coalitions, p1, seed, regions, smooth)
    if flag("per_channel", per_channel):
        masks = ChannelMasks(masks) if num_coalitions is None else IndependentChannelMasks(masks)
    default = OcclusionScoring() if num_coalitions is None else RISEScoring(p1)
    return PerturbationInferer(masks, target, estimator or default, **settings)


def channel_occlusion(*, target: Target, estimator: Estimator | None = None, **settings: Any) -> PerturbationInferer:
    """Occlusion of one whole channel at a time: which modality? One forward each.

    Args:
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default. The map of a channel is flat: the score's fall, everywhere.
        settings: shared by all methods, see the top of this module.
    """
    return region_occlusion(regions=whole_image, per_channel=True, target=target, estimator=estimator, **settings)


def hsic(
    num_masks: int = 1000,
    grid_size: int | Sequence[int] = 8,
    seed: int = 0,
    regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
    by_label: bool = False,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """HSIC attribution (Novello, Fel and Vigouroux, NeurIPS 2022): random grids, and how strongly the score depends on
    whether a cell is kept. The value has no sign and is not in the score's unit.

    Args:
        num_masks: how many grids, each cell kept with probability 1/2.
        grid_size: cells along each axis, one number or one per axis.
        seed: of the random grids.
        regions: makes regions of an image instead of cells, such as ``Supervoxels(200)``.
        by_label: take the regions of the case's label map instead of cells.
        target: which number is explained.
        estimator: ``HSICScoring()`` by default.
        settings: shared by all methods, see the top of this module.
    """
    masks = GridMasks(num_masks, grid_size, 0.5, seed, regions, flag("by_label", by_label))
    return PerturbationInferer(masks, target, estimator or HSICScoring(), **settings)


def sobol(
    num_designs: int = 32,
    grid_size: int | Sequence[int] | None = None,
    seed: int = 0,
    regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
    by_label: bool = False,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Total Sobol indices (Fel et al., NeurIPS 2021): cells dimmed by a design of random numbers, and the share of the
    score's variance that each has a part in, alone or with others. It takes ``num_designs * (cells + 2)`` forwards.

    Args:
        num_designs: how many designs, at least 2, best a power of 2.
        grid_size: cells along each axis, one number or one per axis; 8 in 2D and 4 in 3D by default.
        seed: of the designs.
        regions: makes regions of an image instead of cells, such as ``Supervoxels(40)``.
        by_label: take the regions of the case's label map instead of cells.
        target: which number is explained.
        estimator: ``SobolScoring()`` by default.
        settings: shared by all methods, see the top of this module.
    """
    masks = SobolMasks(num_designs, grid_size, seed, regions, flag("by_label", by_label))
    return PerturbationInferer(masks, target, estimator or SobolScoring(), **settings)


def minimal_region(
    share: float = 0.9,
    window_size: float | Sequence[float] | None = None,
    levels: int = 4,
    keep: float = 0.08,
    window_unit: str = "voxel",
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """The smallest set of windows that keeps the score when all else is hidden: an answer that can be checked.

    Windows are ranked as by :func:`hierarchical_occlusion`, then the number of windows that is needed is searched
    (:class:`~monai_saliency.MinimalMasks`). The map is 1 inside the region and 0 outside; ``explanation.masks.found``
    gives its voxels, and the scores with the region kept and hidden.

    Args:
        share: of the score's rise from the fill to the image that the region keeps, in (0, 1].
        window_size: edge of a window of the first level, as for :func:`hierarchical_occlusion`.
        levels: how many sizes, each half as long as the one before.
        keep: share of a level's windows that is refined.
        window_unit: of ``window_size``: ``"voxel"`` (of the network's input) or ``"mm"``.
        target: which number is explained.
        estimator: ``MinimalRegionScoring()`` by default.
        settings: shared by all methods, see the top of this module.
    """
    _check_unit(window_unit)
    masks = MinimalMasks(share, window_size, levels, keep, window_unit, inside_of(settings.get("inferer")))
    return PerturbationInferer(masks, target, estimator or MinimalRegionScoring(), **settings)


def _check_unit(window_unit: str) -> None:
    if window_unit not in ("voxel", "mm"):
        raise ValueError(f"`window_unit` must be 'voxel' or 'mm', got {window_unit!r}")
