"""Saliency maps for MONAI models: which part of this scan made the network say that?"""

from monai_saliency.channels import ChannelMasks, IndependentChannelMasks
from monai_saliency.estimators import OcclusionScoring, RISEScoring
from monai_saliency.explanations import Explanation
from monai_saliency.fills import BlurFill, ConstantFill, MeanFill, ScanUnitFill
from monai_saliency.inferers import PerturbationInferer
from monai_saliency.inputs import ArgumentInputs, DictInput, ListInput
from monai_saliency.masks import RegionMasks, RISEMasks, SlidingWindowMasks
from monai_saliency.methods import channel_occlusion, patch_windows, region_occlusion, rise, sliding_window
from monai_saliency.patch_memory import PatchMemory
from monai_saliency.regions import Supervoxels
from monai_saliency.saliency_dataset import SaliencyDataset
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
    "ChannelMasks",
    "ClassScore",
    "ConstantFill",
    "DetectionScore",
    "DiceScore",
    "DictInput",
    "EmbeddingSimilarity",
    "Explanation",
    "FieldSimilarity",
    "FunctionScore",
    "IndependentChannelMasks",
    "ListInput",
    "MeanFill",
    "OcclusionScoring",
    "PatchMemory",
    "PerturbationInferer",
    "RISEMasks",
    "RISEScoring",
    "RegionMasks",
    "RegionScore",
    "RegressionScore",
    "Saliency",
    "SaliencyDataset",
    "Saliencyd",
    "ScanUnitFill",
    "SlidingWindowMasks",
    "Supervoxels",
    "channel_occlusion",
    "patch_windows",
    "region_occlusion",
    "rise",
    "sliding_window",
]
