"""Which number of the network's output is explained.

A :class:`Target` holds a user's settings. :meth:`Target.bind` reads the output of one unperturbed case and freezes what
the question refers to: the predicted class, region or boxes. So every perturbed output is asked the same question.

There is one module a task, and ``auto``, which chooses a target from the output, for bundles of unknown task
(``AutoTarget``), by what ``postprocessing`` reads of the bundle. ``base`` is the contract.
"""

from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.targets.classification import ClassScore
from monai_saliency.targets.detection import DetectionScore
from monai_saliency.targets.regression import FunctionScore, RegressionScore
from monai_saliency.targets.segmentation import DiceScore, RegionScore
from monai_saliency.targets.similarity import EmbeddingSimilarity, FieldSimilarity

__all__ = [
    "BoundTarget",
    "ClassScore",
    "DetectionScore",
    "DiceScore",
    "EmbeddingSimilarity",
    "FieldSimilarity",
    "FunctionScore",
    "RegionScore",
    "RegressionScore",
    "Target",
]
