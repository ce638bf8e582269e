import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.targets import FLAT, LOGITS
from helpers.tolerances import SINGLE, assert_close, assert_same_bits
from scipy.spatial.distance import cdist

import monai_saliency as ms
from monai_saliency.errors import NothingToExplain
from monai_saliency.targets.base import Target


class TestClassScore:
    def test_softmax_by_hand(self) -> None:
        bound = ms.ClassScore([1, 0], "softmax").bind(torch.tensor([[0.0, math.log(3.0)]]), FLAT)
        scores = bound(torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]]))
        assert_close(scores, torch.tensor([[3.0, 1 / 3], [0.25, 4.0]]).log())
        plain = ms.ClassScore([1, 0], "softmax", "probability").bind(torch.tensor([[0.0, math.log(3.0)]]), FLAT)
        scores = plain(torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]]))
        assert_close(scores, torch.tensor([[0.75, 0.25], [0.2, 0.8]]))
        assert list(bound.labels) == [1, 0]

    def test_sigmoid_by_hand(self) -> None:
        bound = ms.ClassScore(1, "sigmoid").bind(LOGITS, FLAT)
        assert_close(bound(LOGITS), math.log(3.0))
        assert_close(ms.ClassScore(1, "sigmoid", "probability").bind(LOGITS, FLAT)(LOGITS), 0.75)

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
    def test_predicted_is_frozen(self, activation: str) -> None:
        """The class is the unperturbed image's, whatever the perturbed output prefers."""
        bound = ms.ClassScore("predicted", activation).bind(LOGITS, FLAT)
        assert list(bound.labels) == [1]
        moved = torch.tensor([[5.0, 0.0, 0.0]])
        all_scores = ms.ClassScore("all", activation).bind(LOGITS, FLAT)(moved)
        assert_same_bits(bound(moved), all_scores[:, 1:2])

    def test_describe(self) -> None:
        described = ms.ClassScore([0], "softmax").bind(torch.tensor([[0.0, math.log(3.0)]]), FLAT).describe()
        assert described["prediction"] == 1
        assert_close(described["probability"], 0.75, within=SINGLE)

    @pytest.mark.parametrize(("score", "expected"), [(0.7, {"prediction": 1}), (0.3, {}), (3.0, {"prediction": 1})])
    def test_one_number_that_may_be_a_logit_or_a_probability(self, score: float, expected: dict[str, int]) -> None:
        """A logit of 0.3 is class 1, a probability of 0.3 class 0."""
        assert ms.ClassScore([0], "none").bind(torch.tensor([[score]]), FLAT).describe() == expected

    @pytest.mark.parametrize(("output", "activation"), [([[0.2, 0.8]], "softmax"), ([[0.9, 0.8]], "sigmoid")])
    def test_warns_of_an_activation_on_probabilities(self, output: list, activation: str) -> None:
        with pytest.warns(UserWarning, match=".*already looks like probabilities.*activation='none'"):
            ms.ClassScore([0], activation).bind(torch.tensor(output), FLAT)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_law_9_half_precision_is_scored_in_float32_and_double_stays_double(self, dtype: torch.dtype) -> None:
        output = LOGITS.to(dtype)
        expected = (output if dtype == torch.float64 else output.float()).softmax(dim=1)
        assert_close(ms.ClassScore("all", "softmax", "probability").bind(output, FLAT)(output), expected)
        log_odds = ms.ClassScore("all", "softmax").bind(output, FLAT)(output)
        assert_close(log_odds, expected.logit(), within=SINGLE)
        assert log_odds.dtype == expected.dtype

    @pytest.mark.parametrize(
        ("classes", "output", "match"),
        [
            ([3], LOGITS, r"class 3 is out of range: the network gives 3 classes.*\[0, 2\]"),
            (
                [0],
                torch.zeros(1, 3, 2, 3),
                r".*\(B, 3, 2, 3\); for a segmenter give target=ms.RegionScore.*--target",
            ),
            ([0], torch.zeros(1), r"ClassScore reads one row of class scores per image"),
            ([0], {"logits": LOGITS}, "ClassScore reads a tensor, .* a dict; .*: output='logits' reads \\(B, 3\\) "),
        ],
    )
    def test_outputs_it_cannot_read(self, classes: list, output: object, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ms.ClassScore(classes, "none").bind(output, FLAT)


class TestPositiveClasses:
    OUTPUT = torch.tensor([[0.1, -3.0, 2.0, 0.0]])

    def test_all_above_one_half(self) -> None:
        bound = ms.ClassScore("positive", "sigmoid").bind(self.OUTPUT, FLAT)
        assert list(bound.labels) == [0, 2]
        assert_close(bound(-self.OUTPUT), -self.OUTPUT[:, [0, 2]])

    def test_errors(self) -> None:
        with pytest.raises(NothingToExplain, match=r"no class scores above 0.5 \(the highest: 0.119\)"):
            ms.ClassScore("positive", "sigmoid").bind(torch.tensor([[-3.0, -2.0]]), FLAT)
        with pytest.raises(ValueError, match=r"compares probabilities .* lie in \[-3, 2\]; use activation='sigmoid'"):
            ms.ClassScore("positive", "none").bind(self.OUTPUT, FLAT)


def test_an_image_with_nan_is_named_as_the_cause() -> None:
    image = torch.zeros(1, 4, 5)
    image[0, 1, 2], image[0, 3, 3] = float("nan"), float("inf")
    output = torch.tensor([[0.0, float("nan")]])
    with pytest.raises(ValueError, match="NaN or infinite, and so is the image that it gets, in 2 of 20 values"):
        ms.ClassScore(0, "none").bind(output, ms.Case("ct_2", image))
    with pytest.raises(ValueError, match="the image is not; check the scan"):
        ms.ClassScore(0, "none").bind(output, ms.Case("ct_2", torch.zeros(1, 4, 5)))


class TestRegressionScore:
    def test_values_and_names(self) -> None:
        output = torch.tensor([[61.5, 1200.0, -3.0]])
        bound = ms.RegressionScore([2, 0], ["tilt (degrees)", "age (years)"]).bind(output, FLAT)
        assert list(bound.labels) == ["tilt (degrees)", "age (years)"]
        assert_same_bits(bound(output * 2), torch.tensor([[-6.0, 123.0]]))
        assert bound.describe() == {"prediction": "-3 61.5"}
        assert list(ms.RegressionScore("all").bind(output, FLAT).labels) == ["value 0", "value 1", "value 2"]

    @pytest.mark.parametrize("shape", [(2,), (2, 1)])
    def test_one_number_an_image(self, shape: tuple[int, ...]) -> None:
        output = torch.tensor([3.0, 5.0]).reshape(shape)
        assert_same_bits(ms.RegressionScore().bind(output[:1], FLAT)(output), torch.tensor([[3.0], [5.0]]))

    def test_coordinates_of_landmarks(self) -> None:
        output = torch.arange(12.0).reshape(2, 3, 2)
        assert_same_bits(ms.RegressionScore([5, 0]).bind(output[:1], FLAT)(output), torch.tensor([[5.0, 0], [11, 6]]))

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"value 3 is out of range: the network gives 3 values.*\[0, 2\]"):
            ms.RegressionScore(3).bind(LOGITS, FLAT)
        with pytest.raises(ValueError, match="`names` has 1 entries for 2 values"):
            ms.RegressionScore([0, 1], ["age"]).bind(LOGITS, FLAT)
        with pytest.raises(ValueError, match=r"RegressionScore .* a dict; .*output='age' reads \(B, 3\)"):
            ms.RegressionScore(0).bind({"age": LOGITS}, FLAT)
        with pytest.raises(ValueError, match="`values` must be a list of indices or 'all', got 'age'"):
            ms.RegressionScore("age")


