"""The maps of DICOM series as DICOM: Parametric Maps, and for viewers that show none, colour pictures and the region of
the largest values.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform

from monai_saliency.cases import case_name
from monai_saliency.errors import AdviceError, CaseError
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.storage.dicom import holds_series, series_files
from monai_saliency.storage.files import atomic_path, case_file, error_key
from monai_saliency.targets.base import label_name
from monai_saliency.transforms.on_series import OnSeries
from monai_saliency.transforms.save import GRID_KEY
from monai_saliency.utils.arguments import a_path, flag, positive_numbers, probability, require
from monai_saliency.version import __version__
from monai_saliency.visualize.legend import Legend, blended, gray_window, legends_of

logger = logging.getLogger(__name__)

_NAME = "monai-saliency"
_MAPS, _CAPTURES, _SEGMENTATIONS = 9100, 9200, 9300  # series numbers
_INSTANCE = {
    "instance_number": 1,
    "manufacturer": _NAME,
    "manufacturer_model_name": _NAME,
    "software_versions": __version__,
    "device_serial_number": "0",
}


class SaveDicomd(MapTransform):
    """Writes the maps of cases that were read from DICOM as DICOM.

    For a case ``name`` these are ``<output_dir>/name_<key>.dcm``, a Parametric Map
    (:func:`~monai_saliency.transforms.save_parametric_map`), and the folder ``<output_dir>/name_<key>_colour`` of
    Secondary Captures, one a slice (:func:`~monai_saliency.transforms.save_secondary_capture`). With ``dicom_seg`` it
    also writes ``<output_dir>/name_<key>_seg.dcm``, a Segmentation
    (:func:`~monai_saliency.transforms.save_segmentation`). Of several maps each has its own, ``name_<key>_1.dcm`` and
    so on. Other cases are left alone, and cases whose maps are not on their series (those with ``"saliency_grid"``).

    These files belong to the scan's study, so they name its patient. Place it after ``Invertd``: a map must lie on the
    series' own grid. Files of the case from an earlier run are removed.

    Args:
        keys: the keys of the maps ``(K, *spatial)``.
        output_dir: the output folder.
        scale: the value with the last colour, in the map's unit; as for
            :class:`~monai_saliency.transforms.SaveSaliencyd` by default.
        allow_missing_keys: whether items may lack a key.
        dicom: whether to write Parametric Maps and Secondary Captures; otherwise those of an earlier run are removed.
        dicom_seg: the share of a map's largest value, in (0, 1], above which voxels belong to the Segmentation. None
            writes no Segmentation, and removes those of an earlier run.

    Raises:
        OptionalImportError: when highdicom is not installed. It gives the pip command.
        ValueError: when ``scale`` is not a number above 0, or ``dicom_seg`` not in (0, 1].
        CaseError: when called, if the map does not lie on the series' grid.

    Example::

        >>> import tempfile
        >>> import pydicom
        >>> from monai_saliency.storage.scans import scan_loader
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
        scale: float | None = None,
        allow_missing_keys: bool = False,
        dicom: bool = True,
        dicom_seg: float | None = None,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.dicom = flag("dicom", dicom)
        _check_share("dicom_seg", 1 if dicom_seg is None else dicom_seg)
        self.dicom_seg = dicom_seg
        self.writes = self.dicom or self.dicom_seg is not None
        self.output_dir = a_path("output_dir", output_dir)
        if self.writes:
            require("highdicom", "dicom")
        positive_numbers("scale", 1 if scale is None else scale)
        self.scale = scale

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        self.withdraw(str(d["case"]))
        for key in self.key_iterator(d):
            if self.writes and GRID_KEY not in d and holds_series(case_name(d[key])):
                try:
                    self._save(d, key)
                except AdviceError as error:
                    raise CaseError(str(d["case"]), str(error)) from error
        return d

    def _save(self, data: Mapping[Hashable, Any], key: Hashable) -> None:
        """Write a case's maps."""
        case, explanation = str(data["case"]), data.get("explanation")
        error = data.get(error_key(str(key)))
        saliency = data[key].detach().cpu()
        maps = saliency.numpy()
        files = series_files(case_name(saliency))
        labels = _labels(explanation, len(maps))
        legends = legends_of(explanation, maps, self.scale, data.get(f"{key}_legends", ""))
        for place, legend in enumerate(legends):
            part = slice(place, place + 1)
            number = f"_{place + 1}" if len(maps) > 1 else ""
            base = case_file(self.output_dir, case, f"_{key}{number}")
            one = MetaTensor(saliency.as_tensor()[part], affine=saliency.affine)
            errors = None if error is None else error[part].numpy(force=True)
            about: dict[str, Any] = {"label": labels[place], "legend": legend, "standard_error": errors}
            if self.dicom:
                save_parametric_map(base.with_name(f"{base.name}.dcm"), one, files, about["label"])
                save_secondary_capture(base.with_name(f"{base.name}_colour"), one, files, **about)
            if self.dicom_seg:
                self._save_segmentation(case, base.with_name(f"{base.name}_seg.dcm"), one, files, about)

    def _save_segmentation(
        self, case: str, path: Path, saliency: MetaTensor, files: Sequence[Path], about: Mapping[str, Any]
    ) -> None:
        """Write the region of a map ``(1, *spatial)``, or log why there is none."""
        if not save_segmentation(path, saliency, files, self.dicom_seg or 1.0, **about):
            error = about["standard_error"]
            verdict = about["legend"].verdict(saliency[0].numpy(), None if error is None else error[0])
            logger.warning("case %s: %s is not written: %s", case, path.name, verdict or "nothing supports the score")

    def withdraw(self, case: str) -> None:
        """Remove what an earlier run may have written of a case."""
        for key in self.keys:
            base = glob.escape(str(case_file(self.output_dir, case, f"_{key}")))
            for number, ending in product(("", "_[0-9]*"), (".dcm", "_colour", "_seg.dcm")):
                for path in glob.glob(base + number + ending):
                    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def _labels(explanation: Explanation | None, count: int) -> list[str]:
    """What each map shows, in 64 characters that every archive knows, without the backslash that parts values."""
    if explanation is None or len(explanation.explained) != count:
        return ["saliency"] * count
    labels = []
    for explained, *_ in explanation.explained:
        words = f"saliency for {label_name(explained)}"
        known = words.encode("ascii", "replace").decode()
        labels.append(known.replace("\\", "/")[:64])
    return labels


