"""A class of its own for each image of a batch, as captum takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai_saliency.cases import Case
from monai_saliency.targets.base import BoundTarget, Target


class PerImage(Target):
    """A target for each image of a batch, in their order.

    Args:
        targets: the B targets.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = list(targets)

    def of_image(self, index: int, count: int) -> Target:
        if count != len(self.targets):
            raise ValueError(
                f"`target` is a tensor with a class for each of {len(self.targets)} images, and there are {count}: "
                "give one class an image, or a list such as target=[0, 2] for these classes of all images"
            )
        return self.targets[index]

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        return self.of_image(0, 1).bind(reference_output, case)
