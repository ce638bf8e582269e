"""What holds for every estimator, and for the state of a run."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from helpers.estimators import bound_with_scores, map_of

from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks

ESTIMATORS = [
    (RISEScoring(), RISEMasks(10, 3, seed=1)),
    (RISEScoring(form="debiased"), RISEMasks(10, 3, seed=1)),
    (RISEScoring(form="plain"), RISEMasks(10, 3, seed=1)),
    (OcclusionScoring(), SlidingWindowMasks(3, 2)),
]


@pytest.mark.parametrize(("estimator", "masks"), ESTIMATORS)
class TestStates:
    def test_law_2_any_division_gives_one_map_bit_for_bit(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = bound_with_scores(masks, (9, 7), dtype=torch.float32)
        expected = map_of(estimator, bound, scores, reference)
        rng = np.random.default_rng(0)
        for _ in range(8):
            order = rng.permutation(len(bound))
            parts = np.split(order, np.sort(rng.integers(0, len(bound) + 1, size=rng.integers(1, 4))))
            states = []
            for part in parts:
                state = estimator.start(bound, reference)
                state.update(part.tolist(), scores[part.tolist()])
                states.append(pickle.loads(pickle.dumps(state)))
            merged = estimator.start(bound, reference)
            for i in rng.permutation(len(states)):
                merged.merge(states[i])
            assert torch.equal(merged.compute(), expected)

    def test_values_explained_together_equal_each_alone(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = bound_with_scores(masks, (5, 6, 4), k=4)
        together = map_of(estimator, bound, scores, reference)
        for k in range(4):
            alone = map_of(estimator, bound, scores[:, k : k + 1], reference[k : k + 1])
            torch.testing.assert_close(together[k : k + 1], alone, rtol=0, atol=1e-12)

    def test_law_5_a_map_scales_with_the_score(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = bound_with_scores(masks, (9, 7))
        maps = map_of(estimator, bound, scores, reference)
        torch.testing.assert_close(map_of(estimator, bound, 8 * scores, 8 * reference), 8 * maps, rtol=0, atol=1e-11)

    def test_law_9_precision(self, estimator: Estimator, masks: RISEMasks) -> None:
        single = map_of(estimator, *bound_with_scores(masks, (9, 7), dtype=torch.float32))
        _, scores, reference = bound_with_scores(masks, (9, 7), dtype=torch.float32)
        double_bound = masks.bind(torch.zeros(1, 9, 7, dtype=torch.float64))
        double = map_of(estimator, double_bound, scores.double(), reference.double())
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-5 * float(double.abs().max()))

    def test_errors(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = bound_with_scores(masks, (9, 7))
        state: ScoreState = estimator.start(bound, reference)
        with pytest.raises(ValueError, match="no map without scores: `update` the state first"):
            state.compute()
        with pytest.raises(ValueError, match=r"`scores` must have shape \(2, 3\).*got \(3, 3\)"):
            state.update(range(2), scores[:3])
        with pytest.raises(ValueError, match=r"`scores` must have shape \(2, 3\).*got \(2,\)"):
            state.update([0, 1], scores[:2, 0])
        with pytest.raises(ValueError, match=r"only states of one case merge.*\(9, 7\).*\(9, 8\)"):
            state.merge(estimator.start(masks.bind(torch.zeros(1, 9, 8)), reference))
        with pytest.raises(ValueError, match="only states of one case merge"):
            state.merge(estimator.start(bound, reference[:2]))
        other = RISEMasks(10, 3, seed=2) if isinstance(masks, RISEMasks) else SlidingWindowMasks(4, 2)
        with pytest.raises(ValueError, match="only states of one case merge"):
            state.merge(estimator.start(other.bind(torch.zeros(1, 9, 7)), reference))
