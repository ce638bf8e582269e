"""Scores on disk: what is kept is never computed again, what changed is never served."""

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import monai.bundle
import numpy as np
import pytest
import torch
from helpers.files import voxels
from helpers.own_bundle import BATCH, BATCHES, NUM_MASKS, forwards, launch, settings
from helpers.scans import LPS, write_scan
from helpers.tolerances import assert_same_bits

import monai_saliency as ms
from monai_saliency.storage.score_store import ScoreStore, StoredScores

TARGET = ms.ClassScore("all", activation="softmax")


class Stopped(BaseException):
    """As sudden as a signal: nothing of ours catches it."""


class Network(torch.nn.Module):
    """Counts its batches, and stops in the middle of one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(2, 12 * 10))
        self.stop_at, self.batches = stop_at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += len(x) > 2  # else it looks at the network: an image alone, or two
        if self.batches == self.stop_at:
            raise Stopped
        return x.flatten(1) @ self.weight.T


@pytest.fixture
def image() -> torch.Tensor:
    return torch.rand(1, 1, 12, 10, generator=torch.Generator().manual_seed(1))


def explain(image: torch.Tensor, network: Network, store: ScoreStore, key: str = "k") -> list[ms.Explanation]:
    names = [f"case_{i}" for i in range(len(image))]
    inferer = ms.rise(NUM_MASKS, 3, target=TARGET, mask_batch_size=BATCH)
    return inferer.explain(
        image, network, cases=[ms.Case(name) for name in names], stored=[store.open(name, key) for name in names]
    )


def test_all_scores_of_a_case_are_written_once(
    image: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the loop has them; the map, which another thread makes of them later, writes nothing."""
    written: list[int] = []
    finish = StoredScores.finish
    monkeypatch.setattr(
        StoredScores, "finish", lambda stored, ids, scores: (written.append(len(scores)), finish(stored, ids, scores))
    )
    inferer = ms.rise(NUM_MASKS, 3, target=TARGET, mask_batch_size=BATCH)
    found: list[Any] = inferer.score(image, Network(), stored=[ScoreStore(tmp_path).open("a", "k")])
    assert found[0].saliency.shape == (2, 12, 10)
    assert written == [NUM_MASKS]


