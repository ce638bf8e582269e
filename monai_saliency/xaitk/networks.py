"""A classification network as a black box of xaitk-saliency, in one line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage

from monai_saliency.inferers.forward import evaluating
from monai_saliency.networks.outputs import OutputPath, read
from monai_saliency.targets.base import ACTIVATIONS, to_float
from monai_saliency.utils.arguments import callable_network, check_option, whole_number
from monai_saliency.utils.tensors import shape_in_words
from monai_saliency.xaitk.arrays import Unconfigured, tensor_of


class Classifier(Unconfigured, ClassifyImage):
    """A classification network as the black box of xaitk-saliency. It runs on batches ``(B, C, H, W)`` of neighbouring
    images of one shape.

    Args:
        network: any callable that takes batches ``(B, C, H, W)`` and gives ``(B, classes)``.
        labels: names of the classes, or their number.
        activation: turns the output into confidences: ``"softmax"``, ``"sigmoid"``, or ``"none"``.
        transform: a function of batches that comes before the network: xaitk-saliency's images are arrays, often in
            [0, 255].
        batch_size: images in one call of the network, at the most.
        device: of the images; by default the device of the network's parameters, or else the CPU.
        output: the part of the network's output that holds the classes, where it is not a tensor.

    Raises:
        ValueError: for settings that do not fit each other or the network's output.

    Example::

        >>> import numpy as np, torch
        >>> from monai_saliency.xaitk import Classifier, RISEStack
        >>> network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> blackbox = Classifier(network, labels=["red", "green", "blue"], activation="softmax")
        >>> RISEStack(20, 4, 0.5, seed=0)(np.random.default_rng(0).random((16, 12, 3)), blackbox).shape
        (3, 16, 12)
    """

    def __init__(
        self,
        network: Callable[..., Any],
        labels: int | Sequence[Hashable],
        activation: str,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        output: OutputPath | None = None,
    ) -> None:
        self.network = callable_network(network)
        self.labels = list(range(labels) if isinstance(labels, int) else labels)
        self.activation = check_option("activation", activation, list(ACTIVATIONS))
        self.transform = transform
        self.batch_size = whole_number("batch_size", batch_size, 1)
        first = next(network.parameters(), None) if isinstance(network, torch.nn.Module) else None
        self.device = torch.device(device) if device is not None else getattr(first, "device", None)
        self.dtype = torch.float64 if getattr(first, "dtype", None) == torch.float64 else torch.float32
        self.output = output

    def get_labels(self) -> Sequence[Hashable]:
        """The names of the classes."""
        return self.labels

    def classify_images(self, img_iter: Iterable[np.ndarray]) -> Iterator[dict[Hashable, float]]:
        """The confidences of each image ``(H, W)`` or ``(H, W, C)``, by the names of the classes."""
        tensors = (tensor_of(image, self.dtype, self.device) for image in img_iter)
        for _, alike in groupby(tensors, key=lambda tensor: tensor.shape):
            while batch := list(islice(alike, self.batch_size)):
                for row in self._confidences(torch.stack(batch)):
                    yield dict(zip(self.labels, row, strict=True))

    @torch.no_grad()
    def _confidences(self, batch: torch.Tensor) -> list[list[float]]:
        """The confidences of each class, by image."""
        inputs = batch if self.transform is None else self.transform(batch)
        with evaluating(self.network):
            output = read(self.network(inputs), self.output)
        count = len(self.labels)
        if not isinstance(output, torch.Tensor) or output.ndim != 2 or output.shape[1] != count:
            raise ValueError(f"the network must give (B, {count}), one column per label, got {shape_in_words(output)}")
        confidences: list[list[float]] = ACTIVATIONS[self.activation](to_float(output)).tolist()
        return confidences
