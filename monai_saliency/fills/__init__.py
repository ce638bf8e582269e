"""What replaces a hidden voxel.

A fill is any callable that takes images ``(B, C, *spatial)`` and returns a tensor of the same shape. It is called once
for each case.
"""

from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.blur import BlurFill
from monai_saliency.fills.constant import ConstantFill, MeanFill
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.fills.unit import fill_in_unit

__all__ = ["BlurFill", "CaseFill", "ConstantFill", "MeanFill", "ScanUnitFill", "fill_in_unit"]
