"""Small sliding-window models."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.data.utils import dense_patch_slices
from monai.inferers import SlidingWindowInferer
from monai.inferers.utils import _get_scan_interval

from monai_saliency.inferers.case_patches import find_touches, find_trims
from monai_saliency.targets import RegionScore
from monai_saliency.utils.patch_grid import PatchGrid

WHOLE = RegionScore(1, "softmax", region="all")


class Network(torch.nn.Module):
    """Two convolutions: what a voxel gives depends on its patch's border. Counts the rows that it is given."""

    def __init__(self, dims: int, classes: int = 3, channels: int = 1) -> None:
        super().__init__()
        kind = (torch.nn.Conv2d, torch.nn.Conv3d)[dims - 2]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = torch.nn.Sequential(
                kind(channels, 3, 3, padding=1), torch.nn.Tanh(), kind(3, classes, 3, padding=1)
            )
        self.rows = 0
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        self.calls.append(len(x))
        return 4 * self.body(x)


def images(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def blocks(shape: Sequence[int], size: int, labels: int, seed: int = 0) -> torch.Tensor:
    """A label map ``(1, *shape)`` of cubes."""
    coarse = torch.randint(0, labels + 1, [-(-n // size) for n in shape], generator=torch.Generator().manual_seed(seed))
    for axis in range(len(shape)):
        coarse = coarse.repeat_interleave(size, axis)
    return coarse[tuple(slice(n) for n in shape)][None]


def patch_boxes(inferer: SlidingWindowInferer, shape: Sequence[int]) -> tuple[list[tuple[slice, ...]], list[int]]:
    """MONAI's patches, and the padding before each axis."""
    roi = [int(r) for r in inferer.roi_size]
    padded = [max(r, n) for r, n in zip(roi, shape, strict=True)]
    overlap = np.broadcast_to(inferer.overlap, len(roi)).tolist()
    boxes = dense_patch_slices(padded, roi, _get_scan_interval(padded, roi, len(roi), overlap))
    return boxes, [(p - n) // 2 for p, n in zip(padded, shape, strict=True)]


class Coupled(Network):
    """A network that gives away by its last bits in which batch, and where in it, a patch was run: within rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        return super().forward(x) + 32 * torch.finfo(x.dtype).eps * (places + x.mean())


class Planned(NamedTuple):
    """Forwards of patches: of the image alone, of an explanation, and of one by whole images."""

    patches: int
    forwards: int
    plain: int

    @property
    def gain(self) -> float:
        """How many times fewer forwards remembered patches need."""
        return self.plain / self.forwards


def planned(masks: Any, inferer: SlidingWindowInferer, image: torch.Tensor, labels: Any = None) -> Planned:
    """The forwards that masks need, counted patch by patch without running any."""
    bound, grid = masks.bind(image, labels=labels), PatchGrid(inferer, image.shape[1:])
    touches = find_touches(bound, grid, find_trims(grid, None), range(len(bound)))
    count, changed = len(grid.boxes), int((touches[:, 0] == touches[:, 2]).sum())
    return Planned(count, count + changed, count * (len(bound) + 1))