class TestFunctionScore:
    def test_one_score_and_several(self) -> None:
        bound = ms.FunctionScore(lambda output: output.sum(1)).bind(LOGITS, FLAT)
        assert bound.labels == ["score"]
        assert_close(bound(LOGITS.expand(2, -1)), LOGITS.sum().expand(2, 1))
        assert ms.FunctionScore(lambda output: output).bind(LOGITS, FLAT).labels == ["score 1", "score 2", "score 3"]
        assert ms.FunctionScore(lambda output: output, ["a", "b", "c"]).bind(LOGITS, FLAT).labels == ["a", "b", "c"]

    def test_of_a_list_by_image(self) -> None:
        counts = ms.FunctionScore(lambda images: torch.tensor([float(len(image["boxes"])) for image in images]))
        output = [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 5)]
        assert_same_bits(counts.bind(output[:1], FLAT)(output), torch.tensor([[2.0], [0.0], [5.0]]))

    @pytest.mark.parametrize(
        ("function", "match"),
        [
            (
                lambda output: output.sum(),
                r"\(B, K\), one row per image, such as output\[:, 1\]; it gave shape \(\) for 1 images",
            ),
            (lambda output: output[0], r"it gave shape \(3,\) for 1 images"),
            (lambda output: output[:, None, :], r"it gave shape \(1, 1, 3\)"),
            (lambda output: 0.5, "it gave a float"),
        ],
    )
    def test_shapes_that_are_no_scores(self, function: Any, match: str) -> None:
        with pytest.raises(ValueError, match=f"`function` must give a tensor .*{match}"):
            ms.FunctionScore(function).bind(LOGITS, FLAT)


