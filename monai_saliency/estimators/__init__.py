"""How scores and masks become a saliency map: one file for each estimator.

An estimator is a pure function of the scores. A :class:`ScoreState` collects the scores of one case.
"""

from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.estimators.dependence import HSICScoring, SobolScoring
from monai_saliency.estimators.occlusion import (
    HierarchicalScoring,
    MinimalRegionScoring,
    OcclusionScoring,
    SimilarityScoring,
    SquaredDifferenceScoring,
)
from monai_saliency.estimators.regression import RegressionScoring
from monai_saliency.estimators.rise import DRISEScoring, MCRISEScoring, RISEScoring
from monai_saliency.estimators.shapley import ShapleyScoring, ShapleyValues, shapley_values

__all__ = [
    "DRISEScoring",
    "Estimator",
    "RegressionScoring",
    "HSICScoring",
    "HierarchicalScoring",
    "MCRISEScoring",
    "MinimalRegionScoring",
    "OcclusionScoring",
    "RISEScoring",
    "ScoreState",
    "ShapleyScoring",
    "ShapleyValues",
    "SimilarityScoring",
    "SobolScoring",
    "SquaredDifferenceScoring",
    "shapley_values",
]
