"""What replaces a voxel, where that depends on the case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from monai_saliency.cases import Case

__all__ = ["CaseFill"]


class CaseFill(ABC):
    """A fill that depends on more than the image."""

    @abstractmethod
    def bind(self, case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
        """The fill of one case.

        Raises:
            ValueError: when it cannot be told for this case.
        """
