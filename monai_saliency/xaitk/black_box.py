"""A whole method of xaitk-saliency, which runs its own loop, in the place of an inferer that explains."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from xaitk_saliency import GenerateImageClassifierBlackboxSaliency, GenerateObjectDetectorBlackboxSaliency

from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import Estimator
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.reference import ReferenceCheck
from monai_saliency.inferers.whole_method import WholeMethodInferer, finish
from monai_saliency.masks.base import Masks
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import check_rows, read, rows
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.arguments import instance
from monai_saliency.utils.precision import rounding_of
from monai_saliency.xaitk.detections import as_detections, rows_of
from monai_saliency.xaitk.images import image_of, tensor_of

__all__ = ["BlackBoxInferer", "BlackBoxMethod"]

BlackBoxMethod = GenerateImageClassifierBlackboxSaliency | GenerateObjectDetectorBlackboxSaliency


class BlackBoxInferer(WholeMethodInferer):
    """Explains 2D images by a whole method of xaitk-saliency.

    The method runs its own loop on arrays and asks for the scores of perturbed images; here they are computed, in
    batches, by the same inferer, inputs and target as everywhere. Its maps are taken as they are, in [-1, 1]. How much
    memory it needs is its own affair: xaitk-saliency's hold all masks of an image at once.

    Its scores are kept in no store, and its masks cannot be shared between workers: share cases instead. Methods for
    detectors need a :class:`~monai_saliency.DetectionScore`.

    Args:
        method: a ``GenerateImageClassifierBlackboxSaliency`` or ``GenerateObjectDetectorBlackboxSaliency``.
        target: which number of the output is explained.
        masks: other masks to score in its place, as metrics do; None for the method's own.
        estimator: only with other masks.
        fill: what replaces hidden voxels, in the network's input space: given to methods that have a ``fill`` and none
            of their own yet.
        settings: those of :class:`~monai_saliency.PerturbationInferer`.

    Raises:
        ValueError: for settings that are something else.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = BlackBoxInferer(ms.xaitk.SlidingWindowStack((2, 2), (2, 2)), ms.ClassScore([0], "none"))
        >>> explain(torch.rand(1, 1, 4, 4), torch.nn.Flatten()).shape
        torch.Size([1, 1, 4, 4])
    """

    method: BlackBoxMethod

    def __init__(
        self,
        method: BlackBoxMethod,
        target: Target,
        masks: Masks | None = None,
        estimator: Estimator | None = None,
        fill: Any = None,
        **settings: Any,
    ) -> None:
        words = "a GenerateImageClassifierBlackboxSaliency or GenerateObjectDetectorBlackboxSaliency of xaitk-saliency"
        types = (GenerateImageClassifierBlackboxSaliency, GenerateObjectDetectorBlackboxSaliency)
        super().__init__(instance("method", method, types, words), target, masks, estimator, fill, **settings)

    def explain_case(self, forward: Forward, states: Sequence[CaseState], split: SplitInputs, index: int) -> None:
        _Run(self, forward, states, split, index).explain()


class _Run:
    """One case, explained by a whole method."""

    def __init__(
        self,
        inferer: BlackBoxInferer,
        forward: Forward,
        states: Sequence[CaseState],
        split: SplitInputs,
        index: int,
    ) -> None:
        self.inferer, self.forward, self.split, self.index = inferer, forward, split, index
        self.state = states[index]
        self.reference = ReferenceCheck(forward, states, split, inferer.output, 1)
        self.scores: list[torch.Tensor] = []
        self.alone_checked = False

    def explain(self) -> None:
        """Run the method, and put its map and the scores of its images into the case's state."""
        state, name = self.state, type(self.inferer.method).__name__
        self.reference.expect(self.index)
        output = self.run(state.case.image[None])
        if self.reference.has_other_form(self.index, output):
            self.reference.expect_alone(self.index)
        self.reference.check(self.index, output)
        bound = state.bound_to(output)
        try:
            image = image_of(state.case.image)
            maps = self.maps(image, bound, self.method_with_fill(), output)
        except CaseError:
            raise
        except ValueError as error:
            raise CaseError(state.case.name, str(error)) from error
        expected = (len(bound.labels), *state.case.image.shape[1:])
        if maps.shape != expected:
            raise CaseError(state.case.name, f"{name} must make maps {expected} (scores, H, W), got {maps.shape}")
        scores = torch.stack(self.scores or [bound(output)[0]])
        finish(state, output, torch.from_numpy(maps.astype(np.float64)), scores, name)
        state.forwards_here += len(self.scores) + 1

    def method_with_fill(self) -> BlackBoxMethod:
        """A copy of the method, with the case's fill where it has none."""
        method: Any = copy.deepcopy(self.inferer.method)
        if getattr(method, "fill", 0) is None:
            method.fill = image_of(self.state.fill)
        return method

    def maps(self, image: np.ndarray, bound: BoundTarget, method: BlackBoxMethod, output: Any) -> np.ndarray:
        if isinstance(method, GenerateImageClassifierBlackboxSaliency):
            return np.asarray(method.generate(image, _AsClassifier(self, bound, image, output)))
        target: Any = getattr(bound, "bound", bound)  # what `auto` chose
        if not hasattr(target, "reader"):
            raise ValueError(
                f"{type(method).__name__} explains detections: its `target` must be a DetectionScore, got "
                f"{type(target).__name__}"
            )
        if target.reader.objectness_key is not None:
            raise ValueError(
                f"{type(method).__name__} cannot be given objectness beside the scores of classes: leave out "
                f"`objectness_key` {target.reader.objectness_key!r}, or use monai_saliency.drise"
            )
        boxes, vectors = target.boxes, target.vectors
        if target.classes is None:
            count = 1  # boxes of any class are of one class
        elif target.found.vectors is not None:
            count = target.found.vectors.shape[2]
        else:
            count = int(target.classes.max()) + 2  # a last class holds all that the reference boxes are not of
        detector = _AsDetector(self, target, count)
        if vectors is None:
            classes = torch.zeros(len(boxes)) if target.classes is None else target.classes
            vectors = torch.nn.functional.one_hot(classes.long().cpu(), count)
        corners = boxes[:, [1, 0, 3, 2]].double().cpu().numpy()
        found = np.asarray(method.generate(image, corners, vectors.double().cpu().numpy(), detector))
        # Where nothing is found in any perturbed image there is no map: every score is 0.
        return found if len(found) else np.zeros((len(boxes), *image.shape[:2]))

    def outputs(self, images: Iterable[np.ndarray], bound: BoundTarget) -> Iterator[tuple[Any, torch.Tensor]]:
        """The network's output ``(1, ...)`` of each image, and its scores ``(K,)``."""
        batch: list[np.ndarray] = []
        size = self.inferer.mask_batch_size
        for image in images:
            batch.append(image)
            if len(batch) == size:
                yield from self.of_batch(batch, bound)
                batch = []
        if batch:
            yield from self.of_batch(batch, bound)

    def of_batch(self, images: list[np.ndarray], bound: BoundTarget) -> Iterator[tuple[Any, torch.Tensor]]:
        like = self.state.case.image
        full = images + [images[-1]] * (self.inferer.mask_batch_size - len(images))
        batch = torch.stack([tensor_of(each, like.dtype, like.device) for each in full])
        output = self.run(batch)
        count = len(batch)
        scores = bound(rows(output, 0, count, count)).clone()
        if count > 1 and not self.alone_checked:
            self.check_alone(batch, scores, bound)
            output = self.run(batch)  # the network may write its outputs to one place
        for row in range(len(images)):
            self.scores.append(scores[row])
            yield rows(output, row, row + 1, count), scores[row]

    def check_alone(self, batch: torch.Tensor, scores: torch.Tensor, bound: BoundTarget) -> None:
        """Refuse a network whose rows depend on each other: compare one row of the first batch with its image alone."""
        self.alone_checked = True
        row = int((scores - scores.mean(dim=0)).abs().sum(dim=1).argmax())
        alone = bound(self.run(batch[row : row + 1]))[0]
        tolerance = rounding_of(self.forward.network, batch.device, image=batch.dtype)(scores.dtype)
        if not torch.allclose(alone, scores[row], rtol=0, atol=tolerance * max(1e-6, float(scores.abs().max()))):
            raise CaseError(
                self.state.case.name,
                f"a perturbed image scores {scores[row].tolist()} beside others and {alone.tolist()} alone: the rows "
                "of a batch depend on each other, so run images one at a time (mask_batch_size=1)",
            )

    def run(self, batch: torch.Tensor) -> Any:
        """The part of the network's output of images ``(n, C, H, W)`` that is explained."""
        count = len(batch)
        held = self.state.held[None].expand(count, *self.state.held.shape)
        values = self.split.values_of([(self.index, count)], count)
        output = self.forward.images(torch.cat([batch, held], dim=1), self.split, values)
        try:
            output = read(output, self.inferer.output)
            check_rows(output, count)
        except ValueError as error:
            raise CaseError(self.state.case.name, str(error)) from error
        return output


