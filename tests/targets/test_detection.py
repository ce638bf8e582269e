import math
from typing import Any

import pytest
import torch
from helpers.tolerances import assert_close, assert_same_bits
from monai.apps.detection.networks.retinanet_detector import RetinaNetDetector
from monai.apps.detection.utils.anchor_utils import AnchorGeneratorWithAnchorShape

import monai_saliency as ms

CASES = {2: ms.Case("ct_7", torch.zeros(1, 20, 20)), 3: ms.Case("ct_7", torch.zeros(1, 20, 20, 20))}
KEYS = ("boxes", "labels", "labels_scores")


def detections(counts: list[int], dims: int, classes: int = 0, seed: int = 0, double: bool = False) -> list[dict]:
    """Random boxes inside of 20 voxels: with scores of the best class, or of all classes."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    found = []
    for count in counts:
        corners = torch.randint(0, 12, (count, dims), generator=generator)
        boxes = torch.cat([corners, corners + torch.randint(1, 9, (count, dims), generator=generator)], 1).to(dtype)
        scores = torch.rand(count, *[classes] * bool(classes), generator=generator, dtype=dtype)
        image = {"boxes": boxes, "labels": torch.randint(0, 3, (count,), generator=generator), "labels_scores": scores}
        if classes:
            del image["labels"]
        found.append(image)
    return found


def slow_similarity(reference: dict, image: dict) -> list[float]:
    """The paper's similarity (its section 3), one pair of boxes at a time: of each reference box to the best match."""
    best = []
    for t in range(len(reference["boxes"])):
        highest = 0.0
        for j in range(len(image["boxes"])):
            a, b = reference["boxes"][t].tolist(), image["boxes"][j].tolist()
            dims = len(a) // 2
            shared = math.prod(max(0.0, min(a[d + dims], b[d + dims]) - max(a[d], b[d])) for d in range(dims))
            volumes = [math.prod(box[d + dims] - box[d] for d in range(dims)) for box in (a, b)]
            overlap = shared / (sum(volumes) - shared)
            if "labels" in image:
                alike = float(reference["labels"][t] == image["labels"][j])
                objectness = float(image["labels_scores"][j])
            else:
                p, q = reference["labels_scores"][t].tolist(), image["labels_scores"][j].tolist()
                alike = sum(x * y for x, y in zip(p, q, strict=True)) / (math.hypot(*p) * math.hypot(*q))
                objectness = 1.0
            highest = max(highest, overlap * alike * objectness)
        best.append(highest)
    return best


def pick(image: dict, order: list[int]) -> dict:
    return {key: value[order] for key, value in image.items()}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("classes", [0, 4])
@pytest.mark.parametrize("double", [False, True])
def test_equals_the_paper_in_plain_loops(dims: int, classes: int, double: bool) -> None:
    """Uneven numbers of detections, none among them, and rows that all have none."""
    (reference,) = detections([6], dims, classes, seed=1, double=double)
    perturbed = detections([5, 0, 1, 9, 0, 3], dims, classes, seed=2, double=double)
    perturbed[3] = {key: torch.cat([value, reference[key]]) for key, value in perturbed[3].items()}
    bound = ms.DetectionScore(0.0).bind([reference], CASES[dims])
    sure = reference["labels_scores"].amax(1) if classes else reference["labels_scores"]
    ordered = pick(reference, sure.argsort(descending=True).tolist())
    expected = torch.tensor([slow_similarity(ordered, image) for image in perturbed])
    scores = bound(perturbed)
    assert scores.dtype == (torch.float64 if double else torch.float32)
    assert_close(scores.float(), expected)
    assert_same_bits(scores[[1, 4]], torch.zeros(2, 6).to(scores))
    assert float(expected.max()) > 0.3
    assert_same_bits(bound([perturbed[1], perturbed[4]]), torch.zeros(2, 6).to(scores))


def box(*corners: float, label: int = 1, score: float = 0.9) -> dict[str, torch.Tensor]:
    return {"boxes": torch.tensor([corners]), "labels": torch.tensor([label]), "labels_scores": torch.tensor([score])}


