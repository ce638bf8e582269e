"""A whole method of xaitk-saliency, which runs its own loop, in the place of an inferer that explains."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from xaitk_saliency import GenerateImageClassifierBlackboxSaliency, GenerateObjectDetectorBlackboxSaliency

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.whole_method import OneCase, WholeMethodInferer, most_unlike
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import rows
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.arguments import instance
from monai_saliency.xaitk.arrays import as_detections, image_of, rows_of, tensor_of

__all__ = ["WHOLE_METHODS", "BlackBoxInferer"]

WHOLE_METHODS = (GenerateImageClassifierBlackboxSaliency, GenerateObjectDetectorBlackboxSaliency)


class BlackBoxInferer(WholeMethodInferer):
    """Explains 2D images by a whole method of xaitk-saliency.

    The method runs its own loop on arrays and asks for the scores of perturbed images; here they are computed, in
    batches, by the same inferer, inputs and target as everywhere. Its maps are taken as they are, in [-1, 1].
    xaitk-saliency's methods hold all masks of an image at once. Scores are kept in no store, and masks cannot be shared
    between workers: share cases instead. Methods for detectors need a :class:`~monai_saliency.DetectionScore`.

    Args:
        method: a ``GenerateImageClassifierBlackboxSaliency`` or ``GenerateObjectDetectorBlackboxSaliency``.
        target: which number of the output is explained.
        settings: those of :class:`~monai_saliency.PerturbationInferer`. ``masks`` are scored in place of the method's
            own, as metrics do, and need an ``estimator``; ``fill`` is given to methods that have one and have not set
            it.

    Raises:
        ValueError: for settings that are something else.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.xaitk.BlackBoxInferer(
        ...     ms.xaitk.SlidingWindowStack((2, 2), (2, 2)), ms.ClassScore([0], "none")
        ... )
        >>> explain(torch.rand(1, 1, 4, 4), torch.nn.Flatten()).shape
        torch.Size([1, 1, 4, 4])
    """

    def __init__(self, method: Any, target: Target, *args: Any, **settings: Any) -> None:
        words = "a GenerateImageClassifierBlackboxSaliency or GenerateObjectDetectorBlackboxSaliency of xaitk-saliency"
        super().__init__(instance("method", method, WHOLE_METHODS, words), target, *args, **settings)

    def explain_case(self, forward: Forward, states: Sequence[CaseState], split: SplitInputs, index: int) -> None:
        _Run(self, forward, states, split, index).explain()


class _Run(OneCase):
    """One case, explained by a whole method."""

    def __init__(
        self,
        inferer: BlackBoxInferer,
        forward: Forward,
        states: Sequence[CaseState],
        split: SplitInputs,
        index: int,
    ) -> None:
        super().__init__(forward, states, split, index)
        self.inferer = inferer
        self.scores: list[torch.Tensor] = []

    def explain(self) -> None:
        """Run the method, and put its map and the scores of its images into the case's state."""
        state, name = self.state, type(self.inferer.method).__name__
        output = self.run(state.case.image[None])
        bound = state.bound_to(output)
        self.rows.check_unperturbed(self.index, output, bound)
        try:
            maps = self.maps(image_of(state.case.image), bound)
        except CaseError:
            raise
        except ValueError as error:
            raise CaseError(state.case.name, str(error)) from error
        expected = (len(bound.labels), *state.case.image.shape[1:])
        if maps.shape != expected:
            raise CaseError(state.case.name, f"{name} must make maps {expected} (scores, H, W), got {maps.shape}")
        scores = torch.stack(self.scores or [bound(output)[0]])
        self.finish(output, torch.from_numpy(maps.astype(np.float64)), scores)
        state.forwards_here += len(self.scores) + 1

    def maps(self, image: np.ndarray, bound: BoundTarget) -> np.ndarray:
        method: Any = copy.deepcopy(self.inferer.method)
        if getattr(method, "fill", 0) is None:
            method.fill = image_of(self.state.fill)
        if isinstance(method, GenerateImageClassifierBlackboxSaliency):
            return np.asarray(method.generate(image, _AsClassifier(self, bound)))
        detector = _AsDetector(self, getattr(bound, "bound", bound), type(method).__name__)  # `auto` holds its choice
        found = np.asarray(method.generate(image, *detector.references(), detector))
        # Where nothing is found in any perturbed image there is no map: every score is 0.
        return found if len(found) else np.zeros((len(bound.labels), *image.shape[:2]))

    def outputs(self, images: Iterable[np.ndarray], bound: BoundTarget) -> Iterator[tuple[Any, torch.Tensor]]:
        """The network's output ``(1, ...)`` of each image, and its scores ``(K,)``."""
        like, images = self.state.case.image, iter(images)
        while given := list(islice(images, self.inferer.mask_batch_size)):
            full = given + [given[-1]] * (self.inferer.mask_batch_size - len(given))
            batch = torch.stack([tensor_of(each, like.dtype, like.device) for each in full])
            output, count = self.run(batch), len(batch)
            scores = bound(rows(output, 0, count, count)).clone()
            if count > 1 and not self.scores:
                self.check_alone(batch, scores, bound)
                output = self.run(batch)  # the network may write its outputs to one place
            for row in range(len(given)):
                self.scores.append(scores[row])
                yield rows(output, row, row + 1, count), scores[row]

    def check_alone(self, batch: torch.Tensor, scores: torch.Tensor, bound: BoundTarget) -> None:
        """Refuse a network whose rows depend on each other: compare one row of the first batch with its image alone."""
        row = most_unlike(scores)
        alone = bound(self.run(batch[row : row + 1]))[0]
        if not self.same(scores[row], alone):
            raise CaseError(
                self.name,
                f"a perturbed image scores {scores[row].tolist()} beside others and {alone.tolist()} alone: the rows "
                "of a batch depend on each other, so run images one at a time (mask_batch_size=1)",
            )


