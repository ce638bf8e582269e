"""What is between us and a network: its inputs, outputs, weights and identity."""

from monai_saliency.networks.adapters import OnImageGrid
from monai_saliency.networks.checkpoints import load_checkpoint
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.inputs import ArgumentInputs, DictInput, InputAdapter, ListInput, TensorInput

__all__ = [
    "ArgumentInputs",
    "DictInput",
    "InputAdapter",
    "ListInput",
    "OnImageGrid",
    "TensorInput",
    "load_checkpoint",
    "network_fingerprint",
]