def join(*images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([image[key] for image in images]) for key in images[0]}


class TestByHand:
    REFERENCE = join(box(0, 0, 4, 4, score=0.8), box(8, 8, 12, 10, label=0, score=0.9), box(0, 0, 2, 2, score=0.3))

    def test_reference_boxes_are_those_above_the_threshold_the_highest_first(self) -> None:
        bound = ms.DetectionScore().bind([self.REFERENCE], CASES[2])
        assert bound.labels == ["box 1 (class 0)", "box 2 (class 1)"]
        assert_close(bound([self.REFERENCE]), torch.tensor([[0.9, 0.8]]))
        described = bound.describe()
        assert (described["prediction"], described["probability"]) == (0, pytest.approx(0.9))
        assert ms.DetectionScore(max_boxes=1).bind([self.REFERENCE], CASES[2]).labels == ["box 1 (class 0)"]
        assert len(ms.DetectionScore(0.3).bind([self.REFERENCE], CASES[2]).labels) == 3

    def test_moved_relabelled_and_lost_boxes(self) -> None:
        bound = ms.DetectionScore().bind([self.REFERENCE], CASES[2])
        moved = join(box(8, 8, 12, 12, label=0, score=0.5), box(2, 0, 6, 4, score=0.6))
        relabelled = join(box(8, 8, 12, 10, label=1), box(0, 0, 4, 4, label=2))
        scores = bound([moved, relabelled, pick(moved, [])])
        assert_close(scores, torch.tensor([[0.5 * 0.5, 0.6 * 8 / 24], [0, 0], [0, 0]]))

    def test_given_boxes(self) -> None:
        """A lesion that was missed: what would bring it up?"""
        missed = torch.tensor([[10.0, 0, 14, 4], [0, 0, 4, 4]])
        output = [join(self.REFERENCE, box(10, 0, 14, 2, label=2, score=0.1))]
        bound = ms.DetectionScore(boxes=missed).bind(output, CASES[2])
        assert bound.labels == ["box 1 (any class)", "box 2 (any class)"]
        assert_close(bound(output), torch.tensor([[0.05, 0.8]]))
        bound = ms.DetectionScore(boxes=missed, classes=[0, 1]).bind(output, CASES[2])
        assert bound.labels == ["box 1 (class 0)", "box 2 (class 1)"]
        assert_close(bound(output), torch.tensor([[0.0, 0.8]]))

    def test_given_classes_with_scores_of_all_classes(self) -> None:
        """The cosine of the scores (0.6, 0.8) with the second class alone is 0.8; without objectness that is 1."""
        boxes = torch.tensor([[0.0, 0, 4, 4]])
        output = [{"boxes": boxes, "labels_scores": torch.tensor([[0.6, 0.8]])}]
        bound = ms.DetectionScore(boxes=boxes, classes=[1]).bind(output, CASES[2])
        assert_close(bound(output), torch.tensor([[0.8]]))

    @pytest.mark.parametrize(
        "keys", [KEYS, ("box", "label", "label_scores"), ("boxes", "labels", "scores"), tuple("abc")]
    )
    def test_keys_of_monai_the_model_zoo_and_torchvision_and_ones_own(self, keys: tuple[str, ...]) -> None:
        output = [dict(zip(keys, (self.REFERENCE[key] for key in KEYS), strict=True))]
        target = ms.DetectionScore(keys=keys if keys[0] == "a" else None)
        assert_close(target.bind(output, CASES[2])(output), torch.tensor([[0.9, 0.8]]))

    @pytest.mark.parametrize(
        ("output", "settings", "match"),
        [
            ([REFERENCE], {"threshold": 0.95}, "no box that scores at least 0.95, the highest .* scores 0.900"),
            ([{"a": torch.ones(1, 4)}], {}, r"the detections have the keys \['a'\], not .*`keys`"),
            ([pick(REFERENCE, [])], {}, "no box that scores at least 0.5, it finds no box; lower `threshold`"),
            (torch.zeros(1, 6), {}, "reads a list with one dictionary .* gave a Tensor; choose"),
            ([REFERENCE], {"boxes": torch.zeros(2, 6)}, r"`boxes` must have shape \(M, 4\).*got \(2, 6\)"),
            (
                [{"boxes": torch.ones(1, 4), "scores": torch.ones(1, 3)}],
                {"boxes": torch.ones(1, 4), "classes": [3]},
                r"class 3 is out of range: the network gives 3 classes",
            ),
            ([box(0, 0, 0, 1, 1, 1)], {}, r"this image has 4 corner coordinates, .* gave boxes \(1, 6\)"),
        ],
    )
    def test_what_it_cannot_explain(self, output: Any, settings: dict, match: str) -> None:
        with pytest.raises(ValueError, match=f".*{match}"):
            ms.DetectionScore(**settings).bind(output, CASES[2])

    def test_a_label_is_what_the_detector_calls_it(self) -> None:
        """Also beside the scores of all classes, where labels may begin at 1. Logits are no probability."""
        output = {"boxes": torch.tensor([[0.0, 0, 4, 4]]), "scores": torch.tensor([[0.1, 0.7]])}
        assert ms.DetectionScore().bind([output], CASES[2]).describe() == {
            "prediction": 1,
            "probability": pytest.approx(0.7),
        }
        bound = ms.DetectionScore().bind([{**output, "labels": torch.tensor([2])}], CASES[2])
        assert (bound.labels, bound.describe()["prediction"]) == (["box 1 (class 2)"], 2)
        logits = {**output, "scores": torch.tensor([[-1.0, 3.0]])}
        assert ms.DetectionScore().bind([logits], CASES[2]).describe() == {"prediction": 1}

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"labels_scores": torch.tensor([3.0])}, r"must be in \[0, 1\], and the network gives up to 3; .* sigmoid"),
            ({"boxes": torch.tensor([[8.0, 8, 4, 6]])}, r"finite corners, .* got \[8, 8, 4, 6\]; .*convert_box_mode"),
            ({"labels": torch.tensor([1, 2])}, r"scores \(1,\) and labels \(2,\)"),
            ({"boxes": torch.zeros(1, 1, 4)}, "this image has 4 corner coordinates"),
        ],
    )
    def test_detections_of_another_form(self, change: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=f".*{match}"):
            ms.DetectionScore().bind([{**box(8, 8, 12, 10), **change}], CASES[2])


