from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch

from monai_saliency.estimators.base import Estimator, ScoreState
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.masks.base import BoundMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks

SHAPES = [(9, 7), (5, 6, 4)]


def slow_rise(masks: np.ndarray, scores: np.ndarray, p1: float | None) -> np.ndarray:
    """RISE, equation 6, or with `p1` its debiased form: one voxel and one mask at a time."""
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    expectation = masks.mean() if p1 is None else p1
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        for i in range(n):
            maps[(j, *voxel)] += scores[i, j] * (masks[(i, *voxel)] - (p1 or 0)) / (n * expectation)
    return maps


def slow_occlusion(masks: np.ndarray, scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    n, k = scores.shape
    maps = np.zeros((k, *masks.shape[1:]))
    for j, voxel in itertools.product(range(k), itertools.product(*map(range, masks.shape[1:]))):
        hidden = [1 - masks[(i, *voxel)] for i in range(n)]
        drops = [(reference[j] - scores[i, j]) * hidden[i] for i in range(n)]
        maps[(j, *voxel)] = sum(drops) / sum(hidden) if sum(hidden) else 0.0
    return maps


def setup(
    masks: RISEMasks | SlidingWindowMasks, shape: tuple[int, ...], k: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[BoundMasks, torch.Tensor, torch.Tensor]:
    bound = masks.bind(torch.zeros(1, *shape, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(bound), k, dtype=dtype, generator=generator)
    return bound, scores, torch.randn(k, dtype=dtype, generator=generator)


def full(estimator: Estimator, bound: BoundMasks, scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    state = estimator.start(bound, reference)
    state.update(range(len(bound)), scores)
    return state.compute()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("p1", "debias"), [(0.5, None), (0.3, None), (0.5, 0.5), (0.3, 0.3)])
def test_rise_equals_slow_loop(shape: tuple[int, ...], p1: float, debias: float | None) -> None:
    bound, scores, reference = setup(RISEMasks(11, 3, p1, seed=1), shape)
    masks = bound.render(range(11))[:, 0].numpy()
    ours = full(RISEScoring(debias or 0.0), bound, scores, reference)
    np.testing.assert_allclose(ours, slow_rise(masks, scores.numpy(), debias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 2), (2, 4)])
def test_occlusion_equals_slow_loop(shape: tuple[int, ...], window: int, stride: int) -> None:
    bound, scores, reference = setup(SlidingWindowMasks(window, stride), shape)
    masks = bound.render(range(len(bound)))[:, 0].numpy()
    ours = full(OcclusionScoring(), bound, scores, reference)
    np.testing.assert_allclose(ours, slow_occlusion(masks, scores.numpy(), reference.numpy()), rtol=0, atol=1e-12)


def test_occlusion_equals_slow_loop_with_smooth_masks() -> None:
    bound, scores, reference = setup(RISEMasks(12, 3, seed=1), (9, 7))
    masks = bound.render(range(12))[:, 0].numpy()
    ours = full(OcclusionScoring(), bound, scores, reference)
    np.testing.assert_allclose(ours, slow_occlusion(masks, scores.numpy(), reference.numpy()), rtol=0, atol=1e-11)


def test_occlusion_is_0_where_no_window_comes() -> None:
    bound, scores, reference = setup(SlidingWindowMasks(2, 4), (8, 8))
    unseen = bound.render(range(len(bound)))[:, 0].min(dim=0).values == 1
    assert int(unseen.sum()) == 64 - 4 * 4
    maps = full(OcclusionScoring(), bound, scores, reference)
    assert bool((maps[:, unseen] == 0).all())
    assert bool((maps[:, ~unseen] != 0).all())


def test_occlusion_of_a_linear_score_by_hand() -> None:
    """The score sums columns 2 to 4 of a line of ones; a window of 2 every 2 hides 0, 1, 2 of them."""
    bound = SlidingWindowMasks((1, 2), (1, 2)).bind(torch.zeros(1, 1, 8, dtype=torch.float64))
    masks = bound.render(range(4))[:, 0]
    scores = masks[:, 0, 2:5].sum(dim=1, keepdim=True)
    maps = full(OcclusionScoring(), bound, scores, torch.tensor([3.0], dtype=torch.float64))
    assert maps[0, 0].tolist() == [0, 0, 2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.3, -1e6])
@pytest.mark.parametrize("masks", [SlidingWindowMasks(3, 2), SlidingWindowMasks(2, 5), RISEMasks(20, 4)])
def test_a_constant_network_gives_a_zero_occlusion_map(value: float, masks: RISEMasks | SlidingWindowMasks) -> None:
    bound, scores, reference = setup(masks, (9, 7), dtype=torch.float32)
    maps = full(OcclusionScoring(), bound, torch.full_like(scores, value), torch.full_like(reference, value))
    assert torch.equal(maps, torch.zeros(3, 9, 7))


@pytest.mark.parametrize("p1", [0.0, 1.0])
def test_rise_of_masks_that_all_agree_is_finite(p1: float) -> None:
    """Masks that keep nothing say nothing; masks that keep all say one thing of every voxel."""
    bound, scores, reference = setup(RISEMasks(6, 3, p1), (5, 6))
    plain = full(RISEScoring(), bound, scores, reference)
    expected = scores.mean(dim=0) * p1
    torch.testing.assert_close(plain, expected[:, None, None].expand(3, 5, 6))
    debiased = full(RISEScoring(1.0), *setup(RISEMasks(6, 3, 1.0), (5, 6)))
    torch.testing.assert_close(debiased, torch.zeros_like(plain), rtol=0, atol=1e-15)


ESTIMATORS = [
    (RISEScoring(), RISEMasks(10, 3, seed=1)),
    (RISEScoring(0.5), RISEMasks(10, 3, seed=1)),
    (OcclusionScoring(), SlidingWindowMasks(3, 2)),
]


@pytest.mark.parametrize(("estimator", "masks"), ESTIMATORS)
class TestStates:
    def test_law_2_any_division_gives_one_map_bit_for_bit(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = setup(masks, (9, 7), dtype=torch.float32)
        expected = full(estimator, bound, scores, reference)
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

    def test_batches_of_a_range(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = setup(masks, (9, 7))
        state = estimator.start(bound, reference)
        for start in range(0, len(bound), 4):
            stop = min(start + 4, len(bound))
            state.update(range(start, stop), scores[start:stop])
        assert torch.equal(state.compute(), full(estimator, bound, scores, reference))

    def test_part_of_the_masks(self, estimator: Estimator, masks: RISEMasks) -> None:
        """A map of some masks is the map that those masks alone make, in whatever order they came."""
        bound, scores, reference = setup(masks, (9, 7))
        some = [7, 2, 3]
        state = estimator.start(bound, reference)
        state.update(some, scores[some])
        rendered = bound.render(sorted(some))[:, 0].numpy()
        picked = scores[sorted(some)].numpy()
        if isinstance(estimator, RISEScoring):
            expected = slow_rise(rendered, picked, estimator.p1 or None)
        else:
            expected = slow_occlusion(rendered, picked, reference.numpy())
        np.testing.assert_allclose(state.compute(), expected, rtol=0, atol=1e-12)

    def test_values_explained_together_equal_each_alone(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = setup(masks, (5, 6, 4), k=4)
        together = full(estimator, bound, scores, reference)
        for k in range(4):
            alone = full(estimator, bound, scores[:, k : k + 1], reference[k : k + 1])
            torch.testing.assert_close(together[k : k + 1], alone, rtol=0, atol=1e-12)

    def test_law_5_a_map_scales_with_the_score(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = setup(masks, (9, 7))
        maps = full(estimator, bound, scores, reference)
        torch.testing.assert_close(full(estimator, bound, 8 * scores, 8 * reference), 8 * maps, rtol=0, atol=1e-11)

    def test_law_3_a_state_holds_scores_only(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = setup(masks, (60, 50))
        state = estimator.start(bound, reference)
        state.update(range(len(bound)), scores)
        state.compute()
        held = [value for value in (vars(state) | vars(bound)).values() if isinstance(value, torch.Tensor)]
        assert {value.numel() for value in held} == {scores.numel(), len(bound), len(reference)}

    def test_law_9_precision(self, estimator: Estimator, masks: RISEMasks) -> None:
        single = full(estimator, *setup(masks, (9, 7), dtype=torch.float32))
        _, scores, reference = setup(masks, (9, 7), dtype=torch.float32)
        double_bound = masks.bind(torch.zeros(1, 9, 7, dtype=torch.float64))
        double = full(estimator, double_bound, scores.double(), reference.double())
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-5 * float(double.abs().max()))

    def test_errors(self, estimator: Estimator, masks: RISEMasks) -> None:
        bound, scores, reference = setup(masks, (9, 7))
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

    def test_states_of_other_masks_do_not_merge(self, estimator: Estimator, masks: RISEMasks) -> None:
        """As many masks of one shape, but other ones: another seed, another place."""
        other = RISEMasks(10, 3, seed=2) if isinstance(masks, RISEMasks) else SlidingWindowMasks(4, 2)
        bound, scores, reference = setup(masks, (9, 7))
        state, foreign = estimator.start(bound, reference), estimator.start(other.bind(torch.zeros(1, 9, 7)), reference)
        assert len(foreign.masks) == len(bound)
        foreign.update(range(len(bound)), scores)
        with pytest.raises(ValueError, match="only states of one case merge"):
            state.merge(foreign)


@pytest.mark.parametrize("p1", [-0.1, 1.5])
def test_p1_out_of_range(p1: float) -> None:
    with pytest.raises(ValueError, match=rf"`p1` must be in \[0, 1\], got {p1}"):
        RISEScoring(p1)
