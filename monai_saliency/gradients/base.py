"""The contract of white-box methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from monai_saliency.estimators.base import Meaning

__all__ = ["GradientMethod", "NoGradient"]


class NoGradient(Exception):
    """Raised where a network gives no derivative. The text says why."""


class GradientMethod(ABC):
    """The settings of a white-box method.

    The score is differentiated at N images that the method makes of the one that is explained, and of the mean of the
    derivatives the method makes the map. Image ``i`` depends only on the settings, ``i`` and the image itself. So the
    map does not depend on how the images are cut into batches.

    Attributes:
        meaning: what the values of the map are.

    Example::

        >>> from monai_saliency.gradients import IntegratedGradients
        >>> method = IntegratedGradients(steps=4)
        >>> isinstance(method, GradientMethod), len(method)
        (True, 4)
        >>> float(method.weights().sum())
        1.0
    """

    meaning: Meaning

    @abstractmethod
    def __len__(self) -> int:
        """N, the number of images at which the score is differentiated."""

    @abstractmethod
    def images(self, image: torch.Tensor, fill: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        """Some of the images at which the score is differentiated.

        Args:
            image: ``(C, *spatial)``, the one that is explained.
            fill: ``(C, *spatial)``, the baseline.
            indices: which of them, n numbers in [0, N).

        Returns:
            ``(n, C, *spatial)``.
        """

    def weights(self) -> torch.Tensor:
        """The weight of each image's derivative in the mean: float64 ``(N,)``, of sum 1."""
        return torch.full((len(self),), 1 / len(self), dtype=torch.float64)

    @abstractmethod
    def map(self, mean: torch.Tensor, image: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        """Make the map.

        Args:
            mean: ``(C, *spatial)``, the weighted mean of what :meth:`pull` gives, float64 (float32 on devices without
                float64).
            image: ``(C, *spatial)``.
            fill: ``(C, *spatial)``.

        Returns:
            ``(*spatial)``.
        """

    @contextmanager
    def watching(self, network: Any) -> Iterator[Any]:
        """Watch a call of the network, for :meth:`pull`.

        Args:
            network: the network, as the user gave it.

        Yields:
            anything; None by default.

        Raises:
            NoGradient: when the network cannot be watched.
        """
        yield None

    def pull(
        self, images: torch.Tensor, watched: Any, outputs: Sequence[torch.Tensor], grads: Sequence[Any], keep: bool
    ) -> torch.Tensor | None:
        """What a call of the network tells of its images: by default the derivative of the score.

        Args:
            images: ``(n, C, *size)``, whole images or patches, for which the network was called.
            watched: what :meth:`watching` gave.
            outputs: the outputs of the call.
            grads: the derivative of the score with respect to each output.
            keep: whether this is called again for the same call.

        Returns:
            of the shape of ``images``; None where the outputs do not depend on them.
        """
        return torch.autograd.grad(outputs, images, grads, retain_graph=keep, allow_unused=True)[0]
