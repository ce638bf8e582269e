"""nnU-Net's names of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from monai_saliency.bundle.nnunet import find_nnunet_cases


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / f"{name}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return folder


def test_one_file_for_each_channel(tmp_path: Path) -> None:
    folder = make(tmp_path, "b_0000", "b_0001", "sub/a_0001", "sub/a_0000")
    cases = find_nnunet_cases(folder, channels=2)
    assert [case["case"] for case in cases] == ["b", "sub/a"]
    assert cases[1]["image"] == [str(folder / f"sub/a_000{i}.nii.gz") for i in range(2)]
    assert cases[1]["channels"] == 2


def test_numbers_may_be_left_out_for_one_channel(tmp_path: Path) -> None:
    cases = find_nnunet_cases(make(tmp_path, "b", "a_0000"))
    assert [(case["case"], Path(case["image"]).name) for case in cases] == [("a", "a_0000.nii.gz"), ("b", "b.nii.gz")]


def test_labels_lie_beside_the_images(tmp_path: Path) -> None:
    folder = make(tmp_path, "imagesTr/a_0000", "labelsTr/a")
    (case,) = find_nnunet_cases(folder / "imagesTr")
    assert (case["case"], case["label"]) == ("a", str(folder / "labelsTr" / "a.nii.gz"))


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["a_0001"], "must have one file for each of 2 channels, a_0000, a_0001, got a_0001"),
        (["a_0000", "a_0001", "a_0002"], "got a_0000, a_0001, a_0002"),
        (["a_0000", "a_0001", "a"], "and one without a number"),
    ],
)
def test_channels_must_be_complete(tmp_path: Path, names: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_nnunet_cases(make(tmp_path, *names), channels=2)
