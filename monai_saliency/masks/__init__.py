"""Where the image is perturbed.

A mask is 1 where the image is kept and 0 where the fill replaces it. :class:`Masks` holds a user's settings;
:meth:`Masks.bind` fits them to one image and returns :class:`BoundMasks`, which renders the masks a few at a time.

========================  ==============================================================================================
module                    masks
========================  ==============================================================================================
``base``                  the contract: :class:`Masks` and :class:`BoundMasks`
``grid``                  random grids with crisp cells, for HSIC
``sobol``                 cells dimmed by a design of random numbers, for total Sobol ids
``rise``                  random smooth grids, for RISE
``mc_rise``               the same, where one of several fills replaces each hidden cell, for MC-RISE
``random_grid``           smooth grids as RISE's, with cells of one size in voxels or mm
``sliding_window``        boxes that slide over the image, for occlusion
``multi_scale_window``    such boxes of several sizes
``sliding_radial``        discs and balls that slide over the image
``patch_window``          boxes on the grid of a sliding-window inferer's patches: fewer patches are run again
``hierarchical``          boxes that are halved in rounds where they matter
``focused``               such boxes, then random grids inside the boxes that hold the evidence
``alone``                 parts that are shown while all else is hidden: which of them are enough
``blocks``                blocks of windows, which find a place in fewer masks than windows do
``order``                 the highest voxels of a map, more and more: for metrics
``subset``                as many cells of a grid in every mask, drawn at random: for metrics
``minimal``               sets of windows: the smallest one that keeps the score
``box``                   what masks that each hide one box have in common
``smooth``                smooth edges, for windows and regions
``region``                whole regions: organs of a label map, an atlas, or supervoxels
``region_hierarchy``      such regions, split by windows in rounds where they matter
``coalition``             coalitions of regions, for Shapley values
``coalition_draw``        which of them, where not all are scored
``patch_cells``           which of them, for the patches of a sliding-window inferer
``supervoxels``           regions made from the image itself
``channel``               masks for each channel, for maps of each modality
``until``                 random masks in rounds, until the map is good enough
========================  ==============================================================================================
"""

from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.coalition import CoalitionMasks
from monai_saliency.masks.focused import FocusedMasks
from monai_saliency.masks.grid import GridMasks
from monai_saliency.masks.hierarchical import HierarchicalMasks
from monai_saliency.masks.mc_rise import MCRISEMasks
from monai_saliency.masks.minimal import MinimalMasks
from monai_saliency.masks.multi_scale_window import MultiScaleWindowMasks
from monai_saliency.masks.order import OrderMasks
from monai_saliency.masks.patch_window import PatchWindowMasks
from monai_saliency.masks.random_grid import RandomGridMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.region_hierarchy import RegionHierarchyMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_radial import SlidingRadialMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.masks.sobol import SobolMasks
from monai_saliency.masks.subset import SubsetMasks
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
    "SubsetMasks",
    "SobolMasks",
    "Supervoxels",
    "UntilMasks",
    "whole_image",
]
