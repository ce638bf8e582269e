import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.scans import LPS, write_scan
from monai.data import load_decathlon_datalist
from monai.transforms import LoadImaged

import monai_saliency as ms
from monai_saliency.data.cohort import loading_error
from monai_saliency.errors import CaseError
from monai_saliency.storage.scans import scan_loader


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def decathlon(root: Path, **content: object) -> None:
    (root / "dataset.json").write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def forbidden() -> Iterator[Path]:
    """A folder with a scan that this process may not read; root becomes another user for it."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path = write_scan(Path(name, "a.nii.gz"), (4, 4, 4), LPS)
        scan_loader("image")({"image": path})  # so that all of the reader is imported
        shutil.copy(path, path.with_name("slice"))
        for file in (path, path.with_name("slice")):
            file.chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.setresuid(65534, 65534, 0)
        try:
            yield path
        finally:
            if is_root:
                os.setresuid(0, 0, 0)


@pytest.mark.parametrize("listed", [False, True])
def test_a_scan_without_permission(listed: bool) -> None:
    with forbidden() as path:
        image: Any = [str(path)] * 2 if listed else str(path)
        with pytest.raises(Exception, match=r"a\.nii\.gz") as caught:
            scan_loader("image")({"image": image})
        problem = loading_error(caught.value, {"case": "a", "image": image}, 0).problem
        assert problem == f"no permission to read {path}: change its mode, such as by chmod +r"
        # The path of a slice may name a patient.
        series = [str(path.with_name("slice"))]
        problem = loading_error(caught.value, {"case": "a", "image": series}, 0).problem
        assert problem == "no permission to read one of its DICOM files: change its mode, such as by chmod +r"


class TestPlainFolder:
    def test_scans_below_a_folder(self, tmp_path: Path) -> None:
        """Recursive, sorted, both suffixes, one name in two folders kept apart; other and hidden files skipped."""
        touch(tmp_path, "b/scan.nii.gz", "a/scan.nii.gz", "a/deep/er/x.nii", "top.NII.GZ", "with.dots.nii.gz")
        touch(tmp_path, "._top.nii.gz", "a/._scan.nii.gz", "a/.hidden.nii", "notes.txt", "a/scan.nii.gz.md5", "t.mgz")
        (tmp_path / "folder.nii.gz").mkdir()
        found = ms.data.find_cases(tmp_path)
        files = {"a/deep/er/x": "a/deep/er/x.nii", "a/scan": "a/scan.nii.gz", "b/scan": "b/scan.nii.gz"}
        files |= {"top": "top.NII.GZ", "with.dots": "with.dots.nii.gz"}
        assert found == [
            {"case": case, "image": str(tmp_path / path), "label": "", "channels": 1} for case, path in files.items()
        ]

    @pytest.mark.parametrize("out", ["cohort", ".", "cohort/../cohort"])
    def test_an_output_folder_that_holds_the_cohort_is_named(self, out: str, tmp_path: Path) -> None:
        touch(tmp_path / "cohort", "a.nii.gz")
        with pytest.raises(ValueError, match=r"the output folder .* is or holds `dataset_dir` .*: choose"):
            ms.data.find_cases(tmp_path / "cohort", exclude=tmp_path / out)
        # A listing says what the scans are.
        decathlon(tmp_path / "cohort", test=["a.nii.gz"])
        assert len(ms.data.find_cases(tmp_path / "cohort", exclude=tmp_path / out)) == 1

    def test_exclude(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The output folder below the cohort is none of it, however its path is written."""
        touch(tmp_path, "a.nii.gz", "out/a_saliency.nii.gz", "out/sub/b_saliency.nii.gz", "outer/c.nii.gz")
        monkeypatch.chdir(tmp_path)
        for exclude in (tmp_path / "out", "out", "./outer/../out"):
            assert [case["case"] for case in ms.data.find_cases(tmp_path, exclude=exclude)] == ["a", "outer/c"]
        assert len(ms.data.find_cases(tmp_path, exclude="nowhere")) == 4

    def test_links_to_files_that_are_not_there(self, tmp_path: Path) -> None:
        """git-annex leaves such links for what is not fetched, and keeps its files in a hidden folder."""
        for name in ("b", "a"):
            (tmp_path / f"{name}.nii.gz").symlink_to(f".git/annex/{name}-key.nii.gz")
        touch(tmp_path, ".git/annex/a-key.nii.gz")
        assert [case["case"] for case in ms.data.find_cases(tmp_path)] == ["a", "b"]
        with pytest.raises(CaseError, match=r"^case b: .*b\.nii\.gz is a link to .*, which does not exist: copy or"):
            ms.data.CachedDataset(ms.data.find_cases(tmp_path), LoadImaged("image"))[1]

    def test_linked_folders(self, tmp_path: Path) -> None:
        """Each link has its scans, and none goes round in circles."""
        touch(tmp_path, "store/x.nii.gz", "store/deep/y.nii", "cohort/a.nii.gz")
        links = {"cohort/s1": "store", "cohort/s2": "store", "cohort/self": "cohort", "store/back": "cohort"}
        for name, place in links.items():
            (tmp_path / name).symlink_to(tmp_path / place)
        (tmp_path / "cohort" / "round.nii.gz").symlink_to("round.nii.gz")
        names = [case["case"] for case in ms.data.find_cases(tmp_path / "cohort")]
        assert names == ["a", "round", "s1/deep/y", "s1/x", "s2/deep/y", "s2/x"]

    @pytest.mark.parametrize("name", ["nowhere", "file.nii.gz"])
    def test_no_folder(self, tmp_path: Path, name: str) -> None:
        touch(tmp_path, "file.nii.gz")
        with pytest.raises(FileNotFoundError, match=f"`dataset_dir` .*{name} is not a folder: pass --dataset_dir"):
            ms.data.find_cases(tmp_path / name)

    def test_no_scan(self, tmp_path: Path) -> None:
        touch(tmp_path, "readme.txt", "._a.nii.gz")
        with pytest.raises(ValueError, match=r"no scan found in .*: it must hold \*.nii.gz or \*.nii files"):
            ms.data.find_cases(tmp_path)

    def test_scans_that_differ_in_their_suffix_alone_keep_it(self, tmp_path: Path) -> None:
        """None is lost, and no other case changes its name."""
        touch(tmp_path, "sub/a.nii", "sub/a.nii.gz", "a.nii", "f.png", "f.JPG", "g.tiff")
        assert {Path(case["image"]).name: case["case"] for case in ms.data.find_cases(tmp_path / "sub")} == {
            "a.nii": "a.nii",
            "a.nii.gz": "a.nii.gz",
        }
        names = [case["case"] for case in ms.data.find_cases(tmp_path, spatial_dims=2)]
        assert names == ["a", "f.JPG", "f.png", "g", "sub/a.nii", "sub/a.nii.gz"]

    def test_formats(self, tmp_path: Path) -> None:
        """Pictures are scans where 2D ones are asked for; beside 3D scans they are views of them."""
        touch(tmp_path, "a.nii", "b.png", "c.seg.nrrd", "d.jpeg", "e.TIF", "f.raw", "g.txt")
        assert [case["case"] for case in ms.data.find_cases(tmp_path)] == ["a"]
        found = ms.data.find_cases(tmp_path, spatial_dims=2, channels=3)
        assert [(case["case"], case["channels"]) for case in found] == [(name, 3) for name in "abde"]
        (tmp_path / "a.nii").unlink()
        with pytest.raises(ValueError, match=r"no scan found in .*, or pictures, .* with --spatial_dims 2"):
            ms.data.find_cases(tmp_path)


