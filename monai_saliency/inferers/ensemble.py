"""One case of an ensemble: its members explain it one after another, and their maps are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from monai_saliency.inferers.explanation import Explanation
from monai_saliency.masks.base import Observed


def of_members(members: Sequence[Explanation | None]) -> Explanation | None:
    """The mean of the members' explanations of one case, for a target that is frozen on their mean output; None where
    parts of a member are still to be run.
    """
    known = [member for member in members if member is not None]
    if len(known) < len(members):
        return None
    first = known[0]
    if first.target.nothing:
        return replace(first, num_forwards=sum(member.num_forwards for member in known))
    hidden = [member.hidden_scores for member in known if member.hidden_scores is not None]
    is_adaptive = first.masks is not None and first.masks.adaptive
    mean = replace(
        first,
        members=known,
        reference_scores=torch.stack([member.reference_scores for member in known]).mean(dim=0),
        num_forwards=sum(member.num_forwards for member in known),
        hidden_scores=torch.stack(hidden).mean(dim=0) if hidden else None,
        rounding=max(member.rounding for member in known),
        maps=None,
    )
    if is_adaptive:  # each member has masks of its own
        return replace(
            mean,
            ids=[mask for member in known for mask in member.ids],
            scores=torch.cat([member.scores for member in known]),
            observed=[observed for member in known for observed in member.observed],
        )
    # All members have the same masks: the error is the error of their mean scores.
    scores = torch.stack([member.scores for member in known]).mean(dim=0)
    observed = [Observed(each.masks, mean.reference_scores, first.ids, scores) for each in first.observed]
    return replace(mean, scores=scores, observed=observed)
