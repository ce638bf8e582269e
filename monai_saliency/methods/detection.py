"""What makes a detector find a box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.rise import DRISEScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.until import UntilMasks
from monai_saliency.methods.checks import most_masks
from monai_saliency.targets import Target

__all__ = ["drise"]


def drise(
    num_masks: int | None = None,
    grid_size: int | Sequence[int] = 8,
    p1: float = 0.5,
    seed: int = 0,
    form: str = "centred",
    until: float | None = None,
    budget: int | None = None,
    *,
    target: Target,
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
        form: ``"centred"``, or the published ``"plain"`` for comparison (:class:`~monai_saliency.DRISEScoring`).
        until: stop when the map agrees so well with one of as many other masks, as for :func:`rise`.
        budget: the largest number of masks with ``until``, 4000 by default.
        target: which number is explained, best a :class:`~monai_saliency.DetectionScore`.
        estimator: ``DRISEScoring(form)`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: for settings out of range or that contradict each other.

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
