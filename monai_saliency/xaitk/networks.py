"""Networks as the black boxes of xaitk-saliency, in one line.

xaitk-saliency's own methods call them image by image, or rather batch by batch behind an iterator. The methods of
:mod:`monai_saliency.xaitk.plugins` see that a network is inside, and perturb on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_core.configuration import Configurable
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.forward import evaluating
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.networks.outputs import OutputPath, read
from monai_saliency.targets.base import ACTIVATIONS, Target, check_tensor, to_float
from monai_saliency.targets.classification import ClassScore
from monai_saliency.targets.detection import DetectionScore
from monai_saliency.targets.function import FunctionScore
from monai_saliency.utils.arguments import callable_network, check_option, instance, whole_number
from monai_saliency.utils.tensors import new_buffer
from monai_saliency.xaitk.detections import as_detections, rows_of
from monai_saliency.xaitk.images import fill_of, tensor_of

__all__ = ["Classifier", "Descriptor", "Detector"]

#: of batches ``(B, C, H, W)``, each image by itself, such as a division by 255
Transform = Callable[[torch.Tensor], torch.Tensor]


class _Prepared(torch.nn.Module):
    """A network behind its transform. Perturbed images of whole numbers are cut to whole numbers first."""

    def __init__(
        self,
        network: Callable[..., Any],
        transform: Transform | None,
        slack: float | None = None,
        is_positive: bool = True,
    ) -> None:
        super().__init__()
        self.network = network
        self.transform = transform
        self.slack = slack
        self.is_positive = is_positive
        self.cut: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> Any:
        if self.slack is not None:
            # A batch may be large, and a new tensor of its size takes as long as a light network: one is used again.
            if self.cut is None or self.cut.shape != batch.shape:
                self.cut = new_buffer(batch, *batch.shape)
            batch = torch.add(batch, self.slack if self.is_positive else self.slack * batch.sign(), out=self.cut)
            batch.trunc_()
        return self.network(batch if self.transform is None else self.transform(batch))


class _Wrapped(Configurable):
    """A network that takes batches ``(B, C, H, W)``."""

    def __init__(
        self,
        network: Callable[..., Any],
        transform: Transform | None,
        batch_size: int,
        device: torch.device | str | None,
        output: OutputPath | None,
    ) -> None:
        self.network = callable_network(network)
        self.transform = instance("transform", transform, (), "a function of batches", function=True, none=True)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        parameters = list(network.parameters()) if isinstance(network, torch.nn.Module) else []
        self.device = torch.device(device) if device is not None else next((p.device for p in parameters), None)
        self.output = output
        self._is_double = any(each.dtype == torch.float64 for each in parameters)

    @classmethod
    def is_usable(cls) -> bool:
        """No: a network cannot be made from a configuration, so that discovery leaves these classes out."""
        return False

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError(f"a network has no configuration: make the {type(self).__name__} in your program")

    def _tensor(self, image: np.ndarray) -> torch.Tensor:
        """The image as the network takes it, ``(C, H, W)``; double precision where both are double."""
        double = self._is_double and np.asarray(image).dtype == np.float64
        return tensor_of(image, torch.float64 if double else torch.float32, self.device)

    @torch.no_grad()
    def _outputs(self, images: Iterable[np.ndarray]) -> Iterator[tuple[torch.Tensor, Any]]:
        """Batches of neighbouring images of one shape, and the network's output of each."""
        network = _Prepared(self.network, self.transform)
        batch: list[torch.Tensor] = []
        for tensor in chain(map(self._tensor, images), [None]):
            if batch and (tensor is None or tensor.shape != batch[0].shape or len(batch) == self.batch_size):
                stacked, batch = torch.stack(batch), []
                with evaluating(network):
                    found = read(network(stacked), self.output)
                yield stacked, found
            if tensor is not None:
                batch.append(tensor)

    def _scored(self, image: np.ndarray, masks: Masks, fill: Any, target: Target) -> tuple[np.ndarray, np.ndarray]:
        """The target's scores of the image ``(K,)`` and of its masks ``(masks, K)``."""
        image = np.asarray(image)
        tensor, other = self._tensor(image), fill_of(fill, image)
        slack, is_positive = None, bool(image.min() >= 0 and other.min() >= 0)
        if image.dtype.kind in "bui":
            # Rounding takes nothing off a whole number.
            slack = 8 * torch.finfo(tensor.dtype).eps * max(1.0, float(np.abs(image).max()), float(np.abs(other).max()))
        values = self._tensor(np.broadcast_to(other, image.shape))
        explain = PerturbationInferer(
            masks,
            target,
            OcclusionScoring(),
            fill=lambda _: values[None],
            mask_batch_size=self.batch_size,
            output=self.output,
        )
        (state,) = explain.score(tensor[None], _Prepared(self.network, self.transform, slack, is_positive))
        state.check()
        return state.state.reference_scores.cpu().numpy(), state.state.scores.cpu().numpy()


