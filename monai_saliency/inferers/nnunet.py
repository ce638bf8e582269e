"""nnU-Net's sliding window as a MONAI inferer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from monai.inferers import SlidingWindowInferer

from monai_saliency.utils.arguments import fraction, require
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.tensors import everywhere, plain

#: what nnU-Net multiplies the Gaussian with
_PEAK = 10


class NNUNetInferer(SlidingWindowInferer):
    """Predicts as nnU-Net's ``nnUNetPredictor`` does, to the bit: its patches, its Gaussian, its sums in float16.

    A network with ``members`` (:class:`~monai_saliency.networks.nnunet.NNUNetNetwork`) predicts the whole image member
    by member, and the results are averaged.

    Explanations remember patches and blend them in the image's own precision. So what they explain differs from the
    prediction by the rounding of float16.

    Args:
        patch_size: the size of a patch in voxels, from the plans. Two numbers for a network of slices: of a volume,
            these are cut across the first spatial axis.
        step_size: the distance between patches in parts of a patch, in (0, 1], at the most.
        sw_batch_size: patches in one network batch of an explanation. A prediction of one image runs one at a time, as
            nnU-Net's does.
        device: where a prediction is put together; by default where the image is.

    Raises:
        ValueError: when ``step_size`` is out of range.
    """

    #: the type of the sums of a prediction
    blended_in = torch.float16

    def __init__(
        self,
        patch_size: Sequence[int],
        step_size: float = 0.5,
        sw_batch_size: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        self.step_size = fraction("step_size", step_size)
        size = [int(edge) for edge in patch_size]
        # A volume's slices are its patches of one voxel along the first axis.
        roi_size = (1,) * (3 - len(size)) + tuple(size)
        super().__init__(roi_size, sw_batch_size, overlap=1 - step_size, mode="gaussian", device=device)
        self.patch_size = tuple(size)
        compute = require("nnunetv2.inference.sliding_window_prediction", extra="nnunet").compute_gaussian
        weights = compute(tuple(size), value_scaling_factor=_PEAK, dtype=self.blended_in, device=torch.device("cpu"))
        self.roi_weight_map = weights.reshape(roi_size)

    def starts(self, shape: Sequence[int]) -> list[list[int]]:
        """Where nnU-Net's patches begin in an image of a shape that is padded to their size."""
        compute = require("nnunetv2.inference.sliding_window_prediction", extra="nnunet")
        dims = len(self.patch_size)
        steps = compute.compute_steps_for_sliding_window(tuple(shape[-dims:]), self.patch_size, self.step_size)
        return [*(list(range(size)) for size in shape[:-dims]), *steps]

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Predict logits ``(B, classes, *spatial)`` of images ``(B, C, *spatial)``, in the images' type."""
        members: Sequence[Callable[..., Any]] = getattr(network, "members", (network,))
        logits = self._predict(inputs, members[0], *args, **kwargs)
        for member in members[1:]:
            logits += self._predict(inputs, member, *args, **kwargs)
        return (logits.div_(len(members)) if len(members) > 1 else logits).to(inputs.dtype)

    def _predict(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        grid = PatchGrid(self, inputs.shape[2:])
        device = torch.device(self.device or inputs.device)
        images = F.pad(plain(inputs), grid.pad)
        weights = self.roi_weight_map.to(device)  # type: ignore[union-attr]
        total = torch.zeros(images.shape[2:], dtype=self.blended_in, device=device)
        sums: torch.Tensor | None = None
        for box in grid.cuts:
            total[box] += weights
            patch = everywhere(everywhere(box))
            for first in range(0, len(images), self.sw_batch_size):
                rows = slice(first, first + self.sw_batch_size)
                logits = network(images[rows][patch].contiguous(), *args, **kwargs).to(device)
                if sums is None:
                    shape = (len(images), logits.shape[1], *images.shape[2:])
                    sums = torch.zeros(shape, dtype=self.blended_in, device=device)
                sums[rows][patch] += logits * weights
        assert sums is not None
        sums /= total
        if torch.isinf(sums).any():
            raise ValueError("the network's logits are too large for float16, and nnU-Net adds them up in float16")
        return sums[everywhere(everywhere(grid.inside))]
