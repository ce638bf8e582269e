"""How scores and masks become a saliency map.

An estimator is a pure function of the scores. A :class:`ScoreState` collects the scores of one case.

======================  ======================================================================================
module                  map
======================  ======================================================================================
``base``                the contract: :class:`Estimator` and :class:`ScoreState`
``rise``                the average score while a voxel is kept, for random masks
``mc_rise``             how far each of several fills lowers the score, for MC-RISE
``occlusion``           the average drop of the score while a voxel is hidden, for windows and regions
``drise``               the average score while a voxel is kept, for masks of any family
``similarity``          the average loss of the score while a voxel is hidden; gains count as nothing
``squared_difference``  half the squared change of the score while a voxel is hidden
``focused``             RISE inside boxes that windows found, and the windows' drop elsewhere
``hierarchical``        the same drop summed over levels, for windows that are refined where they matter
``shapley``             what a region adds to the score, on average over all orders of regions
``odd_interactions``    which regions act together in threes, for estimates of Shapley values
``sample_reuse``        what their regression misses, estimated from the same scores
``hsic``                how strongly the score depends on a cell, for random grids and regions
``sobol``               the share of the score's variance that a cell has a part in, for Sobol designs
``minimal``             1 inside the smallest set of windows that keeps the score
======================  ======================================================================================
"""

from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.estimators.drise import DRISEScoring
from monai_saliency.estimators.focused import FocusedScoring
from monai_saliency.estimators.hierarchical import HierarchicalScoring
from monai_saliency.estimators.hsic import HSICScoring
from monai_saliency.estimators.mc_rise import MCRISEScoring
from monai_saliency.estimators.minimal import MinimalRegionScoring
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.estimators.shapley import ShapleyScoring, ShapleyValues, shapley_values
from monai_saliency.estimators.similarity import SimilarityScoring
from monai_saliency.estimators.sobol import SobolScoring
from monai_saliency.estimators.squared_difference import SquaredDifferenceScoring

__all__ = [
    "DRISEScoring",
    "Estimator",
    "FocusedScoring",
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
