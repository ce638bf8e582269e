"""The meaning of a map's colours: their scale, and which values are worth colouring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monai_saliency.estimators.base import Meaning
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.utils.arguments import positive_numbers

__all__ = ["TINY", "TIMES_ERROR", "Legend", "legends_of"]

#: the share of the score's range below which a change is nothing
TINY = 0.01
#: how many standard errors a value must reach, so that it is not put down to chance
TIMES_ERROR = 2


@dataclass(frozen=True)
class Legend:
    """The meaning of one map's colours.

    Attributes:
        scale: the largest absolute value of the colour bar, in the map's unit.
        span: the range of the score; None where the map is not in the score's unit, and nothing is known of it.
        words: what the values are.
        change: the largest change of the score by any mask; None where it is not known.
        in_score_unit: whether the map is in the score's unit.
        signed: whether values below zero have a meaning.
        note: a further line for the colour bar.
        noise: how large a value can be by chance (:meth:`~monai_saliency.estimators.base.Estimator.noise`); 0 where it
            is not known.
    """

    scale: float
    span: float | None = None
    words: str = "saliency (change of the score)"
    change: float | None = None
    in_score_unit: bool = True
    signed: bool = True
    note: str = ""
    noise: float = 0.0

    @property
    def least(self) -> float:
        """The absolute value below which nothing is coloured: a hundredth of the score's range, or of the scale."""
        return TINY * min(self.scale, self.span if self.span is not None and self.in_score_unit else self.scale)

    def is_nothing(self, saliency: np.ndarray) -> bool:
        """Whether no change reaches a hundredth of the score's range."""
        # A map in another unit is as large for a score that hardly changes, so the masks' changes decide.
        change = largest(saliency) if self.in_score_unit else self.change
        return largest(saliency) == 0 or (change is not None and self.span is not None and change < TINY * self.span)

    def floor(self, has_error: bool) -> float:
        """The absolute value below which nothing is coloured, by the map's noise where there is no standard error."""
        return self.least if has_error else max(self.least, TIMES_ERROR * self.noise)

    def small_print(self, has_error: bool, has_label: bool) -> list[str]:
        """Lines for the colour bar: what is not coloured, whose scale it is, and what an outline shows."""
        error = f", or {TIMES_ERROR} standard errors" * has_error
        lines = [f"not coloured: below {self.floor(has_error):.2g}{error}"]
        return lines + [self.note] * bool(self.note) + ["outline: the label"] * has_label

    @classmethod
    def of(cls, explanation: Explanation, scale: float | None = None) -> list[Legend]:
        """The legend of each map of an explanation.

        Where the target knows the score's range (1 for a probability), the scale is this range times what the method
        adds up, so that all cases of a cohort have one scale. Else, as for logits, it is the largest score of the case
        and its perturbed images, rounded up; give ``scale`` to draw a cohort of such scores on one.

        Raises:
            ValueError: when ``scale`` is not a number above 0.
        """
        scale = None if scale is None else _scale(scale)
        quantity = explanation.target.quantity()
        estimator = explanation.estimator
        meaning = Meaning() if estimator is None else estimator.meaning(explanation.masks)
        words = f"{meaning.words} ({quantity.words})" if meaning.in_score_unit else meaning.words
        in_unit, is_known = meaning.in_score_unit, quantity.span is not None
        found = []
        for change, size, noise in zip(*_figures(explanation), strict=True):
            span = quantity.span or size
            own = meaning.largest * (1.0 if not in_unit else span if is_known else rounded_up(span))
            note = "on this scan's own scale" if in_unit and not is_known and scale is None else ""
            found.append(cls(scale or own, span, words, change, in_unit, meaning.signed, note=note, noise=noise))
        return found


def legends_of(
    explanation: Explanation | None, maps: Sequence[np.ndarray] | np.ndarray, scale: float | None = None
) -> list[Legend]:
    """The legend of each of K maps ``(*spatial)``, by its explanation where it has one, else by the maps alone."""
    legends = default_legends(maps, scale) if explanation is None else Legend.of(explanation, scale)
    return legends if len(legends) == len(maps) else default_legends(maps, scale)


def _figures(explanation: Explanation) -> list[list[float]]:
    """For each map the largest change of the score by any mask, the largest absolute score, and its noise."""
    repeats = len(explanation.explained) // len(explanation.reference_scores)
    reference = explanation.reference_scores.double().cpu()
    scores = torch.cat([reference[None], explanation.scores.double().cpu()])
    noise = torch.zeros_like(reference) if explanation.noise is None else explanation.noise.double().cpu()
    found = (scores - reference).abs().amax(dim=0), scores.abs().amax(dim=0), noise.nan_to_num()
    return [each.repeat_interleave(repeats).tolist() for each in found]


def largest(saliency: np.ndarray) -> float:
    """The largest finite absolute value of a map; 0 where there is none."""
    finite = np.isfinite(saliency)
    return max(float(np.max(saliency, where=finite, initial=0)), -float(np.min(saliency, where=finite, initial=0)))


def rounded_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1.0, 2.0, 5.0) if value <= step * power * (1 + 1e-9)), 10 * power)


def at_most(value: float) -> str:
    """A number in words, of two digits and never below the value."""
    if value <= 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step * (1 - 1e-9)) * step:.2g}"


def default_legends(
    maps: Sequence[np.ndarray] | np.ndarray, scale: float | None = None, words: Sequence[str] | None = None
) -> list[Legend]:
    """Legends of K maps ``(*spatial)`` without an explanation; ``scale`` is by default the largest value."""
    full = max(map(largest, maps), default=0.0) or 1.0 if scale is None else _scale(scale)
    return [Legend(full, scale, each) for each in words or [Legend.words] * len(maps)]


def verdicts(maps: Sequence[np.ndarray] | np.ndarray, legends: Sequence[Legend], coloured: Sequence[bool]) -> list[str]:
    """Sentences for the title about maps in which nothing matters, and maps in which nothing is beyond chance."""
    words = [_verdict(*each) for each in zip(maps, legends, coloured, strict=True)]
    return [f"row {i}: {each}" if len(words) > 1 else each for i, each in enumerate(words, start=1) if each]


def _verdict(saliency: np.ndarray, legend: Legend, is_coloured: bool) -> str:
    change = 0.0 if legend.change is None else legend.change
    by_masks = legend.span is not None and change >= TINY * legend.span  # which may hide much at once
    if not legend.is_nothing(saliency):
        if not is_coloured:
            return "nothing stands out from chance"
        # In the score's unit, which the map is not in.
        return f"masks change the score by up to {at_most(change)}" if change and not legend.in_score_unit else ""
    if not legend.in_score_unit:
        return "the map is zero everywhere" if by_masks else f"no mask changes the score by more than {at_most(change)}"
    words = f"no part of this scan changes the score by more than {at_most(largest(saliency))}"
    return words + (f", though single masks change it by up to {at_most(change)}" if by_masks else "")


def _scale(scale: float) -> float:
    if isinstance(scale, (list, tuple)):
        raise ValueError(f"`scale` must be one number above 0, got {scale!r}")
    positive_numbers("scale", scale)
    return float(scale)
