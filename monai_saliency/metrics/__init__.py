"""Numbers that describe maps.

Metrics are MONAI's ``CumulativeIterationMetric``: call them with a batch of maps ``(B, K, *spatial)`` and what these
are compared with, then ``aggregate()``. Each says by ``higher_is_better`` which direction is good.

===============  ===================================================================================
module           what it measures
===============  ===================================================================================
``agreement``    how far the maps of two runs differ: ``python -m monai_saliency compare A B``
``peak``         the voxel with the highest value
``base``         the contract of metrics: :class:`SaliencyMetric`
``ranks``        ranks with ties, and the rank correlation of two maps
``pointing``     against a label: does the peak lie inside?
``mass``         against a label: how much of the map lies inside, how much outside?
``detector``     against a label: average precision, intersection over union
``scored``       what metrics that run the network have in common
``perturbation_curve``  with the network: insertion and deletion
===============  ===================================================================================
"""

from monai_saliency.metrics.agreement import Comparison, compare
from monai_saliency.metrics.base import SaliencyMetric
from monai_saliency.metrics.detector import AUPRC, MeanIoU
from monai_saliency.metrics.mass import Leakage, MassInLabel
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.metrics.perturbation_curve import Deletion, Insertion, PerturbationCurve
from monai_saliency.metrics.pointing import Pointing
from monai_saliency.metrics.ranks import rank_correlation

__all__ = [
    "AUPRC",
    "Comparison",
    "Deletion",
    "Insertion",
    "Leakage",
    "MassInLabel",
    "MeanIoU",
    "PerturbationCurve",
    "Pointing",
    "SaliencyMetric",
    "compare",
    "peak_voxel",
    "rank_correlation",
]
