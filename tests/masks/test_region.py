from __future__ import annotations

import numpy as np
import pytest
import torch

from monai_saliency.masks.region import RegionMasks


class TestRegionMasks:
    LABELS = torch.tensor([[[0, 5, 5], [2, 2, 9]]])
    IMAGE = torch.zeros(3, 2, 3)

    def test_each_region_hidden_in_turn(self) -> None:
        bound = RegionMasks().bind(self.IMAGE, labels=self.LABELS)
        assert bound.values == [2, 5, 9]
        expected = [[[1, 1, 1], [0, 0, 1]], [[1, 0, 0], [1, 1, 1]], [[1, 1, 1], [1, 1, 0]]]
        assert bound.render(range(3))[:, 0].tolist() == expected

    def test_random_coalitions_by_a_slow_loop(self) -> None:
        bound = RegionMasks(num_masks=50, p1=0.3, seed=4).bind(self.IMAGE, labels=self.LABELS.float())
        draws = np.random.default_rng(4).random((50, 3)) < 0.3
        for i, kept in enumerate(draws):
            expected = [[1.0 if v == 0 else float(kept[[2, 5, 9].index(v)]) for v in row] for row in self.LABELS[0]]
            assert bound.render([i])[0, 0].tolist() == expected
        assert np.array_equal(bound.codes([7, 3, 49])["coalition"], draws[[7, 3, 49]])

    def test_made_of_the_image(self) -> None:
        image = torch.tensor([[[0.0, 3.0, 0.0, 3.0]]])
        bound = RegionMasks(regions=lambda image, spacing: (image > 1).long()).bind(image)
        assert bound.render([0]).tolist() == [[[[1.0, 0.0, 1.0, 0.0]]]]

    @pytest.mark.parametrize(
        ("labels", "match"),
        [
            (None, "need the case's label map"),
            (torch.zeros(1, 2, 3), "has only label 0"),
            (torch.full((1, 2, 3), 0.5), "values that are not whole numbers"),
            (torch.full((1, 2, 3), float("nan")), "values that are not whole numbers"),
            (torch.tensor([[[0.0, 1, 2], [3, 4, float("inf")]]]), "not whole numbers, NaN or infinity"),
            (
                torch.tensor([[[0.0, 1, 2], [3, 4, 1e20]]]),
                "float32 tells whole numbers apart up to",
            ),
            (torch.tensor([[[0, 1, 2], [3, 4, 614454277.0]]]), "float32 .* 16777216"),
            (torch.tensor([[[0, 1, 2], [3, 4, 4096.0]]]).half(), "float16 tells whole numbers apart up to 2048"),
            (torch.ones(1, 3, 2), r"shape \(1, 3, 2\), the image needs one of \(1, 2, 3\)"),
        ],
    )
    def test_errors(self, labels: torch.Tensor | None, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            RegionMasks().bind(self.IMAGE, labels=labels)
