from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from monai.losses import DiceLoss
from xaitk_saliency.impls.gen_descriptor_sim_sal.similarity_scoring import SimilarityScoring

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.targets import (
    ClassScore,
    DiceScore,
    EmbeddingSimilarity,
    FieldSimilarity,
    FunctionScore,
    RegionScore,
    RegressionScore,
)

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

    def test_logits_are_no_probabilities(self) -> None:
        assert ClassScore([0], "none").bind(torch.tensor([[1.5, -2.0]]), FLAT).describe() == {"prediction": 0}
        assert ClassScore([0], "none").bind(torch.tensor([[-0.5]]), FLAT).describe() == {"prediction": 0}

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
        """A segmentation has no one prediction."""
        assert RegionScore([0, 1], "none").bind(self.OUTPUT, FLAT).describe() == {}

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


class TestPositiveClasses:
    OUTPUT = torch.tensor([[0.1, -3.0, 2.0, 0.0]])

    def test_all_above_one_half(self) -> None:
        bound = ClassScore("positive", "sigmoid").bind(self.OUTPUT, FLAT)
        assert list(bound.labels) == [0, 2]
        torch.testing.assert_close(bound(-self.OUTPUT), torch.sigmoid(-self.OUTPUT)[:, [0, 2]])

    def test_of_a_network_that_ends_in_a_sigmoid(self) -> None:
        output = torch.tensor([[0.4, 0.6, 0.5, 0.7]])
        assert list(ClassScore("positive", "none").bind(output, FLAT).labels) == [1, 3]

    def test_errors(self) -> None:
        with pytest.raises(CaseError, match=r"case ct_7: no class scores above one half \(the highest: 0.119\)"):
            ClassScore("positive", "sigmoid").bind(torch.tensor([[-3.0, -2.0]]), FLAT)
        with pytest.raises(CaseError, match=r"compares probabilities .* lie in \[-3, 2\]; use activation='sigmoid'"):
            ClassScore("positive", "none").bind(self.OUTPUT, FLAT)


class TestRegionsOfLabels:
    """Channels on a 2x3 image, and a label map of two organs, the values 1 and 4."""

    OUTPUT = TestRegionScore.OUTPUT
    LABELS = torch.tensor([[[0, 1, 0], [4, 4, 1]]])
    CASE = Case("ct_7", FLAT.image, labels=LABELS)

    def test_by_default_a_channel_has_the_label_of_its_index(self) -> None:
        bound = RegionScore([1, 0], "none", "label").bind(self.OUTPUT, self.CASE)
        torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[4.0, 0.5]]))

    def test_named_values(self) -> None:
        bound = RegionScore([1, 0], "none", "label", label_values=[4, (1, 4)]).bind(self.OUTPUT, self.CASE)
        torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[0.0, 1.5]]))

    def test_one_channel_has_all_that_is_labelled(self) -> None:
        output = self.OUTPUT[:, :1]
        torch.testing.assert_close(
            RegionScore(0, "none", "label").bind(output, self.CASE)(output), torch.tensor([[1.5]])
        )

    def test_false_positives(self) -> None:
        """Channel 1 wins at (0, 1), (0, 2) and (1, 2), and the label has the first and the last of these."""
        bound = RegionScore(1, "none", "false_positive").bind(self.OUTPUT, self.CASE)
        torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[4.0]]))
        assert list(bound.labels) == [1]
        with pytest.raises(CaseError, match="the region that is predicted but not in the label of channel 1 is empty"):
            RegionScore(1, "none", "false_positive").bind(
                self.OUTPUT, Case("ct_7", FLAT.image, labels=self.LABELS * 0 + 1)
            )

    def test_labels_that_do_not_fit(self) -> None:
        target = RegionScore(1, "none", "label")
        with pytest.raises(CaseError, match="case ct_7: the region is taken from the label map, and the case has none"):
            target.bind(self.OUTPUT, FLAT)
        with pytest.raises(CaseError, match=r"label map has spatial shape \(2, 2\), the image \(2, 3\)"):
            target.bind(self.OUTPUT, Case("ct_7", FLAT.image, labels=self.LABELS[..., :2]))
        with pytest.raises(CaseError, match="case ct_7: the label's region of channel 1 is empty"):
            target.bind(self.OUTPUT, Case("ct_7", FLAT.image, labels=self.LABELS * 0))

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="`label_values` must have one entry for each channel"):
            RegionScore([0, 1], "none", "label", label_values=[1])
        with pytest.raises(ValueError, match="`label_values` must have one entry for each channel"):
            RegionScore("predicted", "none", "label", label_values=[1])


