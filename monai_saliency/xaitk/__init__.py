"""xaitk-saliency, both ways: its objects used here, and our methods found by its discovery.

========================  =============================================================================================
module                    what
========================  =============================================================================================
``networks``              a network as a black box: :class:`Classifier`, :class:`Detector`, :class:`Descriptor`
``masks``                 any ``PerturbImage`` as masks: :class:`PerturbImageMasks`
``estimator``             any ``GenerateClassifierConfidenceSaliency`` as an estimator: :class:`ConfidenceScoring`
``black_box``             any whole method for classifiers or detectors: :class:`BlackBoxInferer`
``chosen``                a class or object of xaitk-saliency as a method, for ``--method``: :func:`as_method`
``perturbers``            our masks as xaitk-saliency's ``PerturbImage``
``scorings``              our estimators as xaitk-saliency's scorings
``stacks``                whole methods of these parts
``arrays``                the border between arrays with the channel last and tensors with the channel first
========================  =============================================================================================

The classes of ``perturbers``, ``scorings`` and ``stacks`` have the names, parameters, configurations and maps of
xaitk-saliency's. Like xaitk-saliency's, they hold all masks of an image at once.
"""

from monai_saliency.xaitk.black_box import BlackBoxInferer
from monai_saliency.xaitk.chosen import as_method
from monai_saliency.xaitk.estimator import ConfidenceScoring
from monai_saliency.xaitk.masks import PerturbImageMasks
from monai_saliency.xaitk.networks import Classifier, Descriptor, Detector
from monai_saliency.xaitk.perturbers import RandomGrid, RISEGrid, SlidingRadial, SlidingWindow
from monai_saliency.xaitk.scorings import (
    DRISEScoring,
    OcclusionScoring,
    RISEScoring,
    SimilarityScoring,
    SquaredDifferenceScoring,
)
from monai_saliency.xaitk.stacks import (
    DRISEStack,
    RandomGridStack,
    RISEStack,
    SBSMStack,
    SlidingWindowStack,
)

__all__ = [
    "BlackBoxInferer",
    "Classifier",
    "ConfidenceScoring",
    "DRISEScoring",
    "DRISEStack",
    "Descriptor",
    "Detector",
    "OcclusionScoring",
    "PerturbImageMasks",
    "RISEGrid",
    "RISEScoring",
    "RISEStack",
    "RandomGrid",
    "RandomGridStack",
    "SBSMStack",
    "SimilarityScoring",
    "SlidingRadial",
    "SlidingWindow",
    "SlidingWindowStack",
    "SquaredDifferenceScoring",
    "as_method",
]
