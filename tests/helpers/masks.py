"""Bound masks, and all of them at once."""

import itertools
from typing import Any

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from skimage.transform import resize

from monai_saliency.masks.base import BoundMasks, Masks


def bind(masks: Masks, *shape: int, dtype: torch.dtype = torch.float32) -> BoundMasks:
    return masks.bind(torch.zeros(1, *shape, dtype=dtype))


def everything(bound: BoundMasks) -> np.ndarray:
    return bound.render(range(len(bound)))[:, 0].numpy()


def boxes_of_regions(image: torch.Tensor, _: Any) -> torch.Tensor:
    labels = torch.zeros(1, *image.shape[1:], dtype=torch.long)
    labels[:, 2:6, :5], labels[:, 4:, 6:], labels[:, 6:, :2] = 1, 2, 3
    return labels


# Masks in plain loops and float64, in any number of dimensions, with xaitk-saliency's draws.
def slow_grids(shape: tuple[int, ...], n: int, cell: tuple[int, ...], p1: float, seed: int) -> np.ndarray:
    """RandomGrid in float64 and any number of dimensions."""
    size = [int(np.ceil(extent / c)) + 1 for extent, c in zip(shape, cell, strict=True)]
    cells = np.random.default_rng(seed).random((n, *size)) < p1
    draws = np.random.default_rng(seed)
    masks = []
    for grid in cells:
        corner = [0] * len(shape)
        for axis in reversed(range(len(shape))):
            half = cell[axis] // 2
            shift = int(draws.integers(-half, half)) if half else 0
            corner[axis] = (size[axis] * cell[axis] - shape[axis]) // 2 + shift
        stretched = resize(grid.astype(float), [s * c for s, c in zip(size, cell, strict=True)], order=1)
        masks.append(stretched[tuple(slice(c, c + extent) for c, extent in zip(corner, shape, strict=True))])
    return np.stack(masks)


def slow_balls(shape: tuple[int, ...], radius: Any, stride: Any, sigma: Any) -> np.ndarray:
    """Ellipsoids voxel by voxel, in float64; the blur is scipy's."""
    masks = []
    for centre in itertools.product(*(range(0, n, s) for n, s in zip(shape, stride, strict=True))):
        hidden = np.zeros(shape)
        for voxel in itertools.product(*map(range, shape)):
            far = sum(((v - c) / r) ** 2 for v, c, r in zip(voxel, centre, radius, strict=True))
            hidden[voxel] = far < 1
        if sigma is not None:
            hidden = gaussian_filter(hidden, sigma)
            hidden /= hidden.max()
        masks.append(1 - hidden)
    return np.stack(masks)


def slow_mc_rise(shape: tuple[int, ...], n: int, k: int, grid: tuple[int, ...], p1: float, seed: int) -> np.ndarray:
    """MC-RISE with xaitk-saliency's draws, in float64 and any number of dimensions: ``(n, K, *shape)``."""
    draws = np.random.default_rng(seed)
    kept = draws.random((n, *grid)) < p1
    fill = [draws.integers(0, k, size=grid) for _ in range(n)]
    shifts = np.random.default_rng(seed)
    cell = [int(np.ceil(size / s)) for size, s in zip(shape, grid, strict=True)]
    masks = np.empty((n, k, *shape))
    for i in range(n):
        corner = [int(shifts.integers(0, edge)) for edge in cell]
        for j in range(k):
            cells = np.ones(grid)
            for place in itertools.product(*map(range, grid)):
                if not kept[(i, *place)] and fill[i][place] == j:
                    cells[place] = 0
            stretched = resize(cells, [(s + 1) * e for s, e in zip(grid, cell, strict=True)], order=1, mode="reflect")
            masks[i, j] = stretched[tuple(slice(c, c + size) for c, size in zip(corner, shape, strict=True))]
    return masks


def slow_windows(shape: tuple[int, ...], window: Any, stride: Any) -> np.ndarray:
    """Windows from the border on, all moved by half of what the last one hangs over."""
    edges, steps = (np.broadcast_to(each, len(shape)).tolist() for each in (window, stride))
    starts = []
    for size, edge, step in zip(shape, edges, steps, strict=True):
        along = list(range(0, size, step))
        starts.append([start - (edge - (size - along[-1])) // 2 for start in along])
    masks = []
    for corner in itertools.product(*starts):
        mask = np.ones(shape)
        for voxel in itertools.product(*map(range, shape)):
            if all(c <= v < c + edge for v, c, edge in zip(voxel, corner, edges, strict=True)):
                mask[voxel] = 0
        masks.append(mask)
    return np.stack(masks)
