"""Masks in rounds: later masks are chosen by earlier scores, and nothing else decides them."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.forked_ranks import on_ranks
from helpers.searches import asks_of
from helpers.tolerances import assert_close
from helpers.two_rounds import TwoRounds, two_rounds
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.distributed.process_group import MasksOverRanks
from monai_saliency.errors import CaseError
from monai_saliency.inferers import progress as module
from monai_saliency.inferers.progress import Progress, following
from monai_saliency.inferers.runner import batch_size, rows_in_batch
from monai_saliency.inferers.scores import Scores
from monai_saliency.masks import BoundMasks, ChannelMasks, Observed
from monai_saliency.masks.base import Search
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore

SHAPE = (12, 12)
TARGET = ms.ClassScore([0], "none")


class Spots(torch.nn.Module):
    """One logit: the sum over voxel (7, 2), and a little of all others. Counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(SHAPE, 0.01))
        with torch.no_grad():
            self.weight[7, 2] = 1.0
        self.images = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.images += len(x)
        return (x[:, 0] * self.weight).flatten(1).sum(dim=1, keepdim=True)


def images(count: int = 1) -> torch.Tensor:
    return torch.stack([torch.ones(1, *SHAPE) * (i + 1) for i in range(count)])


def by_hand(scale: float = 1.0) -> torch.Tensor:
    """Windows of 6 x 6, and of 3 x 3 inside rows 6 to 11, columns 0 to 5: the mean drop of those over each voxel."""
    weight = torch.full(SHAPE, 0.01)
    weight[7, 2] = 1.0
    expected = torch.empty(SHAPE)
    for y in range(12):
        for x in range(12):
            boxes = [(y // 6 * 6, x // 6 * 6, 6)]
            if y >= 6 and x < 6:
                boxes.append((y // 3 * 3, x // 3 * 3, 3))
            expected[y, x] = sum(float(weight[a : a + n, b : b + n].sum()) for a, b, n in boxes) / len(boxes)
    return scale * expected


def explain(batch: int = 3, **settings: Any) -> ms.PerturbationInferer:
    return two_rounds(6, target=TARGET, mask_batch_size=batch, **settings)


def test_the_map_is_that_of_both_rounds() -> None:
    network = Spots()
    (explanation,) = explain().explain(images(), network)
    assert_close(explanation.saliency[0], by_hand())
    assert list(explanation.ids) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert explanation.num_forwards == 1 + 4 + 4
    # Before: two images alone, side by side, and one again. Then two batches of three in each round.
    assert network.images == 2 + 2 + 1 + 2 * (3 * 2)


@pytest.mark.parametrize("batch", [1, 2, 5, 16])
def test_cases_share_batches_in_every_round(batch: int) -> None:
    together = explain(batch).explain(images(3), Spots())
    for i, explanation in enumerate(together):
        assert_close(explanation.saliency[0], by_hand(i + 1))
        assert explanation.num_forwards == 9


def test_remembered_patches() -> None:
    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            place = torch.zeros_like(x)
            place[..., 1, 2] = 1.0  # of each patch another voxel
            return torch.cat([x * (0.01 + place), 2 * x], 1)

    target = ms.RegionScore(0, "none", region="all")
    inner = SlidingWindowInferer((4, 4), 3, 0.5)
    maps = [
        two_rounds(6, target=target, inferer=inner, patch_memory=memory).explain(images(2).double(), Local())
        for memory in (True, False, ms.PatchMemory(0, 2000))
    ]
    for remembered, whole, forgetful in zip(*maps, strict=True):
        assert list(remembered.ids) == list(whole.ids)
        assert_close(remembered.scores, whole.scores)
        assert torch.equal(forgetful.scores, remembered.scores)
        assert 25 < remembered.num_forwards < 9 * 25


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
def test_a_stopped_run_goes_on_in_its_round(stop: int, tmp_path: Path) -> None:
    class Stops(Spots):
        batches = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.batches += self.images >= 5  # the first five look at the network
            if self.batches > stop:
                raise KeyboardInterrupt
            return super().forward(x)

    def run(network: Spots) -> ms.Explanation:
        stored = [ScoreStore(tmp_path).open("case", "key")]
        return explain(2).explain(images(), network, cases=[ms.Case("case")], stored=stored)[0]

    (expected,) = explain(2).explain(images(), Spots())
    with pytest.raises(KeyboardInterrupt):
        run(Stops())
    network = Spots()
    resumed = run(network)
    assert torch.equal(resumed.saliency, expected.saliency)
    assert torch.equal(resumed.scores, expected.scores)
    # Three batches in the first round and two in the second; the first always runs, one that waited may be lost.
    assert (network.images - 5) // 2 <= 1 + 6 - max(0, stop - 1)
    again = Spots()
    assert torch.equal(run(again).saliency, expected.saliency)
    assert again.images == 2 + 5


def test_parts_meet_in_the_store(tmp_path: Path) -> None:
    """Each scores its part of the first round; the last one finds it complete, and scores the second."""
    (expected,) = explain(1).explain(images(), Spots())
    for number in range(3):
        stored = [ScoreStore(tmp_path).open("case", "key")]
        (found,) = explain(1).score(images(), Spots(), stored=stored, part=Part(number, 3))
        assert (found is None) == (number < 2)
    assert torch.equal(found.saliency, expected.saliency)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_share_every_round(count: int) -> None:
    (expected,) = explain(1).explain(images(), Spots())

    def rank(number: int) -> Any:
        network = Spots()
        (found,) = explain(1, sharing=MasksOverRanks()).explain(images(), network)
        return found.saliency, found.scores, found.num_forwards, network.images

    results = on_ranks(count, rank)
    for saliency, scores, forwards, _ in results:
        assert torch.equal(saliency, expected.saliency)
        assert torch.equal(scores, expected.scores)
        assert forwards == 9 + count - 1  # each runs the unperturbed image
    # Each looks at the network by three images. The image with everything hidden is one rank's.
    assert sum(seen for *_, seen in results) == 9 + count - 1 + 3 * count + 1
    assert max(seen for *_, seen in results) < 10


def test_a_rank_that_fails_in_the_second_round_ends_all() -> None:
    def rank(number: int) -> Any:
        class Fails(Spots):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.images >= (3 if number else 100):
                    raise CaseError("brain", "broken")
                return super().forward(x)

        network = Fails()
        with pytest.raises(CaseError, match="brain: broken"):
            explain(1, sharing=MasksOverRanks())(images(), network)
        return explain(1, sharing=MasksOverRanks())(images(), Spots())

    for found in on_ranks(2, rank):
        assert torch.equal(found, explain(1)(images(), Spots()))


def test_scores_that_are_nan_choose_nothing() -> None:
    with pytest.raises(CaseError, match="network scores are NaN or infinite"):
        explain()(images(), lambda x: (x.flatten(1).sum(1, keepdim=True) - 143).log())  # only of the whole image


def test_where_scores_are_unknown_it_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be made channel by channel"):
        ChannelMasks(TwoRounds(6)).bind(images()[0])


@pytest.mark.parametrize("asked", [[3], []])
def test_a_round_that_asks_for_nothing_new_is_the_end(asked: list[int], monkeypatch: Any) -> None:
    masks = TwoRounds(6).bind(images()[0])

    def asks_again(self: BoundMasks, reference_scores: torch.Tensor) -> Search:
        observed = Observed(self, reference_scores)
        yield from observed.ask(self.first_round())
        again = yield asked
        assert torch.equal(again, observed.scores[asked])
        yield from observed.ask(asked)
        return observed

    monkeypatch.setattr(type(masks), "search", asks_again)
    scores = Scores("ct_7")
    asks = asks_of(masks, torch.ones(1), scores)
    scores.add(next(asks), torch.arange(4.0)[:, None])
    found = next(asks)
    assert [*found.ids] == [*found.observed[0].ids] == [0, 1, 2, 3]


# How rows are cut into batches, and what a round is reported to cost.
@pytest.mark.parametrize(
    ("setting", "size", "expected"), [(4, 8, 4), (100, 8, 66), ("auto", 8, 16), ("auto", 2048, 4), (1, 2048, 1)]
)
def test_rows_in_a_batch(setting: int | str, size: int, expected: int) -> None:
    """As many as the setting allows, at most all; by itself 16, or as many as hold 2^24 values."""
    states, _ = ms.rise(64, 2, target=TARGET).start(torch.zeros(1, 1, size, size))
    assert rows_in_batch(batch_size(setting), states) == expected


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "most", None, True])
def test_a_wrong_batch_size(wrong: object) -> None:
    with pytest.raises(ValueError, match="mask_batch_size"):
        batch_size(wrong)


# What is shown of a run: a price, a line or a bar.
class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def cases(*names: str) -> list[Any]:
    """Cases of 100 masks in rounds, of which 40 are the first."""
    masks = SimpleNamespace(adaptive=True, at_most=100, first_round=lambda: range(40))
    return [SimpleNamespace(case=SimpleNamespace(name=name), masks=masks) for name in names]


def test_lines_without_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """The price once, then a line after two seconds and each minute, with the time that is left."""
    shown = Progress(10)
    shown.begin(41, 1, cases("a"), True)
    shown.begin(60, 1, cases("a"), False)
    clock.now = 1.0
    shown.advance(1)  # warms up
    for _ in range(10):
        clock.now += 1
        shown.advance(4)
    assert capsys.readouterr().err.splitlines() == [
        "10 cases, up to 101 forwards each: up to 1010 in all",
        # 1005 forwards are left after 4 in a second.
        "scoring case 1 of 10, a: 5 of about 1010 forwards, about 0:04:11 left",
    ]
    shown.end(1)
    shown.begin(41, 1, cases("b"), True)
    clock.now = 62.0
    shown.advance(9)  # 41 forwards a case: 410 in all, 49 of 50 since the first in 61 s
    assert capsys.readouterr().err == "scoring case 2 of 10, b: 50 of about 410 forwards, about 0:07:28 left\n"


@pytest.mark.parametrize(
    ("setting", "seconds", "bar"), [(True, 1, True), (None, 4, False), (None, 6, True), (False, 9, False)]
)
def test_a_bar_on_a_terminal(
    setting: bool | None, seconds: float, bar: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """None waits for five seconds; warnings do not break it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    with following(setting) as shown:
        shown.begin(41, 1, cases("a"), True)
        shown.advance(1)
        clock.now = seconds
        shown.advance(20)
        assert (shown._bar is not None) == bar
        if bar:
            assert (shown._bar.n, shown._bar.total, shown._bar.desc) == (21, 101, "a: ")
            logging.getLogger("monai_saliency").warning("careful")
            assert "careful" in capsys.readouterr().err
    assert shown._bar is None


def test_an_inferer_shows_nothing_in_a_log_file_unless_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    images, network = torch.rand(1, 1, 8, 8), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    ms.rise(20, target=ms.ClassScore([0], "softmax"))(images, network)
    ms.rise(20, target=ms.ClassScore([0], "softmax"), progress=False)(images, network)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match="`progress` must be True, False or None, got 'yes'"):
        ms.rise(20, progress="yes")
