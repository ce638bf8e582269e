"""The loop that every explanation runs. Each round of masks that the cases ask for is cut into batches; for each batch
images are perturbed, the network runs, and its scores are read. The scores of a round are sent to the searches, which
ask for the next one.

Before the loop, :meth:`PerturbationInferer.start <monai_saliency.PerturbationInferer.start>` has bound masks and fill
to each image, which gives a :class:`CaseState`. Row 0 of a case is its unperturbed image, and row i + 1 the i-th mask
that it asks for. When row 0 is read, the target is bound to the network's output. All images of a call have one shape.

What watches the loop is elsewhere: whether rows are independent (:mod:`monai_saliency.inferers.row_watch`), the scores
on disk (:mod:`monai_saliency.inferers.score_watch`), the bar (:mod:`monai_saliency.inferers.progress`), and other
workers (:mod:`monai_saliency.inferers.sharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.batches import Plan, Rows, cut, of_part
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.perturbation import HIDDEN
from monai_saliency.inferers.progress import Progress
from monai_saliency.inferers.row_check import RowsDepend
from monai_saliency.inferers.row_watch import RowWatch
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.sharding import WHOLE, Part
from monai_saliency.utils.timing import stage

#: gives cases the scores that other workers have; called at the end of each round
Meet = Callable[[Sequence[CaseState]], None]


class Scorer(Protocol):
    """Scores the rows of a round: by whole images, or by remembered patches."""

    def plan(self, spans: Sequence[tuple[int, int]], batches: Sequence[Sequence[Rows]]) -> Plan:
        """The forwards of a round."""

    def score(self, batches: Sequence[Sequence[Rows]], advance: Callable[[int], None]) -> None:
        """Score the rows that have no scores yet; ``advance`` is told how many forwards are done."""


def run_rounds(
    states: Sequence[CaseState], scorer: Scorer, size: int, part: Part, meet: Meet | None, progress: Progress
) -> None:
    """Score round after round of masks, until no case asks for another: the last round of a case has no rows.

    Args:
        states: the cases.
        scorer: runs the network.
        size: rows in a batch.
        part: the share of the batches that is run here: of every round where workers meet, else of the first round.
        meet: gives the cases the scores of other workers; None where none run at the same time.
        progress: shows how far it is.
    """
    for number in count():
        spans = [state.rows_of_round(number) for state in states]
        if all(start == stop for start, stop in spans):
            progress.end(len(states))
            return
        batches = of_part(list(cut(spans, size)), part)
        progress.begin(scorer.plan(spans, batches), states, number)
        try:
            scorer.score(batches, progress.advance)
        except BaseException as error:
            if not isinstance(error, CaseError):  # a run that is stopped keeps what it has scored
                for state in states:
                    state.kept.flush()
            raise
        for state in states:
            # Parts that run apart meet in the store: what is there by now is taken, and nothing waits.
            state.kept.end_round(look_for_others=meet is None and part.count > 1)
        if meet is not None:
            _meet_all(meet, states)
        else:
            # Later rounds are done by whoever has all scores of the first. Others have no further rows, and end here.
            part = WHOLE
        with stage("look"):
            for state in states:
                state.search.next_round()  # sends the scores that the state has read; nothing while some are missing


class WholeImages:
    """Scores the rows of some cases by the inner inferer, on batches of whole perturbed images.

    Args:
        forward: calls the network.
        states: the cases.
        split: the inputs of the call, taken apart: images, what is held beside them, and numbers that masks may hide.
        batch_size: rows of the network's batches.
    """

    def __init__(self, forward: Forward, states: Sequence[CaseState], split: SplitInputs, batch_size: int) -> None:
        self.forward, self.states, self.split = forward, states, split
        # One buffer serves all batches, so memory does not grow with the masks. Rows past the end of the last batch
        # hold what they held before, and nothing reads their outputs.
        image = states[0].case.image
        self.batch = image.new_zeros(batch_size, len(image) + split.held_images.shape[1], *image.shape[1:])
        self.watch = RowWatch(forward, states, self.batch, self._run_rows)

    def plan(self, spans: Sequence[tuple[int, int]], batches: Sequence[Sequence[Rows]]) -> Plan:
        """The forwards of a round."""
        return Plan(sum(stop - start for batch in batches for _, start, stop in batch))

    def score(self, batches: Sequence[Sequence[Rows]], advance: Callable[[int], None]) -> None:
        """Score the rows of a round that have no scores yet."""
        for batch in batches:
            # A batch with some stored scores is run as a whole, so that its scores do not depend on what was stored.
            if not all(self.states[index].has(start, stop) for index, start, stop in batch):
                self._score(batch)
            advance(sum(stop - start for _, start, stop in batch))
        self.watch.end_round()

    def _score(self, batch: Sequence[Rows]) -> None:
        """Perturb, run, read."""
        filled = self._filled_up(batch)
        with stage("perturb"):
            self._perturb(filled)
        self.watch.before(batch)
        with stage("forward"):
            try:
                output = self._run_rows(self.batch, filled)
            except Exception as error:
                self.watch.failed(batch, error)
                raise
        with stage("read scores"):
            self._read(filled, output)
        self.watch.after(batch)

    def _filled_up(self, batch: Sequence[Rows]) -> list[Rows]:
        """A batch, and in rows that it leaves free its cases' images with everything hidden, if these have no score."""
        free = len(self.batch) - sum(stop - start for _, start, stop in batch)
        lacking = [index for index, *_ in batch if self.states[index].hidden_scores is None]
        return [*batch, *((index, HIDDEN, HIDDEN + 1) for index in lacking[:free])]

    def _perturb(self, batch: Sequence[Rows]) -> None:
        """Write the rows of a batch, one behind the other."""
        offset = 0
        for index, start, stop in batch:
            self.states[index].images.write(start, stop, out=self.batch[offset : offset + stop - start])
            offset += stop - start

    def _run_rows(self, images: torch.Tensor, batch: Sequence[Rows]) -> Any:
        """The network's output of images ``(n, C, *spatial)``, which are the rows of a batch."""
        counts = [(index, stop - start) for index, start, stop in batch]
        name = self.states[batch[0][0]].case.name
        return self.forward.images(images, self.split, counts, name, self._hidden_numbers(batch))

    def _hidden_numbers(self, batch: Sequence[Rows]) -> np.ndarray | None:
        """Which numbers each row of a batch hides; None where the image alone is hidden."""
        if not self.split.numbers:
            return None
        return np.concatenate([self.states[index].images.hidden_numbers(start, stop) for index, start, stop in batch])

    def _read(self, batch: Sequence[Rows], output: Any) -> None:
        """Read the scores of a batch's rows."""
        offset = 0
        for index, start, stop in batch:
            state = self.states[index]
            state.read(start, stop, output, offset, len(self.batch))
            offset += stop - start


def _meet_all(meet: Meet, states: Sequence[CaseState]) -> None:
    """Meet the other workers. If some of them have found that images must go through one at a time
    (:class:`RowsDepend`), they score anew, and those that do so already meet them again.
    """
    while True:
        try:
            meet(states)
            return
        except RowsDepend:
            if not states[0].one_by_one:
                raise
