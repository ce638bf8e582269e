"""Masks that hide whole regions: organs of a label map, or supervoxels."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids, MakesRegions, Masks, Regions, Spacing, random_rows
from monai_saliency.utils.arguments import instance, probability, whole_number
from monai_saliency.utils.tensors import Box, checked_label, to_device

# So many voxels are looked up at once: 8 MB of places.
_PLACES = 2**20


class RegionMasks(Masks):
    """Masks that hide whole regions: organs, the regions of an atlas, or supervoxels. 2D and 3D.

    A region is all voxels of one label. Label 0 is not a region and is always kept. A mask is a *coalition*: some
    regions are kept, the others are hidden.

    Args:
        num_masks: number of random coalitions; None for one mask per region, which hides that region alone.
        p1: probability in [0, 1] that a region is kept in a random coalition.
        seed: seed of the random coalitions. With the same seed, more masks begin with the same masks as fewer.
        regions: function that makes the label map ``(1, *spatial)`` from an image ``(C, *spatial)`` and its voxel sizes
            in mm (None if unknown), such as :class:`~monai_saliency.Supervoxels`. By default the case's label map.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when the case has no label map, or when the label map
            has another shape than the image, values that are not whole numbers, or no label but 0.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import RegionMasks
        >>> labels = torch.tensor([[[0, 5, 5], [2, 2, 9]]])
        >>> bound = RegionMasks().bind(torch.zeros(1, 2, 3), labels)
        >>> bound.values
        [2, 5, 9]
        >>> bound.render([1])[0, 0].tolist()  # hides label 5
        [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    by_region = True

    def __init__(
        self,
        num_masks: int | None = None,
        p1: float = 0.5,
        seed: int = 0,
        regions: MakesRegions | None = None,
    ) -> None:
        self.num_masks = None if num_masks is None else whole_number("num_masks", num_masks, 1)
        self.p1 = probability("p1", p1)
        self.seed = whole_number("seed", seed, 0)
        self.regions, self.needs_labels = check_regions(regions)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundRegionMasks:
        return BoundRegionMasks(self, image, find_regions(self.regions, image, labels, spacing))


def check_regions(make: Any) -> tuple[Any, bool]:
    """A function that makes regions, and whether it needs the case's label map: it does if ``make`` is None or has
    ``needs_labels``.
    """
    words = "a function of an image that makes a label map, such as Supervoxels(200)"
    instance("regions", make, (), words, function=True, none=True)
    return make, make is None or bool(getattr(make, "needs_labels", False))


def find_regions(make: MakesRegions | None, image: Tensor, labels: Tensor | None, spacing: Spacing) -> Regions:
    """The regions of an image, one for each label but 0, on the image's device."""
    if make is not None and check_regions(make)[1]:
        known = find_regions(None, image, labels, spacing).index
        labels = make(image, spacing, known[None])  # type: ignore[call-arg]
    elif make is not None:
        labels = make(image, spacing)
    if labels is None:
        raise ValueError(
            "masks of regions need the case's label map: give `labels` (the handler's `label_key`), or `regions`, "
            "which makes one of the image"
        )
    labels = checked_label(labels, image.shape[1:])[0].to(image.device).long()
    found, place = labels.unique(return_inverse=True)
    hidden = found != 0
    if not bool(hidden.any()):
        raise ValueError("the label map has only label 0, so it has no region to hide")
    return Regions(found[hidden].tolist(), torch.where(hidden, hidden.cumsum(0), 0).to(torch.int32)[place])


class BoundRegionMasks(BoundMasks):
    """The masks of one label map. A *part* is a region, or one channel of it where each channel has its own mask."""

    num_masks: int | None

    def __init__(self, masks: Any, image: Tensor, regions: Regions) -> None:
        super().__init__(image)
        self.values, self.index = regions.values, regions.index
        self.num_masks, self.p1, self.seed = masks.num_masks, masks.p1, masks.seed
        digest = hashlib.sha256(self.index.cpu().numpy().tobytes()).hexdigest()
        settings = (self.seed, self.p1, self.num_masks, tuple(self.values), digest, self.spatial_shape)
        self.key = (type(masks).__name__, *settings)

    @property
    def regions(self) -> Regions:
        return Regions(self.values, self.index)

    def __len__(self) -> int:
        return self.num_masks or len(self.values)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``coalition`` bool ``(n, parts)``, True where a part is kept."""
        if self.num_masks is None:
            return {"coalition": np.asarray(ids, dtype=int)[:, None] != np.arange(len(self.values))}
        return {"coalition": random_rows(self.seed, ids, len(self.values)) < self.p1}

    def places(self, ids: Ids) -> list[int]:
        return list(range(len(ids))) if self.num_masks is None else []

    def spread(self, values: Tensor) -> Tensor:
        """Write values ``(n, parts)`` on the parts' voxels, ``(n * (channels or 1), *spatial)``; 0 in no region."""
        return self._on_voxels(values.to(self.device, self.dtype), 0.0, self.index).flatten(0, 1)

    def _inside(self, box: Box) -> np.ndarray:
        """The parts with a voxel inside a box."""
        present = self.index[box].unique().cpu().numpy()
        channels = self.channels or 1
        return ((present[present > 0] - 1)[:, None] * channels + np.arange(channels)).ravel()

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        hidden = ~self.codes(ids)["coalition"][:, self._inside(box)]
        return np.asarray(hidden.any(axis=1)), np.packbits(hidden, axis=1)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        return self._on_voxels(to_device(codes["coalition"], device, self.dtype), 1.0, self.index[box].to(device))

    def _on_voxels(self, values: Tensor, elsewhere: float, index: Tensor) -> Tensor:
        """Values ``(n, parts)`` on the voxels of some regions, ``(n, channels or 1, *index.shape)``. Columns after the
        parts belong to numbers, which have no voxels.
        """
        values = values[:, : len(self.values) * (self.channels or 1)]
        table = values.unflatten(1, (-1, self.channels or 1)).transpose(1, 2)
        table = torch.cat([table.new_full((*table.shape[:2], 1), elsewhere), table], dim=2)
        shape, flat = table.shape[:2], index.flatten()
        found = table.new_empty(*shape, len(flat))
        # Along the last axis of a table, `index_select` takes ten times as long as this, which needs places in 64 bits.
        for first in range(0, len(flat), _PLACES):
            part = slice(first, first + _PLACES)
            torch.gather(table, 2, flat[part].long().expand(*shape, -1), out=found[:, :, part])
        return found.view(*shape, *index.shape)
