"""Random masks over the image, or where windows found the evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.dependence import HSICScoring, SobolScoring
from monai_saliency.estimators.regression import RegressionScoring
from monai_saliency.estimators.rise import DRISEScoring, MCRISEScoring, RISEScoring
from monai_saliency.fills.named import fill_in_unit
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.masks.channel import IndependentChannelMasks
from monai_saliency.masks.focused import FocusedMasks
from monai_saliency.masks.grid import GridMasks, SobolMasks
from monai_saliency.masks.rise import MCRISEMasks, RandomGridMasks, RISEMasks
from monai_saliency.masks.until import UntilMasks
from monai_saliency.methods.arguments import TargetLike, method
from monai_saliency.utils.arguments import flag, sliding_inferer, whole_number

__all__ = ["rise", "focused_rise", "random_grid", "mc_rise", "drise", "hsic", "sobol"]

Fill = float | Sequence[float] | Callable[[torch.Tensor], torch.Tensor]


@method
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
    target: TargetLike = None,
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
            (``RISEScoring``). ``"regression"`` is for extended evidence from few masks, as in :func:`focused_rise`
            (:class:`~monai_saliency.estimators.RegressionScoring`).
        until: stop when the map agrees so well with one of as many other masks, by the correlation of its two halves,
            above 0 and below 1 (:class:`~monai_saliency.masks.UntilMasks`). By default all masks are scored.
        budget: the largest number of masks with ``until``, 4000 by default.
        estimator: ``RISEScoring(p1, form)`` by default.

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


@method
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
    target: TargetLike = None,
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
        estimator: ``RISEScoring(p1, form)`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = random_grid(300, cell_size=3, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 12, 12), lambda images: images[:, :, 4:8, 4:8].mean((2, 3)))
        >>> bool(saliency[0, 0, 5:7, 5:7].mean() > 0.1), bool(saliency[0, 0, 0, 0] < 0.1)
        (True, True)
    """
    most = most_masks(1000 if num_masks is None else num_masks, until, budget)
    masks: Masks = RandomGridMasks(most, cell_size, p1, seed, window_unit)
    masks = IndependentChannelMasks(masks) if flag("per_channel", per_channel) else masks
    estimator = estimator or RISEScoring(p1, form)
    masks = masks if until is None else UntilMasks(masks, estimator, until, num_masks)
    return PerturbationInferer(masks, target, estimator, **settings)


