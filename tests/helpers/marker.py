"""A cohort and a network for which another method than the default is best, and runs with ``method: auto`` on them."""

import json
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import torch
from torch import nn

from helpers.files import maps, rows_of
from helpers.own_bundle import settings

PLACE = (slice(2, 4),) * 3
METHODS = [
    {"method": "rise", "num_masks": 20, "grid_size": 3},
    {"method": "sliding_window", "window_size": 2, "stride": 2},
]


class Marker(nn.Module):
    """Two logits of a 3D image: 0, and how bright it is at the place of the marker."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.weight * images[(..., *PLACE)].mean((1, 2, 3, 4))
        return torch.stack([torch.zeros_like(found), found], dim=1)


def write_cohort(folder: Path) -> Path:
    """Noise with something bright, and the marker in every second scan; the folder."""
    (folder / "cohort").mkdir()
    for number in range(5):
        scan = np.random.default_rng(number).normal(100, 5, (12, 12, 12))
        scan[8:, :4, :4] += 100
        if number % 2 == 0:
            scan[PLACE] += 60
        nib.save(nib.Nifti1Image(scan.astype(np.float32), np.diag([3.0, 3, 3, 1])), folder / f"cohort/s{number}.nii.gz")
    return folder


def auto(folder: Path, out: str, **overrides: Any) -> dict[str, Any]:
    """Settings of a run that chooses among :data:`METHODS`."""
    given = settings(folder, out, network_def={"_target_": "helpers.marker.Marker"}, classes=[1])
    for name in ("num_masks", "grid_size"):
        del given[name]
    return given | {"method": "auto", "compared_methods": METHODS, "compare_cases": 4} | overrides


def check_auto(folder: Path, out: str) -> None:
    """Whoever explained a case took the best method, which is not the default: the maps are the plain run's."""
    kept = json.loads((folder / out / "method.json").read_text())
    assert kept["method"] in METHODS, kept
    assert kept["verdict"].startswith("best: "), kept
    monai.bundle.run(**auto(folder, "plain", **kept["method"]))
    assert len(maps(folder / out)) == 5
    assert maps(folder / out) == maps(folder / "plain")
    assert len({row["settings"] for row in rows_of(folder / out / "summary.csv")}) == 1