class TestCoarserOutput:
    """The image has 8x8 voxels, the output 4x4: voxel (i, j) of the output is nearest to (2i + 1, 2j + 1)."""

    OUTPUT = torch.arange(16.0).reshape(1, 1, 4, 4)
    IMAGE = torch.zeros(1, 8, 8)

    def test_regions_on_the_images_grid(self) -> None:
        region = torch.zeros(8, 8)
        region[2:4, 2:6] = 1
        for shape in ((8, 8), (1, 8, 8), (1, 1, 8, 8)):
            bound = RegionScore(0, "none", region.reshape(shape)).bind(self.OUTPUT, Case("ct", self.IMAGE))
            torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[5.5]]))
        case = Case("ct", self.IMAGE, labels=region[None])
        torch.testing.assert_close(
            RegionScore(0, "none", "label").bind(self.OUTPUT, case)(self.OUTPUT), torch.tensor([[5.5]])
        )

    def test_a_region_that_vanishes(self) -> None:
        region = torch.zeros(8, 8)
        region[2, 2] = 1
        with pytest.raises(
            CaseError, match=r"case ct: the given region has 1 voxels .*\(8, 8\) and vanishes .*\(4, 4\)"
        ):
            RegionScore(0, "none", region).bind(self.OUTPUT, Case("ct", self.IMAGE))
        with pytest.raises(CaseError, match=r"case ct: the label of value 3 .* vanishes"):
            RegionScore(0, "none", "label", label_values=[3]).bind(
                self.OUTPUT, Case("ct", self.IMAGE, labels=3 * region[None])
            )

    def test_neither_grid(self) -> None:
        with pytest.raises(CaseError, match=r"shape \(6, 6\).*\(4, 4\) and the image \(8, 8\); give .* one of these"):
            RegionScore(0, "none", torch.ones(6, 6)).bind(self.OUTPUT, Case("ct", self.IMAGE))


