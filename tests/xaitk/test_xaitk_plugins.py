"""What xaitk-saliency asks of an implementation: to be found, to be configured, and its errors and ranges."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from smqtk_core.configuration import configuration_test_helper
from xaitk_saliency import (
    GenerateImageClassifierBlackboxSaliency,
    GenerateImageSimilarityBlackboxSaliency,
    GenerateObjectDetectorBlackboxSaliency,
    PerturbImage,
)

from monai_saliency import xaitk

INTERFACES: dict[type[Any], set[type[Any]]] = {
    PerturbImage: {
        xaitk.RISEGrid,
        xaitk.RandomGrid,
        xaitk.SlidingRadial,
        xaitk.SlidingWindow,
    },
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
    assert np.array_equal(one(image), one(image))
    assert not np.array_equal(one(image), other(image))
