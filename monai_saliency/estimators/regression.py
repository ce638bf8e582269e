"""A smooth map that explains the scores of random masks: a regression in place of an average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Id

__all__ = ["SmoothRegression"]

# The length over which the map is smooth, in cells of the masks.
_SMOOTH = 0.7
# Differences of scores are compressed beyond this share of their standard deviation.
_LINEAR = 0.25
# The variance of a bump's height in the second fit: its size in the first one, and this share of the highest one's.
_FREE = 0.01
# So many numbers are made of all changes at once: 32 MB.
_AT_ONCE = 2**22
# Strengths of the ridge penalty that are compared, relative to the mean eigenvalue of the masks.
_STRENGTHS = np.logspace(-3, 2, 31)


class SmoothRegression:
    """What each voxel adds to the score, by a regression of the scores on the masks.

    The score of mask i is taken as ``b + sum_v M_i(v) m(v)``, and the map m as smooth: a sum of Gaussian bumps on a
    grid, whose heights are penalised by their squares (ridge regression, Hoerl and Kennard, 1970). That is the mean of
    a Gaussian process whose values correlate over 0.7 cells of the masks (Rasmussen and Williams, 2006, section 2.2).
    RISE's average (:class:`~monai_saliency.RISEScoring`) lets each voxel stand for all that chance hid together with
    it; the regression divides the score among them, so a few hundred masks give a sharper map.

    - Evidence lies in few places. So the regression is fitted twice, and in the second fit a height is penalised less
      the larger it was in the first one: a step towards the penalty of heights by their sizes (the lasso) by reweighted
      squares (FOCUSS, Gorodnitsky and Rao, 1997). What is noise beside a peak gets lower.
    - The penalty is the one with the least leave-one-out error, which ridge regression has in closed form; for each fit
      its own.
    - A probability saturates: its few largest differences would decide. So the regression is of
      ``y_i = mean_j tanh(4 (f_i - f_j) / spread(f))``, which is continuous in the scores and orders the masks as the
      scores f do, and the map is multiplied by the slope of f on what the regression explains. It is in the score's
      unit.

    Args:
        masks: bound masks of a random grid, with one mask for all channels.
        ids: the masks that were scored, n of them.
        cell_shape: a cell of the masks, in voxels.
    """

    def __init__(self, masks: BoundMasks, ids: Sequence[Id], cell_shape: Sequence[float]) -> None:
        self.masks = masks
        sides = zip(masks.spatial_shape, cell_shape, strict=True)
        self.bumps = [_bumps(size, max(1.0, _SMOOTH * cell)) for size, cell in sides]
        features = masks.along_axes(ids, self.bumps).flatten(1).cpu().double()
        self.features = features - features.mean(dim=0)
        self.decomposed = _decomposed(self.features)

    def effects(self, scores: torch.Tensor) -> torch.Tensor:
        """What keeping one voxel adds to each score, less what hiding it does.

        Args:
            scores: ``(n, K)``.

        Returns:
            ``(K, *spatial)``, float64 on the CPU, in the score's unit a voxel; 0 where all scores are equal.
        """
        fits = map(self._fit, scores.T)
        return torch.stack([self._voxels(fit.heights if fit else torch.zeros_like(self.features[0])) for fit in fits])

    def standard_error(self, scores: torch.Tensor) -> torch.Tensor:
        """The standard error of :meth:`effects`: the jackknife over masks, for the penalties that were chosen.

        Without mask i the heights change by the leave-one-out residual times what mask i weighs, in closed form, and in
        the second fit by what the heights of the first one change too, to first order.

        Args:
            scores: ``(n, K)``.

        Returns:
            ``(K, *spatial)``, float64 on the CPU, at least 0.
        """
        found = []
        for fit in map(self._fit, scores.T):
            changes = fit.changes if fit else torch.zeros_like(self.features)
            squares = self._squares(changes - changes.mean(dim=0))
            found.append((squares * (len(scores) - 1) / len(scores)).sqrt())
        return torch.stack(found)

    def _squares(self, heights: torch.Tensor) -> torch.Tensor:
        """The sum of the squared maps of heights ``(n, bumps)``, without making each of them: ``(*spatial)``."""
        *others, last = self.bumps
        heights = heights.reshape(-1, *(each.shape[1] for each in self.bumps))
        # Along the last axis a map is a sum of few bumps, so that the sums of these bumps' products say all.
        pairs = (last[:, :, None] * last[:, None]).flatten(1).T
        line = max(math.prod(heights.shape[2:]), math.prod([heights.shape[-1], *map(len, others[1:])]))
        step = max(1, _AT_ONCE // (len(heights) * line))
        found = []
        for first in range(0, len(others[0]), step):
            lines = heights
            for axis, each in enumerate([others[0][first : first + step], *others[1:]]):
                lines = torch.tensordot(each, lines, dims=([1], [axis + 1]))
            # The axes stand in reverse order now, before the masks and the last one's bumps.
            sums = lines.transpose(-2, -1) @ lines
            values = (sums.flatten(-2) @ pairs).clamp_min(0)
            found.append(values.permute(*reversed(range(len(others))), len(others)))
        return torch.cat(found)

    def _fit(self, scores: torch.Tensor) -> _Fit | None:
        """Both fits to scores ``(n,)``; None where all are equal, or there are fewer than three."""
        shifted = scores.cpu().double()
        shifted = shifted - shifted[0]
        centred = shifted - shifted.mean()
        n, spread = len(centred), float(centred.square().mean().sqrt())
        if spread == 0 or n < 3 or not self.decomposed.values.any():
            return None
        compressed = torch.tanh((centred[:, None] - centred[None]) / (_LINEAR * spread)).mean(dim=1)
        compressed = compressed - compressed.mean()
        first = _ridge(self.decomposed, compressed)
        highest = float(first.heights.abs().max())
        if highest == 0:
            return None
        variance = first.heights.abs() / highest + _FREE
        second = _ridge(_decomposed(self.features * variance.sqrt()), compressed)
        squares = second.explained.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
        return _Fit(first, second, variance, float(centred @ second.explained / squares))

    def _voxels(self, heights: torch.Tensor) -> torch.Tensor:
        """Heights ``(bumps,)`` as a map ``(*spatial)``."""
        found = heights.reshape([each.shape[1] for each in self.bumps])
        for each in self.bumps:  # the first axis becomes the last
            found = torch.tensordot(found, each, dims=([0], [1]))
        return found


def _bumps(size: int, length: float) -> torch.Tensor:
    """Gaussian bumps along an axis, ``(size, bumps)``: their sum of products falls with the distance as a Gaussian of
    this length. They are one length apart, and reach one beyond both ends.
    """
    count = math.ceil((size + 2 * length) / length)
    places = (size - 1) / 2 + (np.arange(count + 1) - count / 2) * length
    # The product of two bumps of width length / sqrt(2), summed over their places, has the width `length`.
    return torch.from_numpy(np.exp(-(((np.arange(size)[:, None] - places) / length) ** 2)))


class _Decomposed(NamedTuple):
    """Features ``(n, bumps)`` along the directions in which the masks differ, as many as masks or bumps.

    Attributes:
        vectors: ``(n, r)``, the directions: eigenvectors of the products of masks.
        values: ``(r,)``, their eigenvalues, at least 0.
        features: ``(r, bumps)``, along each direction.
    """

    vectors: torch.Tensor
    values: torch.Tensor
    features: torch.Tensor


def _decomposed(features: torch.Tensor) -> _Decomposed:
    if len(features) <= features.shape[1]:
        values, vectors = torch.linalg.eigh(features @ features.T)
        values = values.clamp_min(0)
    else:
        vectors, singular, _ = torch.linalg.svd(features, full_matrices=False)
        values = singular.square()
    return _Decomposed(vectors, values, vectors.T @ features)


@dataclass(frozen=True)
class _Ridge:
    """A ridge regression on centred features.

    Attributes:
        of: the features.
        along: ``(r,)``, what is wanted along each direction.
        explained: ``(n,)``, of each mask.
        left_out: ``(n,)``, the error at each mask without it.
        strength: of the penalty.
    """

    of: _Decomposed
    along: torch.Tensor
    explained: torch.Tensor
    left_out: torch.Tensor
    strength: float

    @cached_property
    def inverse(self) -> torch.Tensor:
        """``(r,)``, of the eigenvalues with the penalty."""
        return 1 / (self.of.values + self.strength)

    @cached_property
    def heights(self) -> torch.Tensor:
        """``(bumps,)``."""
        return (self.inverse * self.along) @ self.of.features

    @property
    def changes(self) -> torch.Tensor:
        """``(n, bumps)``, how far the heights lie above those without each mask."""
        return self.left_out[:, None] * ((self.of.vectors * self.inverse) @ self.of.features)


def _ridge(of: _Decomposed, wanted: torch.Tensor) -> _Ridge:
    """The ridge regression with the least leave-one-out error."""
    n, squares, best = len(wanted), of.vectors.square(), None
    along = of.vectors.T @ wanted
    for strength in (float(of.values.sum()) / n * _STRENGTHS).tolist():
        kept = of.values / (of.values + strength)
        explained = of.vectors @ (kept * along)
        own = squares @ kept + 1 / n  # how far a mask's own score decides what is explained of it
        left_out = (wanted - explained) / (1 - own).clamp_min(1e-6)
        error = float(left_out.square().mean())
        if best is None or error < best[0]:
            best = error, _Ridge(of, along, explained, left_out, strength)
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class _Fit:
    """Two ridge regressions, the second one with a variance for each bump.

    Attributes:
        first: with the same variance for all.
        second: of features that are multiplied by the roots of the variances.
        variance: ``(bumps,)``.
        slope: of the scores on what the second one explains.
    """

    first: _Ridge
    second: _Ridge
    variance: torch.Tensor
    slope: float

    @property
    def heights(self) -> torch.Tensor:
        """``(bumps,)``."""
        return self.slope * (self.second.heights * self.variance.sqrt())

    @property
    def changes(self) -> torch.Tensor:
        """``(n, bumps)``, how far the heights lie above those without each mask, to first order."""
        first, second, root = self.first, self.second, self.variance.sqrt()
        # The variances change without a mask, and the heights with them: by themselves, and by the others' response.
        moved = first.heights.sign() * first.changes / first.heights.abs().max() * (second.heights / root)
        response = (moved / root @ second.of.features.T * second.inverse) @ second.of.features / root
        return self.slope * (second.changes * root + moved - response * self.variance)