@pytest.mark.parametrize("stop_at", [2, BATCHES // 2 + 1, BATCHES])
def test_resumes_in_the_middle_of_a_case(image: torch.Tensor, tmp_path: Path, stop_at: int) -> None:
    """Law 7: to the bit, and at most one batch is lost besides the one that vouches for the stored scores."""
    whole = ms.rise(NUM_MASKS, 3, target=TARGET, mask_batch_size=BATCH).explain(image, Network())[0]
    store, stopped, resumed = ScoreStore(tmp_path), Network(stop_at), Network()
    with pytest.raises(Stopped):
        explain(image, stopped, store)
    (explanation,) = explain(image, resumed, store)
    assert_same_bits(explanation.saliency, whole.saliency)
    assert_same_bits(explanation.scores, whole.scores)
    # Stopped in batch s, s - 1 are done, of which the last is still unwritten and the first runs again.
    assert resumed.batches <= 1 + BATCHES - max(stop_at - 2, 1)
    again = Network()
    (explanation,) = explain(image, again, store)
    assert again.batches == 1
    assert explanation.num_forwards == BATCH - 1  # beside the image with everything hidden
    assert_same_bits(explanation.saliency, whole.saliency)


def test_scores_of_another_network_are_not_used(image: torch.Tensor, tmp_path: Path) -> None:
    """Law 8, the second guard: even under one key, the unperturbed image must score the same."""
    store = ScoreStore(tmp_path)
    explain(image, Network(), store)
    changed = Network()
    changed.weight.data[0, 0] += 1
    (explanation,) = explain(image, changed, store)
    assert changed.batches == BATCHES
    changed.batches = 0
    expected = ms.rise(NUM_MASKS, 3, target=TARGET, mask_batch_size=BATCH).explain(image, changed)[0]
    assert_same_bits(explanation.saliency, expected.saliency)


def kept(scores: StoredScores) -> list[list[int]]:
    return [ids for ids, _ in scores.load()]


def test_scores_of_other_masks_or_another_output_are_not_used(tmp_path: Path) -> None:
    """As where an atlas file was replaced, or the score of every unperturbed image is 0."""
    scores = ScoreStore(tmp_path).open("case", "k")
    reference, vouch = torch.zeros(1), torch.tensor([3.0, 4.0])
    for masks, numbers, same in (
        ("a", vouch, False),
        ("a", vouch, True),
        ("a", vouch * (1 + 1e-7), True),
        ("b", vouch, False),
        ("b", vouch + 1e-3, False),
        ("b", None, False),
        ("b", None, True),
    ):
        scores.resume(reference, masks, numbers)
        assert kept(scores) == ([[0, 1, 2, 3]] if same else [])
        scores.add(range(4), torch.ones(4, 1))
        scores.flush()


def test_a_passing_fault_is_not_kept(tmp_path: Path) -> None:
    scores = ScoreStore(tmp_path).open("case", "k")
    scores.resume(torch.zeros(1))
    for start, value in ((0, 1.0), (4, float("nan")), (8, float("inf"))):
        scores.add(range(start, start + 4), torch.full((4, 1), value))
    scores.flush()
    assert kept(scores) == [[0, 1, 2, 3]]


def test_ids_of_any_family_come_back(tmp_path: Path) -> None:
    """Numbers, tuples of numbers, also NumPy's, and tuples of tuples."""
    scores, ids = ScoreStore(tmp_path).open("case", "k"), [7, (0, np.int64(3)), ((1, 2), 5), ()]
    scores.add(ids, torch.arange(4.0)[:, None])
    scores.flush()
    ((found, values),) = scores.load()
    assert found == [7, (0, 3), ((1, 2), 5), ()]
    assert values.flatten().tolist() == [0, 1, 2, 3]


def test_a_file_has_a_checksum(tmp_path: Path) -> None:
    """A flipped bit in the values is noticed, and a file of an older version is computed again."""
    scores = ScoreStore(tmp_path).open("case", "k")
    scores.add(range(4), torch.rand(4, 2))
    scores.flush()
    (path,) = scores.folder.iterdir()
    whole = path.read_bytes()
    for place in (-12, -20, 130):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert kept(scores) == []
    with path.open("wb") as file:
        np.save(file, np.zeros((4, 2), np.float32))
    assert kept(scores) == []
    path.write_bytes(whole)
    assert kept(scores) == [[0, 1, 2, 3]]


def test_workers_whose_references_differ_do_not_remove_each_others_scores_for_ever(tmp_path: Path) -> None:
    one, other = (ScoreStore(tmp_path).open("case", "k") for _ in range(2))
    one.resume(torch.ones(2))
    one.check_unchanged()
    other.resume(torch.ones(2) * (1 + 5e-6))
    other.check_unchanged()
    with pytest.raises(ValueError, match="another worker scores the unperturbed image"):
        one.check_unchanged()


def test_only_what_changed_is_computed_again(cohort: Path) -> None:
    """A scan, a weight or a setting changes: counted in batches. Unchanged cases run one, which vouches for them."""
    count = lambda: forwards(cohort, "out")  # noqa: E731
    monai.bundle.run(**settings(cohort, "out"))
    assert count() == 3 * BATCHES
    before = voxels(cohort / "out")
    monai.bundle.run(**settings(cohort, "out"))
    assert count() == 3 * BATCHES + 3
    assert voxels(cohort / "out") == before != {}
    write_scan(cohort / "cohort" / "s1.nii.gz", (13, 12, 14), LPS, seed=9)
    monai.bundle.run(**settings(cohort, "out"))
    assert count() == 3 * BATCHES + 3 + BATCHES + 2
    start = count()
    monai.bundle.run(**settings(cohort, "out", seed=1))
    assert count() == start + 3 * BATCHES
    changed = settings(cohort, "out")
    changed["network_def"] |= {"seed": 1}  # type: ignore[operator]
    start = count()
    monai.bundle.run(**changed)
    assert count() == start + 3 * BATCHES


def forked(cohort: Path, out: str, seconds: float) -> multiprocessing.process.BaseProcess:
    """A run in a process that has imported its packages already: 12 times that would be most of the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["monai_saliency.handlers", "monai_saliency.bundle", "monai_saliency.engines"])
    process = context.Process(target=monai.bundle.run, kwargs=settings(cohort, out, seconds))
    process.start()
    return process


@pytest.mark.slow
def test_killed_at_12_moments(cohort: Path) -> None:
    """Each time resumed; in the end the maps of a run that was left alone, and at most two batches lost a kill."""
    monai.bundle.run(**settings(cohort, "whole"))
    expected = voxels(cohort / "whole")
    assert len(expected) == 3
    draw, kills, lost = random.Random(0), 0, []
    out = 0
    while kills < 12:
        name = f"out{out}"
        while kills < 12:
            log = cohort / f"{name}.log"
            lines = len(log.read_text().split()) if log.exists() else 0
            process = forked(cohort, name, 0.05)
            # Kill some time after its first forward: most of the time before is Python's own start.
            while process.is_alive() and (not log.exists() or len(log.read_text().split()) == lines):
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.5))
            if not process.is_alive():
                assert process.exitcode == 0
                break
            process.kill()
            process.join()
            kills += 1
        else:
            monai.bundle.run(**settings(cohort, name))
        assert voxels(cohort / name) == expected
        sizes = (cohort / f"{name}.log").read_text().split()
        lost.append(sizes.count(str(BATCH)) - 3 * BATCHES)
        out += 1
    # Two batches, and one in the next visit to the case, which vouches for its scores.
    assert sum(lost) <= (2 + 1) * kills


@pytest.mark.slow
def test_two_runs_on_one_folder(cohort: Path) -> None:
    """Each case is done once, or left to the one who holds it; nothing is clobbered."""
    monai.bundle.run(**settings(cohort, "whole"))
    runs = [launch(cohort, "out", 0.1), launch(cohort, "out", 0.1)]
    errors = [process.communicate()[1] for process in runs]
    # One that ends while the other holds its last case has no map of it, and says so.
    assert sorted(process.returncode for process in runs) in ([0, 0], [0, 1]), errors
    for process, lines in zip(runs, errors, strict=True):
        assert (process.returncode == 1) == ("without a map yet" in lines), errors
    assert voxels(cohort / "out") == voxels(cohort / "whole") != {}
    table = (cohort / "out" / "summary.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in table[1:]] == ["s0", "s1", "s2"]
    # No range of masks was computed twice: what is more than once is the batch that vouches for the scores.
    assert forwards(cohort, "out") <= 3 * BATCHES + 3
