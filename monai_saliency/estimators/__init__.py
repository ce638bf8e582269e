"""How scores and masks become a saliency map: one file for each estimator.

An estimator is a pure function of the scores. A :class:`ScoreState` collects the scores of one case.
"""

from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.estimators.drise import DRISEScoring
from monai_saliency.estimators.hsic import HSICScoring
from monai_saliency.estimators.mc_rise import MCRISEScoring
from monai_saliency.estimators.minimal import MinimalRegionScoring
from monai_saliency.estimators.occlusion import (
    HierarchicalScoring,
    OcclusionScoring,
    SimilarityScoring,
    SquaredDifferenceScoring,
)
from monai_saliency.estimators.regression import RegressionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.estimators.shapley import ShapleyScoring, ShapleyValues, shapley_values
from monai_saliency.estimators.sobol import SobolScoring

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
