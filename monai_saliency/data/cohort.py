"""A cohort of scans: how to find them, and a dataset whose errors name the broken scan."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from monai.data import Dataset

from monai_saliency.data.case_ids import CaseIds
from monai_saliency.data.listings import LISTS, Listed, read_list
from monai_saliency.errors import AdviceError, CaseError, as_case_error
from monai_saliency.storage.dicom import group_series, holds_series, series_files, series_id
from monai_saliency.storage.files import NIFTI, check_readers, format_of
from monai_saliency.utils.arguments import a_path, instance

__all__ = ["CohortDataset", "find_cases"]

_WANTED = (
    "it must hold *.nii.gz or *.nii files, scans of other formats, a dataset.json that lists some, or pictures, which "
    "are explained with --spatial_dims 2"
)


def find_cases(
    dataset_dir: str | Path,
    section: str | None = None,
    exclude: str | Path | None = None,
    spatial_dims: int = 3,
    channels: int = 1,
) -> list[dict[str, Any]]:
    """Find the scans below a folder, or of a list. A missing scan is a case too, which :class:`CohortDataset` cannot
    load.

    Args:
        dataset_dir: one of

            - a Medical Segmentation Decathlon folder (``dataset.json`` with ``imagesTs``, ``labelsTs``, ...);
            - a list, ``*.json`` or ``*.csv`` (:func:`monai_saliency.data.listings.read_list`);
            - any other folder with scans in it or below it: NIfTI, NRRD and MetaImage (``.nii``, ``.nii.gz``,
              ``.nrrd``, ``.nhdr``, ``.mha``, ``.mhd``), and for 2D also photographs (``.png``, ``.jpg``, ``.jpeg``,
              ``.tif``, ``.tiff``), and for 3D also DICOM series (a case each), whatever the names of their
              files. Segmentations that are called ``*.seg.nrrd`` are left out. Links to folders are
              followed. A link to a file that does not exist, as git-annex makes them, is a missing scan. Hidden files
              are left out.
        section: the section of the list. Default: the first of ``"test"``, ``"training"`` and ``"validation"`` that
            lists a scan.
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
        FileNotFoundError: when the folder does not exist, or none of its scans does.
        ValueError: when a folder cannot be read, when the folder or list holds no scan, when a folder has no
            ``dataset.json`` and lies in ``exclude``, or when the list cannot be read.
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
    listing = place if place.suffix.lower() in LISTS and place.is_file() else place / "dataset.json"
    root = listing.parent
    if not root.is_dir():
        raise FileNotFoundError(
            f"`dataset_dir` {place} is not a folder: pass --dataset_dir with a folder of scans such as *.nii.gz, a "
            "Medical Segmentation Decathlon folder, or a list of scans (*.csv or *.json)"
        )
    if listing.is_file():
        found = [series for each in read_list(listing, section, channels) for series in _series_of(each)]
    else:
        found = _scans_below(root, exclude, spatial_dims, channels)
    where = f"section {section!r} of {listing}" if section and listing.is_file() else place
    if not found:
        raise ValueError(f"no scan found in {where}: {_WANTED}")
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
    twice = [case for case, count in Counter(str(case["case"]) for case in cases).items() if count > 1]
    if twice:
        raise ValueError(
            f"two scans of {place} share the name {twice[0]!r}: rename or remove one, so that no map is lost"
        )
    return sorted(cases, key=lambda case: str(case["case"]))


def _scans_below(root: Path, exclude: str | Path | None, spatial_dims: int, channels: int) -> list[Listed]:
    """The scans below a folder."""
    skipped = Path(exclude).resolve() if exclude is not None else None
    if skipped is not None and skipped in (root.resolve(), *root.resolve().parents):
        word = "is" if skipped == root.resolve() else "holds"
        raise ValueError(
            f"the output folder {exclude} {word} `dataset_dir` {root}, so "
            "scans cannot be told from maps: choose an `output_dir` next to or below `dataset_dir`"
        )
    files = [
        path for path in _files_below(root) if skipped is None or skipped not in Path(os.path.realpath(path)).parents
    ]
    scans = [Listed((path,), None, channels) for path in files if _is_scan(path, spatial_dims)]
    # Radiographs in DICOM are not volumes.
    others = [path for path in files if format_of(path) is None] if spatial_dims == 3 else []
    return scans + [
        Listed(tuple(slices), None, channels, series_id(uid)) for uid, slices in group_series(others).items()
    ]


