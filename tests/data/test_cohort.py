from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from monai.transforms import LoadImaged

from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.data.cohort import find_cases
from monai_saliency.data.loader import CohortLoader
from monai_saliency.errors import CaseError
from monai_saliency.storage.tables import Failures


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def decathlon(root: Path, **content: object) -> None:
    (root / "dataset.json").write_text(json.dumps(content), encoding="utf-8")


class TestPlainFolder:
    def test_scans_below_a_folder(self, tmp_path: Path) -> None:
        """Recursive, sorted, both suffixes, one name in two folders kept apart; other and hidden files skipped."""
        touch(tmp_path, "b/scan.nii.gz", "a/scan.nii.gz", "a/deep/er/x.nii", "top.NII.GZ", "with.dots.nii.gz")
        touch(tmp_path, "._top.nii.gz", "a/._scan.nii.gz", "a/.hidden.nii", "notes.txt", "a/scan.nii.gz.md5", "t.mgz")
        (tmp_path / "folder.nii.gz").mkdir()
        found = find_cases(tmp_path)
        files = {
            "a/deep/er/x": "a/deep/er/x.nii",
            "a/scan": "a/scan.nii.gz",
            "b/scan": "b/scan.nii.gz",
            "top": "top.NII.GZ",
            "with.dots": "with.dots.nii.gz",
        }
        assert found == [
            {"case": case, "image": str(tmp_path / path), "label": "", "channels": 1} for case, path in files.items()
        ]

    @pytest.mark.parametrize("out", ["cohort", ".", "cohort/../cohort"])
    def test_an_output_folder_that_holds_the_cohort_is_named(self, out: str, tmp_path: Path) -> None:
        touch(tmp_path / "cohort", "a.nii.gz")
        with pytest.raises(ValueError, match=r"the output folder .* is or holds `dataset_dir` .*: choose"):
            find_cases(tmp_path / "cohort", exclude=tmp_path / out)
        # A listing says what the scans are.
        decathlon(tmp_path / "cohort", test=["a.nii.gz"])
        assert len(find_cases(tmp_path / "cohort", exclude=tmp_path / out)) == 1

    def test_exclude(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The output folder below the cohort is none of it, however its path is written."""
        touch(tmp_path, "a.nii.gz", "out/a_saliency.nii.gz", "out/sub/b_saliency.nii.gz", "outer/c.nii.gz")
        monkeypatch.chdir(tmp_path)
        for exclude in (tmp_path / "out", "out", "./outer/../out"):
            assert [case["case"] for case in find_cases(tmp_path, exclude=exclude)] == ["a", "outer/c"]
        assert len(find_cases(tmp_path, exclude="nowhere")) == 4

    def test_links_to_files_that_are_not_there(self, tmp_path: Path) -> None:
        """git-annex leaves such links for what is not fetched, and keeps its files in a hidden folder."""
        for name in ("b", "a"):
            (tmp_path / f"{name}.nii.gz").symlink_to(f".git/annex/{name}-key.nii.gz")
        with pytest.raises(
            FileNotFoundError, match=r"2 scans of .* exists: .* is a link to \.git/annex/.*: copy or fetch"
        ):
            find_cases(tmp_path)
        touch(tmp_path, ".git/annex/a-key.nii.gz")
        assert [case["case"] for case in find_cases(tmp_path)] == ["a", "b"]
        with pytest.raises(CaseError, match=r"^case b: .*b\.nii\.gz is a link to .*, which does not exist: copy or"):
            CachedDataset(find_cases(tmp_path), LoadImaged("image"))[1]

    def test_linked_folders(self, tmp_path: Path) -> None:
        """Each link has its scans, and none goes round in circles."""
        touch(tmp_path, "store/x.nii.gz", "store/deep/y.nii", "cohort/a.nii.gz")
        for name, place in (
            ("cohort/s1", "store"),
            ("cohort/s2", "store"),
            ("cohort/self", "cohort"),
            ("store/back", "cohort"),
        ):
            (tmp_path / name).symlink_to(tmp_path / place)
        (tmp_path / "cohort" / "round.nii.gz").symlink_to("round.nii.gz")
        assert [case["case"] for case in find_cases(tmp_path / "cohort")] == [
            "a",
            "round",
            "s1/deep/y",
            "s1/x",
            "s2/deep/y",
            "s2/x",
        ]

    @pytest.mark.parametrize("name", ["nowhere", "file.nii.gz"])
    def test_no_folder(self, tmp_path: Path, name: str) -> None:
        touch(tmp_path, "file.nii.gz")
        with pytest.raises(FileNotFoundError, match=f"`dataset_dir` .*{name} is not a folder: pass --dataset_dir"):
            find_cases(tmp_path / name)

    def test_no_scan(self, tmp_path: Path) -> None:
        touch(tmp_path, "readme.txt", "._a.nii.gz")
        with pytest.raises(ValueError, match=r"no scan found in .*: it must hold \*.nii.gz or \*.nii files"):
            find_cases(tmp_path)

    def test_scans_that_differ_in_their_suffix_alone_keep_it(self, tmp_path: Path) -> None:
        """None is lost, and no other case changes its name."""
        touch(tmp_path, "sub/a.nii", "sub/a.nii.gz", "a.nii", "f.png", "f.JPG", "g.tiff")
        assert {Path(case["image"]).name: case["case"] for case in find_cases(tmp_path / "sub")} == {
            "a.nii": "a.nii",
            "a.nii.gz": "a.nii.gz",
        }
        names = [case["case"] for case in find_cases(tmp_path, spatial_dims=2)]
        assert names == ["a", "f.JPG", "f.png", "g", "sub/a.nii", "sub/a.nii.gz"]

    def test_formats(self, tmp_path: Path) -> None:
        """Pictures are scans where 2D ones are asked for; beside 3D scans they are views of them."""
        touch(tmp_path, "a.nii", "b.png", "c.seg.nrrd", "d.jpeg", "e.TIF", "f.raw", "g.txt")
        assert [case["case"] for case in find_cases(tmp_path)] == ["a"]
        found = find_cases(tmp_path, spatial_dims=2, channels=3)
        assert [(case["case"], case["channels"]) for case in found] == [(name, 3) for name in "abde"]
        (tmp_path / "a.nii").unlink()
        with pytest.raises(ValueError, match=r"no scan found in .*, or pictures, .* with --spatial_dims 2"):
            find_cases(tmp_path)


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
        found = find_cases(tmp_path)
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
        assert [case["channels"] for case in find_cases(tmp_path)] == [4]

    def test_sections(self, tmp_path: Path) -> None:
        touch(tmp_path, "imagesTr/a.nii.gz", "labelsTr/a.nii.gz", "imagesTr/v.nii.gz")
        decathlon(
            tmp_path,
            test=[],
            training=[{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}],
            validation=[{"image": "./imagesTr/v.nii.gz"}],
        )
        assert [case["case"] for case in find_cases(tmp_path)] == ["imagesTr/a"]
        assert [case["case"] for case in find_cases(tmp_path, section="validation")] == ["imagesTr/v"]
        for section in ("test", "holdout"):
            with pytest.raises(ValueError, match=rf"no scan found in section '{section}' of .*dataset.json"):
                find_cases(tmp_path, section=section)

    def test_a_listed_scan_elsewhere(self, tmp_path: Path) -> None:
        """Its outputs stay below the output folder, and equal names stay apart."""
        touch(tmp_path, "x/a.nii.gz", "y/a.nii.gz", "cohort/a.nii.gz")
        decathlon(tmp_path / "cohort", test=["../x/a.nii.gz", str(tmp_path / "y" / "a.nii.gz"), "a.nii.gz"])
        names = [case["case"] for case in find_cases(tmp_path / "cohort")]
        assert len(set(names)) == 3
        assert all(name.startswith("a") and "/" not in name and ".." not in name for name in names)
        assert names == [case["case"] for case in find_cases(tmp_path / "cohort")]

    def test_a_listed_scan_is_missing(self, tmp_path: Path) -> None:
        """It is a case, unless all are missing."""
        decathlon(tmp_path, test=["./imagesTs/b.nii.gz", "./imagesTs/a.nii.gz"])
        with pytest.raises(
            FileNotFoundError, match=r"none of the 2 scans of .* exists: .*b\.nii\.gz does not exist: copy"
        ):
            find_cases(tmp_path)
        touch(tmp_path, "imagesTs/a.nii.gz", "labelsTs/b.nii.gz")
        assert [(case["case"], Path(case["image"]), case["label"]) for case in find_cases(tmp_path)] == [
            ("imagesTs/a", tmp_path / "imagesTs" / "a.nii.gz", ""),
            ("imagesTs/b", tmp_path / "imagesTs" / "b.nii.gz", str(tmp_path / "labelsTs" / "b.nii.gz")),
        ]

    @pytest.mark.parametrize("text", ['{"test": [', b"\xff\xfe{}"])
    def test_broken_json(self, tmp_path: Path, text: str | bytes) -> None:
        (tmp_path / "dataset.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=r"dataset.json cannot be read as a list .*mend it, or remove it"):
            find_cases(tmp_path)

    @pytest.mark.parametrize(
        "text", ["[]", '{"test": [{"label": "a.nii.gz"}]}', '{"test": [3]}', '{"test": "a.nii.gz"}']
    )
    def test_json_of_something_else(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(ValueError, match=r"dataset\.json"):
            find_cases(tmp_path)


class TestCohortDataset:
    @pytest.mark.parametrize("cache", ["none", "disk"])
    def test_a_missing_scan_fails_while_loading_and_the_others_go_on(self, cache: str, tmp_path: Path) -> None:
        for name in ("a", "c"):
            nib.save(nib.Nifti1Image(np.zeros((2, 3, 4), np.float32), np.eye(4)), tmp_path / f"{name}.nii.gz")
        decathlon(tmp_path, test=["a.nii.gz", "b.nii.gz", "c.nii.gz"])
        dataset = CachedDataset(find_cases(tmp_path), LoadImaged("image"), cache, tmp_path / "cache")
        for _ in ("cold", "warm"):
            failures = Failures(tmp_path / "failures.csv")
            assert [batch["case"] for batch in CohortLoader(dataset, failures)] == [["a"], ["c"]]
            ((case, stage, error),) = (row.values() for row in failures.read())
            assert (case, stage) == ("b", "load")
            assert error == f"{tmp_path}/b.nii.gz does not exist: copy or fetch it, or take it off the list of scans"
