"""Saliency maps for MONAI models: which part of this scan made the network say that?

The rooms are modules: ``monai_saliency.metrics``, ``monai_saliency.data``, ... Those that need an extra (``handlers``,
``distributed``, ``engines``, ``bundle``), and ``xaitk``, are imported when they are first used, and so is
:func:`attach`.
"""

from importlib import import_module
from typing import Any

from monai_saliency import methods
from monai_saliency.cases import Case
from monai_saliency.data.saliency_dataset import SaliencyDataset
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
from monai_saliency.estimators.shapley import ShapleyScoring, shapley_values
from monai_saliency.fills.blur import BlurFill
from monai_saliency.fills.constant import ConstantFill, MeanFill, ScanUnitFill
from monai_saliency.fills.donor import DonorFill
from monai_saliency.fills.inpaint import InpaintFill
from monai_saliency.fills.mirror import MirrorFill
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.patch_memory import PatchMemory
from monai_saliency.masks.channel import ChannelMasks, IndependentChannelMasks
from monai_saliency.masks.coalition import CoalitionMasks
from monai_saliency.masks.focused import FocusedMasks
from monai_saliency.masks.grid import GridMasks, SobolMasks
from monai_saliency.masks.hierarchical import HierarchicalMasks, RegionHierarchyMasks
from monai_saliency.masks.minimal import MinimalMasks
from monai_saliency.masks.region import RegionMasks
from monai_saliency.masks.rise import MCRISEMasks, RandomGridMasks, RISEMasks
from monai_saliency.masks.sliding_radial import SlidingRadialMasks
from monai_saliency.masks.sliding_window import MultiScaleWindowMasks, SlidingWindowMasks
from monai_saliency.masks.supervoxels import OrganSupervoxels, Supervoxels
from monai_saliency.masks.until import UntilMasks
from monai_saliency.methods import *  # noqa: F403
from monai_saliency.networks.inputs import ArgumentInputs, DictInput, ListInput
from monai_saliency.targets import (
    ClassScore,
    DetectionScore,
    DiceScore,
    EmbeddingSimilarity,
    FieldSimilarity,
    FunctionScore,
    RegionScore,
    RegressionScore,
)
from monai_saliency.transforms import Saliency, Saliencyd
from monai_saliency.version import __version__ as __version__

__all__ = [
    "ArgumentInputs",
    "BlurFill",
    "Case",
    "ChannelMasks",
    "ClassScore",
    "CoalitionMasks",
    "ConstantFill",
    "DRISEScoring",
    "DetectionScore",
    "DiceScore",
    "DictInput",
    "DonorFill",
    "EmbeddingSimilarity",
    "Explanation",
    "FieldSimilarity",
    "FunctionScore",
    "FocusedMasks",
    "GridMasks",
    "HSICScoring",
    "HierarchicalMasks",
    "InpaintFill",
    "MirrorFill",
    "RegressionScoring",
    "HierarchicalScoring",
    "IndependentChannelMasks",
    "ListInput",
    "MCRISEMasks",
    "MCRISEScoring",
    "MeanFill",
    "MinimalMasks",
    "MinimalRegionScoring",
    "MultiScaleWindowMasks",
    "OcclusionScoring",
    "OrganSupervoxels",
    "PatchMemory",
    "PerturbationInferer",
    "RISEMasks",
    "RISEScoring",
    "RandomGridMasks",
    "RegionHierarchyMasks",
    "RegionMasks",
    "RegionScore",
    "RegressionScore",
    "Saliency",
    "SaliencyDataset",
    "Saliencyd",
    "ScanUnitFill",
    "ShapleyScoring",
    "SimilarityScoring",
    "SlidingRadialMasks",
    "SlidingWindowMasks",
    "SobolMasks",
    "SobolScoring",
    "SquaredDifferenceScoring",
    "Supervoxels",
    "UntilMasks",
    "shapley_values",
]
__all__ += methods.__all__

_ROOMS = ("bundle", "distributed", "engines", "handlers", "metrics", "visualize", "xaitk")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name == "attach":
        return import_module(f"{__name__}.bundle.attach").attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
