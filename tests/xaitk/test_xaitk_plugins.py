"""What xaitk-saliency asks of an implementation: to be found, to be configured, and its errors and ranges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.black_boxes import Classifies
from helpers.paths import ROOT
from smqtk_core.configuration import configuration_test_helper, from_config_dict, to_config_dict
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
LIST_ALL = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
xaitk_saliency = importlib.import_module("xaitk_saliency")
found = {
    name: sorted(f"{each.__module__}.{each.__name__}" for each in getattr(xaitk_saliency, name).get_impls())
    for name in sys.argv[1:]
}
print(json.dumps(found))
"""


def listed(path: Path | None, **environment: str) -> dict[str, list[str]]:
    """All implementations by interface, in a process of its own."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SMQTK_PLUGIN_PATH")}
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    names = [each.__name__ for each in INTERFACES]
    command = [sys.executable, "-c", LIST_ALL, *names]
    done = subprocess.run(command, env=variables | environment, capture_output=True, text=True, check=True, cwd="/")
    return json.loads(done.stdout.splitlines()[-1])


def names_of(classes: set[type[Any]]) -> set[str]:
    return {f"{each.__module__}.{each.__name__}" for each in classes}


@pytest.mark.slow
def test_an_installed_package_is_found(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    package = "monai_saliency"
    shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    found = listed(target)
    for interface, classes in INTERFACES.items():
        assert names_of(classes) <= {*found[interface.__name__]}


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


@pytest.mark.filterwarnings("ignore")
def test_an_object_is_chosen_by_a_configuration() -> None:
    stack = xaitk.RISEStack(12, 4, 0.5, seed=3)
    config = json.loads(json.dumps(to_config_dict(stack)))
    again = from_config_dict(config, GenerateImageClassifierBlackboxSaliency.get_impls())
    image = np.random.default_rng(0).random((12, 14))
    assert np.array_equal(again(image, Classifies()), stack(image, Classifies()))


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
