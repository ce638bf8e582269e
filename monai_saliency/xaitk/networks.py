"""Networks as the black boxes of xaitk-saliency, in one line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox

from monai_saliency.cases import Case
from monai_saliency.inferers.forward import evaluating
from monai_saliency.networks.outputs import OutputPath, read
from monai_saliency.targets.base import ACTIVATIONS, check_tensor, to_float
from monai_saliency.targets.detection import DetectionScore
from monai_saliency.utils.arguments import callable_network, check_option, instance, whole_number
from monai_saliency.xaitk.arrays import Unconfigured, tensor_of

__all__ = ["Classifier", "Descriptor", "Detector"]


class _BlackBox(Unconfigured):
    """A network that runs on batches ``(B, C, H, W)`` of neighbouring images of one shape."""

    def __init__(
        self,
        network: Callable[..., Any],
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        output: OutputPath | None = None,
    ) -> None:
        self.network = callable_network(network)
        self.transform = instance("transform", transform, (), "a function of batches", function=True, none=True)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        first = next(network.parameters(), None) if isinstance(network, torch.nn.Module) else None
        self.device = torch.device(device) if device is not None else getattr(first, "device", None)
        self.dtype = torch.float64 if getattr(first, "dtype", None) == torch.float64 else torch.float32
        self.output = output

    @torch.no_grad()
    def _outputs(self, images: Iterable[np.ndarray]) -> Iterator[tuple[torch.Tensor, Any]]:
        """Batches ``(n, C, H, W)``, and the network's output of each."""
        batch: list[torch.Tensor] = []
        for image in chain(images, [None]):
            tensor = None if image is None else tensor_of(image, self.dtype, self.device)
            is_full = len(batch) == self.batch_size
            if batch and (tensor is None or is_full or tensor.shape != batch[0].shape):
                stacked, batch = torch.stack(batch), []
                yield stacked, self._output(stacked)
            if tensor is not None:
                batch.append(tensor)

    def _output(self, batch: torch.Tensor) -> Any:
        """The part of the network's output of a batch that is read."""
        inputs = batch if self.transform is None else self.transform(batch)
        with evaluating(self.network):
            return read(self.network(inputs), self.output)


