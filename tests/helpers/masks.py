"""Bound masks, and all of them at once."""

from __future__ import annotations

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Masks


def bind(masks: Masks, *shape: int, dtype: torch.dtype = torch.float32) -> BoundMasks:
    return masks.bind(torch.zeros(1, *shape, dtype=dtype))


def everything(bound: BoundMasks) -> np.ndarray:
    return bound.render(range(len(bound)))[:, 0].numpy()
