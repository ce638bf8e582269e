"""xaitk-saliency's own classes under the names that ours have in ``monai_saliency.xaitk``."""

from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.squared_difference_scoring import SquaredDifferenceScoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.mc_rise import MCRISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.occlusion_based import PerturbationOcclusion
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal.sbsm import SBSMStack
from xaitk_saliency.impls.gen_object_detector_blackbox_sal.drise import DRISEStack, RandomGridStack
from xaitk_saliency.impls.perturb_image.rise import RISEGrid
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial

__all__ = [
    "DRISEStack",
    "MCRISEStack",
    "OcclusionScoring",
    "PerturbationOcclusion",
    "RISEGrid",
    "RISEStack",
    "RandomGridStack",
    "SBSMStack",
    "SlidingRadial",
    "SlidingWindowStack",
    "SquaredDifferenceScoring",
]
