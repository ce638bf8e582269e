"""Moved folders and renamed cases are not computed again, and nothing of the old names is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cached_cohort import scan
from helpers.caches import FILED
from helpers.items import assert_same
from monai.data import MetaTensor
from monai.transforms import Compose, CopyItemsd, EnsureChannelFirstd, Lambdad, LoadImaged, Spacingd

import monai_saliency as ms
from monai_saliency.data.cached_dataset import CachedDataset, cohort_dataset
from monai_saliency.data.case_names import CaseNames
from monai_saliency.data.cohort import find_cases
from monai_saliency.data.saliency_dataset import SaliencyDataset

NAMES = ("sub-01", "sub-02", "sub-03")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    for seed, name in enumerate(NAMES):
        scan(tmp_path / "here" / f"{name}.nii.gz", seed)
    return tmp_path / "here"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was computed: scans preprocessed and scans explained. Transforms that count would be no transforms of
    MONAI's.
    """
    found: Counter[str] = Counter()

    def counted(name: str, method: str, owner: type) -> None:
        own = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args: (found.update([name]), own(*args))[1])

    counted("scans", "_compute", CachedDataset)
    counted("maps", "_explain", SaliencyDataset)
    return found


def pipeline(*more: Any) -> Compose:
    steps = [LoadImaged("image"), EnsureChannelFirstd("image"), Spacingd("image", [2.0] * 3)]
    return Compose([*steps, *more])


def dataset(folder: Path, cache: str = "disk", *more: Any) -> CachedDataset:
    return cohort_dataset(find_cases(folder), pipeline(*more), cache, cache_dir=folder.parent / f"cache-{cache}")


def maps(folder: Path, cache: str = "disk", target: Any = None) -> SaliencyDataset:
    explain = ms.sliding_window(4, 4, target=target or ms.ClassScore([0], "none"))
    place = {"cache_dir": folder.parent / f"cache-{cache}", "network_id": "sum"}
    return SaliencyDataset(find_cases(folder), pipeline(), sums, explain, cache, **place)


def sums(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1).sum(1, keepdim=True)


def first(output: torch.Tensor) -> torch.Tensor:
    return output[:, :1]


