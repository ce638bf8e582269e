"""Law 11: an estimate does not depend on what carries no information.

Methods, targets and estimators are found by themselves. One without an example here fails until it has one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.dependent import Layered
from helpers.estimators import map_of
from helpers.examples import METHODS, WholeImages, found_in_package, quarters, repeated, target_examples
from helpers.tolerances import assert_close, assert_same_bits

import monai_saliency as ms
from monai_saliency import methods
from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.dependence import HSICScoring, SobolScoring
from monai_saliency.estimators.occlusion import (
    HierarchicalScoring,
    MinimalRegionScoring,
    OcclusionScoring,
    SimilarityScoring,
    SquaredDifferenceScoring,
)
from monai_saliency.estimators.regression import RegressionScoring
from monai_saliency.estimators.rise import DRISEScoring, MCRISEScoring, RISEScoring
from monai_saliency.estimators.shapley import ShapleyScoring
from monai_saliency.targets import Target
from monai_saliency.visualize.legend import Legend

#: settings with which scores ask for masks of their own
IN_ROUNDS: list[tuple[str, dict[str, Any]]] = [
    ("rise", {"num_masks": 100, "grid_size": 5, "until": 0.95, "budget": 600}),
    ("rise", {"num_masks": 60, "grid_size": 5, "until": 0.9, "budget": 600, "per_channel": True}),
    ("focused_rise", {"num_masks": 80}),
    ("focused_rise", {"num_masks": 60, "until": 0.9, "budget": 200}),
    ("focused_rise", {"num_masks": 40, "inferer": WholeImages([8, 8]), "patch_memory": False}),
    ("hierarchical_occlusion", {"window_size": 4, "levels": 3, "keep": 0.2}),
    ("hierarchical_occlusion", {"inferer": WholeImages([6, 6], overlap=0.5), "patch_memory": False}),
    ("hierarchical_occlusion", {"window_size": 4, "levels": 3, "keep": 0.4, "regions": quarters}),
    ("minimal_region", {"window_size": 4, "levels": 3, "keep": 0.2}),
]
ESTIMATORS: dict[type[Estimator], tuple[Estimator, ms.masks.Masks]] = {
    RISEScoring: (RISEScoring(), ms.masks.RISEMasks(40, 3, seed=2)),
    RegressionScoring: (RegressionScoring(), ms.masks.FocusedMasks(RegressionScoring(), 30)),
    HierarchicalScoring: (HierarchicalScoring(), ms.masks.HierarchicalMasks(4, levels=1)),
    ShapleyScoring: (ShapleyScoring(), ms.masks.CoalitionMasks(13, regions=quarters)),
    HSICScoring: (HSICScoring(), ms.masks.GridMasks(40, 3, seed=2)),
    MinimalRegionScoring: (MinimalRegionScoring(), ms.masks.MinimalMasks(0.5, ms.masks.HierarchicalMasks(4, levels=2))),
    SobolScoring: (SobolScoring(), ms.masks.SobolMasks(8, 2, seed=2)),
    OcclusionScoring: (OcclusionScoring(), ms.masks.SlidingWindowMasks(3, 2)),
    MCRISEScoring: (MCRISEScoring(), ms.masks.MCRISEMasks(40, [ms.ConstantFill(1.0)], 3, seed=2)),
    DRISEScoring: (DRISEScoring(), ms.masks.RandomGridMasks(40, 3, seed=2)),
    SimilarityScoring: (SimilarityScoring(), ms.masks.SlidingRadialMasks(2, 2)),
    SquaredDifferenceScoring: (SquaredDifferenceScoring(), ms.masks.MultiScaleWindowMasks(4, 2)),
}
MISSING = "{} has no example in {}: add one, so that law 11 holds for it too"
NAMES = [f"{name} {i}" for name in methods.__all__ for i in range(max(1, len(METHODS.get(name, ()))))]


def explain(name: str, dims: int, target: Target, image: torch.Tensor, network: Callable[..., Any]) -> torch.Tensor:
    method, _, place = name.partition(" ")
    if method not in METHODS:
        pytest.fail(MISSING.format(f"The method {method}", "METHODS of tests/helpers/examples.py"))
    settings = METHODS[method][int(place)](dims)
    inferer = getattr(methods, method)(**settings, target=target, mask_batch_size=5)
    return inferer.explain(image, network)[0].saliency


def images(dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(1, 2, *[8] * dims, dtype=dtype, generator=torch.Generator().manual_seed(0))


def zero_cases() -> list[Any]:
    """Each method with one target, and each target with one method."""
    examples = target_examples()
    (regression,) = [each for each in examples if each[0] == "RegressionScore 0"]
    return [*((name, *regression) for name in NAMES), *(("rise 0", *each) for each in examples)]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("name", "kind", "target", "output"), zero_cases())
@pytest.mark.filterwarnings("ignore:.*already looks like probabilities")
def test_a_network_that_ignores_the_image_gets_a_map_of_zeros(
    name: str, dims: int, kind: str, target: Target | None, output: Callable[[int], Any] | None
) -> None:
    if target is None or output is None:
        pytest.fail(MISSING.format(f"The target {kind.partition(' ')[0]}", "TARGETS of tests/helpers/examples.py"))
    said = output(dims)
    maps = explain(name, dims, target, images(dims), lambda x: repeated(said, len(x)))
    assert maps.shape[1:] == (8,) * dims
    # Zeros but for the last digit of a score, which may depend on where it stands in its batch.
    assert_close(maps, torch.zeros_like(maps), scale=1)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_constant_in_every_score_changes_no_map(name: str, dims: int) -> None:
    weight = torch.randn(2, *[8] * dims, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(
            (x * weight).flatten(1).sum(dim=1, keepdim=True) / 4
        )  # neither at its lowest nor at its highest

    image = images(dims, torch.float64)
    maps = explain(name, dims, ms.RegressionScore(), image, Layered(network))
    assert float(maps.abs().max()) > 1e-3
    moved = explain(name, dims, ms.RegressionScore(), image, Layered(lambda x: network(x) + 1000))
    assert_close(moved, maps, scale=1, within=1e-11)  # three digits fewer are left beside 1000


@pytest.mark.parametrize("shape", [(9, 8), (7, 6, 8)])
@pytest.mark.parametrize("kind", found_in_package(Estimator))  # type: ignore[type-abstract]
def test_a_constant_in_every_score_changes_no_estimate(kind: type[Estimator], shape: tuple[int, ...]) -> None:
    if kind not in ESTIMATORS:
        pytest.fail(MISSING.format(f"The estimator {kind.__name__}", "ESTIMATORS of tests/test_law_11.py"))
    estimator, masks = ESTIMATORS[kind]
    bound = masks.bind(torch.zeros(1, *shape))
    # So few digits that adding 64 rounds nothing.
    drawn = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)).mul(1024).round() / 1024
    scores, reference = drawn[:-1], drawn[-1] + 4  # the image has more than its parts
    maps = map_of(estimator, bound, scores, reference)
    assert_same_bits(map_of(estimator, bound, scores + 64, reference + 64), maps)
    assert float(maps.abs().max()) > 0
    zeros = map_of(estimator, bound, torch.full_like(scores, 70.1), torch.full_like(reference, 70.1))
    assert_same_bits(zeros, torch.zeros_like(maps))


class Games(torch.nn.Module):
    """Three scores ``(B, 3)`` of boxes that overlap, with sums, minima and maxima of what is in them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randint(0, 12, (4, 2), generator=generator).tolist()
        self.sides = torch.randint(2, 5, (4, 2), generator=generator).tolist()
        # Each score adds some of them up, or takes them away.
        self.weight = torch.randint(-1, 5, (5, 3), generator=generator).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        boxes = zip(self.first, self.sides, strict=True)
        one, two, three, four = (x[:, :, y : y + h, z : z + w].mean((1, 2, 3)) for (y, z), (h, w) in boxes)
        return torch.stack([one, torch.minimum(two, three), torch.maximum(three, one), four, two], 1) @ self.weight


