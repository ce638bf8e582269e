"""A cohort of scans: how to find them, and what they are called."""

from __future__ import annotations

import csv
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monai_saliency.errors import AdviceError, CaseError, as_case_error
from monai_saliency.storage.dicom import group_series, holds_series, series_files, series_id
from monai_saliency.storage.scans import NIFTI, case_id, check_readers, format_of, name_hash, scan_stem
from monai_saliency.utils.arguments import a_path

__all__ = ["CaseIds", "find_cases", "loading_error"]

SECTIONS = ("test", "training", "validation", "train", "val")


@dataclass(frozen=True)
class _Found:
    """A scan of a cohort."""

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
    listing = place if place.suffix.lower() in (".csv", ".json") and place.is_file() else place / "dataset.json"
    root = listing.parent
    if not root.is_dir():
        raise FileNotFoundError(
            f"`dataset_dir` {place} is not a folder: pass --dataset_dir with a folder of scans such as *.nii.gz, a "
            "Medical Segmentation Decathlon folder, or a list of scans (*.csv or *.json)"
        )
    if listing.is_file():
        found = [series for each in _read_list(listing, section, channels) for series in _series_of(each)]
    else:
        found = _scans_below(root, section, exclude, spatial_dims, channels)
    where = f"section {section!r} of {listing}" if section and listing.is_file() else place
    if not found:
        raise ValueError(
            f"no scan found in {where}: it must hold *.nii.gz or *.nii files, scans of other formats, a dataset.json "
            "that lists some, or pictures, which are explained with --spatial_dims 2"
        )
    if not any(os.path.exists(each.images[0]) for each in found):
        raise FileNotFoundError(f"none of the {len(found)} scans of {where} exists: {_missing(found[0].images[0])}")
    check_readers(path for each in found for path in (*each.images, *filter(None, [each.label])))
    ids = CaseIds(root, [each.images[0] for each in found if not each.name])
    cases = [
        {
            "case": each.name or ids(each.images[0]),
            "image": str(each.images[0]) if len(each.images) == 1 and not each.name else [*map(str, each.images)],
            "label": str(each.label or ""),
            "channels": each.channels,
        }
        for each in found
    ]
    name, count = Counter(str(case["case"]) for case in cases).most_common(1)[0]
    if count > 1:
        raise ValueError(f"two scans of {place} share the name {name!r}: rename or remove one, so that no map is lost")
    return sorted(cases, key=lambda case: str(case["case"]))


def _scans_below(
    root: Path, section: str | None, exclude: str | Path | None, spatial_dims: int, channels: int
) -> list[_Found]:
    """The scans below a folder."""
    skipped = Path(exclude).resolve() if exclude is not None else None
    if skipped in (root.resolve(), *root.resolve().parents):
        raise ValueError(
            f"the output folder {exclude} is or holds `dataset_dir` {root}, so scans and maps would mix: choose "
            "an `output_dir` next to or below `dataset_dir`"
        )
    places = _bids_scans(root, section) if (root / "dataset_description.json").is_file() else _files_below(root)
    files = [path for path in places if skipped not in Path(os.path.realpath(path)).parents]
    scans = [_Found((path,), None, channels) for path in files if _is_scan(path, spatial_dims)]
    # Radiographs in DICOM are not volumes.
    others = [path for path in files if format_of(path) is None] if spatial_dims == 3 else []
    series = group_series(others) if others else {}
    return scans + [_Found(slices, None, channels, series_id(uid)) for uid, slices in series.items()]


def _bids_scans(root: Path, suffix: str | None) -> list[Path]:
    """The NIfTI scans of one suffix in a BIDS dataset, such as ``T1w``; without one, the suffix of all in ``anat``."""
    files = [path for pattern in ("sub-*/*/sub-*", "sub-*/ses-*/*/sub-*") for path in root.glob(pattern)]
    by_suffix: dict[str, list[Path]] = {}
    for path in files:
        if format_of(path) is NIFTI and (suffix or path.parent.name == "anat"):
            by_suffix.setdefault(scan_stem(path).rpartition("_")[2], []).append(path)
    if (suffix or len(by_suffix) > 1) and suffix not in by_suffix:
        got = "" if suffix is None else f", got {suffix!r}"
        raise ValueError(
            f"the BIDS dataset {root} has scans of the suffixes {', '.join(sorted(by_suffix))}: choose what the "
            f"network is for with --section, such as --section {min(by_suffix, default='T1w')}{got}"
        )
    return next(iter(by_suffix.values()), []) if suffix is None else by_suffix[suffix]


def _series_of(listed: _Found) -> list[_Found]:
    """The DICOM series of an entry of a list that names a folder or a slice of one; other entries as they are."""
    path = listed.images[0]
    if len(listed.images) > 1 or format_of(path) is not None or not holds_series(path):
        return [listed]
    found = group_series(series_files(path))
    label = listed.label if len(found) == 1 else None
    return [_Found(each, label, listed.channels, series_id(uid)) for uid, each in found.items()] or [listed]


