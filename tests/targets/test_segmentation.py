import math
from dataclasses import replace

import pytest
import torch
from helpers.targets import FLAT, LABELLED, LOGITS, SEGMENTATION
from helpers.tolerances import assert_close, assert_same_bits
from monai.losses import DiceLoss
from monai.transforms import AsDiscrete

import monai_saliency as ms
from monai_saliency.errors import NothingToExplain


class TestRegionScore:
    OUTPUT = SEGMENTATION
    # What a perturbed image gives: everything flipped, so that channel 1 wins elsewhere.
    MOVED = OUTPUT.flip(1)

    def test_predicted_region_is_frozen(self) -> None:
        """A perturbation that moves the segmentation lowers the score, and does not move the question."""
        bound = ms.RegionScore([1, 0], "none").bind(self.OUTPUT, FLAT)
        assert_same_bits(bound(self.MOVED), torch.zeros(1, 2))
        assert_close(bound(torch.cat([self.MOVED, self.OUTPUT])), torch.tensor([[0, 0], [4, 7 / 3]]))

    def test_predicted_region_of_sigmoid(self) -> None:
        """Channels overlap under a sigmoid: each has the voxels where its own probability is above one half."""
        logit = math.log(1.25)  # a probability of 5 / 9
        output = torch.tensor([[[[logit, -logit, logit], [-1.0, 0.0, -1.0]], [[logit, logit, -1.0], [-1.0] * 3]]])
        bound = ms.RegionScore([0, 1], "sigmoid").bind(output, FLAT)
        assert_close(bound(output), torch.tensor([[5 / 9, 5 / 9]]))
        assert_close(bound(-output), torch.tensor([[4 / 9, 4 / 9]]))

    def test_softmax_by_hand(self) -> None:
        bound = ms.RegionScore(1, "softmax").bind(self.OUTPUT, FLAT)
        expected = sum(1 / (1 + math.exp(-d)) for d in (2.0, 4.0, 6.0)) / 3
        assert_close(bound(self.OUTPUT), expected)
        assert_close(bound(self.MOVED), 1 - expected)

    @pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), (1, 1, 2, 3)])
    def test_label_in_its_three_shapes(self, shape: tuple[int, ...]) -> None:
        label = torch.tensor([[0, 5, 0], [1, 0, 0]]).reshape(shape)
        bound = ms.RegionScore([0, 1], "none", region=label).bind(self.OUTPUT, FLAT)
        assert_same_bits(bound(self.OUTPUT), torch.tensor([[2.0, 1.0]]))

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"channel": 2}, r"channel 2 is out of range: the network gives 2 channels.*\[0, 1\]"),
            ({"channel": 0, "region": torch.zeros(2, 3)}, "the given region of channel 0 is empty"),
            ({"channel": 0, "region": torch.ones(3, 3)}, r"`region` has shape \(3, 3\).*\(2, 3\)"),
            ({"channel": 0, "region": torch.ones(3, 2, 3)}, "the label has 3 channels, and must have 1 or 2 here"),
            ({"channel": 0, "region": torch.ones(2, 1, 2, 3)}, r"`region` has shape \(2, 1, 2, 3\)"),
        ],
    )
    def test_settings_that_do_not_fit_the_case(self, settings: dict, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ms.RegionScore(activation="none", **settings).bind(self.OUTPUT, FLAT)

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    def test_empty_predicted_region(self, activation: str) -> None:
        output = torch.stack([torch.full((2, 3), 3.0), torch.full((2, 3), -3.0)])[None]
        with pytest.raises(NothingToExplain, match=r"the predicted region.* of channel 1 is empty.*region='all'"):
            ms.RegionScore(1, activation).bind(output, FLAT)
        for target in (ms.RegionScore([0, 1], activation), ms.DiceScore([1, 0], activation)):
            assert list(target.bind(output, FLAT).labels) == [0]  # the one that is predicted

    @pytest.mark.parametrize(
        ("output", "activation", "match"),
        [
            (LOGITS, "none", r"RegionScore reads a segmentation.*\(B, 3\); use ClassScore for a classifier"),
            (torch.zeros(1, 2, 2, 2, 2), "none", r"RegionScore reads a segmentation"),
            ([OUTPUT], "none", "RegionScore reads a tensor, .* a list; .*: output=0 reads \\(B, 2, 2, 3\\) "),
            (OUTPUT[:, :1], "softmax", "the softmax of one channel is 1"),
            (OUTPUT[:, :1], "none", "with one output channel.*the predicted region is not defined"),
        ],
    )
    def test_outputs_it_cannot_read(self, output: object, activation: str, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ms.RegionScore(0, activation).bind(output, FLAT)


class TestPredictedChannels:
    def test_all_that_have_a_voxel_but_the_background(self) -> None:
        output = torch.zeros(1, 4, 2, 3)
        output[0, 0, 0] = output[0, 3, 1] = 2.0
        assert list(ms.RegionScore("predicted", "softmax").bind(output, FLAT).labels) == [3]
        assert list(ms.DiceScore("predicted", "sigmoid").bind(output, FLAT).labels) == [0, 3]

    def test_none(self) -> None:
        output = torch.full((1, 3, 2, 3), -1.0)
        with pytest.raises(NothingToExplain, match=r"segments nothing: .* each of its 3 channels"):
            ms.RegionScore("predicted", "softmax").bind(output, FLAT)
        with pytest.raises(NothingToExplain, match=r"segments nothing: .* each of its 3 channels"):
            ms.RegionScore("predicted", "sigmoid").bind(output, FLAT)


class TestDiceScore:
    def test_by_hand(self) -> None:
        """Three voxels of probability 1, 0.5 and 0 outside of a region of two voxels of 1: 2 * 1.5 / (1.5 + 2)."""
        reference = torch.tensor([[[[0.9, 0.9, 0.1], [0.1, 0.1, 0.1]]]]).logit()
        moved = torch.tensor([[[[1.0, 0.5, 0.0], [0.0, 0.0, 0.5]]]]).double()
        bound = ms.DiceScore(0, "sigmoid").bind(reference, FLAT)
        scores = bound(torch.cat([moved.logit(), torch.full_like(moved, -torch.inf)]))
        expected = [[(3 + 1e-5) / (4 + 1e-5)], [1e-5 / (2 + 1e-5)]]
        assert_close(scores, torch.tensor(expected, dtype=torch.float64))

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    def test_is_one_less_the_loss_of_monai(self, activation: str) -> None:
        generator = torch.Generator().manual_seed(0)
        reference, output = torch.randn(2, 1, 3, 5, 4, 6, generator=generator, dtype=torch.float64)
        case = ms.Case("ct", torch.zeros(1, 5, 4, 6))
        scores = ms.DiceScore([2, 0], activation).bind(reference, case)(output)
        if activation == "softmax":
            region = torch.nn.functional.one_hot(reference.argmax(1), 3).permute(0, 4, 1, 2, 3)
        else:
            region = reference > 0
        loss = DiceLoss(reduction="none", **{activation: True})
        expected = 1 - loss(output, region.double()).flatten()[None, [2, 0]]
        assert_close(scores, expected)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_what_is_not_reached_changes_no_score(activation: str) -> None:
    output = torch.randn(1, 4, 6, 7, generator=torch.Generator().manual_seed(2))
    inside = torch.zeros(6, 7)
    inside[1:4, 2:6] = 1
    case = ms.Case("ct_7", torch.zeros(1, 6, 7))
    assert ms.RegionScore(2, activation, "all").bind(output, case).reach() is None
    bound = ms.RegionScore([2, 0], activation, inside).bind(output, case)
    assert_same_bits(bound.reach(), inside != 0)
    assert bound.channels_read == (None if activation == "softmax" else [0, 2])
    changed = torch.where(inside == 0, output + 5, output)
    if bound.channels_read is not None:
        changed[:, [1, 3]] += 5
    assert_same_bits(bound(changed), bound(output))


# Regions of label maps, of other grids and of connected components, as a target reads them.
class TestRegionsOfLabels:
    """Five channels on a 2x3 image, and a label map of two organs, the values 1 and 4."""

    OUTPUT = torch.cat([SEGMENTATION, SEGMENTATION.new_full((1, 3, 2, 3), -9)], 1)
    CASE = LABELLED
    LABELS = LABELLED.labels

    def test_by_default_a_channel_has_the_label_of_its_index(self) -> None:
        bound = ms.RegionScore([1, 0], "none", "label").bind(self.OUTPUT, self.CASE)
        assert_close(bound(self.OUTPUT), torch.tensor([[4.0, 0.5]]))

    def test_false_positives(self) -> None:
        """Channel 1 wins at (0, 1), (0, 2) and (1, 2), and the label has the first and the last of these."""
        bound = ms.RegionScore(1, "none", "false_positive").bind(self.OUTPUT, self.CASE)
        assert_close(bound(self.OUTPUT), torch.tensor([[4.0]]))
        assert list(bound.labels) == [1]
        with pytest.raises(NothingToExplain, match="the false positive region of channel 1 is empty"):
            ms.RegionScore(1, "none", "false_positive").bind(
                self.OUTPUT, ms.Case("ct_7", FLAT.image, labels=self.LABELS * 0 + 1)
            )

    def test_labels_that_do_not_fit(self) -> None:
        target = ms.RegionScore(1, "none", "label")
        with pytest.raises(ValueError, match="the region is taken from the label map, and the case has none"):
            target.bind(self.OUTPUT, FLAT)
        with pytest.raises(ValueError, match=r"label map has shape \(1, 2, 2\), the image needs one of \(1, 2, 3\)"):
            target.bind(self.OUTPUT, ms.Case("ct_7", FLAT.image, labels=self.LABELS[..., :2]))
        with pytest.raises(NothingToExplain, match="the label region of channel 1 is empty"):
            target.bind(self.OUTPUT, ms.Case("ct_7", FLAT.image, labels=self.LABELS * 0))
        with pytest.raises(ValueError, match=r"values 255, .*label_values=\[255\]") as found:  # a wrong setting
            target.bind(self.OUTPUT, ms.Case("ct_7", FLAT.image, labels=self.LABELS * 0 + 255))
        assert not isinstance(found.value, NothingToExplain)

    def test_channels_that_are_not_predicted_leave_the_others(self, caplog: pytest.LogCaptureFixture) -> None:
        output = torch.tensor([[[[3.0, 0, 0]], [[0.0, 2, 2]], [[0.0, 0, 0]]]])
        bound = ms.RegionScore([1, 2], "softmax").bind(output, ms.Case("ct_7", torch.zeros(1, 1, 3)))
        assert list(bound.labels) == [1]
        assert "case ct_7: the predicted region of channel 2 is empty: no map explains it" in caplog.text


def as_label(*rows: list[list[int]]) -> ms.Case:
    """A case whose label has these channels."""
    return ms.Case("ct_7", FLAT.image, labels=torch.tensor(rows))


class TestNumbersOfChannels:
    """Which voxels of a label are a channel's is known, given or asked for. Channel 1 of SEGMENTATION is predicted at
    (0, 1), (0, 2) and (1, 2), with the values 2, 4 and 6.
    """

    BRATS = torch.cat([SEGMENTATION, SEGMENTATION[:, :1]], 1)

    @pytest.mark.parametrize("region", ["label", "a tensor"])
    def test_a_label_with_the_outputs_channels_has_one_for_each(self, region: str) -> None:
        """Also where they overlap, as BraTS' regions do; channel 1's has the values 2 and 6, channel 0's 1 and 2."""
        case = as_label([[1, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 0, 1]])
        given = case.labels if region == "a tensor" else region
        for labels in (case.labels, case.labels.bool(), case.labels.double()):
            found = ms.RegionScore([1, 0], "none", given).bind(SEGMENTATION, replace(case, labels=labels))
            assert_close(found(SEGMENTATION), torch.tensor([[4.0, 1.5]]))

    def test_one_hot_labels_are_their_label_map(self) -> None:
        """The background is channel 0, as in MONAI's losses."""
        case = as_label([[0, 1, 0], [0, 0, 1]])
        one_hot = replace(case, labels=AsDiscrete(to_onehot=2)(case.labels))
        for target in (
            ms.RegionScore([0, 1], "softmax", "label"),
            ms.RegionScore(1, "softmax", "false_positive"),
            ms.DiceScore(1, "softmax", "label"),
        ):
            expected, found = (target.bind(SEGMENTATION, each)(SEGMENTATION) for each in (case, one_hot))
            assert_same_bits(found, expected)

    def test_a_coarser_output_takes_the_nearest_voxel_of_each_channel(self) -> None:
        output, labels = torch.arange(8.0).reshape(1, 2, 2, 2), torch.zeros(2, 4, 4)
        labels[1, 1, 1] = 1  # nearest to the output's first voxel
        target = ms.RegionScore(1, "none", "label")
        assert_close(
            target.bind(output, ms.Case("ct", torch.zeros(1, 4, 4), labels=labels))(output), torch.tensor([[4.0]])
        )

    @pytest.mark.parametrize("region", ["label", "false_positive"])
    @pytest.mark.parametrize(
        ("activation", "labels", "words"),
        [
            ("softmax", [[0, 255, 255], [0, 0, 255]], r"values 0, 255, .* channel 1 of 2: .*`label_values=\[255\]`"),
            ("none", [[0, 1, 2], [4, 0, 1]], r"values 0, 1, 2, 4, .*`label_values=\[\[1, 2, 4\]\]`"),
            ("softmax", [[0, -1, 1], [1, 0, 0]], "values -1, 0, 1, "),
            ("sigmoid", [[0, 1, 1], [0, 0, 1]], r"values 0, 1, .*`label_values=\[1\]` .*a label with 2 channels"),
        ],
    )
    def test_values_that_are_no_channels_numbers_are_asked_for(
        self, region: str, activation: str, labels: list[list[int]], words: str
    ) -> None:
        with pytest.raises(ValueError, match=words):
            ms.RegionScore(1, activation, region).bind(SEGMENTATION, as_label(labels))

    def test_a_mask_of_255_with_its_value(self) -> None:
        """It holds all that is predicted, so nothing is a false positive."""
        case = as_label([[0, 255, 255], [0, 0, 255]])
        found = ms.RegionScore(1, "none", "label", label_values=[255]).bind(SEGMENTATION, case)
        assert_close(found(SEGMENTATION), torch.tensor([[4.0]]))
        with pytest.raises(ValueError, match="the false positive region of channel 1 is empty"):
            ms.RegionScore(1, "none", "false_positive", label_values=[255]).bind(SEGMENTATION, case)
        one = ms.RegionScore(0, "sigmoid", "label").bind(SEGMENTATION[:, 1:], case)  # one channel: all but 0
        assert_close(one(SEGMENTATION[:, 1:]), SEGMENTATION[0, 1, [0, 0, 1], [1, 2, 2]].sigmoid().mean())

    def test_brats_numbers_of_three_sigmoid_channels(self) -> None:
        case = as_label([[0, 1, 2], [4, 0, 1]])
        with pytest.raises(ValueError, match=r"values 0, 1, 2, 4, .* channel 0 of 3: .*`label_values="):
            ms.RegionScore([0, 1, 2], "sigmoid", "label").bind(self.BRATS, case)
        values = [[1, 4], [1, 2, 4], [4]]
        found = ms.RegionScore([0, 1, 2], "sigmoid", "label", label_values=values).bind(self.BRATS, case)
        expected = [((case.labels == 1) | (case.labels == 4))[0], case.labels[0] > 0, case.labels[0] == 4]
        assert_same_bits(found.regions, torch.stack(expected))

    @pytest.mark.parametrize("channel", [0, 1])
    def test_a_healthy_scan_has_no_region(self, channel: int) -> None:
        """Whatever the numbers are, none of them is there: sigmoid channel 0 is not what has no label."""
        empty = as_label([[0, 0, 0], [0, 0, 0]])
        with pytest.raises(ValueError, match=f"the label region of channel {channel} is empty"):
            ms.RegionScore(channel, "sigmoid", "label").bind(SEGMENTATION, empty)
        found = ms.RegionScore(channel, "sigmoid", "false_positive").bind(SEGMENTATION, empty)
        assert_same_bits(found.regions, SEGMENTATION[0, channel][None] > 0)

    def test_values_and_channels_contradict_each_other(self) -> None:
        case = as_label([[1, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 0, 1]])
        with pytest.raises(ValueError, match="the label has 2 channels, and must have 1 here"):
            ms.RegionScore(1, "none", "label", label_values=[255]).bind(SEGMENTATION, case)


class TestCoarserOutput:
    """The image has 8x8 voxels, the output 4x4: voxel (i, j) of the output is nearest to (2i + 1, 2j + 1)."""

    OUTPUT = torch.arange(16.0).reshape(1, 1, 4, 4)
    IMAGE = torch.zeros(1, 8, 8)

    def test_regions_on_the_images_grid(self) -> None:
        region = torch.zeros(8, 8)
        region[2:4, 2:6] = 1
        for shape in ((8, 8), (1, 8, 8), (1, 1, 8, 8)):
            bound = ms.RegionScore(0, "none", region.reshape(shape)).bind(self.OUTPUT, ms.Case("ct", self.IMAGE))
            assert_close(bound(self.OUTPUT), torch.tensor([[5.5]]))
        case = ms.Case("ct", self.IMAGE, labels=region[None])
        assert_close(ms.RegionScore(0, "none", "label").bind(self.OUTPUT, case)(self.OUTPUT), torch.tensor([[5.5]]))


class TestComponents:
    """A blob of three voxels that touch at corners, one of two, and one of one."""

    BLOBS = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 2, 2], [1, 0, 0, 0, 0], [0, 0, 0, 0, 3]])
    CASE = ms.Case("ct_7", torch.zeros(1, 4, 5), labels=BLOBS[None])

    def logits(self) -> torch.Tensor:
        return torch.where(self.BLOBS > 0, self.BLOBS, -1)[None, None].double()

    def test_largest_first_each_with_its_own_mean(self) -> None:
        bound = ms.RegionScore(0, "sigmoid", components=5).bind(self.logits(), self.CASE)
        assert bound.labels == [f"component {i} of class 0" for i in (1, 2, 3)]
        assert_close(bound(self.logits()), torch.tensor([[1.0, 2.0, 3.0]]).double().sigmoid())

    def test_of_the_label_and_of_several_channels(self) -> None:
        """Each channel's own components, in the order of the channels."""
        output = torch.cat([-self.logits(), self.logits()], 1)
        target = ms.RegionScore([1, 0], "none", "label", label_values=[(1, 3), 2], components=3)
        bound = target.bind(output, self.CASE)
        assert bound.labels == ["component 1 of class 1", "component 2 of class 1", "component 1 of class 0"]
        assert_close(bound(output), torch.tensor([[1.0, 3.0, -2.0]]).double())
