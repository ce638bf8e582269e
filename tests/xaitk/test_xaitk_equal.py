"""Ours and xaitk-saliency's: the same masks, the same black box, the same maps."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.black_boxes import Classifies, Describes, Detects
from xaitk_saliency import PerturbImage
from xaitk_saliency.impls.gen_classifier_conf_sal import (
    mc_rise_scoring,
    occlusion_scoring,
    rise_scoring,
    squared_difference_scoring,
)
from xaitk_saliency.impls.gen_descriptor_sim_sal import similarity_scoring
from xaitk_saliency.impls.gen_detector_prop_sal import drise_scoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import mc_rise as mc_rise_stack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import occlusion_based as of_classifiers
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import rise as rise_stack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import slidingwindow as window_stack
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal import occlusion_based as of_descriptors
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal import sbsm
from xaitk_saliency.impls.gen_object_detector_blackbox_sal import drise
from xaitk_saliency.impls.gen_object_detector_blackbox_sal import occlusion_based as of_detectors
from xaitk_saliency.impls.perturb_image import mc_rise, random_grid, rise, sliding_radial, sliding_window

import monai_saliency.xaitk.plugins.gen_image_classifier_blackbox_sal as our_classifiers
import monai_saliency.xaitk.plugins.gen_image_similarity_blackbox_sal as our_descriptors
import monai_saliency.xaitk.plugins.gen_object_detector_blackbox_sal as our_detectors
from monai_saliency import xaitk

#: what is asked for; 1e-7 is what is reached but where whole numbers are cut
CLOSE = 1e-4
RNG = np.random.default_rng(3)
IMAGES: dict[str, np.ndarray] = {
    "square": RNG.random((20, 20)),
    "wide colour": 255 * RNG.random((17, 26, 3)),
    "tall float32": RNG.normal(size=(26, 14, 2)).astype(np.float32),
    "bytes": RNG.integers(0, 256, (18, 23, 3), dtype=np.uint8),
    "grey bytes": RNG.integers(0, 256, (21, 16), dtype=np.uint8),
    "16 bits": RNG.integers(0, 60000, (18, 16), dtype=np.uint16),
}
MC_SCORINGS = mc_rise_scoring.MCRISEScoring, xaitk.MCRISEScoring
KINDS = ["rise", "cells", "windows", "radial", "blurred"]
SMALL = {name: IMAGES[name] for name in ("wide colour", "grey bytes")}


def perturbers(kind: str) -> tuple[PerturbImage, PerturbImage]:
    """Theirs and ours."""
    if kind == "rise":
        return rise.RISEGrid(30, 5, 0.4, 7, threads=0), xaitk.RISEGrid(30, 5, 0.4, 7, threads=0)
    if kind == "windows":
        return sliding_window.SlidingWindow((6, 5), (3, 4)), xaitk.SlidingWindow((6, 5), (3, 4))
    if kind == "cells":
        return random_grid.RandomGrid(30, (4, 5), 0.4, 7, threads=0), xaitk.RandomGrid(30, (4, 5), 0.4, 7, threads=9)
    settings: Any = (4, 6.5), (5, 4), (2, 1.5) if kind == "blurred" else None
    return sliding_radial.SlidingRadial(*settings), xaitk.SlidingRadial(*settings)


def fills(image: np.ndarray) -> list[Any]:
    of_channels = [] if image.ndim == 2 else [list(range(1, 1 + image.shape[2]))]
    return [None, 37, *of_channels, np.roll(image, 3, axis=0)]


def same(theirs: np.ndarray, ours: np.ndarray, close: float = CLOSE) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype.kind == "f"
    assert np.abs(theirs).max() > 0.5  # there is something to compare
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=close)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_masks(name: str, kind: str) -> None:
    theirs, ours = perturbers(kind)
    expected, found = theirs(IMAGES[name]), ours(IMAGES[name])
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert found.min() >= 0
    assert found.max() <= 1


SCORINGS: dict[str, tuple[Any, Any]] = {
    "rise": (rise_scoring.RISEScoring(), xaitk.RISEScoring()),
    "debiased": (rise_scoring.RISEScoring(0.4), xaitk.RISEScoring(0.4)),
    "occlusion": (occlusion_scoring.OcclusionScoring(), xaitk.OcclusionScoring()),
    "squares": (squared_difference_scoring.SquaredDifferenceScoring(), xaitk.SquaredDifferenceScoring()),
}


@pytest.mark.parametrize(("kind", "scoring"), list(product(KINDS, SCORINGS)))
def test_classifiers(kind: str, scoring: str) -> None:
    """Every perturber with every scoring, also one of each side."""
    for image in SMALL.values():
        (their_masks, our_masks), their_maps = perturbers(kind), SCORINGS[scoring][0]
        for fill in fills(image):
            theirs = of_classifiers.PerturbationOcclusion(their_masks, their_maps, threads=0)
            theirs.fill = fill
            expected = theirs(image, Classifies())
            for masks, maps in product(
                {id(each): each for each in (their_masks, our_masks)}.values(), SCORINGS[scoring]
            ):
                ours = our_classifiers.PerturbationOcclusion(masks, maps, threads=5)
                ours.fill = fill
                same(expected, ours(image, Classifies()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single", [False, True])
def test_detectors(kind: str, single: bool) -> None:
    boxes = np.array([[2.5, 2, 10, 12], [1, 4, 12, 15], [0, 0, 3, 3]])
    scores = np.array([[0.9, 0.1], [0.2, 0.7], [0.5, 0.5]])
    for image, objectness in product(SMALL.values(), [None, np.array([0.9, 0.4, 1.0])]):
        their_masks, our_masks = perturbers(kind)
        for fill in fills(image):
            their_maps = drise_scoring.DRISEScoring()
            given = image, boxes, scores, Detects(single), objectness
            expected = of_detectors.PerturbationOcclusion(their_masks, their_maps, fill)(*given)
            for maps in (their_maps, xaitk.DRISEScoring()):
                ours = our_detectors.PerturbationOcclusion(our_masks, maps, fill)(*given)
                np.testing.assert_allclose(ours, expected, rtol=0, atol=CLOSE)
            assert np.abs(expected).max() == 1


def test_detectors_that_find_nothing() -> None:
    image = IMAGES["square"]
    given = image, np.ones((2, 4)), np.ones((2, 2)), Detects(never=True)
    for maps in (drise_scoring.DRISEScoring(), xaitk.DRISEScoring()):
        assert len(our_detectors.PerturbationOcclusion(xaitk.RISEGrid(4, 3, 0.5), maps)(*given)) == 0
    assert len(of_detectors.PerturbationOcclusion(rise.RISEGrid(4, 3, 0.5), maps)(*given)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", ["euclidean", "cosine", "seuclidean"])
def test_descriptors(kind: str, metric: str) -> None:
    queries = [IMAGES["square"], IMAGES["bytes"], IMAGES["tall float32"]]
    for image in SMALL.values():
        their_masks, our_masks = perturbers(kind)
        for fill in fills(image):
            their_maps = similarity_scoring.SimilarityScoring(metric)
            expected = of_descriptors.PerturbationOcclusion(their_masks, their_maps, fill)(image, queries, Describes())
            for maps in (their_maps, xaitk.SimilarityScoring(metric)):
                ours = our_descriptors.PerturbationOcclusion(our_masks, maps, fill)(image, queries, Describes())
                same(expected, ours)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("threads", [None, 0, 3])
def test_stacks(name: str, threads: int) -> None:
    """A seed gives xaitk-saliency's maps of one thread, for any number of threads."""
    image = IMAGES[name]
    for debiased in (True, False):
        theirs: Any = rise_stack.RISEStack(40, 6, 0.3, 11, threads=0, debiased=debiased)
        ours: Any = xaitk.RISEStack(40, 6, 0.3, 11, threads=threads, debiased=debiased)
        theirs.fill = ours.fill = 9
        same(theirs(image, Classifies()), ours(image, Classifies()))
    same(
        window_stack.SlidingWindowStack((7, 5), (3, 2))(image, Classifies()),
        xaitk.SlidingWindowStack((7, 5), (3, 2), threads)(image, Classifies()),
    )
    given = image, np.array([[2, 2, 10, 12]]), np.array([[0.9, 0.1]]), Detects()
    same(
        drise.DRISEStack(40, 6, 0.3, 11, 5, threads=0)(*given),
        xaitk.DRISEStack(40, 6, 0.3, 11, 5, threads=threads)(*given),
    )
    same(
        drise.RandomGridStack(40, (3, 5), 0.3, 11, 5, threads=0)(*given),
        xaitk.RandomGridStack(40, (3, 5), 0.3, 11, 5, threads=threads)(*given),
    )
    query = [IMAGES["square"]]
    same(
        sbsm.SBSMStack((7, 5), (3, 2), fill=3)(image, query, Describes()),
        xaitk.SBSMStack((7, 5), (3, 2), fill=3, threads=threads)(image, query, Describes()),
    )


