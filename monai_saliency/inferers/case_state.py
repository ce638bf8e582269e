"""One case on its way through the loop, to its explanation (:mod:`monai_saliency.inferers.explanation`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.inferers.explanation import Explanation, of_members
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.networks.outputs import rows
from monai_saliency.storage.score_store import CaseScores
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.monai_private import tree_leaves
from monai_saliency.utils.precision import score_precision
from monai_saliency.utils.tensors import Box, everywhere, finite_between, plain
from monai_saliency.utils.timing import stage

__all__ = ["HIDDEN", "CaseState", "sampled"]

logger = logging.getLogger(__name__)

#: the row with the whole image replaced by the fill
HIDDEN = -1

#: values of fills that are made at once where they depend on the mask; a GPU needs that many to be busy
_FILLED, _FILLED_ON_GPU = 2**22, 2**25


class CaseState:
    """One case on its way through the loop. Row 0 is the unperturbed image, row i + 1 the i-th mask that is scored.
    The row :data:`HIDDEN` has everything hidden; it belongs to no round.
    """

    target: BoundTarget
    state: ScoreState

    def __init__(
        self,
        case: Case,
        masks: BoundMasks,
        fill: torch.Tensor,
        held: torch.Tensor,
        target: Target,
        estimator: Estimator,
        stored: CaseScores | None = None,
        fill_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.case = case
        self.masks = masks
        self.fill = fill  # where the fill depends on the mask: of a mask that hides everything
        self.fill_of = fill_of
        self._filled: tuple[int, tuple[torch.Tensor, ...]] = 0, ()  # the first row of a group, its masks and fills
        self.held = held
        self.stored = stored
        self.one_by_one = False
        self.made_by: Mapping[str, str | None] = {}
        self.rounding = 0.0
        self.values: Sequence[torch.Tensor] = ()  # some of the network's output of the unperturbed image
        self.hidden_scores: torch.Tensor | None = None  # (K,), with everything hidden
        self.forwards_here = 0
        self.forwards_elsewhere = 0
        self.per_prediction = 1
        self._target = target
        self._estimator = estimator
        self._first_round = masks.first_round()
        self.complete = False  # whether every mask of every round has its scores
        self._round_ends = [len(self._first_round) + 1]

    @property
    def num_forwards(self) -> int:
        """All forwards that the case has cost, here and elsewhere."""
        return self.forwards_here + self.forwards_elsewhere

    @property
    def num_rows(self) -> int:
        """Rows of all rounds so far, the unperturbed image among them."""
        return len(self._ids) + 1

    @property
    def _ids(self) -> Sequence[Id]:
        return self.state.ids if hasattr(self, "state") else self._first_round

    def rows_of_round(self, number: int) -> tuple[int, int]:
        """The rows [start, stop) of a round, from 0; none where that round has not begun."""
        ends = [0, *self._round_ends]
        start, stop = (ends[min(place, len(self._round_ends))] for place in (number, number + 1))
        return start, stop

    def masks_of(self, start: int, stop: int) -> Sequence[int]:
        """The masks of rows [start, stop), all behind row 0."""
        return self._ids[start - 1 : stop - 1]

    def hidden_numbers(self, start: int, stop: int) -> np.ndarray:
        """Which numbers of the case rows [start, stop) hide, bool ``(rows, numbers)``."""
        first = np.full((int(start <= 0), len(self.masks.numbers)), start == HIDDEN)
        return np.concatenate([first, self.masks.hidden_numbers(self.masks_of(max(start, 1), max(stop, 1)))])

    def perturb(self, start: int, stop: int, out: torch.Tensor, box: Box | None = None) -> None:
        """Write rows of the perturbed image."""
        parts = self.case.image, self.fill, self.held
        image, fill, held = parts if box is None else (each[everywhere(box)] for each in parts)
        if len(held):
            out[:, len(image) :] = held
            out = out[:, : len(image)]
        if start <= 0:
            out[0] = fill if start == HIDDEN else image
            start, out = 1, out[1:]
        if start < stop:
            if self.fill_of is not None:
                masks, fill = self._masks_and_fills(start, stop)
            else:
                masks = self._rendered(start, stop, box)
            self.masks.perturb(image, fill, masks, self.is_finite, out, box)

    def _rendered(self, start: int, stop: int, box: Box | None = None) -> torch.Tensor:
        ids = self.masks_of(start, stop)
        # Foreign masks need not know boxes.
        masks = self.masks.render(ids) if box is None else self.masks.render(ids, box=box)
        return masks.to(self.case.image.dtype)

    def _masks_and_fills(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The masks of rows [start, stop) of a round, and their fills ``(n, C, *spatial)``: made in groups, which may
        be larger than batches, at fixed places of the round (law 7).
        """
        assert self.fill_of is not None
        image, parts = self.case.image, list[tuple[torch.Tensor, ...]]()
        size = max(1, (_FILLED_ON_GPU if image.is_cuda else _FILLED) // image.numel())
        begin, end = next(rows for rows in pairwise([1, *self._round_ends]) if start < rows[1])
        for first in range(start - (start - begin) % size, stop, size):
            if self._filled[0] != first:
                masks = self._rendered(first, min(first + size, end))
                fills = self.fill_of(image[None], self.masks.kept_share(masks))
                if fills.shape != (len(masks), *image.shape):
                    words = f"{tuple(fills.shape)} for {len(masks)} masks of an image of {tuple(image.shape)}"
                    raise CaseError(self.case.name, f"`fill.of` gave shape {words}")
                self._filled = first, (masks, fills.to(image))
            parts.append(tuple(each[max(start - first, 0) : stop - first] for each in self._filled[1]))
        if stop == end:
            self._filled = 0, ()
        return map(torch.cat, zip(*parts, strict=True))

    @cached_property
    def is_finite(self) -> bool:
        """Whether each voxel of the image has a finite distance to the fill."""
        return finite_between(self.fill, self.case.image)

    def bound_to(self, reference: Any) -> BoundTarget:
        """The target, bound to an output ``(1, ...)``."""
        try:
            return self._target.bind(reference, replace(self.case, prediction=None))  # targets keep the case
        except ValueError as error:
            raise (error if isinstance(error, CaseError) else CaseError(self.case.name, str(error))) from error

    def bind(self, reference: Any) -> None:
        """Bind the target to the network's output of the unperturbed image, and take the scores that are stored."""
        self.target = self.bound_to(reference)
        self.state = self._estimator.start(self.masks, self.target(reference)[0].clone())
        self.values = sampled(reference)
        self.rounding = max(self.rounding, score_precision(None, *(each.dtype for each in self.values)))
        if self.stored is not None:
            self.stored.resume(self.state.reference_scores, repr(self.masks.key), self.target.vouch)
            self.take_stored()

    def forget_prediction(self) -> None:
        """Drop what an evaluator predicted, and what is compared with it."""
        self.case, self.values = replace(self.case, prediction=None), ()

    def read(self, start: int, stop: int, output: Any, offset: int, count: int) -> None:
        """Score rows [start, stop), which begin at ``offset`` in the network's output of ``count`` images."""
        if start == 0:
            self.bind(rows(output, offset, offset + 1, count))
            start, offset = 1, offset + 1
        if start < stop:
            self.add(start, stop, self.target(rows(output, offset, offset + stop - start, count)))

    def add(self, start: int, stop: int, scores: torch.Tensor) -> None:
        """Take the scores of rows [start, stop), all of masks."""
        self.state.update(range(start - 1, stop - 1), scores)
        if self.stored is not None:
            # Not `scores`, which may live in a buffer that the next batch overwrites.
            self.stored.add(start - 1, stop - 1, self.state.scores[start - 1 : stop - 1])

    def spread(self) -> torch.Tensor:
        """``(K,)``, the largest change of each score so far."""
        gaps = (self.state.scores[self.state.seen] - self.state.reference_scores).abs()
        return gaps.amax(dim=0) if len(gaps) else gaps.new_zeros(gaps.shape[1:])

    def scores_of(self, row: int) -> torch.Tensor:
        """The scores ``(K,)`` of a row."""
        return self.state.scores[row - 1] if row else self.state.reference_scores

    def most_changed(self, stop: int) -> torch.Tensor:
        """The row ``(1,)`` of a mask below ``stop`` whose scores changed most, on their device."""
        gaps = (self.state.scores[: stop - 1] - self.state.reference_scores).abs().sum(dim=1).nan_to_num()
        return gaps.argmax()[None] + 1

    def has(self, start: int, stop: int) -> bool:
        """Whether rows [start, stop) need no forward. Row 0 always does: it decides what is explained."""
        return start > 0 and all(self.state.seen[start - 1 : stop - 1].tolist())  # as a list: once a batch

    def end_round(self, look_for_others: bool = False) -> None:
        """Write what still waits, unless the case is done and all its scores go into one file."""
        if self.stored is None:
            return
        if look_for_others or not bool(self.state.seen.all()):
            self.stored.flush()
        if look_for_others:
            try:
                self.stored.check_unchanged()
            except ValueError as error:
                raise CaseError(self.case.name, str(error)) from error
            self.take_stored()

    def take_stored(self) -> None:
        """Take the scores on disk, whoever computed them, of all rounds that are complete and of the one behind."""
        if self.stored is None:
            return
        ranges = self.stored.ranges()
        while True:
            for start, stop, scores in ranges:
                known = min(stop, len(self.state.seen))
                if start < known and scores.shape[1] == self.state.scores.shape[1]:
                    self.state.update(range(start, known), torch.from_numpy(scores[: known - start]))
            if not self.begin_round():
                return

    def begin_round(self) -> bool:
        """Begin the next round of masks if the one before is scored; False where it is not, or none is left."""
        if self.complete or not bool(self.state.seen.all()):
            return False
        if self.masks.in_rounds:
            self.check()  # scores decide what is asked next
        self.complete = not self.state.next_round()
        if not self.complete:
            self._round_ends.append(self.num_rows)
        return not self.complete

    def check(self) -> None:
        """Refuse scores that are NaN or infinite."""
        wrong = ~torch.isfinite(torch.cat([self.state.reference_scores[None], self.state.scores]))
        if bool(wrong.any()):
            raise CaseError(
                self.case.name,
                f"{int(wrong.any(dim=1).sum())} of {len(wrong)} network scores are NaN or "
                "infinite; check the network's weights and the preprocessing of this case",
            )

    def explanation(self) -> Explanation:
        """The case's explanation."""
        self.check()
        self.begin_round()
        if not self.complete:
            seen, count = int(self.state.seen.sum()), len(self.state.seen)
            raise CaseError(
                self.case.name,
                f"{seen} of {count} masks have scores: another part is still to be done. Later rounds of masks need a "
                "store, or ranks or devices that share them",
            )
        if self.stored is not None:
            self.stored.finish(self.state.scores)
        stopped = self.state.stopped()
        if stopped:
            logger.info("case %s: %d masks: %s", self.case.name, len(self.state.ids), stopped)
        with stage("map"):
            explanation = Explanation(
                name=self.case.name,
                saliency=self.state.compute(),
                scores=self.state.scores,
                ids=self.state.ids,
                reference_scores=self.state.reference_scores,
                target=self.target,
                masks=self.masks,
                num_forwards=self.num_forwards,
                noise=self.state.noise(self.rounding),
                per_prediction=self.per_prediction,
                estimator=self.state.estimator,
                stopped=stopped,
                hidden_scores=self.hidden_scores,
            )
            explanation = of_members(explanation, self.rounding)
            if problem := explanation.fill_problem:
                return replace(explanation, stopped="; ".join(filter(None, [stopped, problem])))
            return explanation


def sampled(output: Any) -> list[torch.Tensor]:
    """At most 2^20 values of each tensor of an output, as copies; empty for a list of boxes, whose order may vary."""
    if isinstance(output, (list, tuple)) and any(isinstance(each, Mapping) for each in output):
        return []
    leaves = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
    # Of an even step all may come from some columns.
    return [plain(each).detach().flatten()[:: max(1, each.numel() // 2**20) | 1].clone() for each in leaves]
