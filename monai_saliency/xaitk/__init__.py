"""xaitk-saliency, both ways: its objects used here, and our methods found by its discovery.

Here: a ``PerturbImage`` as masks (``masks``), a scoring as an estimator (``estimator``), a whole method as an inferer
(``black_box``). There: a network as a black box (``networks``), our masks as ``PerturbImage`` (``perturbers``), and
whole methods (``stacks``) by the names of xaitk-saliency's. Like these, they hold all masks of an image at once.
"""

from monai_saliency.xaitk.black_box import BlackBoxInferer, as_method
from monai_saliency.xaitk.estimator import ConfidenceScoring
from monai_saliency.xaitk.masks import PerturbImageMasks
from monai_saliency.xaitk.networks import Classifier
from monai_saliency.xaitk.perturbers import RandomGrid, RISEGrid, SlidingRadial, SlidingWindow
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
    "DRISEStack",
    "PerturbImageMasks",
    "RISEGrid",
    "RISEStack",
    "RandomGrid",
    "RandomGridStack",
    "SBSMStack",
    "SlidingRadial",
    "SlidingWindow",
    "SlidingWindowStack",
    "as_method",
]
