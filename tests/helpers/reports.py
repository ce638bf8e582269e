"""Output folders as a run leaves them, and what a report's pages hold."""

import base64
import gzip
import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from monai_saliency.storage.tables import REGION_COLUMNS, CaseTable, Failures
from monai_saliency.visualize.legend import Legend
from monai_saliency.visualize.report import KeptScan
from monai_saliency.visualize.report.kept_scan import case_id

EMPTY = {"input", "img", "br", "meta", "link"}


class Page(HTMLParser):
    """A page, read: its elements ``(tag, attributes)``, its text, and its data.

    It fails where elements do not close in order, or one has a script of its own.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: Any = None
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.data = json.loads(data)
        else:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a tag."""
        return [attributes for name, attributes in self.elements if name == tag]


def volume_of(text: str) -> nib.Nifti1Image:
    """A volume that is embedded in a page."""
    return nib.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(text)))


def row(case: str, label: str = "1", **values: Any) -> dict[str, Any]:
    """A row of the summary."""
    known = {"prediction": 1, "probability": 0.9, "class": label, "score": 0.9, "unit": "probability"}
    known |= {"quantity": "softmax probability", "peak_saliency": 0.5, "lowest_saliency": -0.25, "forwards": 101}
    return {"case": case, **known, "predictions": 101, "seconds": 2.5} | values


def head(shape: Sequence[int], low: float, high: float) -> np.ndarray:
    """A scan with a ball in its middle that is brighter than the air around it."""
    places = np.meshgrid(*[np.linspace(-1, 1, n) for n in shape], indexing="ij")
    distance = np.sqrt(sum(place**2 for place in places))
    inside = 0.6 + 0.3 * np.sin(9 * places[0]) * np.cos(7 * places[-1])
    return np.where(distance < 0.7, low + (high - low) * inside, low).astype(np.float32)


def blobs(shape: Sequence[int], *places: tuple[Sequence[float], float]) -> np.ndarray:
    """A map with smooth peaks: each has a place, as shares of the axes, and a height."""
    grid = np.meshgrid(*[np.arange(n) / n for n in shape], indexing="ij")
    found = np.zeros(shape)
    for place, height in places:
        found += height * np.exp(-sum((g - p) ** 2 for g, p in zip(grid, place, strict=True)) / 0.006)
    return found.astype(np.float32)


def write_case(
    folder: Path,
    case: str,
    scan: np.ndarray,
    maps: np.ndarray,
    affine: np.ndarray,
    *,
    errors: np.ndarray | None = None,
    label: np.ndarray | None = None,
    scale: float = 1.0,
    rows_down: bool = False,
    mark: str | None = None,
    names: dict[str, str] | None = None,
    words: str = "change of the score (softmax probability)",
    **values: Any,
) -> None:
    """Write what a run writes of a case with maps ``(K, *spatial)``; ``mark`` tells which scan it is of,
    ``names`` are of classes, ``words`` of the legend.
    """
    if mark is not None:
        values["scan"] = mark
    for name, volumes in (("saliency", maps), ("standard_error", errors)):
        if volumes is not None:
            path = folder / f"{case}_{name}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(volumes[0] if len(volumes) == 1 else np.moveaxis(volumes, 0, -1), affine), path)
    legends = [Legend(scale, scale, words, noise=float(values.get("noise") or 0))] * len(maps)
    layers = len(maps) * (1 if errors is None else 2)
    kept = KeptScan.of(case, scan, maps, affine, legends, label, layers=layers, rows_down=rows_down, class_names=names)
    kept.save(folder)
    rows = [row(case, str(i), peak_saliency=float(each.max()), **values) for i, each in enumerate(maps)]
    CaseTable(folder / "summary.csv").add(rows)


def write_failure(folder: Path, case: str, error: str) -> None:
    """Write the row of a failed case."""
    CaseTable(folder / "failures.csv", columns=Failures.COLUMNS).add([{"case": case, "stage": "load", "error": error}])


def write_regions(folder: Path, case: str, values: dict[str, float], *numbers: dict[str, Any]) -> None:
    """Write a case's rows of regions, by name, and further rows of numbers."""
    rows: list[dict[str, Any]] = [
        {"case": case, "class": 0, "region": i, "name": name, "saliency": value, "volume_ml": 10.0 * i}
        for i, (name, value) in enumerate(values.items(), start=1)
    ]
    rows += [{"case": case, "class": 0, "kind": "number", **each} for each in numbers]
    CaseTable(folder / "regions.csv", columns=REGION_COLUMNS).add(rows)


def page_of(folder: Path, case: str) -> Path:
    """The page of a case in the report of a folder."""
    return folder / "report" / "cases" / f"{case_id(case)}.html"
