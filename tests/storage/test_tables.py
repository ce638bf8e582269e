"""Tables of cases: every text that a program meets can be written, read back unchanged, and opened by a spreadsheet."""

import csv
import logging
from pathlib import Path

import pytest

from monai_saliency.errors import NothingToExplain, SettingError
from monai_saliency.storage.tables import CaseTable, Failures, refuse_foreign

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
    table = CaseTable(tmp_path / "t.csv", COLUMNS)
    for error in ("first", "second"):
        table.add([{"case": "=a", "error": error}])
    assert table.read() == [{"case": "=a", "error": "second"}]
    table.replace(["=a"])
    assert not table.path.exists()


def test_a_name_that_is_not_utf8_is_kept(tmp_path: Path) -> None:
    """A byte of a file's name, as Python reads it."""
    table = CaseTable(tmp_path / "t.csv", columns=COLUMNS)
    for case in "ab":
        table.add([{"case": case, "error": "M\udcfcller"}])
    assert [row["error"] for row in table.read()] == ["M\udcfcller"] * 2


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


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_failure_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, level: int) -> None:
    """However deep its cause; its traceback is for those who debug."""
    error = RuntimeError("applying transform Load")
    error.__cause__ = EOFError("the file ends early")
    with caplog.at_level(level, "monai_saliency"):
        Failures(tmp_path / "failures.csv").add("a", "load", error)
    assert caplog.messages[0] == "case a: EOFError: the file ends early (load)"
    assert ("The above exception was the direct cause" in caplog.text) == (level == logging.DEBUG)


def test_nothing_to_explain_is_another_list(tmp_path: Path) -> None:
    """A case is in one list at the most, whatever it was before; rows of other cohorts go."""
    failures = Failures(tmp_path / "failures.csv", strict=True)
    failures.add("a", "load", NothingToExplain("a", "no lesion"))
    assert failures.nothing_table.read() == [{"case": "a", "reason": "no lesion"}]
    assert not failures.rows
    assert not (tmp_path / "failures.csv").exists()
    assert failures.nothing_summary().endswith("nothing_to_explain.csv; the first is case a: no lesion")
    later = Failures(tmp_path / "failures.csv", cases=["a", "b"])
    later.add("a", "explain", ValueError("broken"))
    assert not later.nothing_table.read()
    assert [row["case"] for row in later.read()] == ["a"]
    later.add("a", "load", wrapped(NothingToExplain("another name", "no lesion")))
    assert not later.read()
    assert [row["case"] for row in later.since()] == ["a"]
    later.remove("a")
    assert not list(tmp_path.glob("*.csv"))
    later.add("a", "explain", NothingToExplain("a", "no lesion"))
    assert not Failures(tmp_path / "failures.csv", cases=["b"]).nothing_table.read()


def wrapped(error: Exception) -> RuntimeError:
    """As MONAI's ``Compose`` raises what went wrong in a step."""
    outer = RuntimeError("applying transform")
    outer.__cause__ = error
    return outer


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


OTHERS = ["name,price\na,1\n", "case;error\na;b\n", "case,error,price\n", "case\x00\n", "PK\x03\x04\r\udcff"]


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("shared", [True, False])
def test_a_table_of_somebody_else_stays(text: str, shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    before = path.read_bytes()
    for make in (
        lambda: Failures(path, shared=shared),
        lambda: Failures(path, cases=["a"], shared=shared),
        lambda: CaseTable(path, COLUMNS),
        lambda: CaseTable(path),
    ):
        with pytest.raises(SettingError, match=r"failures.csv is not a table .*--output_dir"):
            make()
    assert path.read_bytes() == before


def test_a_table_of_somebody_else_that_comes_later_stays(tmp_path: Path) -> None:
    table, failures = CaseTable(tmp_path / "t.csv", COLUMNS), Failures(tmp_path / "f.csv")
    for path in (tmp_path / "t.csv", tmp_path / "f.csv"):
        path.write_text("name,price\n")
    for change in (
        lambda: table.add([{"case": "a", "error": "b"}]),
        lambda: table.replace({"a"}),
        lambda: failures.add("a", "load", ValueError("broken")),
        lambda: refuse_foreign(tmp_path / "t.csv", COLUMNS),
    ):
        with pytest.raises(SettingError, match="is left as it is"):
            change()
    assert (tmp_path / "t.csv").read_text() == (tmp_path / "f.csv").read_text() == "name,price\n"


def test_a_table_that_a_spreadsheet_has_saved_is_ours(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfcase,error\r\na,b\r\n")
    assert CaseTable(tmp_path / "t.csv", COLUMNS).read() == [{"case": "a", "error": "b"}]
    (tmp_path / "t.csv").write_bytes(b"")
    assert CaseTable(tmp_path / "t.csv", COLUMNS).read() == []
