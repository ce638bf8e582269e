"""Every method, with settings such that it takes about a given number of forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import monai_saliency as ms

__all__ = ["METHODS", "full_occlusion"]

Explain = ms.PerturbationInferer


def full_occlusion(shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """Occlusion at full resolution: windows of 2 voxels side by side, whatever that costs."""
    return ms.sliding_window(2, 2, target=target, **settings)


def _windows(budget: int, shape: Sequence[int], target: ms.Target, smooth: bool = False, **settings: Any) -> Explain:
    """Windows of two strides along each axis, as by default."""
    most = round(budget ** (1 / len(shape)))
    strides = [
        [max(1, -(-n // count)) for n in shape] for count in range(max(2, most - 1), most + 3)
    ]  # of several numbers of windows, the nearest below the budget
    fits = [stride for stride in strides if len(_bound(shape, [2 * s for s in stride], stride)) <= budget]
    stride = fits[-1] if fits else strides[0]
    size = [min(2 * s, n) for s, n in zip(stride, shape, strict=True)]
    return ms.sliding_window(size, stride, smooth=stride if smooth else 0, target=target, **settings)


def _bound(shape: Sequence[int], size: Sequence[int], stride: Sequence[int]) -> ms.masks.BoundMasks:
    size = [min(edge, n) for edge, n in zip(size, shape, strict=True)]
    return ms.SlidingWindowMasks(size, stride).bind(torch.empty(1, *shape, device="meta"))


def _smooth_windows(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    return _windows(budget, shape, target, smooth=True, **settings)


def _hierarchy(budget: int, shape: Sequence[int], target: ms.Target, levels: int = 4, **settings: Any) -> Explain:
    """The smallest first windows that leave half of the budget for refining, and as many of them as it allows."""
    window, keep = _fitting(budget, shape, levels)
    return ms.hierarchical_occlusion(window, levels, keep, target=target, **settings)


def _fitting(budget: int, shape: Sequence[int], levels: int) -> tuple[int, float]:
    image = torch.empty(1, *shape, device="meta")
    best: tuple[int, float] | None = None
    for window, keep in itertools.product((32, 24, 16, 12, 8), (0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.2, 0.3, 0.4)):
        if all(window >= n for n in shape):
            continue
        bound = ms.HierarchicalMasks(window, levels, keep).bind(image)
        if bound.at_most <= budget and len(bound.first_round()) <= budget / 2:
            best = window, keep
    if best is None:
        raise ValueError(f"no hierarchy of {levels} levels fits into {budget} forwards")
    return best


def _focused(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    return ms.focused_rise(max(8, budget - 10), target=target, **settings)


def _rise(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    return ms.rise(budget, target=target, **settings)


def _hsic(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    return ms.hsic(budget, target=target, **settings)


def _sobol(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """The finest grid, of at most 8 cells along an axis, for which there are four designs."""
    grid = max(g for g in range(2, 9) if g == 2 or 4 * (g ** len(shape) + 2) <= budget)
    designs = max(2, budget // (grid ** len(shape) + 2))
    return ms.sobol(designs, grid, target=target, **settings)


def _shapley(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """Ten coalitions for each supervoxel, and at most 100 of these."""
    return ms.shapley(budget, num_supervoxels=min(100, max(8, budget // 10)), target=target, **settings)


def _minimal(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """A quarter of the forwards is left for the search of the size."""
    window, keep = _fitting(3 * budget // 4, shape, 4)
    return ms.minimal_region(0.9, window, 4, keep, target=target, **settings)


def _integrated(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """White-box: a derivative costs about three forwards."""
    return ms.integrated_gradients(max(1, budget // 3), target=target, **settings)


def _smoothgrad(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    return ms.smoothgrad(max(1, budget // 3), target=target, **settings)


def _smoothgrad_absolute(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """As in the paper's pictures."""
    return ms.smoothgrad(max(1, budget // 3), reading="absolute", target=target, **settings)


def _grad_cam(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """It takes one derivative, whatever the budget."""
    return ms.grad_cam(target=target, **settings)


#: by its name what makes a method of a budget, for images of a shape, with what all methods share
METHODS: dict[str, Callable[..., Explain]] = {
    "sliding_window": _windows,
    "sliding_window_smooth": _smooth_windows,
    "hierarchical_occlusion": _hierarchy,
    "focused_rise": _focused,
    "rise": _rise,
    "hsic": _hsic,
    "sobol": _sobol,
    "shapley": _shapley,
    "minimal_region": _minimal,
    "integrated_gradients": _integrated,
    "smoothgrad": _smoothgrad,
    "smoothgrad_absolute": _smoothgrad_absolute,
    "grad_cam": _grad_cam,
}
