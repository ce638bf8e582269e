"""A whole method of xaitk-saliency in the place of an inferer, and its classes as methods of this package."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from xaitk_saliency import GenerateImageClassifierBlackboxSaliency, PerturbImage

from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.walk import Walk
from monai_saliency.inferers.whole_method import WholeMethodInferer, WholeMethodRun
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.arguments import instance
from monai_saliency.xaitk.arrays import Unconfigured, image_of, tensor_of
from monai_saliency.xaitk.masks import PerturbImageMasks


class BlackBoxInferer(WholeMethodInferer):
    """Explains 2D images by a whole method of xaitk-saliency.

    The method runs its own loop on arrays and asks for the scores of perturbed images; here they are computed, in
    batches, by the same inferer, inputs and target as everywhere. Its maps are taken as they are, in [-1, 1].
    xaitk-saliency's methods hold all masks of an image at once. Scores are kept in no store, and masks cannot be shared
    between workers: share cases instead.

    Args:
        method: a ``GenerateImageClassifierBlackboxSaliency``.
        target: which number of the output is explained.
        settings: the arguments of :class:`~monai_saliency.PerturbationInferer`. ``masks`` are scored in place of the
            method's own, as metrics do, and need an ``estimator``; ``fill`` is given to methods that have one and have
            not set it.

    Raises:
        ValueError: for settings that are something else.
    """

    def __init__(self, method: Any, target: Target, *args: Any, **settings: Any) -> None:
        words = "a GenerateImageClassifierBlackboxSaliency of xaitk-saliency"
        method = instance("method", method, GenerateImageClassifierBlackboxSaliency, words)
        super().__init__(method, target, *args, **settings)

    def explain_case(self, forward: Forward, walk: Walk, split: SplitInputs, index: int) -> Explanation:
        return _Run(self, forward, walk, split, index).explain()


class _Run(WholeMethodRun):
    """One case, explained by a whole method."""

    def __init__(
        self,
        inferer: BlackBoxInferer,
        forward: Forward,
        walk: Walk,
        split: SplitInputs,
        index: int,
    ) -> None:
        super().__init__(inferer, forward, walk, split, index)
        self.scores: list[torch.Tensor] = []

    def explain(self) -> Explanation:
        """Run the method, and take its map and the scores of its images."""
        image, name = self.walk.case.image, type(self.inferer.method).__name__
        output = self.run(image[None])
        bound = self.begin(output)
        try:
            maps = self.maps(image_of(image), bound)
        except CaseError:
            raise
        except ValueError as error:
            raise CaseError(self.name, str(error)) from error
        expected = (len(bound.labels), *image.shape[1:])
        if maps.shape != expected:
            raise CaseError(self.name, f"{name} must make maps {expected} (scores, H, W), got {maps.shape}")
        scores = torch.stack(self.scores or [bound(output)[0]])
        explanation = self.explanation(torch.from_numpy(maps.astype(np.float64)), scores)
        return replace(explanation, num_forwards=len(self.scores) + 1)

    def maps(self, image: np.ndarray, bound: BoundTarget) -> np.ndarray:
        method: Any = copy.deepcopy(self.inferer.method)
        if getattr(method, "fill", 0) is None:
            method.fill = image_of(self.walk.images.fill)
        return np.asarray(method.generate(image, _AsClassifier(self, bound)))

    def score(self, images: Iterable[np.ndarray], bound: BoundTarget) -> Iterator[torch.Tensor]:
        """The scores ``(K,)`` of each image."""
        size, like = self.inferer.mask_batch_size, self.walk.case.image
        tensors = (tensor_of(image, like.dtype, like.device) for image in images)
        while given := list(islice(tensors, size)):
            batch = torch.stack(given + given[-1:] * (size - len(given)))  # the last image fills it up
            scores = bound(self.run(batch)).clone()
            if size > 1 and not self.scores:
                self.check_alone(batch, scores, bound)
            self.scores += scores[: len(given)]
            yield from scores[: len(given)]

    def check_alone(self, batch: torch.Tensor, scores: torch.Tensor, bound: BoundTarget) -> None:
        """Refuse a network whose rows depend on each other: compare one row of the first batch with its image alone."""
        row = int((scores - scores.mean(dim=0)).abs().sum(dim=1).argmax())
        alone = bound(self.run(batch[row : row + 1]))[0]
        if not self.rounding.same(scores[row], alone):
            raise CaseError(
                self.name,
                f"a perturbed image scores {scores[row].tolist()} in a batch and {alone.tolist()} alone: the rows "
                "of a batch depend on each other, so run images one at a time (mask_batch_size=1)",
            )


class _AsClassifier(Unconfigured, ClassifyImage):
    """The scores of a target as the confidences of classes."""

    def __init__(self, run: _Run, bound: BoundTarget) -> None:
        self.case, self.bound = run, bound

    def get_labels(self) -> list[int]:
        return list(range(len(self.bound.labels)))

    def classify_images(self, img_iter: Iterable[np.ndarray]) -> Iterator[dict[Any, float]]:
        for scores in self.case.score(img_iter, self.bound):
            yield dict(enumerate(scores.tolist()))


def as_method(cls: Any) -> Callable[..., PerturbationInferer] | None:
    """A function like the ones in :mod:`monai_saliency.methods`, made from a class of xaitk-saliency.

    - A ``GenerateImageClassifierBlackboxSaliency`` is a whole method (:class:`BlackBoxInferer`).
    - A ``PerturbImage`` makes the masks (:class:`PerturbImageMasks`); ``OcclusionScoring()`` makes the map, unless an
      estimator is given.

    The settings are the constructor's arguments. The fill, the target and the other settings work as in all methods of
    this package, even if the constructor has arguments of these names.

    Args:
        cls: the class.

    Returns:
        the method; None for anything else.
    """
    if not inspect.isclass(cls) or inspect.isabstract(cls):
        return None
    is_whole = issubclass(cls, GenerateImageClassifierBlackboxSaliency)
    if not is_whole and not issubclass(cls, PerturbImage):
        return None
    shared = inspect.signature(PerturbationInferer).parameters
    own = []
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.name not in shared:
            own.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    def method(*, target: Target, estimator: Estimator | None = None, **settings: Any) -> PerturbationInferer:
        given = {parameter.name: settings.pop(parameter.name) for parameter in own if parameter.name in settings}
        try:
            made: Any = cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{cls.__name__} cannot be made of {given}: {error}") from error
        if is_whole:
            return BlackBoxInferer(made, target, estimator=estimator, **settings)
        return PerturbationInferer(PerturbImageMasks(made), target, estimator or OcclusionScoring(), **settings)

    signature = inspect.signature(method)
    method.__signature__ = signature.replace(parameters=[*own, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.__name__ = cls.__name__
    method.__doc__ = f"{cls.__name__} of xaitk-saliency."
    return method