class TestComponents:
    """A blob of three voxels that touch at corners, one of two, and one of one."""

    BLOBS = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 2, 2], [1, 0, 0, 0, 0], [0, 0, 0, 0, 3]])
    CASE = Case("ct_7", torch.zeros(1, 4, 5), labels=BLOBS[None])

    def logits(self) -> torch.Tensor:
        return torch.where(self.BLOBS > 0, self.BLOBS, -1)[None, None].double()

    def test_largest_first_each_with_its_own_mean(self) -> None:
        bound = RegionScore(0, "sigmoid", components=5).bind(self.logits(), self.CASE)
        assert bound.labels == [f"component {i} of class 0" for i in (1, 2, 3)]
        torch.testing.assert_close(bound(self.logits()), torch.tensor([[1.0, 2.0, 3.0]]).double().sigmoid())

    @pytest.mark.parametrize("settings", [{"components": 2}, {"components": 9, "min_size": 2}])
    def test_limit_and_least_size(self, settings: dict) -> None:
        bound = RegionScore(0, "sigmoid", **settings).bind(self.logits(), self.CASE)
        torch.testing.assert_close(bound(self.logits()), torch.tensor([[1.0, 2.0]]).double().sigmoid())

    def test_of_the_label_and_of_several_channels(self) -> None:
        """Each channel's own components, in the order of the channels."""
        output = torch.cat([-self.logits(), self.logits()], 1)
        target = RegionScore([1, 0], "none", "label", label_values=[(1, 3), 2], components=3)
        bound = target.bind(output, self.CASE)
        assert bound.labels == ["component 1 of class 1", "component 2 of class 1", "component 1 of class 0"]
        torch.testing.assert_close(bound(output), torch.tensor([[1.0, 3.0, -2.0]]).double())

    def test_in_3d(self) -> None:
        """Voxels that touch at a corner only are one component."""
        output = -torch.ones(1, 1, 4, 4, 4)
        output[0, 0, [0, 1, 3], [0, 1, 3], [0, 1, 3]] = torch.tensor([1.0, 3.0, 5.0])
        bound = RegionScore(0, "sigmoid", components=4).bind(output, Case("ct", output[0]))
        flat = output.flatten()[[0, 21, 63]].sigmoid()
        torch.testing.assert_close(bound(output), torch.stack([flat[:2].mean(), flat[2]])[None])

    def test_all_too_small(self) -> None:
        with pytest.raises(CaseError, match=r"case ct_7: no component has 4 voxels.*lower `min_size`"):
            RegionScore(0, "sigmoid", components=5, min_size=4).bind(self.logits(), self.CASE)

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="`components` are those of a region"):
            RegionScore(0, "none", "all", components=2)
        with pytest.raises(ValueError, match="`components` must be a whole number of at least 1"):
            RegionScore(0, "none", components=0)
        with pytest.raises(ValueError, match="`min_size` must be a whole number of at least 1"):
            RegionScore(0, "none", components=1, min_size=0)


class TestPredictedChannels:
    def test_all_that_have_a_voxel_but_the_background(self) -> None:
        output = torch.zeros(1, 4, 2, 3)
        output[0, 0, 0] = output[0, 3, 1] = 2.0
        assert list(RegionScore("predicted", "softmax").bind(output, FLAT).labels) == [3]
        assert list(DiceScore("predicted", "sigmoid").bind(output, FLAT).labels) == [0, 3]

    def test_none(self) -> None:
        output = torch.full((1, 3, 2, 3), -1.0)
        with pytest.raises(CaseError, match=r"segments nothing: .* each of its 3 channels"):
            RegionScore("predicted", "softmax").bind(output, FLAT)
        with pytest.raises(CaseError, match=r"segments nothing: .* each of its 3 channels"):
            RegionScore("predicted", "sigmoid").bind(output, FLAT)

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="`channel` must be an index, several, or 'predicted', got 'all'"):
            RegionScore("all", "softmax")


class TestDiceScore:
    def test_by_hand(self) -> None:
        """Three voxels of probability 1, 0.5 and 0 outside of a region of two voxels of 1: 2 * 1.5 / (1.5 + 2)."""
        reference = torch.tensor([[[[0.9, 0.9, 0.1], [0.1, 0.1, 0.1]]]]).logit()
        moved = torch.tensor([[[[1.0, 0.5, 0.0], [0.0, 0.0, 0.5]]]]).double()
        bound = DiceScore(0, "sigmoid", smooth=0).bind(reference, FLAT)
        scores = bound(torch.cat([moved.logit(), torch.full_like(moved, -torch.inf)]))
        torch.testing.assert_close(scores, torch.tensor([[3 / 4], [0.0]]).double())

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("smooth", [1e-5, 1.0])
    def test_is_one_less_the_loss_of_monai(self, activation: str, smooth: float) -> None:
        generator = torch.Generator().manual_seed(0)
        reference, output = torch.randn(2, 1, 3, 5, 4, 6, generator=generator, dtype=torch.float64)
        case = Case("ct", torch.zeros(1, 5, 4, 6))
        scores = DiceScore([2, 0], activation, smooth=smooth).bind(reference, case)(output)
        if activation == "softmax":
            region = torch.nn.functional.one_hot(reference.argmax(1), 3).permute(0, 4, 1, 2, 3)
        else:
            region = reference > 0
        loss = DiceLoss(smooth_nr=smooth, smooth_dr=smooth, reduction="none", **{activation: True})
        expected = 1 - loss(output, region.double()).flatten()[None, [2, 0]]
        torch.testing.assert_close(scores, expected)

    def test_with_the_label(self) -> None:
        output = TestRegionScore.OUTPUT.softmax(1)
        bound = DiceScore(1, "none", "label", smooth=0).bind(output, TestRegionsOfLabels.CASE)
        inside = output[0, 1, [0, 1], [1, 2]].sum()
        torch.testing.assert_close(bound(output), (2 * inside / (output[0, 1].sum() + 2)).reshape(1, 1))

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="`smooth` must be at least 0, got -1"):
            DiceScore(1, "none", smooth=-1)
        with pytest.raises(ValueError, match="`region` must be 'predicted', 'label' or a label tensor, got 'all'"):
            DiceScore(1, "none", "all")