def save_parametric_map(
    path: str | Path, saliency: MetaTensor, files: Sequence[str | Path], label: str = "saliency map"
) -> None:
    """Write one map as a DICOM Parametric Map, whole or not at all.

    It refers to the series' slices and has its frame of reference, and so its patient too. Its frames follow the normal
    of the slices' plane, whatever the order of the files. The same map and series give the same UIDs. Of several
    classes each has its own file.

    Args:
        path: the file to write, ``*.dcm``.
        saliency: the map ``(1, columns, rows, slices)`` on the series' own grid, in float32 or float64, which stays.
        files: the series that was explained.
        label: what the map shows, at most 64 characters.

    Raises:
        AdviceError: when the series is refused, as by :func:`monai_saliency.storage.dicom.sorted_series`, or the map
            does not lie on its grid to 1e-3 mm.
        OutputError: when the file cannot be written.
        OptionalImportError: when highdicom is not installed. It gives the pip command.
    """
    hd, codes = require("highdicom", "dicom"), require("pydicom.sr.coding", "dicom")
    on_series = OnSeries.of(saliency, files)
    slices, frames = on_series.slices, on_series.frames
    low, high = float(frames.min()), float(frames.max())
    mapping = hd.pm.RealWorldValueMapping(
        label[:16],
        label,
        codes.Code("1", "UCUM", "no units"),
        (low, high),
        slope=1.0,
        intercept=0.0,
        quantity_definition=codes.Code("130404", "DCM", "Saliency"),
    )
    window = hd.VOILUTTransformation(window_center=(low + high) / 2, window_width=max(high - low, 1e-6))
    made = hd.pm.ParametricMap(
        slices,
        frames,
        on_series.uid("series", label),
        _MAPS,
        on_series.uid("object", label),
        **_INSTANCE,
        contains_recognizable_visual_features=False,
        real_world_value_mappings=[mapping],
        content_label="SALIENCY",
        content_description=label,
        voi_lut_transformations=[window],
    )
    _put_in_order(made, slices, frames)
    _save_frames(path, made, slices[0], on_series.uid("dimensions", label))


