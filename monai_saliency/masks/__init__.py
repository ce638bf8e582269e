"""Where the image is perturbed.

A mask is 1 where the image is kept and 0 where the fill replaces it. :class:`Masks` holds a user's settings;
:meth:`Masks.bind` fits them to one image and returns :class:`BoundMasks`, which renders the masks a few at a time.

==================  ===========================================================================================
module              masks
==================  ===========================================================================================
``base``            the contract: :class:`Masks` and :class:`BoundMasks`
``grid``            random grids with crisp cells, for HSIC
``sobol``           cells dimmed by a design of random numbers, for total Sobol indices
``rise``            random smooth grids, for RISE
``sliding_window``  boxes that slide over the image, for occlusion
``patch_window``    boxes on the grid of a sliding-window inferer's patches: fewer patches are run again
``hierarchical``    boxes that are halved in rounds where they matter
``minimal``         sets of windows: the smallest one that keeps the score
``box``             what masks that each hide one box have in common
``smooth``          smooth edges, for windows and regions
``region``          whole regions: organs of a label map, an atlas, or supervoxels
``supervoxels``     regions made from the image itself
``channel``         masks for each channel, for maps of each modality
==================  ===========================================================================================
"""

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.grid import GridMasks
from monai_saliency.masks.hierarchical import HierarchicalMasks
from monai_saliency.masks.minimal import MinimalMasks
from monai_saliency.masks.patch_window import PatchWindowMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.masks.sobol import SobolMasks
from monai_saliency.masks.supervoxels import Supervoxels, whole_image

__all__ = [
    "BoundMasks",
    "ChannelMasks",
    "GridMasks",
    "HierarchicalMasks",
    "IndependentChannelMasks",
    "Masks",
    "MinimalMasks",
    "PatchWindowMasks",
    "RISEMasks",
    "RegionMasks",
    "SlidingWindowMasks",
    "SobolMasks",
    "Supervoxels",
    "whole_image",
]
