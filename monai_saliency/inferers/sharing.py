"""What workers that share the masks of an image exchange at the end of each round: their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monai_saliency.inferers.agreement import Origin, differences
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.row_check import RowsDepend

__all__ = ["WorkerScores", "take_scores"]


@dataclass(frozen=True)
class WorkerScores:
    """The scores that one worker has of a case, on the host."""

    name: str
    seen: torch.Tensor
    scores: torch.Tensor
    reference_scores: torch.Tensor
    num_forwards: int
    one_by_one: bool = False
    masks: str = ""
    origin: Origin | None = None

    @staticmethod
    def of(state: CaseState) -> WorkerScores:
        """What this worker has."""
        scores = state.state
        seen, values, reference = (
            # Copies: this worker goes on while others read.
            value.detach().cpu().clone()
            for value in (scores.seen, scores.scores, scores.reference_scores)
        )
        return WorkerScores(
            state.case.name,
            seen,
            values,
            reference,
            state.forwards_here,
            state.one_by_one,
            repr(state.masks.key),
            state.origin,
        )

    def differences(self, other: WorkerScores) -> list[str]:
        """What differs from another worker's, in words; empty if the scores belong together."""
        found = [] if self.masks == other.masks else [f"the masks ({self.masks} and {other.masks})"]
        return found + differences(self.origin, other.origin, (self.reference_scores, other.reference_scores))


def take_scores(states: Sequence[CaseState], workers: Sequence[Sequence[WorkerScores]], me: int) -> None:
    """Give the cases the scores of all workers, after which they are the same to the bit for every worker."""
    for number, theirs in enumerate(workers):
        for ours, other in zip(workers[0], theirs, strict=False):
            if ours.one_by_one != other.one_by_one:
                raise RowsDepend(
                    other.name,
                    "its images went through the network one at a time for some of the workers that share its masks, "
                    f"and in batches for others (worker 0 and worker {number} differ)",
                )
    for index, state in enumerate(states):
        each = [scores[index] for scores in workers]
        state.state.reference_scores = each[0].reference_scores.to(state.state.reference_scores)
        for worker in each:
            rows = worker.seen.nonzero().flatten().tolist()
            state.state.update(rows, worker.scores[rows])
        state.forwards_elsewhere = sum(worker.num_forwards for place, worker in enumerate(each) if place != me)
