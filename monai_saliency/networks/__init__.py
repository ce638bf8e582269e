"""How a network is called and known: its inputs, outputs, weights and identity.

===============  ==============================================================================================
``inputs``       how a network takes its inputs (a tensor, a list, a dictionary, arguments), and which are perturbed
``outputs``      reading a part of a structured output, and cutting a batch's output into rows
``adapters``     networks of other libraries with the interface of MONAI's networks
``nnunet``       a trained nnU-Net v2 model, and its folds and mirrored copies as one network
``ensemble``     several networks as one, which run together
``runtime``      how fast a network runs: half precision, channels last in memory, compiled
``identity``     the key by which a network is known, whatever runs it: it decides whether stored scores may be used
``checkpoints``  loading weights, and networks that ``torch.export`` has written
===============  ==============================================================================================
"""

from monai_saliency.networks.adapters import OnImageGrid
from monai_saliency.networks.checkpoints import load_checkpoint, unloaded_network
from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.inputs import ArgumentInputs, DictInput, ListInput, TensorInput
from monai_saliency.networks.runtime import accelerated, runtime_settings

__all__ = [
    "ArgumentInputs",
    "DictInput",
    "Ensemble",
    "ListInput",
    "OnImageGrid",
    "TensorInput",
    "accelerated",
    "load_checkpoint",
    "network_fingerprint",
    "runtime_settings",
    "unloaded_network",
]
