"""Random masks over the image, or where windows found the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.regression import RegressionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.masks.channel import IndependentChannelMasks
from monai_saliency.masks.focused import FocusedMasks
from monai_saliency.masks.rise import RandomGridMasks, RISEMasks
from monai_saliency.masks.until import UntilMasks
from monai_saliency.methods.checks import check_unit, most_masks
from monai_saliency.targets import Target
from monai_saliency.utils.arguments import flag
from monai_saliency.utils.patch_grid import sliding_inferer

__all__ = ["rise", "random_grid", "focused_rise"]


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
            (:class:`~monai_saliency.RISEScoring`). ``"regression"`` is for extended evidence from few masks, as the
            first half of :func:`focused_rise` (:class:`~monai_saliency.RegressionScoring`).
        until: stop when the map agrees so well with one of as many other masks, by the correlation of its two halves,
            above 0 and below 1 (:class:`~monai_saliency.UntilMasks`). By default all masks are scored.
        budget: the largest number of masks with ``until``, 4000 by default.
        target: which number is explained.
        estimator: ``RISEScoring(p1, form)`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: for settings out of range or that contradict each other.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = rise(300, grid_size=4, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 12, 12), lambda images: images[:, :, 4:8, 4:8].mean((2, 3)))
        >>> bool(saliency[0, 0, 5:7, 5:7].mean() > 0.1), bool(saliency[0, 0, 0, 0] < 0.1)
        (True, True)
    """
    most = most_masks(1000 if num_masks is None else num_masks, until, budget)
    masks: Masks = RISEMasks(most, grid_size, p1, seed)
    masks = IndependentChannelMasks(masks) if flag("per_channel", per_channel) else masks
    estimator = estimator or (RegressionScoring() if form == "regression" else RISEScoring(p1, form))
    masks = masks if until is None else UntilMasks(masks, estimator, until, num_masks)
    return PerturbationInferer(masks, target, estimator, **settings)


def random_grid(
    num_masks: int | None = None,
    cell_size: float | Sequence[float] | None = None,
    p1: float = 0.5,
    seed: int = 0,
    window_unit: str = "voxel",
    per_channel: bool = False,
    form: str = "centred",
    until: float | None = None,
    budget: int | None = None,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """RISE with cells of one size in voxels or mm, whatever the scan's size (xaitk-saliency's ``RandomGrid``): random
    masks, and how far keeping a voxel raises the score.

    Args:
        num_masks: how many masks, as for :func:`rise`.
        cell_size: edge of a cell, one number or one per axis; an eighth of each axis by default.
        p1: probability in (0, 1] that a cell is kept.
        seed: of the random masks.
        window_unit: of ``cell_size``: ``"voxel"`` (of the network's input) or ``"mm"``.
        per_channel: draw masks for each channel independently, and make a map for each channel.
        form: ``"centred"``, ``"debiased"`` or ``"plain"``, as for :func:`rise`.
        until: stop when the map agrees so well with one of as many other masks, as for :func:`rise`.
        budget: the largest number of masks with ``until``, 4000 by default.
        target: which number is explained.
        estimator: ``RISEScoring(p1, form)`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: for settings out of range or that contradict each other.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = random_grid(300, cell_size=3, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 12, 12), lambda images: images[:, :, 4:8, 4:8].mean((2, 3)))
        >>> bool(saliency[0, 0, 5:7, 5:7].mean() > 0.1), bool(saliency[0, 0, 0, 0] < 0.1)
        (True, True)
    """
    check_unit(window_unit)
    most = most_masks(1000 if num_masks is None else num_masks, until, budget)
    masks: Masks = RandomGridMasks(most, cell_size, p1, seed, window_unit)
    masks = IndependentChannelMasks(masks) if flag("per_channel", per_channel) else masks
    estimator = estimator or RISEScoring(p1, form)
    masks = masks if until is None else UntilMasks(masks, estimator, until, num_masks)
    return PerturbationInferer(masks, target, estimator, **settings)


def focused_rise(
    num_masks: int | None = None,
    p1: float = 0.5,
    seed: int = 0,
    until: float | None = None,
    budget: int | None = None,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """RISE's masks find where the evidence lies, then finer masks there show its shape: a sharp map from a few hundred
    forwards, by one regression of the scores on all masks.

    Where nothing stands out, as in a healthy scan, there are more masks over the whole image.
    Where one place gives what another gives, such as two lesions, the image is looked at again with the first one
    hidden, and each place is perturbed with the others hidden.
    Under a ``SlidingWindowInferer`` windows on its patch grid find the place, and all outside of it is kept.

    Args:
        num_masks: random masks for each explained score, 340 by default, half of them over the whole image.
        p1: probability in (0, 1) that a cell is kept in the first half; fewer are hidden in the second.
        seed: of the random masks.
        until: more masks of the second half until the map agrees so well with one of as many other masks, as for
            :func:`rise`.
        budget: the largest number of random masks with ``until``, 4000 by default.
        target: which number is explained.
        estimator: ``RegressionScoring()`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: for settings out of range, or when ``budget`` is given without ``until``.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = focused_rise(100, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 16, 16), lambda images: images[:, :, 4:7, 9:12].mean((2, 3)))
        >>> row, column = divmod(int(saliency.argmax()), 16)
        >>> 4 <= row < 7, 9 <= column < 12
        (True, True)
    """
    regression, cuts = RegressionScoring(), sliding_inferer(settings.get("inferer"))
    count = 340 if num_masks is None else num_masks
    masks = FocusedMasks(regression, count, p1, seed, cuts, until, most_masks(count, until, budget))
    return PerturbationInferer(masks, target, estimator or regression, **settings)
