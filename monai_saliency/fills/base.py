"""The contract of fills that depend on the case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from monai_saliency.cases import Case
from monai_saliency.utils.arguments import written


class CaseFill(ABC):
    """A fill that needs more than the image, such as the case's file. A subclass implements :meth:`bind`.

    Example::

        >>> import monai_saliency as ms
        >>> issubclass(ms.ScanUnitFill, CaseFill)
        True
    """

    __repr__ = written

    @abstractmethod
    def bind(self, case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
        """Make the fill of one case.

        Args:
            case: the case, with its unperturbed image.

        Returns:
            a function that takes images ``(B, C, *spatial)`` and returns a tensor of the same shape.

        Raises:
            ValueError: when this case has no such fill.
        """