class TestDecathlonFolder:
    def test_entries_and_labels(self, tmp_path: Path) -> None:
        """Plain paths and dictionaries, labels named or beside the scans, and no other file of the folder."""
        touch(tmp_path, "imagesTs/c.nii.gz", "imagesTs/a.nii.gz", "imagesTs/b.nii.gz", "imagesTs/unlisted.nii.gz")
        touch(tmp_path, "labelsTs/a.nii.gz", "elsewhere/b_seg.nii.gz")
        decathlon(
            tmp_path,
            modality={"0": "CT"},
            training=[{"image": "./imagesTr/missing.nii.gz"}],
            test=[
                "./imagesTs/c.nii.gz",
                "./imagesTs/a.nii.gz",
                {"image": "./imagesTs/b.nii.gz", "label": "./elsewhere/b_seg.nii.gz"},
            ],
        )
        found = ms.data.find_cases(tmp_path)
        assert [case["case"] for case in found] == ["imagesTs/a", "imagesTs/b", "imagesTs/c"]
        assert [Path(case["image"]) for case in found] == [tmp_path / "imagesTs" / f"{n}.nii.gz" for n in "abc"]
        assert [case["label"] and Path(case["label"]).relative_to(tmp_path).as_posix() for case in found] == [
            "labelsTs/a.nii.gz",
            "elsewhere/b_seg.nii.gz",
            "",
        ]
        assert {case["channels"] for case in found} == {1}

    @pytest.mark.parametrize("key", ["modality", "channel_names"])
    def test_modalities_are_channels(self, tmp_path: Path, key: str) -> None:
        touch(tmp_path, "imagesTs/a.nii.gz")
        modalities = {str(i): name for i, name in enumerate(("FLAIR", "T1w", "t1gd", "T2w"))}
        decathlon(tmp_path, **{key: modalities}, test=["./imagesTs/a.nii.gz"])
        assert [case["channels"] for case in ms.data.find_cases(tmp_path)] == [4]

    def test_sections(self, tmp_path: Path) -> None:
        touch(tmp_path, "imagesTr/a.nii.gz", "labelsTr/a.nii.gz", "imagesTr/v.nii.gz")
        decathlon(
            tmp_path,
            test=[],
            training=[{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}],
            validation=[{"image": "./imagesTr/v.nii.gz"}],
        )
        assert [case["case"] for case in ms.data.find_cases(tmp_path)] == ["imagesTr/a"]
        assert [case["case"] for case in ms.data.find_cases(tmp_path, section="validation")] == ["imagesTr/v"]
        for section in ("test", "holdout"):
            with pytest.raises(ValueError, match=rf"no scan found in section '{section}' of .*dataset.json"):
                ms.data.find_cases(tmp_path, section=section)

    def test_a_listed_scan_elsewhere(self, tmp_path: Path) -> None:
        """Its outputs stay below the output folder, and equal names stay apart."""
        touch(tmp_path, "x/a.nii.gz", "y/a.nii.gz", "cohort/a.nii.gz")
        decathlon(tmp_path / "cohort", test=["../x/a.nii.gz", str(tmp_path / "y" / "a.nii.gz"), "a.nii.gz"])
        names = [case["case"] for case in ms.data.find_cases(tmp_path / "cohort")]
        assert len(set(names)) == 3
        assert all(name.startswith("a") and "/" not in name and ".." not in name for name in names)
        assert names == [case["case"] for case in ms.data.find_cases(tmp_path / "cohort")]

    def test_a_listed_scan_is_missing(self, tmp_path: Path) -> None:
        """It is a case, unless all are missing."""
        decathlon(tmp_path, test=["./imagesTs/b.nii.gz", "./imagesTs/a.nii.gz"])
        with pytest.raises(
            FileNotFoundError, match=r"none of the 2 scans of .* exists: .*b\.nii\.gz does not exist: copy"
        ):
            ms.data.find_cases(tmp_path)
        touch(tmp_path, "imagesTs/a.nii.gz", "labelsTs/b.nii.gz")
        assert [(case["case"], Path(case["image"]), case["label"]) for case in ms.data.find_cases(tmp_path)] == [
            ("imagesTs/a", tmp_path / "imagesTs" / "a.nii.gz", ""),
            ("imagesTs/b", tmp_path / "imagesTs" / "b.nii.gz", str(tmp_path / "labelsTs" / "b.nii.gz")),
        ]

    @pytest.mark.parametrize("text", ['{"test": [', b"\xff\xfe{}"])
    def test_broken_json(self, tmp_path: Path, text: str | bytes) -> None:
        (tmp_path / "dataset.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=r"dataset.json cannot be read as a list .*mend it, or remove it"):
            ms.data.find_cases(tmp_path)

    @pytest.mark.parametrize("text", ["[]", '{"test": [{"label": "a.nii.gz"}]}', '{"test": [3]}', '{"test": "a.nii"}'])
    def test_json_of_something_else(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(ValueError, match=r"dataset\.json"):
            ms.data.find_cases(tmp_path)


# Lists of scans: MONAI's datalist and tables.
FILES = ("x/a.png", "x/b.png", "x/c.nii.gz", "labels/c.nii.gz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def names(path: Path, section: str | None = None, **more: Any) -> list[str]:
    return [case["case"] for case in ms.data.find_cases(path, section, **more)]


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
    found = ms.data.find_cases(folder / "list.csv", "test", channels=3)
    assert [case["label"] for case in found] == ["", str(folder / "labels" / "c.nii.gz")]
    assert [case["channels"] for case in found] == [3, 3]
    with pytest.raises(ValueError, match=r"no scan found in section 'fold' of .*list\.csv"):
        ms.data.find_cases(folder / "list.csv", "fold")


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
            ms.data.find_cases(folder / "list.csv")


def test_a_datalist_is_what_monai_makes_of_it(folder: Path) -> None:
    """Channels in files of their own, a class in place of a label map, and a section with a name of its own."""
    first = {"image": ["x/a.png", "x/b.png"], "label": "labels/c.nii.gz"}
    content = {"training": [first, {"image": "x/c.nii.gz", "label": 1}], "fold": ["x/b.png"]}
    (folder / "my list.json").write_text(json.dumps(content))
    found = ms.data.find_cases(folder / "my list.json")
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
        ("image\n", r"no scan found in .*list\.csv"),
        ("image\nx/a.png\n./x/a.png\n", r"two scans of .* share the name 'x/a'"),
        ("imag\u00e9\n".encode("latin-1"), r"list\.csv cannot be read as a list of scans .*save it in UTF-8"),
    ],
)
def test_a_table_that_is_none(text: str | bytes, message: str, folder: Path) -> None:
    (folder / "list.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ms.data.find_cases(folder / "list.csv")


def test_a_listed_label_map_that_is_missing(folder: Path) -> None:
    (folder / "list.csv").write_text("image,label\nx/c.nii.gz,labels/d.nii.gz\n")
    with pytest.warns(UserWarning, match=r"the label map .*d\.nii\.gz of the list .*list\.csv does not exist"):
        assert ms.data.find_cases(folder / "list.csv")[0]["label"] == ""
