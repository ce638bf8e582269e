"""A cohort of scans: how to find them, and what they are called."""

from __future__ import annotations

import csv
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monai_saliency.errors import AdviceError, CaseError, as_case_error
from monai_saliency.storage.dicom import group_series, holds_series, series_files, series_id
from monai_saliency.storage.files import files_below
from monai_saliency.storage.scans import NIFTI, case_id, check_readers, format_of, scan_stem
from monai_saliency.utils.arguments import a_path

SECTIONS = ("test", "training", "validation", "train", "val")


@dataclass(frozen=True)
class _Scan:
    """A scan of a cohort; a DICOM series has a ``name`` of its own."""

    images: Sequence[Path]
    label: Path | None = None
    channels: int = 1
    name: str = ""


def find_cases(
    dataset_dir: str | Path,
    section: str | None = None,
    exclude: str | Path | None = None,
    spatial_dims: int = 3,
    channels: int = 1,
) -> list[dict[str, Any]]:
    """Find the scans below a folder, or of a list. A missing scan is a case too, which cannot be loaded.

    Args:
        dataset_dir: one of

            - a Medical Segmentation Decathlon folder (``dataset.json`` with ``imagesTs``, ``labelsTs``, ...);
            - a list, with paths relative to its folder: ``*.json`` as MONAI's ``load_decathlon_datalist`` reads it, or
              ``*.csv`` with a column ``image`` and, as needed, ``label`` and ``split``;
            - a BIDS dataset (``dataset_description.json``): the NIfTI scans ``sub-*/[ses-*/]anat/*_<suffix>.nii.gz``;
            - any other folder with scans in it or below it: NIfTI, NRRD and MetaImage (``.nii``, ``.nii.gz``,
              ``.nrrd``, ``.nhdr``, ``.mha``, ``.mhd``), and for 2D also photographs (``.png``, ``.jpg``, ``.jpeg``,
              ``.tif``, ``.tiff``), and for 3D also DICOM series (a case each), whatever the names of their
              files. Segmentations that are called ``*.seg.nrrd`` are left out. Links to folders are
              followed. A link to a missing file, as of git-annex, is a missing scan. Hidden files are left out.
        section: the section of the list, or the ``split``, by its name there. Default: the first of ``"test"``,
            ``"training"``, ``"validation"``, ``"train"`` and ``"val"`` that lists a scan, and all rows of a table
            without these sections. Of a BIDS dataset the suffix of the scans, such as ``"T1w"`` or, of any data type,
            ``"bold"``; needed where its ``anat`` folders hold several.
        exclude: a folder whose files are not scans of the cohort, such as an output folder below ``dataset_dir``.
        spatial_dims: how many spatial axes the scans have, 2 or 3.
        channels: how many channels the scans have, if no list of modalities gives their number.

    Returns:
        one dictionary for each case, sorted by ``case``:

        - ``case``: the path of the scan below the folder without its suffix; with it where two scans differ in nothing
          else. Of a DICOM series :func:`~monai_saliency.storage.dicom.series_id` alone, since folders of DICOM are
          often called after patients;
        - ``image``: the path of the scan, or a list of paths for a scan whose channels are files and for a series;
        - ``label``: the path of its label map, or ``""``;
        - ``channels``: the number of channels of the scan.

    Raises:
        FileNotFoundError: when the folder or all of its scans are missing.
        ValueError: when a folder cannot be read, when the folder or list holds no scan, when a folder has no
            ``dataset.json`` and lies in ``exclude``, when the list cannot be read, or when a BIDS dataset has scans of
            several suffixes and ``section`` does not choose one.
        OptionalImportError: when the package that reads a scan is not installed. It gives the pip command.

    Example::

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     for name in "ab":
        ...         (Path(folder) / f"{name}.nii.gz").touch()
        ...     [case["case"] for case in find_cases(folder)]
        ['a', 'b']
    """
    place = a_path("dataset_dir", dataset_dir)
    is_list = place.suffix.lower() in (".csv", ".json") and place.is_file()
    listing = place if is_list else place / "dataset.json"
    if not listing.parent.is_dir():
        raise FileNotFoundError(
            f"`dataset_dir` {place} is not a folder: pass --dataset_dir with a folder of scans such as *.nii.gz, a "
            "Medical Segmentation Decathlon folder, or a list of scans (*.csv or *.json)"
        )
    if listing.is_file():
        where = f"section {section!r} of {listing}" if section else str(place)
        scans = _listed_scans(listing, section, channels)
    else:
        where = str(place)
        scans = _scans_below(place, section, exclude, spatial_dims, channels)
    if not scans:
        raise ValueError(
            f"no scan found in {where}: it must hold *.nii.gz or *.nii files, scans of other formats, a dataset.json "
            "that lists some, or pictures, which are explained with --spatial_dims 2"
        )
    if not any(os.path.exists(scan.images[0]) for scan in scans):
        raise FileNotFoundError(f"none of the {len(scans)} scans of {where} exists: {_missing(scans[0].images[0])}")
    for scan in scans:
        check_readers(scan.images if scan.label is None else [*scan.images, scan.label])
    ids = CaseIds(listing.parent, [scan.images[0] for scan in scans if not scan.name])
    cases: dict[str, dict[str, Any]] = {}
    for scan in scans:
        name, files = scan.name or ids(scan.images[0]), list(map(str, scan.images))
        if name in cases:
            raise ValueError(
                f"two scans of {place} share the name {name!r}: rename or remove one, so that no map is lost"
            )
        image = files[0] if len(files) == 1 and not scan.name else files
        cases[name] = {"case": name, "image": image, "label": str(scan.label or ""), "channels": scan.channels}
    return [cases[name] for name in sorted(cases)]