def _put_in_order(made: Any, slices: Sequence[Any], frames: np.ndarray) -> None:
    """Order a map's frames as the slices, along the normal of their plane. OHIF takes frame n for slice n of the scan
    so ordered, wherever its header places it, and highdicom (0.28) begins at the other end.
    """
    numbers = {source.SOPInstanceUID: number for number, source in enumerate(slices, 1)}
    groups = {}
    for group in made.PerFrameFunctionalGroupsSequence:
        source = group.DerivationImageSequence[0].SourceImageSequence[0]
        number = numbers[source.ReferencedSOPInstanceUID]
        group.FrameContentSequence[0].DimensionIndexValues = number
        groups[number] = group
    made.PerFrameFunctionalGroupsSequence = [groups[number] for number in sorted(groups)]
    word = "DoubleFloatPixelData" if frames.dtype == np.float64 else "FloatPixelData"
    setattr(made, word, frames.tobytes())


def save_segmentation(
    path: str | Path,
    saliency: MetaTensor,
    files: Sequence[str | Path],
    share: float = 0.5,
    label: str = "saliency map",
    legend: Legend | None = None,
    standard_error: np.ndarray | None = None,
) -> bool:
    """Write the region of a map's largest values as a DICOM Segmentation of one segment, whole or not at all.

    The region is where the map reaches ``share`` of its largest value, and has a colour in the pictures
    (:func:`~monai_saliency.visualize.plot_saliency`). So a map that chance can make has no region, nor has one without
    values above zero. The same map and series give the same UIDs, of which one tracks the segment.

    Args:
        path: the file to write, ``*.dcm``.
        saliency: the map ``(1, columns, rows, slices)`` on the series' own grid.
        files: the series that was explained.
        share: the threshold, as a share of the map's largest value; in (0, 1].
        label: what the map shows, at most 64 characters.
        legend: what the colours mean; by default the largest absolute value is the last colour.
        standard_error: of the map, of its shape; None where there is none.

    Returns:
        whether there is a region. Without one nothing is written.

    Raises:
        ValueError: when ``share`` is not in (0, 1].
        AdviceError: as for :func:`~monai_saliency.transforms.save_parametric_map`.
        OutputError: when the file cannot be written.
        OptionalImportError: when highdicom is not installed. It gives the pip command.
    """
    _check_share("share", share)
    hd = require("highdicom", "dicom")
    on_series = OnSeries.of(saliency, files)
    threshold = share * float(on_series.frames.max())
    _, coloured = on_series.coloured(legend, standard_error)
    region = coloured & (on_series.frames >= threshold) & (threshold > 0)
    if not region.any():
        return False

    made_of = (label, str(share), sha256(region.tobytes()).hexdigest())
    parameters = {"share of the largest value": f"{share:g}", "threshold": f"{threshold:.7g}"}
    made = hd.seg.Segmentation(
        on_series.slices,
        region.astype(np.uint8),
        "BINARY",
        [_segment(label, parameters, on_series.uid("region", *made_of))],
        on_series.uid("segmentations", *made_of),
        _SEGMENTATIONS,
        on_series.uid("segmentation", *made_of),
        **_INSTANCE,
        content_label="SALIENCY",
        content_description=f"{share:g} of the largest value, or more",
    )
    made.SeriesDescription = label
    _save_frames(path, made, on_series.slices[0], on_series.uid("dimensions of the region", *made_of))
    return True