def _series_of(listed: Listed) -> list[Listed]:
    """The DICOM series of an entry of a list that names a folder or a slice of one; other entries as they are."""
    path = listed.images[0]
    if len(listed.images) > 1 or format_of(path) is not None or not holds_series(path):
        return [listed]
    found = group_series(series_files(path))
    label = listed.label if len(found) == 1 else None
    return [Listed(tuple(each), label, listed.channels, series_id(uid)) for uid, each in found.items()] or [listed]


def _is_scan(path: Path, spatial_dims: int) -> bool:
    found = format_of(path)
    is_photograph = found is not None and found.is_photograph
    # Folders of 3D scans often hold pictures of them, and 3D Slicer's segmentations.
    return found is not None and not (is_photograph and spatial_dims != 2) and not path.name.endswith(".seg.nrrd")


def _files_below(root: Path) -> Iterator[Path]:
    """The files below a folder, and links to files that do not exist. Links to folders are followed once."""

    def refuse(error: OSError) -> None:
        raise AdviceError(
            f"the folder {error.filename} cannot be read ({error.strerror}), so scans in it would be lost: give "
            "yourself access to it, move it out of `dataset_dir`, or list the scans to explain in a CSV file"
        ) from error

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        above = {os.path.realpath(place) for place in (Path(folder), *Path(folder).parents)}
        places = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if not name.startswith(".")}
        folders[:] = [name for name, place in places.items() if place not in above]  # no loops of links
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _missing(image: str | Path) -> str:
    if os.path.islink(image):
        return (
            f"{image} is a link to {os.readlink(image)}, which does not exist: fetch that file (git-annex and DataLad "
            "do so by `get`), or remove the link"
        )
    return f"{image} does not exist: copy it there, or take it off the list of scans"


class CohortDataset(Dataset):
    """A dataset whose errors name the case.

    Args:
        data: the cases, as returned by :func:`find_cases`.
        transform: the preprocessing.

    Raises:
        CaseError: on reading a case that cannot be loaded.

    Example::

        >>> cases = [{"case": "a", "image": 1}, {"case": "b", "image": 0}]
        >>> dataset = CohortDataset(cases, lambda item: 1 / item["image"])
        >>> dataset[1]  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        monai_saliency.errors.CaseError: case b: 0 could not be loaded: ZeroDivisionError: division by zero. ...
    """

    def __init__(self, data: Sequence[dict[str, Any]], transform: Callable[[Any], Any] | None = None) -> None:
        if not (isinstance(data, Sequence) and all(isinstance(case, Mapping) for case in data)):
            raise ValueError(f"`data` must be a list of cases such as find_cases(folder), got {data!r:.200}")
        if not isinstance(transform, (list, tuple)):
            words = "the preprocessing, such as Compose([LoadImaged(...), ...]), or a list of transforms"
            instance("transform", transform, (), words, function=True, none=True)
        super().__init__(data, transform)

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        if not isinstance(index, SupportsIndex):
            return super().__getitem__(index)  # a part of the dataset
        case = self.data[index]
        try:
            return self.read(index)
        except Exception as error:
            name = str(case.get("case", index))
            image = case.get("image")
            files = image if isinstance(image, list) else [image]
            if isinstance(image, list) and format_of(image[0]) is None:  # whose paths may name a patient
                words = f"its {len(image)} DICOM files could not be loaded: "
                raise as_case_error(error, name, words, ". Copy them again, or convert the series to NIfTI") from error
            for file in files:
                if isinstance(file, str | Path) and not os.path.exists(file):
                    raise CaseError(name, _missing(file)) from error
            kind = (format_of(image) if isinstance(image, str | Path) else None) or NIFTI
            check = f". Check that the file is a complete {kind.name} (a truncated one must be copied again), or "
            raise as_case_error(error, name, f"{image} could not be loaded: ", f"{check}remove it") from error

    def read(self, index: int) -> Any:
        """Transform one case. Subclasses override this."""
        return super().__getitem__(index)
