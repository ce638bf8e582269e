from __future__ import annotations

import pytest

from monai_saliency.utils.arguments import check_option, flag, voxels_of_mm


class TestCheckOption:
    def test_the_name_or_what_is_held_under_it(self) -> None:
        assert check_option("unit", "mm", ("voxel", "mm")) == "mm"
        assert check_option("measure", "cosine", {"cosine": 1, "distance": 2}) == 1

    @pytest.mark.parametrize("value", ["rize", "", None, 3, ["rise"]])
    def test_the_error_names_the_parameter_and_the_value(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"^`method` must be one of \['occlusion', 'rise'\], got ") as caught:
            check_option("method", value, {"rise": 1, "occlusion": 2})
        assert str(caught.value).endswith(f"got {value!r}")


def test_mm_do_not_depend_on_an_affines_rounding() -> None:
    for edge in (2.0, 2.00000002, 1.99999998):
        assert voxels_of_mm((15.0, 20.0), (edge, edge)) == (8, 10)


def test_a_command_lines_words_are_truth_values() -> None:
    assert [flag("strict", word) for word in ("true", "False", True, False)] == [True, False, True, False]
    with pytest.raises(ValueError, match="`strict` must be True or False, got 'no'"):
        flag("strict", "no")
