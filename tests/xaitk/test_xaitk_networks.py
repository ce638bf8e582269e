"""Networks as black boxes of xaitk-saliency: the same answers, and batches on the network's device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from torch import nn
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import mc_rise
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal import rise as rise_stack
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal import sbsm
from xaitk_saliency.impls.gen_object_detector_blackbox_sal import drise
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial

import monai_saliency.xaitk.plugins.gen_image_classifier_blackbox_sal as our_classifiers
from monai_saliency.xaitk import (
    Classifier,
    Descriptor,
    Detector,
    DRISEStack,
    MCRISEStack,
    OcclusionScoring,
    RISEStack,
    SBSMStack,
    SlidingWindowStack,
)

IMAGES = [
    np.random.default_rng(1).integers(0, 256, (18, 24, 3), dtype=np.uint8),
    np.random.default_rng(2).random((18, 24, 3)).astype(np.float32) * 255,
]


class Counted(nn.Module):
    """A small convolutional network that notes the sizes of its batches."""

    def __init__(self, channels: int = 3, out: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, out)
        )
        self.batches: list[tuple[int, ...]] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.batches.append(tuple(batch.shape))
        return self.layers(batch)


class Boxes(nn.Module):
    """A detector whose boxes move with the image: rows first, one or two, of classes 0 and 1."""

    def __init__(self, vectors: bool = False) -> None:
        super().__init__()
        self.vectors = vectors

    def forward(self, batch: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found = []
        for image in batch / 255:
            a, b = image[:, :9].mean(), image[:, 9:].mean()
            boxes = torch.stack(
                [torch.stack([2 + a, 3 * b, 11 + a, 14 + 2 * b]), torch.stack([b, a, 9 + b, 7 + 5 * a])]
            )
            scores = torch.stack([a, b])
            if self.vectors:
                scores = torch.stack([torch.stack([a, b]), torch.stack([b, a / 2])])
            count = 2 if a > 0.25 else 1 if b > 0.15 else 0
            labels = torch.tensor([1, 0])
            found.append({"boxes": boxes[:count], "labels": labels[:count], "scores": scores[:count]})
        return found


class Hidden:
    """A black box that does not show that a network is inside."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def get_config(self) -> dict[str, Any]:
        return {}


class HiddenClassifier(Hidden, ClassifyImage):
    def get_labels(self) -> Any:
        return self.inside.get_labels()

    def classify_images(self, img_iter: Any) -> Any:
        return self.inside.classify_images(img_iter)


class HiddenDetector(Hidden, DetectImageObjects):
    def detect_objects(self, img_iter: Any) -> Any:
        return self.inside.detect_objects(img_iter)


class HiddenDescriptor(Hidden, ImageDescriptorGenerator):
    def generate_arrays_from_images(self, img_mat_iter: Any) -> Any:
        return self.inside.generate_arrays_from_images(img_mat_iter)


def scale(batch: torch.Tensor) -> torch.Tensor:
    return batch / 255


def test_a_classifier_answers_as_its_network() -> None:
    network = Counted()
    box = Classifier(network, ["a", "b", "c"], "softmax", transform=scale, batch_size=4)
    images = [*IMAGES * 3, np.zeros((30, 30, 3))]
    answers = list(box.classify_images(iter(images)))
    assert [batch[0] for batch in network.batches] == [4, 2, 1]
    for image, answer in zip(images, answers, strict=True):
        tensor = torch.from_numpy(np.moveaxis(image, -1, 0).astype(np.float32))[None] / 255
        expected = network(tensor).softmax(1)[0].tolist()
        assert answer == pytest.approx(dict(zip("abc", expected, strict=True)), abs=1e-6)
    assert box.get_labels() == ["a", "b", "c"]
    grey = Classifier(Counted(1), 3, "none")
    (row,) = grey.classify_images([IMAGES[0][..., 0]])
    assert list(row) == [0, 1, 2]


