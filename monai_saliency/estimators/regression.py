"""A smooth map that explains the scores of random masks: a regression in place of an average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from monai_saliency.estimators.base import Estimator, score_rounding
from monai_saliency.masks.base import BoundMasks, Ids, Observed
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.utils.timing import stage

__all__ = ["RegressionScoring"]

# The length over which the map is smooth, in cells.
_SMOOTH = 0.7
# Differences of scores are compressed beyond this share of their standard deviation.
_LINEAR = 0.25
# The variance of a bump's height in the second fit: its size in the first one, and this share of the highest one's.
_FREE = 0.01
# The evidence is spread out where the map is above the first share of its largest value in more of the image than the
# second one.
_STANDS_OUT, _SPREAD_OUT = 0.1, 0.05
# Strengths of the ridge penalty that are compared, relative to the mean eigenvalue of the masks.
_STRENGTHS = np.logspace(-3, 2, 31)
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

    def effects(self, masks: BoundMasks, ids: Ids, scores: Tensor) -> Tensor:
        """The map ``(*spatial)`` of one score ``(n,)`` of n masks, float64 on the CPU; 0 where all scores are equal, or
        with fewer than three masks. Its penalties have the least error however spread out the evidence is: less smooth
        than :meth:`compute`, for whoever looks for places with evidence.
        """
        basis = _Basis.of(masks, self.cells)
        fits = _fits(masks, ids, scores.double().cpu(), basis, tolerant=False)
        return basis.map_of([fit.heights for fit in fits])

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
                observed.fit = [_Regression.of(masks, observed.ids, score, self.cells) for score in scores]
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


@dataclass(frozen=True, eq=False)
class _Regression:
    """The regression of one score: what its map and its error are made of. It holds no masks and no features.

    Attributes:
        cells: along each axis.
        basis: the bumps.
        heights: of the bumps, for each part of the masks.
        biases: how far these may be from the heights of endless masks on average, signed.
        over_seeds: ``(*spatial)``, the standard error of each voxel over seeds, float64 on the CPU.
    """

    cells: int
    basis: _Basis
    heights: list[Tensor]
    biases: list[Tensor]
    over_seeds: Tensor

    @staticmethod
    def of(masks: BoundMasks, ids: Ids, score: Tensor, cells: int) -> _Regression:
        """The regression of one score ``(n,)`` on n masks."""
        basis = _Basis.of(masks, cells)
        heights, biases, squares = [], [], torch.zeros(masks.spatial_shape, dtype=torch.float64)
        for fit in _fits(masks, ids, score, basis):
            heights.append(fit.heights)
            biases.append(_bias(fit))
            squares += _squares(fit, basis.bumps)
        return _Regression(cells, basis, heights, biases, squares.sqrt() / max(1, len(heights)) * basis.cell)

    def effects(self) -> Tensor:
        """The map ``(*spatial)``."""
        return self.basis.map_of(self.heights)

    def error(self) -> Tensor:
        """The standard error of each voxel: over seeds, and by the bias."""
        effects, bias = self.effects(), self.basis.map_of(self.biases)
        total = torch.hypot(self.over_seeds, bias)
        capped = torch.maximum(self.over_seeds, torch.minimum(total, _OF_VALUE * effects.abs()))
        return torch.where(bias * effects > 0, capped, total)


def _fits(masks: BoundMasks, ids: Ids, score: Tensor, basis: _Basis, tolerant: bool = True) -> Iterator[_Fit]:
    """The regression of each part of the masks, one after the other; none where all scores of a part are equal.

    Masks are divided where there are too many: a regression costs their square and their cube, and memory.
    """
    features = len(ids) * math.prod(bumps.shape[1] for bumps in basis.bumps)
    parts = max(-(-features // _AT_ONCE), -(-len(ids) // _MOST))
    for part in range(parts):
        # Six in a row, so that each part has masks of all kinds that take turns: two grids, or three shares.
        rows = [row for row in range(len(ids)) if row // 6 % parts == part]
        fit = _fit_of(masks, [ids[row] for row in rows], score[rows], basis.bumps, tolerant)
        if fit is not None:
            yield fit


def _squares(fit: _Fit, bumps: Sequence[Tensor]) -> Tensor:
    """The jackknife's variance of each voxel, ``(*spatial)``."""
    count = len(fit.features)
    n = min(count, _GROUPS)
    groups = torch.eye(n, dtype=torch.float64).repeat(-(-count // n), 1)[:count]
    with exact_arithmetic(fit.features.device):
        changes = fit.changes(groups - groups.mean(dim=0))
        return (n - 1) / n * _sum_of_squares(changes, bumps).to(fit.scores)


def _fit_of(masks: BoundMasks, ids: Ids, score: Tensor, basis: Sequence[Tensor], tolerant: bool) -> _Fit | None:
    """The regression of some masks; None where the scores say nothing."""
    if len(ids) < 3:
        return None
    features = masks.along_axes(ids, basis).flatten(1).to(masks.dtype)
    wanted = score - score[0]
    with exact_arithmetic(masks.device):
        fit = _fit(features, wanted)
        if tolerant and fit is not None and _is_spread_out(_voxels(fit.heights, basis)):
            smoother = _fit(features, wanted, 1.0)
            return smoother and smoother._replace(sharper=fit.heights)
    return fit


def _is_spread_out(effects: Tensor) -> bool:
    highest = effects.max()
    return bool(highest > 0 and (effects > _STANDS_OUT * highest).double().mean() > _SPREAD_OUT)


def _bias(fit: _Fit) -> Tensor:
    """How far heights may be from those of endless masks on average, signed."""
    # Pairs, so that each half has masks of both of the grids that take turns.
    first = torch.arange(len(fit.features)) // 2 % 2 == 0
    halves = torch.stack([_heights_of(fit, rows) for rows in (first, ~first)])
    sharper = fit.heights if fit.sharper is None else fit.sharper
    return sharper - fit.heights + _HALVES * (fit.heights - halves.mean(dim=0))


def _heights_of(fit: _Fit, rows: Tensor) -> Tensor:
    """The heights of the regression of some of a fit's masks; 0 where their scores say nothing."""
    half = _fit(fit.features[rows], fit.scores[rows], fit.tolerance)
    return torch.zeros_like(fit.heights) if half is None else half.heights


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


class _Ridge(NamedTuple):
    """A ridge regression of n values on features ``(n, bumps)``: what it explains, the error at each mask without it,
    and weights ``(n, n)``, the inverse of the products of features with the penalty.
    """

    heights: Tensor
    explained: Tensor
    left_out: Tensor
    weights: Tensor

    @property
    def shares(self) -> Tensor:
        """``(n, n)``, the features' shares in how far the heights lie above those without each mask."""
        return self.left_out[:, None] * self.weights


class _Fit(NamedTuple):
    """Two ridge regressions, the second one of features times ``root``; the slope of scores on what it explains. The
    features are large and stay on the masks' device; all else is on the CPU, in double precision.
    """

    features: Tensor
    scores: Tensor
    first: _Ridge
    second: _Ridge
    root: Tensor
    slope: Tensor
    tolerance: float
    sharper: Tensor | None = None  # the heights without tolerance, of evidence that is spread out

    @property
    def heights(self) -> Tensor:
        """``(bumps,)``."""
        return self.slope * self.root * self.second.heights

    def changes(self, groups: Tensor) -> Tensor:
        """``(bumps, g)``, how far the heights lie above those without each of some groups of masks ``(n, g)``, to first
        order.
        """
        first, second, features = self.first, self.second, self.features
        # The variances change without a mask, and the heights with them: by themselves, and by the others' response.
        moving = (first.heights.sign() / first.heights.abs().max() * second.heights / self.root).to(features)
        moved = (features.T @ (first.shares.T @ groups).to(features)).mul_(moving[:, None])
        own = (second.shares.T @ groups - second.weights @ (features @ moved).to(groups)).to(features)
        squared = self.root.square().to(features)[:, None]
        return (features.T @ own).mul_(squared).add_(moved).mul_(self.slope.to(features))


def _fit(features: Tensor, scores: Tensor, tolerance: float = 0.0) -> _Fit | None:
    """Both fits of scores ``(n,)`` on features ``(n, bumps)``, which are centred; None where masks or scores are alike.
    The tolerance of the leave-one-out error is in its standard errors.
    """
    if bool((scores == scores[0]).all()):
        return None
    features -= features.mean(dim=0)  # in place: it is large
    centred = scores - scores.mean()
    spread = centred.square().mean().sqrt()
    compressed = torch.tanh((centred[:, None] - centred[None]) / (_LINEAR * spread)).mean(dim=1)
    compressed = compressed - compressed.mean()
    first = _ridge(features, compressed, tolerance)
    highest = first.heights.abs().max()
    if not highest > 0:
        return None
    root = (first.heights.abs() / highest + _FREE).sqrt()
    second = _ridge(features * root.to(features), compressed, tolerance)
    squares = second.explained.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    return _Fit(features, scores, first, second, root, centred @ second.explained / squares, tolerance)


def _ridge(features: Tensor, wanted: Tensor, tolerance: float) -> _Ridge:
    """The ridge regression of centred features and values with the largest penalty whose leave-one-out error is within
    a tolerance of the least one.
    """
    values, vectors = _eigh((features @ features.T).to(wanted))
    values = values.clamp_min(0)[:, None]
    strengths = (values.mean() * torch.from_numpy(_STRENGTHS)).clamp_min(torch.finfo(torch.float64).tiny)
    kept = values / (values + strengths)
    explained = vectors @ (kept * (vectors.T @ wanted)[:, None])
    own = vectors.square() @ kept + 1 / len(wanted)  # how far a mask's own score decides what is explained of it
    left_out = (wanted[:, None] - explained) / (1 - own).clamp_min(1e-6)
    squares = left_out.square()
    errors = squares.mean(dim=0)
    least = int(errors.argmin())
    allowed = errors[least] + tolerance * squares[:, least].std() / len(wanted) ** 0.5
    chosen = int((errors <= allowed).nonzero().max())
    weights = (vectors / (values.T + strengths[chosen])) @ vectors.T
    heights = (features.T @ (weights @ wanted).to(features)).to(wanted)
    return _Ridge(heights, explained[:, chosen], left_out[:, chosen], weights)


def _eigh(products: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, in one thread: several would wait for each other while writers keep the cores busy,
    and take 15 times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values, vectors = torch.linalg.eigh(products)
    finally:
        torch.set_num_threads(threads)
    return values, vectors
