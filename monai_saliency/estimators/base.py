"""The contract of estimators: a map from the scores of N masks, an array ``(N, K)``.

:class:`ScoreState` collects the scores of a run. It stores no image and no full-size mask, so its memory does not
depend on the image. Scores of different ranges of masks merge in any order to the same state, and so the same map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from monai_saliency.masks.base import BoundMasks, Id

__all__ = [
    "Estimator",
    "Meaning",
    "ScoreState",
    "first_round",
    "of_each_score",
    "score_rounding",
    "split_coverage",
    "with_ones",
]


class Meaning(NamedTuple):
    """What the values of an estimator's maps are, for the legend of a picture."""

    words: str = "change of the score"
    largest: float = 1.0
    in_score_unit: bool = True
    signed: bool = True


class ScoreState:
    """The scores of one case so far.

    Masks come in rounds (:meth:`~monai_saliency.masks.base.BoundMasks.next_round`). Row i of the scores belongs to mask
    ``ids[i]``. Where all masks are one round, row i belongs to mask i.

    Args:
        estimator: makes the map from the scores.
        masks: the masks of the case.
        reference_scores: ``(K,)``, the scores of the unperturbed image.

    Attributes:
        ids: the masks of all rounds so far, in order, N of them.
        scores: ``(N, K)``, one row per mask, in the precision of ``reference_scores``; 0 where a mask has no score yet.
        seen: bool ``(N,)``, the masks that have a score.

    Raises:
        ValueError: when the masks have no first round.

    Example::

        >>> import torch
        >>> from monai_saliency import OcclusionScoring, SlidingWindowMasks
        >>> masks = SlidingWindowMasks((1, 2), (1, 2)).bind(torch.zeros(1, 1, 6))
        >>> state = OcclusionScoring().start(masks, torch.tensor([5.0]))
        >>> state.update(range(3), torch.tensor([[5.0], [1.0], [4.0]]))
        >>> state.compute().tolist()  # hiding the second window takes 4 of the score, the third 1
        [[[0.0, 0.0, 4.0, 4.0, 1.0, 1.0]]]
    """

    def __init__(self, estimator: Estimator, masks: BoundMasks, reference_scores: torch.Tensor) -> None:
        self.estimator = estimator
        self.masks = masks
        self.reference_scores = reference_scores
        self.ids = first_round(masks)
        self.scores = reference_scores.new_zeros(len(self.ids), len(reference_scores))
        self.seen = torch.zeros(len(self.ids), dtype=torch.bool, device="cpu")

    def next_round(self) -> bool:
        """Begin the next round of masks.

        Returns:
            False when no round is left.

        Raises:
            ValueError: when a mask of the current round has no score yet, or when the masks ask for a mask again.
        """
        if not bool(self.seen.all()):
            raise ValueError("a round begins when all masks of the one before are scored")
        found = self._wanted() if self.masks.in_rounds else []
        if not found:
            return False
        _check_round(self.masks, found, self.ids)
        self.ids = [*self.ids, *found]
        self.scores = torch.cat([self.scores, self.scores.new_zeros(len(found), self.scores.shape[1])])
        self.seen = torch.cat([self.seen, torch.zeros(len(found), dtype=torch.bool, device="cpu")])
        return True

    def _wanted(self) -> list[Id]:
        """What the scores want next, each by itself."""
        known, found = set(self.ids), dict[Id, None]()
        for score, reference in zip(self.scores.cpu().T, self.reference_scores.cpu(), strict=True):
            _, wanted = self.masks.replayed(self.ids, score[:, None], reference[None])
            found.update(dict.fromkeys(each for each in wanted if each not in known))
        return list(found)

    def stopped(self) -> str:
        """Why no round follows, in words: of the score that asked for most masks."""
        if not len(self.reference_scores):
            return ""
        if not self.masks.in_rounds:
            return self.masks.stopped(self.ids, self.scores.cpu(), self.reference_scores.cpu())
        texts = []
        for score, reference in zip(self.scores.cpu().T, self.reference_scores.cpu(), strict=True):
            rows, _ = self.masks.replayed(self.ids, score[:, None], reference[None])
            own = [self.ids[row] for row in rows], score[rows, None], reference[None]
            texts.append((len(rows), self.masks.stopped(*own)))
        return max(texts, key=lambda each: each[0])[1]

    def update(self, rows: Sequence[int], scores: torch.Tensor) -> None:
        """Add the scores of some rows.

        Args:
            rows: n rows of :attr:`scores`, in any order.
            scores: ``(n, K)``.

        Raises:
            ValueError: when ``scores`` has another shape.
        """
        expected = (len(rows), self.scores.shape[1])
        if tuple(scores.shape) != expected:
            raise ValueError(
                f"`scores` must have shape {expected} (masks, explained values), got {tuple(scores.shape)}"
            )
        places = slice(rows.start, rows.stop) if isinstance(rows, range) and rows.step == 1 else list(rows)
        self.scores[places] = scores.to(self.scores)
        self.seen[places] = True

    def merge(self, other: ScoreState) -> None:
        """Add the scores of another state of the same case.

        Raises:
            ValueError: when the other state has other masks or another number of explained values.
        """
        if other.scores.shape != self.scores.shape or other.masks.key != self.masks.key:
            raise ValueError(
                f"only states of one case merge: {tuple(self.scores.shape)} scores of {self.masks.key} met "
                f"{tuple(other.scores.shape)} of {other.masks.key}"
            )
        rows = other.seen.nonzero().flatten().tolist()
        self.update(rows, other.scores[rows])

    def compute(self) -> torch.Tensor:
        """The map from the scores so far; a ValueError if no mask has a score."""
        return of_each_score(self.estimator.compute, self.masks, *self._scored(), self.reference_scores)

    def noise(self, rounding: float = 0.0) -> torch.Tensor | None:
        """How large a value of the map can be by chance, as :meth:`Estimator.noise` returns it."""
        noise = partial(self.estimator.noise, rounding=rounding)
        return of_each_score(noise, self.masks, *self._scored(), self.reference_scores)

    def standard_error(self) -> torch.Tensor | None:
        """The standard error of the map, as :meth:`Estimator.standard_error` returns it."""
        return of_each_score(self.estimator.standard_error, self.masks, *self._scored(), self.reference_scores)

    def _scored(self) -> tuple[Sequence[int], torch.Tensor]:
        """The masks that have scores, and these."""
        ids, scores = self.ids, self.scores
        if not bool(self.seen.all()):
            rows = self.seen.nonzero().flatten().tolist()
            ids, scores = [ids[row] for row in rows], scores[rows]
        if not len(ids):
            raise ValueError("no map without scores: `update` the state first")
        return ids, scores