class _Answers:
    """A black box of this run, which no configuration makes."""

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def is_usable(cls) -> bool:
        return False


class _AsClassifier(_Answers, ClassifyImage):
    """The scores of a target as the confidences of classes."""

    def __init__(self, run: _Run, bound: BoundTarget) -> None:
        self.case, self.bound = run, bound

    def get_labels(self) -> list[int]:
        return list(range(len(self.bound.labels)))

    def classify_images(self, img_iter: Iterable[np.ndarray]) -> Iterator[dict[Any, float]]:
        for _, scores in self.case.outputs(img_iter, self.bound):
            yield dict(enumerate(scores.tolist()))


class _AsDetector(_Answers, DetectImageObjects):
    """A detector's boxes, and the scores of its classes. The last class holds all that no reference box is of."""

    def __init__(self, run: _Run, target: Any, name: str) -> None:
        if not hasattr(target, "reader"):
            raise ValueError(
                f"{name} explains detections: its `target` must be a DetectionScore, got {type(target).__name__}"
            )
        if target.reader.objectness_key is not None:
            raise ValueError(
                f"{name} cannot be given objectness beside the scores of classes: leave out `objectness_key` "
                f"{target.reader.objectness_key!r}, or use monai_saliency.drise"
            )
        self.case, self.target = run, target
        if target.classes is None:
            self.count = 1  # boxes of any class are of one class
        elif target.found.vectors is not None:
            self.count = target.found.vectors.shape[2]
        else:
            self.count = int(target.classes.max()) + 2

    def references(self) -> tuple[np.ndarray, np.ndarray]:
        """The corners ``(M, 4)`` (column, row) of the reference boxes, and their class scores ``(M, classes)``."""
        boxes, classes, vectors = self.target.boxes, self.target.classes, self.target.vectors
        if vectors is None:
            classes = torch.zeros(len(boxes)) if classes is None else classes
            vectors = torch.nn.functional.one_hot(classes.long().cpu(), self.count)
        return boxes[:, [1, 0, 3, 2]].double().cpu().numpy(), vectors.double().cpu().numpy()

    def detect_objects(self, img_iter: Iterable[np.ndarray]) -> Iterator[list[Any]]:
        for output, _ in self.case.outputs(img_iter, self.target):
            found = self.target.reader(output)
            if self.target.classes is None:
                found = replace(found, vectors=None)
            if found.vectors is None:
                found.classes.clamp_(max=self.count - 1)
            yield as_detections(rows_of(found, self.count)[0], range(self.count))
