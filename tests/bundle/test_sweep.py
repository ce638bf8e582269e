"""Sweeps made by hand, of maps whose correlations can be computed by hand."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.files import rows_of

from monai_saliency.__main__ import main
from monai_saliency.bundle.sweep import gather
from monai_saliency.storage.tables import SUMMARY_COLUMNS, CaseTable, Failures

# The correlation of any two is 1 / 2, but for B and C of 0 and their negatives.
A, B, C = (np.float32(values).reshape(2, 2) for values in ([1, -1, 0, 0], [1, 0, -1, 0], [0, 1, 0, -1]))


def write(
    folder: Path, case: str, maps: np.ndarray, forwards: int = 10, hit: object = "", classes: tuple[object, ...] = (1,)
) -> None:
    """What a run leaves of a case."""
    path = folder / f"{case}_saliency.nii.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(maps, np.eye(4)), path)
    row = dict.fromkeys(SUMMARY_COLUMNS, "") | {"case": case, "score": 0.5, "peak_saliency": float(maps.max())}
    row |= {"peak_in_label": hit, "forwards": forwards, "seconds": 2.5}
    CaseTable(folder / "summary.csv").add([row | {"class": label} for label in classes])


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three settings of two cases, and folders that are none."""
    for name, forwards, maps, hits in (
        ("method=rise,num_masks=1000", 1001, (A, B), (True, True)),
        ("method=rise,num_masks=500", 501, (A, A), (True, False)),
        ("method=sliding_window", 65, (B + 3, -8 * B), (False, False)),
    ):
        for number, each in enumerate(maps):
            write(tmp_path / name, f"s{number}", each, forwards, hits[number])
    (tmp_path / "cache").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "note,with=signs.txt").write_text("")
    return tmp_path


def test_one_row_a_setting(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Agreement is with the setting of most forwards: (1/2 + 1) / 2 of 500 masks, (1/2 - 1) / 2 of windows."""
    main(["gather", str(sweep)])
    rows = rows_of(sweep / "sweep.csv")
    assert [row["setting"] for row in rows] == [
        "method=rise,num_masks=500",
        "method=rise,num_masks=1000",
        "method=sliding_window",
    ]
    assert list(rows[0])[1:3] == ["method", "num_masks"]
    assert [(row["method"], row["num_masks"]) for row in rows] == [
        ("rise", "500"),
        ("rise", "1000"),
        ("sliding_window", ""),
    ]
    assert [row["forwards"] for row in rows] == ["1002", "2002", "130"]
    assert {row["seconds"] for row in rows} == {"5"}
    assert {(row["cases"], row["missing"], row["failures"], row["mean_score"]) for row in rows} == {
        ("2", "0", "0", "0.5")
    }
    assert [row["hits"] for row in rows] == ["0.5", "1", "0"]
    assert [row["mean_peak_saliency"] for row in rows] == ["1", "1", "6"]
    np.testing.assert_allclose([float(row["agreement"]) for row in rows], [0.75, 1, -0.25], atol=1e-6)
    assert {row["compared"] for row in rows} == {"2"}
    assert capsys.readouterr().out.splitlines() == [
        "settings: 3",
        "agreement is with method=rise,num_masks=1000",
        f"written: {sweep}/sweep.csv, {sweep}/sweep.png",
    ]
    # What it wrote is no setting of the next time.
    assert len(gather(sweep).settings) == 3


def test_rows_of_two_settings_are_not_complete(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rerun with other settings that was stopped leaves rows of both."""
    table = CaseTable(sweep / "method=sliding_window" / "summary.csv")
    table.add([{**row, "settings": row["case"]} for row in table.read()])
    found = gather(sweep)
    assert [setting.name for setting in found.settings if not setting.complete] == ["method=sliding_window"]
    with pytest.raises(SystemExit):
        main(["gather", str(sweep)])
    assert "  made by 2 settings (column `settings`)" in capsys.readouterr().out
    table.add([{**row, "settings": "s0"} for row in table.read()])
    assert gather(sweep).complete


def test_what_is_not_complete_is_said(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(sweep / "method=rise,num_masks=1000", "s2", C, 1001, True)
    failures = Failures(sweep / "method=rise,num_masks=500" / "failures.csv")
    failures.add("s2", "explain", ValueError("the network's scores are NaN"))
    failures.add("s3", "load", ValueError("the file is empty"))
    (sweep / "method=rise,num_masks=2000").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["gather", str(sweep)])
    assert end.value.code == 1
    assert capsys.readouterr().out.splitlines()[2:-1] == [
        "not complete: method=rise,num_masks=500: maps of 2 cases, none of s2, s3",
        "  s2 failed: ValueError: the network's scores are NaN",
        "not complete: method=rise,num_masks=1000: maps of 3 cases, none of s3",
        "not complete: method=rise,num_masks=2000: maps of 0 cases, none of s0, s1, s2, s3",
        "not complete: method=sliding_window: maps of 2 cases, none of s2, s3",
    ]
    found = [(row["cases"], row["missing"], row["failures"], row["compared"]) for row in rows_of(sweep / "sweep.csv")]
    assert found == [("2", "2", "2", "2"), ("3", "1", "0", "3"), ("0", "4", "0", "0"), ("2", "2", "0", "2")]
    assert [row["hits"] for row in rows_of(sweep / "sweep.csv")] == ["0.5", "1", "", "0"]
    assert rows_of(sweep / "sweep.csv")[2]["agreement"] == ""


def agreements(folder: Path) -> list[float | None]:
    return [setting.agreement for setting in gather(folder).settings]


def test_maps_of_one_class_are_compared(tmp_path: Path) -> None:
    """Both explain classes 0 and 2, with correlations 1 and 1 / 2; class 1 is explained by one of them."""
    write(tmp_path / "seed=0", "ct", np.stack([A, A, A], -1), 10, classes=(0, 1, 2))
    write(tmp_path / "seed=1", "ct", np.stack([B, A], -1), 10, classes=(2, 0))
    np.testing.assert_allclose(agreements(tmp_path), [1, 0.75], atol=1e-6)


def test_what_has_no_correlation_is_left_out(tmp_path: Path) -> None:
    """Flat maps, maps with no numbers, on other grids, of other classes and those that were removed."""
    for number, other in enumerate((np.full((2, 2), 0.1, np.float32), A * np.float32("nan"), A[:, :1], A, A, B)):
        write(tmp_path / "seed=0", f"s{number}", A)
        write(tmp_path / "seed=1", f"s{number}", other, classes=(2,) if number == 3 else (1,))
    (tmp_path / "seed=1" / "s4_saliency.nii.gz").unlink()
    found = gather(tmp_path)
    np.testing.assert_allclose(agreements(tmp_path), [1, 0.5], atol=1e-6)
    assert [setting.compared for setting in found.settings] == [6, 1]
    assert found.complete


def test_names_of_folders(tmp_path: Path) -> None:
    """Values with commas and signs of equality, the folder of settings as the config has them, another bundle's."""
    write(tmp_path / "window_size=[8, 8],fill=a=b", "ct", A)
    write(tmp_path / "default", "ct", A)
    write(tmp_path / "saliency_method=rise" / "saliency", "sub-01/ct", A)
    found = {setting.name: setting.values for setting in gather(tmp_path).settings}
    assert found == {
        "default": {},
        "saliency_method=rise": {"saliency_method": "rise"},
        "window_size=[8, 8],fill=a=b": {"window_size": "[8, 8]", "fill": "a=b"},
    }


def test_errors_say_what_to_do(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no settings: folders named id=value,id=value"):
        gather(sweep / "logs")
