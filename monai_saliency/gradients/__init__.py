"""White-box maps, for comparison: at which images the derivative of the score is taken, and what map is made of it.

Nothing else in this package looks inside a network. These methods need one whose scores can be differentiated
(:mod:`monai_saliency.inferers.gradients` runs them, and refuses others).

========================  ==============================================================================================
module                    what
========================  ==============================================================================================
``base``                  the contract: :class:`GradientMethod`, and the calls of a network: :class:`NetworkCalls`
``integrated``            :class:`IntegratedGradients`
``smoothgrad``            :class:`SmoothGrad`
``grad_cam``              :class:`GradCAM`
========================  ==============================================================================================
"""

from monai_saliency.gradients.base import GradientMethod
from monai_saliency.gradients.grad_cam import GradCAM
from monai_saliency.gradients.integrated import IntegratedGradients
from monai_saliency.gradients.smoothgrad import SmoothGrad

__all__ = ["GradCAM", "GradientMethod", "IntegratedGradients", "SmoothGrad"]
