"""Focused RISE: random masks inside the boxes that windows found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator, score_rounding
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.masks.base import BoundMasks
from monai_saliency.masks.focused import BoundFocusedMasks, Focus
from monai_saliency.utils.arguments import instance, probability
from monai_saliency.utils.boxes import everywhere

__all__ = ["FocusedScoring"]


class FocusedScoring(Estimator):
    """What hiding a cell takes from the score: by RISE inside the boxes, by windows elsewhere.

    Inside a box of random masks, the map is the centred map of RISE (:class:`~monai_saliency.RISEScoring`) divided by
    ``1 - p1``: the average score while a cell is kept, less the average while it is hidden. Elsewhere, a voxel has what
    the last window over it took from the score, divided by the number of windows of the last level inside that window.
    Both are the drop of the score for a part of the image as large as a cell of the last level, in the score's unit;
    a larger box has larger cells, and its values are divided likewise. Where boxes overlap, the first one counts, which
    holds most.

    Where no evidence stood out, the map is RISE's everywhere, as if the whole image were a box.

    Args:
        p1: probability in (0, 1) with which the masks keep a cell.
    """

    def __init__(self, p1: float = 0.5) -> None:
        probability("p1", p1)
        self.p1 = float(p1)
        if not 0 < self.p1 < 1:
            raise ValueError(f"`p1` must be in (0, 1), got {p1}")

    def compute(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor:
        bound = _focused(masks)
        windows = [row for row, index in enumerate(indices) if index < len(bound.windows)]
        drops = reference_scores.double() - scores[windows].double()
        spread = [bound.windows.spread([indices[row] for row in windows], each) for each in drops.T]
        found = torch.from_numpy(bound.windows.to_voxels(np.stack(spread))).to(bound.device, bound.dtype)
        for focus in reversed(bound.foci(indices)):
            inside = RISEScoring(self.p1).compute(focus.masks, focus.indices, scores[focus.rows], reference_scores)
            found[everywhere(focus.box)] = self._of_a_window(inside, focus)
        return found

    def noise(
        self,
        masks: BoundMasks,
        indices: Sequence[int],
        scores: torch.Tensor,
        reference_scores: torch.Tensor,
        rounding: float = 0.0,
    ) -> torch.Tensor | None:
        """The largest standard error inside a box, as :meth:`~monai_saliency.RISEScoring.noise` gives it, and the
        rounding of the scores.
        """
        bound, found = _focused(masks), score_rounding(scores, reference_scores, rounding)
        for focus in bound.foci(indices):
            inside = RISEScoring(self.p1).noise(focus.masks, focus.indices, scores[focus.rows], reference_scores)
            assert inside is not None
            found = torch.maximum(found.to(inside), self._of_a_window(inside, focus))
        return found

    def standard_error(
        self, masks: BoundMasks, indices: Sequence[int], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> torch.Tensor | None:
        """The standard error of RISE inside the boxes (:meth:`~monai_saliency.RISEScoring.standard_error`). It is 0
        elsewhere, where nothing is left to chance. None with fewer than three masks in a box.
        """
        bound = _focused(masks)
        found = torch.zeros(scores.shape[1], *bound.spatial_shape, dtype=bound.dtype, device=bound.device)
        for focus in reversed(bound.foci(indices)):
            rise, rows = RISEScoring(self.p1), scores[focus.rows]
            inside = rise.standard_error(focus.masks, focus.indices, rows, reference_scores)
            if inside is None:
                return None
            found[everywhere(focus.box)] = self._of_a_window(inside, focus)
        return found

    def _of_a_window(self, values: torch.Tensor, focus: Focus) -> torch.Tensor:
        """Values of RISE inside a box, as the drop for a part as large as a window of the last level."""
        return values / (1 - self.p1) / focus.windows


def _focused(masks: BoundMasks) -> BoundFocusedMasks:
    return instance("masks", masks, BoundFocusedMasks, "the masks of FocusedMasks, for FocusedScoring")
