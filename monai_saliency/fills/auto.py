"""The fill of a cohort, still to be chosen: the candidate that leaves least of the score when it hides everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from monai_saliency.cases import Case
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.blur import BlurFill
from monai_saliency.fills.constant import ConstantFill, MeanFill
from monai_saliency.fills.inpaint import InpaintFill

__all__ = ["AutoFill"]


class AutoFill(CaseFill):
    """Stands for a fill that is chosen once for a cohort by :func:`~monai_saliency.inferers.fill_choice.choose_fill`.

    Our bundle, the overlay and ``attach`` choose it, with ``fill: auto``. It fills nothing itself.

    Args:
        candidates: the fills to choose from by their names, the preferred one first; by default 0, the mean, the
            blurred image and an inpainted one.

    Raises:
        ValueError: from :meth:`bind`, since the fill is not chosen yet.

    Example::

        >>> list(AutoFill().candidates)
        ['0', 'mean', 'blur', 'inpaint']
    """

    def __init__(
        self, candidates: Mapping[str, Callable[[torch.Tensor], torch.Tensor] | CaseFill] | None = None
    ) -> None:
        default = {"0": ConstantFill(0.0), "mean": MeanFill(), "blur": BlurFill(), "inpaint": InpaintFill()}
        self.candidates = dict(candidates or default)

    def bind(self, case: Case) -> NoReturn:
        raise ValueError(
            "the fill 'auto' is chosen once for a cohort, by the bundle, the overlay and attach: give a fill such as "
            "ConstantFill(0.0), or choose one by monai_saliency.inferers.choose_fill"
        )