def of_each_score(
    made: Callable[..., Any], masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
) -> Any:
    """What an estimator makes of scores: of each by the masks that it asks for itself, where they come in rounds."""
    if not masks.in_rounds or not len(reference_scores):
        return made(masks, ids, scores, reference_scores)
    found = []
    for score, reference in zip(scores.split(1, dim=1), reference_scores.split(1), strict=True):
        rows, _ = masks.replayed(ids, score.cpu(), reference.cpu())
        rows = rows or list(range(len(ids)))  # of a part of the first round
        found.append(made(masks, [ids[row] for row in rows], score[rows], reference))
    return None if found[0] is None else torch.cat(found)


def first_round(masks: BoundMasks) -> Sequence[Id]:
    """The ids of the first round of masks."""
    found = masks.first_round()
    _check_round(masks, found, ())
    return found


def _check_round(masks: BoundMasks, found: Sequence[int], before: Sequence[int]) -> None:
    """Refuse a round that is empty or asks for a mask again."""
    if not isinstance(found, range) and len({*found, *before}) < len(found) + len(before):
        raise ValueError(f"{type(masks).__name__} asks for a mask that is scored already")
    if not len(found):
        raise ValueError(f"{type(masks).__name__} asks for a round without masks: give None when there is no more")


class Estimator(ABC):
    """The settings of an estimator. A subclass implements :meth:`compute`.

    Where each channel has its own masks, each channel gets its own map, made from the channel's masks alone. Maps are
    ordered by explained value, then by channel: all channels of the first value, all channels of the second, ...

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> bound = ms.SlidingWindowMasks(1, 1).bind(torch.zeros(1, 1, 3))
        >>> estimator = ms.OcclusionScoring()
        >>> isinstance(estimator, Estimator)
        True
        >>> scores = torch.tensor([[5.0], [4.0], [3.0]])  # of the three masks
        >>> estimator.compute(bound, range(3), scores, torch.tensor([6.0])).tolist()
        [[[1.0, 2.0, 3.0]]]
    """

    def start(self, masks: BoundMasks, reference_scores: torch.Tensor) -> ScoreState:
        """An empty state for one case, from its masks and the scores ``(K,)`` of its unperturbed image."""
        return ScoreState(self, masks, reference_scores)

    @abstractmethod
    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        """Make the map from scores.

        Args:
            masks: the masks of the case.
            ids: the ids of the n masks that were scored.
            scores: ``(n, K)``, one row per scored mask.
            reference_scores: ``(K,)``, the scores of the unperturbed image.

        Returns:
            the map ``(K, *spatial)``, or ``(K * C, *spatial)`` if each channel has its own masks, in the masks'
            precision and on their device, not normalised. Positive values mean that the image supports the score.
        """

    def meaning(self, masks: BoundMasks) -> Meaning:
        """What the map's values are: by default the change of the score, in its unit, at most as large as its range.

        Args:
            masks: the masks of the case.
        """
        return Meaning()

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """How large a value of the map can be by chance: the standard error that sampling leaves, and the rounding of
        the scores. Values of the map that are not several times larger mean nothing. Arguments as for :meth:`compute`;
        ``rounding`` is how far a score may be off by the network's own precision, relative to the largest score: 2^-20
        for float32, 2^-11 for float16, 2^-8 for bfloat16.

        Returns:
            ``(K,)``, in the score's unit; None, the default, if it is not known.
        """
        return None

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """How far each voxel of the map may be from the value that endless masks would give. Arguments as for
        :meth:`compute`.

        It is the standard deviation of the voxel over other random masks, as many as these. In 95 of 100 cases the
        value plus and minus 1.96 times this holds the value of endless masks.

        Returns:
            of the shape, precision, device and unit of the map, at least 0, and 0 if all scores are equal. None, the
            default, for windows or regions that are hidden in turn, and for fewer than three random masks.
        """
        return None


def score_rounding(scores: torch.Tensor, reference_scores: torch.Tensor, rounding: float = 0.0) -> torch.Tensor:
    """How far scores of one image may differ by rounding alone: eight units in the last place of the largest score, one
    millionth of it in float32.
    """
    largest = torch.cat([reference_scores[None], scores]).abs().amax(dim=0)
    return max(8 * torch.finfo(scores.dtype).eps, rounding) * largest


def with_ones(weights: torch.Tensor) -> torch.Tensor:
    """Weights ``(n, K)`` with a further column of ones, ``(n, K + 1)``; its weighted sum is the sum of the masks."""
    return torch.cat([weights, weights.new_ones(len(weights), 1)], dim=1)


def split_coverage(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split sums ``(K + 1, ...)`` weighted by :func:`with_ones` into the K weighted sums and the sum of the masks."""
    return sums[:-1], sums[-1]
