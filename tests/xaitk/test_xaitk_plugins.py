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
    GenerateClassifierConfidenceSaliency,
    GenerateDescriptorSimilaritySaliency,
    GenerateDetectorProposalSaliency,
    GenerateImageClassifierBlackboxSaliency,
    GenerateImageSimilarityBlackboxSaliency,
    GenerateObjectDetectorBlackboxSaliency,
    PerturbImage,
)

import monai_saliency.xaitk.plugins.gen_image_classifier_blackbox_sal as classifiers
import monai_saliency.xaitk.plugins.gen_image_similarity_blackbox_sal as descriptors
import monai_saliency.xaitk.plugins.gen_object_detector_blackbox_sal as detectors
from monai_saliency import xaitk

INTERFACES: dict[type[Any], set[type[Any]]] = {
    PerturbImage: {
        xaitk.RISEGrid,
        xaitk.MCRISEGrid,
        xaitk.RandomGrid,
        xaitk.SlidingRadial,
        xaitk.SlidingWindow,
    },
    GenerateClassifierConfidenceSaliency: {
        xaitk.RISEScoring,
        xaitk.MCRISEScoring,
        xaitk.OcclusionScoring,
        xaitk.SquaredDifferenceScoring,
    },
    GenerateDescriptorSimilaritySaliency: {xaitk.SimilarityScoring},
    GenerateDetectorProposalSaliency: {xaitk.DRISEScoring},
    GenerateImageClassifierBlackboxSaliency: {
        xaitk.RISEStack,
        xaitk.MCRISEStack,
        xaitk.SlidingWindowStack,
        classifiers.PerturbationOcclusion,
    },
    GenerateObjectDetectorBlackboxSaliency: {xaitk.DRISEStack, xaitk.RandomGridStack, detectors.PerturbationOcclusion},
    GenerateImageSimilarityBlackboxSaliency: {xaitk.SBSMStack, descriptors.PerturbationOcclusion},
}
#: an object of every class
OBJECTS: list[Any] = [
    xaitk.RISEGrid(n=1000, s=8, p1=0.5),
    xaitk.RISEGrid(10, 3, 0.25, 42, 9),
    xaitk.SlidingWindow((777, 776), (444, 445)),
    xaitk.RandomGrid(123, (55, 44), 0.2, 777, 999),
    xaitk.MCRISEGrid(1000, 8, 0.5, 2, 42),
    xaitk.MCRISEScoring(2, 0.3),
    xaitk.SlidingRadial(),
    xaitk.SlidingRadial((4, 5.5), (6, 7), (1, 2.5)),
    xaitk.RISEScoring(0.747),
    xaitk.OcclusionScoring(),
    xaitk.SquaredDifferenceScoring(),
    xaitk.SimilarityScoring("hamming"),
    xaitk.DRISEScoring(),
    classifiers.PerturbationOcclusion(xaitk.RISEGrid(4, 3, 0.5), xaitk.RISEScoring(0.5), 87),
    xaitk.RISEStack(444, 33, 0.22, 42, 99),
    xaitk.RISEStack(444, 33, 0.22, 42, 99, debiased=False),
    xaitk.SlidingWindowStack((8, 9), (19, 14), 99),
    xaitk.MCRISEStack(444, 33, 0.22, [[255, 0, 0], [0, 255, 0]], 42, 99),
    detectors.PerturbationOcclusion(xaitk.RISEGrid(4, 3, 0.5), xaitk.DRISEScoring(), [1, 2, 3], 87),
    xaitk.DRISEStack(123, 8, 0.73, 98, 7, threads=5),
    xaitk.RandomGridStack(123, (8, 9), 0.73, 98, 7, threads=5),
    descriptors.PerturbationOcclusion(xaitk.SlidingWindow(), xaitk.SimilarityScoring(), 4, 27),
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


def test_a_checkout_is_found_by_the_environment_variable() -> None:
    found = listed(ROOT, SMQTK_PLUGIN_PATH="monai_saliency.xaitk.plugins.gen_object_detector_blackbox_sal")
    for interface in (GenerateObjectDetectorBlackboxSaliency, GenerateDetectorProposalSaliency):
        assert names_of(INTERFACES[interface]) <= {*found[interface.__name__]}


def test_the_package_imports_xaitk_when_it_is_used() -> None:
    code = "import sys, monai_saliency as ms; before = 'xaitk_saliency' in sys.modules; ms.xaitk.RISEStack; "
    code += "print(before, 'xaitk_saliency' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False True"


@pytest.mark.filterwarnings("ignore")
def test_ours_are_listed() -> None:
    for interface, classes in INTERFACES.items():
        assert {each for each in interface.get_impls() if each.__module__.startswith("monai_saliency")} == classes


@pytest.mark.filterwarnings("ignore")
def test_every_class_has_an_object_here() -> None:
    assert {type(each) for each in OBJECTS} == set().union(*INTERFACES.values())


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


# The constructors. ----------------------------------------------------------------------------------------------------


def test_parameters_are_attributes() -> None:
    assert xaitk.SlidingWindow().window_size == (50, 50)
    assert xaitk.SlidingWindow().stride == (20, 20)
    radial = xaitk.SlidingRadial()
    assert (radial.radius, radial.stride, radial.sigma) == ((50, 50), (20, 20), None)
    assert xaitk.RandomGrid(3, (34, 12), 0.5).s == (34, 12)
    grid = xaitk.RISEGrid(10, 8, 0.5)
    assert (grid.n, grid.s, grid.p1, grid.seed, grid.threads) == (10, 8, 0.5, None, 4)
    assert xaitk.SimilarityScoring().proximity_metric == "euclidean"
    assert xaitk.RISEScoring().p1 == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda p1: xaitk.RISEGrid(10, 8, p1),
        lambda p1: xaitk.MCRISEGrid(10, 8, p1, 2),
        xaitk.RISEScoring,
        lambda p1: xaitk.MCRISEScoring(2, p1),
    ],
)
@pytest.mark.parametrize("p1", [-0.3, 5, float("nan")])
def test_a_probability_out_of_range(make: Any, p1: float) -> None:
    with pytest.raises(ValueError, match=rf"Input p1 value of {p1} is not within the expected \[0,1\] range\."):
        make(p1)


