"""The explanation of one case."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from monai_saliency.errors import NothingToExplain
from monai_saliency.estimators.base import Estimator, Meaning
from monai_saliency.masks.base import BoundMasks, Id, Observed
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.arguments import written
from monai_saliency.utils.timing import stage

logger = logging.getLogger(__name__)

#: a fill that leaves a larger share of what a score can move by is none
FILL_LEAVES = 0.5
#: a peak of this many times its noise is not chance, even among a thousand voxels
TIMES_NOISE = 5


@dataclass(frozen=True)
class Explanation:
    """The explanation of one case.

    Its map, the standard error and the noise are computed when they are first read, so that another thread can do it
    while the network runs.

    Attributes:
        name: the case's name.
        scores: ``(N, K)``, one row a mask.
        ids: the mask of each row of ``scores``, N of them.
        reference_scores: ``(K,)``, of the unperturbed image.
        target: the target, bound to the case.
        masks: the masks, bound to the case; None for methods that make their maps themselves.
        num_forwards: what went through the network for this case. Images: the masks and the unperturbed image, less
            the masks whose scores were stored; or patches of images, where their outputs are remembered
            (:mod:`monai_saliency.inferers.patches`). Not counted is what is run to check that the rows of a batch are
            independent (:mod:`monai_saliency.inferers.preflight`), and the image with everything hidden.
        per_prediction: how many forwards one prediction of the image is: 1, or its number of patches.
        estimator: what makes the map of the scores; None for methods that make their maps themselves.
        observed: what each search has asked for, with the scores: one for each explained score where masks depend on
            scores, else one for all; of an ensemble whose masks depend on scores, of all its members.
        stopped: why no further masks were scored, in words; empty where masks do not depend on scores.
        hidden_scores: ``(K,)``, with the whole image replaced by the fill; None for methods that make their maps
            themselves.
        rounding: how far a score may be off by the network's precision, relative to the largest one.
        maps: the map, where the method itself has made it.
        kind: the meaning of the values of such a map.
        members: the explanations of the members of an :class:`~monai_saliency.networks.Ensemble`. Then the map and the
            scores are the members' means; where masks depend on scores, the rows of all members follow each other.
        within: the voxels that are explained, bool ``(1, *spatial)``, see :class:`~monai_saliency.Case`; None for all.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.sliding_window(1, target=ms.ClassScore([0], "none"))
        >>> [explanation] = explain.explain(torch.ones(1, 1, 1, 2), lambda images: images.flatten(1).sum(1, True))
        >>> explanation.saliency.tolist(), explanation.scores.tolist(), explanation.reference_scores.tolist()
        ([[[1.0, 1.0]]], [[1.0], [1.0]], [2.0])
    """

    __repr__ = written

    name: str
    scores: torch.Tensor
    ids: Sequence[Id]
    reference_scores: torch.Tensor
    target: BoundTarget
    masks: BoundMasks | None
    observed: Sequence[Observed]
    num_forwards: int
    per_prediction: int = 1
    estimator: Estimator | None = None
    stopped: str = ""
    hidden_scores: torch.Tensor | None = None
    rounding: float = 0.0
    maps: torch.Tensor | None = None
    kind: Meaning | None = None
    members: Sequence[Explanation] = ()
    within: torch.Tensor | None = None

    @cached_property
    def saliency(self) -> torch.Tensor:
        """The map ``(K, *spatial)``, on the image's device, in the score's unit; ``(K * C, *spatial)`` where channels
        have masks of their own; without a map, K = 0, where ``target.nothing`` says in words why there is nothing to
        explain.
        """
        if self.maps is not None:
            return self.maps
        with torch.no_grad(), stage("map"):
            if self.members:
                return torch.stack([member.saliency for member in self.members]).mean(dim=0)
            estimator: Any = self.estimator
            maps = torch.cat([estimator.compute(observed) for observed in self.observed])
            return inside(maps, self.within)

    @cached_property
    def disagreement(self) -> torch.Tensor | None:
        """Of the map's shape and unit, at least 0: the standard deviation between the maps of an ensemble's members (of
        a sample, divided by k - 1). None for a single network.
        """
        if not self.members:
            return None
        with torch.no_grad():
            return torch.stack([member.saliency for member in self.members]).std(dim=0)

    @cached_property
    def noise(self) -> torch.Tensor | None:
        """``(K,)``, how large a value of each map can be by chance, see
        :meth:`~monai_saliency.estimators.base.Estimator.noise`; None where that is not known. Where each member of an
        ensemble has masks of its own, the mean of theirs.
        """
        if self.estimator is None:
            return None
        with torch.no_grad():
            noise = joined([self.estimator.noise(observed, self.rounding) for observed in self.observed])
        return None if noise is None else noise.unflatten(0, (-1, len(self.reference_scores))).mean(dim=0)

    @cached_property
    def meaning(self) -> Meaning:
        """The meaning of the map's values."""
        if self.estimator is not None and self.masks is not None:
            return self.estimator.meaning(self.masks)
        kind = self.kind or Meaning()
        if kind.largest or self.maps is None:
            return kind
        words = f"{kind.words}, on this scan's own scale"
        return kind._replace(largest=float(self.maps.abs().max()) or 1.0, words=words)

    @cached_property
    def standard_error(self) -> torch.Tensor | None:
        """How far each voxel of the map may be from the value that many more masks would give: of the map's shape, unit
        and device, see :meth:`~monai_saliency.estimators.base.Estimator.standard_error`. For a regression it covers the
        bias too, see :meth:`~monai_saliency.estimators.RegressionScoring.standard_error`. None where there is none.
        Where each member of an ensemble has rounds of its own, the mean of theirs, which is too large if anything.
        """
        if self.estimator is None:
            return None
        with torch.no_grad(), stage("standard error"):
            errors = joined([self.estimator.standard_error(observed) for observed in self.observed])
        # Of an ensemble's members the mean.
        if errors is None:
            return None
        return inside(errors.unflatten(0, (-1, len(self.explained))).mean(dim=0), self.within)

    @cached_property
    def fill_leaves(self) -> torch.Tensor | None:
        """The share ``(K,)`` of each score that is left when the fill hides everything, in [0, 1], float64 on the CPU.

        It is 1 less the change of the score by hiding everything, divided by how far the score can move: to the score
        of an image that shows nothing (:meth:`~monai_saliency.targets.base.BoundTarget.uninformed`), or by the largest
        change of any mask where that score is not known. Above one half the fill is none for this score, and its map
        means little.
        """
        if self.hidden_scores is None:
            return None
        return share_left(self.target, self.reference_scores, self.hidden_scores, self.largest_changes)

    @property
    def fill_problem(self) -> str:
        """In words, how much the fill leaves of each score, where this is more than half; else empty."""
        leaves = [] if self.fill_leaves is None else self.fill_leaves.tolist()
        each = zip(self.target.labels, leaves, strict=False)
        if not (found := [f"{share:.0%} of {label_name(label)}" for label, share in each if share > FILL_LEAVES]):
            return ""
        hidden = "the whole scan" if self.within is None else "the whole part"
        return (
            f"hiding {hidden} leaves {', '.join(found)}, so this map shows little (expected for an absence, such "
            "as a healthy scan; otherwise try another fill)"
        )

    @cached_property
    def without_peak(self) -> torch.Tensor:
        """Each score with the place of its map's peak hidden, ``(K,)`` in float64 on the CPU: the lowest score of a
        mask that hides the peak's voxel, and nothing but one place. NaN where no such mask was scored, as for random
        masks, where channels or the members of an ensemble have masks of their own, where the strongest voxel does not
        support the score, and where it may be chance: within five times the noise.
        """
        found = torch.full((len(self.reference_scores),), math.nan, dtype=torch.float64)
        if self.masks is None:
            return found
        one_for_all = self.masks.channels is None and not (self.members and self.masks.adaptive)
        rows = self.masks.places(self.ids) if one_for_all else []
        ids, scores = [self.ids[row] for row in rows], self.scores.double().cpu()[rows]
        noises = [0.0] * len(found) if self.noise is None else self.noise.nan_to_num().tolist()
        for number, saliency in enumerate(self.saliency if ids else ()):
            peak = np.unravel_index(int(saliency.argmax()), saliency.shape)
            voxel = tuple(slice(int(place), int(place) + 1) for place in peak)
            hides = self.masks.render(ids, "cpu", voxel).flatten() < 0.5
            is_shown = saliency[peak] == saliency.abs().max() and saliency[peak] > TIMES_NOISE * noises[number]
            if is_shown and hides.any():
                found[number] = scores[hides, number].min()
        return found

    @property
    def largest_changes(self) -> torch.Tensor:
        """The largest change of each score by a mask that was asked for it, ``(K,)``."""
        return self._largest(lambda observed, scores: scores - observed.reference_scores)

    @property
    def largest_scores(self) -> torch.Tensor:
        """The largest absolute score of the image, and of its images by masks that were asked for it, ``(K,)``."""
        return self._largest(lambda observed, scores: scores)

    def _largest(self, values: Callable[[Observed, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The largest absolute value of each score's rows, its unperturbed one among them, ``(K,)``."""
        found = []
        all_scores = Observed(None, self.reference_scores, self.ids, self.scores)  # type: ignore[arg-type]
        for observed in self.observed or [all_scores]:
            scores = torch.cat([observed.reference_scores[None], observed.scores])
            found.append(values(observed, scores).abs().amax(dim=0))
        return torch.cat(found).unflatten(0, (-1, len(self.reference_scores))).amax(dim=0)

    def maps_beside(self, standard_error_key: Any = None) -> dict[Any, torch.Tensor]:
        """The maps to save with the map: its disagreement as ``"disagreement"``, and its standard error, where it has
        them.

        Args:
            standard_error_key: the key of the standard error, which is computed for it; None leaves it out.
        """
        error = None if standard_error_key is None else self.standard_error
        found = {"disagreement": self.disagreement, standard_error_key: error}
        return {key: value for key, value in found.items() if value is not None}

    @property
    def explained(self) -> list[tuple[Any, int | None, float]]:
        """The content of each map: its class or channel, the image's channel (None where a map is of all), and
        the unperturbed image's score.
        """
        own = None if self.masks is None else self.masks.channels
        channels: Sequence[int | None] = [None] if own is None else range(own)
        scores = zip(self.target.labels, self.reference_scores.tolist(), strict=True)
        return [(label, channel, score) for label, score in scores for channel in channels]


def share_left(target: BoundTarget, before: torch.Tensor, hidden: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """The share of what scores ``(K,)`` can move by that is left when everything is hidden, ``(..., K)`` in float64:
    see :attr:`Explanation.fill_leaves`; ``changed`` is their largest change.
    """
    before, hidden, changed = (each.double().cpu() for each in (before, hidden, changed))
    nothing = torch.tensor(target.uninformed(), dtype=torch.float64)
    can_move = torch.where(nothing.isnan(), changed, (before - nothing).abs())
    moved = (before - hidden).abs()
    can_move = can_move.maximum(moved)
    return torch.where(can_move > 0, 1 - moved / can_move, 1.0)


def warned(explanations: list[Explanation]) -> list[Explanation]:
    """Explanations, with a warning in the log for each whose fill leaves most of a score."""
    for each in explanations:
        if each.fill_problem:
            logger.warning("case %s: %s", each.name, each.fill_problem)
    return explanations


def with_maps(explanations: list[Explanation]) -> list[Explanation]:
    """Explanations of which one has a map; a NothingToExplain with the reason of the first where none has."""
    if all(each.target.nothing for each in explanations):
        raise NothingToExplain(explanations[0].name, explanations[0].target.nothing)
    return explanations


def inside(values: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    """Maps ``(K, *spatial)`` with 0 outside of a part ``(1, *spatial)``; unchanged where there is none."""
    return values if part is None else torch.where(part.to(values.device), values, 0.0)


def joined(of_searches: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The noise, or the errors, of all searches, ``(K, ...)``; None where these are not known."""
    known = [values for values in of_searches if values is not None]
    return torch.cat(known) if known else None
