"""Every method, with settings such that it takes about a given number of forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import monai_saliency as ms

__all__ = ["METHODS"]

Explain = ms.PerturbationInferer


def _windows(budget: int, shape: Sequence[int], target: ms.Target, smooth: bool = False, **settings: Any) -> Explain:
    """Windows of two strides along each axis, as by default."""
    most = round(budget ** (1 / len(shape)))
    strides = [
        [max(1, -(-n // count)) for n in shape] for count in range(max(2, most - 1), most + 3)
    ]  # of several numbers of windows, the nearest below the budget
    sizes = [[min(2 * s, n) for s, n in zip(stride, shape, strict=True)] for stride in strides]
    image = torch.empty(1, *shape, device="meta")
    fits = [
        (size, stride)
        for size, stride in zip(sizes, strides, strict=True)
        if len(ms.SlidingWindowMasks(size, stride).bind(image)) <= budget
    ]
    size, stride = fits[-1] if fits else (sizes[0], strides[0])
    return ms.sliding_window(size, stride, smooth=stride if smooth else 0, target=target, **settings)


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


def _sobol(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """The finest grid, of at most 8 cells along an axis, for which there are four designs."""
    grid = max(g for g in range(2, 9) if g == 2 or 4 * (g ** len(shape) + 2) <= budget)
    designs = max(2, budget // (grid ** len(shape) + 2))
    return ms.sobol(designs, grid, target=target, **settings)


def _minimal(budget: int, shape: Sequence[int], target: ms.Target, **settings: Any) -> Explain:
    """A quarter of the forwards is left for the search of the size."""
    window, keep = _fitting(3 * budget // 4, shape, 4)
    return ms.minimal_region(0.9, window, 4, keep, target=target, **settings)


def _of(make: Callable[[int], Callable[..., Explain]]) -> Callable[..., Explain]:
    """A method that does not look at the shape."""
    return lambda budget, shape, **settings: make(budget)(**settings)


#: by its name what makes a method of a budget, for images of a shape, with what all methods share; a derivative of a
#: white-box method costs about three forwards, and shapley takes ten coalitions for each supervoxel
METHODS: dict[str, Callable[..., Explain]] = {
    "sliding_window": _windows,
    "sliding_window_smooth": partial(_windows, smooth=True),
    "hierarchical_occlusion": _hierarchy,
    "focused_rise": _of(lambda budget: partial(ms.focused_rise, max(8, budget - 10))),
    "rise": _of(lambda budget: partial(ms.rise, budget)),
    "hsic": _of(lambda budget: partial(ms.hsic, budget)),
    "sobol": _sobol,
    "shapley": _of(lambda budget: partial(ms.shapley, budget, num_supervoxels=min(100, max(8, budget // 10)))),
    "minimal_region": _minimal,
    "integrated_gradients": _of(lambda budget: partial(ms.integrated_gradients, max(1, budget // 3))),
    "smoothgrad": _of(lambda budget: partial(ms.smoothgrad, max(1, budget // 3))),
    "smoothgrad_absolute": _of(lambda budget: partial(ms.smoothgrad, max(1, budget // 3), reading="absolute")),
    "grad_cam": _of(lambda budget: ms.grad_cam),
    "full_occlusion": _of(lambda budget: partial(ms.sliding_window, 2, 2)),
}
