"""A smooth map that explains the scores of random masks: a regression in place of an average."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from monai_saliency.estimators.base import Estimator, score_rounding
from monai_saliency.estimators.ridge import (
    Ridge,
    centred_products,
    one_thread,
    products_of,
    ridge,
    spectrum_of,
)
from monai_saliency.masks.base import BoundMasks, Ids, Observed
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.utils.tensors import to_device
from monai_saliency.utils.timing import stage

# The length over which the map is smooth, in cells.
_SMOOTH = 0.7
# Fits, and the least variance of a bump's height in all but the first one, as a share of the largest.
_FITS, _FREE = 3, 0.01
# Groups of masks that the jackknife leaves out in turn; with fewer masks, each is a group.
_GROUPS = 64
# The bias is this times the difference between the map and the mean of the maps of two halves of the masks: once for a
# bias that falls with the number of masks, 2.4 times for one that falls with its square root.
_HALVES = 2
# A value that the penalty has shrunk stays beyond twice its error, if it is so over seeds.
_OF_VALUE = 0.45
# So many numbers are held of masks at once: 128 MB.
_AT_ONCE = 2**24
# Masks of one regression at the most: its eigenproblem takes the cube of their number.
_MOST = 600


class RegressionScoring(Estimator):
    """The part that each place of the image adds to the score, by a regression of the scores on the masks.

    The score of mask i is taken as ``b + sum_v M_i(v) m(v)``, and the map m as smooth: a sum of Gaussian bumps on a
    grid, whose heights are penalised by their squares (ridge regression, Hoerl and Kennard, 1970). That is the mean of
    a Gaussian process whose values correlate over 0.7 cells (Rasmussen and Williams, 2006, section 2.2). RISE's average
    (``RISEScoring``) credits each voxel with all that chance hid together with it; the
    regression divides the score among them, so a few hundred masks give a sharper map.

    - Evidence lies in few places. So the regression is fitted three times, and in each fit but the first a height is
      penalised less the larger it was in the fit before (reweighted squares: FOCUSS, Gorodnitsky and Rao, 1997).
    - The penalty of each fit lies halfway, in its logarithm, between the one with the least leave-one-out error, which
      ridge regression has in closed form, and the largest one whose error is within one standard error of that (Breiman
      et al., Classification and Regression Trees, 1984, section 3.4.3): the first is better for evidence in few places,
      the second for evidence that is spread out. The map is multiplied by the slope of the scores on what the last fit
      explains of them.
    - More than 600 masks, or than fit into 128 MB, are divided, and the maps of all parts are averaged (divide and
      conquer, Zhang, Duchi and Wainwright, 2015).

    A value is what hiding a cell of the image there, a sixteenth of each axis, would take from the score, in its unit.

    Args:
        cells: along each axis; finer ones than the masks'.

    Raises:
        ValueError: when ``cells`` is not a whole number above 0, and where each channel has its own masks.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.rise(100, form="regression", target=ms.ClassScore([0], "none"))
        >>> saliency = explain(torch.ones(1, 1, 16, 16), lambda images: images[:, :, 4:8, 4:8].mean((2, 3)))
        >>> bool(saliency[0, 0, 5, 5] > 10 * saliency[0, 0, 12, 12].abs())
        True
    """

    def __init__(self, cells: int = 16) -> None:
        self.cells = whole_number("cells", cells, 1)

    def check(self, masks: BoundMasks) -> None:
        if masks.channels is not None:
            raise ValueError("a regression needs masks that all channels share: leave out `per_channel`")

    def compute(self, observed: Observed) -> Tensor:
        return self._maps(observed, lambda regression: regression.effects())

    def standard_error(self, observed: Observed) -> Tensor | None:
        """The root of the sum of the squares of two parts; None with fewer than three masks.

        - *Over seeds*: the jackknife for the penalties that were chosen, over 64 groups of masks, or over each mask if
          there are fewer.
        - *Bias*: the penalty shrinks the map, and less so with more masks: twice the difference between the map and the
          mean of the maps of two halves of the masks. A shrunk value is not nearer to 0 than it seems, so such a bias
          does not make the sum larger than 0.45 times the value.

        For a value of at least half of the largest one, 1.96 times the error is to reach the mean of maps of eight
        times as many masks in 95 of 100 cases. On four small tasks in 2D and 3D it does in 91 to 97 for
        :func:`~monai_saliency.rise` with 160 masks (78 to 91 without the bias), in 90 to 99 for
        :func:`~monai_saliency.focused_rise` with 340, and in 77 to 97 with 160.
        """
        return self._maps(observed, lambda regression: regression.error()) if len(observed.ids) >= 3 else None

    def over_seeds(self, observed: Observed) -> Tensor:
        """How far the map differs from the maps of as many other masks, ``(K, *spatial)``: without the bias."""
        return self._maps(observed, lambda regression: regression.over_seeds)

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """The root mean square over voxels of the error over seeds, or the rounding of the scores where it is larger.
        A map that is shrunk is not larger by chance, so the bias is left out.
        """
        rounded = score_rounding(observed, rounding)
        if len(observed.ids) < 3:
            return rounded
        errors = self.over_seeds(observed)
        return torch.maximum(rounded.to(errors), errors.square().flatten(1).mean(1).sqrt())

    def _maps(self, observed: Observed, map_of: Callable[[_Regression], Tensor]) -> Tensor:
        """A map of each explained score, ``(K, *spatial)``, in the masks' precision and on their device."""
        masks = observed.masks
        self.check(masks)
        # Another regression may have left its own, such as the one that a search stops by.
        if observed.fit is None or any(made.cells != self.cells for made in observed.fit):
            scores = observed.scores.double().cpu().T
            with stage("regress"):
                observed.fit = _regressions(masks, observed.ids, scores, self.cells)
        maps = torch.zeros(len(observed.fit), *masks.spatial_shape, dtype=masks.dtype, device=masks.device)
        for values, regression in zip(maps, observed.fit, strict=True):
            values.copy_(map_of(regression))
        return maps