def check(found: Any, expected: Any, gone: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
        assert gone not in str({key: getattr(value, "meta", value) for key, value in one.items()})


@pytest.mark.parametrize("cache", FILED)
def test_a_moved_folder(folder: Path, cache: str, work: Counter[str]) -> None:
    list(maps(folder, cache))
    assert work == {"scans": 3, "maps": 3}
    moved = folder.rename(folder.parent / "elsewhere")
    work.clear()
    found = [list(dataset(moved, cache)), list(maps(moved, cache))]
    assert work == {}
    check(found[0], dataset(moved, "none"), "/here/")
    check(found[1], maps(moved, "none"), "/here/")


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_renamed_swapped_and_copied_cases(folder: Path, cache: str, work: Counter[str]) -> None:
    items = dataset(folder, cache)
    list(items)
    one, two, three = (folder / f"{name}.nii.gz" for name in NAMES)
    three.rename(folder / "patient.nii.gz")
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    (folder / "copy.nii.gz").write_bytes(two.read_bytes())
    renamed = dataset(folder, cache)
    renamed.backend = items.backend
    work.clear()
    found = [item for _ in range(2) for item in renamed]
    assert work == {}
    assert [item["case"] for item in found[:4]] == ["copy", "patient", "sub-01", "sub-02"]
    check(found[:4], dataset(folder, "none"), "sub-03")
    check(found[4:], dataset(folder, "none"), "sub-03")


def doubled(image: torch.Tensor) -> torch.Tensor:
    return image * 2


def test_other_code_may_look_at_names(folder: Path, work: Counter[str]) -> None:
    """Transforms and targets of one's own: what they make is that of one name."""
    list(dataset(folder, "disk", Lambdad("image", doubled)))
    list(maps(folder, target=ms.FunctionScore(first)))
    moved = folder.rename(folder.parent / "elsewhere")
    work.clear()
    list(dataset(moved, "disk", Lambdad("image", doubled)))
    assert work == {"scans": 3}
    work.clear()
    list(maps(moved, target=ms.FunctionScore(first)))
    assert work == {"maps": 3}


def test_a_function_of_python_may_make_anything_of_a_name(folder: Path) -> None:
    """Its length, for one: the case under another name has another one."""

    def lengths(name: str) -> list[int]:
        cases = [{"image": str(folder / name), "case": "x"}]
        steps = [CopyItemsd("image", names="length"), Lambdad("length", len), LoadImaged("image")]
        return [item["length"] for item in cohort_dataset(cases, steps, "disk", folder.parent / "cache")]

    (folder / "another_name.nii.gz").write_bytes((folder / "sub-01.nii.gz").read_bytes())
    first, second = lengths("sub-01.nii.gz"), lengths("another_name.nii.gz")
    assert second[0] - first[0] == len("another_name") - len("sub-01")


def test_a_name_inside_another_text(folder: Path, work: Counter[str]) -> None:
    """It cannot be exchanged, so such an item is that of one name, and is still cached under it."""
    path = folder / "sub-01.nii.gz"

    def items(case: str) -> CachedDataset:
        cases = [{"image": str(path), "note": f"see {path}", "case": case}]
        return cohort_dataset(cases, pipeline(CopyItemsd("note", names="copy")), "disk", folder.parent / "cache")

    for case, computed in (("a", 1), ("a", 0), ("b", 1), ("b", 0)):
        work.clear()
        (item,) = items(case)
        assert (item["case"], item["copy"]) == (case, f"see {path}")
        assert work.total() == computed


def test_a_copy_of_the_cases_name_is_its_own(folder: Path) -> None:
    """Two cases of one content, and a case that was renamed."""
    path = folder / "sub-01.nii.gz"

    def copies(*names: str) -> list[str]:
        cases = [{"image": str(path), "case": name} for name in names]
        steps = pipeline(CopyItemsd("case", names="patient"))
        return [item["patient"] for item in cohort_dataset(cases, steps, "disk", folder.parent / "cache")]

    assert copies("a", "b") == ["a", "b"]
    assert copies("c", "a", "b") == ["c", "a", "b"]


def test_names_of_a_case(tmp_path: Path) -> None:
    """A file's suffix, another file, and what lies beside the paths are part of the case without its names."""
    for name in ("a.nii.gz", "b.nii.gz", "c.nii", "d/1.dcm", "e/1.dcm", "e/2.dcm"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def unnamed(image: str, sha: str = "0", **more: Any) -> Any:
        return CaseNames({"image": str(tmp_path / image), **more}, [[str(tmp_path / image), sha]]).unnamed

    assert unnamed("a.nii.gz", case="a") == unnamed("b.nii.gz", case="b")
    assert unnamed("a.nii.gz", case="a") != unnamed("a.nii.gz")
    assert unnamed("a.nii.gz") != unnamed("c.nii")
    assert unnamed("a.nii.gz") != unnamed("a.nii.gz", "1")
    assert unnamed("a.nii.gz", age=1) != unnamed("a.nii.gz", age=2)
    same, other = (str(tmp_path / name) for name in ("a.nii.gz", "b.nii.gz"))
    assert unnamed("a.nii.gz", label=same) != unnamed("a.nii.gz", label=other)
    series = [
        CaseNames({"image": str(tmp_path / name)}, [[f"{tmp_path}/{name}/{file}", "0"]]).unnamed
        for name, file in (("d", "1.dcm"), ("e", "1.dcm"), ("e", "2.dcm"))
    ]
    assert series[0] == series[1] != series[2]


def test_meta_data_get_the_new_name(tmp_path: Path) -> None:
    names = []
    for name in ("a.nii.gz", "b.nii.gz"):
        (tmp_path / name).touch()
        names.append(CaseNames({"image": tmp_path / name, "case": name[0]}, []))
    meta = {"filename_or_obj": str(tmp_path / "a.nii.gz"), "space": "a"}
    item = {"image": MetaTensor(torch.zeros(1, 2), meta=meta), "case": "a", "file": tmp_path / "a.nii.gz"}
    found = names[1].put_in(names[0].take_out(item))
    assert found["image"].meta["filename_or_obj"] == str(tmp_path / "b.nii.gz")
    assert (found["image"].meta["space"], found["case"], found["file"]) == ("a", "b", tmp_path / "b.nii.gz")
    assert names[0].take_out({"case": "another"}) is None
    assert names[0].take_out({"case": "a", "bytes": b"a"}) is None
