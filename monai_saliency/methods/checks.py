"""Settings that several methods share."""

from __future__ import annotations

from typing import Any

from monai_saliency.utils.arguments import whole_number

__all__ = ["check_unit", "most_masks"]

# The largest number of random masks, where rounds end by themselves.
_BUDGET = 4000


def most_masks(count: Any, until: float | None, budget: int | None) -> Any:
    """The largest number of random masks: ``count``, or the budget of ``until``."""
    if until is not None:
        return whole_number("budget", _BUDGET if budget is None else budget, 1)
    if budget is not None:
        raise ValueError(f"`budget` {budget} is the largest number of masks under `until`: give `until` too")
    return count


def check_unit(window_unit: str) -> None:
    if window_unit not in ("voxel", "mm"):
        raise ValueError(f"`window_unit` must be 'voxel' or 'mm', got {window_unit!r}")