class TestRegressionScore:
    def test_values_and_names(self) -> None:
        output = torch.tensor([[61.5, 1200.0, -3.0]])
        bound = RegressionScore([2, 0], ["tilt (degrees)", "age (years)"]).bind(output, FLAT)
        assert list(bound.labels) == ["tilt (degrees)", "age (years)"]
        assert torch.equal(bound(output * 2), torch.tensor([[-6.0, 123.0]]))
        assert bound.describe() == {"prediction": "-3 61.5"}
        assert list(RegressionScore("all").bind(output, FLAT).labels) == ["value 0", "value 1", "value 2"]

    @pytest.mark.parametrize("shape", [(2,), (2, 1)])
    def test_one_number_an_image(self, shape: tuple[int, ...]) -> None:
        output = torch.tensor([3.0, 5.0]).reshape(shape)
        assert torch.equal(RegressionScore().bind(output[:1], FLAT)(output), torch.tensor([[3.0], [5.0]]))

    def test_coordinates_of_landmarks(self) -> None:
        output = torch.arange(12.0).reshape(2, 3, 2)
        assert torch.equal(RegressionScore([5, 0]).bind(output[:1], FLAT)(output), torch.tensor([[5.0, 0], [11, 6]]))

    def test_errors(self) -> None:
        with pytest.raises(
            CaseError, match=r"case ct_7: value 3 is out of range: the network gives 3 values.*\[0, 2\]"
        ):
            RegressionScore(3).bind(LOGITS, FLAT)
        with pytest.raises(CaseError, match="case ct_7: `names` has 1 entries for 2 values"):
            RegressionScore([0, 1], ["age"]).bind(LOGITS, FLAT)
        with pytest.raises(CaseError, match=r"case ct_7: RegressionScore .* a dict; .*output='age' reads \(B, 3\)"):
            RegressionScore(0).bind({"age": LOGITS}, FLAT)
        with pytest.raises(ValueError, match="`values` must be a list of indices or 'all', got 'age'"):
            RegressionScore("age")


