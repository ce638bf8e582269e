"""Only a part of an image is perturbed and explained: `within`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.examples import METHODS, quarters
from helpers.tolerances import assert_close
from monai.data import MetaTensor
from monai.inferers import SlidingWindowInferer
from monai.transforms.utils import generate_spatial_bounding_box

import monai_saliency as ms
from monai_saliency import methods
from monai_saliency.inferers.cohort_explainer import CohortExplainer
from monai_saliency.storage.score_store import ScoreStore

GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.rand(1, 2, 8, 8, generator=GENERATOR) + 0.5
BOX = ([1, 2], [6, 7])
PART = torch.zeros(1, 8, 8, dtype=torch.bool)
PART[:, 1:6, 2:7] = True
PART[:, 3, 3] = False


class Seen(torch.nn.Module):
    """Sums each image, convolved, and notes whether the part outside is ever changed."""

    def __init__(self, outside: torch.Tensor = ~PART) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Conv2d(2, 2, 3)
        self.outside, self.changed = outside, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        changed = (images.detach() != IMAGE) & self.outside
        self.changed += int(changed.sum())
        return self.inner(images).tanh().mean((2, 3))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_outside_is_hidden_or_coloured(name: str) -> None:
    target = ms.RegressionScore("all")
    if name == "sbsm":
        target = ms.EmbeddingSimilarity()
    for make in METHODS[name]:
        settings = {"target": target, "fill": ms.ConstantFill(0.0), **make(2)}
        if name == "drise":
            settings["target"] = ms.FunctionScore(lambda output: output.sum(1))
        network = Seen()
        (found,) = getattr(methods, name)(**settings).explain(IMAGE, network, within=PART)
        assert network.changed == 0
        assert bool((found.saliency[:, ~PART[0]] == 0).all())
        assert bool((found.saliency[:, PART[0]] != 0).any())
        if found.standard_error is not None:
            assert bool((found.standard_error[:, ~PART[0]] == 0).all())


@pytest.mark.parametrize(
    "fill", [ms.InpaintFill(), ms.BlurFill(2.0), ms.fills.AutoFill()], ids=["inpaint", "blur", "auto"]
)
def test_fills(fill: Any) -> None:
    explain, network = ms.rise(20, 3, fill=fill, target=ms.RegressionScore(0)), Seen()
    if isinstance(fill, ms.fills.AutoFill):
        explain = ms.inferers.choose_fill(explain, network, [(IMAGE, ms.Case("a", within=PART))])
    (found,) = explain.explain(IMAGE, network, within=PART)
    assert network.changed == 0
    assert bool(found.saliency.any())


@pytest.mark.parametrize("patches", [{}, {"inferer": SlidingWindowInferer((4, 4), 3)}])
def test_windows_of_a_sum(patches: dict[str, Any]) -> None:
    """The map of the whole, times the part: a window's fall is what it hides of the part."""

    def network(images: torch.Tensor) -> torch.Tensor:
        return images.sum(1, keepdim=True)

    image = IMAGE.double()
    explain = ms.sliding_window(1, target=ms.RegionScore(0, "none", "all"), **patches)
    (whole,) = explain.explain(image, network)
    (found,) = explain.explain(image, network, within=PART)
    assert_close(found.saliency, whole.saliency * PART)
    assert_close(found.hidden_scores, (image.sum(1) * ~PART).mean()[None])
    wide = ms.sliding_window(4, 4, target=ms.RegionScore(0, "none", "all"), **patches)
    (found,) = wide.explain(image, network, within=PART)
    sums = torch.nn.functional.avg_pool2d((image.sum(1) * PART)[None], 4)[0] / 4
    assert_close(found.saliency, sums.repeat_interleave(4, 1).repeat_interleave(4, 2) * PART)


def test_a_region_outside_is_worth_nothing() -> None:
    (found,) = ms.shapley(regions=quarters, target=ms.RegressionScore(0)).explain(
        IMAGE, lambda images: images.amax((1, 2, 3))[:, None], within=([0, 0], [4, 4])
    )
    values = ms.estimators.shapley_values(found).values[:, 0].tolist()
    assert values[1:] == [0.0] * (len(values) - 1)


@pytest.mark.parametrize(
    "within",
    [
        BOX,
        tuple(map(np.array, BOX)),
        generate_spatial_bounding_box(torch.nn.functional.pad(torch.ones(1, 5, 5), (2, 1, 1, 2))),
    ],
)
def test_a_box_is_its_mask(within: Any) -> None:
    mask = torch.zeros(1, 8, 8)
    mask[:, 1:6, 2:7] = 1
    images = torch.cat([IMAGE, 2 * IMAGE])
    given: dict[str, Any] = {"method": "sliding_window", "window_size": 3, "target": 0, "activation": "none"}
    outside = Seen(torch.zeros(1, 8, 8, dtype=torch.bool))
    expected = ms.explain(outside, images, within=torch.stack([mask, mask]), **given)
    assert bool(expected.any())
    for each in (within, [within, mask], mask, mask.numpy().astype(np.uint8), MetaTensor(mask)):
        assert torch.equal(ms.explain(outside, images, within=each, **given), expected)


@pytest.mark.parametrize(
    ("within", "words"),
    [
        (torch.zeros(1, 8, 8), "no voxel"),
        (([3, 3], [3, 5]), "no voxel"),
        (torch.full((1, 8, 8), 0.3), "mode='nearest'"),
        (torch.ones(1, 8, 9), r"mask \(1, 8, 8\)"),
        (torch.ones(2, 8, 8), r"mask \(1, 8, 8\)"),
        (([1, 1, 1], [2, 2, 2]), "box"),
        ("brain", "mask"),
    ],
)
def test_what_is_no_part_is_refused(within: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ms.sliding_window(2, target=0, activation="none").explain(IMAGE, Seen(), cases=[ms.Case("a", within=within)])


def test_scores_of_another_part_are_not_resumed(tmp_path: Path) -> None:
    """And of the same part they are."""
    network = Seen(torch.zeros(1, 8, 8, dtype=torch.bool))
    maps = []
    for within in (PART, None, PART, BOX):
        found: list[Any] = []
        explainer = CohortExplainer(ms.rise(16, 3, target=ms.RegressionScore(0)), network, ScoreStore(tmp_path))
        explainer.explain(IMAGE, [ms.Case("a", within=within)], found.append)
        explanation = found[0].explanation
        maps.append((explanation.saliency, explanation.num_forwards))
    assert [forwards < 17 for _, forwards in maps] == [False, False, True, False]
    assert torch.equal(maps[0][0], maps[2][0])
    assert not torch.equal(maps[0][0], maps[3][0])


def test_an_ensemble_has_the_part_too() -> None:
    network = Seen()
    (found,) = ms.rise(12, 3, target=ms.RegressionScore(0)).explain(
        IMAGE, ms.networks.Ensemble([network, network]), within=PART
    )
    assert network.changed == 0
    assert found.disagreement is not None
    for values in (found.saliency, found.disagreement, found.standard_error):
        assert bool((values[:, ~PART[0]] == 0).all())


def test_in_a_pipeline() -> None:
    item = {"image": MetaTensor(IMAGE[0]), "brain": MetaTensor(PART.float())}
    explain = ms.sliding_window(2, target=ms.RegressionScore(0))
    network = Seen()
    map_of = ms.Saliencyd("image", network, explain, names="map", within_key="brain")(item)["map"]
    assert network.changed == 0
    assert bool((map_of[:, ~PART[0]] == 0).all())
    assert bool(map_of.any())