class _Heads(torch.nn.Module):
    """As small as MONAI's RetinaNet can be: two heads on blocks of four voxels."""

    spatial_dims, num_classes, num_anchors, size_divisible = 3, 2, 1, 4
    cls_key, box_reg_key = "classification", "box_regression"

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.classes, self.boxes = torch.nn.Conv3d(1, 2, 4, 4), torch.nn.Conv3d(1, 6, 4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {self.cls_key: [self.classes(x)], self.box_reg_key: [0.1 * self.boxes(x)]}


def test_monai_detector_equals_one_image_at_a_time() -> None:
    """Rows of two cases share batches; the scores are those of plain forwards and the paper's loops."""
    detector = RetinaNetDetector(_Heads(), AnchorGeneratorWithAnchorShape((1,), base_anchor_shapes=((6, 6, 6),)))
    detector.set_box_selector_parameters(score_thresh=0.5)
    images = torch.rand(2, 1, 16, 16, 12, generator=torch.Generator().manual_seed(0))
    explain = ms.rise(6, 3, target=ms.DetectionScore(0.0), inputs=ms.ListInput(), mask_batch_size=5)
    explanations = explain.explain(images, detector)
    assert len({len(explanation.scores[0]) for explanation in explanations}) == 2
    detector.eval()
    with torch.no_grad():
        for image, explanation in zip(images, explanations, strict=True):
            (reference,) = detector(image[None])
            reference = pick(reference, reference["labels_scores"].argsort(descending=True).tolist())
            masks = explain.masks.bind(image).render(range(6))
            expected = [slow_similarity(reference, detector((mask * image)[None])[0]) for mask in masks]
            torch.testing.assert_close(explanation.scores, torch.tensor(expected), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(explanation.reference_scores, reference["labels_scores"], rtol=1e-4, atol=1e-5)