class Classifier(_Wrapped, ClassifyImage):
    """A classification network as the black box of xaitk-saliency.

    Args:
        network: any callable that takes batches ``(B, C, H, W)`` and gives ``(B, classes)``.
        labels: names of the classes, or their number.
        activation: turns the output into confidences: ``"softmax"``, ``"sigmoid"``, or ``"none"``.
        transform: what comes before the network, of batches: xaitk-saliency's images are arrays, often in [0, 255].
        batch_size: images in one call of the network, at the most.
        device: of the images; None for the device of the network's parameters, or else the CPU.
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
        transform: Transform | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        output: OutputPath | None = None,
    ) -> None:
        super().__init__(network, transform, batch_size, device, output)
        self.labels = names("labels", labels)
        self.activation = check_option("activation", activation, list(ACTIVATIONS))

    def get_labels(self) -> Sequence[Hashable]:
        """The names of the classes."""
        return self.labels

    def classify_images(self, img_iter: Iterable[np.ndarray]) -> Iterator[dict[Hashable, float]]:
        """The confidences of each image, by the names of the classes.

        Args:
            img_iter: images ``(H, W)`` or ``(H, W, C)``.
        """
        for _, output in self._outputs(img_iter):
            self._check(output)
            for row in ACTIVATIONS[self.activation](to_float(output)).tolist():
                yield dict(zip(self.labels, row, strict=True))

    def scores(self, image: np.ndarray, masks: Masks, fill: Any) -> tuple[np.ndarray, np.ndarray]:
        """The confidences of an image ``(classes,)`` and of its perturbed copies ``(masks, classes)``.

        Args:
            image: ``(H, W)`` or ``(H, W, C)``.
            masks: where it is perturbed.
            fill: what replaces hidden pixels, in the image's unit.
        """
        reference, scores = self._scored(image, masks, fill, ClassScore("all", self.activation))
        self._check(reference[None])
        return reference, scores

    def _check(self, output: Any) -> None:
        shape = tuple(getattr(output, "shape", ()))
        if len(shape) != 2 or shape[1] != len(self.labels):
            what = f"shape {shape}" if shape else f"a {type(output).__name__}"
            raise ValueError(f"the network must give (B, {len(self.labels)}), one column per label, got {what}")


class Detector(_Wrapped, DetectImageObjects):
    """A detection network as the black box of xaitk-saliency.

    Args:
        network: any callable that takes batches ``(B, C, H, W)`` and gives detections as
            :class:`~monai_saliency.DetectionScore` reads them: a list with one dictionary per image.
        labels: names of the classes, by the numbers that the network gives them, or how many there are.
        transform: what comes before the network, of batches.
        batch_size: images in one call of the network, at the most.
        device: of the images; None for the device of the network's parameters, or else the CPU.
        output: the part of the network's output that holds the detections.
        keys: the keys of boxes, labels and scores in the network's output, as for
            :class:`~monai_saliency.DetectionScore`.
        rows_first: whether a corner is (row, column), as of MONAI's detectors. torchvision gives (column, row). As a
            black box this object gives (column, row).

    Raises:
        ValueError: for settings that do not fit each other or the network's output.

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
        transform: Transform | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        output: OutputPath | None = None,
        keys: Sequence[str] | None = None,
        rows_first: bool = True,
    ) -> None:
        super().__init__(network, transform, batch_size, device, output)
        self.labels = names("labels", labels)
        self.rows_first = rows_first
        self._reads = DetectionScore(boxes=torch.zeros(1, 4), keys=keys)

    def detect_objects(
        self, img_iter: Iterable[np.ndarray]
    ) -> Iterator[list[tuple[AxisAlignedBoundingBox, dict[Hashable, float]]]]:
        """The detections of each image: a box, and the scores of all classes by their names.

        Args:
            img_iter: images ``(H, W)`` or ``(H, W, C)``.
        """
        for batch, output in self._outputs(img_iter):
            rows = self.rows(output, batch[0])
            for image in rows:
                yield as_detections(image, self.labels)

    def rows(self, output: Any, image: torch.Tensor) -> torch.Tensor:
        """A network's detections of B images as xaitk-saliency has them.

        Args:
            output: what the network gives.
            image: ``(C, H, W)``, one of the images.

        Returns:
            ``(B, N, 4 + 1 + classes)``: corners (column, row), objectness, class scores. Behind the detections of an
            image are rows with an objectness of 0.
        """
        count = len(self.labels)
        if not isinstance(output, Mapping) and not any(output):
            return image.new_zeros(len(output), 0, 5 + count)
        first = output if isinstance(output, Mapping) else [next(each for each in output if each)]
        bound: Any = self._reads.bind(first, Case("image", image))
        return rows_of(bound.reader(output), count, self.rows_first)

    def scores(
        self, image: np.ndarray, masks: Masks, fill: Any, match: Callable[[torch.Tensor], torch.Tensor]
    ) -> np.ndarray:
        """Scores ``(masks, K)`` of the perturbed copies of an image.

        Args:
            image: ``(H, W)`` or ``(H, W, C)``.
            masks: where it is perturbed.
            fill: what replaces hidden pixels, in the image's unit.
            match: takes rows as :meth:`rows` gives them, in double precision on the CPU, and gives scores ``(B, K)``.
        """
        tensor = self._tensor(image)
        target = FunctionScore(lambda output: match(self.rows(output, tensor).double().cpu()))
        return self._scored(image, masks, fill, target)[1]


