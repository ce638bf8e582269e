"""Numbers that describe maps.

Metrics are MONAI's ``CumulativeIterationMetric``: call them with a batch of maps ``(B, K, *spatial)`` and what these
are compared with, then ``aggregate()``. ``higher_is_better`` is the good direction of each.

======================  ===================================================================================
module                  what it measures
======================  ===================================================================================
``peak``                the voxel with the highest value
``plausibility``        against a label: pointing, mass and leakage, average precision
``perturbation_curve``  with the network: insertion and deletion
``infidelity``          with the network: infidelity
``method_checks``       maps made again: with another seed or fill, or by a randomised copy of the network
``control_maps``        maps that know nothing of the network, and which metrics they pass
``agreement``           how far two maps of one scan agree
``which_method``        which method for a network: all figures of several methods, on some of its scans
``truth``               what that is measured against: labels that the network uses, or planted evidence
``map_figures``         all figures of one map
``base``                the contract of metrics: :class:`SaliencyMetric`, and of metrics that run the network
======================  ===================================================================================
"""

from monai_saliency.metrics.agreement import MapAgreement, map_agreement, rank_correlation
from monai_saliency.metrics.base import SaliencyMetric
from monai_saliency.metrics.control_maps import Controlled, controls, with_controls
from monai_saliency.metrics.infidelity import Infidelity
from monai_saliency.metrics.method_checks import FillAgreement, ParameterRandomisation, Repeatability
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.metrics.perturbation_curve import Deletion, Insertion, PerturbationCurve
from monai_saliency.metrics.plausibility import AUPRC, Leakage, MassInLabel, Pointing
from monai_saliency.metrics.which_method import MethodComparison, compare_methods

__all__ = [
    "AUPRC",
    "Controlled",
    "Deletion",
    "FillAgreement",
    "Infidelity",
    "Insertion",
    "Leakage",
    "MapAgreement",
    "MassInLabel",
    "MethodComparison",
    "ParameterRandomisation",
    "PerturbationCurve",
    "Pointing",
    "Repeatability",
    "SaliencyMetric",
    "compare_methods",
    "controls",
    "map_agreement",
    "peak_voxel",
    "rank_correlation",
    "with_controls",
]
