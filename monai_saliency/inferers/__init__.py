"""The loop that every explanation runs: make masks, perturb, run the network, read scores, make the map."""

from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.fill_choice import choose_fill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.patch_memory import PatchMemory

__all__ = ["Explanation", "PatchMemory", "PerturbationInferer", "choose_fill"]
