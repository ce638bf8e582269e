"""What xaitk-saliency asks of an implementation: to be found, to be configured, and its errors and ranges."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import assert_close, assert_same_bits
from smqtk_core.configuration import configuration_test_helper
from torch import nn
from xaitk_saliency import (
    GenerateImageClassifierBlackboxSaliency,
    GenerateImageSimilarityBlackboxSaliency,
    GenerateObjectDetectorBlackboxSaliency,
    PerturbImage,
)

from monai_saliency import xaitk
from monai_saliency.xaitk import Classifier, RISEStack

INTERFACES: dict[type[Any], set[type[Any]]] = {
    PerturbImage: {xaitk.RISEGrid, xaitk.RandomGrid, xaitk.SlidingRadial, xaitk.SlidingWindow},
    GenerateImageClassifierBlackboxSaliency: {xaitk.RISEStack, xaitk.SlidingWindowStack},
    GenerateObjectDetectorBlackboxSaliency: {xaitk.DRISEStack, xaitk.RandomGridStack},
    GenerateImageSimilarityBlackboxSaliency: {xaitk.SBSMStack},
}
#: an object of every class
OBJECTS: list[Any] = [
    xaitk.RISEGrid(10, 3, 0.25, 42, 9),
    xaitk.SlidingWindow((777, 776), (444, 445)),
    xaitk.RandomGrid(123, (55, 44), 0.2, 777, 999),
    xaitk.SlidingRadial((4, 5.5), (6, 7), (1, 2.5)),
    xaitk.RISEStack(444, 33, 0.22, 42, 99, debiased=False),
    xaitk.SlidingWindowStack((8, 9), (19, 14), 99),
    xaitk.DRISEStack(123, 8, 0.73, 98, 7, threads=5),
    xaitk.RandomGridStack(123, (8, 9), 0.73, 98, 7, threads=5),
    xaitk.SBSMStack((10, 7), (9, 3), "rogerstanimoto", threads=15),
]


def test_an_installed_package_names_their_modules() -> None:
    named = {each.value for each in entry_points(group="smqtk_plugins")}
    assert {type(each).__module__ for each in OBJECTS} <= named


@pytest.mark.filterwarnings("ignore")
def test_ours_are_listed() -> None:
    assert {type(each) for each in OBJECTS} == set().union(*INTERFACES.values())
    for interface, classes in INTERFACES.items():
        assert {each for each in interface.get_impls() if each.__module__.startswith("monai_saliency")} == classes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", OBJECTS, ids=lambda each: type(each).__name__)
def test_configuration(made: Any) -> None:
    for again in configuration_test_helper(made):
        assert again.get_config() == made.get_config()
        assert type(again) is type(made)


def test_wrong_settings() -> None:
    for p1 in (-0.3, float("nan")):
        with pytest.raises(ValueError, match="`p1`"):
            xaitk.RISEStack(10, 8, p1)
    with pytest.raises(ValueError, match=r"may not be available in scipy"):
        xaitk.SBSMStack(proximity_metric="no")


def test_an_object_without_a_seed_makes_the_same_masks_each_time() -> None:
    one, other, image = xaitk.RISEGrid(100, 8, 0.5), xaitk.RISEGrid(100, 8, 0.5), np.zeros((41, 26))
    assert_same_bits(one(image), one(image))
    assert not np.array_equal(one(image), other(image))


# Networks as black boxes of xaitk-saliency: the answers of the network, in batches.
PHOTOGRAPHS = [
    np.random.default_rng(1).integers(0, 256, (18, 24, 3), dtype=np.uint8),
    np.random.default_rng(2).random((18, 24, 3)).astype(np.float32) * 255,
]
PHOTOGRAPHS[0].setflags(write=False)  # as Pillow gives it


class Counted(nn.Module):
    """A small convolutional network that notes the sizes of its batches."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 3)
        )
        self.batches: list[int] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(batch))
        return self.layers(batch)


def scale(batch: torch.Tensor) -> torch.Tensor:
    return batch / 255


def test_a_network_answers_image_by_image() -> None:
    network = Counted()
    box = Classifier(network, ["a", "b", "c"], "softmax", transform=scale, batch_size=4)
    images = [*PHOTOGRAPHS * 3, np.zeros((30, 30, 3))]
    answers = list(box.classify_images(iter(images)))
    assert network.batches == [4, 2, 1]
    for image, answer in zip(images, answers, strict=True):
        expected = network(scale(torch.from_numpy(np.moveaxis(image, -1, 0).astype(np.float32))[None]))[0]
        assert_close(answer, dict(zip("abc", expected.softmax(0).tolist(), strict=True)))
    assert box.get_labels() == ["a", "b", "c"]
    (row,) = Classifier(Counted(1), 3, "none").classify_images([PHOTOGRAPHS[0][..., 0]])
    assert list(row) == [0, 1, 2]


def test_a_training_network_is_left_in_training() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), Counted()).train()
    before = network[0].running_mean.clone()
    RISEStack(10, 4, 0.5, 0)(PHOTOGRAPHS[0], Classifier(network, 3, "softmax", transform=scale))
    assert network.training
    assert_same_bits(network[0].running_mean, before)


def test_wrong_settings_of_a_network() -> None:
    network = Counted()
    few: Iterator[Any] = Classifier(network, 2, "none").classify_images([PHOTOGRAPHS[0]])
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "activation", lambda: Classifier(network, 3, "relu")),
        (ValueError, "batch_size", lambda: Classifier(network, 3, "none", batch_size=0)),
        (ValueError, r"must give \(B, 2\), one column per label, got shape \(1, 3\)", lambda: next(few)),
        (NotImplementedError, "has no configuration", lambda: Classifier(network, 3, "none").get_config()),
    ]
    for kind, message, make in cases:
        with pytest.raises(kind, match=message):
            make()