@pytest.mark.parametrize("image", IMAGES, ids=["bytes", "float32"])
@pytest.mark.parametrize("fill", [None, 60, [10, 20, 30]])
def test_maps_of_a_classifier(image: np.ndarray, fill: Any) -> None:
    """Theirs, ours with arrays, and ours in batches on the device."""
    box = Classifier(Counted(), 3, "softmax", transform=scale)
    stacks: list[tuple[Any, Any]] = [(rise_stack.RISEStack(40, 5, 0.5, 3, threads=0), RISEStack(40, 5, 0.5, 3))]
    stacks.append((SlidingWindowStack((6, 6), (4, 4)), SlidingWindowStack((6, 6), (4, 4))))
    for theirs, ours in stacks:
        theirs.fill = ours.fill = fill
        expected = theirs(image, HiddenClassifier(box))
        assert np.abs(expected).max() == 1
        np.testing.assert_allclose(ours(image, HiddenClassifier(box)), expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours(image, box), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("image", IMAGES, ids=["bytes", "float32"])
def test_maps_of_several_fills(image: np.ndarray) -> None:
    fills, box = [[200, 0, 30], [0, 255, 9]], Classifier(Counted(), 3, "softmax", transform=scale)
    expected = mc_rise.MCRISEStack(40, 5, 0.4, fills, 3, threads=0)(image, HiddenClassifier(box))
    assert expected.shape == (2, 3, 18, 24)
    for given in (box, HiddenClassifier(box)):
        ours = MCRISEStack(40, 5, 0.4, fills, 3)(image, given)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_batches_have_one_shape() -> None:
    network = Counted()
    RISEStack(50, 5, 0.5, 3)(IMAGES[0], Classifier(network, 3, "softmax", transform=scale, batch_size=20))
    sizes = [batch[0] for batch in network.batches]
    assert set(sizes) == {1, 17}  # 51 rows in three batches
    assert sizes.count(17) <= 6


def test_a_foreign_perturber_and_a_foreign_scoring_with_a_network() -> None:
    box, masks = Classifier(Counted(), 3, "softmax", transform=scale), SlidingRadial((4, 5), (6, 6), (1, 1))
    from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring as Theirs
    from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.occlusion_based import PerturbationOcclusion

    expected = PerturbationOcclusion(masks, Theirs())(IMAGES[1], box)
    for scoring in (Theirs(), OcclusionScoring()):
        found = our_classifiers.PerturbationOcclusion(masks, scoring)(IMAGES[1], box)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("image", IMAGES, ids=["bytes", "float32"])
def test_maps_of_a_detector(image: np.ndarray, vectors: bool) -> None:
    box = Detector(Boxes(vectors), ["nodule", "cyst"])
    boxes, scores = np.array([[3, 2, 15, 12], [0.5, 0, 10, 9]]), np.array([[0.3, 0.7], [0.9, 0.2]])
    expected = drise.DRISEStack(40, 5, 0.5, 3, 20, threads=0)(image, boxes, scores, HiddenDetector(box))
    assert np.abs(expected).max() == 1
    ours = DRISEStack(40, 5, 0.5, 3, 20)
    np.testing.assert_allclose(ours(image, boxes, scores, HiddenDetector(box)), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(ours(image, boxes, scores, box), expected, rtol=0, atol=1e-4)


def test_boxes_have_the_column_first() -> None:
    """MONAI's corners have the row first, torchvision's the column."""
    for rows_first, corners in ((True, [1, 3, 9, 5]), (False, [3, 1, 5, 9])):

        def network(batch: torch.Tensor, corners: list[int] = corners) -> list[dict[str, torch.Tensor]]:
            one = torch.tensor([corners], dtype=torch.float32)
            return [{"boxes": one, "labels": torch.tensor([1]), "scores": torch.tensor([0.75])} for _ in batch]

        box = Detector(network, ["cyst", "nodule"], rows_first=rows_first)
        ((found, scores),) = next(iter(box.detect_objects([np.zeros((12, 14))])))
        assert [*found.min_vertex, *found.max_vertex] == [3, 1, 5, 9]
        assert scores == {"cyst": 0.0, "nodule": 0.75}


def test_a_detector_that_finds_nothing() -> None:
    box = Detector(lambda batch: [{} for _ in batch], 2)
    assert list(box.detect_objects([np.zeros((12, 14))] * 3)) == [[], [], []]
    assert not len(DRISEStack(10, 4, 0.5, 0)(np.ones((12, 14)), np.ones((2, 4)), np.ones((2, 2)), box))


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "seuclidean"])
@pytest.mark.parametrize("image", IMAGES, ids=["bytes", "float32"])
def test_maps_of_a_descriptor(image: np.ndarray, metric: str) -> None:
    network = Counted(out=5)
    box, queries = Descriptor(network, transform=scale), [IMAGES[0][:12], IMAGES[1][::-1]]
    expected = sbsm.SBSMStack((6, 5), (4, 4), metric, 40)(image, queries, HiddenDescriptor(box))
    assert np.abs(expected).max() == 1
    ours = SBSMStack((6, 5), (4, 4), metric, 40)
    np.testing.assert_allclose(ours(image, queries, HiddenDescriptor(box)), expected, rtol=0, atol=1e-4)
    network.batches.clear()
    np.testing.assert_allclose(ours(image, queries, box), expected, rtol=0, atol=1e-4)
    assert max(batch[0] for batch in network.batches) == 16


