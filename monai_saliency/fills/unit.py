"""A fill as a config gives it: a number with its unit, or a fill."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.constant import ConstantFill
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.utils.arguments import check_option

__all__ = ["fill_in_unit"]


def fill_in_unit(
    fill: Any,
    unit: str = "network",
    transform: Callable[[Any], Any] | None = None,
    key: Hashable = "image",
    id: str = "fill",
) -> Any:
    """A fill of one value in a unit.

    Args:
        fill: a number, or one per channel; a fill is taken as it is.
        unit: ``"network"`` for the network's input space, ``"scan"`` for the file's own units (such as HU).
        transform: the preprocessing, needed for ``"scan"``.
        key: where the items of ``transform`` hold the image.
        id: what errors call the fill; the unit is ``<id>_unit``.

    Raises:
        ValueError: when the unit is another one, or does not suit the fill.

    Example::

        >>> import torch
        >>> fill_in_unit(0.5)(torch.ones(1, 1, 1, 2)).tolist()
        [[[[0.5, 0.5]]]]
    """
    check_option(f"{id}_unit", unit, ["network", "scan"])
    if isinstance(fill, CaseFill) or callable(fill):
        if unit == "scan":
            raise ValueError(f"`{id}_unit` scan needs a `{id}` that is a number, got a {type(fill).__name__}")
        return fill
    if unit == "network":
        return ConstantFill(fill)
    if transform is None:
        raise ValueError(f"`{id}_unit` scan needs the bundle's preprocessing, which its loader hides")
    return ScanUnitFill(fill, transform, key)
