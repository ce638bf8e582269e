"""Methods that make their maps themselves, in the place of masks and an estimator: one case after another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from monai_saliency.errors import CaseError, NothingToExplain
from monai_saliency.estimators.base import Estimator, Meaning
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Forward, evaluating
from monai_saliency.inferers.inferer import Job, Meet, PerturbationInferer
from monai_saliency.inferers.row_check import RowCheck
from monai_saliency.masks.base import BoundMasks, Id, Masks, Observed
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.targets.base import BoundTarget, Target


class WholeMethodInferer(PerturbationInferer):
    """Explains images by a method that is more than masks and an estimator, case by case."""

    def __init__(
        self,
        method: Any,
        target: Target,
        masks: Masks | None = None,
        estimator: Estimator | None = None,
        fill: Any = None,
        *,
        meaning: Meaning | None = None,
        **settings: Any,
    ) -> None:
        self.method = method
        name = type(method).__name__
        own = _MethodMap(meaning or Meaning(f"map of {name}", in_score_unit=False))
        super().__init__(masks or _MethodMasks(name), target, estimator or own, fill, **settings)

    @property
    def deciding(self) -> dict[str, Any]:
        return {**super().deciding, "method": self.method}

    def replace(self, **changes: Any) -> PerturbationInferer:
        changed = self.settings | changes
        if isinstance(changed["masks"], _MethodMasks):
            return type(self)(**{**changed, "masks": None, "estimator": None})
        del changed["method"]
        return PerturbationInferer(**changed)

    def score_here(self, job: Job, meet: Meet | None = None) -> list[CaseState]:
        if meet is not None or (job.part is not None and job.part.count > 1):
            raise ValueError(
                f"the forwards of {type(self.method).__name__} cannot be shared between workers: let these share cases "
                "(--saliency_split cases)"
            )
        forward = self.forward(job.network, job.args, job.kwargs)
        with torch.no_grad(), evaluating(job.network):
            states, split = self.start(job.inputs, job.cases, targets=job.targets)
            for index in range(len(states)):
                with suppress(NothingToExplain):  # which its state knows
                    self.explain_case(forward, states, split, index)
        return states

    @abstractmethod
    def explain_case(self, forward: Forward, states: Sequence[CaseState], split: SplitInputs, index: int) -> None:
        """Make the map of one case, and put it into its state by :meth:`WholeMethodRun.finish`."""


class WholeMethodRun:
    """One case on its way through a method that makes its own map."""

    def __init__(self, forward: Forward, states: Sequence[CaseState], split: SplitInputs, index: int) -> None:
        self.forward, self.split, self.index, self.state = forward, split, index, states[index]
        self.name = self.state.case.name
        self.rows = RowCheck(forward, states)

    def run(self, batch: torch.Tensor, forward: Forward | None = None) -> Any:
        """The part of the network's output of images ``(n, C, *spatial)`` that is explained."""
        held = self.state.images.held
        held = held[None].expand(len(batch), *held.shape)
        batch = self.state.images.inside(batch)
        counts = [(self.index, len(batch))]
        return (forward or self.forward).images(torch.cat([batch, held], dim=1), self.split, counts, self.name)

    def begin(self, output: Any) -> BoundTarget:
        """Bind the target to the output ``(1, ...)`` of the unperturbed image, which is compared with what was
        predicted.

        Raises:
            NothingToExplain: when the target has no scores.
        """
        self.state.bind(output)
        self.rows.is_predicted(self.index)
        self.state.forget_prediction()
        if self.state.target.nothing:
            self.state.forwards_here += 1
            raise NothingToExplain(self.name, self.state.target.nothing)
        return self.state.target

    def finish(self, maps: torch.Tensor, scores: torch.Tensor) -> None:
        """Put the maps of a method into the case's state, made of changed images that have these scores."""
        if not bool(torch.isfinite(maps).all()):
            raise CaseError(self.name, "the method made a map with NaN or infinite values")
        masks: Any = self.state.masks
        masks.hold(maps, len(scores))
        search = self.state.search
        search.restart()
        search.begin(search.reference_scores, self.state.target.if_nan)
        self.state.add(1, len(scores) + 1, scores.to(search.scores))
        search.next_round()


class _MethodMasks(Masks):
    """In the place of masks: the images that a method asks for are its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundMethodMasks(image, self.name)


class _BoundMethodMasks(BoundMasks):
    """The map of a method, and the number of changed images that it used."""

    def __init__(self, image: torch.Tensor, name: str) -> None:
        super().__init__(image)
        self.key = (f"the map of {name}",)
        self.name = name
        self.count = 1
        self.maps: torch.Tensor | None = None

    def hold(self, maps: torch.Tensor, count: int) -> None:
        """Keep the maps ``(K, *spatial)``, made of ``count`` changed images."""
        self.maps, self.count = maps.to(self.device, self.dtype), count

    def __len__(self) -> int:
        return self.count

    def codes(self, ids: Sequence[Id]) -> dict[str, np.ndarray]:
        raise ValueError(f"the changed images of {self.name} are its own: it has no masks to render")

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        raise NotImplementedError  # `codes` comes first


class _MethodMap(Estimator):
    """In the place of an estimator: gives the map that the method made."""

    def __init__(self, words: Meaning) -> None:
        self.words = words

    def compute(self, observed: Observed) -> torch.Tensor:
        held: Any = observed.masks
        return held.maps.clone()

    def meaning(self, masks: BoundMasks) -> Meaning:
        maps = getattr(masks, "maps", None)
        if self.words.largest or maps is None:
            return self.words
        words = f"{self.words.words}, on this scan's own scale"
        return self.words._replace(largest=float(maps.abs().max()) or 1.0, words=words)
