"""Numbers that describe maps.

=============  =====================================================================================
module         what it measures
=============  =====================================================================================
``agreement``  how far the maps of two runs differ: ``python -m monai_saliency compare A B``
``peak``       the voxel with the highest value
=============  =====================================================================================
"""

from monai_saliency.metrics.agreement import Comparison, compare
from monai_saliency.metrics.peak import peak_voxel

__all__ = ["Comparison", "compare", "peak_voxel"]
