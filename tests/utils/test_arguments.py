from __future__ import annotations

import pytest

from monai_saliency.utils.arguments import check_option


class TestCheckOption:
    def test_the_name_or_what_is_held_under_it(self) -> None:
        assert check_option("unit", "mm", ("voxel", "mm")) == "mm"
        assert check_option("measure", "cosine", {"cosine": 1, "distance": 2}) == 1

    @pytest.mark.parametrize("value", ["rize", "", None, 3, ["rise"]])
    def test_the_error_names_the_parameter_and_the_value(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"^`method` must be one of \['occlusion', 'rise'\], got ") as caught:
            check_option("method", value, {"rise": 1, "occlusion": 2})
        assert str(caught.value).endswith(f"got {value!r}")
