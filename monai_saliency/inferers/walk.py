"""One case on its way to its explanation: it asks for images by the ids of their masks, and explains their scores.

A walk reads like the papers: bind, ask, attribute. It knows no batch, no rank and no file. What runs the network for it
is :mod:`monai_saliency.inferers.runner`; its scores are in :class:`~monai_saliency.inferers.scores.Scores`.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError, NothingToExplain, SettingError
from monai_saliency.estimators.base import Estimator
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.perturbation import Perturbation, Whole
from monai_saliency.inferers.scores import Scores
from monai_saliency.masks.base import BoundMasks, Id, Ids, Observed, Search
from monai_saliency.targets.base import BoundNothing, BoundTarget, Target
from monai_saliency.utils.monai_private import tree_leaves
from monai_saliency.utils.precision import score_precision

logger = logging.getLogger(__name__)

#: yields the ids of images whose scores it needs, goes on once :class:`Scores` has them, and returns the explanation
Steps: TypeAlias = "Generator[Sequence[Id], None, Explanation]"


class Walk:
    """One case on its way.

    Attributes:
        case: what was given of the case.
        images: its perturbed images.
        masks: its masks.
        unbound_target: the target as given; bound already where it is frozen.
        target: the target, bound to the unperturbed output, once :meth:`bind` has that.
        scores: all that is known of the case.
    """

    target: BoundTarget

    def __init__(
        self, case: Case, images: Perturbation, target: Target | BoundTarget, estimator: Estimator, scores: Scores
    ) -> None:
        self.case, self.images, self.masks, self.scores = case, images, images.masks, scores
        self.unbound_target, self.estimator = target, estimator

    def bind(self, output: Any) -> None:
        """Bind the target to the network's output ``(1, ...)`` of the unperturbed image, and take its score."""
        target = self.unbound_target
        self.target = target if isinstance(target, BoundTarget) else bound_target(target, output, self.case)
        types = [leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.scores.rounding = max(self.scores.rounding, score_precision(None, *types))
        self.scores.begin(self.target(output)[0].clone(), repr(getattr(self.masks, "key", None)), self.target)

    def steps(self) -> Steps:
        """Ask for images, round after round."""
        masks, scores = self.masks, self.scores
        first = masks.first_round()
        yield [Whole.IMAGE, Whole.HIDDEN, *first]
        if self.target.nothing:
            return self.without_map()
        scores.check()
        reference = scores.reference
        if masks.adaptive:  # later masks depend on scores: each score asks for masks of its own
            columns = [slice(k, k + 1) for k in range(len(reference))]
            searches = [_Asking(masks.search(reference[column]), column) for column in columns]
        else:
            searches = [_Asking(BoundMasks.search(masks, reference), slice(0, len(reference)))]
        asked = dict.fromkeys(first)
        while wanted := list(dict.fromkeys(mask for search in searches for mask in search.wanted(scores, asked))):
            yield wanted
            scores.check()
            asked.update(dict.fromkeys(wanted))
        return self._explanation(list(asked), [search.observed for search in searches])

    def without_map(self) -> Explanation:
        """The explanation of a case in which there is nothing to explain."""
        image, scores = self.case.image, self.scores
        return Explanation(
            name=self.case.name,
            scores=scores.of([]),
            ids=[],
            reference_scores=scores.reference,
            target=self.target,
            masks=self.masks,
            observed=[],
            num_forwards=scores.num_forwards,
            per_prediction=scores.per_prediction,
            maps=image.new_zeros(0, *image.shape[1:]),
            within=self.case.within,
        )

    def _explanation(self, ids: Ids, observed: Sequence[Observed]) -> Explanation:
        """The explanation of what the searches have observed; its map is made when it is first read."""
        scores = self.scores
        scores.finish(ids)
        stopped = max(observed, key=lambda each: len(each.ids)).words
        if stopped:
            logger.info("case %s: %d masks: %s", self.case.name, len(ids), stopped)
        return Explanation(
            name=self.case.name,
            scores=scores.of(ids),
            ids=ids,
            reference_scores=scores.reference,
            target=self.target,
            masks=self.masks,
            observed=observed,
            num_forwards=scores.num_forwards,
            per_prediction=scores.per_prediction,
            estimator=self.estimator,
            stopped=stopped,
            hidden_scores=scores.hidden,
            rounding=scores.rounding,
            within=self.case.within,
        )


@dataclass
class _Asking:
    """A search on its way, and the columns of the scores that it is sent."""

    search: Search
    columns: slice

    def __post_init__(self) -> None:
        self._next: Ids | None = next(self.search)
        self.observed: Observed

    def wanted(self, scores: Scores, asked: Container[Id]) -> list[Id]:
        """The masks that it needs and that were not asked for; none once it has ended."""
        while self._next is not None:
            if new := [mask for mask in self._next if mask not in asked]:
                return new
            try:
                self._next = self.search.send(scores.of(self._next)[:, self.columns])
            except StopIteration as end:
                self._next, self.observed = None, end.value
        return []


def bound_target(target: Target, output: Any, case: Case) -> BoundTarget:
    """A target, bound to the output ``(1, ...)`` of a case's unperturbed image; one without scores where there is
    nothing to explain.
    """
    try:
        return target.bind(output, replace(case, prediction=None))  # targets keep the case
    except NothingToExplain as error:
        return BoundNothing(error.problem)
    except (CaseError, SettingError):
        raise
    except ValueError as error:
        raise CaseError(case.name, str(error)) from error