@pytest.mark.parametrize("name", ["wide colour", "tall float32", "bytes"])
@pytest.mark.parametrize(("p1", "threads"), [(0.5, 0), (0.3, 7)])
def test_mc_rise(name: str, p1: float, threads: int) -> None:
    image = IMAGES[name]
    fills = [[200, 0, 30], [0, 255, 9], [70, 80, 90], [255, 255, 255]]
    fills = [each[: image.shape[2]] for each in fills]
    theirs, ours = (each.MCRISEGrid(30, 5, p1, 4, 7, threads=0) for each in (mc_rise, xaitk))
    assert np.array_equal(theirs.grid, ours.grid)
    masks = theirs(image)
    np.testing.assert_allclose(ours(image), masks, rtol=0, atol=1e-12)
    confidences = RNG.random((30, 3))
    their_maps, our_maps = (each(4, p1)(confidences[0], confidences, masks) for each in MC_SCORINGS)
    np.testing.assert_allclose(our_maps, their_maps, rtol=0, atol=1e-9)
    expected = mc_rise_stack.MCRISEStack(30, 5, p1, fills, 7, threads=0)(image, Classifies())
    same(expected, xaitk.MCRISEStack(30, 5, p1, fills, 7, threads=threads)(image, Classifies()))


def test_black_boxes_are_asked_as_xaitk_asks_them() -> None:
    """Once for the image, once for all perturbed ones."""
    image = IMAGES["square"]
    box: Any = Classifies()
    xaitk.RISEStack(70, 4, 0.5, 0)(image, box)
    assert box.calls == [1, 70]
    box = Describes()
    xaitk.SBSMStack((5, 5), (5, 5))(image, [image, image], box)
    assert box.calls == [1, 2, 16]
    box = Detects()
    xaitk.DRISEStack(70, 4, 0.5, 0)(image, np.ones((1, 4)), np.ones((1, 2)), box)
    assert box.calls == [70]


def test_no_more_than_a_few_masks_exist_at_a_time() -> None:
    """What black boxes get is made while they take it."""
    made: list[int] = []

    class Slow(Classifies):
        def each(self, images: Any) -> Any:
            for number, image in enumerate(images):
                if number == 3:
                    made.append(sum(map(len, rendered)))
                yield self.of(image)

    rendered: list[Any] = []
    masks = xaitk.RISEGrid(1000, 4, 0.5, 0)
    inside = masks.masks

    def watched(shape: Any) -> Any:
        found = inside(shape)
        bind = found.bind

        def bound(*args: Any) -> Any:
            each = bind(*args)
            render = each.render
            each.render = lambda indices: rendered.append(indices) or render(indices)
            return each

        found.bind = bound
        return found

    masks.masks = watched  # type: ignore[method-assign]
    our_classifiers.PerturbationOcclusion(masks, xaitk.RISEScoring())(IMAGES["square"], Slow())
    assert made == [64]
    assert max(map(len, rendered)) == 64
