"""Which number of the network's output is explained.

A :class:`Target` holds a user's settings. :meth:`Target.bind` reads the output of one unperturbed case and freezes what
the question refers to: the predicted class, region or boxes. So every perturbed output is asked the same question.

==================  ==============================================================================================
module              what is explained
==================  ==============================================================================================
``base``            the contract: :class:`Target` and :class:`BoundTarget`, and checks of network outputs
``classification``  classes of the whole image: :class:`ClassScore`
``segmentation``    the probability of a region, or the Dice score: :class:`RegionScore`, :class:`DiceScore`
``regions``         the region on the output's grid, for the targets of segmentations
``detection``       boxes that a detector finds (D-RISE): :class:`DetectionScore`
``regression``      predicted numbers, or any that a user's function computes: :class:`RegressionScore`,
                    :class:`FunctionScore`
``similarity``      embeddings and displacement fields: :class:`EmbeddingSimilarity`, :class:`FieldSimilarity`
``postprocessing``  what a bundle makes of the output: its activation, and its labels
``auto``            a target chosen from the output, for bundles of unknown task: ``AutoTarget``
==================  ==============================================================================================
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
