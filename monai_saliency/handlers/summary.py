"""What a run reports: of a case its title and a row for each map, and figures over all rows of a cohort."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch

from monai_saliency.inferers.explanation import Explanation
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.storage.label_maps import load_label
from monai_saliency.targets.base import label_name
from monai_saliency.visualize.legend import is_noise, legends_of, score_words

logger = logging.getLogger(__name__)


def case_title(explanation: Explanation) -> str:
    """What is predicted and explained of a case, in two lines, and in a third one what is wrong with its fill."""
    target = explanation.target
    described = target.describe()
    words = []
    if "prediction" in described:
        words.append(f"predicted {described['prediction']}")
        if "probability" in described:
            words[-1] += f" ({_in_words('probability', described['probability'])})"
    scores, quantity = [], target.quantity()
    # Of a map that shows nothing, no place is worth a word. Where channels have maps, no place is known.
    verdicts = _verdicts(explanation, explanation.saliency.numpy(force=True), None)
    places = explanation.without_peak.tolist()
    without = [math.nan if words else left for left, words in zip(places, verdicts, strict=False)]
    for label, score, left in zip(target.labels, explanation.reference_scores.tolist(), without, strict=True):
        figures = [_in_words(quantity.unit, float(quantity.reported(each))) for each in (score, left)]
        scores.append(f"{label_name(label)} {score_words(quantity.unit, *figures)}")
    words.append(f"explained: {'; '.join(scores)}")
    lines = [explanation.name, ", ".join(words)]
    if explanation.fill_problem:
        lines.append(explanation.fill_problem)
    return "\n".join(lines)


def _in_words(unit: str, score: float) -> str:
    """A score as a text; no probability is rounded to 0 or 1."""
    if unit in ("probability", "log-odds") and not 0.0005 <= score < 0.9995:
        return "nan" if math.isnan(score) else "above 0.999" if score > 0.5 else "below 0.001"
    return f"{score:.3f}"


def summarize(
    case: str,
    explanation: Explanation,
    maps: np.ndarray,
    affine: np.ndarray,
    label: str | Path | None = None,
    image: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """Rows of the summary for one case, one for each explained value.

    Args:
        case: the name of the case.
        explanation: the result of the inferer.
        maps: ``(K, *spatial)``, or ``(K * C, *spatial)`` with a map for each channel, on the scan's grid.
        affine: ``(4, 4)``, from the scan's voxels to scanner mm.
        label: the file of the label map, on any grid; None if there is none.
        image: the explained image ``(C, *spatial)``, for the scan's shape and affine in its meta data, or None.
        errors: the standard errors of the maps, in their shape and unit; None if there are none.

    Returns:
        dictionaries with the keys of :data:`~monai_saliency.storage.tables.SUMMARY_COLUMNS`, but for those of the run:
        ``seconds``, ``settings`` and ``scan``. Positions are in scanner mm. ``score`` is a probability where the map is
        of its log-odds, and so is ``score_without_peak``, with the place of the peak hidden
        (:attr:`~monai_saliency.Explanation.without_peak`). ``quantity`` and ``unit`` are of
        the map. ``verdict`` is a sentence if nothing matters or the map may be chance. ``images`` counts the masks and
        the unperturbed image, ``""`` for a method without masks; ``forwards`` counts the work of this run.
        ``score_without_peak``, ``noise`` and ``fill_leaves`` are ``""`` where they are not known, and ``peak_in_label``
        without a label, or with one that is empty, cannot be read or lies outside of the scan.
    """
    quantity = explanation.target.quantity()
    of_map = zip(
        explanation.explained,
        maps,
        _for_each_map(explanation.noise, len(maps)),
        _for_each_map(explanation.fill_leaves, len(maps)),
        _for_each_map(quantity.reported(explanation.without_peak), len(maps)),
        _verdicts(explanation, maps, errors),
        strict=True,
    )
    rows = []
    for (label_index, channel, score), saliency, noise, left, without_peak, verdict in of_map:
        peak = peak_voxel(saliency)
        # The voxels of a 2D scan have z = 0 in its affine.
        mm = (affine @ [*peak, *[0] * (3 - len(peak)), 1])[:3]
        row = {
            "case": case,
            "prediction": "",
            "probability": "",
            "class": label_index,
            "channel": "" if channel is None else channel,
            "score": float(quantity.reported(score)),
            "score_without_peak": "" if math.isnan(without_peak) or verdict else without_peak,
            "quantity": quantity.words,
            "unit": quantity.unit,
            **dict(zip(("peak_x_mm", "peak_y_mm", "peak_z_mm"), mm.round(2).tolist(), strict=True)),
            "peak_saliency": float(saliency[peak]),
            "lowest_saliency": float(np.nanmin(saliency)),
            "noise": noise,
            "verdict": verdict,
            "peak_in_label": _in_label(case, mm, label, image, affine, saliency.shape),
            "fill_leaves": left if isinstance(left, str) else round(left, 4),
            "images": len(explanation.ids) + 1 if len(explanation.ids) else "",
            "forwards": explanation.num_forwards,
            "predictions": round(explanation.num_forwards / explanation.per_prediction, 3),
            "stopped": explanation.stopped,
        }
        rows.append(row | explanation.target.describe())
    return rows


def _for_each_map(values: torch.Tensor | None, count: int) -> list[Any]:
    """A figure ``(K,)`` of the explained scores for each of ``count`` maps, several channels of a score after another;
    empty texts where it is not known.
    """
    return [""] * count if values is None else values.repeat_interleave(count // len(values)).tolist()


def _verdicts(explanation: Explanation, maps: np.ndarray, errors: torch.Tensor | None) -> list[str]:
    """A sentence for each map that shows nothing, or that may be chance; else empty."""
    verdicts = []
    for number, (legend, saliency) in enumerate(zip(legends_of(explanation, maps), maps, strict=True)):
        error = None if errors is None else errors[number].numpy(force=True)
        verdicts.append(legend.verdict(saliency, error))
    return verdicts


def _in_label(
    case: str, mm: np.ndarray, path: Any, image: torch.Tensor | None, grid: np.ndarray, shape: Sequence[int]
) -> bool | str:
    """Whether a place lies in a label. A label that cannot be read must not cost a finished map its row."""
    if not isinstance(path, (str, Path)) or not str(path):
        return ""
    try:
        values, affine = load_label(path, image)
        voxel = np.rint(nib.affines.apply_affine(np.linalg.inv(affine), mm)).astype(int)
    except Exception as error:
        logger.warning("case %s: its label %s cannot be used, so `peak_in_label` is empty: %s", case, path, error)
        return ""
    # A label that was resampled may be NaN outside of what was scanned.
    inside = np.nan_to_num(values[0]) != 0
    if not inside.any():
        return ""
    if ((voxel >= 0) & (voxel < inside.shape)).all() and inside[tuple(voxel)]:
        return True
    places = nib.affines.apply_affine(np.linalg.inv(grid) @ affine, np.argwhere(inside))[:, : len(shape)]
    if not ((places > -1) & (places < shape)).all(axis=1).any():
        logger.warning(
            "case %s: all of its label %s lies outside of the scan, so `peak_in_label` is empty: correct the label's "
            "affine %s",
            case,
            path,
            affine.round(3).tolist(),
        )
        return ""
    return False


def figures(rows: Sequence[dict[str, Any]], failures: int = 0, nothing: int = 0) -> dict[str, float]:
    """The figures of a cohort, of the rows of its ``summary.csv``.

    Returns:
        ``cases``, ``failures``, and ``nothing_to_explain`` where there are such cases; the sums ``forwards`` and
        ``seconds``; where there are such rows, the means ``mean_score``, ``mean_peak_saliency`` (of maps in one unit)
        and ``peak_in_label`` in [0, 1], and the count ``maps_of_noise``.
    """
    # All rows of a case have the same forwards and seconds.
    cases = {row["case"]: row for row in rows}.values()
    values: dict[str, float] = {"cases": len(cases), "failures": failures}
    if nothing:
        values["nothing_to_explain"] = nothing
    for name in ("forwards", "seconds"):
        values[name] = float(np.nansum([float(row[name]) for row in cases]))
    if rows:
        values["mean_score"] = _mean(rows, "score")
    if len({row.get("unit") for row in rows}) == 1:  # probabilities and log-odds have no mean
        values["mean_peak_saliency"] = _mean(rows, "peak_saliency")
    in_label = [str(row["peak_in_label"]) for row in rows]
    known = in_label.count("True") + in_label.count("False")
    if known:
        values["peak_in_label"] = in_label.count("True") / known
    noise = sum(map(is_noise, rows))
    if noise:
        values["maps_of_noise"] = noise
    return values


def _mean(rows: Sequence[dict[str, Any]], column: str) -> float:
    return float(np.mean([float(row[column]) for row in rows]))
