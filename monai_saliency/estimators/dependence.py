"""How strongly the score depends on a cell: HSIC, and total Sobol indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from monai_saliency.estimators.base import Estimator, Meaning, score_rounding
from monai_saliency.masks.base import BoundMasks, Observed
from monai_saliency.masks.grid import BoundSobolMasks
from monai_saliency.masks.region import BoundRegionMasks
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic

# Rows and columns of the kernel matrix that are held at a time.
_BLOCK = 1024


class HSICScoring(Estimator):
    """How strongly the score depends on whether a cell is kept (HSIC attribution: Novello, Fel and Vigouroux, NeurIPS
    2022, arXiv 2206.06219, section 3).

    For each cell, with b its bit in each of n masks (1 where it is kept) and f the scores, the value is the
    Hilbert-Schmidt independence criterion ``tr(K H L H) / (n - 1)^2``, where ``K_ij`` is 1 for equal bits and 0 for
    others, ``L_ij = exp(-(f_i - f_j)^2 / (2 s^2))``, and H centres. The bandwidth s is the standard deviation of
    the scores. With this binary kernel the value is ``2 (b - mean b)' L (b - mean b) / (n - 1)^2``, so the
    kernel matrix is made in blocks and never held.

    **Unit**: a squared dependence, in [0, 0.25], without sign. Scores multiplied by a number, or moved by one, give the
    same map. Cells on which nothing depends have small positive values too, of about ``1 / (5 n)`` (:meth:`noise`). An
    effect that a cell has only together with others, with either sign equally often, is not seen.

    Departures from the authors' code: the bandwidth there is the median of the scores, which changes with a constant in
    all scores; grids there are a Latin hypercube sample cut at 1/2, ours are drawn independently; the map there is
    stretched smoothly, ours is flat in each cell. Scores that differ by rounding alone give zeros.

    Raises:
        ValueError: (from ``compute``) for masks other than random masks of cells or regions.

    Example::

        >>> import torch
        >>> from monai_saliency.estimators import HSICScoring
        >>> from monai_saliency.masks import GridMasks, Observed
        >>> masks = GridMasks(num_masks=200, grid_size=4).bind(torch.zeros(1, 16, 16))
        >>> scores = masks.render(range(200))[:, :, 2, 6]  # the score is the cell of the voxel (2, 6)
        >>> observed = Observed(masks, torch.tensor([1.0]), range(200), scores)
        >>> cells = HSICScoring().compute(observed)[0, ::4, ::4]
        >>> divmod(int(cells.argmax()), 4), round(float(cells.max()), 2)
        ((0, 1), 0.22)
    """

    def check(self, masks: BoundMasks) -> None:
        _checked(masks)

    def compute(self, observed: Observed) -> Tensor:
        masks = observed.masks
        cells = _checked(masks)
        kept = torch.from_numpy(cells.codes(observed.ids)["coalition"]).to(masks.device)
        rounding = score_rounding(observed)
        found = [
            _dependence(kept, values, float(smallest))
            for values, smallest in zip(_shifted(masks, observed.scores), rounding, strict=True)
        ]
        return cells.spread(torch.stack(found))

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("dependence of the score (HSIC), without sign", 0.25, in_score_unit=False, signed=False)

    def noise(self, observed: Observed, rounding: float = 0.0) -> Tensor | None:
        """The value that a cell without influence gets by chance: the mean over all orders of the scores, and at most
        its standard deviation, ``sqrt 2`` times the mean.
        """
        masks, scores = observed.masks, observed.scores
        kept = torch.from_numpy(_checked(masks).codes(observed.ids)["coalition"]).to(masks.device)
        count, share = len(kept), kept.to(accumulation_dtype(masks.device)).mean(dim=0)
        squares = count * (share * (1 - share)).mean()
        found = []
        for values, smallest in zip(_shifted(masks, scores), score_rounding(observed, rounding), strict=True):
            kernel = _kernel(values, float(smallest))
            apart = 0.0 if kernel is None or count < 2 else 1 - _mean_of_pairs(kernel, values)
            found.append((1 + math.sqrt(2)) * 2 * squares * apart / max(1, count - 1) ** 2)
        return torch.stack([torch.as_tensor(each, dtype=scores.dtype) for each in found]).to(scores.device)


def _checked(masks: BoundMasks) -> BoundRegionMasks:
    """Masks whose codes are one random bit for each cell or region."""
    if (
        not isinstance(masks, BoundRegionMasks)
        or masks.num_masks is None
        or masks.codes(range(1))["coalition"].dtype != bool
    ):
        raise ValueError(
            "HSIC needs random masks that keep or hide whole cells or regions, got "
            f"{masks.key[0]}: use GridMasks(1000, 8) or RegionMasks(num_masks=1000)"
        )
    return masks


def _shifted(masks: BoundMasks, scores: Tensor) -> Tensor:
    """Scores less the first one, ``(K, n)`` in double precision: what moves all scores changes nothing."""
    scores = scores.to(masks.device, accumulation_dtype(masks.device))
    return (scores - scores[:1]).T


def _kernel(values: Tensor, smallest: float) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The Gaussian kernel of scores; None where no two scores differ."""
    if float(values.max() - values.min()) <= smallest:
        return None
    width = values.std(correction=0)
    return lambda rows, columns: torch.exp(-((rows[:, None] - columns[None]) ** 2) / (2 * width**2))


