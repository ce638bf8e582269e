"""One case of an ensemble: its members explain it one after another, and their maps are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from monai_saliency.cases import Case
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.masks.base import BoundMasks, Observed
from monai_saliency.targets.base import BoundTarget


class EnsembleState:
    """One case of an ensemble, scored by each member for the target that is frozen on their mean output.

    Args:
        members: the case's states, one for each member.
    """

    def __init__(self, members: Sequence[CaseState]) -> None:
        self.members = members

    @property
    def case(self) -> Case:
        return self.members[0].case

    @property
    def masks(self) -> BoundMasks:
        return self.members[0].masks

    @property
    def target(self) -> BoundTarget:
        return self.members[0].target

    @property
    def complete(self) -> bool:
        """Whether all masks of all members have scores."""
        return all(member.complete for member in self.members)

    @property
    def num_forwards(self) -> int:
        """All forwards that the case has cost: each member's count."""
        return sum(member.num_forwards for member in self.members)

    def take_stored(self) -> None:
        """Take the scores on disk, whoever computed them."""
        for member in self.members:
            member.take_stored()

    def scored(self) -> Observed:
        """All masks with the members' mean scores, where masks do not depend on scores."""
        return _mean([member.scored() for member in self.members])

    def finish(self) -> None:
        """Refuse wrong or missing scores, and keep them."""
        for member in self.members:
            member.finish()

    def explanation(self) -> Explanation:
        """The mean of the members' explanations, with their disagreement."""
        members = [member.explanation() for member in self.members]
        if self.target.nothing:
            return replace(members[0], num_forwards=self.num_forwards)
        maps = torch.stack([member.saliency for member in members])
        references = torch.stack([member.reference_scores for member in members])
        hidden = [member.hidden_scores for member in members if member.hidden_scores is not None]
        first = replace(
            members[0],
            saliency=maps.mean(dim=0),
            disagreement=maps.std(dim=0),
            reference_scores=references.mean(dim=0),
            num_forwards=self.num_forwards,
            hidden_scores=torch.stack(hidden).mean(dim=0) if hidden else None,
        )
        return self._of_all_searches(first, members) if self.masks.adaptive else self._of_one_search(first, members)

    def _of_one_search(self, first: Explanation, members: Sequence[Explanation]) -> Explanation:
        """All members have the same masks: the error is the error of their mean scores."""
        observed = _mean([member.observed[0] for member in members])
        noise = first.noise
        if noise is not None and first.estimator is not None:
            noise = first.estimator.noise(observed, max(member.rounding for member in self.members))
        return replace(first, scores=observed.scores, observed=[observed], noise=noise)

    def _of_all_searches(self, first: Explanation, members: Sequence[Explanation]) -> Explanation:
        """Each member has masks and noise of its own."""
        noise = [member.noise for member in members if member.noise is not None]
        return replace(
            first,
            ids=[mask for member in members for mask in member.ids],
            scores=torch.cat([member.scores for member in members]),
            observed=[observed for member in members for observed in member.observed],
            noise=torch.stack(noise).mean(dim=0) if noise else None,
        )


def _mean(members: Sequence[Observed]) -> Observed:
    """The mean scores of several networks on the same masks."""
    scores = torch.stack([member.scores for member in members]).mean(dim=0)
    reference_scores = torch.stack([member.reference_scores for member in members]).mean(dim=0)
    return Observed(members[0].masks, reference_scores, members[0].ids, scores)
