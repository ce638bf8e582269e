"""Lists of a cohort's scans: MONAI's datalist, as the Medical Segmentation Decathlon has it, and tables."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monai_saliency.errors import AdviceError
from monai_saliency.storage.files import format_of

__all__ = ["LISTS", "Listed", "read_list"]

LISTS = (".csv", ".json")
SECTIONS = ("test", "training", "validation")
_SHORT = {"train": "training", "val": "validation", "valid": "validation", "testing": "test"}


@dataclass(frozen=True)
class Listed:
    """One entry of a list."""

    images: tuple[Path, ...]
    label: Path | None = None
    channels: int = 1
    name: str = ""


def read_list(path: Path, section: str | None = None, channels: int = 1) -> list[Listed]:
    """The entries of a list. Its paths are relative to the list's folder.

    Args:
        path: a JSON file as MONAI's ``load_decathlon_datalist`` reads it, or a CSV file with a column ``image`` and, as
            needed, ``label`` and ``split``.
        section: the section of a JSON file, or the value of ``split``: ``"test"``, ``"training"``,
            ``"validation"`` (also ``"train"``, ``"val"`` and the like) or any other. Default: the first of these three
            that lists a scan, and all rows of a CSV file that has none of them.
        channels: of scans whose modalities are not listed.

    Raises:
        ValueError: when the file cannot be read as such a list, or when some rows of a CSV file have none of these
            three, which may be misspelt, and no section is chosen.
    """
    return (_of_table if path.suffix.lower() == ".csv" else _of_json)(path, section, channels)


def _of_json(path: Path, section: str | None, channels: int) -> list[Listed]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        other = ", or remove it to use every scan of its folder" if path.name == "dataset.json" else ""
        raise AdviceError(f"{path} is not valid JSON ({error}): mend it{other}") from error
    entries = _of_section(path, content, section) if isinstance(content, dict) else None
    if isinstance(entries, list):
        entries = [entry if isinstance(entry, dict) else {"image": entry} for entry in entries]
    if not isinstance(entries, list) or not all(map(_images, entries)):
        raise ValueError(
            f"{path} is not the listing of a Medical Segmentation Decathlon folder, whose sections {SECTIONS} list "
            "paths or dictionaries with an `image`: mend it, or remove it to use every scan of its folder"
        )
    modalities = len(content.get("modality") or content.get("channel_names") or ())
    found = []
    for entry in entries:
        images = _images(entry)
        count = modalities or (len(images) if len(images) > 1 else channels)
        label = entry.get("label")
        label = label[0] if isinstance(label, list) and len(label) == 1 else label
        # The Decathlon lists test scans without their labels, which may exist all the same.
        beside = None if label else _below(path, images[0].replace("images", "labels", 1))
        places = tuple(_below(path, image) for image in images)
        found.append(Listed(places, _label(path, label) if label else _existing(beside, places), count))
    return found


def _images(entry: Mapping[str, Any]) -> list[str]:
    """The files of an entry; none where it has none."""
    image = entry.get("image")
    images = image if isinstance(image, list) else [image]
    return [str(each) for each in images] if all(isinstance(each, str) and each for each in images) else []


def _of_section(path: Path, lists: Mapping[str, Any], section: str | None) -> Any:
    """The entries of a section, under whatever names for it the list has; of a CSV file with other splits all rows."""
    entries: dict[str, list[Any]] = {}
    for name, each in lists.items():
        if isinstance(each, list):
            entries.setdefault(_long(name), []).extend(each)
        elif _long(name) in SECTIONS:
            return None
    if section:
        return entries.get(_long(section), [])
    chosen = next((name for name in SECTIONS if entries.get(name)), None)
    other = {name: len(each) for name, each in entries.items() if each and name not in SECTIONS}
    if chosen is not None and other and path.suffix.lower() == ".csv":
        kinds = ", ".join(f"{count} {name!r}" for name, count in other.items())
        raise AdviceError(
            f"{path} has rows whose `split` is none of {SECTIONS} ({kinds}), in addition to {chosen!r}: correct "
            "them, or choose one with --section"
        )
    if chosen is None:
        return [entry for name in other for entry in entries[name]] if path.suffix.lower() == ".csv" else []
    return entries[chosen]


def _long(name: str) -> str:
    """The name of a section for one of its spellings."""
    name = name.strip().lower()
    return _SHORT.get(name, name)


def _of_table(path: Path, section: str | None, channels: int) -> list[Listed]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except ValueError as error:
        raise AdviceError(f"{path} is not a table in UTF-8 ({error}): save it as CSV UTF-8") from error
    header = text.partition("\n")[0]
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count)))
    names = [name.strip().lower() for name in rows[0]] if rows else []
    if "image" not in names:
        raise AdviceError(f"{path} must have a column `image`, and may have `label` and `split`, got {names}")
    lists: dict[str, list[Listed]] = {}
    for number, row in enumerate(rows[1:], 2):
        cells = dict(zip(names, map(str.strip, row), strict=False))
        if not any(cells.values()):
            continue
        if not cells.get("image"):
            raise AdviceError(f"line {number} of {path} has no `image`: fill it in, or remove the line")
        entry = Listed((_below(path, cells["image"]),), _label(path, cells.get("label")), channels)
        lists.setdefault(cells.get("split", ""), []).append(entry)
    found: list[Listed] = _of_section(path, lists, section)
    return found


def _below(path: Path, name: str) -> Path:
    return path.parent / Path(name).expanduser()


def _label(path: Path, label: Any) -> Path | None:
    """A listed label map. A class in its place, such as ``1`` or ``"nodule"``, names no file."""
    if not isinstance(label, str) or not label:
        return None
    place = _below(path, label)
    if place.is_file():
        return place
    if format_of(place) is not None:
        warnings.warn(f"the label map {place} of the list {path} does not exist, so it is left out", stacklevel=2)
    return None


def _existing(label: Path | None, images: tuple[Path, ...]) -> Path | None:
    return label if label is not None and label not in images and label.is_file() else None
