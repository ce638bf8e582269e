"""xaitk-saliency, both ways: its objects used here, and ours used there.

========================  ==============================================================================================
module                    what
========================  ==============================================================================================
``networks``              a network as a black box: :class:`Classifier`, :class:`Detector`, :class:`Descriptor`
``loop``                  xaitk-saliency's loops on the engine's masks and estimators
``array_masks``           masks that somebody else made
``detections``            detections as xaitk-saliency has them, and D-RISE's match
``arrays``                the border between arrays with the channel last and tensors with the channel first
========================  ==============================================================================================

The classes that xaitk-saliency finds as plug-ins stand in :mod:`monai_saliency_xaitk`, and under their names here.
"""

from monai_saliency.xaitk.networks import Classifier, Descriptor, Detector
from monai_saliency_xaitk.gen_classifier_conf_sal import OcclusionScoring, RISEScoring, SquaredDifferenceScoring
from monai_saliency_xaitk.gen_descriptor_sim_sal import SimilarityScoring
from monai_saliency_xaitk.gen_detector_prop_sal import DRISEScoring
from monai_saliency_xaitk.gen_image_classifier_blackbox_sal import RISEStack, SlidingWindowStack
from monai_saliency_xaitk.gen_image_similarity_blackbox_sal import SBSMStack
from monai_saliency_xaitk.gen_object_detector_blackbox_sal import DRISEStack
from monai_saliency_xaitk.perturb_image import RISEGrid, SlidingWindow

__all__ = [
    "Classifier",
    "DRISEScoring",
    "DRISEStack",
    "Descriptor",
    "Detector",
    "OcclusionScoring",
    "RISEGrid",
    "RISEScoring",
    "RISEStack",
    "SBSMStack",
    "SimilarityScoring",
    "SlidingWindow",
    "SlidingWindowStack",
    "SquaredDifferenceScoring",
]
