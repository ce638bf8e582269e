"""xaitk-saliency, both ways: its objects used here, and ours used there.

========================  ==============================================================================================
module                    what
========================  ==============================================================================================
``networks``              a network as a black box: :class:`Classifier`, :class:`Detector`, :class:`Descriptor`
``loop``                  xaitk-saliency's loops on the engine's masks and estimators
``array_masks``           any ``PerturbImage`` as masks: :class:`PerturbImageMasks`
``scoring``               any ``GenerateClassifierConfidenceSaliency`` as an estimator: :class:`ConfidenceScoring`
``black_box``             any whole method for classifiers or detectors: :class:`BlackBoxInferer`
``chosen``                a class or object of xaitk-saliency as a method, for ``--method``: :func:`as_method`
``fills``                 the loop of MC-RISE, with several fills
``detections``            detections as xaitk-saliency has them, and D-RISE's match
``arrays``, ``images``    the border between arrays with the channel last and tensors with the channel first
========================  ==============================================================================================

The classes that xaitk-saliency finds as plug-ins stand in :mod:`monai_saliency.xaitk.plugins`, and under their names
here.
"""

from monai_saliency.xaitk.array_masks import PerturbImageMasks
from monai_saliency.xaitk.black_box import BlackBoxInferer
from monai_saliency.xaitk.chosen import as_method
from monai_saliency.xaitk.networks import Classifier, Descriptor, Detector
from monai_saliency.xaitk.plugins.gen_classifier_conf_sal import (
    MCRISEScoring,
    OcclusionScoring,
    RISEScoring,
    SquaredDifferenceScoring,
)
from monai_saliency.xaitk.plugins.gen_descriptor_sim_sal import SimilarityScoring
from monai_saliency.xaitk.plugins.gen_detector_prop_sal import DRISEScoring
from monai_saliency.xaitk.plugins.gen_image_classifier_blackbox_sal import MCRISEStack, RISEStack, SlidingWindowStack
from monai_saliency.xaitk.plugins.gen_image_similarity_blackbox_sal import SBSMStack
from monai_saliency.xaitk.plugins.gen_object_detector_blackbox_sal import DRISEStack, RandomGridStack
from monai_saliency.xaitk.plugins.perturb_image import MCRISEGrid, RandomGrid, RISEGrid, SlidingRadial, SlidingWindow
from monai_saliency.xaitk.scoring import ConfidenceScoring

__all__ = [
    "BlackBoxInferer",
    "Classifier",
    "ConfidenceScoring",
    "DRISEScoring",
    "DRISEStack",
    "Descriptor",
    "Detector",
    "MCRISEGrid",
    "MCRISEScoring",
    "MCRISEStack",
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
