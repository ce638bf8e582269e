"""Windows, discs and balls that are hidden in turn, or refined where they matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai.inferers import Inferer

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.occlusion import (
    HierarchicalScoring,
    MinimalRegionScoring,
    OcclusionScoring,
    SimilarityScoring,
    SquaredDifferenceScoring,
)
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import MakesRegions, Masks
from monai_saliency.masks.channel import ChannelMasks
from monai_saliency.masks.hierarchical import HierarchicalMasks, RegionHierarchyMasks
from monai_saliency.masks.minimal import MinimalMasks
from monai_saliency.masks.sliding_radial import SlidingRadialMasks
from monai_saliency.masks.sliding_window import MultiScaleWindowMasks, PatchWindowMasks, SlidingWindowMasks
from monai_saliency.methods.arguments import TargetLike, method
from monai_saliency.utils.arguments import flag, sliding_inferer

__all__ = [
    "sliding_window",
    "multi_scale_window",
    "patch_windows",
    "hierarchical_occlusion",
    "minimal_region",
    "sliding_radial",
    "squared_difference",
    "sbsm",
]


@method
def sliding_window(
    window_size: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    per_channel: bool = False,
    smooth: float | Sequence[float] = 0,
    *,
    target: TargetLike = None,
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
        estimator: ``OcclusionScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = sliding_window(2, 2, target=ClassScore([0], "none"))
        >>> explain(torch.ones(1, 1, 2, 4), lambda images: images.flatten(1).sum(1, True)).tolist()
        [[[[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]]]
    """
    masks: Masks = SlidingWindowMasks(window_size, stride, window_unit, smooth)
    masks = ChannelMasks(masks) if flag("per_channel", per_channel) else masks
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), **settings)


@method
def multi_scale_window(
    window_size: float | Sequence[float] | None = None,
    levels: int = 3,
    stride: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    per_channel: bool = False,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Sliding-window occlusion with windows of several sizes (Zeiler and Fergus, ECCV 2014, section 4.2): the average
    drop of the score over all windows that hide a voxel, of every size alike.

    Args:
        window_size: edge of the largest windows, one number or one per axis; a quarter of each axis by default.
        levels: how many sizes of windows, each half as long as the one before.
        stride: step between the largest windows, one number or one per axis; half of each window by default.
        window_unit: of both: ``"voxel"`` (of the network's input) or ``"mm"``.
        per_channel: hide one channel at a time, and make a map for each channel.
        estimator: ``OcclusionScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = multi_scale_window(4, levels=2, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 16, 16), lambda images: images[:, :, 5, 10])
        >>> bool(saliency[0, 0, 5, 10] == saliency.max())
        True
    """
    masks: Masks = MultiScaleWindowMasks(window_size, levels, stride, window_unit)
    masks = ChannelMasks(masks) if flag("per_channel", per_channel) else masks
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), **settings)


@method
def patch_windows(
    inferer: Inferer,
    divide: int | None = None,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Sliding-window occlusion on the grid of a sliding-window model's patches: the cheapest map of such a model.

    Each window touches the fewest patches, and only those are run (:mod:`monai_saliency.inferers.patches`): with half
    overlap, volumes of 128^3 and patches of 48^3, 6 of 125 on average, against 16 for windows of that size elsewhere.

    Args:
        inferer: runs the network: a ``SlidingWindowInferer``, or what holds one. It decides where patches lie.
        divide: windows for each step from patch to patch along each axis: 2 halves their edges, for a finer map. By
            default as many as cost at most 50 predictions of the image.
        estimator: ``OcclusionScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai.inferers import SlidingWindowInferer
        >>> from monai_saliency import RegionScore
        >>> explain = patch_windows(SlidingWindowInferer((8, 8), overlap=0.5), target=RegionScore(1, "softmax", "all"))
        >>> explain(torch.rand(1, 1, 16, 16), torch.nn.Conv2d(1, 2, 1)).shape
        torch.Size([1, 1, 16, 16])
    """
    masks = PatchWindowMasks(inferer, divide)  # type: ignore[arg-type]
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), inferer=inferer, **settings)


