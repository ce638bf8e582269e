"""The meaning of a map's colours: their scale, which values are worth colouring, and the colours themselves.

Colours are cold below zero and warm above, and grow with the square root of the value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from monai_saliency.inferers.explanation import TIMES_NOISE, Explanation
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.arguments import positive_numbers, require

#: the share of the score's range below which a change is nothing
TINY = 0.01
#: how many standard errors a value must reach, so that it is not put down to chance
TIMES_ERROR = 2
# So many log-odds are the whole range of a probability at its steepest, which is 1 / 4 where both classes are alike.
_FEWEST_LOG_ODDS = 4.0
#: the verdict on a map that chance alone can make
CHANCE = "nothing stands out from chance"
# From against to for the score. Lightness grows with strength, for dark scans. Every warm colour is lighter than every
# cold one, so the sign survives grey print, and everybody can tell yellow from blue.
#: from the lowest value to the last one below zero
COLD = ("#2f7de1", "#2659b8", "#1f3f94", "#1c2f7a")
#: from the first value above zero to the highest one
WARM = ("#f76707", "#fd9a1f", "#ffd23f", "#ffef9e")
# Of the weakest and the strongest colours; the scan is seen under both.
_OPACITY = (0.3, 0.6)


@dataclass(frozen=True)
class Legend:
    """The meaning of one map's colours.

    Attributes:
        scale: the largest absolute value of the colour bar, in the map's unit.
        span: the range of the score; None where nothing is known of it.
        words: what the values are.
        change: the largest change of the score by any mask; None where it is not known.
        in_score_unit: whether the map is in the score's unit.
        signed: whether values below zero have a meaning.
        note: a further line for the colour bar.
        noise: how large a value can be by chance; 0 where it is not known.
    """

    scale: float
    span: float | None = None
    words: str = "saliency (change of the score)"
    change: float | None = None
    in_score_unit: bool = True
    signed: bool = True
    note: str = ""
    noise: float = 0.0

    def is_nothing(self, saliency: np.ndarray) -> bool:
        """Whether no change reaches a hundredth of the score's range."""
        largest = _largest(saliency)
        # A map in another unit is as large for a score that hardly changes, so the masks' changes decide.
        change = largest if self.in_score_unit else self.change
        if largest == 0 or change is None or self.span is None:
            return largest == 0
        return change < TINY * self.span

    def floor(self, has_error: bool) -> float:
        """The absolute value below which nothing is coloured: a hundredth of the scale or of the score's range, and
        five times the map's noise if it has no standard error.
        """
        scale = self.scale
        if self.span is not None and self.in_score_unit:
            scale = min(scale, self.span)
        return TINY * scale if has_error else max(TINY * scale, TIMES_NOISE * self.noise)

    def coloured(self, saliency: np.ndarray, error: np.ndarray | None) -> np.ndarray:
        """Which voxels ``(*spatial)`` of a map are coloured, by its standard error if it has one. In a map that may
        be chance, none is.
        """
        shows_nothing = not self.in_score_unit and self.is_nothing(saliency)
        if shows_nothing or self.may_be_chance(saliency, error):
            return np.zeros(saliency.shape, bool)
        return _reaches(saliency, self.floor(error is not None), error)

    def may_be_chance(self, saliency: np.ndarray, error: np.ndarray | None) -> bool:
        """Whether chance alone can make a map: all values are within five times its noise, or no value that matters
        reaches two standard errors.
        """
        if _largest(saliency) <= TIMES_NOISE * self.noise:
            return True
        if error is None:
            return False
        least = TINY * (self.span or self.scale) if self.in_score_unit else 0.0
        return not _reaches(saliency, least, error).any()

    def verdict(self, saliency: np.ndarray, error: np.ndarray | None) -> str:
        """A sentence about a map where nothing matters, or that may be chance; empty for others."""
        words = []
        if self.is_nothing(saliency) and self.in_score_unit:
            words.append(f"no part of this scan changes the score by more than {_largest(saliency):.2g}")
        elif self.is_nothing(saliency):
            words.append(f"no mask changes the score by more than {self.change or 0.0:.2g}")
        if self.may_be_chance(saliency, error):
            words.append(CHANCE)
        return "; ".join(words)

    @staticmethod
    def against(saliency: np.ndarray, coloured: np.ndarray) -> str:
        """A sentence about a map with cold colours only; empty for others."""
        is_cold = coloured.any() and not (saliency[coloured] > 0).any()
        return "no place supports the score: all that is coloured speaks against it" if is_cold else ""

    def small_print(self, has_error: bool, has_label: bool) -> list[str]:
        """Lines for the colour bar: what is not coloured, whose scale it is, and what an outline shows."""
        lines = [f"not coloured: below {self.floor(has_error):.2g}"]
        if has_error:
            lines[0] += f", or {TIMES_ERROR} standard errors"
        if self.note:
            lines.append(self.note)
        if has_label:
            lines.append("outline: the label")
        return lines

    @classmethod
    def of(cls, explanation: Explanation, scale: float | None = None) -> list[Legend]:
        """The legend of each map of an explanation.

        Where the target knows the score's range (1 for a probability), the scale is this range times what the method
        adds up, so that all cases of a cohort have one scale. Else, as for logits, it is the largest score of the case
        and its perturbed images, rounded up; give ``scale`` to draw a cohort of such scores on one.
        """
        meaning = explanation.meaning
        changes, sizes, noises = _sizes(explanation)
        legends, quantity = [], explanation.target.quantity()
        for change, size, noise in zip(changes, sizes, noises, strict=True):
            span = quantity.span or max(size, _FEWEST_LOG_ODDS if quantity.unit == "log-odds" else 0)
            words, note, largest = meaning.words, "", meaning.largest
            if meaning.in_score_unit:
                words = f"{words} ({quantity.words})"
                largest *= rounded_up(span) if quantity.span is None else span
                if quantity.span is None and scale is None:
                    note = "on this scan's own scale"
            legends.append(
                cls(scale or largest, span, words, change, meaning.in_score_unit, meaning.signed, note, noise)
            )
        return legends


