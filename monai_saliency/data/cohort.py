"""A cohort of scans: how to find them, and a dataset whose errors name the broken scan."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from monai_saliency.errors import AdviceError, CaseError, as_case_error
from monai_saliency.utils.arguments import a_path, instance
from monai_saliency.utils.monai_private import ItemDataset

__all__ = ["CohortDataset", "case_id", "find_cases", "name_hash", "scan_stem"]

SECTIONS = ("test", "training", "validation")
_SUFFIXES = (".nii.gz", ".nii")
_LONGEST_NAME = 200  # bytes


def scan_stem(path: str | Path) -> str:
    """The file name of a scan without ``.nii.gz`` or ``.nii``.

    Example::

        >>> scan_stem("scans/sub-01.nii.gz")
        'sub-01'
    """
    name = Path(path).name
    return next((name[: -len(suffix)] for suffix in _SUFFIXES if name.lower().endswith(suffix)), Path(path).stem)


def find_cases(
    dataset_dir: str | Path, section: str | None = None, exclude: str | Path | None = None
) -> list[dict[str, Any]]:
    """Find the scans below a folder. A missing scan is a case too, which :class:`CohortDataset` cannot load.

    Example::

        cases = find_cases("Task04_Hippocampus", section="test")
        cases[0]["case"]  # "imagesTs/hippocampus_002"

    Args:
        dataset_dir: a Medical Segmentation Decathlon folder (``dataset.json`` with ``imagesTs``, ``labelsTs``, ...),
            or any folder with ``*.nii.gz`` or ``*.nii`` files in it or below it. Links to folders are followed. A link
            to a file that does not exist, as git-annex makes them, is a missing scan. Hidden files are left out.
        section: the section of ``dataset.json``: ``"test"``, ``"training"`` or ``"validation"``. Default: the first of
            these that lists a scan.
        exclude: a folder whose files are not scans of the cohort, such as an output folder below ``dataset_dir``.

    Returns:
        one dictionary for each case, sorted by ``case``:

        - ``case``: the path of the scan below ``dataset_dir`` without its suffix, which is unique;
        - ``image``: the path of the scan;
        - ``label``: the path of its label map, or ``""``;
        - ``channels``: the number of modalities along the fourth axis of the scan, 1 for a 3D scan.

    Raises:
        FileNotFoundError: when the folder does not exist, or none of its scans does.
        ValueError: when the folder holds no scan, when it has no ``dataset.json`` and lies in ``exclude``, or when
            ``dataset.json`` cannot be read.
    """
    root = a_path("dataset_dir", dataset_dir)
    if not root.is_dir():
        raise FileNotFoundError(
            f"`dataset_dir` {root} is not a folder: pass --dataset_dir with a folder of *.nii.gz scans, or a Medical "
            "Segmentation Decathlon folder"
        )
    listing = root / "dataset.json"
    if listing.is_file():
        found = _decathlon_scans(listing, section)
    else:
        skipped = Path(exclude).resolve() if exclude is not None else None
        if skipped is not None and skipped in (root.resolve(), *root.resolve().parents):
            word = "is" if skipped == root.resolve() else "holds"
            raise ValueError(
                f"the output folder {exclude} {word} `dataset_dir` {root}, so "
                "scans cannot be told from maps: choose an `output_dir` beside or below `dataset_dir`"
            )
        found = [
            (path, None, 1)
            for path in map(Path, _files_below(str(root)))
            if path.name.lower().endswith(_SUFFIXES)
            and (skipped is None or skipped not in Path(os.path.realpath(path)).parents)
        ]
    where = f"section {section!r} of {listing}" if section and listing.is_file() else root
    if not found:
        raise ValueError(
            f"no scan found in {where}: it must hold *.nii.gz or *.nii files, or a dataset.json that lists some"
        )
    if not any(os.path.exists(image) for image, *_ in found):
        raise FileNotFoundError(f"none of the {len(found)} scans of {where} exists: {_missing(found[0][0])}")
    cases = [
        {"case": case_id(root, image), "image": str(image), "label": str(label or ""), "channels": channels}
        for image, label, channels in found
    ]
    twice = [case for case, count in Counter(case["case"] for case in cases).items() if count > 1]
    if twice:
        raise ValueError(
            f"two scans of {root} share the name {twice[0]!r}: rename or remove one, so that no map is lost"
        )
    return sorted(cases, key=lambda case: case["case"])


def _files_below(folder: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """The files below a folder, and links to files that do not exist. ``above`` cuts loops of links."""
    try:
        status = os.stat(folder)
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        warnings.warn(f"scans below {folder} are left out, as it cannot be read: {error}", stacklevel=2)
        return
    here = status.st_dev, status.st_ino
    if here in above:
        return
    for entry in entries:
        if os.path.isdir(entry):
            yield from _files_below(entry.path, (*above, here))
        elif os.path.isfile(entry) or not os.path.exists(entry):
            yield entry.path


def _missing(image: str | Path) -> str:
    if os.path.islink(image):
        return (
            f"{image} is a link to {os.readlink(image)}, which does not exist: fetch that file (git-annex and DataLad "
            "do so by `get`), or remove the link"
        )
    return f"{image} does not exist: copy it there, or take it off the list of scans"


def _decathlon_scans(listing: Path, section: str | None) -> list[tuple[Path, Path | None, int]]:
    try:
        content = json.loads(listing.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AdviceError(
            f"{listing} is not valid JSON ({error}): mend it, or remove it to use every scan of its folder"
        ) from error
    lists = {name: content.get(name) or [] for name in SECTIONS} if isinstance(content, dict) else {}
    entries = lists.get(section, []) if section else next((found for found in lists.values() if found), [])
    if isinstance(entries, list):
        entries = [{"image": entry} if isinstance(entry, str) else entry for entry in entries]
    if not lists or not all(isinstance(entry, dict) and isinstance(entry.get("image"), str) for entry in entries):
        raise ValueError(
            f"{listing} is not the listing of a Medical Segmentation Decathlon folder, whose sections {SECTIONS} list "
            "paths or dictionaries with an `image`: mend it, or remove it to use every scan of its folder"
        )
    channels = max(1, len(content.get("modality") or content.get("channel_names") or [0]))
    scans = []
    for entry in entries:
        image = listing.parent / entry["image"]
        # The Decathlon lists test scans without their labels, which may exist all the same.
        label = listing.parent / (entry.get("label") or entry["image"].replace("images", "labels", 1))
        scans.append((image, label if label.is_file() and label != image else None, channels))
    return scans


def case_id(root: Path | None, image: Path) -> str:
    """The name of a case: the path of its scan below a folder, without its suffix.

    The name of a scan outside of the folder is its file name with a hash of its own folder, and of its suffix where
    this is not ``.nii.gz``. A file or folder name of more than 200 bytes is cut, and a hash of all of it follows: the
    names of a case's files are longer, and a file system takes 255.

    Args:
        root: the folder of the cohort. None if there is none.
        image: the path of the scan.
    """
    # Links are not followed: the target of a data manager's link has an arbitrary name.
    path, folder = Path(os.path.abspath(image)), None if root is None else Path(os.path.abspath(root))
    if folder is None or folder not in path.parents:
        # Its outputs lie in the output folder all the same. The hash keeps equal file names apart.
        suffix = path.name[len(scan_stem(path)) :]
        source = path.parent if suffix.lower() == _SUFFIXES[0] else path.parent / suffix
        return _short(f"{scan_stem(path)}-{name_hash(str(source))}")
    parts = (*path.relative_to(folder).parent.parts, scan_stem(path))
    return "/".join(map(_short, parts))


def _short(name: str) -> str:
    """A file name that leaves room for the endings of a case's files."""
    if len(os.fsencode(name)) <= _LONGEST_NAME:
        return name
    cut = name
    while len(os.fsencode(cut)) > _LONGEST_NAME - 9:
        cut = cut[:-1]
    return f"{cut}-{name_hash(name)}"