def found_of(explanation: ms.Explanation, count: int) -> list[list[torch.Tensor]]:
    """All that is known of each of some explained scores."""
    # All maps of a white-box method have one scale.
    shared = "own scale" in (legends := Legend.of(explanation))[0].words
    scales = [[0.0 if shared else each.scale, each.change or 0.0] for each in legends]
    known = [explanation.saliency, explanation.noise, explanation.standard_error, explanation.disagreement]
    parts = [each.chunk(count) for each in (*known, torch.tensor(scales, dtype=torch.float64)) if each is not None]
    return [list(each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(
    ("method", "settings", "seeds"),
    [
        *((method, settings, range(2)) for method, settings in IN_ROUNDS),
        *((name, each(2), [0]) for name in methods.__all__ for each in METHODS[name]),
    ],
)
def test_a_map_is_the_same_whatever_is_explained_beside_it(
    method: str, settings: dict[str, Any], seeds: Sequence[int], members: int
) -> None:
    """In any order and company, with its noise, standard error and colours; and of an ensemble."""
    more = 0
    for seed in seeds[: 3 - members]:
        networks: list[Any] = [Layered(Games(seed + 10 * member)) for member in range(members)]
        network = ms.Ensemble(networks) if members > 1 else networks[0]
        image = 1 + torch.randint(0, 64, (1, 2, 16, 16), generator=torch.Generator().manual_seed(seed)).double() / 64

        def explained(classes: list[int], image: torch.Tensor = image, network: torch.nn.Module = network) -> Any:
            target = ms.ClassScore(classes, "none")
            return getattr(methods, method)(**settings, target=target, mask_batch_size=16).explain(image, network)[0]

        alone = [explained([number]) for number in range(3)]
        for classes in ([1, 0], [2, 0, 1]):
            together = explained(classes)
            for number, found in zip(classes, found_of(together, len(classes)), strict=True):
                (expected,) = found_of(alone[number], 1)
                largest = float(expected[0].abs().max())  # of the map: an error of values that are exact is rounding
                for ours, theirs in zip(found, expected, strict=True):
                    assert_close(ours, theirs, scale=max(largest, float(theirs.abs().max())))
                more += len(together.ids) - len(alone[number].ids)
    is_adaptive = alone[0].masks is not None and alone[0].masks.adaptive
    assert bool(more) == is_adaptive or len(seeds) == 1 or members == 2
