"""How far to trust the map of a case: the figures that ``--trust true`` adds to its row of ``summary.csv``.

:mod:`monai_saliency.handlers.trust_page` makes one page of the rows of a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.metrics.map_figures import MapFigures, Trusted
from monai_saliency.storage.label_maps import label_problem, load_label, on_image
from monai_saliency.storage.tables import TRUST_COLUMNS, CaseTable
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.tensors import checked_label, plain
from monai_saliency.utils.timing import stage


class Trust:
    """Measures how far to trust maps: consistency, plausibility and fidelity, compared with controls.

    For a map of N forwards the figures cost N for another seed (methods with one), N for another fill, N for the
    randomised network, and ``10 * (steps + 1)`` for each of the case's maps, for insertion and deletion of the map and
    its four controls. The other maps explain the same class, region or boxes as the map that they are compared with.

    Args:
        steps: perturbed images of each insertion and deletion curve, at least 1.

    Raises:
        ValueError: when it is out of its range.
    """

    def __init__(self, steps: int = 20) -> None:
        self.steps = whole_number("steps", steps, 1)

    def rows(self, case: Trusted, table: CaseTable) -> list[dict[str, Any]]:
        """The figures of each map of a case: from the table if they are of the same map, else measured."""
        mark = case.mark(self.steps)
        rows = []
        for row in table.read():
            if mark and row["case"] == case.case.name and row.get("trust_of") == mark and not row["trust_problem"]:
                rows.append({name: row.get(name, "") for name in TRUST_COLUMNS})
        return rows if len(rows) == len(case.explanation.saliency) else self.figures(case, mark)

    def figures(self, case: Trusted, mark: str = "") -> list[dict[str, Any]]:
        """The figures of each map of a case, with the case's mark.

        A figure that cannot be measured is missing, with the reason in ``trust_problem``.

        Returns:
            for each map a dictionary with keys of :data:`~monai_saliency.storage.tables.TRUST_COLUMNS`:

            - ``trust_forwards``: what the case's figures cost;
            - ``trust_repeatability``, ``trust_fill_agreement``, ``trust_randomised``: the rank correlation with the map
              of another seed, of another fill (blurred, or the mean), and of the network at random weights;
            - ``trust_relative_error``: the largest standard error over the range of the map;
              ``trust_peak_to_error``: the highest value over its standard error;
            - ``trust_labelled``: whether the label map has any voxel; empty without a label map;
            - ``trust_pointing``, ``trust_mass``, ``trust_leakage``, ``trust_auprc``: against the label;
              ``trust_insertion``, ``trust_deletion``: areas under the curves, in the score's unit. With the name of a
              control at the end: of this control. ``trust_curves``: the curves as JSON.
        """
        with torch.no_grad(), stage("trust"):
            return MapFigures(case, self.steps).rows(mark)


def label_on_grid(item: Mapping[Any, Any], image_key: Any) -> Callable[[], torch.Tensor] | None:
    """A function that reads a case's label map on the grid of its image, by nearest neighbour."""
    label, image = item.get("label"), item[image_key]
    if isinstance(label, torch.Tensor):
        is_on_grid = label.shape[1:] == image.shape[1:]
        return cache(partial(_own, label, image)) if is_on_grid else None
    if isinstance(label, (str, Path)) and str(label) and isinstance(image, MetaTensor):
        return cache(partial(_resampled, label, image))
    return None


def _own(label: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    if problem := label_problem(label, image):
        raise AdviceError(problem)
    return checked_label(plain(label).nan_to_num(), image.shape[1:]) != 0


def _resampled(label: str | Path, image: MetaTensor) -> torch.Tensor:
    values, affine = load_label(label, image)
    return torch.as_tensor(on_image(np.nan_to_num(values[0]) != 0, affine, image))[None]
