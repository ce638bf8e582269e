"""The cohort's tables: one row for each case and map, or for each of its regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from monai_saliency.inferers.case_state import Explanation
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.storage.files import load_scan
from monai_saliency.storage.tables import CaseTable

__all__ = ["COLUMNS", "REGION_COLUMNS", "Summary", "figures", "region_rows", "summarize"]

COLUMNS = (
    "case",
    "prediction",
    "probability",
    "class",
    "channel",
    "score",
    "peak_x_mm",
    "peak_y_mm",
    "peak_z_mm",
    "peak_saliency",
    "peak_in_label",
    "forwards",
    "seconds",
)


def summarize(
    case: str,
    explanation: Explanation,
    maps: np.ndarray,
    affine: np.ndarray,
    label: str | Path | None = None,
    seconds: float = float("nan"),
) -> list[dict[str, Any]]:
    """Rows of the summary for one case, one for each explained value.

    Args:
        case: the case's name.
        explanation: what the inferer gave.
        maps: ``(K, *spatial)``, or ``(K * C, *spatial)``, on the scan's own grid.
        affine: ``(4, 4)``, the scan's, voxel to scanner mm.
        label: the case's label map, where it has one, on any grid.
        seconds: what explaining took.

    Returns:
        dictionaries with the keys of :data:`COLUMNS`: the network's prediction and its probability, the class or
        channel explained, the image's channel where each has a map, the score on the unperturbed image, the map's
        highest value and where it lies (scanner mm), and whether that is inside the label (``""`` without a label, or
        where the label is empty).
    """
    rows = []
    for (label_index, channel, score), saliency in zip(explanation.explained, maps, strict=True):
        peak = peak_voxel(saliency)
        # A 2D scan lies in the plane z = 0 of its affine.
        mm = (affine @ [*peak, *[0] * (3 - len(peak)), 1])[:3]
        rows.append(
            {
                "case": case,
                "prediction": "",
                "probability": "",
                "class": label_index,
                "channel": "" if channel is None else channel,
                "score": score,
                **dict(zip(("peak_x_mm", "peak_y_mm", "peak_z_mm"), mm.round(2).tolist(), strict=True)),
                "peak_saliency": float(saliency[peak]),
                "peak_in_label": _in_label(mm, label) if label else "",
                "forwards": explanation.num_forwards,
                "seconds": round(seconds, 3),
            }
            | explanation.target.describe()
        )
    return rows


def _in_label(mm: np.ndarray, path: str | Path) -> bool | str:
    label = load_scan(path)
    inside = np.asanyarray(label.dataobj) != 0
    if not inside.any():
        return ""
    # 2D labels lie in one plane, and labels are also stored with further axes of length one.
    inside = inside.reshape(*inside.shape, *[1] * (3 - inside.ndim)).any(axis=tuple(range(3, inside.ndim)))
    voxel = np.rint(nib.affines.apply_affine(np.linalg.inv(label.affine), mm)).astype(int)
    return bool(all(0 <= v < n for v, n in zip(voxel, inside.shape, strict=True)) and inside[tuple(voxel)])


def figures(rows: Sequence[dict[str, Any]], failures: int = 0) -> dict[str, float]:
    """The cohort's figures.

    Args:
        rows: the summary's, as they were made or as they were read from the file.
        failures: how many cases ended without a map.

    Returns:
        ``cases``: how many are in the table; ``failures``; ``forwards`` and ``seconds``: the sums of those columns,
        each case once; ``mean_score`` and ``mean_peak_saliency``: over the rows; ``peak_in_label``: the share of peaks
        inside their label, in [0, 1], over the rows that say. Means of nothing are left out.
    """
    # The rows of one case repeat what explaining it took.
    by_case = {row["case"]: row for row in rows}
    found: dict[str, float] = {"cases": len(by_case), "failures": failures}
    for name in ("forwards", "seconds"):
        found[name] = float(np.nansum([float(row[name]) for row in by_case.values()]))
    means: dict[str, list[float]] = {
        "mean_score": [float(row["score"]) for row in rows],
        "mean_peak_saliency": [float(row["peak_saliency"]) for row in rows],
        "peak_in_label": [str(row["peak_in_label"]) == "True" for row in rows if str(row["peak_in_label"])],
    }
    return found | {name: float(np.mean(values)) for name, values in means.items() if values}


class Summary(CaseTable):
    """``summary.csv``, or a table with other columns.

    Args:
        path: the file.
        cases: the cohort's cases; rows of others are dropped. None keeps all.
        columns: the table's columns.
    """

    def __init__(self, path: str | Path, cases: Sequence[str] | None = None, columns: Sequence[str] = COLUMNS) -> None:
        super().__init__(path, columns, cases)


REGION_COLUMNS = ("case", "class", "channel", "region", "name", "saliency", "volume_ml")


def region_rows(
    explanation: Explanation, spacing: Sequence[float] | None = None, names: Mapping[Any, str] | None = None
) -> list[dict[str, Any]]:
    """What a map of regions says of each, as rows of a table.

    Args:
        explanation: of masks that are made of regions.
        spacing: the explained image's voxel sizes in mm, for volumes.
        names: of the regions, by label.

    Returns:
        one dictionary with the keys of :data:`REGION_COLUMNS` for each map and region: the class or channel explained;
        the image's channel where each has a map; the region's label and name; its value in the map, in the score's unit
        (where each region was hidden in turn, how far the score fell); and its volume in ml as the network saw it.

    Raises:
        ValueError: when the masks are not made of regions.
    """
    regions = explanation.masks.regions
    if regions is None:
        raise ValueError("the masks are not made of regions, so no region has a value: use RegionMasks")
    named = {int(label): name for label, name in (names or {}).items()}
    index = regions.index.flatten().cpu()
    counts = index.bincount(minlength=len(regions.values) + 1)
    # A plane has no volume.
    voxel = float(np.prod(spacing)) / 1000 if spacing is not None and len(spacing) == 3 else None
    rows = []
    for (label, channel, _), saliency in zip(explanation.explained, explanation.saliency, strict=True):
        # A map is flat inside a region; its mean there is its value.
        values = index.bincount(saliency.flatten().cpu().double(), minlength=len(counts)) / counts
        for place, region in enumerate(regions.values, start=1):
            rows.append(
                {
                    "case": explanation.name,
                    "class": label,
                    "channel": "" if channel is None else channel,
                    "region": region,
                    "name": named.get(int(region), ""),
                    "saliency": float(values[place]),
                    "volume_ml": "" if voxel is None else round(int(counts[place]) * voxel, 6),
                }
            )
    return rows
