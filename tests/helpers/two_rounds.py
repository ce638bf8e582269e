"""A small method in two rounds, as a user would write it: windows, then finer ones where the score fell most."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import monai_saliency as ms
from monai_saliency.masks import BoundMasks, Masks, Observed
from monai_saliency.masks.base import Search
from monai_saliency.utils.tensors import Box

__all__ = ["TwoRounds", "two_rounds"]


def two_rounds(window: int = 6, *, target: Any, **settings: Any) -> ms.PerturbationInferer:
    """Hide windows, then the halves of the window that mattered most."""
    return ms.PerturbationInferer(TwoRounds(window), target, ms.estimators.OcclusionScoring(), **settings)


class TwoRounds(Masks):
    """Windows beside each other; then, in the one whose hiding let the first score fall most, windows half as large."""

    def __init__(self, window: int) -> None:
        self.window = window

    def bind(self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Any = None) -> BoundMasks:
        return _BoundTwoRounds(self.window, image)


class _BoundTwoRounds(BoundMasks):
    def __init__(self, window: int, image: torch.Tensor) -> None:
        super().__init__(image)
        self.key = ("TwoRounds", window, self.spatial_shape)
        whole = tuple(slice(0, size) for size in self.spatial_shape)
        coarse = _tiles(whole, window)
        self.finer = [_tiles(box, max(1, window // 2)) for box in coarse]
        self.num_coarse = len(coarse)
        self.boxes = coarse + [box for boxes in self.finer for box in boxes]

    def __len__(self) -> int:
        return len(self.boxes)

    def first_round(self) -> Sequence[int]:
        return range(self.num_coarse)

    def search(self, reference_scores: torch.Tensor) -> Search:
        observed = Observed(self, reference_scores)
        yield from observed.ask(self.first_round())
        chosen = int((reference_scores[0] - observed.scores[:, 0]).argmax())
        first = self.num_coarse + sum(map(len, self.finer[:chosen]))
        yield from observed.ask(range(first, first + len(self.finer[chosen])))
        return observed.ended("windows were halved once")

    def codes(self, ids: Sequence[Any]) -> dict[str, np.ndarray]:
        sides = [[(side.start, side.stop) for side in self.boxes[index]] for index in ids]
        return {"box": np.array(sides, dtype=int).reshape(len(sides), -1, 2)}

    def changed_boxes(self, ids: Sequence[Any]) -> list[Box]:
        return [self.boxes[index] for index in ids]

    def restrict(self, ids: Sequence[Any], box: Box) -> tuple[np.ndarray, np.ndarray]:
        sides = self.codes(ids)["box"]
        limits = np.array([(side.start, side.stop) for side in box])
        inside = np.clip(sides, limits[:, :1], limits[:, 1:])
        return (inside[..., 0] < inside[..., 1]).all(axis=1), inside.reshape(len(inside), -1)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        masks = torch.ones(len(codes["box"]), 1, *self.spatial_shape, dtype=self.dtype, device=device)
        for mask, sides in zip(masks, codes["box"].tolist(), strict=True):
            mask[(0, *(slice(*side) for side in sides))] = 0
        return masks


def _tiles(box: Box, size: int) -> list[Box]:
    """Boxes of a size beside each other, smaller at the end."""
    sides = [
        [slice(start, min(start + size, side.stop)) for start in range(side.start, side.stop, size)] for side in box
    ]
    return [tuple(tile) for tile in itertools.product(*sides)]
