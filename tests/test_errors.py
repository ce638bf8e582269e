from __future__ import annotations

import pickle

from monai_saliency.errors import CaseError, as_case_error


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
