"""White-box methods, for comparison: they need a network whose scores can be differentiated."""

from __future__ import annotations

from typing import Any

from monai_saliency.gradients.grad_cam import GradCAM
from monai_saliency.gradients.integrated import IntegratedGradients
from monai_saliency.gradients.smoothgrad import SmoothGrad
from monai_saliency.inferers.gradients import GradientInferer
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods.arguments import TargetLike, method

__all__ = ["grad_cam", "integrated_gradients", "smoothgrad"]


@method
def integrated_gradients(steps: int = 50, *, target: TargetLike = None, **settings: Any) -> PerturbationInferer:
    """Integrated gradients (Sundararajan, Taly and Yan, ICML 2017): a white-box map that sums to what the scores of the
    image and of its fill differ by.

    Args:
        steps: points on the way from the fill to the image.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = integrated_gradients(10, target=ClassScore([0], "none"))
        >>> explain(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.nn.Flatten()).tolist()  # the score is the first voxel
        [[[[1.0, 0.0, 0.0]]]]
    """
    return GradientInferer(IntegratedGradients(steps), target, **settings)


@method
def smoothgrad(
    num_samples: int = 50,
    noise_level: float = 0.15,
    seed: int = 0,
    reading: str = "times_input",
    *,
    target: TargetLike = None,
    **settings: Any,
) -> PerturbationInferer:
    """SmoothGrad (Smilkov et al., 2017): a white-box map, the mean derivative of the score over copies of the image
    with noise. By default it is multiplied by the image less its fill.

    Args:
        num_samples: copies of the image.
        noise_level: standard deviation of the noise, in shares of the image's range.
        seed: of the noise.
        reading: ``"times_input"``, ``"absolute"`` (as in the paper's pictures) or ``"signed"``, see
            :class:`~monai_saliency.gradients.SmoothGrad`.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> explain = smoothgrad(10, target=ClassScore([2], "none"))
        >>> explain(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.nn.Flatten()).tolist()
        [[[[0.0, 0.0, 3.0]]]]
    """
    method = SmoothGrad(num_samples, noise_level, seed, reading)
    return GradientInferer(method, target, **settings)


@method
def grad_cam(target_layer: str | None = None, *, target: TargetLike = None, **settings: Any) -> PerturbationInferer:
    """Grad-CAM (Selvaraju et al., ICCV 2017): a white-box map, the activations of a layer, weighted by the derivative
    of the score. The value has no sign and is not in the score's unit.

    Args:
        target_layer: the layer's name; by default the last of the coarsest layers. In-place layers, channels last and
            tokens: see :class:`~monai_saliency.gradients.GradCAM`.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten())
        >>> explain = grad_cam("1", target=ClassScore([0], "none"))
        >>> explain(torch.rand(1, 1, 4, 4), network).shape
        torch.Size([1, 1, 4, 4])
    """
    return GradientInferer(GradCAM(target_layer), target, **settings)