def _scans_below(
    root: Path, section: str | None, exclude: str | Path | None, spatial_dims: int, channels: int
) -> list[_Scan]:
    """The scans below a folder."""
    skipped = None if exclude is None else Path(exclude).resolve()
    if skipped in (root.resolve(), *root.resolve().parents):
        raise ValueError(
            f"the output folder {exclude} is or holds `dataset_dir` {root}, so scans and maps would mix: choose "
            "an `output_dir` next to or below `dataset_dir`"
        )
    is_bids = (root / "dataset_description.json").is_file()
    scans, others = [], []
    for path in _bids_scans(root, section) if is_bids else files_below(root):
        if skipped in Path(os.path.realpath(path)).parents:
            continue
        if _is_scan(path, spatial_dims):
            scans.append(_Scan((path,), None, channels))
        elif spatial_dims == 3 and format_of(path) is None:  # radiographs in DICOM are not volumes
            others.append(path)
    series = group_series(others) if others else {}
    return scans + [_Scan(slices, None, channels, series_id(uid)) for uid, slices in series.items()]


def _bids_scans(root: Path, suffix: str | None) -> list[Path]:
    """The NIfTI scans of one suffix in a BIDS dataset, such as ``T1w``; without one, the suffix of all in ``anat``."""
    by_suffix: dict[str, list[Path]] = {}
    for path in [*root.glob("sub-*/*/sub-*"), *root.glob("sub-*/ses-*/*/sub-*")]:
        if format_of(path) is NIFTI and (suffix or path.parent.name == "anat"):
            _, _, name = scan_stem(path).rpartition("_")
            by_suffix.setdefault(name, []).append(path)
    if suffix is None and len(by_suffix) < 2:
        suffix = next(iter(by_suffix), "")
        return by_suffix.get(suffix, [])
    if suffix in by_suffix:
        return by_suffix[suffix]
    got = "" if suffix is None else f", got {suffix!r}"
    raise ValueError(
        f"the BIDS dataset {root} has scans of the suffixes {', '.join(sorted(by_suffix))}: choose what the "
        f"network is for with --section, such as --section {min(by_suffix, default='T1w')}{got}"
    )


def _is_scan(path: Path, spatial_dims: int) -> bool:
    kind = format_of(path)
    # Folders of 3D scans often hold pictures of them, and 3D Slicer's segmentations.
    if kind is None or path.name.endswith(".seg.nrrd"):
        return False
    return spatial_dims == 2 or not kind.is_photograph


def _missing(image: str | Path) -> str:
    link = f" is a link to {os.readlink(image)}, which" if os.path.islink(image) else ""
    return f"{image}{link} does not exist: copy or fetch it, or take it off the list of scans"


def _listed_scans(path: Path, section: str | None, channels: int) -> list[_Scan]:
    """The scans that a list names; of an entry that names DICOM files, their series."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        content: Any = _sections_of(text) if path.suffix.lower() == ".csv" else json.loads(text)
    except ValueError as error:
        raise AdviceError(
            f"{path} cannot be read as a list of scans ({error}): save it in UTF-8, mend it, or remove it to use every "
            "scan of its folder"
        ) from error
    scans = []
    for given in _of_section(path, content, section) if isinstance(content, dict) else [None]:
        entry = given if isinstance(given, dict) else {"image": given}
        image = entry.get("image")
        names: list[Any] = image if isinstance(image, list) else [image]
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"{path} lists {entry}, where a path or a dictionary with an `image` is expected: mend it, or remove "
                "it to use every scan of its folder"
            )
        images = [path.parent / Path(name).expanduser() for name in names]
        label = _label(path, entry, names[0])
        modalities = len(content.get("modality") or content.get("channel_names") or ())
        count = modalities or (len(images) if len(images) > 1 else channels)
        scan = _Scan(images, None if label in images else label, count)
        is_dicom = len(images) == 1 and format_of(images[0]) is None and holds_series(images[0])
        scans += _series_of(scan) if is_dicom else [scan]
    return scans


def _series_of(listed: _Scan) -> list[_Scan]:
    """The DICOM series of a folder, or of a folder's slice, that a list names."""
    series = group_series(series_files(listed.images[0]))
    label = listed.label if len(series) == 1 else None
    scans = [_Scan(files, label, listed.channels, series_id(uid)) for uid, files in series.items()]
    return scans or [listed]