def test_double_precision() -> None:
    network, image = Counted().double(), np.random.default_rng(5).random((14, 12, 3))
    theirs = rise_stack.RISEStack(30, 4, 0.5, 3, threads=0)(image, Classifier(network, 3, "softmax"))
    np.testing.assert_allclose(RISEStack(30, 4, 0.5, 3)(image, Classifier(network, 3, "softmax")), theirs, atol=1e-6)


def test_a_training_network_is_left_in_training() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), Counted()).train()
    before = network[0].running_mean.clone()
    box = Classifier(network, 3, "softmax", transform=scale)
    RISEStack(10, 4, 0.5, 0)(IMAGES[0], box)
    list(box.classify_images(IMAGES))
    assert network.training
    assert torch.equal(network[0].running_mean, before)


def wrong(kind: type[Exception], message: str, make: Any) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_wrong_settings() -> None:
    network = Counted()
    wrong(
        ValueError,
        "`labels` must be names of classes, or their number, got 'abc'",
        lambda: Classifier(network, "abc", "none"),
    )
    wrong(ValueError, "`labels` must be different names", lambda: Classifier(network, ["a", "a"], "none"))
    wrong(ValueError, "activation", lambda: Classifier(network, 3, "relu"))
    wrong(ValueError, "batch_size", lambda: Classifier(network, 3, "none", batch_size=0))
    few: Iterator[Any] = Classifier(network, 2, "none").classify_images([IMAGES[0]])
    wrong(ValueError, r"must give \(B, 2\), one column per label, got shape \(1, 3\)", lambda: next(few))
    stack = RISEStack(10, 4, 0.5, 0)
    wrong(ValueError, r"must give \(B, 4\), one column", lambda: stack(IMAGES[0], Classifier(network, 4, "none")))
    wrong(NotImplementedError, "a network has no configuration", lambda: Classifier(network, 3, "none").get_config())
    one = Detector(Boxes(), 1)
    wrong(ValueError, "gives class 1, and there are 1 `labels`", lambda: list(one.detect_objects([IMAGES[0]])))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    box = Classifier(Counted().cuda(), 3, "softmax", transform=scale)
    theirs = rise_stack.RISEStack(40, 5, 0.5, 3, threads=0)
    for image in IMAGES:
        for given in (box, HiddenClassifier(box)):
            ours = RISEStack(40, 5, 0.5, 3)
            np.testing.assert_allclose(ours(image, given), theirs(image, given), rtol=0, atol=1e-4)