@method
def focused_rise(
    num_masks: int | None = None,
    grid_size: int | Sequence[int] = 10,
    p1: float | str = "auto",
    seed: int = 0,
    until: float | None = None,
    budget: int | None = None,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """RISE's masks, which keep so much that half of the effect is left, and one regression of the scores on them: a
    sharp map from a few hundred forwards.

    Where one place gives what another gives, such as two lesions, masks keep little, so that often one of the two alone
    is left. Where all of a shape is needed they keep much. The scores so far decide.
    Where a grid has more cells than there are masks, as in 3D, the later half of the masks hides smaller cells, in the
    part of the image that holds the evidence, if a sixth of it does.
    Under a ``SlidingWindowInferer`` windows on its patch grid find the place, and all outside of it is kept.

    Args:
        num_masks: random masks for each explained score, 340 by default; half as many where windows find the place.
        grid_size: cells along each axis, one number or one per axis. 10 is the best of 8, 9, 10 and 12 on the
            first half of the tasks of ``tests/benchmarks/generalise.py``.
        p1: probability in (0, 1) that a cell is kept; ``"auto"`` finds it from the scores.
        seed: of the random masks.
        until: more masks, half as many again each time, until the map agrees so well with one of as many other masks,
            as for :func:`rise`.
        budget: the largest number of random masks with ``until``, 4000 by default.
        estimator: ``RegressionScoring()`` by default.

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
    masks = FocusedMasks(regression, count, grid_size, p1, seed, cuts, until, most_masks(count, until, budget))
    return PerturbationInferer(masks, target, estimator or regression, **settings)


@method
def mc_rise(
    num_masks: int = 1000,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
    more_fills: Sequence[Fill] | float = (1.0,),
    form: str = "centred",
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """MC-RISE (Hatakeyama et al., ACCV 2020): random masks whose hidden cells take one of several fills, such as
    colours, and for each fill a map of how far the image supports the score against it.

    Args:
        num_masks: how many masks. Each fill is seen in a share of them, so more fills need more masks.
        grid_size: cells along each axis, one number or one per axis: finer cells, finer maps, more masks needed.
        p1: probability above 0 and below 1 that a cell is kept.
        seed: of the random masks.
        more_fills: fills in addition to ``fill``, which is the first one: each a number, one number per channel such as
            ``[[1, 0, 0], [0, 1, 0]]``, or a fill such as ``BlurFill()``.
        form: ``"centred"``, or the published form for comparison, ``"debiased"``, of the other sign
            (:class:`~monai_saliency.estimators.MCRISEScoring`).
        estimator: ``MCRISEScoring(p1, form)`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = mc_rise(200, grid_size=2, more_fills=(5.0,), target=ClassScore([0], "none"))
        >>> maps = explain(torch.ones(1, 1, 4, 4), lambda images: images.flatten(1).mean(1, True))
        >>> maps.mean((2, 3)).sign().tolist()  # zeros lower this score, fives raise it
        [[1.0, -1.0]]
    """
    several = more_fills if isinstance(more_fills, (list, tuple)) else [more_fills]
    fills = [fill_in_unit(fill, id="more_fills") for fill in several]
    masks = MCRISEMasks(num_masks, fills, grid_size, p1, seed)
    return PerturbationInferer(masks, target, estimator or MCRISEScoring(p1, form), **settings)


@method
def drise(
    num_masks: int | None = None,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
    form: str = "centred",
    until: float | None = None,
    budget: int | None = None,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """D-RISE (Petsiuk et al., CVPR 2021): random masks, and how well a box is found while a voxel is kept.

    How well a box is found is the target's: ``DetectionScore()`` explains the boxes that the detector finds in the
    unperturbed image, each by its own map. The paper takes 5000 masks of 16 x 16 cells.

    Args:
        num_masks: how many masks, as for :func:`rise`.
        grid_size: cells along each axis, one number or one per axis: finer cells, finer maps, more masks needed.
        p1: probability in (0, 1] that a cell is kept.
        seed: of the random masks.
        form: ``"centred"``, or the published ``"plain"`` for comparison (``DRISEScoring``).
        until: stop when the map agrees so well with one of as many other masks, as for :func:`rise`.
        budget: the largest number of masks with ``until``, 4000 by default.
        target: which number is explained, best a :class:`~monai_saliency.DetectionScore`.
        estimator: ``DRISEScoring(form)`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import DetectionScore
        >>> def detector(images):  # one box, as sure as the pixels in it are bright
        ...     box, label = torch.tensor([[2.0, 2.0, 6.0, 6.0]]), torch.tensor([0])
        ...     bright = images[:, :, 2:6, 2:6].mean((2, 3))
        ...     return [{"boxes": box, "labels": label, "scores": each} for each in bright]
        >>> saliency = drise(200, grid_size=4, target=DetectionScore(threshold=0.5))(torch.ones(1, 1, 8, 8), detector)
        >>> bool(saliency[0, 0, 4, 4] > saliency[0, 0, 0, 0])
        True
    """
    most = most_masks(1000 if num_masks is None else num_masks, until, budget)
    masks: Masks = RISEMasks(most, grid_size, p1, seed)
    estimator = estimator or DRISEScoring(form)
    masks = masks if until is None else UntilMasks(masks, estimator, until, num_masks)
    return PerturbationInferer(masks, target, estimator, **settings)


@method
def hsic(
    num_masks: int = 1000,
    grid_size: int | Sequence[int] = 8,
    seed: int = 0,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """HSIC attribution (Novello, Fel and Vigouroux, NeurIPS 2022): random grids, and how strongly the score depends on
    whether a cell is kept. The value has no sign and is not in the score's unit.

    Args:
        num_masks: how many grids, each cell kept with probability 1/2.
        grid_size: cells along each axis, one number or one per axis.
        seed: of the random grids.
        estimator: ``HSICScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = hsic(300, grid_size=4, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 8, 8), lambda images: images[:, :, 2:4, 4:6].mean((2, 3)))
        >>> bool(saliency[0, 0, 3, 5] == saliency.max())
        True
    """
    masks = GridMasks(num_masks, grid_size, seed)
    return PerturbationInferer(masks, target, estimator or HSICScoring(), **settings)


@method
def sobol(
    num_designs: int = 32,
    grid_size: int | Sequence[int] | None = None,
    seed: int = 0,
    *,
    target: TargetLike = None,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Total Sobol indices (Fel et al., NeurIPS 2021): cells dimmed by a design of random numbers, and the share of the
    score's variance that each has a part in, alone or with others. It takes ``num_designs * (cells + 2)`` forwards.

    Args:
        num_designs: how many designs, at least 2, best a power of 2.
        grid_size: cells along each axis, one number or one per axis; 8 in 2D and 4 in 3D by default.
        seed: of the designs.
        estimator: ``SobolScoring()`` by default.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = sobol(32, grid_size=2, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 4, 4), lambda images: images[:, :, :2, :2].mean((2, 3)))
        >>> saliency[0, 0].round(decimals=1).tolist()
        [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    masks = SobolMasks(num_designs, grid_size, seed)
    return PerturbationInferer(masks, target, estimator or SobolScoring(), **settings)


def most_masks(count: Any, until: float | None, budget: int | None) -> Any:
    """The largest number of random masks: ``count``, or the budget of ``until``."""
    if until is not None:
        return whole_number("budget", 4000 if budget is None else budget, 1)
    if budget is not None:
        raise ValueError(f"`budget` {budget} is the largest number of masks under `until`: give `until` too")
    return count
