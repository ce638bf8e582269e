"""A method of a user's own, in two rounds, under every engine: the plain run's maps, also after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import monai.bundle
import pytest
import torch
from helpers.files import maps
from helpers.own_bundle import rank, settings
from helpers.scans import write_scans

from monai_saliency.storage.score_store import CaseScores

METHOD: dict[str, Any] = {"method": "helpers.two_rounds.two_rounds", "window": 6}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three scans, and their maps in ``plain``."""
    folder = tmp_path_factory.mktemp("rounds")
    write_scans(folder, 3)
    explain(folder, "plain")
    assert len(maps(folder / "plain")) == 3
    # Of 12^3 voxels: the scan and 8 windows of 6^3, then the 8 of 3^3 in one of them; 4 rows in each batch.
    assert batches(folder, "plain") == 3 * (3 + 2)
    return folder


def batches(folder: Path, out: str) -> int:
    """How many batches held perturbed images."""
    return (folder / f"{out}.log").read_text().split().count("4")


def explain(folder: Path, out: str, **overrides: Any) -> None:
    given = settings(folder, out)
    for name in ("num_masks", "grid_size"):
        del given[name]
    monai.bundle.run(**given | METHOD | overrides)


@pytest.mark.parametrize("split", ["cases", "masks"])
def test_ranks(cohort: Path, split: str) -> None:
    """Processes of torchrun, SLURM, Lightning and Accelerate, each after the other."""
    for number in range(2):
        explain(cohort, f"ranks {split}", **rank(number, 2, split))
    assert maps(cohort / f"ranks {split}") == maps(cohort / "plain")


def test_a_run_that_was_stopped_in_the_second_round(cohort: Path) -> None:
    """Of each case, all batches but one are found on disk: the one that holds the unperturbed image."""
    explain(cohort, "resumed")
    before = batches(cohort, "resumed")
    for scores in (cohort / "resumed" / "scores").rglob("0-16.npy"):
        kept = CaseScores(scores.parent)
        ((_, _, found),) = kept.ranges()
        kept.add(0, 11, torch.from_numpy(found[:11]))  # the first round, and 3 of the second
        kept.flush()
        scores.unlink()
    for path in (cohort / "resumed").glob("*.nii.gz"):
        path.unlink()
    explain(cohort, "resumed")
    assert maps(cohort / "resumed") == maps(cohort / "plain")
    # The first batch, and the second round, of which one batch is not complete on disk.
    assert batches(cohort, "resumed") - before == 3 * (1 + 2)
