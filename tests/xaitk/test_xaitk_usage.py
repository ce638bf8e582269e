"""What xaitk-saliency's notebooks do, with its own classes and with ours in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.black_boxes import Classifies, Describes, Detects
from PIL import Image
from xaitk_saliency import GenerateImageClassifierBlackboxSaliency, PerturbImage
from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.squared_difference_scoring import SquaredDifferenceScoring
from xaitk_saliency.impls.gen_descriptor_sim_sal.similarity_scoring import SimilarityScoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.mc_rise import MCRISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.occlusion_based import PerturbationOcclusion
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal.occlusion_based import (
    PerturbationOcclusion as SimilarityOcclusion,
)
from xaitk_saliency.impls.gen_object_detector_blackbox_sal.drise import DRISEStack
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow
from xaitk_saliency.utils.masking import occlude_image_streaming

from monai_saliency import xaitk
from monai_saliency.xaitk.plugins import gen_image_classifier_blackbox_sal as our_classifiers
from monai_saliency.xaitk.plugins import gen_image_similarity_blackbox_sal as our_descriptors


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(4).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photograph.png")
    return tmp_path / "photograph.png"


def opened(path: Path) -> np.ndarray:
    """Not writable, as Pillow gives it."""
    image = np.asarray(Image.open(path))
    assert not image.flags.writeable
    return image


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(theirs).max() == 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_an_application_with_any_method(photograph: Path) -> None:
    def application(path: Path, method: GenerateImageClassifierBlackboxSaliency) -> np.ndarray:
        method.fill = [95, 107, 95]  # type: ignore[attr-defined]
        return method(opened(path), Classifies())

    pairs: list[tuple[Any, Any]] = [
        (SlidingWindowStack((10, 10), (5, 5), threads=4), xaitk.SlidingWindowStack((10, 10), (5, 5), threads=4)),
        (RISEStack(60, 8, 0.5, seed=0, debiased=True), xaitk.RISEStack(60, 8, 0.5, seed=0, threads=4, debiased=True)),
    ]
    for theirs, ours in pairs:
        close(application(photograph, ours), application(photograph, theirs))


def test_parts_by_hand(photograph: Path) -> None:
    """Perturber, images, scores and maps, each by itself."""

    def saliency(perturber: Any, scoring: Any) -> np.ndarray:
        image, box = opened(photograph)[..., 0], Classifies()
        masks = perturber(image)
        perturbed = occlude_image_streaming(image, masks, threads=0)
        scores = np.asarray([[each[name] for name in "abcd"] for each in box.classify_images(perturbed)])
        (reference,) = box.classify_images([image])
        return scoring.generate(np.asarray([reference[name] for name in "abcd"]), scores, masks)

    theirs = saliency(SlidingRadial((5, 5), (5, 5), (5, 5)), SquaredDifferenceScoring())
    assert theirs.shape == (40, 56)
    close(saliency(xaitk.SlidingRadial((5, 5), (5, 5), (5, 5)), xaitk.SquaredDifferenceScoring()), theirs)


def test_ones_own_perturber(photograph: Path) -> None:
    class Tiles(PerturbImage):
        """Tiles, as of superpixels."""

        def perturb(self, ref_image: np.ndarray) -> np.ndarray:
            rows, columns = np.indices(ref_image.shape[:2]) // 14
            tiles = rows * 4 + columns
            return np.stack([tiles != tile for tile in np.unique(tiles)])

        def get_config(self) -> dict[str, Any]:
            return {}

    theirs = PerturbationOcclusion(Tiles(), OcclusionScoring())(opened(photograph), Classifies())
    ours = our_classifiers.PerturbationOcclusion(Tiles(), xaitk.OcclusionScoring())
    close(ours(opened(photograph), Classifies()), theirs)


def test_detections(photograph: Path) -> None:
    image = opened(photograph)
    boxes, scores = np.array([[1, 1, 12, 15], [4, 2, 11, 12]]), np.array([[0.7, 0], [0, 0.8]])
    settings: dict[str, Any] = {"n": 40, "s": 8, "p1": 0.5, "fill": [95, 96, 93], "seed": 0}
    theirs = DRISEStack(**settings, threads=0).generate(image, boxes, scores, Detects(single=True))
    close(xaitk.DRISEStack(**settings, threads=8).generate(image, boxes, scores, Detects(single=True)), theirs)


def test_similarity(photograph: Path) -> None:
    image = opened(photograph)
    queries = [image[::-1], image[:20, :20]]
    parts: dict[str, Any] = {"fill": [95, 96, 93], "threads": 4}
    windows, metric = ((12, 12), (4, 4)), "cosine"
    theirs = SimilarityOcclusion(SlidingWindow(*windows), SimilarityScoring(metric), **parts)
    ours = our_descriptors.PerturbationOcclusion(
        xaitk.SlidingWindow(*windows), xaitk.SimilarityScoring(metric), **parts
    )
    close(ours(image, queries, Describes()), theirs(image, queries, Describes()))


def test_colours(photograph: Path) -> None:
    image = opened(photograph)
    colours = [[255, 255, 255], [255, 0, 0], [0, 0, 255]]
    theirs = MCRISEStack(40, 8, 0.5, colours, seed=0)(image, Classifies())
    assert theirs.shape == (3, 4, 40, 56)
    close(xaitk.MCRISEStack(40, 8, 0.5, colours, seed=0, threads=4)(image, Classifies()), theirs)
