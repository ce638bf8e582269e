"""The fill that a config or a flag names: a number with its unit, a word, or a fill; with ``auto`` it is still to be
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NoReturn

import torch

from monai_saliency.cases import Case
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.donor import DonorFill
from monai_saliency.fills.inpaint import InpaintFill
from monai_saliency.fills.mirror import MirrorFill
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.fills.simple import BlurFill, ConstantFill, MeanFill
from monai_saliency.utils.arguments import check_option


class AutoFill(CaseFill):
    """Stands for a fill that is chosen once for a cohort by :func:`~monai_saliency.inferers.choose_fill`.

    Our bundle, the overlay and ``attach`` choose it, with ``fill: auto``. It fills nothing itself.

    Args:
        candidates: the fills to choose from by their names, the preferred one first; by default 0, mean and blur.

    Raises:
        ValueError: from :meth:`bind`, since the fill is not chosen yet.

    Example::

        >>> list(AutoFill().candidates)
        ['0', 'mean', 'blur']
    """

    def __init__(
        self, candidates: Mapping[str, Callable[[torch.Tensor], torch.Tensor] | CaseFill] | None = None
    ) -> None:
        default = {"0": ConstantFill(0.0), "mean": MeanFill(), "blur": BlurFill()}
        self.candidates = dict(candidates or default)

    def __repr__(self) -> str:
        return "what auto chooses"

    def bind(self, case: Case) -> NoReturn:
        raise ValueError(
            "the fill 'auto' is chosen once for a cohort, by the bundle, the overlay and attach: give a fill such as "
            "ConstantFill(0.0), or choose one by monai_saliency.inferers.choose_fill"
        )


_WORDS = {"auto": AutoFill, "blur": BlurFill, "inpaint": InpaintFill, "mean": MeanFill, "mirror": MirrorFill}
_DONOR = "donor:"


def fill_in_unit(
    fill: Any,
    unit: str = "network",
    transform: Callable[[Any], Any] | None = None,
    key: Hashable = "image",
    id: str = "fill",
) -> Any:
    """Make the fill that a config or a flag names.

    Args:
        fill: a number, or one per channel; a word, ``"mean"``, ``"blur"``, ``"inpaint"`` or ``"mirror"``, for a fill
            with its default settings, or ``"auto"`` for one that is chosen for the cohort; ``"donor:<file>"`` for
            another scan; or a fill, which is returned unchanged.
        unit: of a number: ``"network"`` for the network's input space, ``"scan"`` for the file's own units (such as
            HU).
        transform: the preprocessing, needed for ``"scan"``; a donor goes through it too.
        key: where the items of ``transform`` hold the image.
        id: the name of the fill in errors; the unit is ``<id>_unit``.

    Raises:
        ValueError: for another word or unit, or when the unit does not suit the fill.

    Example::

        >>> import torch
        >>> fill_in_unit(0.5)(torch.ones(1, 1, 1, 2)).tolist()
        [[[[0.5, 0.5]]]]
        >>> fill_in_unit("mean")(torch.tensor([[[[1.0, 3.0]]]])).tolist()
        [[[[2.0, 2.0]]]]
    """
    check_option(f"{id}_unit", unit, ["network", "scan"])
    if isinstance(fill, str) and fill.startswith(_DONOR):
        fill = DonorFill(fill.removeprefix(_DONOR), transform, key)
    elif isinstance(fill, str):
        numbers = f", or a number such as 0 (or -1000 in the scan's HU, with `{id}_unit` scan)"
        fill = check_option(id, fill, {**_WORDS, f"{_DONOR}<file>": None}, numbers)()
    if isinstance(fill, CaseFill) or callable(fill):
        if unit == "scan":
            raise ValueError(f"`{id}_unit` scan needs a `{id}` that is a number, got a {type(fill).__name__}")
        return fill
    if unit == "network":
        return ConstantFill(fill)
    if transform is None:
        raise ValueError(f"`{id}_unit` scan needs the bundle's preprocessing, which its loader hides")
    return ScanUnitFill(fill, transform, key)