def _sections_of(text: str) -> dict[str, list[dict[str, str]]]:
    """The rows of a table by their ``split``."""
    header = text.partition("\n")[0]
    rows = csv.reader(text.splitlines(), delimiter=max(",;\t", key=header.count))
    names = [name.strip().lower() for name in next(rows, [])]
    if "image" not in names:
        raise ValueError(f"it must have a column `image`, and may have `label` and `split`, got {names}")
    sections: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        cells = dict(zip(names, map(str.strip, row), strict=False))
        if any(cells.values()):
            sections.setdefault(cells.get("split", ""), []).append(cells)
    return sections


def _of_section(path: Path, content: Mapping[str, Any], section: str | None) -> list[Any]:
    """The entries of a section; all entries if a table has no usual section."""
    entries = {name: listed for name, listed in content.items() if isinstance(listed, list) and listed}
    usual = [name for name in SECTIONS if name in entries]
    if not section and path.suffix.lower() == ".csv":
        others = sorted(set(entries) - set(SECTIONS))
        if not usual:
            return [entry for listed in entries.values() for entry in listed]
        if others:
            raise AdviceError(
                f"{path} has rows whose `split` is not one of {SECTIONS} ({others}), in addition to {usual[0]!r}: "
                "correct them, or choose one with --section"
            )
    return entries.get(section or "".join(usual[:1]), [])


def _label(path: Path, entry: Mapping[str, Any], image: str) -> Path | None:
    """The label map of a list's entry, if there is one. A class in its place, such as ``1``, names no file."""
    label: Any = entry.get("label")
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    is_named = isinstance(label, str) and label != ""
    # The Decathlon lists test scans without their labels, which may exist all the same.
    file = path.parent / Path(label if is_named else image.replace("images", "labels", 1)).expanduser()
    if file.is_file():
        return file
    if is_named and format_of(file) is not None:
        warnings.warn(f"the label map {file} of the list {path} does not exist, so it is left out", stacklevel=2)
    return None


class CaseIds:
    """Names of the cases of some files: :func:`case_id`, with the suffix where two files differ in it alone."""

    def __init__(self, root: Path | None, files: Iterable[Path]) -> None:
        self._root = root
        self._names = Counter(case_id(root, Path(file)) for file in dict.fromkeys(map(os.path.abspath, files)))

    def __call__(self, file: Path) -> str:
        """The name of a file's case."""
        name = case_id(self._root, file)
        if self._names[name] < 2:
            return name
        return name + file.name.removeprefix(scan_stem(file))


def loading_error(error: Exception, case: Mapping[str, Any], index: int) -> CaseError:
    """The error of a case that cannot be loaded or preprocessed, in words that say what to do."""
    name, image = str(case.get("case", index)), case.get("image")
    step = _failed_step(error)
    if step and not step.startswith("Load"):
        return as_case_error(error, name, f"{step} of the preprocessing failed: ", f". Check the settings of {step}")
    is_series = isinstance(image, list) and format_of(image[0]) is None  # whose paths may name a patient
    files = [file for file in (image if isinstance(image, list) else [image]) if isinstance(file, str | Path)]
    if forbidden := [file for file in files if os.path.exists(file) and not os.access(file, os.R_OK)]:
        words = "one of its DICOM files" if is_series else forbidden[0]
        return CaseError(name, f"no permission to read {words}: change its mode, such as by chmod +r")
    if is_series:
        words = f"its {len(files)} DICOM files could not be loaded: "
        return as_case_error(error, name, words, ". Copy them again, or convert the series to NIfTI")
    for file in files:
        if not os.path.exists(file):
            return CaseError(name, _missing(file))
    advice = ". Check that it is complete (a truncated file must be copied again), or remove it"
    return as_case_error(error, name, f"{image} could not be loaded: ", advice)


def _failed_step(error: BaseException | None) -> str:
    """The name of the transform that failed, which MONAI's errors give as ``<module.Name object at ...>``; or empty."""
    name = ""
    while error is not None:
        if step := re.match(r"applying transform <(?:function )?([\w.]+)", str(error)):
            name = step[1].rpartition(".")[2]
        error = error.__cause__
    return name
