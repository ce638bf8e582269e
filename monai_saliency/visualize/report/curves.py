"""The insertion and deletion curves of a map, for its case's page."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monai_saliency.utils.arguments import require
from monai_saliency.visualize.pictures import save_picture
from monai_saliency.visualize.report.cases import Row, class_words, number

__all__ = ["curve_charts"]

#: of a curve: its heading, and what its horizontal axis counts
_KINDS = {
    "insertion": ("Insertion (higher is better)", "voxels shown, the map's highest first (%)"),
    "deletion": ("Deletion (lower is better)", "voxels hidden, the map's highest first (%)"),
}
#: what a line is of: its words, its colour and its dashes; the map's own is drawn last, over the others
_LINES = {
    "random": ("random map", "#8c939b", ":"),
    "intensity": ("intensity", "#2171b5", "--"),
    "edges": ("edges", "#6a51a3", "-."),
    "blurred": ("map, blurred", "#238b45", "--"),
    "": ("this map", "#e31a1c", "-"),
}


def curve_charts(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The curves of a case's maps: the words of each map, and its drawings as addresses of data."""
    found = []
    for row in rows:
        try:
            curves = json.loads(row.get("trust_curves") or "{}")
            drawings = [_drawing(kind, curves[kind], row) for kind in _KINDS if curves.get(kind)]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):  # anybody may have written the cell
            continue
        if drawings:
            found.append((class_words(row), drawings))
    return found


def _drawing(kind: str, lines: Mapping[str, Any], row: Row) -> str:
    """The curves of one kind, as the address of an SVG."""
    heading, across = _KINDS[kind]
    figure = require("matplotlib.figure", extra="bundle").Figure(figsize=(5.6, 2.6), layout="constrained")
    ax = figure.subplots()
    for name, (words, colour, dashes) in _LINES.items():
        if name in lines:
            shares, scores = np.asarray(lines[name], np.float64)
            area = number(row.get(f"trust_{kind}_{name}".rstrip("_"), ""))
            width = 1.2 if name else 2.4
            ax.plot(100 * shares, scores, dashes, color=colour, linewidth=width, label=f"{words}  {area}")
    ax.set_title(heading, fontsize=9, loc="left")
    ax.set_xlabel(across, fontsize=8)
    ax.set_ylabel(row.get("quantity") or "score", fontsize=8, parse_math=False)
    ax.tick_params(labelsize=8)
    figure.legend(loc="outside right upper", title="area under the curve", fontsize=8, title_fontsize=8)
    file = io.BytesIO()
    save_picture(figure, file, "svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
