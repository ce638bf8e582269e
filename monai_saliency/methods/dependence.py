"""How strongly the score depends on a cell: no sign, and not in the unit of the score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.dependence import HSICScoring, SobolScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.grid import GridMasks, SobolMasks
from monai_saliency.targets import Target
from monai_saliency.utils.arguments import flag

__all__ = ["hsic", "sobol"]


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
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = hsic(300, grid_size=4, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 8, 8), lambda images: images[:, :, 2:4, 4:6].mean((2, 3)))
        >>> bool(saliency[0, 0, 3, 5] == saliency.max())
        True
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
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = sobol(32, grid_size=2, target=ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 4, 4), lambda images: images[:, :, :2, :2].mean((2, 3)))
        >>> saliency[0, 0].round(decimals=1).tolist()
        [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    masks = SobolMasks(num_designs, grid_size, seed, regions, flag("by_label", by_label))
    return PerturbationInferer(masks, target, estimator or SobolScoring(), **settings)
