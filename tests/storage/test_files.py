"""Files that appear whole or not at all, locks, and reading scans and photographs of all formats."""

import csv
import errno
import fcntl
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from monai.utils import OptionalImportError
from PIL import Image

from monai_saliency.errors import OutputError
from monai_saliency.storage import files
from monai_saliency.storage.files import atomic_path, check_readers, load_image, locked, remove_stale, scan_stem
from monai_saliency.storage.tables import CaseTable, Failures

ME = f"process {os.getpid()} on {os.uname().nodename}"


def test_temporary_files_of_killed_processes_go(tmp_path: Path) -> None:
    """Those that nobody has written to for an hour."""
    with atomic_path(tmp_path / "sub" / "x.npy") as temporary:
        temporary.write_bytes(b"mine, and still at work")
        left = temporary.with_name(".tmp-0123456789ab-y.npy")
        left.write_bytes(b"half a file")
        os.utime(left, (1e9, 1e9))
        remove_stale(tmp_path / "sub", "deeper")
        assert left.exists()
        remove_stale(tmp_path)
        assert list(tmp_path.rglob(".tmp*")) == [temporary]
    assert (tmp_path / "sub" / "x.npy").read_bytes() == b"mine, and still at work"
    assert not list(tmp_path.rglob(".tmp*"))


def test_who_does_not_wait_is_told_who_holds(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "lock"
    for _ in range(2):
        with locked(path, wait=False) as holder:
            assert holder is None
            with locked(path, wait=False) as other:
                assert other == ME
            with locked(path, wait=False) as other:  # asking does not take it away
                assert other == ME


def test_a_file_system_without_locks_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def none(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    files._warn_no_locks.cache_clear()
    monkeypatch.setattr(fcntl, "flock", none)
    with caplog.at_level(logging.WARNING):
        for wait in (True, False):
            with locked(tmp_path / "lock", wait) as holder, locked(tmp_path / "lock", wait) as other:
                assert holder is None
                assert other is None
    (record,) = [record for record in caplog.records if record.name.startswith("monai_saliency")]
    assert "no locks ([Errno 37] No locks available)" in record.getMessage()


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(OutputError, match=r"cannot write .*lock: (Not a directory|File exists)\. .* run again"),
        locked(tmp_path / "file" / "lock"),
    ):
        pass


RNG = np.random.default_rng(0)
GRAY = RNG.integers(0, 256, (5, 7), dtype=np.uint8)
DEEP = RNG.integers(0, 1 << 16, (5, 7)).astype(np.uint16)
COLOURS = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)


def pictures(folder: Path) -> dict[str, Any]:
    """Files, and the gray values ``(rows, columns)`` that are in them; None where they are of colours."""
    gray = Image.fromarray(GRAY)
    made = {
        "gray.png": (gray, GRAY),
        "deep.png": (Image.fromarray(DEEP), DEEP),
        "deep.tiff": (Image.fromarray(DEEP), DEEP),
        "float.tif": (Image.fromarray(GRAY / np.float32(7)), GRAY / np.float32(7)),
        "palette.png": (gray.convert("P").remap_palette([*range(255, -1, -1)]), GRAY),
        "alpha.png": (gray.convert("LA"), GRAY),
        "twice.png": (gray.convert("RGBA"), GRAY),
        "gray.jpg": (Image.fromarray(np.full((5, 7), 77, np.uint8)), np.full((5, 7), 77)),
        "colours.png": (Image.fromarray(COLOURS), None),
    }
    for name, (image, _) in made.items():
        image.save(folder / name)
    return {name: values for name, (_, values) in made.items()}


def test_photographs_are_read_in_gray_or_colours_and_lose_no_bits(tmp_path: Path) -> None:
    for name, values in pictures(tmp_path).items():
        gray, colours = (
            load_image(channels, ensure_channel_first=True)(tmp_path / name).numpy() for channels in (1, 3)
        )
        assert gray.shape == (1, 7, 5), name
        assert colours.shape == (3, 7, 5), name
        if values is None:
            np.testing.assert_array_equal(colours, np.moveaxis(COLOURS, -1, 0).swapaxes(1, 2))
        else:
            np.testing.assert_array_equal(gray[0].T, values.astype(np.float32), name)
            np.testing.assert_array_equal(colours, np.stack([gray[0]] * 3), name)


def test_a_file_of_several_pictures_is_refused(tmp_path: Path) -> None:
    pages = [Image.fromarray(GRAY), Image.fromarray(GRAY)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match="the file holds 2 pictures, 1 is expected: split it"):
        load_image(1)(tmp_path / "pages.tif")


#: By EXIF's orientation: the photograph's pixel at the top left of the picture, to the right of it, and below it.
CORNERS = {1: "0,0 0,1 1,0", 2: "0,6 0,5 1,6", 3: "4,6 4,5 3,6", 4: "4,0 4,1 3,0"}
CORNERS |= {5: "0,0 1,0 0,1", 6: "4,0 3,0 4,1", 7: "4,6 3,6 4,5", 8: "0,6 1,6 0,5"}


