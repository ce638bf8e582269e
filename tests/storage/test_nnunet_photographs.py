"""Photographs that nnU-Net's own reader refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.nnunet import photograph
from PIL import Image

from monai_saliency.storage.nnunet_photographs import nnunet_photograph_loader


def unlike(folder: Path) -> list[Path]:
    return [photograph(folder / f"case_000{i}.png", (20 + i, 30)) for i in range(2)]


def scan_for_photograph(folder: Path) -> list[Path]:
    (folder / "case_0000.nii.gz").write_bytes(b"")
    return [folder / "case_0000.nii.gz"]


def gray_with_alpha(folder: Path) -> list[Path]:
    Image.new("LA", (7, 5)).save(folder / "case_0000.png")
    return [folder / "case_0000.png"]


def on_its_side(folder: Path) -> list[Path]:
    path = photograph(folder / "case_0000.tif")
    Image.fromarray(np.asarray(Image.open(path))).save(path, tiffinfo={274: 6})
    return [path]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (unlike, "its 2 files differ in size or in their number of colours, which nnU-Net refuses"),
        (scan_for_photograph, "case_0000.nii.gz"),
        (on_its_side, "case_0000.tif lies on its side: its tag `Orientation` is 6"),
        (gray_with_alpha, "last dimension must have shape 3 or 4"),
    ],
)
def test_refuses_what_nnunet_refuses(tmp_path: Path, make: Callable[[Path], list[Path]], error: str) -> None:
    pytest.importorskip("nnunetv2")
    with pytest.raises(Exception, match=error):
        nnunet_photograph_loader("image")({"image": [*map(str, make(tmp_path))]})
