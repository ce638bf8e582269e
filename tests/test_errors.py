from __future__ import annotations

import pickle
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.transforms import Compose, LoadImaged, ResampleToMatchd

from monai_saliency.cases import Case
from monai_saliency.data import find_cases
from monai_saliency.errors import AdviceError, CaseError, as_case_error, root_cause, show_cause_only
from monai_saliency.fills import ScanUnitFill


def wrapped(cause: Exception) -> Exception:
    """As monai's transforms wrap what they meet."""
    try:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError("applying transform") from error
    except RuntimeError as error:
        return error


def test_any_error_becomes_one_line_of_a_case() -> None:
    found = as_case_error(wrapped(OSError("two\n  lines")), "a/b", before="x.nii: ", after=". Copy it again")
    assert str(found) == "case a/b: x.nii: OSError: two lines. Copy it again"
    assert (found.case, found.problem) == ("a/b", "x.nii: OSError: two lines. Copy it again")


def test_an_error_of_a_case_keeps_its_problem_under_the_name_that_is_given() -> None:
    own = CaseError("mine", "NaN\nvoxels")
    found = as_case_error(wrapped(own), "another", before="not ", after=" this")
    assert (found.case, found.problem) == ("another", "NaN voxels")
    assert str(pickle.loads(pickle.dumps(own))) == "case mine: NaN voxels"


def test_an_error_that_says_what_to_do_is_reported_instead_of_its_cause() -> None:
    own = AdviceError("cannot write a.nii: rename the scan")
    own.__cause__ = OSError("File name too long")
    assert root_cause(wrapped(own)) is own
    assert as_case_error(wrapped(own), "a", before="not ").problem == "cannot write a.nii: rename the scan"


def test_an_uncaught_error_ends_in_its_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a traceback, unless somebody debugs; a cause that is not ours has its kind."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for debug in (False, True):
        show_cause_only(debug)
        for cause, last in ((ValueError("why"), "error: why"), (KeyError("image"), "error: KeyError: 'image'")):
            error = wrapped(cause)
            sys.excepthook(type(error), error, error.__traceback__)
            shown = capsys.readouterr().err
            assert shown.splitlines()[-1] == last
            assert (shown.count("Traceback") == 2) == debug
            assert ("--debug" in shown) == (not debug and isinstance(cause, KeyError))


def test_a_listing_that_cannot_be_read_says_what_to_do_last(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as a list of scans") as caught:
        find_cases(tmp_path)
    assert "mend it" in str(root_cause(caught.value))


def test_a_fill_that_cannot_follow_the_scan_says_what_to_do(tmp_path: Path) -> None:
    fill = ScanUnitFill(3, Compose([LoadImaged("image"), ResampleToMatchd("image", "a mask")]))
    nib.save(nib.Nifti1Image(np.ones((4, 4, 4), np.float32), np.eye(4)), tmp_path / "a.nii")
    case = Case("a", torch.ones(1, 4, 4, 4), file=str(tmp_path / "a.nii"))
    with pytest.raises(ValueError, match="preprocessed again") as caught:
        fill.bind(case)
    assert "give the fill in the network's input space" in as_case_error(caught.value, "a").problem
