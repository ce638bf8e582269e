"""The pages of a report: the first one, of a cohort or of several runs, and one for each case."""

from __future__ import annotations

import base64
import functools
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monai_saliency.inferers.explanation import FILL_LEAVES
from monai_saliency.utils.arguments import require
from monai_saliency.visualize.legend import is_noise, verdict_of
from monai_saliency.visualize.pictures import save_picture
from monai_saliency.visualize.report.cases import CaseFiles, Cohort, Row, beyond, class_words, number
from monai_saliency.visualize.report.cohort_regions import cohort_regions, region_panels
from monai_saliency.visualize.report.plots import cohort_plots
from monai_saliency.visualize.report.shown import Shown

__all__ = ["case_page", "cohort_page", "curve_charts", "rendered", "scale_words"]

#: of a curve: its heading, and what its horizontal axis counts
_KINDS = {
    "insertion": ("Insertion (higher is better)", "{}s shown, the map's highest first (%)"),
    "deletion": ("Deletion (lower is better)", "{}s hidden, the map's highest first (%)"),
}
#: what a line is of: its words, its colour and its dashes; the map's own is drawn last, over the others
_LINES = {
    "random": ("random map", "#8c939b", ":"),
    "intensity": ("intensity", "#2171b5", "--"),
    "edges": ("edges", "#6a51a3", "-."),
    "blurred": ("map, blurred", "#238b45", "--"),
    "": ("this map", "#e31a1c", "-"),
}


@functools.cache
def _environment() -> Any:
    import jinja2  # which `import monai_saliency` need not wait for

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    found = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"number": number, "class_words": class_words, "text": _text, "may_be_chance": is_noise}
    found.filters |= {"verdict": verdict_of, "beyond": beyond}
    found.filters["fill_is_none"] = lambda row: float(row.get("fill_leaves") or 0) > FILL_LEAVES
    return found


def rendered(template: str, **words: Any) -> str:
    """A page by a template of ``templates/``, which escapes all that it is given."""
    # Bytes of a file name that are not UTF-8 have no character.
    return _environment().get_template(template).render(words).encode(errors="replace").decode()


def cohort_page(cohort: Cohort, title: str, thumbnails: Mapping[str, Sequence[str]]) -> str:
    """The page of a cohort; ``thumbnails`` are the addresses of the pictures of each case's maps, by its name."""
    rows = [row for case in cohort.cases for row in case.rows]
    return rendered(
        "cohort.html",
        title=title,
        cases=cohort.cases,
        thumbnails=thumbnails,
        rows=rows,
        classes=sorted({class_words(row) for row in rows}),
        figures=_figures(cohort),
        scales=scale_words(cohort.scales),
        panels=region_panels(cohort_regions(cohort)),
        plots=cohort_plots(cohort),
        runs=_runs(rows, cohort.settings),
        has_trust=any(row.get("trust_forwards") for row in rows),
    )


def scale_words(scales: Mapping[str, float]) -> str:
    """The largest values of the colours in words."""
    return "; ".join(f"{words}: up to {scale:g}" for words, scale in scales.items())


def _figures(cohort: Cohort) -> list[str]:
    explained = [case for case in cohort.cases if case.rows]
    failed = sum(case.failure is not None for case in cohort.cases)
    words = [f"{len(explained)} case{'s' * (len(explained) != 1)} explained", f"{failed} failed"]
    inside = [row["peak_in_label"] == "True" for case in explained for row in case.rows if row.get("peak_in_label")]
    if inside:
        words.append(f"{sum(inside)} of {len(inside)} peaks in the label")
    seconds = [float(case.rows[0].get("seconds") or "nan") for case in explained]
    images = [int(case.rows[0]["images"]) for case in explained if case.rows[0].get("images")]
    forwards = [int(case.rows[0].get("forwards") or 0) for case in explained]
    words += [f"{sum(images):,} images scored"] * bool(images)
    return [*words, f"last run {sum(forwards):,} forwards, {np.nansum(seconds):,.0f} s"]


