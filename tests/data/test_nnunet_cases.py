"""nnU-Net's names of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monai_saliency.data import find_nnunet_cases


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


def test_takes_the_images_of_a_dataset_with_their_labels(tmp_path: Path) -> None:
    folder = make(tmp_path, "imagesTr/a_0000", "labelsTr/a")
    (folder / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}, "file_ending": ".nii.gz"}))
    (case,) = find_nnunet_cases(folder)
    assert (case["case"], case["label"]) == ("a", str(folder / "labelsTr" / "a.nii.gz"))
    make(tmp_path, "imagesTs/b_0000")
    assert [case["case"] for case in find_nnunet_cases(folder)] == ["b"]
    assert [case["case"] for case in find_nnunet_cases(folder, section="training")] == ["a"]


def test_photographs_have_their_colours_in_one_file_or_in_several(tmp_path: Path) -> None:
    for name in ("a_0000.png", "b_0000.tif", "b_0001.tif", "b_0002.tif", "c.png"):
        make(tmp_path, name)
        (tmp_path / f"{name}.nii.gz").rename(tmp_path / name)
    cases = find_nnunet_cases(tmp_path, channels=3, spatial_dims=2)
    assert [(case["case"], case["channels"]) for case in cases] == [("a", 3), ("b", 3), ("c", 3)]
    assert cases[0]["image"] == str(tmp_path / "a_0000.png")
    assert cases[1]["image"] == [str(tmp_path / f"b_000{i}.tif") for i in range(3)]
    (tmp_path / "b_0001.tif").unlink()
    with pytest.raises(ValueError, match=r"case b of .* got b_0000.tif, b_0002.tif"):
        find_nnunet_cases(tmp_path, channels=3, spatial_dims=2)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["a_0001"], "must have 2 channels, each in a file .a_0000, a_0001., got a_0001.nii.gz"),
        (["a_0000", "a_0001", "a_0002"], "got a_0000.nii.gz, a_0001.nii.gz, a_0002.nii.gz"),
        (["a_0000", "a_0001", "a"], "and a file without a number"),
    ],
)
def test_channels_must_be_complete(tmp_path: Path, names: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_nnunet_cases(make(tmp_path, *names), channels=2)


def test_a_list_names_scans_as_anywhere(tmp_path: Path) -> None:
    folder = make(tmp_path, "x_0000", "y_0000")
    (folder / "list.csv").write_text("image\nx_0000.nii.gz\n")
    (case,) = find_nnunet_cases(folder / "list.csv")
    assert case["image"] == str(folder / "x_0000.nii.gz")
