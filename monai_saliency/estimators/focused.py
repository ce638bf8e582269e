"""Focused RISE: random masks inside the boxes that windows found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator, score_rounding
from monai_saliency.estimators.regression import SmoothRegression
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.masks.focused import BoundFocusedMasks, Focus
from monai_saliency.utils.arguments import instance

__all__ = ["FocusedScoring"]


class FocusedScoring(Estimator):
    """What hiding a cell takes from the score: by random masks inside the boxes, by windows elsewhere.

    Inside a box, the map is what a regression of the scores on the masks gives each voxel
    (:class:`~monai_saliency.estimators.regression.SmoothRegression`), times the voxels of a window of the last level.
    Elsewhere, a voxel has what the last window over it took from the score, divided by the number of windows of the
    last level inside that window. Both are the drop of the score for a part of the image as large as a window of the
    last level, in the score's unit.

    Where one box gives what another gives (:class:`~monai_saliency.FocusedMasks`), the value inside a box is the drop
    with the other boxes hidden.

    Each explained score has the boxes that its own evidence asked for. Where its boxes overlap, the first one counts,
    which holds most. Where no evidence of a score stood out, its map is the regression's everywhere, as if the whole
    image were a box.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.focused_rise(50, window_size=4, target=ms.ClassScore([0], "none"), estimator=FocusedScoring())
        >>> saliency = explain(torch.ones(1, 1, 16, 16), lambda images: images[:, :, 4:8, 4:8].mean((2, 3)))
        >>> bool(saliency[0, 0, 5, 5] > 10 * saliency[0, 0, 12, 12].abs())
        True
    """

    def compute(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        bound = _focused(masks)
        windows = [row for row, index in enumerate(ids) if index < len(bound.windows)]
        drops = reference_scores.double() - scores[windows].double()
        spread = [bound.windows.spread([ids[row] for row in windows], each) for each in drops.T]
        found = torch.from_numpy(bound.windows.to_voxels(np.stack(spread))).to(bound.device, bound.dtype)
        return self._fill(found, bound, ids, scores, reference_scores, SmoothRegression.effects)

    def noise(
        self,
        masks: BoundMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """The root mean square of the standard error over the voxels of the boxes, or the rounding of the scores where
        that is larger.
        """
        found = score_rounding(scores, reference_scores, rounding)
        errors = self.standard_error(masks, ids, scores, reference_scores)
        if errors is None:
            return found
        count = (errors > 0).flatten(1).sum(dim=1).clamp_min(1)
        return torch.maximum(found.to(errors), (errors.square().flatten(1).sum(dim=1) / count).sqrt())

    def standard_error(
        self, masks: BoundMasks, ids: Sequence[Id], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """The standard error of the regression inside the boxes, by the jackknife over masks. It is 0 elsewhere, where
        nothing is left to chance. None with fewer than three masks in a box.
        """
        bound = _focused(masks)
        if any(len(focus.rows) < 3 for focus in bound.foci(ids)):
            return None
        found = torch.zeros(scores.shape[1], *bound.spatial_shape, dtype=bound.dtype, device=bound.device)
        return self._fill(found, bound, ids, scores, reference_scores, SmoothRegression.standard_error)

    def inside(self, masks: BoundMasks, focus: Focus, scores: torch.Tensor) -> torch.Tensor:
        """The values of one box, by its random masks.

        Args:
            masks: the masks of the image.
            focus: the box, with n random masks.
            scores: ``(n, K)``, of these masks.

        Returns:
            ``(K, *box)``, float64 on the CPU, in the score's unit a voxel.
        """
        return _regression(_focused(masks), focus).effects(scores)

    def _fill(
        self,
        found: torch.Tensor,
        bound: BoundFocusedMasks,
        ids: Sequence[Id],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        values: Callable[[SmoothRegression, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Put values of each box's regression into the maps of the scores that asked for it."""
        foci = bound.foci(ids)
        wanted = [bound.asked_for(ids, scores[:, k], reference_scores[k]) for k in range(scores.shape[1])]
        for focus in reversed(foci):
            rows = [k for k, places in enumerate(wanted) if focus.place in places]
            if rows:
                inside = values(_regression(bound, focus), scores[focus.rows][:, rows])
                for k, each in zip(rows, inside, strict=True):
                    found[k][focus.box] = each.to(found) * bound.window_voxels
        return found


def _regression(bound: BoundFocusedMasks, focus: Focus) -> SmoothRegression:
    cell = [(side.stop - side.start) / bound.cells for side in focus.box]
    return SmoothRegression(focus.masks, focus.ids, cell)


def _focused(masks: BoundMasks) -> BoundFocusedMasks:
    return instance("masks", masks, BoundFocusedMasks, "the masks of FocusedMasks, for FocusedScoring")
