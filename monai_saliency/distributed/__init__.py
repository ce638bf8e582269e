"""Engines, one short file each, for machinery that people already use. See :mod:`monai_saliency.distributed.base`."""

from monai_saliency.distributed.base import Cohort, Engine, RankEngine, local_device
from monai_saliency.distributed.ray import RayEngine
from monai_saliency.distributed.slurm import SlurmEngine
from monai_saliency.distributed.torchrun import TorchrunEngine

__all__ = [
    "Cohort",
    "Engine",
    "RankEngine",
    "RayEngine",
    "SlurmEngine",
    "TorchrunEngine",
    "local_device",
]