def _is_scan(path: Path, spatial_dims: int) -> bool:
    found = format_of(path)
    # Folders of 3D scans often hold pictures of them, and 3D Slicer's segmentations.
    return found is not None and (spatial_dims == 2 or not found.is_photograph) and not path.name.endswith(".seg.nrrd")


def _files_below(root: Path) -> Iterator[Path]:
    """The files below a folder, and links to files that do not exist. Links to folders are followed once."""

    def refuse(error: OSError) -> None:
        raise error  # else the scans of a folder that cannot be read would be left out

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        above = {os.path.realpath(place) for place in (Path(folder), *Path(folder).parents)}
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(os.path.join(folder, name)) not in above
        ]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _missing(image: str | Path) -> str:
    link = f" is a link to {os.readlink(image)}, which" if os.path.islink(image) else ""
    return f"{image}{link} does not exist: copy or fetch it, or take it off the list of scans"


def _read_list(path: Path, section: str | None, channels: int) -> list[_Found]:
    """The scans that a list names."""
    is_table = path.suffix.lower() == ".csv"
    try:
        text = path.read_text(encoding="utf-8-sig")
        content: Any = _sections_of(text) if is_table else json.loads(text)
    except ValueError as error:
        raise AdviceError(
            f"{path} cannot be read as a list of scans ({error}): save it in UTF-8, mend it, or remove it to use every "
            "scan of its folder"
        ) from error
    given = _of_section(path, content, section) if isinstance(content, dict) else [None]
    entries = [entry if isinstance(entry, dict) else {"image": entry} for entry in given]
    for entry in entries:
        if not _images(entry):
            raise ValueError(
                f"{path} lists {entry}, where a path or a dictionary with an `image` is expected: mend it, or remove "
                "it to use every scan of its folder"
            )
    modalities = len(content.get("modality") or content.get("channel_names") or ())
    return [_listed(path, entry, modalities, channels) for entry in entries]


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
    entries = {name: each for name, each in content.items() if isinstance(each, list) and each}
    chosen = section or next((name for name in SECTIONS if name in entries), None)
    if chosen is None and path.suffix.lower() == ".csv":
        return [entry for each in entries.values() for entry in each]
    if not section and path.suffix.lower() == ".csv" and (other := sorted(set(entries) - set(SECTIONS))):
        raise AdviceError(
            f"{path} has rows whose `split` is not one of {SECTIONS} ({other}), in addition to {chosen!r}: correct "
            "them, or choose one with --section"
        )
    return entries.get(chosen or "", [])


def _images(entry: Mapping[str, Any]) -> list[str]:
    """The files of an entry; none where it has none."""
    image = entry.get("image")
    images = image if isinstance(image, list) else [image]
    names = [each for each in images if isinstance(each, str) and each]
    return names if len(names) == len(images) else []


def _listed(path: Path, entry: Mapping[str, Any], modalities: int, channels: int) -> _Found:
    """The scan of an entry, with its label map if there is one. A class in its place, such as ``1``, names no file."""
    names, label = _images(entry), entry.get("label")
    label = label[0] if isinstance(label, list) and len(label) == 1 else label
    images = [path.parent / Path(name).expanduser() for name in names]
    # The Decathlon lists test scans without their labels, which may exist all the same.
    name = label if label and isinstance(label, str) else names[0].replace("images", "labels", 1)
    place = path.parent / Path(name).expanduser()
    if name == label and format_of(place) is not None and not place.is_file():
        warnings.warn(f"the label map {place} of the list {path} does not exist, so it is left out", stacklevel=2)
    count = modalities or (len(images) if len(images) > 1 else channels)
    return _Found(images, place if place.is_file() and place not in images else None, count)


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
        whole = f"{name}{file.name.removeprefix(scan_stem(file))}"
        # frame.png next to frame.jpg and frame.png.nii
        return f"{whole}-{name_hash(file.name)}" if whole in self._names else whole


def loading_error(error: Exception, case: Mapping[str, Any], index: int) -> CaseError:
    """The error of a case that cannot be loaded or preprocessed, in words that say what to do."""
    name, image = str(case.get("case", index)), case.get("image")
    step = _failed_step(error)
    if step and not step.startswith("Load"):
        return as_case_error(error, name, f"{step} of the preprocessing failed: ", f". Check the settings of {step}")
    files = image if isinstance(image, list) else [image]
    words, advice = image, "Check that it is complete (a truncated file must be copied again), or remove it"
    if isinstance(image, list) and format_of(image[0]) is None:  # whose paths may name a patient
        words, advice = f"its {len(image)} DICOM files", "Copy them again, or convert the series to NIfTI"
    elif lost := [file for file in files if isinstance(file, str | Path) and not os.path.exists(file)]:
        return CaseError(name, _missing(lost[0]))
    return as_case_error(error, name, f"{words} could not be loaded: ", f". {advice}")


def _failed_step(error: BaseException | None) -> str:
    """The name of the transform that failed, which MONAI's errors give as ``<module.Name object at ...>``; or empty."""
    name = ""
    while error is not None:
        if step := re.match(r"applying transform <(?:function )?([\w.]+)", str(error)):
            name = step[1].rpartition(".")[2]
        error = error.__cause__
    return name
