"""How scores and masks become a saliency map.

An estimator is a pure function of the scores. A :class:`ScoreState` collects the scores of one case.

================  ======================================================================================
module            map
================  ======================================================================================
``base``          the contract: :class:`Estimator` and :class:`ScoreState`
``rise``          the average score while a voxel is kept, for random masks
``occlusion``     the average drop of the score while a voxel is hidden, for windows and regions
``focused``       RISE inside boxes that windows found, and the windows' drop elsewhere
``hierarchical``  the same drop summed over levels, for windows that are refined where they matter
``shapley``       what a region adds to the score, on average over all orders of regions
================  ======================================================================================
"""

from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.estimators.focused import FocusedScoring
from monai_saliency.estimators.hierarchical import HierarchicalScoring
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.estimators.shapley import ShapleyScoring, ShapleyValues, shapley_values

__all__ = [
    "Estimator",
    "FocusedScoring",
    "HierarchicalScoring",
    "OcclusionScoring",
    "RISEScoring",
    "ScoreState",
    "ShapleyScoring",
    "ShapleyValues",
    "shapley_values",
]
