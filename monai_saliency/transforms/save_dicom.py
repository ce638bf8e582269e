"""Writing the maps of DICOM series as DICOM, beside their NIfTI files."""

from __future__ import annotations

import glob
import logging
import shutil
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform

from monai_saliency.cases import case_name
from monai_saliency.errors import AdviceError, CaseError
from monai_saliency.storage.dicom import holds_series, series_files
from monai_saliency.targets.base import label_name
from monai_saliency.transforms.dicom import save_parametric_map
from monai_saliency.transforms.save import error_key
from monai_saliency.transforms.secondary_capture import save_secondary_capture
from monai_saliency.utils.arguments import a_path, flag, positive_or_none, require
from monai_saliency.visualize.legend import legends_of

__all__ = ["SaveDicomD", "SaveDicomDict", "SaveDicomd"]

logger = logging.getLogger(__name__)

_LONGEST_LABEL = 64


class SaveDicomd(MapTransform):
    """Writes the maps of cases that were read from DICOM as DICOM.

    For a case ``name`` these are ``<output_dir>/name_<key>.dcm``, a Parametric Map
    (:func:`~monai_saliency.transforms.save_parametric_map`), and the folder ``<output_dir>/name_<key>_colour`` of
    Secondary Captures, one a slice (:func:`~monai_saliency.transforms.save_secondary_capture`). Of several maps each
    has its own, ``name_<key>_1.dcm`` and so on. Other cases are left alone.

    These files belong to the scan's study, so they name its patient, which nothing else in the output folder does.

    Place it after ``Invertd``: a map must lie on the series' own grid. What an earlier run has written of a case and is
    not written now is removed.

    Args:
        keys: the keys of the maps ``(K, *spatial)``.
        output_dir: the output folder.
        dicom: whether to write; otherwise what an earlier run has written is removed.
        case_key: the key of the case's name.
        scale: the value with the last colour, in the map's unit; as for
            :class:`~monai_saliency.transforms.SaveSaliencyd` by default.
        allow_missing_keys: whether items may lack a key.
        grid_key: items that have this key have maps that are not on their series, and are left alone.

    Raises:
        OptionalImportError: when highdicom is not installed. It gives the pip command.
        ValueError: when ``scale`` is not a number above 0.
        CaseError: when called, if the map does not lie on the series' grid, or is not finite.

    Example::

        >>> import tempfile
        >>> import pydicom
        >>> from monai_saliency.storage.formats import scan_loader
        >>> scans = Path(pydicom.__file__).parent / "data/test_files/dicomdirtests/98892001/CT5N"  # comes with pydicom
        >>> scan = scan_loader("image", ensure_channel_first=True)({"image": str(scans)})["image"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     item = SaveDicomd("saliency", folder)({"saliency": scan / 1000, "case": "ct"})
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['ct_saliency.dcm', 'ct_saliency_colour']
    """

    def __init__(
        self,
        keys: KeysCollection,
        output_dir: str | Path,
        dicom: bool = True,
        case_key: str = "case",
        scale: float | None = None,
        allow_missing_keys: bool = False,
        grid_key: Hashable | None = None,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.grid_key = grid_key
        self.output_dir = a_path("output_dir", output_dir)
        self.dicom = flag("dicom", dicom)
        for module in ("pydicom", "highdicom") if self.dicom else ():
            require(module, "dicom")
        self.scale = positive_or_none("scale", scale)
        self.case_key = case_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.keys:
            written: set[Path] = set()
            if self.dicom and key in d and self.grid_key not in d and holds_series(case_name(d[key])):
                try:
                    written = self._save(d, key)
                except AdviceError as error:
                    raise CaseError(str(d[self.case_key]), str(error)) from error
            self._remove(str(d[self.case_key]), key, written)
        for _ in self.key_iterator(d):  # raises where a key is missing that must not be
            pass
        return d

    def _save(self, data: Mapping[Hashable, Any], key: Hashable) -> set[Path]:
        """Write a case's maps; the files and folders."""
        saliency: Any = data[key]
        if not isinstance(saliency, MetaTensor):
            raise AdviceError(f"the map {key!r} must be a MetaTensor, got a {type(saliency).__name__}")
        files = series_files(case_name(saliency))
        maps = saliency.detach().cpu().numpy()
        explanation, error = data.get("explanation"), data.get(error_key(str(key)))
        if not isinstance(error, torch.Tensor) or tuple(error.shape) != maps.shape:
            error = None
        labels = [] if explanation is None else [label_name(label) for label, *_ in explanation.explained]
        written = set()
        for i, legend in enumerate(legends_of(explanation, maps, self.scale)):
            label = _words(f"saliency for {labels[i]}" if len(labels) == len(maps) else "saliency")
            base = self.output_dir / f"{data[self.case_key]}_{key}{f'_{i + 1}' * (len(maps) > 1)}"
            path, folder = base.with_name(f"{base.name}.dcm"), base.with_name(f"{base.name}_colour")
            one = MetaTensor(torch.from_numpy(maps[i : i + 1]), affine=saliency.affine)
            save_parametric_map(path, one, files, label=label)
            errors = None if error is None else error[i : i + 1].numpy(force=True)
            save_secondary_capture(folder, one, files, label, legend, errors)
            written |= {path, folder}
        return written

    def withdraw(self, case: str) -> None:
        """Remove what an earlier run may have written of a case."""
        for key in self.keys:
            self._remove(case, key, set())

    def _remove(self, case: str, key: Hashable, written: set[Path]) -> None:
        """Remove what there is of a case and was not written now."""
        base = self.output_dir / f"{case}_{key}"
        for number in ("", "_[0-9]*"):
            for ending in (".dcm", "_colour"):
                for path in map(Path, glob.glob(f"{glob.escape(str(base))}{number}{ending}")):
                    if path in written:
                        continue
                    try:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                    except OSError as error:
                        logger.warning("case %s: %s is of an earlier run and cannot be removed: %s", case, path, error)


def _words(text: str) -> str:
    """Text as a header holds it: 64 characters that every archive knows, without the backslash that parts values."""
    return text.encode("ascii", "replace").decode().replace("\\", "/")[:_LONGEST_LABEL]


SaveDicomD = SaveDicomDict = SaveDicomd