def _segment(label: str, parameters: dict[str, str], tracking: str) -> Any:
    """The description of the one segment: what it is, and by which settings it was made."""
    hd, codes = require("highdicom", "dicom"), require("pydicom.sr.codedict", "dicom").codes
    algorithm = hd.AlgorithmIdentificationSequence(
        name=_NAME, family=codes.cid7162.ArtificialIntelligence, version=__version__, parameters=parameters
    )
    return hd.seg.SegmentDescription(
        segment_number=1,
        segment_label=label,
        segmented_property_category=codes.SCT.SpatialAndRelationalConcept,
        segmented_property_type=codes.NCIt.ImagingRegionOfInterest,
        algorithm_type="AUTOMATIC",
        algorithm_identification=algorithm,
        tracking_uid=tracking,
        tracking_id=label,
    )


def save_secondary_capture(
    folder: str | Path,
    saliency: MetaTensor,
    files: Sequence[str | Path],
    label: str = "saliency map",
    legend: Legend | None = None,
    standard_error: np.ndarray | None = None,
) -> list[Path]:
    """Write the scan with one map over it as a series of colour Secondary Captures, one a slice.

    Colours are chosen as by :func:`~monai_saliency.visualize.plot_saliency`. The scan is gray in
    the window of the pictures. The same map and series give the same UIDs.

    Args:
        folder: the folder to write: ``0001.dcm`` and so on, each whole or not at all.
        saliency: the map ``(1, columns, rows, slices)`` on the series' own grid.
        files: the series that was explained.
        label: what the map shows, at most 64 characters.
        legend: what the colours mean; by default the largest absolute value is the last colour.
        standard_error: of the map, of its shape; None where there is none.

    Returns:
        the files, in the order of the slices.

    Raises:
        AdviceError: as for :func:`~monai_saliency.transforms.save_parametric_map`.
        OutputError: when a file cannot be written.
        OptionalImportError: when highdicom is not installed. It gives the pip command.
    """
    hd = require("highdicom", "dicom")
    on_series = OnSeries.of(saliency, files)
    legend, coloured = on_series.coloured(legend, standard_error)
    low, high = gray_window(on_series.scan)
    series = on_series.uid("captures", label, repr(legend))
    written = []
    for place, source in enumerate(on_series.slices):
        number = place + 1
        gray = np.clip((on_series.scan[place] - low) / (high - low), 0, 1)
        made = hd.sc.SCImage.from_ref_dataset(
            source,
            blended(gray, on_series.frames[place], coloured[place], legend.scale),
            "RGB",
            8,
            "PATIENT",
            series,
            _CAPTURES,
            on_series.uid("capture", label, repr(legend), str(number)),
            number,
            _NAME,
            pixel_spacing=tuple(map(float, source.PixelSpacing)),
            patient_orientation=on_series.towards,
        )
        made.SeriesDescription = label
        _fix_dates(made, source)
        made.DateOfSecondaryCapture, made.TimeOfSecondaryCapture = made.ContentDate, made.ContentTime
        path = Path(folder) / f"{number:04d}.dcm"
        with atomic_path(path) as temporary:
            made.save_as(temporary)
        written.append(path)
    return written


def _check_share(name: str, value: Any) -> None:
    """Check that a number is in (0, 1]."""
    probability(name, value)
    positive_numbers(name, value)


def _save_frames(path: str | Path, made: Any, source: Any, dimensions: str) -> None:
    """Save an object of several frames, whose dimensions have a random UID otherwise."""
    _fix_dates(made, source)
    for item in (*made.DimensionOrganizationSequence, *made.DimensionIndexSequence):
        item.DimensionOrganizationUID = dimensions
    with atomic_path(path) as temporary:
        made.save_as(temporary)


def _fix_dates(made: Any, source: Any) -> None:
    """Replace today's dates by the dates of the scan: two objects of one UID must have the same content."""
    date = source.get("ContentDate") or source.get("StudyDate") or "19000101"
    time = source.get("ContentTime") or source.get("StudyTime") or "000000"
    for word in ("Content", "InstanceCreation"):
        setattr(made, f"{word}Date", date)
        setattr(made, f"{word}Time", time)
    for equipment in made.get("ContributingEquipmentSequence", ()):
        equipment.ContributionDateTime = f"{date}{time}"
