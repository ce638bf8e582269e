"""Masks that hide or keep the highest voxels of a map, more and more of them."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids, Masks, Spacing
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.tensors import Box, plain, to_device


class OrderMasks(Masks):
    """Masks that hide the highest voxels of a map, ``1 / steps`` of the voxels more with every mask, up to the whole
    image; or that keep them (Petsiuk et al., BMVC 2018, section 4.1).

    Voxels with equal values go at once. If a share ends among equal values, one mask stops before them and the next
    takes them all. With ``keep`` the first mask keeps nothing, and the whole image is left out.

    Args:
        saliency: one finite map ``(*spatial)`` on the grid of the image that is perturbed.
        steps: into how many equal shares the voxels are divided, at least 1: about as many masks.
        keep: keep the highest voxels instead of hiding them.
    """

    def __init__(self, saliency: Tensor, steps: int = 20, keep: bool = False) -> None:
        values = plain(saliency).detach()
        self.steps = whole_number("steps", steps, 1)
        self.keep = keep
        self.first, self.counts = _first_steps(values, self.steps)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundOrderMasks:
        return BoundOrderMasks(self, image)


class BoundOrderMasks(BoundMasks):
    """The masks of one image, by how many steps of the order they take."""

    def __init__(self, masks: OrderMasks, image: Tensor) -> None:
        super().__init__(image)
        self.keep = masks.keep
        self.first = masks.first.to(self.device)
        size = self.first.numel()
        taken = [0, *masks.counts[:-1]] if self.keep else masks.counts
        self.hidden_fractions = [(size - count if self.keep else count) / size for count in taken]
        digest = hashlib.sha256(self.first.cpu().numpy().tobytes()).hexdigest()
        self.key = ("OrderMasks", self.keep, digest, self.spatial_shape)

    def __len__(self) -> int:
        return len(self.hidden_fractions)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``steps`` int ``(n,)``: how many steps of the order a mask takes."""
        return {"steps": np.asarray(ids, dtype=int) + (0 if self.keep else 1)}

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray]:
        # The masks are nested: inside a box, they are equal where they take as many of the steps that occur there.
        inside = self.first[box].unique().cpu().numpy()
        taken = np.searchsorted(inside, self.codes(ids)["steps"], side="left")
        hides = taken < len(inside) if self.keep else taken > 0
        return hides, taken[:, None]

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        first = self.first[box].to(device)
        steps = to_device(codes["steps"], device).reshape(-1, *[1] * (first.ndim + 1))
        taken = first < steps
        return (taken if self.keep else ~taken).to(self.dtype)


def _first_steps(values: Tensor, steps: int) -> tuple[Tensor, list[int]]:
    """The step that takes each voxel, int32 ``(*spatial)`` from 0; and how many are taken after each step."""
    ordered = values.flatten().sort().values
    size = len(ordered)
    wanted = torch.tensor([max(1, round((i + 1) * size / steps)) for i in range(steps)], device=values.device)
    lowest = ordered[size - wanted]  # that each step takes
    above, taken = (size - torch.searchsorted(ordered, lowest, right=right) for right in (True, False))
    before = above[(taken > wanted) & (above > 0)]  # stop before equal values among which a share ends
    least = torch.cat([lowest, ordered[size - before]]).unique()  # ascending
    first = len(least) - torch.searchsorted(least, values, right=True)
    counts = first.flatten().bincount(minlength=len(least)).cumsum(0)
    return first.to(torch.int32), counts.tolist()
