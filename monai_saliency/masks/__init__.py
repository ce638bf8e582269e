"""Where the image is perturbed: one file for each family of masks.

A mask is 1 where the image is kept and 0 where the fill replaces it. :class:`Masks` holds a user's settings;
:meth:`Masks.bind` fits them to one image and returns :class:`BoundMasks`, which renders the masks a few at a time.
"""

from monai_saliency.masks.base import BoundMasks, Masks, Observed
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.coalition import CoalitionMasks
from monai_saliency.masks.focused import FocusedMasks
from monai_saliency.masks.grid import GridMasks, SobolMasks
from monai_saliency.masks.hierarchical import HierarchicalMasks, RegionHierarchyMasks
from monai_saliency.masks.minimal import MinimalMasks
from monai_saliency.masks.order import OrderMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import MCRISEMasks, RandomGridMasks, RISEMasks
from monai_saliency.masks.sliding_radial import SlidingRadialMasks
from monai_saliency.masks.sliding_window import MultiScaleWindowMasks, PatchWindowMasks, SlidingWindowMasks
from monai_saliency.masks.supervoxels import OrganSupervoxels, Supervoxels, whole_image
from monai_saliency.masks.until import UntilMasks

__all__ = [
    "BoundMasks",
    "ChannelMasks",
    "FocusedMasks",
    "CoalitionMasks",
    "HierarchicalMasks",
    "IndependentChannelMasks",
    "Masks",
    "Observed",
    "OrderMasks",
    "OrganSupervoxels",
    "GridMasks",
    "MCRISEMasks",
    "MinimalMasks",
    "MultiScaleWindowMasks",
    "PatchWindowMasks",
    "RISEMasks",
    "RandomGridMasks",
    "RegionHierarchyMasks",
    "RegionMasks",
    "SlidingRadialMasks",
    "SlidingWindowMasks",
    "SobolMasks",
    "Supervoxels",
    "UntilMasks",
    "whole_image",
]
