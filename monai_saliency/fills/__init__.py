"""What replaces a hidden voxel.

A fill is any function that takes images ``(B, C, *spatial)`` in the network's input space and returns a tensor of the
same shape. It is called once per case. A fill that also needs the case's file or labels is a :class:`CaseFill`.

A fill that depends on the mask also has a method ``of(image, masks)``: from the image ``(1, C, *spatial)`` and masks
``(n, 1 or C, *spatial)``, 1 where the image is kept, it makes the fill of each mask, ``(n, C, *spatial)``, on the
image's device. It is called for each batch of masks. Called as a function, such a fill returns what replaces the image
where everything is hidden.
"""

from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.donor import DonorFill
from monai_saliency.fills.inpaint import InpaintFill
from monai_saliency.fills.mirror import MirrorFill
from monai_saliency.fills.named import AutoFill, fill_in_unit
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.fills.simple import BlurFill, ConstantFill, MeanFill

__all__ = [
    "AutoFill",
    "BlurFill",
    "CaseFill",
    "ConstantFill",
    "DonorFill",
    "InpaintFill",
    "MeanFill",
    "MirrorFill",
    "ScanUnitFill",
    "fill_in_unit",
]
