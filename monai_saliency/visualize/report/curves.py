"""The insertion and deletion curves of a map, for its case's page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monai_saliency.visualize.report.cases import Row, class_words, number

__all__ = ["curve_charts"]

#: of a curve: its heading, and what its horizontal axis counts
_KINDS = {
    "insertion": ("Insertion (higher is better)", "voxels shown, the map's highest first (%)"),
    "deletion": ("Deletion (lower is better)", "voxels hidden, the map's highest first (%)"),
}
#: what a line is of: its words, its colour and its dashes; the map's own is drawn last, over the others
_LINES = {
    "random": ("random map", "#8c939b", "2 3"),
    "intensity": ("intensity", "#2171b5", "7 3"),
    "edges": ("edges", "#6a51a3", "7 3 2 3"),
    "blurred": ("map, blurred", "#238b45", "4 3"),
    "": ("this map", "#e31a1c", ""),
}
# Where the axes of the drawing in curves.html begin and end, in pixels, and about how many steps the score's has.
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 370, 12, 208
_STEPS = 4


def curve_charts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The curves of a case's maps, for ``curves.html``; only maps of ``--trust true`` have them."""
    found = []
    for row in rows:
        figures = [_figure(kind, lines, row) for kind, lines in _read(row.get("trust_curves", "")).items()]
        if figures:
            found.append({"words": class_words(row), "figures": figures})
    return found


def _read(text: Any) -> dict[str, dict[str, np.ndarray]]:
    """The shares of voxels and scores ``(2, n)`` of each kind and line, of a cell that anybody may have written."""
    try:
        given = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    found: dict[str, dict[str, np.ndarray]] = {}
    for kind in _KINDS:
        for name in _LINES:
            try:
                line = np.asarray(given[kind][name], np.float64)
            except (KeyError, TypeError, ValueError):
                continue
            is_line = line.ndim == 2 and len(line) == 2 and line.shape[1] > 1 and np.isfinite(line).all()
            if is_line and line[0].min() >= 0 and line[0].max() <= 1:
                found.setdefault(kind, {})[name] = line
    return found


def _figure(kind: str, lines: Mapping[str, np.ndarray], row: Row) -> dict[str, Any]:
    heading, across = _KINDS[kind]
    scores = np.concatenate([score for _, score in lines.values()])
    ticks = _ticks(scores.min(), scores.max())

    def height(score: Any) -> Any:
        return np.round(_BOTTOM - (_BOTTOM - _TOP) * (score - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    drawn = []
    for order, (name, (words, colour, dashes)) in enumerate(_LINES.items()):
        if name not in lines:
            continue
        shares, values = lines[name]
        places = zip(_LEFT + (_RIGHT - _LEFT) * shares, height(values), strict=True)
        area = number(row.get(f"trust_{kind}_{name}".rstrip("_"), ""))
        drawn.append(
            {
                "words": f"{words}  {area}".rstrip(),
                "colour": colour,
                "dashes": dashes,
                "width": 1.5 if name else 3,
                "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in places),
                "y": _TOP + 26 + 22 * (len(_LINES) - 1 - order),
            }
        )
    up = row.get("quantity", "") or "score"
    marks = [(height(tick), number(tick)) for tick in ticks]
    return {"heading": heading, "across": across, "up": up, "ticks": marks, "lines": drawn}


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers at equal steps, around two others."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    power = 10.0 ** math.floor(math.log10((high - low) / _STEPS))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= (high - low) / _STEPS * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * each for each in range(first, last + 1)]
