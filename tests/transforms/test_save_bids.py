"""A BIDS dataset: which of its scans are read, and its maps as a BIDS derivative, also by BIDS's own validator."""

import json
import shutil
import subprocess
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.own_bundle import SMALL_NET, run
from helpers.scans import LPS, OBLIQUE, write_scan
from monai.networks.nets import DenseNet

from monai_saliency.data.cohort import find_cases
from monai_saliency.storage.scans import load_image
from monai_saliency.transforms import SaveBidsd, case_writers

FIRST, SECOND = "sub-01/anat/sub-01_T1w", "sub-02/ses-a/anat/sub-02_ses-a_run-1_T1w"


def dataset(folder: Path) -> Path:
    """Two subjects, one with a session, and files that are not the scans of the cohort."""
    write_scan(folder / f"{FIRST}.nii.gz", (21, 17, 13), OBLIQUE, seed=1, sform=2, qform=0)
    write_scan(folder / f"{SECOND}.nii.gz", (14, 22, 9), LPS, seed=2)
    for other in ("derivatives/x/sub-01/anat/sub-01_desc-x_T1w", "sourcedata/a", "sub-01/func/sub-01_task-x_bold"):
        write_scan(folder / f"{other}.nii.gz", (4, 4, 4), LPS, seed=3)
    (folder / "dataset_description.json").write_text('{"Name": "made", "BIDSVersion": "1.11.1"}')
    return folder


def made(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_scans_of_one_suffix_are_the_cohort(tmp_path: Path) -> None:
    root = dataset(tmp_path)
    assert [case["case"] for case in find_cases(root)] == [FIRST, SECOND]
    assert [case["case"] for case in find_cases(root, "bold")] == ["sub-01/func/sub-01_task-x_bold"]
    shutil.copy(root / f"{FIRST}.nii.gz", root / "sub-01/anat/sub-01_FLAIR.nii.gz")
    with pytest.raises(ValueError, match=r"the suffixes FLAIR, T1w: choose what the network is for with --section"):
        find_cases(root)
    with pytest.raises(ValueError, match=r"FLAIR, T1w, bold: .*, got 'T2w'"):
        find_cases(root, "T2w")
    assert [case["case"] for case in find_cases(root, "T1w")] == [FIRST, SECOND]


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run with two maps a case, each with its standard error, and tables of regions."""
    folder = tmp_path_factory.mktemp("bids")
    torch.manual_seed(0)
    torch.save(DenseNet(**SMALL_NET).state_dict(), folder / "own.pt")
    settings = {"method": "rise", "num_masks": 16, "seed": 7, "classes": "all", "bids": True}
    settings |= {"window_size": None, "stride": None, "method_defaults": {}}
    run(dataset(folder / "raw"), folder / "out", folder / "own.pt", **settings)
    return folder / "out"


def test_maps_and_how_they_were_made(explained: Path) -> None:
    derivative = explained / "derivatives" / "monai-saliency"
    labels = [f"{key}{number}" for key in ("saliency", "standardError") for number in (1, 2)]
    stems = [f"{case.removesuffix('T1w')}desc-{label}_T1w" for case in (FIRST, SECOND) for label in labels]
    files = {f"{stem}.{ending}" for stem in stems for ending in ("nii.gz", "json")}
    assert {*made(derivative)} == files | {"dataset_description.json"}
    for number in (1, 2):
        maps, one = (
            nib.load(explained / f"{FIRST}_saliency.nii.gz"),
            nib.load(derivative / f"{stems[number - 1]}.nii.gz"),
        )
        assert np.array_equal(one.get_fdata(), maps.get_fdata()[..., number - 1])
        scan = nib.load(explained.parent / "raw" / f"{FIRST}.nii.gz")
        assert one.shape == scan.shape
        np.testing.assert_allclose(one.affine, scan.affine, atol=1e-4)
    facts = json.loads((derivative / f"{stems[1]}.json").read_text())
    assert facts["Sources"] == [f"bids:raw:{FIRST}.nii.gz"]
    assert (facts["Method"], facts["Seed"], facts["Class"], facts["Units"]) == ("rise", 7, 1, "log-odds")
    row = (explained / "summary.csv").read_text().splitlines()[2].split(",")
    assert str(facts["Score"]) == row[5]
    assert "Noise" not in json.loads((derivative / f"{stems[2]}.json").read_text())  # which is of the map
    description = json.loads((derivative / "dataset_description.json").read_text())
    assert description["DatasetType"] == "derivative"
    assert (derivative / description["DatasetLinks"]["raw"]).resolve() == (explained.parent / "raw").resolve()


@pytest.mark.skipif(shutil.which("bids-validator-deno") is None, reason="needs pip install bids-validator-deno")
def test_the_validator_of_bids_finds_no_error(explained: Path) -> None:
    command = ["bids-validator-deno", str(explained / "derivatives" / "monai-saliency"), "--ignoreWarnings", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert not [each for each in found["issues"]["issues"] if each["severity"] == "error"]
    assert sorted(found["summary"]["subjects"]) == ["01", "02"]


def test_other_scans_and_what_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = dataset(tmp_path / "raw") / f"{FIRST}.nii.gz"
    scan = load_image(image_only=True, ensure_channel_first=True)(path)
    item = {"saliency": scan, "case": "sub-01_T1w", "saliency_path": str(path)}
    save, folder = SaveBidsd("saliency", tmp_path), tmp_path / "derivatives" / "monai-saliency"
    save(item)
    save.withdraw("sub-01/anat/sub-01_FLAIR")  # of the same subject
    assert len(made(folder / "sub-01")) == 2
    *_, off = case_writers(tmp_path).transforms  # which is there for the files of the earlier run
    assert isinstance(off, SaveBidsd)
    assert not isinstance(case_writers(tmp_path / "new").transforms[-1], SaveBidsd)
    off(item)
    assert made(folder) == ["dataset_description.json"]
    save(item | {"case": "other"})
    assert "case other is not in" in caplog.text
    assert made(folder) == ["dataset_description.json"]