class TestEmbeddingSimilarity:
    OWN = torch.tensor([[3.0, 4.0]])

    def test_cosine_by_hand(self) -> None:
        bound = ms.EmbeddingSimilarity().bind(self.OWN, FLAT)
        scores = bound(torch.tensor([[6.0, 8.0], [4.0, -3.0], [-3.0, -4.0], [1.0, 0.0]]))
        assert_close(scores, torch.tensor([[1.0], [0.0], [-1.0], [0.6]]))
        assert list(bound.labels) == ["similarity to itself"]

    @pytest.mark.parametrize("measure", ["cosine", "distance"])
    def test_given_references(self, measure: str) -> None:
        queries = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        bound = ms.EmbeddingSimilarity(measure, queries).bind(self.OWN, FLAT)
        assert bound.labels == ["similarity to reference 1", "similarity to reference 2"]
        expected = [[0.6, 1.0]] if measure == "cosine" else [[-math.sqrt(20), 0.0]]
        assert_close(bound(self.OWN), torch.tensor(expected))
        one = ms.EmbeddingSimilarity(measure, queries[0]).bind(self.OWN, FLAT)
        assert_close(one(self.OWN), torch.tensor(expected)[:, :1])

    def test_the_distances_are_those_of_scipy(self) -> None:
        generator = np.random.default_rng(0)
        own, queries, perturbed = (generator.normal(size=size) for size in ((1, 6), (3, 6), (10, 6)))
        for measure, distance, unit, least in [
            ("cosine", "cosine", "-1 to 1", 1.0),
            ("distance", "euclidean", "network output", 0.0),
        ]:
            bound = ms.EmbeddingSimilarity(measure, torch.from_numpy(queries)).bind(torch.from_numpy(own), FLAT)
            similarity = bound(torch.from_numpy(perturbed)).numpy()
            assert_close(similarity, least - cdist(perturbed, queries, distance))
            assert bound.quantity().unit == unit
            assert measure in bound.quantity().words

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"`reference` has shape \(3,\), an embedding \(2,\)"):
            ms.EmbeddingSimilarity(reference=torch.ones(3)).bind(self.OWN, FLAT)
        with pytest.raises(ValueError, match=r"`measure` must be one of \['cosine', 'distance'\], got 'l2'"):
            ms.EmbeddingSimilarity("l2")


class TestFieldSimilarity:
    FIELD = torch.zeros(1, 2, 2, 3)

    @staticmethod
    def moved() -> torch.Tensor:
        """Voxel (0, 0) moved by (3, 4), voxel (1, 2) by (0, 6)."""
        field = torch.zeros(1, 2, 2, 3)
        field[0, :, 0, 0] = torch.tensor([3.0, 4.0])
        field[0, 1, 1, 2] = 6.0
        return field

    def test_mean_distance(self) -> None:
        scores = ms.FieldSimilarity().bind(self.FIELD, FLAT)(torch.cat([self.FIELD, self.moved()]))
        assert_close(scores, torch.tensor([[0.0], [-(5 + 6) / 6]]))


@pytest.mark.parametrize("target", [ms.FieldSimilarity(), ms.EmbeddingSimilarity("distance")])
def test_a_score_that_is_the_same_for_every_image_has_something_else_to_vouch_for_it(target: Target) -> None:
    """Stored scores of other weights are noticed by it, and not lost by rounding."""
    case = ms.Case("ct_7", torch.zeros(1, 4, 5))
    output = torch.rand(1, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    one, other, rounded = (target.bind(each, case) for each in (output, output.flip(3), output * (1 + 1e-7)))
    assert one(output).tolist() == other(output.flip(3)).tolist()
    scale = float(one.vouch.abs().max())
    assert float((one.vouch - other.vouch).abs().max()) > 1e-3 * scale
    assert float((one.vouch - rounded.vouch).abs().max()) < 1e-5 * scale
