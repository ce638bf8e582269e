"""The methods, each named by its four parts: masks, fill, target and estimator. Read them beside the papers.

All take the same further arguments, passed on to :class:`~monai_saliency.inferers.PerturbationInferer`:

- ``target``: which number is explained (:mod:`monai_saliency.targets`);
- ``fill``: what replaces hidden voxels (:mod:`monai_saliency.fills`), zeros by default;
- ``estimator``: how scores become a map (:mod:`monai_saliency.estimators`), the method's own by default;
- ``inferer``: the MONAI inferer that runs the network on a batch, ``SimpleInferer`` by default;
- ``mask_batch_size``: perturbed images in one network batch, at the most;
- ``inputs``: how the network takes several inputs, and which are perturbed (:mod:`monai_saliency.inputs`);
- ``output``: which part of a structured output is read (:mod:`monai_saliency.outputs`);
- ``progress``: shows a progress bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monai_saliency.estimators import Estimator, OcclusionScoring, RISEScoring
from monai_saliency.inferers import PerturbationInferer
from monai_saliency.masks import RISEMasks, SlidingWindowMasks
from monai_saliency.targets import Target

__all__ = ["choose", "rise", "sliding_window"]


def rise(
    num_masks: int = 1000,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
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
        target: which number is explained.
        estimator: ``RISEScoring(p1)`` by default; ``RISEScoring()`` is the paper's plain form.
        settings: see this module's page.
    """
    masks = RISEMasks(num_masks, grid_size, p1, seed)
    return PerturbationInferer(masks, target, estimator or RISEScoring(p1), **settings)


def sliding_window(
    window_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Sliding-window occlusion (Zeiler and Fergus, ECCV 2014, section 4.2).

    Args:
        window_size: the hidden box's edge in voxels, one number or one per axis.
        stride: step in voxels, one number or one per axis; half of the window by default.
        target: which number is explained.
        estimator: ``OcclusionScoring()`` by default.
        settings: see this module's page.
    """
    masks = SlidingWindowMasks(window_size, stride)
    return PerturbationInferer(masks, target, estimator or OcclusionScoring(), **settings)


def choose(name: str, methods: Mapping[str, PerturbationInferer]) -> PerturbationInferer:
    """The method that a config names.

    Raises:
        ValueError: when there is none of that name.
    """
    if name not in methods:
        raise ValueError(f"`method` must be one of {sorted(methods)}, got {name!r}")
    return methods[name]
