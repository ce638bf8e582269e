"""Two folders of maps, made by hand."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from monai_saliency.__main__ import main
from monai_saliency.metrics.agreement import compare

MAP = np.array([[0.5, -2.0], [1.0, 0.0]], dtype=np.float32)


def write(path: Path, voxels: np.ndarray = MAP, affine: np.ndarray | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """One map in the folder, and one of a case with a folder of its own; a third file is half written."""
    for name in ("a", "b"):
        write(tmp_path / name / "ct_1_saliency.nii.gz")
        write(tmp_path / name / "sub-01" / "ct_2_saliency.nii.gz", 3 * MAP)
    (tmp_path / "a" / ".tmp-host-1-ct_3_saliency.nii.gz").write_bytes(b"half")
    (tmp_path / "a" / "summary.csv").write_text("case\n")
    return tmp_path / "a", tmp_path / "b"


def run(*words: str | Path) -> int:
    try:
        main(["compare", *map(str, words)])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def test_equal(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*folders) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cases in both: 2",
        "largest difference: 0 of the map's largest absolute value, of case ct_1",
        "voxel bytes equal: yes",
        "affines equal: yes",
    ]


def test_the_largest_difference_is_relative_to_the_first_map(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """0.25 of 2 in one case; 0.375 of 6 in the other, which is more but not of its map."""
    write(folders[1] / "ct_1_saliency.nii.gz", MAP + np.float32([[0, 0], [0, 0.25]]))
    write(folders[1] / "sub-01" / "ct_2_saliency.nii.gz", 3 * MAP - np.float32([[0.375, 0], [0.125, 0]]))
    assert run(*folders) == 1
    printed = capsys.readouterr().out
    assert (
        "largest difference: 0.125 of the map's largest absolute value, of case ct_1\nvoxel bytes equal: no" in printed
    )
    found = compare(*folders)
    assert {case.case: case.difference for case in found.both} == {"ct_1": 0.125, "sub-01/ct_2": 0.0625}
    assert run(*folders, "--tolerance", "0.125") == 0
    assert run(*folders, "--tolerance", "0.124") == 1


def test_cases_in_one_only(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3, 10):
        write(folders[0] / f"ct_{number}_saliency.nii.gz")
    (folders[0] / "ct_1_saliency.nii.gz").unlink()
    assert run(*folders, "--tolerance", "1") == 1
    assert capsys.readouterr().out.splitlines()[:3] == [
        "cases in both: 1",
        "only in the first: 7 (ct_3, ct_4, ct_5, ct_6, ct_7, ...)",
        "only in the second: 1 (ct_1)",
    ]


@pytest.mark.parametrize(
    "other",
    [MAP[:, :1], np.where(MAP == 1, np.float32("nan"), MAP), np.where(MAP == 1, np.float32("inf"), MAP)],
    ids=["shape", "nan", "inf"],
)
def test_what_has_no_difference_in_numbers(folders: tuple[Path, Path], other: np.ndarray) -> None:
    write(folders[1] / "ct_1_saliency.nii.gz", other)
    assert compare(*folders).worst.difference == float("inf")
    assert run(*folders, "--tolerance", "1e30") == 1


def test_errors_say_what_to_do(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder: give the output folder of a run"):
        compare(folders[0], tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no maps \(\*_saliency.nii.gz\)"):
        compare(tmp_path / "empty", folders[0])
    for damage in (b"half", (folders[0] / "ct_1_saliency.nii.gz").read_bytes()[:-20]):
        (folders[1] / "ct_1_saliency.nii.gz").write_bytes(damage)
        with pytest.raises(ValueError, match=r"ct_1_saliency\.nii\.gz is not a readable map"):
            compare(*folders)
    with pytest.raises(SystemExit, match=r"error: .*nowhere is not a folder"):
        main(["compare", str(folders[0]), str(tmp_path / "nowhere")])