def name_hash(name: str) -> str:
    """Eight hexadecimal digits that tell names apart, also those that are not UTF-8."""
    return sha256(os.fsencode(name)).hexdigest()[:8]


class CohortDataset(ItemDataset):
    """A dataset whose errors name the case.

    Args:
        data: the cases, as returned by :func:`find_cases`.
        transform: the preprocessing.

    Raises:
        CaseError: on reading a case that cannot be loaded.
    """

    def __init__(self, data: Sequence[dict[str, Any]], transform: Callable[[Any], Any] | None = None) -> None:
        if isinstance(data, (str, os.PathLike)) or not isinstance(data, Sequence):
            raise ValueError(f"`data` must be a list of cases such as find_cases(folder), got {data!r}")
        if data and not isinstance(data[0], Mapping):
            raise ValueError(f"`data` must be a list of dictionaries such as find_cases(folder), got {data[0]!r} in it")
        if not isinstance(transform, (list, tuple)):
            words = "the preprocessing, such as Compose([LoadImaged(...), ...]), or a list of transforms"
            instance("transform", transform, (), words, function=True, none=True)
        super().__init__(data, transform)

    def make_item(self, index: int) -> Any:
        case = self.data[index]
        try:
            return super().make_item(index)
        except Exception as error:
            name = str(case.get("case", index))
            image = case.get("image")
            if isinstance(image, str | Path) and not os.path.exists(image):
                raise CaseError(name, _missing(image)) from error
            raise as_case_error(
                error,
                name,
                before=f"{image} could not be loaded: ",
                after=". Check that the file is a complete NIfTI scan (a truncated one must be copied again), or "
                "remove it",
            ) from error
