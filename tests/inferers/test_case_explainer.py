"""Explaining cases that several processes share, and that fail one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.inferers import SimpleInferer, SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_explainer import Assignment, CaseExplainer, Explained
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import Failures

IMAGES = torch.stack([torch.full((1, 6, 6, 6), value) for value in (0.5, 1.0)])
CASES = [Case("ct_1"), Case("ct_2")]


class Picky(torch.nn.Module):
    """Gives NaN where the image is bright throughout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean((1, 2, 3, 4))
        return torch.stack([torch.where(means > 0.9, torch.nan, means), 1 - means], 1)


def windows(mask_batch_size: int = 1, **settings: Any) -> PerturbationInferer:
    """Eight windows. With one image a batch, stored scores cost the unperturbed image's forward and a check."""
    target = ms.ClassScore([0], "none")
    return ms.sliding_window(3, 3, target=target, mask_batch_size=mask_batch_size, **settings)


def explain(explainer: CaseExplainer, images: torch.Tensor, cases: Sequence[Case], **more: Any) -> list[Explained]:
    """The cases that are explained, whose maps count as written."""
    found: list[Explained] = []

    def write(explained: Explained) -> None:
        explainer.explained.append(explained.explanation.name)
        found.append(explained)

    explainer.explain(images, cases, write, **more)
    return found


def test_a_case_that_shares_its_batch_with_a_broken_one(tmp_path: Path) -> None:
    """Parts of both are scored; the good one is complete, but is held by nobody when each is explained alone."""
    done = []
    for index in range(2):
        failures = Failures(tmp_path / "failures.csv", shared=True)
        explainer = CaseExplainer(
            windows(mask_batch_size=4), Picky(), ScoreStore(tmp_path / "scores"), failures=failures
        )
        explainer.assignment = Assignment(Part(index, 2))
        done += [(each.index, each.count) for each in explain(explainer, IMAGES, CASES)]
        assert explainer.explained == ["ct_1"] * index
        assert explainer.waiting == ["ct_1"] * (1 - index)
    assert done == [(0, 1)]
    assert [row["case"] for row in failures.read()] == ["ct_2"]


def test_a_batch_without_a_list_of_failures_fails() -> None:
    with pytest.raises(CaseError, match="case ct_2: the network's output of the unperturbed image is NaN"):
        explain(CaseExplainer(windows(), Picky()), IMAGES[1:], CASES[1:])


def test_the_others_of_a_batch_are_explained_where_one_is_held(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    explainer = CaseExplainer(windows(), Picky(), store)
    with store.claim("ct_1"):
        (found,) = explain(explainer, IMAGES.flip(0) * 0.5, CASES[::-1])
        assert (found.index, found.explanation.name) == (0, "ct_2")
        assert explainer.take_waiting() == ["ct_1"]
        assert explainer.take_waiting() == []


def test_parts_need_a_store_that_keeps_them(tmp_path: Path) -> None:
    explainer = CaseExplainer(windows(), lambda x: x.mean((2, 3, 4)), ScoreStore(tmp_path))
    explainer.assignment = Assignment(Part(0, 2))
    with (
        pytest.warns(UserWarning, match="the network is not a module: give it a network_id"),
        pytest.raises(ValueError, match="part 1 of 2 of ct_1, ct_2 is to be done here, but its scores cannot be kept"),
    ):
        explain(explainer, IMAGES, CASES)


def test_a_setting_that_is_changed_in_place_has_its_own_scores(tmp_path: Path) -> None:
    """An inferer does not change, but an attribute of its fill may, as where a notebook's cell is run again."""
    fill = ms.ConstantFill(0.0)
    explainer = CaseExplainer(windows(fill=fill), Picky(), ScoreStore(tmp_path))
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
    explainer = CaseExplainer(inferer, network, ScoreStore(tmp_path))
    for network.floor in (0.0, 0.9, 0.5):
        (found,) = explain(explainer, image, CASES[:1])
        (alone,) = explainer.inferer.explain(image, network)
        assert torch.equal(found.explanation.saliency, alone.saliency)


def test_scores_of_an_unknown_network_are_not_kept(tmp_path: Path) -> None:
    network = Picky()
    network.helper = lambda x: x
    for network_id, expected in ((None, 9), (None, 9), ("picky", 9), ("picky", 1)):
        explainer = CaseExplainer(windows(), network, ScoreStore(tmp_path), network_id=network_id)
        with nullcontext() if network_id else pytest.warns(UserWarning, match="not kept: the network holds a lambda"):
            (found,) = explain(explainer, IMAGES[:1], CASES[:1])
        assert found.explanation.num_forwards == expected