def test_other_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"comparison metric not supported or may not be available in scipy.*'no'"):
        xaitk.SimilarityScoring("no")
    with pytest.raises(ValueError, match=r"`stride` must be two numbers, for height and width, got \(1, 2, 3\)"):
        xaitk.SlidingWindow((2, 2), (1, 2, 3))  # type: ignore[arg-type]


def test_fills_of_mc_rise() -> None:
    message = r"Input k value of -1 is not within the expected >0 range\."
    with pytest.raises(ValueError, match=message):
        xaitk.MCRISEGrid(10, 8, 0.2, -1)
    with pytest.raises(ValueError, match=message):
        xaitk.MCRISEScoring(-1)
    with pytest.raises(ValueError, match="At least one fill color must be provided"):
        xaitk.MCRISEStack(10, 8, 0.2, [], 0)
    with pytest.raises(ValueError, match="All fill colors must have the same number of channels"):
        xaitk.MCRISEStack(10, 8, 0.2, [[1, 2, 3], [1, 2]], 0)
    with pytest.raises(ValueError, match=r"2 channels, and the image of shape \(9, 9, 3\) 3"):
        xaitk.MCRISEStack(10, 4, 0.2, [[1, 2]], 0)(np.zeros((9, 9, 3)), Classifies())
    masks = xaitk.MCRISEGrid(10, 4, 0.2, 2)(np.zeros((9, 9)))
    with pytest.raises(ValueError, match="Number of perturbation masks and respective confidence lengths do not match"):
        xaitk.MCRISEScoring(2)(np.ones(2), np.ones((9, 2)), masks)
    with pytest.raises(ValueError, match=r"\(k, masks, H, W\), with k 3, got \(2, 10, 9, 9\)"):
        xaitk.MCRISEScoring(3)(np.ones(2), np.ones((10, 2)), masks)


def test_masks_of_several_fills_have_no_place_beside_others() -> None:
    stack = classifiers.PerturbationOcclusion(xaitk.MCRISEGrid(10, 4, 0.2, 2), xaitk.RISEScoring())
    with pytest.raises(ValueError, match=r"masks of \(10, 9, 9\) do not fit an image of \(9, 9\)"):
        stack(np.zeros((9, 9)), Classifies())


def test_seeds() -> None:
    assert not np.array_equal(xaitk.MCRISEGrid(9, 8, 0.5, 2).grid, xaitk.MCRISEGrid(9, 8, 0.5, 2).grid)
    assert np.array_equal(xaitk.RISEGrid(100, 8, 0.5, 42).grid, xaitk.RISEGrid(100, 8, 0.5, 42).grid)
    one, other = xaitk.RISEGrid(100, 8, 0.5), xaitk.RISEGrid(100, 8, 0.5)
    assert not np.array_equal(one.grid, other.grid)
    image = np.zeros((41, 26))
    assert np.array_equal(one(image), one(image))
    assert one(image).shape == (100, 41, 26)
    assert one(np.zeros((4, 6, 3), np.uint8)).shape == (100, 4, 6)


def test_fill_reaches_the_inner_object() -> None:
    for stack in (
        xaitk.RISEStack(5, 8, 0.5),
        xaitk.SlidingWindowStack(),
        xaitk.DRISEStack(5, 8, 0.5),
        xaitk.SBSMStack(),
    ):
        assert stack.fill is None
        stack.fill = 42
        assert stack.fill == stack._po.fill == 42


