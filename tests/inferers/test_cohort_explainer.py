"""Explaining cases that several processes share, and that fail one by one."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import assert_close
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.errors import CaseError
from monai_saliency.inferers.cohort_explainer import Assignment, CohortExplainer, ScoredCase
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import Failures

IMAGES = torch.stack([torch.full((1, 6, 6, 6), value) for value in (0.5, 1.0)])
CASES = [ms.Case("ct_1"), ms.Case("ct_2")]


class Picky(torch.nn.Module):
    """Gives NaN where the image is bright throughout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean((1, 2, 3, 4))
        return torch.stack([torch.where(means > 0.9, torch.nan, means), 1 - means], 1)


def windows(mask_batch_size: int = 1, **settings: Any) -> ms.PerturbationInferer:
    """Eight windows. With one image a batch, stored scores cost the unperturbed image's forward and a check."""
    target = ms.ClassScore([0], "none")
    return ms.sliding_window(3, 3, target=target, mask_batch_size=mask_batch_size, **settings)


def explain(
    explainer: CohortExplainer, images: torch.Tensor, cases: Sequence[ms.Case], **more: Any
) -> list[ScoredCase]:
    """The cases that are explained, whose maps count as written."""
    found: list[ScoredCase] = []

    def write(explained: ScoredCase) -> None:
        explainer.explained.append(explained.explanation.name)
        found.append(explained)

    explainer.explain(images, cases, write, **more)
    return found


def test_a_case_that_shares_its_batch_with_a_broken_one(tmp_path: Path) -> None:
    """Parts of both are scored; the good one is complete, but is held by nobody when each is explained alone."""
    done = []
    for index in range(2):
        failures = Failures(tmp_path / "failures.csv", shared=True)
        explainer = CohortExplainer(windows(4), Picky(), ScoreStore(tmp_path / "scores"), failures=failures)
        explainer.assignment = Assignment(Part(index, 2))
        done += [each.index for each in explain(explainer, IMAGES, CASES)]
        assert explainer.explained == ["ct_1"] * index
        assert explainer.waiting == ["ct_1"] * (1 - index)
    assert done == [0]
    assert [row["case"] for row in failures.read()] == ["ct_2"]


def test_a_batch_without_a_list_of_failures_fails() -> None:
    with pytest.raises(CaseError, match="case ct_2: the network's output of the unperturbed image is NaN"):
        explain(CohortExplainer(windows(), Picky()), IMAGES[1:], CASES[1:])


def test_the_others_of_a_batch_are_explained_where_one_is_held(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    explainer = CohortExplainer(windows(), Picky(), store)
    with store.claim("ct_1"):
        (found,) = explain(explainer, IMAGES.flip(0) * 0.5, CASES[::-1])
        assert (found.index, found.explanation.name) == (0, "ct_2")
        assert explainer.take_waiting() == ["ct_1"]
        assert explainer.take_waiting() == []


def test_parts_need_a_store_that_keeps_them(tmp_path: Path) -> None:
    explainer = CohortExplainer(windows(), lambda x: x.mean((2, 3, 4)), ScoreStore(tmp_path))
    explainer.assignment = Assignment(Part(0, 2))
    with (
        pytest.warns(UserWarning, match="the network is not a module: give it a network_id"),
        pytest.raises(ValueError, match="part 1 of 2 of ct_1, ct_2 is to be done here, but its scores cannot be kept"),
    ):
        explain(explainer, IMAGES, CASES)


def test_a_setting_that_is_changed_in_place_has_its_own_scores(tmp_path: Path) -> None:
    """An inferer does not change, but an attribute of its fill may, as where a notebook's cell is run again."""
    fill = ms.ConstantFill(0.0)
    explainer = CohortExplainer(windows(fill=fill), Picky(), ScoreStore(tmp_path))
    other = explainer.inferer.replace(target=ms.ClassScore([1], "none"))
    for value in (0.0, 0.25):
        fill.value = value
        for inferer in (None, other):
            for expected in (18, 2):
                found = explain(explainer, IMAGES * 0.5, CASES, inferer=inferer)
                assert sum(each.explanation.num_forwards for each in found) == expected
            alone = (inferer or explainer.inferer).explain(IMAGES * 0.5, Picky(), cases=CASES)
            for each, again in zip(found, alone, strict=True):
                assert torch.equal(each.explanation.saliency, again.saliency)


class Floored(torch.nn.Module):
    """Sees nothing below a floor, which is no part of its weights."""

    floor = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=self.floor)


@pytest.mark.parametrize("patches", [True, False])
def test_a_network_that_is_changed_in_place(patches: bool, tmp_path: Path) -> None:
    """Also where the unperturbed image, which is above the floor throughout, scores the same."""
    network, image = Floored(), IMAGES[:1] * torch.rand(6, generator=torch.Generator().manual_seed(0)) + 1
    inner = SlidingWindowInferer((4, 4, 4), 2) if patches else SimpleInferer()
    inferer = windows(4, inferer=inner).replace(target=ms.RegionScore(0, "none", region="all"))
    explainer = CohortExplainer(inferer, network, ScoreStore(tmp_path))
    for network.floor in (0.0, 0.9, 0.5):
        (found,) = explain(explainer, image, CASES[:1])
        (alone,) = explainer.inferer.explain(image, network)
        assert torch.equal(found.explanation.saliency, alone.saliency)