class Classifier(_BlackBox, ClassifyImage):
    """A classification network as the black box of xaitk-saliency.

    Args:
        network: any callable that takes batches ``(B, C, H, W)`` and gives ``(B, classes)``.
        labels: names of the classes, or their number.
        activation: turns the output into confidences: ``"softmax"``, ``"sigmoid"``, or ``"none"``.
        settings: ``transform`` (a function of batches that comes before the network: xaitk-saliency's images are
            arrays, often in [0, 255]), ``batch_size`` (images in one call of the network, at the most), ``device`` (of
            the images; by default the device of the network's parameters, or else the CPU) and ``output`` (the part of
            the network's output that holds the classes, where it is not a tensor).

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
        *args: Any,
        **settings: Any,
    ) -> None:
        super().__init__(network, *args, **settings)
        self.labels = _names(labels)
        self.activation = check_option("activation", activation, list(ACTIVATIONS))

    def get_labels(self) -> Sequence[Hashable]:
        """The names of the classes."""
        return self.labels

    def classify_images(self, img_iter: Iterable[np.ndarray]) -> Iterator[dict[Hashable, float]]:
        """The confidences of each image ``(H, W)`` or ``(H, W, C)``, by the names of the classes."""
        for _, output in self._outputs(img_iter):
            shape = tuple(getattr(output, "shape", ()))
            if len(shape) != 2 or shape[1] != len(self.labels):
                what = f"shape {shape}" if shape else f"a {type(output).__name__}"
                raise ValueError(f"the network must give (B, {len(self.labels)}), one column per label, got {what}")
            confidences = ACTIVATIONS[self.activation](to_float(output))
            for row in confidences.tolist():
                yield dict(zip(self.labels, row, strict=True))


class Detector(_BlackBox, DetectImageObjects):
    """A detection network as the black box of xaitk-saliency.

    Args:
        network: any callable that takes batches ``(B, C, H, W)`` and gives detections as
            :class:`~monai_saliency.DetectionScore` reads them: a list with one dictionary per image.
        labels: names of the classes, by the numbers that the network gives them, or how many there are.
        keys: the keys of boxes, labels and scores in the network's output, as for
            :class:`~monai_saliency.DetectionScore`.
        rows_first: whether a corner is (row, column), as of MONAI's detectors. torchvision gives (column, row). As a
            black box this object gives (column, row).
        settings: ``transform``, ``batch_size``, ``device`` and ``output``, as for :class:`Classifier`.

    Example::

        >>> import torch
        >>> import numpy as np
        >>> def network(images):
        ...     found = {"boxes": torch.tensor([[0.0, 0, 2, 2]]), "labels": torch.tensor([1])}
        ...     return [found | {"scores": torch.tensor([0.9])}] * len(images)
        >>> blackbox = Detector(network, labels=["background", "nodule"])
        >>> [[(box, scores)]] = [list(each) for each in blackbox.detect_objects([np.zeros((4, 4), np.uint8)])]
        >>> box.max_vertex.tolist(), {name: round(score, 2) for name, score in scores.items()}
        ([2.0, 2.0], {'background': 0.0, 'nodule': 0.9})
    """

    def __init__(
        self,
        network: Callable[..., Any],
        labels: int | Sequence[Hashable],
        *args: Any,
        keys: Sequence[str] | None = None,
        rows_first: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(network, *args, **settings)
        self.labels = _names(labels)
        self.rows_first = rows_first
        self._reads = DetectionScore(boxes=torch.zeros(1, 4), keys=keys)

    def detect_objects(
        self, img_iter: Iterable[np.ndarray]
    ) -> Iterator[list[tuple[AxisAlignedBoundingBox, dict[Hashable, float]]]]:
        """The detections of each image ``(H, W)`` or ``(H, W, C)``: a box, and the scores of all classes by name."""
        for batch, output in self._outputs(img_iter):
            images_with_boxes = [of_image for of_image in output if of_image]
            if not images_with_boxes:
                yield from [[] for _ in output]
                continue
            bound: Any = self._reads.bind(images_with_boxes[:1], Case("image", batch[0]))
            detections = bound.reader(output)
            boxes = detections.boxes[:, [1, 0, 3, 2]] if self.rows_first else detections.boxes
            of_classes = self._vectors(detections.labels, detections.vectors)
            scores = detections.objectness[:, None] * of_classes.to(detections.objectness)
            for corners, rows in zip(boxes.split(detections.counts), scores.split(detections.counts), strict=True):
                yield self._detections(corners, rows)

    def _detections(
        self, boxes: torch.Tensor, scores: torch.Tensor
    ) -> list[tuple[AxisAlignedBoundingBox, dict[Hashable, float]]]:
        """Boxes ``(N, 4)``, each with its row of scores ``(N, classes)`` by the classes' names."""
        detections = []
        for corners, row in zip(boxes.double().cpu().numpy(), scores.tolist(), strict=True):
            by_name = dict(zip(self.labels, row, strict=True))
            detections.append((AxisAlignedBoundingBox(corners[:2], corners[2:]), by_name))
        return detections

    def _vectors(self, labels: torch.Tensor, vectors: torch.Tensor | None) -> torch.Tensor:
        """The scores of all classes ``(N, classes)``, for boxes of one class 1 for it."""
        count = len(self.labels)
        if vectors is None:
            given = int(labels.max()) + 1 if labels.numel() else 0
            fits = given <= count
        else:
            given = vectors.shape[1]
            fits = given == count
        if not fits:
            raise ValueError(f"the network gives {given} classes, and there are {count} `labels`: name each, from 0")
        return torch.nn.functional.one_hot(labels, count) if vectors is None else vectors


class Descriptor(_BlackBox, ImageDescriptorGenerator):
    """An embedding network as the black box of xaitk-saliency.

    The network is any callable that takes batches ``(B, C, H, W)`` and gives ``(B, ...)``, which is flattened. The
    settings are ``transform``, ``batch_size``, ``device`` and ``output``, as for :class:`Classifier`.

    Example::

        >>> import torch
        >>> import numpy as np
        >>> blackbox = Descriptor(torch.nn.Flatten(), transform=lambda batch: batch / 255)
        >>> [each.tolist() for each in blackbox.generate_arrays_from_images([np.full((1, 2), 255, np.uint8)])]
        [[1.0, 1.0]]
    """

    def generate_arrays_from_images(self, img_mat_iter: Iterable[Any]) -> Iterator[np.ndarray]:
        """The descriptor of each image ``(H, W)`` or ``(H, W, C)``."""
        for batch, output in self._outputs(img_mat_iter):
            check_tensor(output, Case("image", batch[0]), "Descriptor")
            yield from to_float(output).flatten(1).double().cpu().numpy()


def _names(given: int | Sequence[Hashable]) -> list[Hashable]:
    """The names of classes, or as many numbers from 0."""
    if isinstance(given, (str, bool)) or not isinstance(given, (int, Sequence)):
        raise ValueError(f"`labels` must be names of classes, or their number, got {given!r}")
    if isinstance(given, int):
        return list(range(whole_number("labels", given, 1)))
    names = list(given)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`labels` must be different names, at least one, got {names}")
    return names
