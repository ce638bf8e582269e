"""Each round of masks is cut into as few batches as can be, all alike, and the map stays the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.forked_ranks import on_ranks

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.distributed import MasksOverDevices
from monai_saliency.distributed.process_group import MasksOverRanks
from monai_saliency.errors import CaseError
from monai_saliency.masks import BoundMasks, Masks
from monai_saliency.storage.score_store import ScoreStore

SHAPE = (12, 12)
TARGET = ms.ClassScore("all", "none")


class Rounds(Masks):
    """Masks of which each hides one voxel, in rounds of given lengths, each chosen by all scores before.

    Args:
        lengths: masks in each round.
    """

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundRounds(self.lengths, image)


class _BoundRounds(BoundMasks):
    def __init__(self, lengths: tuple[int, ...], image: torch.Tensor) -> None:
        super().__init__(image)
        self.key = ("Rounds", lengths, self.spatial_shape)
        self.lengths = lengths

    def __len__(self) -> int:
        return self.spatial_shape[0] * self.spatial_shape[1]

    def first_round(self) -> Sequence[int]:
        return self.next_round([], torch.zeros(0, 1), torch.zeros(1)) or ()

    def next_round(
        self, ids: Sequence[Any], scores: torch.Tensor, reference_scores: torch.Tensor
    ) -> Sequence[int] | None:
        ends = np.cumsum([0, *self.lengths])
        number = list(ends).index(len(ids))
        if number == len(self.lengths):
            return None
        left = sorted(set(range(len(self))) - set(ids))
        turn = 0 if number == 0 else int((reference_scores[0] - scores[:, 0]).argmax())
        return [left[(turn + place) % len(left)] for place in range(self.lengths[number])]

    def codes(self, ids: Sequence[Any]) -> dict[str, np.ndarray]:
        return {"voxel": np.asarray(ids, dtype=int)}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        masks = torch.ones(len(codes["voxel"]), *self.spatial_shape, dtype=self.dtype, device=device)
        masks.flatten(1).scatter_(1, torch.from_numpy(codes["voxel"])[:, None], 0.0)
        return masks[:, None]


class Sized(torch.nn.Module):
    """Two logits; ``sizes`` are those of the batches that it is given.

    Args:
        wrong: what becomes of the images of a batch before.
    """

    def __init__(self, wrong: Callable[[torch.Tensor], torch.Tensor] = lambda images: images) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(SHAPE[0] * SHAPE[1], 2)
        self.wrong = wrong
        self.sizes: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(images))
        return self.inner(self.wrong(images).flatten(1))


def images(count: int = 1) -> torch.Tensor:
    return torch.rand(count, 1, *SHAPE, generator=torch.Generator().manual_seed(1))


def explain(lengths: tuple[int, ...], most: int = 16, **settings: Any) -> ms.PerturbationInferer:
    return ms.PerturbationInferer(Rounds(*lengths), TARGET, ms.OcclusionScoring(), mask_batch_size=most, **settings)


LENGTHS = (40, 5, 1, 17, 16, 32)


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        # Alone: two rows of the first batch, and the unperturbed image where a round leaves no row over for it.
        (LENGTHS, 16, [1, 14, 1, 14, 14, 5, 1, 2, 9, 9, 16, 1, 16, 16, 1]),
        ((3, 16), 16, [1, 8, 1, 16, 1]),  # the first batch is checked, so that it is half as large as any may be
        ((3, 1, 1), 2, [1, 2, 1, 2, 1, 2, 2]),
        ((3, 2), 1, [1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_images_that_the_network_is_given(lengths: tuple[int, ...], most: int, expected: list[int]) -> None:
    network = Sized()
    run = explain(lengths, most)
    first = run(images(), network)
    new = list(network.sizes)
    network.sizes.clear()
    found = run(images(), network)
    assert network.sizes == expected
    # The first time, a batch of each size runs again, rows moved, and a row alone; that of the first twice, faded.
    sizes = set(expected) - {1}
    begins = expected[1]
    assert sum(new) == sum(expected) + sum(size + 1 for size in sizes) + (begins if sizes else 0)
    assert torch.equal(found, first)
    torch.testing.assert_close(found, explain(lengths, 1)(images(), Sized()), rtol=1e-5, atol=1e-6)


def test_networks_that_may_take_one_size_get_one() -> None:
    network = Sized()
    expected = explain(LENGTHS)(images(), network)
    for other in (network.forward, lambda batch: network(batch)):
        network.sizes.clear()
        torch.testing.assert_close(explain(LENGTHS)(images(), other), expected, rtol=1e-5, atol=1e-6)
        assert set(network.sizes) == {1, 16}


def test_images_share_the_batches_of_a_round() -> None:
    network = Sized()
    found = explain((5, 3, 1), 16).explain(images(4), network)
    network.sizes.clear()
    again = explain((5, 3, 1), 16).explain(images(4), network)
    # 24 rows, of which 8 are compared with their images alone; then 12, and 4.
    assert [size for size in network.sizes if size > 1] == [12, 12, 12, 4]
    for one, other, image in zip(found, again, images(4), strict=True):
        (alone,) = explain((5, 3, 1), 1).explain(image[None], Sized())
        assert torch.equal(one.saliency, other.saliency)
        assert list(one.ids) == list(alone.ids)
        torch.testing.assert_close(one.saliency, alone.saliency, rtol=1e-5, atol=1e-6)


def _exchanged(images: torch.Tensor) -> torch.Tensor:
    return images[[0, 1, 4, 3, 2, *range(5, len(images))]]


#: what becomes of a batch of ten images or more, or of one of five
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows are exchanged in large batches": lambda x: _exchanged(x) if len(x) >= 10 else x,
    "the second half is the first again": lambda x: x[:8].repeat(2, 1, 1, 1) if len(x) == 16 else x,
    "one answer for a small batch": lambda x: x.mean(0, keepdim=True).expand_as(x) if len(x) == 5 else x,
    "rows are exchanged in a small batch": lambda x: _exchanged(x) if len(x) == 5 else x,
    "a small batch is divided by its size": lambda x: x / len(x) if len(x) == 5 else x,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_rows_that_depend_on_each_other_in_batches_of_a_later_size(wrong: str, tmp_path: Path) -> None:
    """The first batch has eight images."""
    run, case = explain((7, 5, 16)), [Case("ct")]
    (expected,) = explain((7, 5, 16), 1).explain(images(), Sized())
    for _ in range(2):  # what a first run has stored is not used
        stored = [ScoreStore(tmp_path).open("ct", "key")]
        (found,) = run.explain(images(), Sized(WRONG[wrong]), cases=case, stored=stored)
        assert list(found.ids) == list(expected.ids)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-6)


def test_where_images_cannot_go_through_alone_the_case_fails(tmp_path: Path) -> None:
    def wrong(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 1:
            raise ValueError("takes no single image")
        return WRONG["rows are exchanged in a small batch"](batch)

    for _ in range(2):
        stored = [ScoreStore(tmp_path).open("ct", "key")]
        with pytest.raises(CaseError, match=r"rows depend on each other .*cannot go through one at a\s+time either"):
            explain((7, 5, 16)).explain(images(), Sized(wrong), cases=[Case("ct")], stored=stored)


def test_such_a_network_on_ranks_and_devices() -> None:
    """One of them finds it out in the second round, and all begin anew."""
    (expected,) = explain(LENGTHS, 1).explain(images(), Sized())

    def found(sharing: Any) -> torch.Tensor:
        network = Sized(WRONG["one answer for a small batch"])
        return explain(LENGTHS, sharing=sharing).explain(images(), network)[0].scores

    shared = on_ranks(2, lambda number: found(MasksOverRanks()))
    for scores in [*shared, found(MasksOverDevices(["cpu", "cpu"]))]:
        torch.testing.assert_close(scores, expected.scores, rtol=1e-5, atol=1e-6)


def test_ranks_cut_the_same_batches() -> None:
    (expected,) = explain(LENGTHS).explain(images(), Sized())

    def rank(number: int) -> tuple[torch.Tensor, set[int]]:
        network = Sized()
        (found,) = explain(LENGTHS, sharing=MasksOverRanks()).explain(images(), network)
        return found.scores, set(network.sizes)

    for scores, sizes in on_ranks(2, rank):
        assert torch.equal(scores, expected.scores)
        assert sizes <= {1, 14, 5, 2, 9, 16}


@pytest.mark.parametrize("stop", [2, 4, 6, 8, 10])
def test_a_resumed_run_cuts_the_same_batches(stop: int, tmp_path: Path) -> None:
    """The same to the bit, though rounds behind it are on disk."""
    (expected,) = explain(LENGTHS).explain(images(), Sized())

    class Stops(Sized):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if sum(size > 1 for size in self.sizes) > stop:
                raise KeyboardInterrupt
            return super().forward(batch)

    def run(network: Sized) -> ms.Explanation:
        stored = [ScoreStore(tmp_path).open("ct", "key")]
        return explain(LENGTHS).explain(images(), network, cases=[Case("ct")], stored=stored)[0]

    with pytest.raises(KeyboardInterrupt):
        run(Stops())
    network = Sized()
    resumed = run(network)
    assert torch.equal(resumed.scores, expected.scores)
    assert set(network.sizes) <= {1, 14, 5, 2, 9, 16}
