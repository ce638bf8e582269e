"""A cohort of scans: which there are, and a dataset that says which one is broken."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from monai.data import Dataset

from monai_saliency.errors import as_case_error

__all__ = ["CohortDataset", "case_id", "find_cases", "scan_stem"]

SECTIONS = ("test", "training", "validation")
_SUFFIXES = (".nii.gz", ".nii")


def scan_stem(path: str | Path) -> str:
    """A scan's file name without ``.nii.gz`` or ``.nii``."""
    name = Path(path).name
    return next((name[: -len(suffix)] for suffix in _SUFFIXES if name.lower().endswith(suffix)), Path(path).stem)


def find_cases(
    dataset_dir: str | Path, section: str | None = None, exclude: str | Path | None = None
) -> list[dict[str, Any]]:
    """The scans below a folder.

    Args:
        dataset_dir: a Medical Segmentation Decathlon folder (``dataset.json`` with ``imagesTs``, ``labelsTs``, ...),
            or any folder with ``*.nii.gz`` or ``*.nii`` files in it or below it.
        section: of ``dataset.json``: ``"test"``, ``"training"`` or ``"validation"``; by default the first of
            these that lists a scan.
        exclude: a folder whose files are not scans of the cohort, such as an output folder below ``dataset_dir``.

    Returns:
        one dictionary a case, sorted by ``case``:

        - ``case``: the scan's path below ``dataset_dir`` without its suffix, which no other case has;
        - ``image``: the scan's path;
        - ``label``: its label map's path, or ``""``;
        - ``channels``: how many modalities the scan stacks along its fourth axis, 1 for a 3D scan.

    Raises:
        FileNotFoundError: when the folder, or a scan that ``dataset.json`` lists, does not exist.
        ValueError: when the folder holds no scan, or ``dataset.json`` cannot be read.
    """
    root = Path(dataset_dir)
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
        found = [
            (path, None, 1)
            for path in sorted(root.rglob("*"))
            if path.is_file()
            and path.name.lower().endswith(_SUFFIXES)
            and not path.name.startswith(".")
            and (skipped is None or skipped not in path.resolve().parents)
        ]
    if not found:
        where = f"section {section!r} of {listing}" if section and listing.is_file() else root
        raise ValueError(
            f"no scan found in {where}: it must hold *.nii.gz or *.nii files, or a dataset.json that lists some"
        )
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


def _decathlon_scans(listing: Path, section: str | None) -> list[tuple[Path, Path | None, int]]:
    try:
        content = json.loads(listing.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
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
        if not image.is_file():
            raise FileNotFoundError(f"case {scan_stem(image)}: {listing} lists {image}, which does not exist")
        # The Decathlon lists test scans by their path alone; their labels, where present, stand beside them.
        label = listing.parent / (entry.get("label") or entry["image"].replace("images", "labels", 1))
        scans.append((image, label if label.is_file() and label != image else None, channels))
    return scans


def case_id(root: Path | None, image: Path) -> str:
    """A scan's path below a folder without its suffix, or a name of its own where it lies elsewhere."""
    # Links are not followed: data managers link scans to files with names of their own.
    path, folder = Path(os.path.abspath(image)), None if root is None else Path(os.path.abspath(root))
    if folder is None or folder not in path.parents:
        # A listed scan may lie elsewhere; its outputs must not, and its folder's hash keeps equal names apart.
        return f"{scan_stem(path)}-{sha256(str(path.parent).encode()).hexdigest()[:8]}"
    return (path.relative_to(folder).parent / scan_stem(path)).as_posix()


class CohortDataset(Dataset):
    """A dataset whose errors name the case.

    Args:
        data: cases, as :func:`find_cases` gives them.
        transform: the preprocessing.
    """

    def __init__(self, data: Sequence[dict[str, Any]], transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__(data, transform)

    def _transform(self, index: int) -> Any:
        case = self.data[index]
        try:
            return super()._transform(index)
        except Exception as error:
            raise as_case_error(
                error,
                str(case.get("case", index)),
                before=f"{case.get('image')} could not be loaded: ",
                after=". Check that the file is a complete NIfTI scan (a truncated one must be copied again), or "
                "remove it",
            ) from error
