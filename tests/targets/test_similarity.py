from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.targets import FLAT
from scipy.spatial.distance import cdist

from monai_saliency.cases import Case
from monai_saliency.targets import EmbeddingSimilarity, FieldSimilarity
from monai_saliency.targets.base import Target


class TestEmbeddingSimilarity:
    OWN = torch.tensor([[3.0, 4.0]])

    def test_cosine_by_hand(self) -> None:
        bound = EmbeddingSimilarity().bind(self.OWN, FLAT)
        scores = bound(torch.tensor([[6.0, 8.0], [4.0, -3.0], [-3.0, -4.0], [1.0, 0.0]]))
        torch.testing.assert_close(scores, torch.tensor([[1.0], [0.0], [-1.0], [0.6]]))
        assert list(bound.labels) == ["similarity to itself"]

    @pytest.mark.parametrize("measure", ["cosine", "distance"])
    def test_given_references(self, measure: str) -> None:
        queries = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        bound = EmbeddingSimilarity(measure, queries).bind(self.OWN, FLAT)
        assert bound.labels == ["similarity to reference 1", "similarity to reference 2"]
        expected = [[0.6, 1.0]] if measure == "cosine" else [[-math.sqrt(20), 0.0]]
        torch.testing.assert_close(bound(self.OWN), torch.tensor(expected))
        one = EmbeddingSimilarity(measure, queries[0]).bind(self.OWN, FLAT)
        torch.testing.assert_close(one(self.OWN), torch.tensor(expected)[:, :1])

    @pytest.mark.parametrize("measure", ["cosine", "correlation"])
    def test_the_distances_are_those_of_scipy(self, measure: str) -> None:
        generator = np.random.default_rng(0)
        own, queries, perturbed = (generator.normal(size=size) for size in ((1, 6), (3, 6), (10, 6)))
        found = EmbeddingSimilarity(measure, torch.from_numpy(queries)).bind(torch.from_numpy(own), FLAT)
        similarity = found(torch.from_numpy(perturbed)).numpy()
        expected = -cdist(perturbed, queries, measure)
        np.testing.assert_allclose(similarity, expected + 1, rtol=0, atol=1e-12)
        assert found.quantity().unit == "-1 to 1"
        assert measure in found.quantity().words

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"`reference` has shape \(3,\), an embedding \(2,\)"):
            EmbeddingSimilarity(reference=torch.ones(3)).bind(self.OWN, FLAT)
        with pytest.raises(ValueError, match=r"`measure` must be one of \['correlation', .*\], got 'l2'"):
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


@pytest.mark.parametrize("target", [FieldSimilarity(), EmbeddingSimilarity("distance")])
def test_a_score_that_is_the_same_for_every_image_has_something_else_to_vouch_for_it(target: Target) -> None:
    """Stored scores of other weights are noticed by it, and not lost by rounding."""
    case = Case("ct_7", torch.zeros(1, 4, 5))
    output = torch.rand(1, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    one, other, rounded = (target.bind(each, case) for each in (output, output.flip(3), output * (1 + 1e-7)))
    assert one(output).tolist() == other(output.flip(3)).tolist()
    assert one.vouch is not None
    assert other.vouch is not None
    assert rounded.vouch is not None
    scale = float(one.vouch.abs().max())
    assert float((one.vouch - other.vouch).abs().max()) > 1e-3 * scale
    assert float((one.vouch - rounded.vouch).abs().max()) < 1e-5 * scale
