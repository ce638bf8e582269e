"""A map on the grid of the DICOM series that it explains, as the objects that are made of both need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.storage.dicom import sorted_series, volume_of
from monai_saliency.utils.arguments import require
from monai_saliency.version import __version__
from monai_saliency.visualize.legend import Legend, legends_of

_TOWARDS = (("L", "R"), ("P", "A"), ("F", "H"))  # where the axes of nibabel lead, down and up


@dataclass(frozen=True)
class OnSeries:
    """A map on the grid of the series that was explained: pydicom's slices, and arrays ``(slices, rows, columns)``."""

    slices: Sequence[Any]
    scan: np.ndarray
    frames: np.ndarray
    turn: np.ndarray
    towards: tuple[str, str]

    @staticmethod
    def of(saliency: MetaTensor, files: Sequence[str | Path]) -> OnSeries:
        """The map ``(1, columns, rows, slices)`` on the series of these files."""
        slices = sorted_series(files)
        volume = volume_of(slices)
        grid, affine = volume.affine.numpy(), saliency.affine.cpu().numpy()
        values = saliency.detach().cpu().numpy()
        if values.dtype != np.float64:
            values = values.astype(np.float32)
        turn = nib.io_orientation(np.linalg.inv(grid) @ affine)  # another reader may have turned axes
        turned_affine = affine @ nib.orientations.inv_ornt_aff(turn, values.shape[1:])
        turned = nib.apply_orientation(values[0], turn)
        if turned.shape != tuple(volume.shape):
            raise AdviceError(f"the map must have the series' shape {(1, *volume.shape)}, got {(1, *turned.shape)}")
        if not np.allclose(turned_affine, grid, rtol=0, atol=1e-3):
            raise AdviceError("the map does not lie on the series' grid to 1e-3 mm: invert it first")
        scan = np.ascontiguousarray(volume.numpy().transpose(2, 1, 0))
        frames = np.ascontiguousarray(turned.transpose(2, 1, 0))
        return OnSeries(slices, scan, frames, turn, nib.aff2axcodes(grid, _TOWARDS)[:2])

    def coloured(self, legend: Legend | None, standard_error: np.ndarray | None) -> tuple[Legend, np.ndarray]:
        """What the map's colours mean, and which voxels of its frames are coloured; ``standard_error`` is on its own
        grid ``(1, *spatial)``.
        """
        legend = legend or legends_of(None, [self.frames])[0]
        error = None
        if standard_error is not None:
            error = nib.apply_orientation(np.asarray(standard_error)[0], self.turn).transpose(2, 1, 0)
        return legend, legend.coloured(self.frames, error)

    def uid(self, *made_of: str) -> str:
        """A UID that is the same for the same map, series and words."""
        pydicom = require("pydicom", "dicom")
        slices = [str(source.SOPInstanceUID) for source in self.slices]
        made_of = (*made_of, __version__, sha256(self.frames.tobytes()).hexdigest(), *slices)
        return str(pydicom.uid.generate_uid(entropy_srcs=list(made_of)))
