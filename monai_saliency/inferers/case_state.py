"""One case on its way through the loop, to its explanation (:mod:`monai_saliency.inferers.explanation`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError, NothingToExplain, SettingError
from monai_saliency.estimators.base import Estimator
from monai_saliency.inferers.explanation import Explanation, inside, joined
from monai_saliency.inferers.perturbation import HIDDEN, Perturbation
from monai_saliency.inferers.score_watch import ScoreWatch
from monai_saliency.masks.base import BoundMasks, Observed
from monai_saliency.networks.outputs import rows
from monai_saliency.targets.base import BoundNothing, BoundTarget, Target
from monai_saliency.utils.monai_private import tree_leaves
from monai_saliency.utils.precision import score_precision
from monai_saliency.utils.tensors import plain
from monai_saliency.utils.timing import stage

logger = logging.getLogger(__name__)


class CaseState:
    """One case on its way through the loop. Row 0 is the unperturbed image, row i + 1 the i-th mask that is asked for.

    Attributes:
        case: what was given of the case.
        images: its perturbed images.
        search: its masks, and their scores.
        kept: its scores on disk.
        unbound_target: the target as given; bound already where it is frozen.
        target: the target, bound to the unperturbed output, once row 0 is read.
        hidden_scores: ``(K,)``, with everything hidden; None until that is known.
        values: some of the network's output of the unperturbed image, until it has been compared.
        rounding: how far a score may be off by the network's precision, relative to the largest one.
        one_by_one: whether images go through the network one at a time.
        made_by: hashes of what decides the scores, where they are shared.
        per_prediction: how many forwards one prediction of the image is.
    """

    target: BoundTarget

    def __init__(
        self,
        case: Case,
        images: Perturbation,
        target: Target | BoundTarget,
        estimator: Estimator,
        kept: ScoreWatch,
    ) -> None:
        self.case, self.images, self.search, self.kept = case, images, images.search, kept
        self.unbound_target, self.estimator = target, estimator
        self.hidden_scores: torch.Tensor | None = None
        self._is_finished = False
        self.values: Sequence[torch.Tensor] = ()
        self.rounding = 0.0
        self.one_by_one = False
        self.made_by: Mapping[str, str | None] = {}
        self.forwards_here = self.forwards_elsewhere = 0
        self.per_prediction = 1

    @property
    def masks(self) -> BoundMasks:
        return self.search.masks

    @property
    def complete(self) -> bool:
        """Whether all masks of all rounds have scores."""
        return self.search.complete

    @property
    def num_forwards(self) -> int:
        """All forwards that the case has cost, here and elsewhere."""
        return self.forwards_here + self.forwards_elsewhere

    @property
    def num_rows(self) -> int:
        """Rows of all rounds so far, the unperturbed image among them."""
        return len(self.search.ids) + 1

    def rows_of_round(self, number: int) -> tuple[int, int]:
        """The rows [start, stop) of a round, from 0; none where that round has not begun."""
        ends = [0, *(end + 1 for end in self.search.ends)]
        last = len(self.search.ends)
        return ends[min(number, last)], ends[min(number + 1, last)]

    def bind(self, reference: Any) -> None:
        """Bind the target to the network's output of the unperturbed image, and take the scores that are stored."""
        target = self.unbound_target
        self.target = target if isinstance(target, BoundTarget) else bound_target(target, reference, self.case)
        self.search.begin(self.target(reference)[0].clone(), self.target.if_nan)
        self.values = sampled(reference)
        self.rounding = max(self.rounding, score_precision(None, *(values.dtype for values in self.values)))
        if self.target.nothing:  # no row of a mask needs a forward, and nothing is kept
            self.search.seen[:] = True
            self.kept = ScoreWatch(None, self.search)
            self.hidden_scores = self.search.reference_scores
        self.kept.resume(self.target)

    def forget_prediction(self) -> None:
        """Drop what an evaluator predicted, and what is compared with it."""
        self.case, self.values = replace(self.case, prediction=None), ()

    def read(self, start: int, stop: int, output: Any, offset: int, count: int) -> None:
        """Score rows [start, stop), which begin at ``offset`` in the network's output of ``count`` images."""
        if start == HIDDEN:
            self.hidden_scores = self.target(rows(output, offset, offset + 1, count))[0].clone()
            return
        self.forwards_here += stop - start
        if start == 0:
            self.bind(rows(output, offset, offset + 1, count))
            start, offset = 1, offset + 1
        if start < stop:
            self.add(start, stop, self.target(rows(output, offset, offset + stop - start, count)))

    def add(self, start: int, stop: int, scores: torch.Tensor) -> None:
        """Take the scores of rows [start, stop), all of masks."""
        self.search.update(range(start - 1, stop - 1), scores)
        self.kept.add(start - 1, stop - 1)

    def has(self, start: int, stop: int) -> bool:
        """Whether rows [start, stop) need no forward. Row 0 always does: it decides what is explained."""
        return start > 0 and all(self.search.seen[start - 1 : stop - 1].tolist())  # as a list: once a batch

    def scores_of(self, row: int) -> torch.Tensor:
        """The scores ``(K,)`` of a row."""
        return self.search.scores[row - 1] if row else self.search.reference_scores

    def spread(self) -> torch.Tensor:
        """``(K,)``, the largest change of each score so far."""
        gaps = (self.search.scores[self.search.seen] - self.search.reference_scores).abs()
        return gaps.amax(dim=0) if len(gaps) else gaps.new_zeros(gaps.shape[1:])

    def most_changed(self, stop: int) -> torch.Tensor:
        """The row ``(1,)`` of a mask below ``stop`` whose scores changed most, on their device."""
        gaps = (self.search.scores[: stop - 1] - self.search.reference_scores).abs().sum(dim=1).nan_to_num()
        return gaps.argmax()[None] + 1

    def take_stored(self) -> None:
        """Refuse wrong scores, and take those on disk, whoever computed them."""
        self.search.check()
        self.kept.take()

    def scored(self) -> Observed:
        """All masks with their scores, whichever search asked for them."""
        search = self.search
        return Observed(search.masks, search.reference_scores, search.ids, search.scores)

    def finish(self) -> None:
        """Refuse wrong or missing scores, and keep them, once: what is left after the last forward but for the map."""
        if self._is_finished:
            return
        self.search.check()
        self.search.next_round()
        self.search.require_complete()
        self.kept.finish()
        self._is_finished = True

    def explanation(self) -> Explanation:
        """The case's explanation, without a map if there is nothing to explain."""
        self.finish()
        search, estimator = self.search, self.estimator
        if self.target.nothing:
            image, none = self.case.image, self.search.reference_scores
            return Explanation(
                name=self.case.name,
                saliency=image.new_zeros(0, *image.shape[1:]),
                scores=search.scores[:0],
                ids=[],
                reference_scores=none,
                target=self.target,
                masks=search.masks,
                observed=[],
                num_forwards=self.num_forwards,
                per_prediction=self.per_prediction,
            )
        stopped = max(search.observed, key=lambda observed: len(observed.ids)).words
        if stopped:
            logger.info("case %s: %d masks: %s", self.case.name, len(search.ids), stopped)
        with stage("map"):
            maps = [estimator.compute(observed) for observed in search.observed]
            noise = [estimator.noise(observed, self.rounding) for observed in search.observed]
        return Explanation(
            name=self.case.name,
            saliency=inside(torch.cat(maps), self.case.within),
            scores=search.scores,
            ids=search.ids,
            reference_scores=search.reference_scores,
            target=self.target,
            masks=search.masks,
            observed=search.observed,
            num_forwards=self.num_forwards,
            noise=joined(noise),
            per_prediction=self.per_prediction,
            estimator=estimator,
            stopped=stopped,
            hidden_scores=self.hidden_scores,
            within=self.case.within,
        )


def bound_target(target: Target, reference: Any, case: Case) -> BoundTarget:
    """A target, bound to the output ``(1, ...)`` of a case's unperturbed image; one without scores where there is
    nothing to explain.
    """
    try:
        return target.bind(reference, replace(case, prediction=None))  # targets keep the case
    except NothingToExplain as error:
        return BoundNothing(error.problem)
    except (CaseError, SettingError):
        raise
    except ValueError as error:
        raise CaseError(case.name, str(error)) from error


def sampled(output: Any) -> list[torch.Tensor]:
    """At most 2^20 values of each tensor of an output, as copies; empty for a list of boxes, whose order may vary."""
    if isinstance(output, (list, tuple)) and any(isinstance(item, Mapping) for item in output):
        return []
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    # Of an even step all may come from some columns.
    return [plain(leaf).detach().flatten()[:: max(1, leaf.numel() // 2**20) | 1].clone() for leaf in leaves]
