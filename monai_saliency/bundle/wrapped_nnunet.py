"""What predicts inside MONAI's wrapper of nnU-Net (``monai.apps.nnunet``).

The wrapper takes an image as it is in the file, preprocesses it, and gives labels, which show no gradual change. So its
logits are explained, on nnU-Net's own grid, with nnU-Net's own patches; maps go back to the wrapper's input, and from
there through the bundle's preprocessing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import ResampleToMatch

from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.networks.nnunet import MirroredNetwork, NNUNetNetwork
from monai_saliency.transforms import NNUNetPreprocessd

__all__ = ["WrappedNNUNet", "predicting"]


class WrappedNNUNet:
    """Stands for an evaluator whose network is MONAI's ``ModelnnUNetWrapper``.

    Args:
        evaluator: the evaluator.

    Attributes:
        network: gives the logits of patches.
        inferer: cuts the patches.
        activation: what makes probabilities of the logits.
        amp, amp_kwargs: how the network is autocast on a GPU, as nnU-Net does.
        meter: the evaluator's.
    """

    def __init__(self, evaluator: Any) -> None:
        predictor = evaluator.network.predictor
        self.device = torch.device(predictor.device)
        patch_size = predictor.configuration_manager.patch_size
        axes = predictor.allowed_mirroring_axes if predictor.use_mirroring else None
        members = []
        for weights in predictor.list_of_parameters:
            # The predictor has one network, into which it loads one fold after the other.
            network = copy.deepcopy(predictor.network)
            network.load_state_dict(weights)
            members.append(MirroredNetwork(network, axes or (), len(patch_size)))
        self.network = NNUNetNetwork(members).to(self.device).eval()
        self.inferer = NNUNetInferer(patch_size, predictor.tile_step_size, predictor.use_gaussian)
        self.activation = "sigmoid" if predictor.label_manager.has_regions else "softmax"
        self.amp = self.device.type == "cuda"
        self.amp_kwargs: dict[str, Any] = {}
        self.meter = getattr(evaluator, "meter", None)
        plans = predictor.plans_manager.plans, predictor.dataset_json
        names = predictor.plans_manager.available_configurations
        settings = predictor.configuration_manager.configuration
        same = (name for name in names if predictor.plans_manager.get_configuration(name).configuration == settings)
        self._arguments = *plans, next(same)
        self._transforms: dict[Any, NNUNetPreprocessd] = {}

    def transform(self, key: Any) -> NNUNetPreprocessd:
        """What the wrapper does to its input, which a case holds under a key: the same object at each call."""
        if key not in self._transforms:
            self._transforms[key] = NNUNetPreprocessd(key, *self._arguments, as_given=True)
        return self._transforms[key]

    def preprocess(self, case: dict[Any, Any], key: Any) -> MetaTensor:
        """What nnU-Net's network gets of the image ``(C, *spatial)`` under a key of a case."""
        return self.transform(key)({key: case[key]})[key].to(self.device)

    @staticmethod
    def on_grid(labels: torch.Tensor, image: MetaTensor) -> torch.Tensor:
        """A label map on the grid of a preprocessed image."""
        return ResampleToMatch(mode="nearest", padding_mode="zeros")(labels.cpu(), image.cpu())


def predicting(evaluator: Any) -> Any:
    """What predicts in an evaluator: the evaluator itself, or what is inside of MONAI's nnU-Net wrapper."""
    is_wrapped = type(evaluator.network).__name__ == "ModelnnUNetWrapper" and hasattr(evaluator.network, "predictor")
    return WrappedNNUNet(evaluator) if is_wrapped else evaluator