class _Basis(NamedTuple):
    """The bumps ``(size, bumps)`` along each axis, and the voxels of a cell."""

    bumps: Sequence[Tensor]
    cell: float

    @staticmethod
    def of(masks: BoundMasks, cells: int) -> _Basis:
        """The basis of an image's masks."""
        shape = masks.spatial_shape
        bumps = [_bumps(size, max(1.0, _SMOOTH * size / cells)) for size in shape]
        return _Basis(bumps, math.prod(max(1.0, size / cells) for size in shape))

    def map_of(self, heights: Sequence[Tensor]) -> Tensor:
        """The map ``(*spatial)`` of the mean of some heights ``(bumps,)``; of zeros without any."""
        if not heights:
            return torch.zeros([len(along) for along in self.bumps], dtype=torch.float64)
        return _voxels(torch.stack(list(heights)).mean(dim=0), self.bumps) * self.cell


@dataclass(eq=False)
class _Regression:
    """The regression of one score: what its map and its error are made of. It holds no masks and no features.

    Attributes:
        cells: along each axis.
        basis: the bumps.
        heights: of the bumps, for each part of the masks.
        biases: how far these may be from the heights of endless masks on average, signed.
        squares: ``(*spatial)``, the sum over the parts of each voxel's variance over seeds, float64 on the CPU.
    """

    cells: int
    basis: _Basis
    heights: list[Tensor]
    biases: list[Tensor]
    squares: Tensor

    def add(self, part: _Part, scores: Tensor) -> None:
        """Add the regression of a part of the masks, whose scores are ``(n,)``."""
        fit = _fit(part, scores)
        if fit is None:  # the scores say nothing
            return
        self.heights.append(fit.heights)
        self.biases.append(_HALVES * (fit.heights - _of_halves(part, scores)))
        self.squares += _variance(part, fit, self.basis.bumps)

    @property
    def over_seeds(self) -> Tensor:
        """``(*spatial)``, the standard error of each voxel over seeds."""
        return self.squares.sqrt() / max(1, len(self.heights)) * self.basis.cell

    def effects(self) -> Tensor:
        """The map ``(*spatial)``."""
        return self.basis.map_of(self.heights)

    def error(self) -> Tensor:
        """The standard error of each voxel: over seeds, and by the bias."""
        effects, bias = self.effects(), self.basis.map_of(self.biases)
        total = torch.hypot(self.over_seeds, bias)
        capped = torch.maximum(self.over_seeds, torch.minimum(total, _OF_VALUE * effects.abs()))
        return torch.where(bias * effects > 0, capped, total)


