"""Boxes that a detector finds (D-RISE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from monai.data.box_utils import box_iou

from monai_saliency.cases import Case
from monai_saliency.errors import NothingToExplain
from monai_saliency.targets.base import (
    BoundTarget,
    Quantity,
    Target,
    check_indices,
    cosine,
    in_unit_interval,
    to_float,
)
from monai_saliency.utils.arguments import instance, number, whole_number

# Keys of boxes, labels and scores in the output of MONAI's RetinaNetDetector, of Model Zoo bundles, of torchvision.
_KEYS = (("boxes", "labels", "labels_scores"), ("box", "label", "label_scores"), ("boxes", "labels", "scores"))


@dataclass(frozen=True)
class _Detections:
    """The N detections of all images of a batch, one image after another.

    Attributes:
        counts: how many each of the B images has.
        boxes: their corners ``(N, 4 or 6)``.
        labels: their classes ``(N,)``.
        objectness: ``(N,)``, 1 where the scores of all classes are known.
        vectors: the scores of all classes ``(N, classes)``; None where only the label's score is known.
    """

    counts: list[int]
    boxes: torch.Tensor
    labels: torch.Tensor
    objectness: torch.Tensor
    vectors: torch.Tensor | None

    @property
    def scores(self) -> torch.Tensor:
        """The detector's confidence in each box ``(N,)``."""
        return self.objectness if self.vectors is None else self.vectors.amax(dim=1)


