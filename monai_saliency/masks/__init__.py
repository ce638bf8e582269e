"""Where the image is perturbed."""

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.patch_window import PatchWindowMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.masks.supervoxels import Supervoxels, whole_image

__all__ = [
    "BoundMasks",
    "ChannelMasks",
    "IndependentChannelMasks",
    "Masks",
    "PatchWindowMasks",
    "RISEMasks",
    "RegionMasks",
    "SlidingWindowMasks",
    "Supervoxels",
    "whole_image",
]
