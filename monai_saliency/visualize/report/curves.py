"""The insertion and deletion curves of a map, drawn into its case's page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from monai_saliency.visualize.report.cases import Row, class_words
from monai_saliency.visualize.report.markup import Markup, element, number

__all__ = ["curve_figures"]

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
# The drawing, in pixels: where its axes begin and end, and where the names of its lines stand.
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 370, 12, 208
_NAMES = 386
# About so many steps along the score's axis.
_STEPS = 4


def curve_figures(rows: Sequence[Row]) -> list[Markup]:
    """The curves of a case's maps; nothing for maps without them, as of runs without ``--trust true``.

    Args:
        rows: of ``summary.csv``, one for each map. ``trust_curves`` is what
            :class:`~monai_saliency.handlers.trust.Trust` has written: for each kind and each of the map and its
            controls the shares of voxels and the scores.
    """
    found = []
    for row in rows:
        curves = _read(row.get("trust_curves", ""))
        drawn = [_figure(kind, lines, row) for kind, lines in curves.items()]
        if drawn:
            heading = element("h2", f"Insertion and deletion: {class_words(row)}")
            found.append(element("article", heading, *drawn, class_="curves"))
    return found


_Line = tuple[list[float], list[float]]


def _read(text: Any) -> dict[str, dict[str, _Line]]:
    """The curves of a cell that anybody may have written: those that can be drawn."""
    try:
        given = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    found: dict[str, dict[str, _Line]] = {}
    for kind in _KINDS:
        lines = given.get(kind) if isinstance(given, dict) else None
        for name in _LINES:
            if isinstance(lines, dict) and _is_line(line := lines.get(name)):
                found.setdefault(kind, {})[name] = (line[0], line[1])
    return found


def _is_line(line: Any) -> TypeGuard[list[list[float]]]:
    if not (isinstance(line, list) and len(line) == 2 and all(isinstance(each, list) for each in line)):
        return False
    numbers = [*line[0], *line[1]]
    are_numbers = all(isinstance(each, (int, float)) and math.isfinite(each) for each in numbers)
    return are_numbers and len(line[0]) == len(line[1]) > 1 and all(0 <= each <= 1 for each in line[0])


def _figure(kind: str, lines: Mapping[str, _Line], row: Row) -> Markup:
    heading, across = _KINDS[kind]
    scores = [score for _, each in lines.values() for score in each]
    ticks = _ticks(min(scores), max(scores))
    low, high = ticks[0], ticks[-1]

    def place(share: float, score: float) -> tuple[float, float]:
        return _LEFT + (_RIGHT - _LEFT) * share, _BOTTOM - (_BOTTOM - _TOP) * (score - low) / (high - low)

    drawn = _axes(across, row.get("quantity", "") or "score", ticks)
    for order, (name, (words, colour, dashes)) in enumerate(_LINES.items()):
        if name not in lines:
            continue
        points = " ".join("{:.1f},{:.1f}".format(*place(*each)) for each in zip(*lines[name], strict=True))
        style = {"stroke": colour, "stroke-width": 3 if not name else 1.5, "stroke-dasharray": dashes or None}
        drawn.append(element("polyline", points=points, fill="none", **style))
        y = _TOP + 26 + 22 * (len(_LINES) - 1 - order)
        drawn.append(element("line", x1=_NAMES, x2=_NAMES + 26, y1=y - 4, y2=y - 4, **style))
        area = number(row.get(f"trust_{kind}_{name}".rstrip("_"), ""))
        drawn.append(_text(_NAMES + 32, y, f"{words}  {area}".rstrip()))
    drawn.append(_text(_NAMES, _TOP + 6, "area under the curve", class_="quiet"))
    size = f"0 0 {_WIDTH} {_HEIGHT}"
    return element(
        "figure",
        element("figcaption", heading),
        element("svg", *drawn, viewBox=size, role="img", aria_label=heading),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers at equal steps, around two others."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    power = 10.0 ** math.floor(math.log10((high - low) / _STEPS))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= (high - low) / _STEPS * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * each for each in range(first, last + 1)]


def _axes(across: str, up: str, ticks: Sequence[float]) -> list[Markup]:
    drawn = []
    for order, tick in enumerate(ticks):
        y = _BOTTOM - (_BOTTOM - _TOP) * order / (len(ticks) - 1)
        drawn.append(element("line", x1=_LEFT, x2=_RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        drawn.append(_text(_LEFT - 6, y + 4, number(tick), text_anchor="end"))
    for share in (0, 25, 50, 75, 100):
        drawn.append(_text(_LEFT + (_RIGHT - _LEFT) * share / 100, _BOTTOM + 18, f"{share}", text_anchor="middle"))
    middle = (_TOP + _BOTTOM) / 2
    drawn.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, across, text_anchor="middle"))
    drawn.append(_text(14, middle, up, text_anchor="middle", transform=f"rotate(-90 14 {middle})"))
    return drawn


def _text(x: float, y: float, words: str, **attributes: Any) -> Markup:
    return element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)
