"""DICOM series in somebody else's evaluator, which reads them with MONAI's own readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.brightness import Brightness
from helpers.dicom_series import expected_affine, write
from helpers.files import rows_of
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, Orientationd

import monai_saliency as ms

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")
hd = pytest.importorskip("highdicom", reason="needs the dicom extra")

VOXELS = np.random.default_rng(0).integers(0, 50, (9, 11, 10)).astype(np.int16)
VOXELS[2:5, 4:8, 1:5] = 900


def in_order(step: int) -> Any:
    """Instance numbers that follow the positions, or lead against them."""

    def change(number: int, made: Any) -> Any:
        made.InstanceNumber = 50 + step * number
        return made

    return change


def gap(number: int, made: Any) -> Any:
    return None if number == 4 else in_order(1)(number, made)


def mixed(number: int, made: Any) -> Any:
    """Two slices in the middle have each other's number. MONAI makes its affine of the first and the last."""
    made.InstanceNumber = {3: 5, 5: 3}.get(number, number)
    return made


def explained(folders: list[Path], output_dir: Path, reader: str | None, **settings: Any) -> Any:
    steps = [LoadImaged("image", reader), EnsureChannelFirstd("image"), Orientationd("image", "RAS", labels=None)]
    dataset = Dataset([{"image": str(folder)} for folder in folders], Compose(steps))
    network = Brightness(spatial_dims=3, window=3)
    run = SupervisedEvaluator(torch.device("cpu"), DataLoader(dataset), network=network)
    given: dict[str, Any] = {"method": "sliding_window", "window_size": 4, "stride": 4, "activation": "none"}
    handler = ms.attach(run, output_dir, classes=[1], report=False, **given | settings)
    run.run()
    return handler


@pytest.mark.parametrize("reader", ["PydicomReader", None])  # None: ITK's where it is installed, else this one
def test_maps_go_back_to_their_series_whichever_way_it_was_read(reader: str | None, tmp_path: Path) -> None:
    """And series with a gap, or in an order that the reader may mistake, are refused."""
    series = {"up": in_order(1), "down": in_order(-1), "gap": gap, "mixed": mixed}
    folders = [tmp_path / "doe" / name for name in series]
    for number, (folder, change) in enumerate(zip(folders, series.values(), strict=True)):
        write(folder, f"1.2.{number + 3}", change, VOXELS)
    out = tmp_path / "out"
    handler = explained(folders, out, reader, dicom=True, picture_scale=0.1)
    assert len(handler.explained) == 2
    failed = {row["error"] for row in rows_of(out / "failures.csv")}
    assert any("a gap of 5 mm after slice 4 of 8" in error for error in failed)
    assert any("instance numbers do not follow" in error for error in failed)
    assert len(failed) == 2
    assert not any(name in path.name for path in out.rglob("*") for name in (*series, "doe"))

    turned = []
    for case in handler.explained:
        saved = nib.load(out / f"{case}_saliency.nii.gz")
        turned.append(np.sign(np.linalg.det(saved.affine)))
        volume = hd.imread(out / f"{case}_saliency.dcm").get_volume(dtype=np.float64)
        values = saved.get_fdata()
        assert values.std() > 0
        for i, j, k in np.argwhere(np.ones(values.shape))[::37]:
            mm = np.diag([-1.0, -1, 1, 1]) @ saved.affine @ [i, j, k, 1]
            at = np.linalg.solve(volume.affine, mm)[:3]
            assert np.abs(at - np.rint(at)).max() < 1e-3
            assert volume.array[tuple(np.rint(at).astype(int))] == values[i, j, k]
        peak = saved.affine @ [*np.unravel_index(values.argmax(), values.shape), 1]
        column, row, number = np.linalg.solve(expected_affine(), peak)[:3]
        assert 0 <= column < 7
        assert 2 <= row < 10
        assert 0 <= number < 7
        assert len([*(out / f"{case}_saliency_colour").iterdir()]) == len(VOXELS)
    if reader:
        assert sorted(turned) == [-1, 1]  # MONAI's reader has the slices of one of them the other way round
