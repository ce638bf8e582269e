"""Perturbed images by an iterable dataset: each once, and to the bit what the network sees."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.tolerances import assert_same_bits
from monai.data import MetaTensor
from torch.utils.data import DataLoader

import monai_saliency as ms
from monai_saliency.data.perturbed_images import PerturbedImages
from monai_saliency.errors import CaseError

MASKS, BATCH = 22, 4
TARGET = ms.FunctionScore(lambda output: output.flatten(1).mean(1, keepdim=True))


class Recorder:
    """A network that keeps what it sees."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:  # else it is an image alone, which the unperturbed row is compared with
            self.batches.append(x.clone())
        return x


def cohort(count: int, channels: int = 1) -> list[dict[str, Any]]:
    """Scans of different shapes, in 2D."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"image": MetaTensor(torch.rand(channels, 11 + i, 9, generator=generator)), "case": f"scan{i}", "age": 40.0 + i}
        for i in range(count)
    ]


def rise(**settings: Any) -> ms.PerturbationInferer:
    return ms.rise(MASKS, 3, target=TARGET, mask_batch_size=BATCH, seed=4, **settings)


def windows(**settings: Any) -> ms.PerturbationInferer:
    """As many as the shape has room for."""
    return ms.sliding_window(4, 3, target=TARGET, mask_batch_size=BATCH, **settings)


def seen(case: dict[str, Any], inferer: ms.PerturbationInferer) -> torch.Tensor:
    """What the network sees: the unperturbed image, then one for each mask."""
    network = Recorder()
    (explanation,) = inferer.explain(case["image"][None], network)
    return torch.cat(network.batches)[: len(explanation.masks) + 1]


@pytest.mark.parametrize("make", [rise, windows, lambda: rise(fill=ms.BlurFill(1.5)), lambda: rise(per_channel=True)])
def test_images_are_what_the_network_sees(make: Any) -> None:
    cases = cohort(3, channels=2)
    found = list(PerturbedImages(cases, make(), held_keys=["age"]))
    for index, case in enumerate(cases):
        items = [item for item in found if item["case"] == case["case"]]
        assert [item["mask"] for item in items] == list(range(-1, len(items) - 1))
        assert {(item["index"], item["age"]) for item in items} == {(index, case["age"])}
        assert_same_bits(torch.stack([item["image"] for item in items]), seen(case, make()))


def everything(cases: Sequence[Any], make: Any = rise) -> Counter[tuple[str, int]]:
    return Counter((case["case"], row - 1) for case in cases for row in range(len(seen(case, make()))))


@pytest.mark.parametrize("split", ["auto", "cases", "masks"])
@pytest.mark.parametrize(("count", "world_size", "workers"), [(5, 3, 0), (1, 3, 0), (5, 2, 2)])
def test_each_once_over_ranks_and_workers(
    count: int, world_size: int, workers: int, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = cohort(count)
    done: list[tuple[str, int]] = []
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr("monai_saliency.data.perturbed_images.rank_of", lambda own=rank: (own, world_size))
        dataset = PerturbedImages(cases, windows(), split=split)
        loader = DataLoader(dataset, batch_size=None, num_workers=workers)
        mine = [(item["case"], item["mask"]) for item in loader]
        shares.append(len(mine))
        done += mine
    assert Counter(done) == everything(cases, windows)
    if split == "masks":
        assert max(shares) - min(shares) <= BATCH * max(workers, 1) * count


def test_regions_come_from_label_maps() -> None:
    case = cohort(1)[0]
    labels = torch.zeros(1, *case["image"].shape[1:], dtype=torch.int64)
    labels[:, :5] = 2
    inferer = ms.region_occlusion(target=TARGET, mask_batch_size=BATCH)
    found = list(PerturbedImages([{**case, "organs": labels}], inferer, label_key="organs"))
    assert [item["mask"] for item in found] == [-1, 0]
    assert_same_bits(found[1]["image"], case["image"].as_tensor() * (labels == 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "images"}, r"must be one of \['auto', 'cases', 'masks'\], got 'images'"),
        ({"held_keys": ("age", "mask")}, "'mask' is a key of what is yielded: rename it"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerturbedImages(cohort(1), rise(), **settings)


@pytest.mark.parametrize(
    ("item", "settings", "message"),
    [
        (
            {"case": "ct", "t1": torch.ones(1, 8, 8)},
            {},
            r"case ct: the dataset's item has no 'image', only \['case', 't1'\]",
        ),
        ({"image": torch.ones(1, 8, 8)}, {"held_keys": "age"}, "case image 0: .* has no 'age'"),
        ({"image": "ct.nii"}, {}, r"gives a str, where an image \(C, \*spatial\) is expected"),
    ],
)
def test_items_that_are_no_images(item: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        next(iter(PerturbedImages([item], rise(), **settings)))