def _dependence(kept: Tensor, values: Tensor, smallest: float) -> Tensor:
    """The HSIC of each cell's bits, bool ``(n, cells)``, and the scores ``(n,)``."""
    kernel = _kernel(values, smallest)
    sums = values.new_zeros(kept.shape[1])
    if kernel is None:
        return sums
    mean = kept.to(values).mean(dim=0)
    with exact_arithmetic(values.device):
        for rows in _blocks(len(values)):
            weighted = values.new_zeros(rows.stop - rows.start, kept.shape[1])
            for columns in _blocks(len(values)):
                weighted += kernel(values[rows], values[columns]) @ (kept[columns].to(values) - mean)
            sums += ((kept[rows].to(values) - mean) * weighted).sum(dim=0)
    # A quadratic form of a positive kernel, but for its rounding.
    return (2 * sums / max(1, len(values) - 1) ** 2).clamp_min(0)


def _mean_of_pairs(kernel: Callable[[Tensor, Tensor], Tensor], values: Tensor) -> float:
    """The mean of the kernel over pairs of two different masks."""
    count = len(values)
    total = sum(
        float(kernel(values[rows], values[columns]).sum()) for rows in _blocks(count) for columns in _blocks(count)
    )
    return (total - count) / (count * (count - 1))


def _blocks(count: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]


class SobolScoring(Estimator):
    """The share of the score's variance that a cell has a part in, alone or together with others (total Sobol indices:
    Fel et al., NeurIPS 2021, arXiv 2111.04138, section 3; estimator of Jansen, Comput. Phys. Commun. 117, 1999).

    With f(A) the score of a design's first mask and f(C) the score of the mask with one cell exchanged, the cell's
    value is ``mean((f(A) - f(C))^2) / (2 V)`` over the designs. V is the variance of all scores of masks A and B; the
    authors' code takes the scores of A alone.

    **Unit**: a share of the variance, without sign: 0 where the cell changes nothing, 1 where it alone decides; a small
    sample may give more than 1. The map is flat in each cell. Scores that differ by rounding alone give zeros.

    Raises:
        ValueError: (from ``compute``) for masks other than :class:`~monai_saliency.masks.SobolMasks`.

    Example::

        >>> import torch
        >>> from monai_saliency.estimators import SobolScoring
        >>> from monai_saliency.masks import Observed, SobolMasks
        >>> masks = SobolMasks(num_designs=64, grid_size=(1, 2)).bind(torch.zeros(1, 1, 4))
        >>> rendered = masks.render(range(len(masks)))[:, 0, 0]
        >>> scores = rendered[:, :1] * 2 + rendered[:, 3:]  # 2 x + y: shares of 4 to 1
        >>> saliency = SobolScoring().compute(Observed(masks, torch.tensor([5.0]), range(len(masks)), scores))
        >>> [round(value, 1) for value in saliency[0, 0].tolist()]
        [0.8, 0.8, 0.2, 0.2]
    """

    def check(self, masks: BoundMasks) -> None:
        if not isinstance(masks, BoundSobolMasks):
            raise ValueError(f"total Sobol indices need SobolMasks, got masks of {masks.key[0]}: use sobol(...)")

    def compute(self, observed: Observed) -> Tensor:
        self.check(observed.masks)
        masks, scores = cast(BoundSobolMasks, observed.masks), observed.scores
        cells = len(masks.values)
        values = scores.to("cpu", accumulation_dtype(scores.device))
        values = values - values[:1]
        design, place = (torch.from_numpy(each) for each in np.divmod(np.asarray(observed.ids, dtype=int), cells + 2))
        own = values.new_full((masks.num_designs, cells + 2, values.shape[1]), float("nan"))
        own[design, place] = values
        # Masks without a score are NaN, and so are their differences, which are left out.
        changes = (own[:, 2:] - own[:, :1]).square()
        spread = own[:, :2].flatten(0, 1)
        variance = (spread - spread.nanmean(dim=0)).square().nansum(dim=0)
        variance /= (spread[:, 0].isfinite().sum() - 1).clamp_min(1)
        shares = changes.nanmean(dim=0).nan_to_num() / (2 * variance)
        differ = (values.amax(dim=0) - values.amin(dim=0)) > score_rounding(observed).cpu()
        return masks.spread(torch.where(differ & (variance > 0), shares, 0.0).T)

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning("share of the score's variance (Sobol)", in_score_unit=False, signed=False)
