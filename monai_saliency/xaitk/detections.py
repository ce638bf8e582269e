"""Detections as xaitk-saliency has them: rows of corners, objectness and the scores of all classes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from smqtk_image_io.bbox import AxisAlignedBoundingBox

from monai_saliency.targets.base import cosine

__all__ = ["as_detections", "match", "matches", "row_of", "rows_of"]


def match(found: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """How well the best of some detections matches each reference (D-RISE: Petsiuk et al., CVPR 2021, equation 1).

    The overlap counts pixels, corners included, as xaitk-saliency does: a box from 2 to 4 is 3 pixels wide.

    Args:
        found: ``(B, N, 4 + 1 + classes)``: corners, objectness, class scores. N may be 0.
        references: ``(M, 4 + 1 + classes)``.

    Returns:
        ``(B, M)``: overlap times cosine of the class scores times objectness, the largest of N; 0 where N is 0.
    """
    if not found.shape[1]:
        return found.new_zeros(len(found), len(references))
    lower = torch.maximum(found[:, :, None, :2], references[:, :2])
    upper = torch.minimum(found[:, :, None, 2:4], references[:, 2:4])
    both = (upper - lower + 1).clamp_min(0).prod(dim=-1)
    areas = [(boxes[..., 2:4] - boxes[..., :2] + 1).prod(dim=-1) for boxes in (found, references)]
    overlap = both / (areas[0][..., None] + areas[1] - both + torch.finfo(torch.float64).eps)
    return (overlap * cosine(found[..., 5:], references[:, 5:]) * found[..., 4:5]).amax(dim=1)


def matches(references: np.ndarray, found: np.ndarray) -> np.ndarray:
    """:func:`match` of arrays, in double precision: ``(masks, M)``."""
    return match(*(torch.as_tensor(np.asarray(each, dtype=np.float64)) for each in (found, references))).numpy()


def row_of(detections: Iterable[Any], labels: list[Any]) -> np.ndarray:
    """The detections of one image, as a ``DetectImageObjects`` gives them, as rows ``(N, 4 + 1 + classes)``.

    A detection with a score for one class alone has this score as its objectness, and 1 as the score of the class. So
    xaitk-saliency reads it.

    Args:
        detections: pairs of a box and the scores of its classes.
        labels: the classes, in order; where it is empty, those of the first detection are added to it.

    Raises:
        ValueError: when a detection lacks one of the classes.
    """
    rows = []
    for box, given in detections:
        labels.extend([] if labels else given)
        try:
            scores = [float(given[label]) for label in labels]
        except KeyError as error:
            raise ValueError(f"a detection has the classes {list(given)}, the first one had {labels}") from error
        objectness = 1.0
        if sum(score > 0 for score in scores) == 1:
            objectness = max(scores)
            scores = [1.0 if score == objectness else score for score in scores]
        rows.append([*box.min_vertex, *box.max_vertex, objectness, *scores])
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), 5 + len(labels))


def rows_of(found: Any, count: int, rows_first: bool = True) -> torch.Tensor:
    """Detections of B images, as :class:`~monai_saliency.DetectionScore` reads them, as rows.

    Args:
        found: what the target's reader gives: boxes, objectness, classes and vectors.
        count: the number of classes.
        rows_first: whether a corner is (row, column); rows have (column, row).

    Returns:
        ``(B, N, 4 + 1 + classes)``: corners, objectness, class scores. Behind the detections of an image are rows with
        an objectness of 0.

    Raises:
        ValueError: when there are more classes than ``count``.
    """
    boxes, objectness, vectors = found.boxes, found.objectness, found.vectors
    if rows_first:
        boxes = boxes[..., [1, 0, 3, 2]]
    if vectors is None:
        if found.classes.numel() and int(found.classes.max()) >= count:
            raise ValueError(
                f"the network gives class {int(found.classes.max())}, and there are {count} `labels`: give the name of "
                "each class by its number, from 0"
            )
        vectors = torch.nn.functional.one_hot(found.classes.clamp_min(0), count).to(objectness)
    elif vectors.shape[2] != count:
        raise ValueError(f"the network gives scores of {vectors.shape[2]} classes, and there are {count} `labels`")
    else:
        # Of a score for one class alone, xaitk-saliency makes the objectness.
        alone = (vectors > 0).sum(dim=2) == 1
        objectness = torch.where(alone, vectors.amax(dim=2), objectness)
        vectors = torch.where(alone[..., None], (vectors > 0).to(vectors), vectors)
    return torch.cat([boxes.to(vectors), objectness[..., None].to(vectors), vectors], dim=2)


def as_detections(
    rows: torch.Tensor, labels: Sequence[Hashable]
) -> list[tuple[AxisAlignedBoundingBox, dict[Hashable, float]]]:
    """The rows ``(N, 4 + 1 + classes)`` of one image as a ``DetectImageObjects`` gives them, without those of
    :func:`rows_of` that are no detection.
    """
    found = []
    for row in rows[rows[:, 4] > 0].double().cpu().numpy():
        scores = dict(zip(labels, (row[4] * row[5:]).tolist(), strict=True))
        found.append((AxisAlignedBoundingBox(row[:2], row[2:4]), scores))
    return found