class TestEmbeddingSimilarity:
    OWN = torch.tensor([[3.0, 4.0]])

    def test_cosine_by_hand(self) -> None:
        bound = EmbeddingSimilarity().bind(self.OWN, FLAT)
        scores = bound(torch.tensor([[6.0, 8.0], [4.0, -3.0], [-3.0, -4.0], [1.0, 0.0]]))
        torch.testing.assert_close(scores, torch.tensor([[1.0], [0.0], [-1.0], [0.6]]))
        assert list(bound.labels) == ["similarity to itself"]

    def test_distance_by_hand(self) -> None:
        bound = EmbeddingSimilarity("distance").bind(self.OWN, FLAT)
        torch.testing.assert_close(bound(torch.tensor([[3.0, 4.0], [0.0, 0.0]])), torch.tensor([[0.0], [-5.0]]))

    def test_near_vectors_keep_their_distance(self) -> None:
        own = torch.full((1, 1000), 100.0)
        moved = own.clone()
        moved[0, 0] += 1 / 64
        assert float(EmbeddingSimilarity("distance").bind(own, FLAT)(moved)) == -1 / 64

    @pytest.mark.parametrize("measure", ["cosine", "distance"])
    def test_given_references(self, measure: str) -> None:
        queries = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        bound = EmbeddingSimilarity(measure, queries).bind(self.OWN, FLAT)
        assert bound.labels == ["similarity to reference 1", "similarity to reference 2"]
        expected = [[0.6, 1.0]] if measure == "cosine" else [[-math.sqrt(20), 0.0]]
        torch.testing.assert_close(bound(self.OWN), torch.tensor(expected))
        one = EmbeddingSimilarity(measure, queries[0]).bind(self.OWN, FLAT)
        torch.testing.assert_close(one(self.OWN), torch.tensor(expected)[:, :1])

    def test_survives_a_reused_output_buffer(self) -> None:
        own = self.OWN.clone()
        bound = EmbeddingSimilarity("distance").bind(own, FLAT)
        own.zero_()
        assert float(bound(own)) == -5.0

    def test_agrees_with_xaitk_saliency(self) -> None:
        """Its SBSM clips what becomes more similar and scales each map; one-voxel masks show the scores."""
        generator = np.random.default_rng(0)
        own, queries, perturbed = (generator.normal(size=size) for size in ((1, 6), (2, 6), (10, 6)))
        masks = 1 - np.eye(10).reshape(10, 2, 5)
        theirs = SimilarityScoring("euclidean").generate(own[0], queries, perturbed, masks).reshape(2, 10)
        bound = EmbeddingSimilarity("distance", torch.from_numpy(queries)).bind(torch.from_numpy(own), FLAT)
        drop = (bound(torch.from_numpy(own)) - bound(torch.from_numpy(perturbed))).clamp(min=0).T.numpy()
        np.testing.assert_allclose(drop / drop.max(axis=1, keepdims=True), theirs, atol=1e-12)

    def test_errors(self) -> None:
        with pytest.raises(CaseError, match=r"case ct_7: `reference` has shape \(3,\), an embedding \(2,\)"):
            EmbeddingSimilarity(reference=torch.ones(3)).bind(self.OWN, FLAT)
        with pytest.raises(ValueError, match=r"`measure` must be one of \['cosine', 'distance'\], got 'l2'"):
            EmbeddingSimilarity("l2")


class TestFieldSimilarity:
    FIELD = torch.zeros(1, 2, 2, 3)

    @staticmethod
    def moved() -> torch.Tensor:
        """Voxel (0, 0) moved by (3, 4), voxel (1, 2) by (0, 6)."""
        field = torch.zeros(1, 2, 2, 3)
        field[0, :, 0, 0] = torch.tensor([3.0, 4.0])
        field[0, 1, 1, 2] = 6.0
        return field

    def test_mean_distance_in_voxels(self) -> None:
        bound = FieldSimilarity().bind(self.FIELD, FLAT)
        torch.testing.assert_close(
            bound(torch.cat([self.FIELD, self.moved()])), torch.tensor([[0.0], [-(5.0 + 6.0) / 6]])
        )

    def test_inside_of_a_region(self) -> None:
        region = torch.tensor([[0, 0, 0], [0, 2, 2]])
        for target, case in (
            (FieldSimilarity(region), FLAT),
            (FieldSimilarity("label"), Case("ct", FLAT.image, labels=region[None])),
        ):
            torch.testing.assert_close(target.bind(self.FIELD, case)(self.moved()), torch.tensor([[-3.0]]))

    def test_errors(self) -> None:
        with pytest.raises(CaseError, match=r"case ct_7: FieldSimilarity reads a displacement field of shape"):
            FieldSimilarity().bind(LOGITS, FLAT)
        with pytest.raises(CaseError, match="case ct_7: the region is empty"):
            FieldSimilarity(torch.zeros(2, 3)).bind(self.FIELD, FLAT)
        with pytest.raises(ValueError, match=r"`region` must be one of \['all', 'label'\]"):
            FieldSimilarity("predicted")