# Scorings. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [xaitk.RISEScoring, xaitk.OcclusionScoring, xaitk.SquaredDifferenceScoring])
def test_scorings_need_a_row_for_each_mask(make: Any) -> None:
    message = "Number of perturbation masks and respective confidence lengths do not match"
    with pytest.raises(ValueError, match=message):
        make()(np.ones(2), np.ones((3, 2)), np.ones((4, 3, 3)))


@pytest.mark.parametrize("make", [xaitk.OcclusionScoring, xaitk.SquaredDifferenceScoring])
def test_scorings_need_the_same_classes(make: Any) -> None:
    with pytest.raises(ValueError, match="Number of classes in original image and perturbed image do not match"):
        make()(np.ones(3), np.ones((4, 2)), np.ones((4, 3, 3)))


def test_other_scorings_need_parts_that_fit() -> None:
    rng = np.random.default_rng(0)
    similar = xaitk.SimilarityScoring()
    with pytest.raises(ValueError, match="Size of feature vectors between reference and query images do not match"):
        similar(rng.random(16), rng.random((5, 15)), rng.random((32, 16)), rng.random((32, 6, 6)))
    with pytest.raises(ValueError, match="Number of perturbation masks and respective feature vector do not match"):
        similar(rng.random(16), rng.random((1, 16)), rng.random((32, 16)), rng.random((30, 6, 6)))
    detection = xaitk.DRISEScoring()
    with pytest.raises(ValueError, match="Number of perturbation masks and respective detections vector do not match"):
        detection(rng.random((2, 7)), rng.random((9, 3, 7)), rng.random((10, 15, 25)))
    with pytest.raises(ValueError, match=r"Both should be of dimension \(n_classes \+ 4 \+ 1\)\."):
        detection(rng.random((2, 8)), rng.random((10, 3, 7)), rng.random((10, 15, 25)))


@pytest.mark.parametrize("kind", [bool, np.uint8, np.uint16, np.int64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("classes", [1, 20])
def test_masks_of_any_type(kind: Any, classes: int) -> None:
    rng = np.random.default_rng(2)
    masks = rng.integers(0, 2, (30, 6, 9)).astype(kind)
    reference, perturbed = rng.normal(size=classes), rng.normal(size=(30, classes))
    for scoring in (xaitk.RISEScoring(0.5), xaitk.OcclusionScoring()):
        before = masks.copy()
        maps = scoring(reference, perturbed, masks)
        assert np.array_equal(masks, before)
        assert maps.shape == (classes, 6, 9)
        assert maps.dtype == np.float64
        np.testing.assert_allclose(np.abs(maps).max(axis=(1, 2)), 1)
        assert np.array_equal(maps, scoring(reference, perturbed, masks.astype(float)))


def test_scores_that_say_nothing_give_maps_of_zeros() -> None:
    """Where xaitk-saliency's squared differences are NaN."""
    masks = np.eye(4).reshape(4, 2, 2)
    same = np.full((4, 2), 0.3)
    assert not xaitk.OcclusionScoring()(same[0], same, masks).any()
    assert not xaitk.SquaredDifferenceScoring()(same[0], same, masks).any()


# Whole methods. -------------------------------------------------------------------------------------------------------


def test_black_boxes_that_do_not_answer_are_refused() -> None:
    class Lazy(Classifies):
        def classify_images(self, img_iter: Any) -> Any:
            yield from list(super().classify_images(img_iter))[:5]

    with pytest.raises(ValueError, match="the black box gave 5 results for 20 perturbed images"):
        xaitk.RISEStack(20, 4, 0.5, 0)(np.zeros((9, 9)), Lazy())


@pytest.mark.parametrize(
    ("image", "fill", "message"),
    [
        (np.zeros((9, 9, 3)), [1, 2], r"`fill` of shape \(2,\) does not fit an image of shape \(9, 9, 3\)"),
        (np.zeros((9, 9)), np.zeros((8, 9)), r"`fill` of shape \(8, 9\) does not fit"),
        (np.zeros((9, 9), np.uint8), 256, r"`fill` must lie in \[0, 255\], as the image's type uint8, got 256"),
        (np.zeros((9, 9)), "black", "`fill` must be a number, one per channel, or an image, got 'black'"),
        (np.zeros(9), None, "unexpected number of dimensions: 1"),
        (np.zeros((9, 9), complex), None, "an image holds real numbers, got type complex128"),
    ],
)
def test_images_and_fills_that_do_not_fit(image: np.ndarray, fill: Any, message: str) -> None:
    stack = xaitk.RISEStack(20, 4, 0.5, 0)
    stack.fill = fill
    with pytest.raises(ValueError, match=message):
        stack(image, Classifies())


def test_windows_may_be_larger_than_the_image() -> None:
    image = np.empty((21, 21))
    assert len(xaitk.SlidingWindow((3, 2), (2, 2))(image)) == len(xaitk.SlidingWindow((244, 72), (2, 2))(image))
    assert not xaitk.SlidingRadial()(image).any()
