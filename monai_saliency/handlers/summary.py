"""The summary of a cohort: a row for each map of a case, and figures over all rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from monai_saliency.inferers.explanation import Explanation
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.storage.files import load_label
from monai_saliency.storage.tables import SUMMARY_COLUMNS as COLUMNS
from monai_saliency.storage.tables import CaseTable as Summary
from monai_saliency.targets.base import label_name

__all__ = ["COLUMNS", "TIMES_NOISE", "Summary", "figures", "is_noise", "summarize", "warn_of_noise"]

# A peak of so many times its noise is not chance, even among a thousand voxels.
TIMES_NOISE = 5

logger = logging.getLogger(__name__)


def summarize(
    case: str,
    explanation: Explanation,
    maps: np.ndarray,
    affine: np.ndarray,
    label: str | Path | None = None,
    seconds: float = float("nan"),
    settings: str = "",
    scan: str = "",
) -> list[dict[str, Any]]:
    """Rows of the summary for one case, one for each explained value.

    Args:
        case: the name of the case.
        explanation: the result of the inferer.
        maps: saliency maps ``(K, *spatial)``, or ``(K * C, *spatial)`` with a map for each channel, on the scan's grid.
        affine: the affine ``(4, 4)`` of the scan, from voxels to scanner mm.
        label: the file of the label map, on any grid. None if the case has no label map.
        seconds: how long explaining took.
        settings: the mark of the settings that made the maps, see :class:`monai_saliency.handlers.made_by.MadeBy`.
        scan: the mark of the scan, see :func:`monai_saliency.handlers.made_by.scan_mark`.

    Returns:
        dictionaries with the keys of :data:`COLUMNS`. Positions are in scanner mm. ``noise`` is ``""`` where it is not
        known, and ``peak_in_label`` without a label, or with one that is empty or cannot be read.
    """
    rows = []
    quantity, noise = explanation.target.quantity(), _noise(explanation)
    for (label_index, channel, score), saliency, chance in zip(explanation.explained, maps, noise, strict=True):
        peak = peak_voxel(saliency)
        # The voxels of a 2D scan have z = 0 in its affine.
        mm = (affine @ [*peak, *[0] * (3 - len(peak)), 1])[:3]
        rows.append(
            {
                "case": case,
                "prediction": "",
                "probability": "",
                "class": label_index,
                "channel": "" if channel is None else channel,
                "score": score,
                "quantity": quantity.words,
                "unit": quantity.unit,
                **dict(zip(("peak_x_mm", "peak_y_mm", "peak_z_mm"), mm.round(2).tolist(), strict=True)),
                "peak_saliency": float(saliency[peak]),
                "lowest_saliency": float(np.nanmin(saliency)),
                "noise": chance,
                "peak_in_label": _in_label(case, mm, label) if isinstance(label, (str, Path)) and str(label) else "",
                "forwards": explanation.num_forwards,
                "predictions": round(explanation.num_forwards / explanation.per_prediction, 3),
                "stopped": explanation.stopped,
                "seconds": round(seconds, 3),
                "settings": settings,
                "scan": scan,
            }
            | explanation.target.describe()
        )
    return rows


def _noise(explanation: Explanation) -> list[float | str]:
    maps, noise = len(explanation.explained), explanation.noise
    return [""] * maps if noise is None else noise.repeat_interleave(maps // len(noise)).tolist()


def is_noise(row: dict[str, Any], names: Sequence[str] = ("peak_saliency", "lowest_saliency")) -> bool:
    """Whether all values of a row's map are within five times its noise of 0, as chance alone can put them."""
    values = [row[name] for name in names if row.get(name, "") != ""]
    return row.get("noise", "") != "" and all(abs(float(each)) <= TIMES_NOISE * float(row["noise"]) for each in values)


def warn_of_noise(case: str, rows: Sequence[dict[str, Any]]) -> None:
    """Name a case's maps whose peak may be chance in the log."""
    if noisy := [label_name(row["class"]) for row in rows if is_noise(row, ["peak_saliency"])]:
        logger.warning(
            "case %s: the peak of the map of %s may be chance, within %d times its noise of 0: nothing that was hidden "
            "supports the score, or more masks are needed",
            case,
            ", ".join(dict.fromkeys(noisy)),
            TIMES_NOISE,
        )


def _in_label(case: str, mm: np.ndarray, path: str | Path) -> bool | str:
    """Whether a place lies in a label. A label that cannot be read must not cost a finished map its row."""
    try:
        values, affine = load_label(path)
        voxel = np.rint(nib.affines.apply_affine(np.linalg.inv(affine), mm)).astype(int)
    except Exception as error:
        logger.warning("case %s: its label %s cannot be read, so `peak_in_label` is empty: %s", case, path, error)
        return ""
    inside = (values != 0) & (values == values)  # a label that was resampled may be NaN outside of what was scanned
    # A 2D label is one plane. Some files have more axes of length one.
    inside = inside.reshape(*inside.shape, *[1] * (3 - inside.ndim)).any(axis=tuple(range(3, inside.ndim)))
    if not inside.any():
        return ""
    return bool(all(0 <= v < n for v, n in zip(voxel, inside.shape, strict=True)) and inside[tuple(voxel)])


def figures(rows: Sequence[dict[str, Any]], failures: int = 0) -> dict[str, float]:
    """The figures of a cohort, of rows made by :func:`summarize` or read from the file.

    Returns:
        ``cases``, ``failures``; the sums ``forwards`` and ``seconds``; the means ``mean_score``,
        ``mean_peak_saliency`` and, of rows with a label, ``peak_in_label`` in [0, 1]; and ``maps_of_noise``. Means
        without any row are left out, and so is ``maps_of_noise`` without any such map.
    """
    # All rows of a case have the same forwards and seconds.
    by_case = {row["case"]: row for row in rows}
    found: dict[str, float] = {"cases": len(by_case), "failures": failures}
    for name in ("forwards", "seconds"):
        found[name] = float(np.nansum([float(row[name]) for row in by_case.values()]))
    means: dict[str, list[float]] = {
        "mean_score": [float(row["score"]) for row in rows],
        "mean_peak_saliency": [float(row["peak_saliency"]) for row in rows],
        "peak_in_label": [str(row["peak_in_label"]) == "True" for row in rows if str(row["peak_in_label"])],
    }
    found |= {name: float(np.mean(values)) for name, values in means.items() if values}
    noise = sum(map(is_noise, rows))
    return found | ({"maps_of_noise": noise} if noise else {})
