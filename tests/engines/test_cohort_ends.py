"""How each case of a cohort ends: with a map and its row, or in the list of failures, and never in both or neither."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
from helpers.files import rows_of
from helpers.own_bundle import settings
from monai.transforms import MapTransform


def run(tmp_path: Path, out: str = "out", **overrides: Any) -> None:
    monai.bundle.run(**settings(tmp_path, out, **overrides))


def found(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The cases that have a map, a row, and a failure."""
    maps = [path.relative_to(folder).as_posix().removesuffix("_saliency.nii.gz") for path in folder.rglob("*.nii.gz")]
    rows = rows_of(folder / "summary.csv") if (folder / "summary.csv").exists() else []
    failures = rows_of(folder / "failures.csv") if (folder / "failures.csv").exists() else []
    return sorted(maps), [row["case"] for row in rows], [row["case"] for row in failures]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_map_of_a_scan_that_fails_now_goes(strict: bool, cohort: Path) -> None:
    """An earlier run has made it of another scan, and nobody could tell it from a result."""
    run(cohort, picture=True)
    assert found(cohort / "out") == (["s0", "s1", "s2"], ["s0", "s1", "s2"], [])
    (cohort / "cohort" / "s1.nii.gz").write_bytes(b"no scan")
    with pytest.raises((SystemExit, RuntimeError)):
        run(cohort, picture=True, strict=strict)
    assert found(cohort / "out") == (["s0", "s2"], ["s0", "s2"], [] if strict else ["s1"])
    assert not (cohort / "out" / "s1_saliency.png").exists()


class Leaves(MapTransform):
    """Ends the program at a scan, as a library may that finds a licence missing."""

    def __call__(self, data: Any) -> Any:
        if data["case"] == "s1":
            sys.exit()
        return data


@pytest.mark.parametrize(
    ("where", "workers"), [("loading", {"num_workers": 2}), ("saving", {"num_workers": 0})], ids=["loading", "saving"]
)
def test_a_transform_that_ends_the_program_fails_its_case(where: str, workers: dict[str, Any], cohort: Path) -> None:
    leaves = {"_target_": "test_cohort_ends.Leaves", "keys": "image"}
    save = {"_target_": "monai_saliency.transforms.SaveSaliencyd", "keys": "saliency", "output_dir": "@output_dir"}
    steps = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        *([leaves] if where == "loading" else []),
    ]
    changes = {"preprocessing::transforms": steps, "cache": "none"}
    changes["saliency_postprocessing::transforms"] = [*([leaves] if where == "saving" else []), save]
    with pytest.raises(SystemExit, match="error: 1 case without a map"):
        run(cohort, **changes, **workers)
    assert found(cohort / "out") == (["s0", "s2"], ["s0", "s2"], ["s1"])
    assert rows_of(cohort / "out" / "failures.csv")[0]["error"].startswith("SystemExit")