class _AsClassifier(ClassifyImage):
    """The scores of a target as the confidences of classes."""

    def __init__(self, run: _Run, bound: BoundTarget, image: np.ndarray, output: Any) -> None:
        self.case, self.bound, self.image = run, bound, image
        self.reference = bound(output)[0].tolist()

    def get_labels(self) -> list[int]:
        return list(range(len(self.bound.labels)))

    def classify_images(self, img_iter: Iterable[np.ndarray]) -> Iterator[dict[Any, float]]:
        images = iter(img_iter)
        first = next(images, None)
        if first is not None and np.array_equal(first, self.image):  # which was scored already
            yield dict(enumerate(self.reference))
        elif first is not None:
            images = _behind(first, images)
        for _, scores in self.case.outputs(images, self.bound):
            yield dict(enumerate(scores.tolist()))

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def is_usable(cls) -> bool:
        return False


class _AsDetector(DetectImageObjects):
    """A detector's boxes, and the scores of its classes."""

    def __init__(self, run: _Run, target: Any, count: int) -> None:
        self.case, self.target, self.count = run, target, count

    def detect_objects(self, img_iter: Iterable[np.ndarray]) -> Iterator[list[Any]]:
        for output, _ in self.case.outputs(img_iter, self.target):
            found = self.target.reader(output)
            if self.target.classes is None:
                found = replace(found, vectors=None)
            if found.vectors is None:
                found.classes.clamp_(max=self.count - 1)
            yield as_detections(rows_of(found, self.count)[0], range(self.count))

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def is_usable(cls) -> bool:
        return False


def _behind(first: np.ndarray, images: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    yield first
    yield from images
