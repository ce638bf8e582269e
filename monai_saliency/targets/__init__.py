"""Which number of the network's output is explained.

A target holds the user's settings. :meth:`Target.bind` sees one case's unperturbed output and freezes what the
question refers to (the predicted class, region or boxes), so that every perturbed output is asked the same.
"""

from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.targets.classification import ClassScore
from monai_saliency.targets.detection import DetectionScore
from monai_saliency.targets.function import FunctionScore
from monai_saliency.targets.regression import RegressionScore
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
