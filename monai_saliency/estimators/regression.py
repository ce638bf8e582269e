"""A smooth map that explains the scores of random masks: a regression in place of an average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks

__all__ = ["SmoothRegression"]

# The length over which the map is smooth, in cells of the masks.
_SMOOTH = 0.7
# Differences of scores are compressed beyond this share of their standard deviation.
_LINEAR = 0.25
# The variance of a bump's height in the second fit: its size in the first one, and this share of the highest one's.
_FREE = 0.01
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
        indices: the masks that were scored, n of them.
        cell_shape: a cell of the masks, in voxels.
    """

    def __init__(self, masks: BoundMasks, indices: Sequence[int], cell_shape: Sequence[float]) -> None:
        self.masks = masks
        sides = zip(masks.spatial_shape, cell_shape, strict=True)
        self.bumps = [_bumps(size, max(1.0, _SMOOTH * cell)) for size, cell in sides]
        features = torch.cat([self._features(rendered) for _, rendered in masks.stream(indices)])
        self.features = features - features.mean(dim=0)
        self.decomposed = _decomposed(self.features)

    def _features(self, rendered: torch.Tensor) -> torch.Tensor:
        """The masks ``(n, 1, *spatial)`` as sums over each bump, ``(n, bumps)``, in double precision on the CPU."""
        found = rendered[:, 0]
        for each in self.bumps:
            found = torch.tensordot(found, each.to(found), dims=([1], [0]))
        return found.flatten(1).cpu().double()

    def effects(self, scores: torch.Tensor) -> torch.Tensor:
        """What keeping one voxel adds to each score, less what hiding it does.

        Args:
            scores: ``(n, K)``.

        Returns:
            ``(K, *spatial)``, float64 on the CPU, in the score's unit a voxel; 0 where all scores are equal.
        """
        return torch.stack([self._voxels(self._fit(each)[0])[0] for each in scores.T])

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
        for each in scores.T:
            _, changes = self._fit(each)
            sums, squares = torch.zeros(2, *self.masks.spatial_shape, dtype=torch.float64)
            for chunk in changes.split(16):
                voxels = self._voxels(chunk)
                sums += voxels.sum(dim=0)
                squares += voxels.square().sum(dim=0)
            n = len(changes)
            found.append(((squares - sums.square() / n).clamp_min(0) * (n - 1) / n).sqrt())
        return torch.stack(found)

    def _fit(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The heights of the bumps ``(1, bumps)``, and how they change without each mask ``(n, bumps)``."""
        shifted = scores.cpu().double()
        shifted = shifted - shifted[0]
        centred = shifted - shifted.mean()
        n, spread = len(centred), float(centred.square().mean().sqrt())
        nothing = torch.zeros(1, self.features.shape[1], dtype=torch.float64), torch.zeros_like(self.features)
        if spread == 0 or n < 3 or float(self.decomposed[1][0]) == 0:
            return nothing
        compressed = torch.tanh((centred[:, None] - centred[None]) / (_LINEAR * spread)).mean(dim=1)
        compressed = compressed - compressed.mean()
        first = _ridge(*self.decomposed, compressed)
        highest = float(first.heights.abs().max())
        if highest == 0:
            return nothing
        variance = first.heights.abs() / highest + _FREE
        root = variance.sqrt()
        vectors, singular, bumps = _decomposed(self.features * root)
        second = _ridge(vectors, singular, bumps, compressed)
        squares = second.explained.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
        slope = (centred @ second.explained) / squares
        # The variances change without a mask, and the heights with them: by themselves, and by the others' response.
        moved = first.heights.sign() * first.changes / highest * (second.heights / root)
        inverse = bumps.T * (singular.square() / (singular.square() + second.strength))
        response = (moved / root) @ inverse @ bumps / root
        return slope * (second.heights * root)[None], slope * (second.changes * root + moved - response * variance)

    def _voxels(self, heights: torch.Tensor) -> torch.Tensor:
        """Heights ``(n, bumps)`` as maps ``(n, *spatial)``."""
        found = heights.reshape(-1, *(each.shape[1] for each in self.bumps))
        for each in self.bumps:
            found = torch.tensordot(found, each, dims=([1], [1]))
        return found


def _bumps(size: int, length: float) -> torch.Tensor:
    """Gaussian bumps along an axis, ``(size, bumps)``: their sum of products falls with the distance as a Gaussian of
    this length. They are one length apart, and reach one beyond both ends.
    """
    count = math.ceil((size + 2 * length) / length)
    places = (size - 1) / 2 + (np.arange(count + 1) - count / 2) * length
    # The product of two bumps of width length / sqrt(2), summed over their places, has the width `length`.
    return torch.from_numpy(np.exp(-(((np.arange(size)[:, None] - places) / length) ** 2)))


def _decomposed(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The singular value decomposition: ``(n, r)``, ``(r,)``, the largest first, and ``(r, bumps)``."""
    vectors, singular, bumps = torch.linalg.svd(features, full_matrices=False)
    return vectors, singular, bumps


class _Ridge(NamedTuple):
    """A ridge regression on centred features.

    Attributes:
        heights: ``(bumps,)``.
        changes: ``(n, bumps)``, how far they lie above those without each mask.
        explained: ``(n,)``, of each mask.
        strength: of the penalty.
    """

    heights: torch.Tensor
    changes: torch.Tensor
    explained: torch.Tensor
    strength: float


def _ridge(vectors: torch.Tensor, singular: torch.Tensor, bumps: torch.Tensor, wanted: torch.Tensor) -> _Ridge:
    """The ridge regression with the least leave-one-out error, from the features as :func:`_decomposed` gives them."""
    n, along, values, best = len(wanted), vectors.T @ wanted, singular.square(), None
    squares = vectors.square()
    for strength in (float(values.sum()) / n * _STRENGTHS).tolist():
        kept = values / (values + strength)
        explained = vectors @ (kept * along)
        own = squares @ kept + 1 / n  # how far a mask's own score decides what is explained of it
        left_out = (wanted - explained) / (1 - own).clamp_min(1e-6)
        error = float(left_out.square().mean())
        if best is None or error < best[0]:
            best = error, strength, explained, left_out
    assert best is not None
    _, strength, explained, left_out = best
    inverse = singular / (values + strength)
    changes = left_out[:, None] * ((vectors * inverse) @ bumps)
    return _Ridge((inverse * along) @ bumps, changes, explained, strength)
