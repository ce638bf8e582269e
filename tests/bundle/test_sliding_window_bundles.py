"""The overlay on a bundle that cuts patches under AMP, as most of the Model Zoo's with a sliding-window inferer do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.files import rows_of, scores_of
from helpers.layouts import Bundle


@pytest.mark.parametrize(
    "method",
    [{}, {"saliency_method": "sliding_window", "saliency_window_size": 8, "saliency_stride": 8}],
    ids=["by default", "sliding_window"],
)
def test_patches_are_remembered_under_amp(
    method: dict[str, object],
    make: Callable[[str], Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same scores and maps as from whole images, from fewer patches, through the bundle's own inferer."""
    bundle = make("spleen_ct_segmentation")
    assert '"amp": true' in bundle.config.read_text()
    bundle.explain(few_masks=False, saliency_dir=str(tmp_path / "remembered"), **method)
    monkeypatch.setattr("monai_saliency.inferers.inferer.remember", lambda *args: None)
    bundle.explain(few_masks=False, saliency_dir=str(tmp_path / "whole"), **method)
    scores = [scores_of(tmp_path / name / "scores") for name in ("remembered", "whole")]
    rows = [rows_of(tmp_path / name / "summary.csv") for name in ("remembered", "whole")]
    assert len(scores[0]) == len(rows[0]) == len(bundle.scans)
    for case, ours, whole in zip(bundle.scans, *rows, strict=True):
        np.testing.assert_allclose(scores[0][case], scores[1][case], rtol=0, atol=1e-5)
        assert np.ptp(scores[0][case]) > 1e-3
        one, other = (nib.load(tmp_path / n / f"{case}_saliency.nii.gz").get_fdata() for n in ("remembered", "whole"))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
        # Eight patches a volume; of the smaller one, windows that are not on the patches' grid touch all.
        assert int(ours["forwards"]) <= 8 * (1 if method and case == "spleen_1" else 0.7) * int(whole["forwards"])
        assert method or float(ours["predictions"]) <= 40
