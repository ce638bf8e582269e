"""Masks of a Sobol design: each cell dimmed by a number between 0 and 1, one cell exchanged at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.masks.grid import GridMasks
from monai_saliency.masks.region import BoundRegionMasks, RegionMasks
from monai_saliency.utils.arguments import instance, whole_number, whole_numbers
from monai_saliency.utils.boxes import Box

__all__ = ["SobolMasks"]

# Cells of a grid, about, where nobody says how many.
_CELLS = 64
# More forwards than this are taken for a mistake.
_MOST_FORWARDS = 100_000


class SobolMasks(Masks):
    """The design of total Sobol indices (Fel et al., NeurIPS 2021, arXiv 2111.04138, section 3), in 2D and 3D.

    A mask keeps each cell, or region, in part: by a number in [0, 1], 1 for all of it. For each of N designs there are
    d + 2 masks of d cells: one of numbers A, one of numbers B, and for each cell the numbers A with that cell's number
    taken from B. A and B are the two halves of a scrambled Sobol sequence in 2 d dimensions.

    Args:
        num_designs: N, at least 2; a power of 2 fills the space best. The paper takes 32.
        grid_size: cells along each axis, one number or one per axis, at least 1. By default 8 in 2D and 4 in 3D.
        seed: of the scrambling, at least 0. With the same seed, more designs begin with the same masks as fewer.
        regions: makes regions to dim instead of cells, such as ``Supervoxels(40)``: a function of an image
            ``(C, *spatial)`` and its voxel sizes that gives a label map ``(1, *spatial)``.
        by_label: dim the regions of the case's label map instead of cells.

    Raises:
        ValueError: for settings out of range, for both ``regions`` and ``by_label``, and (from ``bind``) when the
            design needs more than 100 000 forwards.

    Example::

        >>> import torch
        >>> from monai_saliency import SobolMasks
        >>> bound = SobolMasks(num_designs=4, grid_size=2).bind(torch.zeros(1, 8, 8))
        >>> len(bound)  # 4 designs of 2 * 2 + 2 masks
        24
        >>> a, b, first = bound.codes([0, 1, 2])["coalition"]
        >>> bool(first[0] == b[0]), bool((first[1:] == a[1:]).all())
        (True, True)
    """

    by_region = True
    shorter = "a smaller num_designs, whose map has more noise, or fewer cells or regions"

    def __init__(
        self,
        num_designs: int = 32,
        grid_size: int | Sequence[int] | None = None,
        seed: int = 0,
        regions: Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor] | None = None,
        by_label: bool = False,
    ) -> None:
        self.num_designs = whole_number("num_designs", num_designs, 2)
        if grid_size is not None:
            whole_numbers("grid_size", grid_size, 1)
        self.grid_size = grid_size
        self.seed = whole_number("seed", seed, 0)
        words = "a function of an image that makes a label map, such as Supervoxels(40)"
        self.regions = instance("regions", regions, (), words, function=True, none=True)
        if by_label and regions is not None:
            raise ValueError("give `regions` or `by_label`, not both: each says which regions are dimmed")
        self.needs_labels = bool(by_label)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        cells: GridMasks | RegionMasks
        if self.needs_labels or self.regions is not None:
            cells = RegionMasks(regions=self.regions)
        else:
            dims = image.ndim - 1
            cells = GridMasks(1, round(_CELLS ** (1 / dims)) if self.grid_size is None else self.grid_size)
        bound = cells.bind(image, labels, spacing)
        return BoundSobolMasks(self, image, bound)


class BoundSobolMasks(BoundRegionMasks):
    """The design of one image."""

    num_masks: int

    def __init__(self, masks: SobolMasks, image: torch.Tensor, cells: BoundRegionMasks) -> None:
        BoundMasks.__init__(self, image)
        self.values, self.index = cells.values, cells.index
        self.num_designs, self.seed = masks.num_designs, masks.seed
        count = len(self.values)
        if self.num_designs * (count + 2) > _MOST_FORWARDS:
            raise ValueError(
                f"total Sobol indices of {count} cells or regions need {self.num_designs * (count + 2)} forwards, "
                f"num_designs * (cells + 2), and at most {_MOST_FORWARDS} are run: use a smaller `grid_size`, fewer "
                "regions or a smaller `num_designs`, or hsic, whose forwards do not grow with the cells"
            )
        self.num_masks = self.num_designs * (count + 2)
        engine = torch.quasirandom.SobolEngine(2 * count, scramble=True, seed=masks.seed)
        self.table = engine.draw(self.num_designs, dtype=torch.float64).numpy().reshape(-1, 2, count)
        self.key = ("SobolMasks", self.seed, self.num_designs, *cells.key)

    def __len__(self) -> int:
        return self.num_masks

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        """``coalition`` float64 ``(n, regions)`` in [0, 1], how much of each region is kept."""
        design, place = np.divmod(np.asarray(ids, dtype=int), len(self.values) + 2)
        kept = self.table[design, (place == 1).astype(int)]
        (exchanged,) = (place > 1).nonzero()
        cell = place[exchanged] - 2
        kept[exchanged, cell] = self.table[design[exchanged], 1, cell]
        return {"coalition": kept}

    def restrict(self, ids: Sequence[Id], box: Box) -> tuple[np.ndarray, np.ndarray]:
        present = self.index[box].unique().cpu().numpy()
        kept = self.codes(ids)["coalition"][:, present[present > 0] - 1]
        # Numbers are equal where their bits are.
        return np.asarray((kept < 1).any(axis=1)), np.ascontiguousarray(kept).view(np.int64)
