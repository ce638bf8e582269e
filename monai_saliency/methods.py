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
from monai_saliency.estimators.focused import FocusedScoring
from monai_saliency.estimators.hierarchical import HierarchicalScoring
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.estimators.shapley import ShapleyScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.unwrapped import inside_of
from monai_saliency.masks.base import Masks
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.coalition import CoalitionMasks
from monai_saliency.masks.focused import FocusedMasks
from monai_saliency.masks.hierarchical import HierarchicalMasks
from monai_saliency.masks.patch_window import PatchWindowMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.masks.supervoxels import Supervoxels, whole_image
from monai_saliency.masks.until import UntilMasks
from monai_saliency.targets import Target
from monai_saliency.utils.arguments import flag, whole_number

__all__ = [
    "rise",
    "sliding_window",
    "patch_windows",
    "hierarchical_occlusion",
    "focused_rise",
    "region_occlusion",
    "channel_occlusion",
    "shapley",
]

# The largest number of random masks, where rounds end by themselves.
_BUDGET = 4000


def rise(
    num_masks: int | None = None,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
    per_channel: bool = False,
    form: str = "centred",
    until: float | None = None,
    budget: int | None = None,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """RISE (Petsiuk et al., BMVC 2018): random masks, and how far keeping a voxel raises the score.

    Args:
        num_masks: how many masks, 1000 by default. The map's noise falls with the square root of this number. With
            ``until``, masks of the first round, 100 by default.
        grid_size: cells along each axis, one number or one per axis: finer cells, finer maps, more masks needed.
        p1: probability in (0, 1] that a cell is kept.
        seed: of the random masks.
        per_channel: draw masks for each channel independently, and make a map for each channel.
        form: ``"centred"``, or a published form for comparison: ``"debiased"`` or ``"plain"``
            (:class:`~monai_saliency.RISEScoring`).
        until: stop when the map agrees so well with one of as many other masks, by the correlation of its two halves,
            above 0 and below 1 (:class:`~monai_saliency.UntilMasks`). By default all masks are scored.
        budget: the largest number of masks with ``until``, 4000 by default.
        target: which number is explained.
        estimator: ``RISEScoring(p1, form)`` by default.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: for settings out of range or that contradict each other.
    """
    most = _most(1000 if num_masks is None else num_masks, until, budget)
    masks: Masks = RISEMasks(most, grid_size, p1, seed)
    masks = IndependentChannelMasks(masks) if flag("per_channel", per_channel) else masks
    estimator = estimator or RISEScoring(p1, form)
    masks = masks if until is None else UntilMasks(masks, estimator, until, num_masks)
    return PerturbationInferer(masks, target, estimator, **settings)


def sliding_window(
    window_size: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    per_channel: bool = False,
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
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: when ``window_unit`` is another word.
    """
    _check_unit(window_unit)
    masks: Masks = SlidingWindowMasks(window_size, stride, window_unit)
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


def focused_rise(
    num_masks: int = 200,
    grid_size: int = 5,
    window_size: float | Sequence[float] | None = None,
    levels: int = 3,
    keep: float = 0.06,
    p1: float = 0.5,
    seed: int = 0,
    max_foci: int = 4,
    window_unit: str = "voxel",
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Windows find where the evidence lies (:func:`hierarchical_occlusion`), then RISE's masks inside what they found
    show its shape: a sharp map from a few hundred forwards.

    Where nothing stands out, as in a healthy scan, the masks perturb the whole image.

    Args:
        num_masks: random masks for each explained score; several places with evidence share them.
        grid_size: cells of the random masks along each axis, each as large as a window of the last level.
        window_size: edge of a window of the first level, as for :func:`hierarchical_occlusion`.
        levels: how many sizes of windows, each half as long as the one before.
        keep: share of a level's windows that is refined.
        p1: probability in (0, 1) that a cell is kept.
        seed: of the random masks.
        max_foci: places with evidence, at the most.
        window_unit: of ``window_size``: ``"voxel"`` (of the network's input) or ``"mm"``.
        target: which number is explained.
        estimator: ``FocusedScoring(p1)`` by default.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: when ``window_unit`` is another word.
    """
    _check_unit(window_unit)
    cuts = inside_of(settings.get("inferer"))
    masks = FocusedMasks(num_masks, grid_size, window_size, levels, keep, p1, seed, max_foci, window_unit, cuts)
    return PerturbationInferer(masks, target, estimator or FocusedScoring(p1), **settings)


def region_occlusion(
    num_coalitions: int | None = None,
    p1: float = 0.5,
    seed: int = 0,
    regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
    num_supervoxels: int | None = None,
    per_channel: bool = False,
    until: float | None = None,
    budget: int | None = None,
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
        num_coalitions: how many random sets of regions; each region is hidden in turn by default. With ``until``, sets
            of the first round.
        p1: probability in (0, 1] that a region is kept in a random set.
        seed: of random sets.
        regions: makes the regions of an image, such as ``Supervoxels(200, compactness=0.5)``; by default they are those
            of the case's label map.
        num_supervoxels: about how many regions to make of the image itself, as ``regions=Supervoxels(...)`` does.
        per_channel: hide one channel at a time, and make a map for each channel.
        until: stop when the regions' values agree so well with those of as many other random sets, as for
            :func:`rise`. By default all sets are scored.
        budget: the largest number of random sets with ``until``, 4000 by default.
        target: which number is explained.
        estimator: by default ``OcclusionScoring()``, or ``RISEScoring(p1)`` with ``num_coalitions``.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: when a number is not a whole number of at least 1, both ``regions`` and ``num_supervoxels`` are
            given, or ``until`` is given without ``num_coalitions``.
    """
    if num_coalitions is not None:
        whole_number("num_coalitions", num_coalitions, 1)
    if until is not None and num_coalitions is None:
        raise ValueError("`until` needs random sets of regions: give `num_coalitions`, how many the first round has")
    found = _regions(regions, num_supervoxels)
    masks: Masks = RegionMasks(_most(num_coalitions, until, budget), p1, seed, found)
    if flag("per_channel", per_channel):
        masks = ChannelMasks(masks) if num_coalitions is None else IndependentChannelMasks(masks)
    estimator = estimator or (OcclusionScoring() if num_coalitions is None else RISEScoring(p1))
    if until is not None:
        masks = UntilMasks(masks, estimator, until, num_coalitions)
    return PerturbationInferer(masks, target, estimator, **settings)


def channel_occlusion(*, target: Target, estimator: Estimator | None = None, **settings: Any) -> PerturbationInferer:
    """Occlusion of one whole channel at a time: which modality? One forward each.

    Args:
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default. The map of a channel is flat: the score's fall, everywhere.
        settings: shared by all methods, see the top of this module.
    """
    return region_occlusion(regions=whole_image, per_channel=True, target=target, estimator=estimator, **settings)


def shapley(
    num_coalitions: int | None = None,
    regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
    seed: int = 0,
    num_supervoxels: int | None = None,
    background: bool = True,
    per_channel: bool = False,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Shapley values of regions (Shapley 1953): what each organ or supervoxel adds to the score, on average over all
    orders in which they may come into the image.

    The values of the regions sum to the score of the image less the score of the fill. A region's value stands on all
    its voxels; :func:`~monai_saliency.shapley_values` gives the regions' values. They are exact by default, for at most
    14 regions. Under a ``SlidingWindowInferer``, and for a target that is a mean over voxels
    (:class:`~monai_saliency.RegionScore`), only regions that meet in the patches over one voxel count: dozens of organs
    are exact too, from at most as many forwards of a patch as there are sets of the regions in it. Of a mean of the
    network's output as it is (``activation="none"``) only regions that meet in one patch count.

    Args:
        num_coalitions: how many sets of regions are scored for an estimate (KernelSHAP, Leverage SHAP: arXiv
            2410.01917): ten for each region are a good start, three the least. All are scored by default.
        regions: makes the regions of an image, such as ``Supervoxels(10)``; by default they are those of the case's
            label map.
        seed: of random sets.
        num_supervoxels: about how many regions to make of the image itself, as ``regions=Supervoxels(...)`` does.
        background: whether the voxels of no region, label 0, are a region too. If not, they are always kept, and the
            sum is what all regions together add to them.
        per_channel: whether each channel of each region has a value of its own, and a map for each channel.
        target: which number is explained.
        estimator: ``ShapleyScoring()`` by default.
        settings: shared by all methods, see the top of this module.

    Raises:
        ValueError: when a number is not a whole number of at least 1, or both ``regions`` and ``num_supervoxels`` are
            given.
    """
    cuts = inside_of(settings.get("inferer")) if getattr(target, "is_additive", False) else None
    makes, linear = _regions(regions, num_supervoxels), bool(getattr(target, "is_linear", False))
    masks = CoalitionMasks(num_coalitions, seed, makes, background, per_channel, cuts, linear)
    return PerturbationInferer(masks, target, estimator or ShapleyScoring(), **settings)


def _regions(regions: Any, num_supervoxels: int | None) -> Any:
    """What makes the regions of an image; None for the case's label map."""
    if num_supervoxels is None:
        return regions
    whole_number("num_supervoxels", num_supervoxels, 1)
    if regions is not None:
        raise ValueError("give `regions` or `num_supervoxels`, not both: each makes the regions of an image")
    return Supervoxels(num_supervoxels)


def _most(count: Any, until: float | None, budget: int | None) -> Any:
    """The largest number of random masks: ``count``, or the budget of ``until``."""
    if until is not None:
        return whole_number("budget", _BUDGET if budget is None else budget, 1)
    if budget is not None:
        raise ValueError(f"`budget` {budget} is the largest number of masks under `until`: give `until` too")
    return count


def _check_unit(window_unit: str) -> None:
    if window_unit not in ("voxel", "mm"):
        raise ValueError(f"`window_unit` must be 'voxel' or 'mm', got {window_unit!r}")