class Descriptor(_Wrapped, ImageDescriptorGenerator):
    """An embedding network as the black box of xaitk-saliency.

    Args:
        network: any callable that takes batches ``(B, C, H, W)`` and gives ``(B, ...)``, which is flattened.
        transform: what comes before the network, of batches.
        batch_size: images in one call of the network, at the most.
        device: of the images; None for the device of the network's parameters, or else the CPU.
        output: the part of the network's output that holds the embedding, where it is not a tensor.

    Example::

        >>> import torch
        >>> import numpy as np
        >>> blackbox = Descriptor(torch.nn.Flatten(), transform=lambda batch: batch / 255)
        >>> [each.tolist() for each in blackbox.generate_arrays_from_images([np.full((1, 2), 255, np.uint8)])]
        [[1.0, 1.0]]
    """

    def __init__(
        self,
        network: Callable[..., Any],
        transform: Transform | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        output: OutputPath | None = None,
    ) -> None:
        super().__init__(network, transform, batch_size, device, output)

    def generate_arrays_from_images(self, img_mat_iter: Iterable[Any]) -> Iterator[np.ndarray]:
        """The descriptor of each image.

        Args:
            img_mat_iter: images ``(H, W)`` or ``(H, W, C)``.
        """
        for batch, output in self._outputs(img_mat_iter):
            check_tensor(output, Case("image", batch[0]), "Descriptor")
            yield from _flat(output)

    def scores(
        self, image: np.ndarray, masks: Masks, fill: Any, read: Callable[[np.ndarray], np.ndarray] | None
    ) -> np.ndarray:
        """Scores ``(masks, K)`` of the perturbed copies of an image.

        Args:
            image: ``(H, W)`` or ``(H, W, C)``.
            masks: where it is perturbed.
            fill: what replaces hidden pixels, in the image's unit.
            read: takes descriptors ``(B, D)`` and gives scores ``(B, K)``; None for the descriptors themselves.
        """
        target = FunctionScore(lambda output: torch.from_numpy(_flat(output) if read is None else read(_flat(output))))
        return self._scored(image, masks, fill, target)[1]


def _flat(output: torch.Tensor) -> np.ndarray:
    return to_float(output).flatten(1).double().cpu().numpy()


def names(name: str, given: int | Sequence[Hashable]) -> list[Hashable]:
    """The names of classes, or as many numbers from 0.

    Raises:
        ValueError: when there is none, or one twice.
    """
    if isinstance(given, str) or not isinstance(given, (int, Sequence)) or isinstance(given, bool):
        raise ValueError(f"`{name}` must be names of classes, or their number, got {given!r}")
    found: list[Hashable] = list(range(whole_number(name, given, 1))) if isinstance(given, int) else list(given)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"`{name}` must be different names, at least one, got {found}")
    return found
