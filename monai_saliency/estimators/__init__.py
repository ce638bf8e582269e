"""How scores and masks become a saliency map: one file for each estimator.

An estimator is a pure function of what a search has observed (:class:`~monai_saliency.masks.Observed`).
"""

from monai_saliency.estimators.base import Estimator
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
    "ShapleyScoring",
    "ShapleyValues",
    "SimilarityScoring",
    "SobolScoring",
    "SquaredDifferenceScoring",
    "shapley_values",
]