def legends_text(legends: Sequence[Legend]) -> str:
    """Legends as a text, which data loaders can collate."""
    return json.dumps([asdict(legend) for legend in legends])


def legends_of(
    explanation: Explanation | None,
    maps: Sequence[np.ndarray] | np.ndarray,
    scale: float | None = None,
    text: str = "",
) -> list[Legend]:
    """The legend of each of K maps ``(*spatial)``, by its explanation where it has one, or by the ``text`` of
    :func:`legends_text`, else by the maps alone.

    Raises:
        ValueError: when ``scale`` is not a number above 0.
    """
    if scale is not None:
        positive_numbers("scale", scale)
    legends = [Legend(**fields) for fields in json.loads(text or "[]")]
    if scale is not None:
        legends = [replace(legend, scale=scale, note="") for legend in legends]
    if explanation is not None:
        legends = Legend.of(explanation, scale)
    if len(legends) == len(maps):
        return legends
    largest = max(map(_largest, maps), default=0.0)
    return [Legend(scale or largest or 1.0, scale)] * len(maps)


def _sizes(explanation: Explanation) -> list[list[float]]:
    """For each map the largest change of the score by a mask of its own, the largest absolute score, and its noise."""
    changes = explanation.largest_changes.double().cpu()
    sizes = explanation.largest_scores.double().cpu()
    noises = torch.zeros_like(changes)
    if explanation.noise is not None:
        noises = explanation.noise.double().cpu().nan_to_num()
    of_scores = torch.stack([changes, sizes, noises])
    maps_of_each = len(explanation.explained) // len(changes)
    return of_scores.repeat_interleave(maps_of_each, dim=1).tolist()


def _largest(saliency: np.ndarray) -> float:
    """The largest finite absolute value of a map; 0 where there is none."""
    return float(np.max(np.abs(saliency), where=np.isfinite(saliency), initial=0))


def finite(maps: np.ndarray) -> np.ndarray:
    """Maps with 0 in place of what is not a finite number."""
    return np.nan_to_num(maps, posinf=0, neginf=0)


