"""Which fill matters, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.rise import MCRISEScoring
from monai_saliency.fills.constant import fill_in_unit
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.rise import MCRISEMasks
from monai_saliency.targets import Target

__all__ = ["mc_rise"]

Fill = float | Sequence[float] | Callable[[torch.Tensor], torch.Tensor]


def mc_rise(
    num_masks: int = 1000,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
    more_fills: Sequence[Fill] | float = (1.0,),
    form: str = "centred",
    *,
    target: Target,
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
        more_fills: fills beside ``fill``, which is the first one: each a number, one number per channel such as
            ``[[1, 0, 0], [0, 1, 0]]``, or a fill such as ``BlurFill()``.
        form: ``"centred"``, or a published form for comparison: ``"debiased"`` or ``"xaitk"``, of the other sign
            (:class:`~monai_saliency.MCRISEScoring`).
        target: which number is explained.
        estimator: ``MCRISEScoring(p1, form)`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: for settings out of range.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = mc_rise(200, grid_size=2, more_fills=(5.0,), target=ClassScore([0], "none"))
        >>> maps = explain(torch.ones(1, 1, 4, 4), lambda images: images.flatten(1).mean(1, True))
        >>> maps.mean((2, 3)).sign().tolist()  # zeros lower this score, fives raise it
        [[1.0, -1.0]]
    """
    given = more_fills if isinstance(more_fills, (list, tuple)) else [more_fills]
    fills = [fill_in_unit(each, id="more_fills") for each in given]
    masks = MCRISEMasks(num_masks, fills, grid_size, p1, seed)
    return PerturbationInferer(masks, target, estimator or MCRISEScoring(p1, form), **settings)
