"""Methods that make their maps themselves, without masks and an estimator: one case after another."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from monai_saliency.errors import CaseError, NothingToExplain
from monai_saliency.estimators.base import Estimator, Meaning
from monai_saliency.inferers.explanation import Explanation, inside
from monai_saliency.inferers.forward import Forward, evaluating
from monai_saliency.inferers.inferer import Job, PerturbationInferer
from monai_saliency.inferers.preflight import Rounding, check_predicted
from monai_saliency.inferers.runner import Share
from monai_saliency.inferers.walk import Walk
from monai_saliency.masks.base import Masks
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.targets.base import BoundTarget, Target


class WholeMethodInferer(PerturbationInferer):
    """Explains images by a method that is more than masks and an estimator, case by case."""

    needs_masks = False

    def __init__(
        self,
        method: Any,
        target: Target,
        masks: Masks | None = None,
        estimator: Estimator | None = None,
        fill: Any = None,
        **settings: Any,
    ) -> None:
        self.method = method
        super().__init__(masks, target, estimator, fill, **settings)  # type: ignore[arg-type]

    @property
    def meaning(self) -> Meaning:
        """The meaning of the map's values."""
        return Meaning(f"map of {type(self.method).__name__}", in_score_unit=False)

    @property
    def deciding(self) -> dict[str, Any]:
        return {**super().deciding, "method": self.method}

    def replace(self, **changes: Any) -> PerturbationInferer:
        changed = self.settings | changes
        if changed["masks"] is None:
            return type(self)(**changed)
        del changed["method"]
        return PerturbationInferer(**changed)

    def score_here(self, job: Job, share: Share | None = None) -> list[Explanation | None]:
        if share is not None or job.part.count > 1:
            raise ValueError(
                f"the forwards of {type(self.method).__name__} cannot be shared between workers: let these share cases "
                "(--saliency_split cases)"
            )
        forward = self.forward(job.network, job.args, job.kwargs)
        with torch.no_grad(), evaluating(job.network):
            walks, split = self.start(job.inputs, job.cases, targets=job.targets)
            return [self._explained(forward, walk, split, index) for index, walk in enumerate(walks)]

    def _explained(self, forward: Forward, walk: Walk, split: SplitInputs, index: int) -> Explanation:
        try:
            return self.explain_case(forward, walk, split, index)
        except NothingToExplain:
            return walk.without_map()

    @abstractmethod
    def explain_case(self, forward: Forward, walk: Walk, split: SplitInputs, index: int) -> Explanation:
        """Explain one case, the ``index``-th of its batch."""


class WholeMethodRun:
    """One case on its way through a method that makes its own map."""

    def __init__(self, inferer: Any, forward: Forward, walk: Walk, split: SplitInputs, index: int) -> None:
        self.inferer, self.forward, self.walk, self.split, self.index = inferer, forward, walk, split, index
        self.name = walk.case.name
        self.rounding = Rounding(forward, walk.case.image)

    def run(self, batch: torch.Tensor, forward: Forward | None = None) -> Any:
        """The part of the network's output of images ``(n, C, *spatial)`` that is explained."""
        held = self.walk.images.held
        held = held[None].expand(len(batch), *held.shape)
        batch = self.walk.images.inside(batch)
        counts = [(self.index, len(batch))]
        return (forward or self.forward).images(torch.cat([batch, held], dim=1), self.split, counts, self.name)

    def begin(self, output: Any) -> BoundTarget:
        """Bind the target to the output ``(1, ...)`` of the unperturbed image, which is compared with what was
        predicted.

        Raises:
            NothingToExplain: when the target has no scores.
        """
        self.walk.bind(output)
        check_predicted(self.forward, self.walk, output, "explained alone")
        if self.walk.target.nothing:
            self.walk.scores.forwards += 1
            raise NothingToExplain(self.name, self.walk.target.nothing)
        return self.walk.target

    def explanation(self, maps: torch.Tensor, scores: torch.Tensor) -> Explanation:
        """The explanation of maps ``(K, *spatial)`` of a method, made of n changed images with scores ``(n, K)``."""
        if not bool(torch.isfinite(maps).all()):
            raise CaseError(self.name, "the method made a map with NaN or infinite values")
        known = self.walk.scores
        known.add(range(len(scores)), scores, keep=False)
        known.check()
        known.forwards += len(scores) + 1
        image = self.walk.case.image
        dtype = torch.float64 if image.dtype == torch.float64 else torch.float32
        return Explanation(
            name=self.name,
            scores=known.of(range(len(scores))),
            ids=range(len(scores)),
            reference_scores=known.reference,
            target=self.walk.target,
            masks=None,
            observed=[],
            num_forwards=known.num_forwards,
            maps=inside(maps.to(image.device, dtype), self.walk.case.within),
            within=self.walk.case.within,
            kind=self.inferer.meaning,
        )
