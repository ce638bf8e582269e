"""Engines: one short file each, for the machinery that people bring. See :mod:`monai_saliency.engines.base`."""

from monai_saliency.engines.base import Cohort, Engine, local_device
from monai_saliency.engines.devices import DevicesEngine, OverDevices
from monai_saliency.engines.ranks import RankEngine, TorchrunEngine
from monai_saliency.engines.ray import RayEngine
from monai_saliency.engines.slurm import SlurmEngine
from monai_saliency.engines.worker import Worker

__all__ = [
    "Cohort",
    "DevicesEngine",
    "Engine",
    "OverDevices",
    "RankEngine",
    "RayEngine",
    "SlurmEngine",
    "TorchrunEngine",
    "Worker",
    "local_device",
]
