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
