"""Regions of label maps, of other grids and of connected components, as a target reads them."""

from __future__ import annotations

import pytest
import torch
from helpers.targets import FLAT, LABELLED, SEGMENTATION

from monai_saliency.cases import Case
from monai_saliency.targets import RegionScore


class TestRegionsOfLabels:
    """Channels on a 2x3 image, and a label map of two organs, the values 1 and 4."""

    OUTPUT = SEGMENTATION
    CASE = LABELLED
    LABELS = LABELLED.labels

    def test_by_default_a_channel_has_the_label_of_its_index(self) -> None:
        bound = RegionScore([1, 0], "none", "label").bind(self.OUTPUT, self.CASE)
        torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[4.0, 0.5]]))

    def test_false_positives(self) -> None:
        """Channel 1 wins at (0, 1), (0, 2) and (1, 2), and the label has the first and the last of these."""
        bound = RegionScore(1, "none", "false_positive").bind(self.OUTPUT, self.CASE)
        torch.testing.assert_close(bound(self.OUTPUT), torch.tensor([[4.0]]))
        assert list(bound.labels) == [1]
        with pytest.raises(ValueError, match="the false positive region of channel 1 is empty"):
            RegionScore(1, "none", "false_positive").bind(
                self.OUTPUT, Case("ct_7", FLAT.image, labels=self.LABELS * 0 + 1)
            )

    def test_labels_that_do_not_fit(self) -> None:
        target = RegionScore(1, "none", "label")
        with pytest.raises(ValueError, match="the region is taken from the label map, and the case has none"):
            target.bind(self.OUTPUT, FLAT)
        with pytest.raises(ValueError, match=r"label map has spatial shape \(2, 2\), the image \(2, 3\)"):
            target.bind(self.OUTPUT, Case("ct_7", FLAT.image, labels=self.LABELS[..., :2]))
        with pytest.raises(ValueError, match="the label region of channel 1 is empty"):
            target.bind(self.OUTPUT, Case("ct_7", FLAT.image, labels=self.LABELS * 0))


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

    def test_of_the_label_and_of_several_channels(self) -> None:
        """Each channel's own components, in the order of the channels."""
        output = torch.cat([-self.logits(), self.logits()], 1)
        target = RegionScore([1, 0], "none", "label", label_values=[(1, 3), 2], components=3)
        bound = target.bind(output, self.CASE)
        assert bound.labels == ["component 1 of class 1", "component 2 of class 1", "component 1 of class 0"]
        torch.testing.assert_close(bound(output), torch.tensor([[1.0, 3.0, -2.0]]).double())
