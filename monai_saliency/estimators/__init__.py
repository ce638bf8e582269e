"""How scores and masks become a map."""

from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring

__all__ = ["Estimator", "OcclusionScoring", "RISEScoring", "ScoreState"]