def _reaches(saliency: np.ndarray, least: float, error: np.ndarray | None) -> np.ndarray:
    """Which voxels reach an absolute value, and two standard errors where these are known."""
    size = np.abs(saliency)
    is_large = np.isfinite(size) & (size >= least)
    if error is None:
        return is_large
    return is_large & (size >= TIMES_ERROR * error)


def rounded_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    for step in (1.0, 2.0, 5.0):
        if value <= step * power * (1 + 1e-9):
            return step * power
    return 10 * power


def score_words(unit: str, score: str, without_peak: str) -> str:
    """The score of an image in words; of a probability also with the place of the map's peak hidden, where it is known.

    Args:
        unit: of the map.
        score: as a text; a probability where the map is of log-odds.
        without_peak: the same with the place hidden; ``""`` or ``"nan"`` where it is not known.
    """
    if unit not in ("probability", "log-odds"):
        return f"scores {score}"
    words = f"has probability {score}"
    return words if without_peak in ("", "nan") else f"{words}, and {without_peak} without this place"


def is_noise(row: Mapping[str, Any]) -> bool:
    """Whether chance alone can make a summary row's map (:meth:`Legend.may_be_chance`)."""
    return CHANCE in row.get("verdict", "")


# Colours. -------------------------------------------------------------------------------------------------------------


def focus_voxel(saliency: np.ndarray, coloured: np.ndarray) -> tuple[int, ...]:
    """The voxel that is looked at first: the peak, or the strongest coloured one, or the middle if none is coloured."""
    if not coloured.any():
        return tuple(size // 2 for size in saliency.shape)
    peak = peak_voxel(saliency)
    return peak if coloured[peak] else peak_voxel(np.where(coloured, np.abs(saliency), 0))


def gray_window(scan: np.ndarray) -> tuple[float, float]:
    """The scan's values that are drawn black and white."""
    is_finite = np.isfinite(scan)
    if not is_finite.all():
        scan = scan[is_finite] if is_finite.any() else np.zeros(1)
    # A small lesion can be the brightest part of the scan, so almost nothing is clipped at the upper end.
    low, high = np.percentile(scan, [0.5, 99.99])
    return low, max(high, low + 1e-6)


def opacities(saliency: np.ndarray, coloured: np.ndarray, scale: float) -> np.ndarray:
    """How opaque each voxel's colour is, in [0, 1]."""
    size = np.abs(finite(saliency))
    strength = np.sqrt(np.clip(size / scale, 0, 1))
    weakest, strongest = _OPACITY
    return np.where(coloured, weakest + (strongest - weakest) * strength, 0.0)


def colour_map(scale: float) -> tuple[Any, Any]:
    """The colour map of matplotlib, and its norm of signed square roots from ``-scale`` to ``scale``."""
    colors = require("matplotlib.colors", extra="bundle")
    # Two stops at the middle: no colour is between the weakest cold and the weakest warm one.
    places = [*np.linspace(0, 0.5, len(COLD)), *np.linspace(0.5, 1, len(WARM))]
    stops = list(zip(places, COLD + WARM, strict=True))
    cmap = colors.LinearSegmentedColormap.from_list("saliency", stops, N=512)
    norm = colors.FuncNorm((_signed_root, _signed_square), vmin=-scale, vmax=scale)
    return cmap, norm


def _signed_root(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.sqrt(np.abs(values))


def _signed_square(values: np.ndarray) -> np.ndarray:
    return values * np.abs(values)


def blended(gray: np.ndarray, saliency: np.ndarray, coloured: np.ndarray, scale: float) -> np.ndarray:
    """A picture of a map over its scan, ``(rows, columns, 3)`` in uint8. The scan, in [0, 1], may have colours too."""
    scan = np.clip(gray, 0, 1)
    if scan.ndim == saliency.ndim:
        scan = scan[..., None]
    cmap, norm = colour_map(scale)
    colours = cmap(norm(saliency))[..., :3]
    alpha = opacities(saliency, coloured, scale)[..., None]
    mixed = (1 - alpha) * scan + alpha * colours
    return np.rint(255 * mixed).astype(np.uint8)
