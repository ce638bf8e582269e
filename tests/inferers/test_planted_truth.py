"""One network for each task whose score depends on places that are known: the map lies there, at the value by hand.

Images are ones, and windows of three voxels at steps of three tile them, so that hiding a window replaces its ones by
zeros, and the map of sliding-window occlusion is the exact drop of the score for each window alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tolerances import assert_close

import monai_saliency as ms
from monai_saliency.errors import CaseError
from monai_saliency.targets import Target

Box = tuple[Any, ...]
SHAPES = {2: (12, 9), 3: (9, 12, 9)}
# Each in one window of its own.
CUES: dict[int, list[Box]] = {
    2: [(..., slice(3, 6), slice(0, 3)), (..., slice(9, 12), slice(6, 9))],
    3: [(..., slice(3, 6), slice(0, 3), slice(6, 9)), (..., slice(0, 3), slice(9, 12), slice(3, 6))],
}


def ones(dims: int, count: int = 1) -> torch.Tensor:
    return torch.ones(count, 1, *SHAPES[dims], dtype=torch.float64)


def cue(x: torch.Tensor, box: Box) -> torch.Tensor:
    """How much of a box is left, ``(B,)``: 1 of the whole image, 0 where it is hidden."""
    return x[box].flatten(1).mean(1)


def drawn(dims: int, values: dict[int, float]) -> torch.Tensor:
    """A map that is zero but for some of the cues."""
    expected = torch.zeros(SHAPES[dims], dtype=torch.float64)
    for index, value in values.items():
        expected[CUES[dims][index]] = value
    return expected


def by_case(values: torch.Tensor, dims: int) -> torch.Tensor:
    """Values ``(B,)`` as ``(B, 1, 1, ...)``, to be put into boxes."""
    return values.reshape(-1, 1, *[1] * dims)


def two_structures(x: torch.Tensor) -> torch.Tensor:
    """Logits ``(B, 1, *spatial)`` of two separate structures, each segmented for a cue that lies outside of it."""
    dims = x.ndim - 2
    logits = -torch.ones_like(x)
    logits[:, :, 6:8, 0:3] = 2 * by_case(cue(x, CUES[dims][0]), dims)
    logits[:, :, 0:1, 6:8] = 3 * by_case(cue(x, CUES[dims][1]), dims)
    return logits


def check(
    target: Target,
    network: Callable,
    dims: int,
    expected: list[dict[int, float]],
    image: Any = None,
    with_rise: bool = True,
    with_gradients: bool = True,
    **given: Any,
) -> None:
    """Occlusion gives the map by hand; of all windows, the strongest cue has the highest mean in RISE's map, and in
    that of integrated gradients and SmoothGrad, with the same target and geometry. Those see nothing where a score is
    highest for the image itself, or depends on the direction of an embedding alone: its derivative is zero on the way.
    """
    image = ones(dims) if image is None else image
    settings = {"target": target, **{key: given.pop(key) for key in ("inputs",) if key in given}}
    (explanation,) = ms.sliding_window(3, 3, mask_batch_size=5, **settings).explain(image, network, **given)
    by_hand = torch.stack([drawn(dims, values) for values in expected])
    assert_close(explanation.saliency, by_hand, scale=1, within=1e-6)  # smoothing of Dice, for one
    others = [ms.rise(400, 4, **settings)] * with_rise
    others += [ms.integrated_gradients(40, **settings), ms.smoothgrad(10, **settings)] * with_gradients
    for method in others:
        (explanation,) = method.explain(image, network, **given)
        pool = (torch.nn.functional.avg_pool2d, torch.nn.functional.avg_pool3d)[dims - 2]
        for ours, truth in zip(explanation.saliency, by_hand, strict=True):
            assert int(pool(ours[None], 3).argmax()) == int(pool(truth[None], 3).argmax())


@pytest.mark.parametrize("dims", [2, 3])
class TestOneTaskEach:
    def test_classification(self, dims: int) -> None:
        """Class 0 needs the first cue. Two labels at once, each with its own."""

        def network(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([2 * cue(x, CUES[dims][0]), 3 * cue(x, CUES[dims][1]), -x.new_ones(len(x))], 1)

        check(ms.ClassScore("positive", "sigmoid"), network, dims, [{0: 2.0}, {1: 3.0}])
        drops = [torch.tensor(float(w)).sigmoid().item() - 0.5 for w in (2, 3)]
        check(ms.ClassScore("positive", "sigmoid", "probability"), network, dims, [{0: drops[0]}, {1: drops[1]}])

    def test_regression(self, dims: int) -> None:
        network = lambda x: 40 + 25 * cue(x, CUES[dims][0]) - 10 * cue(x, CUES[dims][1])  # noqa: E731
        check(ms.RegressionScore(names=["age (years)"]), network, dims, [{0: 25.0, 1: -10.0}])

    def test_segmentation_by_component(self, dims: int) -> None:
        drops = [torch.tensor(float(w)).sigmoid().item() - 0.5 for w in (2, 3)]
        check(ms.RegionScore(0, "sigmoid", components=5), two_structures, dims, [{0: drops[0]}, {1: drops[1]}])

    def test_label_and_false_positive(self, dims: int) -> None:
        """The label has the first structure only; the second is segmented by mistake."""
        network = lambda x: torch.cat([torch.zeros_like(x), two_structures(x)], 1)  # noqa: E731
        labels = torch.zeros(1, *SHAPES[dims])
        labels[:, 6:8, 0:3] = 1
        check(ms.RegionScore(1, "none", "label"), network, dims, [{0: 2.0}], cases=[ms.Case("x", labels=labels)])
        check(
            ms.RegionScore(1, "none", "false_positive"), network, dims, [{1: 3.0}], cases=[ms.Case("x", labels=labels)]
        )

    def test_segmentation_on_a_coarser_grid(self, dims: int) -> None:
        """The output has a third of the image's voxels along each axis, the map all of them."""

        def network(x: torch.Tensor) -> torch.Tensor:
            logits = -torch.ones_like(x[(..., *[slice(1, None, 3)] * dims)])
            logits[:, :, 2, 0] = (2 * cue(x, CUES[dims][0])).reshape(-1, 1, *[1] * (dims - 2))
            return logits

        region = torch.zeros(SHAPES[dims])
        region[6:9, 0:3] = 1
        check(ms.RegionScore(0, "none", region), network, dims, [{0: 2.0}])

    def test_dice(self, dims: int) -> None:
        """Hiding the first cue halves the probabilities inside: Dice falls from 1 to 2 * 0.5 / 1.5."""

        def network(x: torch.Tensor) -> torch.Tensor:
            probabilities = torch.zeros_like(x)
            probabilities[:, :, 6:8] = by_case(0.5 + 0.5 * cue(x, CUES[dims][0]), dims)
            return torch.cat([1 - probabilities, probabilities], 1)

        check(ms.DiceScore(1, "none"), network, dims, [{0: 1 - 2 / 3}])

    def test_detection(self, dims: int) -> None:
        """Two boxes, each found for as much as its cue is there, and the second moves by half without the first cue."""

        def network(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
            found = []
            for image in x.split(1):
                first, second = (float(cue(image, box)) for box in CUES[dims])
                boxes = torch.tensor([[0.0] * dims + [4.0] * dims, [4.0] * dims + [8.0] * dims], dtype=torch.float64)
                boxes[1, dims] -= 2 * (1 - first)
                scores = torch.tensor([0.9 * first, 0.8 * second], dtype=torch.float64)
                kept = scores > 0.2
                found.append({"box": boxes[kept], "label": torch.tensor([0, 3])[kept], "label_scores": scores[kept]})
            return found

        # Numbers of Python have no derivative.
        check(ms.DetectionScore(0.5), network, dims, [{0: 0.9}, {0: 0.4, 1: 0.8}], with_gradients=False)
        with pytest.raises(CaseError, match="needs the derivative of the score"):
            ms.integrated_gradients(3, target=ms.DetectionScore(0.5))(ones(dims), network)

    def test_embedding(self, dims: int) -> None:
        """Without the first cue (3, 4) becomes (0, 4), of cosine 0.8; without the second (3, 0), of cosine 0.6."""
        network = lambda x: torch.stack([3 * cue(x, CUES[dims][0]), 4 * cue(x, CUES[dims][1])], 1)  # noqa: E731
        # The cosine forgets the embedding's length, so hiding half of both cues costs nothing: no sum over cues.
        check(ms.EmbeddingSimilarity(), network, dims, [{0: 0.2, 1: 0.4}], with_rise=False, with_gradients=False)
        check(ms.EmbeddingSimilarity("distance"), network, dims, [{0: 3.0, 1: 4.0}], with_gradients=False)

    def test_nearness_to_a_query(self, dims: int) -> None:
        """Another image's embedding lies at (0, 4): the first cue keeps this one away from it, the second near."""
        network = lambda x: torch.stack([3 * cue(x, CUES[dims][0]), 4 * cue(x, CUES[dims][1])], 1)  # noqa: E731
        target = ms.EmbeddingSimilarity("distance", torch.tensor([0.0, 4.0]))
        # At the image the distance does not depend on the second cue, which lies on the query.
        check(target, network, dims, [{0: -3.0, 1: 2.0}], with_gradients=False)

    def test_registration(self, dims: int) -> None:
        """The moving image is perturbed, the fixed one held: half of the field follows one cue by 3 voxels."""

        def network(fixed: torch.Tensor, moving: torch.Tensor) -> torch.Tensor:
            field = torch.zeros(len(moving), dims, *SHAPES[dims], dtype=moving.dtype)
            field[:, :1, :3] = 3 * by_case(cue(moving * fixed, CUES[dims][0]), dims)
            return field

        given: dict[str, Any] = {"inputs": ms.ArgumentInputs(perturb=1), "with_gradients": False}
        check(ms.FieldSimilarity(), network, dims, [{0: 9 / SHAPES[dims][0]}], (ones(dims), ones(dims)), **given)

    def test_function(self, dims: int) -> None:
        target = ms.FunctionScore(lambda output: output["a"] - output["b"], ["contrast"])
        network = lambda x: {"a": 2 * cue(x, CUES[dims][0]), "b": cue(x, CUES[dims][1])}  # noqa: E731
        check(target, network, dims, [{0: 2.0, 1: -1.0}])
