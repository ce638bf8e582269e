from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods import rise
from monai_saliency.networks.outputs import check_rows, read, rows
from monai_saliency.targets import ClassScore

LOGITS = torch.arange(12.0).reshape(4, 3)
DEEP = torch.arange(16.0).reshape(4, 2, 2)


class TestRead:
    OUTPUT = {"pred": (LOGITS, [DEEP, DEEP + 1]), "loss": None}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("output", "path", "expected"),
        [
            (LOGITS, None, LOGITS),
            ({"pred": LOGITS}, "pred", LOGITS),
            ((DEEP, LOGITS), 1, LOGITS),
            ((DEEP, LOGITS), -1, LOGITS),
            (OUTPUT, ("pred", 0), LOGITS),
            (OUTPUT, ["pred", 1, 0], DEEP),
            (OUTPUT, lambda output: output["pred"][1][0] * 2, DEEP * 2),
        ],
    )
    def test_parts(self, output: Any, path: Any, expected: torch.Tensor) -> None:
        assert torch.equal(read(output, path), expected)

    @pytest.mark.parametrize("path", ["aux", ("pred", 2), ("pred", "x"), 0, ("pred", 0, 0)])
    def test_a_missing_part_lists_those_that_there_are(self, path: Any) -> None:
        known = "output=('pred', 0) reads (B, 3), output=('pred', 1, 0) reads (B, 2, 2), output=('pred', 1, 1) reads"
        with pytest.raises(ValueError, match=re.escape(f"has no part {path!r}: {known}")):
            read(self.OUTPUT, path)

    def test_an_index_into_a_tensor_reads_no_image_of_the_batch(self) -> None:
        with pytest.raises(ValueError, match="no part 0: it is one Tensor, so leave `output` out"):
            read(LOGITS, 0)


class TestRows:
    def test_tensors_in_structures(self) -> None:
        """Deep supervision, dictionaries, a vision transformer's (output, hidden states)."""
        cut = rows({"pred": LOGITS, "deep": [DEEP, DEEP + 1], "name": "x", "none": None}, 1, 3, 4)
        assert torch.equal(cut["pred"], LOGITS[1:3])
        assert torch.equal(cut["deep"][1], DEEP[1:3] + 1)
        assert (cut["name"], cut["none"]) == ("x", None)
        logits, hidden = rows((LOGITS, [DEEP] * 4), 3, 4, 4)
        assert torch.equal(logits, LOGITS[3:])
        assert [state.shape for state in hidden] == [(1, 2, 2)] * 4

    def test_a_list_with_one_entry_an_image(self) -> None:
        """Also where the numbers of boxes happen to be the number of images."""
        images = [{"boxes": torch.full((2, 4), float(i))} for i in range(2)]
        assert rows(images, 1, 2, 2) == images[1:]
        points = [torch.zeros(n, 2) for n in (0, 5, 2)]
        assert [len(part) for part in rows(points, 1, 3, 3)] == [5, 2]

    @pytest.mark.parametrize(
        ("output", "match"),
        [
            (LOGITS[:3], r"an output of shape \(3, 3\) for a batch of 4 images; its first axis must be the batch$"),
            (
                {"x": LOGITS, "loss": torch.tensor(0.0)},
                r"shape \(\) at output='loss' .*choose another part by `output`",
            ),
            ({"x": [LOGITS, LOGITS[:2]]}, r"shape \(2, 3\) at output=\('x', 1\)"),
            ({"a": None}, "the network gave a dict without tensors"),
            ([{}] * 3, "a list of 3 dictionaries for a batch of 4 images; it must have one entry per image"),
        ],
    )
    def test_check_refuses(self, output: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            check_rows(output, 4)


class TestInTheInferer:
    """Structured outputs of batches that hold rows of several cases."""

    IMAGES = torch.rand(3, 1, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    @staticmethod
    def logits(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0, :4].mean((1, 2)), x[:, 0, 4:].mean((1, 2)) ** 2], dim=1)

    @classmethod
    def structured(cls, x: torch.Tensor) -> dict[str, Any]:
        """As HoVerNet and deep supervision do, with parts that are not for us."""
        return {"pred": [cls.logits(x), cls.logits(x) + 1], "maps": (x, None), "loss": torch.tensor(0.0)}

    @pytest.mark.parametrize("output", [("pred", 0), lambda output: output["pred"][1] - 1])
    @pytest.mark.parametrize("mask_batch_size", [1, 4])
    def test_same_map_as_from_the_tensor(self, output: Any, mask_batch_size: int) -> None:
        settings = {"target": ClassScore("all", "none"), "mask_batch_size": mask_batch_size}
        expected = rise(7, 3, **settings)(self.IMAGES, self.logits)
        maps = rise(7, 3, output=output, **settings)(self.IMAGES, self.structured)
        torch.testing.assert_close(maps, expected, rtol=0, atol=1e-12)

    def test_errors_name_the_case_and_the_choices(self) -> None:
        def explain(network: Any, **settings: Any) -> list:
            inferer: PerturbationInferer = rise(4, 2, target=ClassScore([0], "none"), **settings)
            return inferer.explain(self.IMAGES, network, cases=[Case("ct_1"), Case("ct_2"), Case("ct_3")])

        with pytest.raises(CaseError, match=r"case ct_1: .*has no part 'seg': output=\('pred', 0\) reads \(B, 2\)"):
            explain(self.structured, output="seg")
        with pytest.raises(
            CaseError, match=r"case ct_1: ClassScore reads a tensor, .* a list;.*output=0 reads \(B, 2\)"
        ):
            explain(self.structured, output="pred")
        with pytest.raises(CaseError, match=r"case ct_1: .*shape \(\) at output='loss'"):
            explain(self.structured)