class TestFunctionScore:
    def test_one_score_and_several(self) -> None:
        bound = FunctionScore(lambda output: output.sum(1)).bind(LOGITS, FLAT)
        assert bound.labels == ["score"]
        torch.testing.assert_close(bound(LOGITS.expand(2, -1)), LOGITS.sum().expand(2, 1))
        assert FunctionScore(lambda output: output).bind(LOGITS, FLAT).labels == ["score 1", "score 2", "score 3"]
        assert FunctionScore(lambda output: output, ["a", "b", "c"]).bind(LOGITS, FLAT).labels == ["a", "b", "c"]

    def test_of_a_list_by_image(self) -> None:
        counts = FunctionScore(lambda images: torch.tensor([float(len(image["boxes"])) for image in images]))
        output = [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 5)]
        assert torch.equal(counts.bind(output[:1], FLAT)(output), torch.tensor([[2.0], [0.0], [5.0]]))

    @pytest.mark.parametrize(
        ("function", "match"),
        [
            (lambda output: output.sum(), r"\(B, K\), one row an image; it gave shape \(\) for 1 images"),
            (lambda output: output[0], r"it gave shape \(3,\) for 1 images"),
            (lambda output: output[:, None, :], r"it gave shape \(1, 1, 3\)"),
            (lambda output: 0.5, "it gave a float"),
        ],
    )
    def test_shapes_that_are_no_scores(self, function: Any, match: str) -> None:
        with pytest.raises(CaseError, match=f"case ct_7: `function` must give a tensor .*{match}"):
            FunctionScore(function).bind(LOGITS, FLAT)

    def test_shapes_that_change(self) -> None:
        bound = FunctionScore(lambda output: output.sum(0).expand(len(output) ** 2, 3)).bind(LOGITS, FLAT)
        with pytest.raises(CaseError, match=r"case ct_7: .*it gave shape \(4, 3\) for 2 images"):
            bound(LOGITS.expand(2, -1))
        bound = FunctionScore(lambda output: output[:, : len(output)]).bind(LOGITS, FLAT)
        with pytest.raises(CaseError, match="case ct_7: `function` gave 2 scores an image, and 1 for the unperturbed"):
            bound(LOGITS.expand(2, -1))

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="`function` must be a function of the network's output, got 3"):
            FunctionScore(3)
        with pytest.raises(CaseError, match="case ct_7: `function` gave 3 scores an image for 1 `labels`"):
            FunctionScore(lambda output: output, ["a"]).bind(LOGITS, FLAT)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("region", ["all", "some"])
def test_contributions_of_tiles_sum_to_the_scores(activation: str, region: str) -> None:
    outputs = torch.randn(2, 4, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inside = torch.zeros(6, 7)
    inside[1:4, 2:6] = 1
    target = RegionScore([2, 0], activation, "all" if region == "all" else inside)
    bound = target.bind(outputs[:1], Case("ct_7", torch.zeros(1, 6, 7)))
    assert bound.channels_read == (None if activation == "softmax" else [0, 2])
    read = outputs if bound.channels_read is None else outputs[:, bound.channels_read]
    parts = [
        bound.contribution(read[:, :, rows, columns], (rows, columns))
        for rows in (slice(0, 2), slice(2, 6))
        for columns in (slice(0, 3), slice(3, 7))
    ]
    torch.testing.assert_close(sum(parts), bound(outputs), rtol=0, atol=1e-12)
    reach = bound.reach()
    assert (reach is None) == (region == "all")
    changed = outputs.clone()
    if reach is not None:
        assert torch.equal(reach, inside != 0)
        changed[:, :, ~reach] += 5
    if bound.channels_read is not None:
        changed[:, [1, 3]] += 5
    assert torch.equal(bound(changed), bound(outputs))
