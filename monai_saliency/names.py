"""What ``import monai_saliency as ms`` gives, but for the rooms and ``attach``, which needs an extra."""

from monai_saliency.cases import Case
from monai_saliency.data.saliency_dataset import SaliencyDataset
from monai_saliency.fills.donor import DonorFill
from monai_saliency.fills.inpaint import InpaintFill
from monai_saliency.fills.mirror import MirrorFill
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.fills.simple import BlurFill, ConstantFill, MeanFill
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.patch_memory import PatchMemory
from monai_saliency.masks.supervoxels import OrganSupervoxels, Supervoxels
from monai_saliency.methods import *  # noqa: F403
from monai_saliency.methods import __all__ as _methods
from monai_saliency.methods.default import explain
from monai_saliency.networks.ensemble import Ensemble
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
from monai_saliency.targets.auto import AutoTarget
from monai_saliency.transforms import Saliency, Saliencyd, SaveSaliencyd

__all__ = [
    "ArgumentInputs",
    "AutoTarget",
    "BlurFill",
    "Case",
    "ClassScore",
    "ConstantFill",
    "DetectionScore",
    "DiceScore",
    "DictInput",
    "DonorFill",
    "EmbeddingSimilarity",
    "Ensemble",
    "Explanation",
    "FieldSimilarity",
    "FunctionScore",
    "InpaintFill",
    "ListInput",
    "MeanFill",
    "MirrorFill",
    "OrganSupervoxels",
    "PatchMemory",
    "PerturbationInferer",
    "RegionScore",
    "RegressionScore",
    "Saliency",
    "SaliencyDataset",
    "Saliencyd",
    "SaveSaliencyd",
    "ScanUnitFill",
    "Supervoxels",
    "explain",
]
__all__ += _methods
