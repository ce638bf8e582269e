"""The files of a case, by their content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monai_saliency.storage import input_files as module
from monai_saliency.storage.input_files import checksum_of, file_state, input_files, known_contents


def test_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files under any key and depth, all of a folder, both of a pair; not a name that happens to be a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.nii", "b.nii", "l.nii", "dicom/1.dcm", "dicom/x/2.dcm", "p.hdr", "p.img", "q.img", "sub/1"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    case = {
        "case": "sub",
        "image": [str(tmp_path / "a.nii"), Path("b.nii")],
        "label": "",
        "more": {"deep": ("dicom", "p.hdr")},
        "gone": "gone.nii",
        "text": "x" * 5000,
        "nul": "a\0b",
        "number": 3,
    }
    found = [row[0] for row in input_files(case)]
    assert found == [str(tmp_path / "a.nii"), "b.nii", "dicom/1.dcm", "dicom/x/2.dcm", "p.hdr", "p.img"]


def test_what_tells_them(tmp_path: Path) -> None:
    scan = tmp_path / "a.nii"
    scan.write_bytes(b"one")
    os.utime(scan, ns=(1, 1))
    before = input_files({"image": scan})
    os.utime(scan, ns=(2, 2))
    assert input_files({"image": scan}) == before
    scan.write_bytes(b"two")
    os.utime(scan, ns=(1, 1))
    # Equal in size and time, but for the time of the change.
    assert input_files({"image": scan}) != before


def test_a_text_that_happens_to_name_a_folder_is_not_walked(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "a.dcm").write_bytes(b"x")
    (tmp_path / "large.bin").write_bytes(b"x")
    case = {"image": str(tmp_path / "scans"), "site": str(tmp_path)}
    assert len(input_files(case)) == 2
    assert len(input_files(case, folder_keys={"image"})) == 1
    assert input_files(case, folder_keys={"label"}) == []


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = tmp_path / "a.nii"
    scan.write_bytes(b"one")
    content = checksum_of(str(scan))
    (state,) = [state for state, known in known_contents({"image": scan}) if known == content]
    assert state == file_state(str(scan))
    monkeypatch.setattr(module, "_read", lambda file: pytest.fail("read again"))
    assert checksum_of(str(scan)) == content
    # A later process asks the cache.
    monkeypatch.setattr(module, "_checksums", {})
    assert checksum_of(str(scan), {state: content}.get) == content
    assert checksum_of(str(tmp_path / "gone")) == ""


#: headers, and the files of voxels that they name
HEADERS = {
    "one": ("scan.mhd", "ObjectType = Image\nElementDataFile = voxels.raw\n", ["voxels.raw"]),
    "in a folder": ("scan.mhd", "ElementDataFile = deep/er/voxels file.zraw", ["deep/er/voxels file.zraw"]),
    "a list": ("scan.mhd", "ElementDataFile = LIST\r\na.raw\r\nb.raw\r\n", ["a.raw", "b.raw"]),
    "a list of planes": ("scan.mhd", "ElementDataFile = LIST 2D\na.raw\nb.raw", ["a.raw", "b.raw"]),
    "a pattern": ("scan.mhd", "ElementDataFile = s%02d.raw 3 7 2\n", ["s03.raw", "s05.raw", "s07.raw"]),
    "inside": ("scan.mha", "ElementDataFile = LOCAL\nElementDataFile = a.raw\n", []),
    "nrrd": ("scan.nhdr", "NRRD0004\nencoding: raw\ndata file: ./voxels.raw\n", ["voxels.raw"]),
    "nrrd, joined": ("scan.nrrd", "NRRD0004\nDATAFILE: voxels.raw\n\n", ["voxels.raw"]),
    "nrrd, a list": ("scan.nhdr", "NRRD0004\ndata file: LIST\na.raw\nb.raw\n", ["a.raw", "b.raw"]),
    "nrrd, a pattern": ("scan.nhdr", "NRRD0004\ndata file: s%d.raw 1 2 1 2\n", ["s1.raw", "s2.raw"]),
    "nrrd, inside": ("scan.nrrd", "NRRD0004\nencoding: raw\n\ndata file: a.raw", []),
    "broken": ("scan.mhd", "ElementDataFile = %s%s.raw 1 2\n", []),
    "endless": ("scan.mhd", "ElementDataFile = s%d.raw 1 999999999999\n", ["s1.raw"]),
    "par": ("scan.par", "# a header", ["scan.rec"]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_voxels_that_a_header_names(name: str, tmp_path: Path) -> None:
    header, text, files = HEADERS[name]
    for file in [*files, "a.raw", "beside.raw"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"0")
    (tmp_path / header).write_bytes(text.encode())
    before = input_files({"image": tmp_path / header})
    assert {Path(file).relative_to(tmp_path).as_posix() for file, _ in before} == {header, *files}
    for file in files:
        (tmp_path / file).write_bytes(b"1")
        now = input_files({"image": tmp_path / header})
        assert now != before
        before = now


def test_a_file_under_the_key_that_names_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform may read it. A folder of that name is walked only where one does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub-01").mkdir()
    for name in ("s.nii", "sub-01/a.dcm"):
        (tmp_path / name).write_bytes(b"x")
    assert [file for file, _ in input_files({"case": "s.nii"})] == ["s.nii"]
    assert [file for file, _ in input_files({"case": "s.nii"}, folder_keys=set())] == ["s.nii"]
    assert input_files({"case": "sub-01"}) == []
    assert input_files({"case": "sub-01"}, folder_keys={"image"}) == []
    assert [file for file, _ in input_files({"case": "sub-01"}, folder_keys={"case"})] == ["sub-01/a.dcm"]
