from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from monai_saliency.errors import CaseError
from monai_saliency.targets import Case, ClassScore, RegionScore

FLAT = Case("ct_7", torch.zeros(1, 2, 3))
VOLUME = Case("ct_7", torch.zeros(1, 2, 2, 2))
LOGITS = torch.tensor([[0.0, math.log(3.0), -1.0]])


@pytest.fixture
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class TestClassScore:
    def test_softmax_by_hand(self) -> None:
        bound = ClassScore([1, 0], "softmax").bind(torch.tensor([[0.0, math.log(3.0)]]), FLAT)
        scores = bound(torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]]))
        torch.testing.assert_close(scores, torch.tensor([[0.75, 0.25], [0.2, 0.8]]))
        assert list(bound.labels) == [1, 0]

    def test_sigmoid_by_hand(self) -> None:
        bound = ClassScore(1, "sigmoid").bind(LOGITS, FLAT)
        torch.testing.assert_close(bound(LOGITS), torch.tensor([[0.75]]))

    @pytest.mark.parametrize("classes", [2, np.int64(2), (2,), np.array([2]), torch.tensor([2])])
    def test_one_class_in_many_forms(self, classes: Any) -> None:
        assert list(ClassScore(classes, "none").bind(LOGITS, FLAT).labels) == [2]
        assert RegionScore(classes, "none").channels == [2]

    def test_none_is_the_output_itself(self) -> None:
        assert torch.equal(ClassScore([2, 0], "none").bind(LOGITS, FLAT)(LOGITS), LOGITS[:, [2, 0]])

    def test_all(self) -> None:
        bound = ClassScore("all", "none").bind(LOGITS, FLAT)
        assert list(bound.labels) == [0, 1, 2]
        assert torch.equal(bound(LOGITS), LOGITS)

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
    def test_predicted_is_frozen(self, activation: str) -> None:
        """The class is the unperturbed image's, whatever the perturbed output prefers."""
        bound = ClassScore("predicted", activation).bind(LOGITS, FLAT)
        assert list(bound.labels) == [1]
        moved = torch.tensor([[5.0, 0.0, 0.0]])
        all_scores = ClassScore("all", activation).bind(LOGITS, FLAT)(moved)
        assert torch.equal(bound(moved), all_scores[:, 1:2])

    def test_describe(self) -> None:
        described = ClassScore([0], "softmax").bind(torch.tensor([[0.0, math.log(3.0)]]), FLAT).describe()
        assert described["prediction"] == 1
        assert described["probability"] == pytest.approx(0.75)

    @pytest.mark.parametrize(("logit", "prediction"), [(math.log(3.0), 1), (-math.log(3.0), 0)])
    def test_describe_one_logit(self, logit: float, prediction: int) -> None:
        described = ClassScore([0], "sigmoid").bind(torch.tensor([[logit]]), FLAT).describe()
        assert described["prediction"] == prediction
        assert described["probability"] == pytest.approx(0.75)

    def test_describe_survives_a_reused_output_buffer(self) -> None:
        """Engines may write every output into one buffer."""
        output = torch.tensor([[0.2, 0.8]])
        bound = ClassScore("predicted", "none").bind(output, FLAT)
        output.fill_(0.5)
        assert bound.describe()["probability"] == pytest.approx(0.8)

    @pytest.mark.parametrize(
        ("output", "activation"),
        [([[0.2, 0.8]], "softmax"), ([[0.2, 0.8]], "sigmoid"), ([[0.9, 0.8]], "sigmoid"), ([[0.0, 1.0]], "softmax")],
    )
    def test_warns_of_an_activation_on_probabilities(self, output: list, activation: str) -> None:
        with pytest.warns(UserWarning, match="case ct_7: .*already looks like probabilities.*activation='none'"):
            ClassScore([0], activation).bind(torch.tensor(output), FLAT)

    @pytest.mark.usefixtures("_no_warning")
    @pytest.mark.parametrize(
        ("output", "activation"),
        [
            ([[2.0, -1.0]], "softmax"),
            ([[0.2, 0.3]], "softmax"),
            ([[2.0, -1.0]], "sigmoid"),
            ([[0.5, 1.5]], "sigmoid"),
            ([[0.2, 0.8]], "none"),
        ],
    )
    def test_does_not_warn_on_logits(self, output: list, activation: str) -> None:
        ClassScore([0], activation).bind(torch.tensor(output), FLAT)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_scored_in_float32(self, dtype: torch.dtype) -> None:
        output = torch.tensor([[1.0, 3.0, 2.0]], dtype=dtype)
        scores = ClassScore("all", "softmax").bind(output, FLAT)(output)
        torch.testing.assert_close(scores, output.float().softmax(dim=1), rtol=0, atol=0)

    def test_law_9_double_stays_double(self) -> None:
        scores = ClassScore("all", "softmax").bind(LOGITS.double(), FLAT)(LOGITS.double())
        torch.testing.assert_close(scores, LOGITS.double().softmax(dim=1), rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("classes", "output", "match"),
        [
            ([3], LOGITS, r"case ct_7: class 3 is out of range: the network gives 3 classes.*\[0, 2\]"),
            ([0, -1], LOGITS, r"case ct_7: class -1 is out of range"),
            ([0], torch.zeros(1, 3, 2, 3), r"case ct_7: .*\(B, 3, 2, 3\); use RegionScore for a segmentation"),
            ([0], torch.zeros(1), r"case ct_7: ClassScore reads one row of class scores an image"),
            (
                [0],
                {"logits": LOGITS},
                "case ct_7: ClassScore reads a tensor, .* a dict; .*: output='logits' reads \\(B, 3\\)$",
            ),
            ([0], (LOGITS,), "case ct_7: ClassScore reads a tensor, .* a tuple; .*: output=0 reads \\(B, 3\\)$"),
        ],
    )
    def test_outputs_it_cannot_read(self, classes: list, output: object, match: str) -> None:
        with pytest.raises(CaseError, match=match):
            ClassScore(classes, "none").bind(output, FLAT)

    def test_softmax_of_one_channel(self) -> None:
        with pytest.raises(CaseError, match=r"case ct_7: the softmax of one channel is 1.*use activation='sigmoid'"):
            ClassScore([0], "softmax").bind(torch.zeros(1, 1), FLAT)

    @pytest.mark.parametrize(
        ("classes", "activation", "match"),
        [
            ("best", "none", "`classes` must be .*, got 'best'"),
            ([], "none", "`classes` must name at least one class"),
            ([0], "relu", r"`activation` must be one of \['none', 'sigmoid', 'softmax'\], got 'relu'"),
        ],
    )
    def test_wrong_settings(self, classes: object, activation: str, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ClassScore(classes, activation)


class TestRegionScore:
    # Two channels on a 2x3 image: channel 1 wins at three voxels.
    OUTPUT = torch.tensor([[[[1.0, 0.0, 0.0], [4.0, 2.0, 0.0]], [[0.0, 2.0, 4.0], [0.0, 0.0, 6.0]]]])
    # What a perturbed image gives: everything flipped, so that channel 1 wins elsewhere.
    MOVED = OUTPUT.flip(1)

    def test_predicted_region_of_the_highest_channel(self) -> None:
        bound = RegionScore([1, 0], "none").bind(self.OUTPUT, FLAT)
        torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[4.0, 7.0 / 3]]))

    def test_predicted_region_is_frozen(self) -> None:
        """A perturbation that moves the segmentation lowers the score, and does not move the question."""
        bound = RegionScore([1, 0], "none").bind(self.OUTPUT, FLAT)
        assert torch.equal(bound(self.MOVED), torch.zeros(1, 2))
        torch.testing.assert_close(bound(torch.cat([self.MOVED, self.OUTPUT])), torch.tensor([[0, 0], [4, 7 / 3]]))

    def test_predicted_region_of_sigmoid(self) -> None:
        """Channels overlap under a sigmoid: each has the voxels where its own probability is above one half."""
        logit = math.log(1.25)  # a probability of 5 / 9
        output = torch.tensor([[[[logit, -logit, logit], [-1.0, 0.0, -1.0]], [[logit, logit, -1.0], [-1.0] * 3]]])
        bound = RegionScore([0, 1], "sigmoid").bind(output, FLAT)
        torch.testing.assert_close(bound(output), torch.tensor([[5 / 9, 5 / 9]]))
        torch.testing.assert_close(bound(-output), torch.tensor([[4 / 9, 4 / 9]]))

    def test_softmax_by_hand(self) -> None:
        bound = RegionScore(1, "softmax").bind(self.OUTPUT, FLAT)
        expected = sum(1 / (1 + math.exp(-d)) for d in (2.0, 4.0, 6.0)) / 3
        assert float(bound(self.OUTPUT)) == pytest.approx(expected)
        assert float(bound(self.MOVED)) == pytest.approx(1 - expected)

    def test_all_voxels(self) -> None:
        bound = RegionScore([0, 1], "none", region="all").bind(self.OUTPUT, FLAT)
        torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[7 / 6, 2.0]]))
        expected = self.OUTPUT.double().softmax(1).mean((2, 3)).float()
        torch.testing.assert_close(RegionScore([0, 1], "softmax", "all").bind(self.OUTPUT, FLAT)(self.OUTPUT), expected)

    @pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), (1, 1, 2, 3)])
    def test_label_in_its_three_shapes(self, shape: tuple[int, ...]) -> None:
        label = torch.tensor([[0, 5, 0], [1, 0, 0]]).reshape(shape)
        bound = RegionScore([0, 1], "none", region=label).bind(self.OUTPUT, FLAT)
        assert torch.equal(bound(self.OUTPUT), torch.tensor([[2.0, 1.0]]))

    def test_label_of_a_batch_is_picked_by_image(self) -> None:
        labels = torch.zeros(3, 1, 2, 3)
        for index, voxel in enumerate([(0, 1), (1, 2), (0, 2)]):
            labels[index, 0][voxel] = 1
        target = RegionScore(1, "none", region=labels)
        scores = [float(target.bind(self.OUTPUT, Case("ct", FLAT.image, i))(self.OUTPUT)) for i in range(3)]
        assert scores == [2.0, 6.0, 4.0]
        with pytest.raises(CaseError, match="case ct: `region` holds 3 label maps, one an image"):
            target.bind(self.OUTPUT, Case("ct", FLAT.image, 3))

    def test_3d_by_hand(self) -> None:
        output = torch.zeros(1, 2, 2, 2, 2)
        output[0, 1, 0] = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        assert float(RegionScore(1, "none").bind(output, VOLUME)(output)) == 3.0

    def test_half_precision_is_scored_in_float32(self) -> None:
        """The mean of 100 000 half-precision values would be rounded to three digits."""
        output = torch.full((1, 2, 250, 400), 0.1, dtype=torch.float16)
        case = Case("ct", torch.zeros(1, 250, 400))
        score = RegionScore(1, "none", region="all").bind(output, case)(output)
        assert float(score) == pytest.approx(float(output[0, 0, 0, 0]), rel=1e-6)

    def test_describe(self) -> None:
        described = RegionScore([0, 1], "none").bind(self.OUTPUT, FLAT).describe()
        assert described == {"prediction": 1, "probability": 4.0}

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"channel": 2}, r"case ct_7: channel 2 is out of range: the network gives 2 channels.*\[0, 1\]"),
            ({"channel": 0, "region": torch.zeros(2, 3)}, "case ct_7: the given region of channel 0 is empty"),
            ({"channel": 0, "region": torch.ones(3, 3)}, r"case ct_7: `region` has shape \(3, 3\).*\(2, 3\)"),
            ({"channel": 0, "region": torch.ones(2, 2, 3)}, r"case ct_7: `region` has shape \(2, 2, 3\)"),
        ],
    )
    def test_settings_that_do_not_fit_the_case(self, settings: dict, match: str) -> None:
        with pytest.raises(CaseError, match=match):
            RegionScore(activation="none", **settings).bind(self.OUTPUT, FLAT)

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    def test_empty_predicted_region(self, activation: str) -> None:
        output = torch.stack([torch.full((2, 3), 3.0), torch.full((2, 3), -3.0)])[None]
        with pytest.raises(CaseError, match=r"case ct_7: the predicted region.* of channel 1 is empty.*region='all'"):
            RegionScore(1, activation).bind(output, FLAT)

    @pytest.mark.parametrize(
        ("output", "activation", "match"),
        [
            (LOGITS, "none", r"case ct_7: RegionScore reads a segmentation.*\(B, 3\); use ClassScore for a classifier"),
            (torch.zeros(1, 2, 2, 2, 2), "none", r"case ct_7: RegionScore reads a segmentation"),
            (
                [OUTPUT],
                "none",
                "case ct_7: RegionScore reads a tensor, .* a list; .*: output=0 reads \\(B, 2, 2, 3\\)$",
            ),
            (OUTPUT[:, :1], "softmax", "case ct_7: the softmax of one channel is 1"),
            (OUTPUT[:, :1], "none", "case ct_7: with one output channel.*the predicted region is not defined"),
        ],
    )
    def test_outputs_it_cannot_read(self, output: object, activation: str, match: str) -> None:
        with pytest.raises(CaseError, match=match):
            RegionScore(0, activation).bind(output, FLAT)

    def test_warns_of_an_activation_on_probabilities(self) -> None:
        with pytest.warns(UserWarning, match="case ct_7: .*already looks like probabilities"):
            RegionScore(0, "softmax").bind(self.OUTPUT.softmax(1), FLAT)

    @pytest.mark.usefixtures("_no_warning")
    def test_does_not_warn_on_logits(self) -> None:
        RegionScore(0, "softmax").bind(self.OUTPUT, FLAT)

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match=r"`region` must be 'predicted', .* or a label tensor, got 'liver'"):
            RegionScore(0, "none", region="liver")
        with pytest.raises(ValueError, match="`activation` must be one of"):
            RegionScore(0, "relu")