def _regressions(masks: BoundMasks, ids: Ids, scores: Tensor, cells: int) -> list[_Regression]:
    """The regression of each score ``(K, n)`` on n masks.

    Masks are divided where there are too many: a regression costs their square and their cube, and memory.
    """
    basis = _Basis.of(masks, cells)
    found = [_Regression(cells, basis, [], [], torch.zeros(masks.spatial_shape, dtype=torch.float64)) for _ in scores]
    features = len(ids) * math.prod(bumps.shape[1] for bumps in basis.bumps)
    count = max(-(-features // _AT_ONCE), -(-len(ids) // _MOST))
    for number in range(count):
        rows = range(number, len(ids), count)
        if len(rows) < 3:
            continue
        part = _Part.of(masks.along_axes([ids[row] for row in rows], basis.bumps).flatten(1).to(masks.dtype))
        with exact_arithmetic(masks.device), one_thread():
            for regression, score in zip(found, scores[:, rows], strict=True):
                regression.add(part, score)
        del part  # before there is another one
    return found


@dataclass(eq=False)
class _Part:
    """The masks of one regression, for all scores.

    Attributes:
        features: ``(n, bumps)``, large, on the masks' device.
        products: ``(n, n)``, of centred features, in double precision on the CPU.
    """

    features: Tensor
    products: Tensor

    @staticmethod
    def of(features: Tensor) -> _Part:
        """The part with these features, which are centred in place."""
        features -= features.mean(dim=0)
        with exact_arithmetic(features.device):
            return _Part(features, products_of(features))

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the products."""
        return spectrum_of(self.products)

    def weighted(self, variance: Tensor) -> Tensor:
        """The products ``(n, n)`` of features times the root of their variance: those of all times the least variance,
        and those of the few that have more.
        """
        above = variance - _FREE
        has_more = above > 0
        some = self.features.index_select(1, _columns(has_more, self.features))
        return _FREE * self.products + products_of(some, above[has_more])

    @cached_property
    def halves(self) -> list[_Part]:
        """The parts with half of the masks each. Their features have a mean, which the products do not have."""
        halves = []
        for rows in _halves(len(self.features)):
            features = self.features.index_select(0, to_device(rows.numpy(), self.features.device))
            halves.append(_Part(features, centred_products(self.products[rows][:, rows])))
        return halves


def _variance(part: _Part, fit: _Fit, bumps: Sequence[Tensor]) -> Tensor:
    """The jackknife's variance of each voxel, ``(*spatial)``."""
    count = len(part.features)
    n = min(count, _GROUPS)
    groups = torch.eye(n, dtype=torch.float64).repeat(-(-count // n), 1)[:count]
    changes = fit.changes(part.features, groups - groups.mean(dim=0))
    return (n - 1) / n * _sum_of_squares(changes, bumps).to(fit.heights)


def _of_halves(part: _Part, scores: Tensor) -> Tensor:
    """The mean of the heights of two halves of the masks; 0 for a half whose scores say nothing."""
    total = torch.zeros(part.features.shape[1], dtype=torch.float64)
    for half, rows in zip(part.halves, _halves(len(scores)), strict=True):
        of_half = _fit(half, scores[rows])
        if of_half is not None:
            total += of_half.heights / 2
    return total


def _halves(count: int) -> list[Tensor]:
    """The rows of two halves."""
    return [torch.arange(half, count, 2) for half in range(2)]


def _bumps(size: int, length: float) -> Tensor:
    """Gaussian bumps along an axis, ``(size, bumps)``, one length apart, from one before it to one behind."""
    count = math.ceil((size + 2 * length) / length)
    places = (size - 1) / 2 + (np.arange(count + 1) - count / 2) * length
    # The product of two bumps of width length / sqrt(2), summed over their places, has the width `length`.
    found = np.exp(-(((np.arange(size)[:, None] - places) / length) ** 2))
    found[found < np.finfo(float).eps] = 0  # products of smaller ones would be subnormal, and slow
    return torch.from_numpy(found)


def _voxels(heights: Tensor, bumps: Sequence[Tensor]) -> Tensor:
    """Heights ``(bumps,)`` as a map ``(*spatial)``."""
    found = heights.reshape([each.shape[1] for each in bumps])
    for each in bumps:  # the first axis becomes the last one
        found = torch.tensordot(found, each, dims=([0], [1]))
    return found


def _sum_of_squares(heights: Tensor, bumps: Sequence[Tensor]) -> Tensor:
    """The sum over n of the squared maps ``(*spatial)`` of heights ``(bumps, n)``, without these maps: along the last
    axis it is ``b G b`` of the bumps b there and the products G of the heights, summed over n.
    """
    first, *middle, last = [each.to(heights) for each in bumps]
    n, heights = heights.shape[1], heights.reshape(first.shape[1], -1)
    step = max(1, _AT_ONCE // 4 // (heights.shape[1] * math.prod(len(each) for each in middle)))
    found = []
    for some in first.split(step):
        part = some @ heights
        for each in middle:
            part = each @ part.reshape(len(part), each.shape[1], -1)
        part = part.reshape(-1, last.shape[1], n)
        found.append(((last @ (part @ part.mT)) * last).sum(dim=-1))
    return torch.cat(found).reshape([len(each) for each in bumps])


class _Fit(NamedTuple):
    """Ridge regressions, each with the variances that the one before gave; the slope of scores on what the last one
    explains, which makes up for a part of what the penalty took. All is on the CPU, in double precision.
    """

    ridges: list[Ridge]
    slope: Tensor

    @property
    def heights(self) -> Tensor:
        """``(bumps,)``."""
        return self.slope * self.ridges[-1].heights

    def changes(self, features: Tensor, groups: Tensor) -> Tensor:
        """``(bumps, g)``, how far the heights lie above those without each of some groups of masks ``(n, g)``, to first
        order.
        """
        # The variances change without a mask, and the heights with them: by themselves (`moved`), and by what masks
        # then leave for the others to explain (`response`). A variance at its least stays there.
        moved = features.new_zeros(features.shape[1], groups.shape[1])
        response = torch.zeros_like(groups)
        for before, after in itertools.pairwise(self.ridges):
            rows = _columns(after.variance > _FREE, features)
            some = features.index_select(1, rows)
            changed = _changes(before, some, before.variance.to(features)[rows], groups, response) + moved[rows]
            factors = before.heights.sign() / before.heights.abs().max() * after.heights / after.variance
            changed *= factors.to(features)[rows, None]
            moved = moved.zero_().index_copy_(0, rows, changed)
            response = (some @ changed).to(groups)
        last = self.ridges[-1]
        changed = _changes(last, features, last.variance.to(features), groups, response)
        return changed.add_(moved).mul_(self.slope.to(features))


def _changes(fit: Ridge, features: Tensor, variance: Tensor, groups: Tensor, response: Tensor) -> Tensor:
    """The part of changes ``(bumps, g)`` that the features ``(n, bumps)`` of some bumps make, by their variance."""
    own = (fit.shares.T @ groups - fit.weights @ response).to(features)
    return (features.T @ own).mul_(variance[:, None])


def _columns(chosen: Tensor, features: Tensor) -> Tensor:
    """The numbers of chosen bumps, on the features' device."""
    return to_device(chosen.nonzero()[:, 0].numpy(), features.device)


def _fit(part: _Part, scores: Tensor) -> _Fit | None:
    """The fits of scores ``(n,)``; None where masks or scores are alike."""
    if bool((scores == scores[0]).all()):
        return None
    centred = scores - scores[0]  # a score far from 0 would lose its last bits in a mean
    centred = centred - centred.mean()
    variance = torch.ones(part.features.shape[1], dtype=torch.float64)
    ridges = [ridge(part.features, part.spectrum, centred, variance)]
    while len(ridges) < _FITS:
        sizes = ridges[-1].heights.abs()
        if not sizes.max() > 0:
            return None
        variance = (sizes / sizes.max()).clamp_min(_FREE)
        ridges.append(ridge(part.features, spectrum_of(part.weighted(variance)), centred, variance))
    explained = ridges[-1].explained
    squares = explained.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return _Fit(ridges, centred @ explained / squares)