class DetectionScore(Target):
    """How well a perturbed image's detections match a reference box: D-RISE (Petsiuk et al., CVPR 2021, section 3).

    For a reference box t, the score is the maximum, over the detections j of the perturbed image, of
    ``IoU(t, j) * class_similarity(t, j) * objectness(j)``. It lies in [0, 1], and is 0 where nothing is detected. A
    negative match, as logits of the classes may give, counts as none. Each reference box gets its own map. With
    :func:`monai_saliency.drise` this is D-RISE.

    The network's output is a list with one dictionary per image. It holds boxes ``(N, 4 or 6)`` as corners, the lower
    ones first (MONAI's ``StandardMode``), class labels ``(N,)``, and scores, ``(N,)`` of these labels in [0, 1] or
    ``(N, classes)`` of all classes. N may differ between images, and an empty dictionary holds no box.

    - With scores of all classes, the similarity of two classes is the cosine of the two boxes' score vectors, as in
      the paper, with an objectness of 1.
    - With the score of the best class only, the similarity is 1 for the same label and 0 for another, and the score is
      used as objectness. This is the paper's formula for score vectors that are 0 except for their label. Scores of a
      single class ``(N, 1)`` are read in this way too, since the cosine of one score does not depend on it.

    Boxes are in voxels. Convert boxes given as center and size before: they are recognised only if they cannot be
    corners.

    Args:
        threshold: explain the boxes of the unperturbed image that score at least this, the highest first.
        max_boxes: explain at most this many of them; None for all.
        boxes: explain these boxes ``(M, 4 or 6)`` instead, whether the network finds them or not, such as a missed
            lesion. In voxels of the network's input.
        classes: class labels ``(M,)`` of ``boxes``; None for any class.
        keys: the keys of boxes, labels and scores in the network's output. By default the keys of MONAI's
            ``RetinaNetDetector``, of the Model Zoo or of torchvision, whichever the output has.

    Raises:
        NothingToExplain: from ``bind``, when the network finds no box that scores at least ``threshold``.
        ValueError: for settings out of range, and (from ``bind``) when the output is not a detector's, such
            as boxes that are not corners or scores above 1, or when ``boxes`` or ``classes`` do not fit.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, DetectionScore
        >>> def found(*box, score):
        ...     return [{"boxes": torch.tensor([box]), "labels": torch.tensor([1]), "scores": torch.tensor([score])}]
        >>> bound = DetectionScore().bind(found(0.0, 0.0, 4.0, 4.0, score=0.9), Case("ct_7", torch.zeros(1, 8, 8)))
        >>> bound.labels, bound(found(0.0, 0.0, 4.0, 2.0, score=0.5)).tolist()  # half of the box, at half the score
        (['box 1 (class 1)'], [[0.25]])
    """

    def __init__(
        self,
        threshold: float = 0.5,
        max_boxes: int | None = None,
        *,
        boxes: torch.Tensor | None = None,
        classes: torch.Tensor | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        if max_boxes is not None:
            max_boxes = whole_number("max_boxes", max_boxes, 1)
        if keys is not None and (isinstance(keys, str) or not isinstance(keys, Sequence) or len(keys) != 3):
            raise ValueError(f"`keys` must name boxes, labels and scores, got {keys!r}")
        for name, value in {"boxes": boxes, "classes": classes}.items():
            instance(name, value, (torch.Tensor, np.ndarray, list, tuple), "a tensor", none=True)
        if classes is not None and boxes is None:
            raise ValueError("`classes` are the classes of `boxes`: give both")
        self.threshold = number("threshold", threshold)
        self.max_boxes = max_boxes
        self.boxes = boxes
        self.classes = classes
        self.keys = None if keys is None else tuple(keys)

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        reader = _Reader(self._find_keys(reference_output), case)
        found = reader(reference_output)
        if found.objectness.numel() and float(found.objectness.max()) > 1.01:  # half precision may round it up
            raise ValueError(
                f"DetectionScore multiplies overlaps by the scores of boxes, which must be in [0, 1], and the network "
                f"gives up to {float(found.objectness.max()):.4g}; let it end in a sigmoid or softmax"
            )
        if self.boxes is not None:
            return self._bind_given(self.boxes, reader, found)
        scores = found.scores
        if not bool((scores >= self.threshold).any()):
            highest = f"the highest of its boxes scores {float(scores.max()):.3f}" if len(scores) else "it finds no box"
            raise NothingToExplain(
                case.name,
                f"the network finds no box that scores at least {self.threshold}, {highest}; lower `threshold`, or "
                "give the `boxes` to be explained",
            )
        count = int((scores >= self.threshold).sum())
        order = scores.argsort(descending=True, stable=True)[:count][: self.max_boxes]
        vectors = None if found.vectors is None else found.vectors[order]
        return _BoundDetectionScore(reader, found, found.boxes[order], found.labels[order], vectors)

    def _bind_given(self, given: Any, reader: _Reader, found: _Detections) -> BoundTarget:
        boxes = torch.as_tensor(given)
        if boxes.ndim != 2 or not len(boxes) or boxes.shape[1] != reader.columns:
            raise ValueError(
                f"`boxes` must have shape (M, {reader.columns}), at least one box, got {tuple(boxes.shape)}"
            )
        _check_corners(boxes, "`boxes`")
        classes = None
        if self.classes is not None:
            classes = torch.as_tensor(self.classes).to(found.labels).flatten()
            if len(classes) != len(boxes):
                raise ValueError(f"`classes` has {len(classes)} entries for {len(boxes)} boxes")
            if found.vectors is not None:
                check_indices(classes.tolist(), found.vectors.shape[1], "classes", "class")
        return _BoundDetectionScore(reader, found, boxes.to(found.boxes), classes, None)

    def _find_keys(self, output: Any) -> tuple[str, ...]:
        first = output[0] if isinstance(output, (list, tuple)) and output else None
        if not isinstance(first, Mapping):
            raise ValueError(
                "DetectionScore reads a list with one dictionary of boxes, labels and scores per image, the network "
                f"gave a {type(output).__name__}; choose the part that holds it by the inferer's `output`"
            )
        known = _KEYS if self.keys is None else (self.keys,)
        for keys in known:
            box_key, label_key, score_key = keys
            if box_key not in first or score_key not in first:
                continue
            if label_key in first or torch.as_tensor(first[score_key]).ndim > 1:  # scores of all classes need no label
                return keys
        words = " or ".join(map(str, known))
        raise ValueError(f"the detections have the keys {sorted(map(str, first))}, not {words}: set `keys`")


def _check_corners(boxes: torch.Tensor, name: str) -> None:
    """Refuse boxes ``(N, 4 or 6)`` that are not corners, as a center and a size are not, or not finite."""
    lower, upper = boxes.tensor_split(2, dim=1)
    are_corners = ((upper >= lower) & torch.isfinite(lower + upper)).all(dim=1)
    if not bool(are_corners.all()):
        first = ", ".join(f"{corner:g}" for corner in boxes[~are_corners][0].tolist())
        raise ValueError(
            f"{name} must be finite corners, first the lower one and then the upper one, got [{first}]; convert "
            "another form by monai.data.box_utils.convert_box_mode"
        )


class _Reader:
    """Reads a detector's output."""

    def __init__(self, keys: Sequence[str], case: Case) -> None:
        self.keys = keys
        self.columns = 2 * (case.image.ndim - 1)

    def __call__(self, output: Sequence[Mapping[str, Any]]) -> _Detections:
        images = [self._image(image) for image in output]
        counts = [len(boxes) for boxes, _, _ in images]
        # Of an image without a box, types, devices and the number of classes may be others.
        with_boxes = [image for image in images if len(image[0])] or images[:1]
        boxes = torch.cat([image[0] for image in with_boxes])
        labels = torch.cat([image[1] for image in with_boxes])
        scores = torch.cat([image[2] for image in with_boxes])
        _check_corners(boxes, "boxes that the network gives")
        if scores.ndim == 2 and scores.shape[1] > 1:
            return _Detections(counts, boxes, labels, scores.new_ones(len(scores)), scores)
        return _Detections(counts, boxes, labels, scores.flatten(), None)

    def _image(self, image: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Boxes ``(N, 4 or 6)`` of one image, their labels ``(N,)``, and scores ``(N,)`` or ``(N, classes)``."""
        box_key, label_key, score_key = self.keys
        boxes = to_float(torch.as_tensor(image.get(box_key, [])))
        if not len(boxes):  # then a detector may leave out anything
            return boxes.new_zeros(0, self.columns), boxes.new_zeros(0).long(), boxes.new_zeros(0)
        if score_key not in image:
            raise ValueError(
                f"the detections of an image have the keys {sorted(map(str, image))}, without {score_key!r}"
            )
        scores = to_float(torch.as_tensor(image[score_key])).to(boxes.device)
        if label_key in image:
            labels = torch.as_tensor(image[label_key]).to(boxes.device).long().flatten()
        else:
            labels = scores.flatten(1).argmax(dim=1)
        if boxes.shape != (len(boxes), self.columns) or not len(boxes) == len(scores) == len(labels):
            raise ValueError(
                f"a box of this image has {self.columns} corner coordinates, a score and a label, the network gave "
                f"boxes {tuple(boxes.shape)}, scores {tuple(scores.shape)} and labels {tuple(labels.shape)}"
            )
        return boxes, labels, scores


class _BoundDetectionScore(BoundTarget):
    """Scores of M reference boxes ``(M, 4 or 6)``."""

    def __init__(
        self,
        reader: _Reader,
        found: _Detections,
        boxes: torch.Tensor,
        classes: torch.Tensor | None,
        vectors: torch.Tensor | None,
    ) -> None:
        names = ["any class"] * len(boxes) if classes is None else [f"class {c}" for c in classes.tolist()]
        self.labels = [f"box {i} ({name})" for i, name in enumerate(names, 1)]
        self.reader = reader
        self.boxes = boxes.clone()
        self.classes = classes
        self.vectors = vectors
        self.found = found

    def __call__(self, output: Any) -> torch.Tensor:
        found = self.reader(output)
        overlap = torch.as_tensor(box_iou(found.boxes, self.boxes)).to(found.objectness)
        matches = overlap * self._similarity(found) * found.objectness[:, None]
        # A logit may match less than nothing does: that counts as none.
        nothing = matches.new_zeros(1, len(self.boxes))
        return torch.stack([torch.cat([nothing, image]).amax(dim=0) for image in matches.split(found.counts)])

    def _similarity(self, found: _Detections) -> torch.Tensor | float:
        """Similarity ``(N, M)`` in [0, 1] between the classes of detections and of reference boxes."""
        if self.classes is None:
            return 1.0
        if found.vectors is None:
            return (found.labels[:, None] == self.classes).to(found.objectness)
        vectors = self.vectors
        if vectors is None:
            vectors = torch.nn.functional.one_hot(self.classes, found.vectors.shape[1])
        return cosine(found.vectors, vectors.to(found.vectors))

    def describe(self) -> dict[str, Any]:
        scores = self.found.scores
        if not len(scores):
            return {}
        best = int(scores.argmax())
        described: dict[str, Any] = {"prediction": int(self.found.labels[best])}
        if in_unit_interval(scores):  # the scores of all classes may be logits
            described["probability"] = float(scores[best])
        return described

    def quantity(self) -> Quantity:
        return Quantity("overlap x class similarity x objectness of the best box", "0 to 1")
