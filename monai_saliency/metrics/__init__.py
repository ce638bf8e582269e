"""Numbers that describe maps.

Metrics are MONAI's ``CumulativeIterationMetric``: call them with a batch of maps ``(B, K, *spatial)`` and what these
are compared with, then ``aggregate()``. Each says by ``higher_is_better`` which direction is good.

======================  ===================================================================================
module                  what it measures
======================  ===================================================================================
``agreement``           how far the maps of two runs differ: ``python -m monai_saliency compare A B``
``peak``                the voxel with the highest value
``base``                the contract of metrics: :class:`SaliencyMetric`
``pointing``            against a label: does the peak lie inside?
``mass``                against a label: how much of the map lies inside, how much leaks outside?
``detector``            against a label: average precision, intersection over union
``perturbation_curve``  with the network: insertion and deletion
``infidelity``          with the network: infidelity and sensitivity-n
``repeatability``       between seeds, fills or any two maps: rank correlation
``randomisation``       a randomised copy of the network: does the map depend on what was learned?
``control_maps``        maps that know nothing of the network, and which metrics they pass
``scored``              what metrics that run the network have in common
``map_agreement``       two maps of one scan: correlations, overlap of the highest voxels, distance of the peaks
``ranks``               ranks with ties, and the rank correlation of two maps
======================  ===================================================================================
"""

from monai_saliency.metrics.agreement import Comparison, compare
from monai_saliency.metrics.base import SaliencyMetric
from monai_saliency.metrics.control_maps import Controlled, controls, with_controls
from monai_saliency.metrics.detector import AUPRC, MeanIoU
from monai_saliency.metrics.infidelity import Infidelity, SensitivityN
from monai_saliency.metrics.map_agreement import MapAgreement, map_agreement
from monai_saliency.metrics.mass import Leakage, MassInLabel
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.metrics.perturbation_curve import Deletion, Insertion, PerturbationCurve
from monai_saliency.metrics.pointing import Pointing
from monai_saliency.metrics.randomisation import EfficientParameterRandomisation, ParameterRandomisation
from monai_saliency.metrics.ranks import rank_correlation
from monai_saliency.metrics.repeatability import FillAgreement, RankAgreement, Repeatability

__all__ = [
    "AUPRC",
    "Comparison",
    "Controlled",
    "Deletion",
    "EfficientParameterRandomisation",
    "FillAgreement",
    "Infidelity",
    "Insertion",
    "Leakage",
    "MapAgreement",
    "MassInLabel",
    "MeanIoU",
    "ParameterRandomisation",
    "PerturbationCurve",
    "Pointing",
    "RankAgreement",
    "Repeatability",
    "SaliencyMetric",
    "SensitivityN",
    "compare",
    "controls",
    "map_agreement",
    "peak_voxel",
    "rank_correlation",
    "with_controls",
]
