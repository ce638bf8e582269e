"""Figures of maps: agreement, peak."""

from monai_saliency.metrics.agreement import Comparison, compare
from monai_saliency.metrics.peak import peak_voxel

__all__ = ["Comparison", "compare", "peak_voxel"]
