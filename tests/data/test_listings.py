"""Lists of scans: MONAI's datalist and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from monai.data import load_decathlon_datalist

from monai_saliency.data.cohort import find_cases

FILES = ("x/a.png", "x/b.png", "x/c.nii.gz", "labels/c.nii.gz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def names(path: Path, section: str | None = None, **more: Any) -> list[str]:
    return [case["case"] for case in find_cases(path, section, **more)]


CLASSES = "image,label,split\nx/a.png,1,train\nx/b.png,nodule,test\n\nx/c.nii.gz,labels/c.nii.gz,test\n"


@pytest.mark.parametrize(
    "text",
    [
        CLASSES,
        CLASSES.replace(",", ";").replace("image", "\ufeffImage"),
        CLASSES.replace(",", "\t").replace("\n", "\r\n"),
        'split, image ,label\ntrain,"x/a.png",1\ntest,x/b.png,\ntest,x/c.nii.gz,labels/c.nii.gz\n',
    ],
)
def test_a_table_has_images_labels_and_a_split(text: str, folder: Path) -> None:
    (folder / "list.csv").write_text(text, encoding="utf-8", newline="")
    assert names(folder / "list.csv") == ["x/b", "x/c"]  # test goes first
    assert names(folder / "list.csv", "train") == ["x/a"]
    found = find_cases(folder / "list.csv", "test", channels=3)
    assert [case["label"] for case in found] == ["", str(folder / "labels" / "c.nii.gz")]
    assert [case["channels"] for case in found] == [3, 3]
    with pytest.raises(ValueError, match=r"no scan found in section 'fold' of .*list\.csv"):
        find_cases(folder / "list.csv", "fold")


def test_a_table_without_a_split_or_with_folds(folder: Path) -> None:
    (folder / "all.csv").write_text("image\nx/b.png\nx/a.png\n")
    (folder / "folds.CSV").write_text("image,split\nx/b.png,0\nx/a.png,1\n")
    assert names(folder / "all.csv") == names(folder / "folds.CSV") == ["x/a", "x/b"]
    assert names(folder / "folds.CSV", "1") == ["x/a"]


def test_no_row_is_lost_by_the_name_of_its_split(folder: Path) -> None:
    """One that is misspelt is an error rather than left out."""
    for wrong in ("tset", ""):
        (folder / "list.csv").write_text(f"image,split\nx/a.png,test\nx/b.png,{wrong}\n")
        with pytest.raises(
            ValueError, match=rf"rows whose `split` is not one of .* \(\['{wrong}'\]\), in addition to 'test'"
        ):
            find_cases(folder / "list.csv")


def test_a_datalist_is_what_monai_makes_of_it(folder: Path) -> None:
    """Channels in files of their own, a class in place of a label map, and a section with a name of its own."""
    content = {
        "training": [
            {"image": ["x/a.png", "x/b.png"], "label": "labels/c.nii.gz"},
            {"image": "x/c.nii.gz", "label": 1},
        ],
        "fold": ["x/b.png"],
    }
    (folder / "my list.json").write_text(json.dumps(content))
    found = find_cases(folder / "my list.json")
    monais = load_decathlon_datalist(folder / "my list.json", False)
    assert [case["case"] for case in found] == ["x/a", "x/c"]
    assert [case["image"] for case in found] == [each["image"] for each in monais]
    assert [case["label"] for case in found] == [monais[0]["label"], ""]
    assert [case["channels"] for case in found] == [2, 1]
    assert names(folder / "my list.json", "fold") == ["x/b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "file,label\nx/a.png,1\n",
            r"must have a column `image`, and may have `label` and `split`, got \['file', 'label'\]",
        ),
        ("", r"must have a column `image`.*got \[\]"),
        ("image,split\n,test\n", r"list\.csv lists \{'image': '', 'split': 'test'\}, where a path"),
        ("image\nnowhere.png\n", r"none of the 1 scans of .*list\.csv exists: .*nowhere\.png does not exist"),
        ("image\n", r"no scan found in .*list\.csv"),
        ("image\nx/a.png\n./x/a.png\n", r"two scans of .* share the name 'x/a'"),
        ("imag\u00e9\n".encode("latin-1"), r"list\.csv cannot be read as a list of scans .*save it in UTF-8"),
    ],
)
def test_a_table_that_is_none(text: str | bytes, message: str, folder: Path) -> None:
    (folder / "list.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        find_cases(folder / "list.csv")


def test_a_listed_label_map_that_is_missing(folder: Path) -> None:
    (folder / "list.csv").write_text("image,label\nx/c.nii.gz,labels/d.nii.gz\n")
    with pytest.warns(UserWarning, match=r"the label map .*d\.nii\.gz of the list .*list\.csv does not exist"):
        assert find_cases(folder / "list.csv")[0]["label"] == ""
