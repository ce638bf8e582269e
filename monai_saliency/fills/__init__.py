"""What replaces a hidden voxel.

A fill is any function that takes images ``(B, C, *spatial)`` in the network's input space and returns a tensor of the
same shape. It is called once per case. A fill that also needs the case's file or labels is a :class:`CaseFill`.
"""

from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.blur import BlurFill
from monai_saliency.fills.constant import ConstantFill, MeanFill, ScanUnitFill, fill_in_unit

__all__ = ["BlurFill", "CaseFill", "ConstantFill", "MeanFill", "ScanUnitFill", "fill_in_unit"]
