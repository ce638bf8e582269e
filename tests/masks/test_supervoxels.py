import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.files import rows_of
from monai.data import MetaTensor
from skimage.segmentation import slic

import monai_saliency as ms
from monai_saliency.masks import CoalitionMasks, RegionHierarchyMasks, RegionMasks
from monai_saliency.masks.supervoxels import whole_image
from monai_saliency.transforms import SaveRegionsd
from monai_saliency.transforms.regions import region_rows

TARGET = ms.ClassScore([0], "none")
LABELS = torch.tensor([[[0, 5, 5], [2, 2, 9]]])
IMAGE = torch.tensor([[[[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]]])


def total(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).sum(1, keepdim=True)


def explained(network: object = total, **settings: object) -> ms.Explanation:
    (explanation,) = ms.region_occlusion(target=TARGET, **settings).explain(IMAGE, network, labels=LABELS[None])
    return explanation


class TestRegionOcclusion:
    def test_each_organs_drop_by_hand(self) -> None:
        explanation = explained()
        assert explanation.saliency.tolist() == [[[0.0, 6.0, 6.0], [24.0, 24.0, 32.0]]]
        assert explanation.num_forwards == 4

    def test_stand_ins_are_found_by_coalitions_only(self) -> None:
        """Either of two regions makes the score: hiding one changes nothing, hiding both all."""
        either = lambda x: torch.maximum(x[:, :, 0, 1] > 0, x[:, :, 1, 0] > 0).float()  # noqa: E731
        assert explained(either).saliency.abs().max() == 0
        saliency = explained(either, num_coalitions=1000).saliency[0]
        # (1 - p1) * (1 - (1 - p1)) by hand, and five standard errors.
        assert float(saliency[0, 1]) == pytest.approx(0.25, abs=0.13)
        assert float(saliency[1, 0]) == pytest.approx(0.25, abs=0.13)
        assert float(saliency[1, 2]) == pytest.approx(0, abs=0.13)


class TestSupervoxels:
    def test_one_that_holds_most_voxels_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        """A metal artefact takes the range of brightness, and all else is one region."""
        image = torch.randn(1, 24, 24, 24, generator=torch.Generator().manual_seed(0))
        image[0, 10:14, 10:14, 10:14] += 5
        for settings in ({"num_regions": 20, "compactness": 10.0}, {"num_regions": 1}, {"num_regions": 2}):
            ms.Supervoxels(**settings)(image)  # type: ignore[arg-type]
        assert not caplog.messages
        ms.Supervoxels(20, compactness=1e-4)(image)
        (message,) = caplog.messages
        assert re.match(r"one of 20 supervoxels holds \d+ % of the voxels", message)

    def test_blocks_are_found(self) -> None:
        """Four cubes of different brightness, each a whole number of supervoxels."""
        image = torch.zeros(1, 12, 12, 12)
        image[:, :6], image[:, :, 6:] = 3.0, image[:, :, 6:] + 6.0
        labels = ms.Supervoxels(16)(image)
        assert labels.shape == (1, 12, 12, 12)
        assert labels.dtype == torch.int64
        assert labels.min() == 1
        for label in labels.unique():
            assert len(image[labels == label].unique()) == 1

    @pytest.mark.parametrize("shape", [(3, 20, 24), (2, 10, 12, 8), (1, 20, 24)])
    def test_deterministic_and_blind_to_the_scale_of_channels(self, shape: tuple[int, ...]) -> None:
        image = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        scale = torch.tensor([1.0, 1000.0, 0.01])[: shape[0]].reshape(-1, *[1] * (len(shape) - 1))
        make = ms.Supervoxels(30, compactness=0.3)
        labels = make(image)
        assert 10 < len(labels.unique()) < 60
        assert torch.equal(make(image), labels)
        assert torch.equal(make(image * scale - 7), labels)

    def test_regions_grow_in_mm(self) -> None:
        image = torch.rand(1, 16, 16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        scaled = ((image - image.min()) / (image.max() - image.min()))[0].numpy()
        labels = ms.Supervoxels(20, compactness=1)(image, (1.0, 1.0, 6.0))
        theirs = slic(scaled, 20, compactness=1, spacing=(1.0, 1.0, 6.0), channel_axis=None)
        assert np.array_equal(labels[0], theirs)
        assert not np.array_equal(labels, ms.Supervoxels(20, compactness=1)(image))


class TestRegionRows:
    def test_by_hand(self) -> None:
        image, labels = IMAGE[..., None], LABELS[..., None]
        explain = ms.region_occlusion(target=ms.ClassScore([1, 0], "none"))
        (explanation,) = explain.explain(
            image, lambda x: torch.cat([total(x), -2 * total(x)], 1), cases=[ms.Case("ct_7", labels=labels)]
        )
        rows = region_rows(explanation, spacing=(10.0, 10.0, 5.0), names={"2": "liver", 9: "spleen"})
        shared = {"case": "ct_7", "channel": None, "kind": "region"}
        two = {"region": 2, "name": "liver", "volume_ml": 1.0}
        five = {"region": 5, "name": "", "volume_ml": 1.0}
        nine = {"region": 9, "name": "spleen", "volume_ml": 0.5}
        drops = {1: (-48.0, -12.0, -64.0), 0: (24.0, 6.0, 32.0)}
        assert rows == [
            shared | {"class": label, "saliency": drop} | region
            for label in (1, 0)
            for region, drop in zip((two, five, nine), drops[label], strict=True)
        ]

    def test_table(self, tmp_path: Path) -> None:
        """A case explained again takes its old rows' place."""
        save = SaveRegionsd(tmp_path, {5: "spleen"})
        image = MetaTensor(IMAGE[0], affine=np.diag([2.0, 3, 4, 1]))
        item = {"case": explained().name, "image": image, "explanation": explained()}
        assert save(item) is item
        save(item | {"explanation": explained(lambda x: 2 * total(x))})
        rows = rows_of(tmp_path / "regions.csv")
        assert [(row["region"], row["name"], row["saliency"]) for row in rows] == [
            ("2", "", "48.0"),
            ("5", "spleen", "12.0"),
            ("9", "", "64.0"),
        ]


def test_whole_image() -> None:
    labels = whole_image(torch.rand(3, 4, 5))
    assert labels.shape == (1, 4, 5)
    assert set(labels.flatten().tolist()) == {1}


class TestOrganSupervoxels:
    @pytest.mark.parametrize("shape", [(20, 24), (12, 10, 14)])
    def test_each_lies_in_one_organ(self, shape: tuple[int, ...]) -> None:
        image = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
        labels = torch.zeros(1, *shape, dtype=torch.int64)
        labels[:, 2:9, 3:9], labels[:, 10, 1] = 7, 4  # a large organ, and one of a voxel or a line of them
        for num_regions in (12, 40):
            make = ms.OrganSupervoxels(num_regions, compactness=1.0)
            found = make(image, (1.0,) * len(shape), labels)
            assert found.shape == labels.shape
            assert found.unique().tolist() == list(range(1, int(found.max()) + 1))
            parts = [set(found[labels == value].tolist()) for value in (0, 4, 7)]
            assert sum(map(len, parts)) == int(found.max()), "no supervoxel lies in two organs"
            assert len(parts[1]) == 1
            assert len(parts[0]) > len(parts[2]) >= 1
            assert torch.equal(found, make(image, (1.0,) * len(shape), labels))

    def test_masks_of_every_kind_read_the_label_map(self) -> None:
        image, labels = torch.rand(1, 16, 16), torch.zeros(1, 16, 16, dtype=torch.int64)
        labels[:, 4:12, 4:12] = 5
        regions = ms.OrganSupervoxels(8)
        expected = regions(image, None, labels)
        for masks in (RegionMasks(regions=regions), RegionHierarchyMasks(regions)):
            assert masks.needs_labels
            bound = masks.bind(image, labels)
            first = bound.render(bound.first_round()[:1])[0]
            assert torch.equal(first == 0, expected == 1)
        assert CoalitionMasks(regions=regions).bind(image, labels).regions.values == expected.unique().tolist()
        assert not RegionMasks(regions=ms.Supervoxels(8)).needs_labels
        with pytest.raises(ValueError, match="need the case's label map"):
            RegionMasks(regions=regions).bind(image)
        with pytest.raises(ValueError, match="OrganSupervoxels need the case's label map"):
            regions(image)
