"""A smooth map that explains the scores of random masks: a regression in place of an average."""

from __future__ import annotations

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
# Differences of scores are compressed beyond this share of their standard deviation.
_LINEAR = 0.25
# The variance of a bump's height in the second fit: its size in the first one, and this share of the highest one's.
_FREE = 0.01
# The evidence is spread out where the map is above the first share of its largest value in more of the image than the
# second one.
_STANDS_OUT, _SPREAD_OUT = 0.1, 0.05
# Groups of masks that the jackknife leaves out in turn; with fewer masks, each is a group.
_GROUPS = 128
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

    - Evidence lies in few places. So the regression is fitted twice, and in the second fit a height is penalised less
      the larger it was in the first one (reweighted squares: FOCUSS, Gorodnitsky and Rao, 1997).
    - The penalty of each fit is the one with the least leave-one-out error, which ridge regression has in closed form.
      If the map is then above a tenth of its largest value in more than a twentieth of the image, the evidence is
      spread out, and both fits are made again: with the largest penalty whose error is within one standard error of the
      least one (Breiman et al., Classification and Regression Trees, 1984, section 3.4.3).
    - A probability saturates: its few largest differences would decide. So the regression is of
      ``y_i = mean_j tanh(4 (f_i - f_j) / spread(f))`` for scores f, and the map is multiplied by the slope of f on what
      the regression explains.
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

        - *Over seeds*: the jackknife for the penalties that were chosen, over 128 groups of masks, or over each mask if
          there are fewer.
        - *Bias*: the penalty shrinks the map, and less so with more masks: twice the difference between the map and the
          mean of the maps of two halves of the masks. Where the evidence is spread out, the difference to the map with
          the smaller penalty is added. A shrunk value is not nearer to 0 than it seems, so such a bias does not make
          the sum larger than 0.45 times the value.

        For a value of at least half of the largest one, 1.96 times the error is to reach the mean of maps of eight
        times as many masks in 95 of 100 cases. On four small tasks in 2D and 3D it does in 95 to 98 for
        :func:`~monai_saliency.rise` with 160 masks (62 to 89 without the bias), and in 93 to 96 for
        :func:`~monai_saliency.focused_rise` with 340. With 160 masks that one has 95 to 98 where one place gives the
        evidence, 65 for three places, and 28 for a product of two places in 3D.
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
        sharper = fit.heights
        if _is_spread_out(_voxels(sharper, self.basis.bumps)) and (smoother := _fit(part, scores, 1.0)):
            fit = smoother
        self.heights.append(fit.heights)
        self.biases.append(sharper - fit.heights + _HALVES * (fit.heights - _of_halves(part, fit)))
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
    return (n - 1) / n * _sum_of_squares(changes, bumps).to(fit.scores)


def _of_halves(part: _Part, fit: _Fit) -> Tensor:
    """The mean of the heights of two halves of the masks; 0 for a half whose scores say nothing."""
    total = torch.zeros_like(fit.heights)
    for half, rows in zip(part.halves, _halves(len(fit.scores)), strict=True):
        of_half = _fit(half, fit.scores[rows], fit.tolerance)
        if of_half is not None:
            total += of_half.heights / 2
    return total


def _halves(count: int) -> list[Tensor]:
    """The rows of two halves."""
    return [torch.arange(half, count, 2) for half in range(2)]


def _is_spread_out(effects: Tensor) -> bool:
    highest = effects.max()
    return bool(highest > 0 and (effects > _STANDS_OUT * highest).double().mean() > _SPREAD_OUT)


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
    """Two ridge regressions, the second one of features times ``root``; the slope of scores on what it explains. All
    is on the CPU, in double precision.
    """

    scores: Tensor
    first: Ridge
    second: Ridge
    root: Tensor
    slope: Tensor
    tolerance: float

    @property
    def heights(self) -> Tensor:
        """``(bumps,)``."""
        return self.slope * self.root * self.second.heights

    def changes(self, features: Tensor, groups: Tensor) -> Tensor:
        """``(bumps, g)``, how far the heights lie above those without each of some groups of masks ``(n, g)``, to first
        order.
        """
        first, second = self.first, self.second
        # The variances change without a mask, and the heights with them: by themselves, and by the others' response.
        moving = (first.heights.sign() / first.heights.abs().max() * second.heights / self.root).to(features)
        moved = (features.T @ (first.shares.T @ groups).to(features)).mul_(moving[:, None])
        own = (second.shares.T @ groups - second.weights @ (features @ moved).to(groups)).to(features)
        squared = self.root.square().to(features)[:, None]
        return (features.T @ own).mul_(squared).add_(moved).mul_(self.slope.to(features))


def _fit(part: _Part, scores: Tensor, tolerance: float = 0.0) -> _Fit | None:
    """Both fits of scores ``(n,)``; None where masks or scores are alike. The tolerance of the leave-one-out error is
    in its standard errors.
    """
    if bool((scores == scores[0]).all()):
        return None
    centred = scores - scores[0]
    centred = centred - centred.mean()
    spread = centred.square().mean().sqrt()
    compressed = torch.tanh((centred[:, None] - centred[None]) / (_LINEAR * spread)).mean(dim=1)
    compressed = compressed - compressed.mean()
    first = ridge(part.features, part.spectrum, compressed, tolerance)
    highest = first.heights.abs().max()
    if not highest > 0:
        return None
    variance = first.heights.abs() / highest + _FREE
    root = variance.sqrt()
    second = ridge(part.features, spectrum_of(products_of(part.features, variance)), compressed, tolerance)
    second = second._replace(heights=root * second.heights)
    squares = second.explained.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return _Fit(scores, first, second, root, centred @ second.explained / squares, tolerance)