def _runs(rows: Sequence[Row], settings: Mapping[str, Mapping[str, str]]) -> list[tuple[str, Mapping[str, str], Row]]:
    """What made some rows: for each mark of settings the settings, and one of the rows."""
    first = {row.get("settings", ""): row for row in reversed(rows)}
    return [(mark, settings[mark], row) for mark, row in sorted(first.items()) if mark in settings]


def _text(row: Row, name: str) -> str:
    """A cell of a table."""
    if name == "explained":
        return class_words(row)
    if name == "place":
        if verdict_of(row):  # there is no peak
            return ""
        places = [row.get(f"peak_{axis}_mm", "") for axis in "xyz"]
        return ", ".join(number(each, 4) for each in places if each)
    text = row.get(name, "")
    return {"True": "yes", "False": "no"}.get(text, text)


def case_page(
    case: CaseFiles,
    shown: Shown | None,
    problem: str,
    near: Sequence[CaseFiles | None],
    settings: Mapping[str, Mapping[str, str]],
) -> str:
    """The page of a case: its viewer, or ``problem``. ``near`` are the cases before and after it."""
    data = None if shown is None else shown.data()
    element = "pixel" if data is not None and len(data["shape"]) == 2 else "voxel"
    scripts = ["niivue.umd.js", "volume.js"] if data is not None and len(data["shape"]) == 3 else ["picture.js"]
    return rendered(
        "case.html",
        title=case.case,
        scripts=[] if data is None else ["ratings.js", *scripts, "case.js"],
        before=near[0],
        after=near[1],
        rows=case.rows,
        data=data,
        problem=problem,
        thinned=1 if data is None else math.prod(data["stride"]),
        curves=curve_charts(case.rows, element),
        element=element,
        runs=_runs(case.rows, settings),
        has_trust=any(row.get("trust_forwards") for row in case.rows),
        map_key="saliency" if case.kept is None else case.kept.key,
        charts=_charts(case.regions),
    )


def _charts(regions: Sequence[Row]) -> list[tuple[str, list[tuple[float, Row]], float]]:
    """A bar chart for each map of regions: its words, the values, the largest contributions first, and the largest."""
    groups: dict[str, list[tuple[float, Row]]] = {}
    for row in regions:
        value = float(np.nan_to_num(float(row.get("saliency") or 0), posinf=0, neginf=0))
        groups.setdefault(class_words(row), []).append((value, row))
    ordered = {words: sorted(rows, key=lambda each: -abs(each[0])) for words, rows in groups.items()}
    return [(words, rows, abs(rows[0][0]) or 1.0) for words, rows in ordered.items()]


def curve_charts(rows: Sequence[Row], element: str = "voxel") -> list[tuple[str, list[str]]]:
    """The insertion and deletion curves of a case's maps: the words of each map, and its drawings as addresses."""
    found = []
    for row in rows:
        try:
            curves = json.loads(row.get("trust_curves") or "{}")
        except ValueError:  # a cell that was too long for the table is cut
            continue
        if drawings := [_drawing(kind, curves[kind], row, element) for kind in _KINDS if kind in curves]:
            found.append((class_words(row), drawings))
    return found


def _drawing(kind: str, lines: Mapping[str, Any], row: Row, element: str) -> str:
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
    ax.set_xlabel(across.format(element), fontsize=8)
    # Curves are of the probability where a map is of its log-odds.
    quantity = row.get("quantity", "").removeprefix("log-odds of the ")
    ax.set_ylabel(quantity or "score", fontsize=8, parse_math=False)
    ax.tick_params(labelsize=8)
    figure.legend(loc="outside right upper", title="area under the curve", fontsize=8, title_fontsize=8)
    file = io.BytesIO()
    save_picture(figure, file, "svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