@pytest.mark.parametrize("suffix", ["tif", "png", "jpg"])
@pytest.mark.parametrize("turn", CORNERS)
def test_a_photograph_that_lies_on_its_side_is_turned(turn: int, suffix: str, tmp_path: Path, caplog: Any) -> None:
    """As viewers show it, and a line says so. Pillow (13.0) gives a gray TIFF the wrong pixels."""
    exif = Image.Exif()
    exif[274] = turn
    Image.fromarray(GRAY).save(tmp_path / f"a.{suffix}", exif=exif)
    with Image.open(tmp_path / f"a.{suffix}") as image:  # a JPEG loses some
        stored = np.asarray(image) if suffix == "jpg" else GRAY
    image = load_image(1, image_only=True)(tmp_path / f"a.{suffix}")
    shown = image.numpy().T
    first, right, below = (np.array(each.split(","), int) for each in CORNERS[turn].split())
    assert list(shown.shape) == image.meta["spatial_shape"].tolist()[::-1] == ([5, 7] if turn < 5 else [7, 5])
    for row, column in np.ndindex(shown.shape):
        assert shown[row, column] == stored[tuple(first + row * (below - first) + column * (right - first))]
    assert ("turned by its EXIF orientation" in caplog.text) == (turn > 1)


@pytest.mark.parametrize(("name", "extra"), [("a.mha", "itk"), ("a.nhdr", "itk"), ("a.TIF", "pillow")])
def test_missing_packages_give_their_pip_command(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("itk", "PIL"):
        monkeypatch.setitem(sys.modules, package, None)
    check_readers(["a.nii", "b.nii.gz", "c.npy"])
    with pytest.raises(OptionalImportError, match=rf'is not installed: pip install "monai-saliency\[{extra}\]"'):
        check_readers(["a.nii", name])


def test_scan_stem() -> None:
    names = {"a/b.c.nii.gz": "b.c", "x.NII": "x", "y.nii.gz": "y", "z.nrrd": "z", "w.b.PNG": "w.b"}
    assert {name: scan_stem(name) for name in names} == names


# Tables of cases: every text that a program meets can be written, read back unchanged, and opened by a spreadsheet.
COLUMNS = ("case", "error")


def written(path: Path) -> list[str]:
    """The second cell of each row, as a spreadsheet reads it."""
    with open(path, newline="", encoding="utf-8") as file:
        return [line[1] for line in list(csv.reader(file))[1:]]


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+cmd|' /C calc'!A0", "-x", "@SUM(A1)", "\tx", "\r=1", "\n=1", "'=1", "''-x", "\uff1d1", "-", "--0.5"],
)
def test_what_a_spreadsheet_would_run_is_text_in_the_file(text: str, tmp_path: Path) -> None:
    table = CaseTable(tmp_path / "t.csv", columns=COLUMNS)
    table.add([{"case": "a", "error": text}])
    table.add([{"case": "b", "error": "other"}])  # which writes the first row again
    assert written(table.path) == [f"'{text}", "other"]
    assert [row["error"] for row in table.read()] == [text, "other"]


@pytest.mark.parametrize("value", [-0.5, "-0.5", "+3", "-1e-7", "-inf", "it's", "'quoted'", "a=b", "", "0", "nan"])
def test_other_cells_stay_as_they_are(value: str | float, tmp_path: Path) -> None:
    table = CaseTable(tmp_path / "t.csv", columns=COLUMNS)
    table.add([{"case": "a", "error": value}])
    assert written(table.path) == [str(value)]
    assert [row["error"] for row in table.read()] == [str(value)]


def test_a_name_that_looks_like_a_formula_has_one_row(tmp_path: Path) -> None:
    table = CaseTable(tmp_path / "t.csv", ["=a", "b"], COLUMNS)
    for error in ("first", "second"):
        table.add([{"case": "=a", "error": error}])
    assert table.read() == [{"case": "=a", "error": "second"}]
    table.replace(["=a"])
    assert not table.path.exists()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("M\udcfcller", "M\udcfcller"),  # a byte that is not UTF-8, as in file names
        ("nul\0", "nul\\x00"),
        ("x" * 200_000, "x" * 32_000 + " ... (200,000 characters)"),
    ],
)
def test_texts_that_a_file_cannot_hold(text: str, kept: str, tmp_path: Path) -> None:
    table = CaseTable(tmp_path / "t.csv", columns=COLUMNS)
    for case in "ab":
        table.add([{"case": case, "error": text}])
    assert [row["error"] for row in table.read()] == [kept, kept]


def test_a_case_that_succeeds_later_is_not_among_the_failures(tmp_path: Path) -> None:
    """Neither of the table nor of the run, whose end status they decide; one that fails twice has one row."""
    failures = Failures(tmp_path / "failures.csv")
    for case in ("a", "b", "a"):
        failures.add(case, "load", ValueError(f"{case} is broken"))
    assert [row["case"] for row in failures.rows] == ["b", "a"]
    failures.remove("a")
    assert [row["case"] for row in failures.rows] == [row["case"] for row in failures.read()] == ["b"]
    assert failures.summary(failures.rows).startswith("1 case without a map")
    failures.remove("b")
    assert failures.rows == failures.read() == []


def test_the_row_of_an_earlier_failure_is_not_one_of_this_run(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    Failures(path).add("a", "load", ValueError("broken"))
    now, beside = (Failures(path, cases=["a", "b"]) for _ in "12")
    assert [row["case"] for row in now.read()] == ["a"]
    assert now.since() == []
    beside.add("b", "load", ValueError("broken"))
    assert [row["case"] for row in now.since()] == ["b"]
    now.add("a", "load", ValueError("broken"))
    assert [row["case"] for row in now.since()] == ["a", "b"]