def test_scores_of_an_unknown_network_are_not_kept(tmp_path: Path) -> None:
    network = Picky()
    network.helper = lambda x: x
    for network_id, expected in ((None, 9), (None, 9), ("picky", 9), ("picky", 1)):
        explainer = CohortExplainer(windows(), network, ScoreStore(tmp_path), network_id=network_id)
        with nullcontext() if network_id else pytest.warns(UserWarning, match="not kept: the network holds a lambda"):
            (found,) = explain(explainer, IMAGES[:1], CASES[:1])
        assert found.explanation.num_forwards == expected


# Parts of a case's masks, wherever they are scored, make the case's own map.
MASKS, BATCH = 37, 4
BATCHES = -(-(MASKS + 1) // BATCH)


class Network(torch.nn.Module):
    """A segmentation of two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Conv2d(1, 2, 3, padding=1)
        with torch.no_grad():
            self.body.bias.zero_()
            self.body.weight.copy_(torch.linspace(-1, 1, self.body.weight.numel()).reshape(self.body.weight.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


def mean_of_channels(output: torch.Tensor) -> torch.Tensor:
    return output.mean(dim=(2, 3))


def inferer(inner: Inferer | None = None) -> ms.PerturbationInferer:
    target = ms.FunctionScore(mean_of_channels)
    if inner is None:
        return ms.rise(MASKS, 3, target=target, mask_batch_size=BATCH)
    return ms.sliding_window(4, 3, target=target, mask_batch_size=BATCH, inferer=inner)


@pytest.fixture
def image() -> torch.Tensor:
    return torch.rand(1, 1, 14, 17, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("count", [1, 2, 3, BATCHES + 5])
@pytest.mark.parametrize("inner", [None, SlidingWindowInferer((8, 8), 3, overlap=0.5)], ids=["plain", "patches"])
def test_parts_make_the_map_of_the_whole(
    image: torch.Tensor, count: int, inner: Inferer | None, tmp_path: Path
) -> None:
    """To the bit, in any order, also with more parts than batches; the last one makes the map."""
    (whole,) = inferer(inner).explain(image, Network())
    parts = []
    for k in reversed(range(count)):
        stored = [ScoreStore(tmp_path).open("ct", "key")]
        parts += inferer(inner).score(image, Network(), part=Part(k, count), stored=stored)
    assert (parts[0] is None) == (count > 1)
    explanation: Any = parts[-1]
    assert torch.equal(explanation.scores, whole.scores)
    assert torch.equal(explanation.saliency, whole.saliency)
    assert torch.equal(explanation.noise, whole.noise)
    assert bool((whole.noise > 0).all())


def test_a_part_needs_a_store(image: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a `part` of the masks needs `stored`"):
        inferer().score(image, Network(), part=Part(0, 2))


@pytest.mark.parametrize(("dtype", "half"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.float32, 0.0)])
@pytest.mark.parametrize("to", [None, torch.float32])
def test_the_noise_of_a_network_in_half_precision(dtype: torch.dtype, half: float, to: torch.dtype | None) -> None:
    """A map of windows is no more precise than the network, and the truth lies within a few times its noise."""
    network = Halved(dtype, to)
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    (found,) = ms.sliding_window(4, 2, target=ms.ClassScore([0], "softmax")).explain(image, network)
    expected = max(half, 8 * torch.finfo(torch.float32).eps) * float(found.scores.abs().max())
    assert_close(found.noise, expected)
    network.to_dtype = None
    exact = ms.sliding_window(4, 2, target=ms.ClassScore([0], "softmax"))(image.double(), network.double())
    assert float((found.saliency - exact[0]).abs().max()) < 5 * expected


class Halved(torch.nn.Module):
    """Computes in a type of its own, and gives its output in it or in another one."""

    def __init__(self, dtype: torch.dtype, to: torch.dtype | None) -> None:
        super().__init__()
        self.to_dtype = to
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        ).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.layers[0].weight.dtype
        return self.layers(x.to(dtype)).to(self.to_dtype or dtype)


class Cleans(torch.nn.Module):
    """A network that takes any scan."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nan_to_num(nan=-3.0, posinf=9.0, neginf=-9.0).flatten(1).cumsum(1)[:, ::7]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["windows", "rise"])
def test_a_hidden_voxel_that_is_not_finite_is_the_fill(method: str, broken: float, image: torch.Tensor) -> None:
    """0 * NaN is NaN, so that hiding it would leave it there."""
    image[0, 0, 3, 4] = broken
    given = {"target": ms.RegressionScore("all"), "fill": ms.ConstantFill(2.0)}
    explain = ms.sliding_window(4, 3, **given) if method == "windows" else ms.rise(12, 3, **given)
    (found,) = explain.explain(image, Cleans())
    masks = torch.cat([explain.masks.bind(image[0]).render([i]) for i in range(len(found.scores))])
    kept = torch.where(masks == 0, torch.zeros(()), masks * image)
    if not np.isnan(broken):
        expected = Cleans()(kept + (1 - masks) * 2.0)
        torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-4)
    hidden = (masks[:, 0, 3, 4] == 0).nonzero().flatten()
    assert len(hidden)
    expected = Cleans()((kept + (1 - masks) * 2.0)[hidden])
    torch.testing.assert_close(found.scores[hidden], expected, rtol=1e-4, atol=1e-4)