@method
def hierarchical_occlusion(
    window_size: float | Sequence[float] | None = None,
    levels: int = 4,
    keep: float = 0.08,
    window_unit: str = "voxel",
    regions: str | MakesRegions | None = None,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Windows that are halved in rounds where hiding them lets the score fall most: a fine map from few forwards (HiPe,
    Cooper et al., arXiv 2103.05108).

    Under a ``SlidingWindowInferer`` the windows lie on the grid of its patches, as in :func:`patch_windows`.
    With ``regions`` the first level is organs or supervoxels, and windows split the ones that matter: which
    organ, and where in it?

    A voxel's value is the sum of the score's falls, one for each window size that hid it. So it can exceed 1 for a
    probability: with four levels it lies between -4 and 4.

    Args:
        window_size: edge of a window of the first level, one number or one per axis. By default there are about 64;
            under a ``SlidingWindowInferer`` it is about the step from patch to patch, and up to four levels cost at
            most 40 predictions of the image for each score. With ``regions`` it is the size at the second level.
        levels: how many sizes, each half as long as the one before.
        keep: share of a level's windows that is refined.
        window_unit: of ``window_size``: ``"voxel"`` (of the network's input) or ``"mm"``.
        regions: makes the regions of the first level from an image, such as ``Supervoxels(50)``; ``"label_map"`` for
            the regions of the case's label map. By default the first level is windows.
        estimator: ``HierarchicalScoring()`` by default.

    Raises:
        ValueError: when ``window_unit`` or ``regions`` is another word.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = hierarchical_occlusion(window_size=4, levels=3, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 16, 16), lambda images: images[:, :, 5, 10])
        >>> divmod(int(saliency.argmax()), 16)
        (5, 10)
    """
    if isinstance(regions, str) and regions != "label_map":
        raise ValueError(f"`regions` must be 'label_map' or a function of an image, got {regions!r}")
    cuts = sliding_inferer(settings.get("inferer"))
    if regions is None:
        masks: Masks = HierarchicalMasks(window_size, levels, keep, window_unit, cuts)
    else:
        makes = None if isinstance(regions, str) else regions
        masks = RegionHierarchyMasks(makes, window_size, levels, keep, window_unit, cuts)
    return PerturbationInferer(masks, target, estimator or HierarchicalScoring(), **settings)


@method
def minimal_region(
    share: float = 0.9,
    window_size: float | Sequence[float] | None = None,
    levels: int = 4,
    keep: float = 0.08,
    window_unit: str = "voxel",
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """The smallest set of windows that keeps the score when all else is hidden: an answer that can be checked.

    Windows are ranked as by :func:`hierarchical_occlusion`, then the number of windows that is needed is searched
    (``MinimalMasks``). The map is 1 inside the region and 0 outside; the ``finding`` of each of
    ``explanation.observed`` gives its voxels, and the scores with the region kept and hidden.

    Args:
        share: of the score's rise from the fill to the image that the region keeps, in (0, 1].
        window_size: edge of a window of the first level, as for :func:`hierarchical_occlusion`.
        levels: how many sizes, each half as long as the one before.
        keep: share of a level's windows that is refined.
        window_unit: of ``window_size``: ``"voxel"`` (of the network's input) or ``"mm"``.
        estimator: ``MinimalRegionScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = minimal_region(window_size=4, levels=3, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 16, 16), lambda images: images[:, :, 5, 10])
        >>> float(saliency.sum()), float(saliency[0, 0, 5, 10])
        (1.0, 1.0)
    """
    cuts = sliding_inferer(settings.get("inferer"))
    masks = MinimalMasks(share, HierarchicalMasks(window_size, levels, keep, window_unit, cuts))
    return PerturbationInferer(masks, target, estimator or MinimalRegionScoring(), **settings)


@method
def sliding_radial(
    radius: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    sigma: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    per_channel: bool = False,
    *,
    target: TargetLike = None,
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
        estimator: ``OcclusionScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = sliding_radial(2, stride=1, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 9, 9), lambda images: images[:, :, 4, 6])
        >>> divmod(int(saliency.argmax()), 9)
        (4, 6)
    """
    masks: Masks = SlidingRadialMasks(radius, stride, sigma, window_unit)
    masks = ChannelMasks(masks) if flag("per_channel", per_channel) else masks
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), **settings)


@method
def squared_difference(
    radius: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    sigma: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Perturbation saliency (Greydanus et al., ICML 2018): discs or balls that slide over the image, and half the
    squared change of the score. The value has no sign and is not in the score's unit.

    The paper's own settings are for a small image: ``radius=1, stride=5, sigma=5``, and the fill ``BlurFill(3)``.

    Args:
        radius: half axes of the ellipsoid, one number or one per axis; a sixteenth of each axis by default.
        stride: step from centre to centre, one number or one per axis; the radius by default.
        sigma: standard deviation of the Gaussian that blurs a mask, one number or one per axis; crisp by default.
        window_unit: of all three: ``"voxel"`` (of the network's input) or ``"mm"``.
        estimator: ``SquaredDifferenceScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = squared_difference(1, stride=1, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 7, 7), lambda images: -images[:, :, 3, 4])
        >>> divmod(int(saliency.argmax()), 7), float(saliency.min())
        ((3, 4), 0.0)
    """
    masks = SlidingRadialMasks(radius, stride, sigma, window_unit)
    return PerturbationInferer(masks, target, estimator or SquaredDifferenceScoring(), **settings)


@method
def sbsm(
    window_size: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Similarity-based saliency maps, SBSM (Dong et al., CVPR workshops 2019): sliding windows, and how much similarity
    to a query is lost while a voxel is hidden. The value has no sign.

    Which similarity is the target's: ``EmbeddingSimilarity("distance", reference=queries)`` explains the distances to
    some embeddings, each by its own map.

    Args:
        window_size: edge of the hidden box, one number or one per axis; an eighth of each axis by default.
        stride: step from window to window, one number or one per axis; half of the window by default.
        window_unit: of both: ``"voxel"`` (of the network's input) or ``"mm"``.
        target: which number is explained, best an :class:`~monai_saliency.EmbeddingSimilarity`.
        estimator: ``SimilarityScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import EmbeddingSimilarity
        >>> explain = sbsm(2, 2, target=EmbeddingSimilarity("cosine"))
        >>> saliency = explain(torch.tensor([[[[3.0, 3.0, 0.0, 0.0], [3.0, 3.0, 1.0, 1.0]]]]), torch.nn.Flatten())
        >>> bool(saliency[0, 0, 0, 0] > saliency[0, 0, 0, 3] > 0)
        True
    """
    masks = SlidingWindowMasks(window_size, stride, window_unit)
    return PerturbationInferer(masks, target, estimator or SimilarityScoring(), **settings)
