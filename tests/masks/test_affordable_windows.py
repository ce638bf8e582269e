"""How fine windows on the patch grid are where nobody says it: as fine as 50 predictions allow, or 40 in rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from helpers.patches import planned
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from monai.inferers import SlidingWindowInferer

from monai_saliency.inferers.patch_case import find_touches, find_trims
from monai_saliency.masks.base import Id
from monai_saliency.masks.hierarchical import BoundHierarchicalMasks, HierarchicalMasks
from monai_saliency.masks.sliding_window import PatchWindowMasks
from monai_saliency.utils.patch_grid import PatchGrid


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(1, *shape, device="meta")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(12, 60), st.integers(8, 24)), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75]),
)
def test_never_more_than_50_predictions(axes: list[tuple[int, int]], overlap: float) -> None:
    """By the patches that each window touches, which are counted one by one."""
    shape, roi = zip(*axes, strict=True)
    inferer = SlidingWindowInferer(roi, overlap=overlap)
    masks = PatchWindowMasks(inferer)
    counts = planned(masks, inferer, empty(*shape))
    assert counts.forwards <= 50 * counts.patches
    assert len(masks.bind(empty(*shape))) > 1


# Windows in rounds: which are scored depends on the scores, here those of a sum over made-up evidence. ----------------


def in_rounds(
    inferer: SlidingWindowInferer, evidence: np.ndarray, levels: int = 4
) -> tuple[BoundHierarchicalMasks, list[int], float]:
    """The windows, those that are asked for, and their price in predictions, patch by patch.

    Args:
        inferer: cuts the patches.
        evidence: ``(1, *spatial)``, what each voxel adds to the score.
        levels: of windows.
    """
    shape = evidence.shape[1:]
    bound = HierarchicalMasks(levels=levels, inferer=inferer).bind(empty(*shape))
    ids: list[int] = []
    scores = np.zeros((0, 1))
    found: Sequence[Id] | None = bound.first_round()
    while found is not None:
        boxes = bound.changed_boxes(list(found)) or []
        scores = np.concatenate([scores, [[-evidence[(0, *box)].sum()] for box in boxes]])
        ids += found
        found = bound.next_round(ids, torch.from_numpy(scores), torch.zeros(1))
    grid = PatchGrid(inferer, shape)
    touches = find_touches(bound, grid, find_trims(grid, None), ids)
    forwards = len(grid.boxes) + int((touches[:, 0] == touches[:, 2]).sum())
    return bound, ids, forwards / len(grid.boxes)


def test_the_spleen_like_ct_in_rounds() -> None:
    """270 x 270 x 225 voxels, patches of 96^3 with half overlap: windows of 48, 24, 12 and 6. Nine tenths of a lump of
    evidence are cut down to 12 voxels, while something is left everywhere, so that all rounds are full.
    """
    evidence = np.full((1, 270, 270, 225), 1e-6, dtype=np.float32)
    evidence[0, 151:170, 65:83, 101:115] = 1
    bound, ids, price = in_rounds(SlidingWindowInferer((96, 96, 96), overlap=0.5), evidence)
    edges = [{int(edge) for axis in level for edge in np.diff(axis)[:-1]} for level in bound.bounds]
    assert edges == [{48}, {24}, {12}, {6}]
    assert len(ids) == bound.at_most
    cells = [box for box in bound.changed_boxes(ids) or [] if all(side.stop - side.start == 12 for side in box)]
    assert sum(float(evidence[(0, *box)].sum()) for box in cells) > 0.9 * 19 * 18 * 14
    assert 15 < price <= 40


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(12, 60), st.integers(8, 24)), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75]),
    st.integers(2, 4),
)
def test_never_more_than_40_predictions_in_rounds(axes: list[tuple[int, int]], overlap: float, levels: int) -> None:
    shape, roi = zip(*axes, strict=True)
    assume(len(PatchGrid(SlidingWindowInferer(roi, overlap=overlap), shape).boxes) <= 4000)  # more take minutes
    evidence = np.random.default_rng(0).random((1, *shape))
    bound, ids, price = in_rounds(SlidingWindowInferer(roi, overlap=overlap), evidence, levels)
    assert price <= 40
    assert len(ids) > len(bound.first_round()) > 1
