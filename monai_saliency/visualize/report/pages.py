"""The pages of a report: the first one, of a cohort or of several runs, and one for each case."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from monai_saliency.visualize.report.cases import CaseFiles, Cohort, Row, class_words, number
from monai_saliency.visualize.report.comparison import Compared, ComparedCase, Runs
from monai_saliency.visualize.report.curves import curve_charts

__all__ = ["case_page", "cohort_page", "compared_lines", "compared_page", "rendered"]

_YES = {"True": "yes", "False": "no"}
_SIDES = {"True": " inside", "False": " outside"}


class _Column(NamedTuple):
    """A column of the cohort's table: of ``summary.csv``, its heading, what it is, and how many digits are shown."""

    name: str
    heading: str
    words: str
    digits: int = 3


_COLUMNS = (
    _Column("prediction", "Prediction", "what the network predicts"),
    _Column("probability", "Probability", "of the prediction"),
    _Column("explained", "Explained", "the class or output channel that the map is of"),
    _Column("score", "Score", "of the unperturbed image; the case's page says what it is"),
    _Column("peak_saliency", "Peak", "the map's highest value, in the score's unit"),
    _Column("lowest_saliency", "Lowest", "the map's lowest value, in the score's unit"),
    _Column("place", "Peak at (mm)", "right, anterior, superior are positive; of a photograph its pixel"),
    _Column("peak_in_label", "Peak in label", "whether the peak lies in the label map"),
    _Column("forwards", "Forwards", "images that the network saw for this case", 6),
    _Column("predictions", "Predictions", "the same work in predictions of the whole image", 4),
    _Column("seconds", "Seconds", "that explaining the case took"),
    _Column("trust_repeatability", "Repeats", "rank correlation with the map of another seed"),
    _Column("trust_fill_agreement", "Other fill", "rank correlation with the map of another fill"),
    _Column("trust_randomised", "Random weights", "rank correlation with the map of the network at random weights"),
    _Column("trust_peak_to_error", "Peak / error", "the peak over its standard error"),
    _Column(
        "trust_pointing", "Strictly inside", "1 where the peak lies strictly inside the label, 0 where it does not"
    ),
    _Column("trust_mass", "Mass in label", "share of the map's positive mass in the label"),
    _Column("trust_leakage", "Leakage", "share of the highest voxels outside the label"),
    _Column("trust_auprc", "AUPRC", "area under precision and recall of the label"),
    _Column("trust_insertion", "Insertion", "area under the insertion curve, in the score's unit; higher is better"),
    _Column("trust_deletion", "Deletion", "area under the deletion curve, in the score's unit; lower is better"),
)
#: of an agreement: its attribute, its heading, and what it is
_FIGURES = (
    ("pearson", "Pearson", "correlation of the values of all voxels; 1 where one map is the other one scaled"),
    ("spearman", "Spearman", "correlation of the ranks of all voxels"),
    ("overlap", "Top 5 % shared", "share of the first run's highest voxels that are among the other's highest"),
    ("peak_distance", "Peaks apart (mm)", "distance of the peaks in the scanner"),
    ("difference", "Largest difference", "of a voxel, in the score's unit"),
)


class _Cell(NamedTuple):
    text: str
    attributes: Mapping[str, Any] = {}


class Line(NamedTuple):
    """A row of the first page: cells, and a problem in the place of further ones."""

    case: str
    kinds: str
    words: str | None = None
    address: str = ""
    pictures: Sequence[str] = ()
    cells: Sequence[_Cell] = ()
    problem: str = ""
    stage: str = ""


@functools.cache
def _environment() -> Any:
    import jinja2  # which `import monai_saliency` need not wait for

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    found = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"number": number, "class_words": class_words}
    return found


def rendered(template: str, **words: Any) -> str:
    """A page by a template of ``templates/``, which escapes all that it is given."""
    # Bytes of a file name that are not UTF-8 have no character.
    return _environment().get_template(template).render(words).encode(errors="replace").decode()


# The first page. ------------------------------------------------------------------------------------------------------


def cohort_page(cohort: Cohort, title: str, thumbnails: Mapping[str, Sequence[str]]) -> str:
    """The page of a cohort; ``thumbnails`` are the addresses of the pictures of each case's maps, by its name."""
    rows = [row for case in cohort.cases for row in case.rows]
    shown = [column for column in _COLUMNS if any(_text(row, column.name) for row in rows)]
    if all(row.get("forwards") == number(row.get("predictions", ""), 9) for row in rows):  # nothing is cut in patches
        shown = [column for column in shown if column.name != "predictions"]
    lines: list[Line] = []
    for case in cohort.cases:
        lines += _map_lines(case, shown, thumbnails.get(case.case, ()))
        if case.failure is not None:
            stage, error = (case.failure.get(name) or "unknown" for name in ("stage", "error"))
            lines.append(Line(case.case, "failed", problem=error, stage=stage))
    failed = sum(case.failure is not None for case in cohort.cases)
    kinds = [("", "all cases"), ("explained", "explained"), ("failed", f"failed ({failed})")]
    kinds += [("outside", "peak outside the label"), ("inside", "peak in the label"), ("chance", "may be chance")]
    note = (
        "Warm colours support the score, cold colours speak against it; one scale for the whole cohort "
        f"({_scale_words(cohort.scales)}). Colours grow with the square root of the value. What lies below a hundredth "
        "of the scale, or within two standard errors of zero, is not coloured."
    )
    return _index(
        title=title,
        figures=_figures(cohort, failed),
        kinds=kinds,
        heads=[("case", "Case", ""), *((each.name, each.heading, each.words) for each in shown)],
        lines=lines,
        note=note,
        picture_heading="Map",
    )


def compared_page(runs: Runs, lines: Sequence[Line], title: str) -> str:
    """The page of several runs, with the lines of all cases."""
    first, *others = runs.names
    second = others[0] if len(others) == 1 else "other run"
    heads = [("case", "Case", ""), ("map", "Map", "the class or output channel that the maps are of")]
    heads += [("run", "Other run", f"the run that is compared with {first}")] * (len(others) > 1)
    for name, words, hint in (
        ("score", "Score", "of the unperturbed image"),
        ("peak", "Peak", "the map's highest value, in the score's unit"),
    ):
        heads += [(f"{name}_{i}", f"{words}: {run}", hint) for i, run in enumerate((first, second))]
    compared = sum(line.kinds == "compared" for line in lines)
    figures = [f"{name}: {len(cohort.cases)} cases" for name, cohort in zip(runs.names, runs.cohorts, strict=True)]
    note = (
        f"Runs are compared with {first}. Correlations and overlap are of all voxels of the scan; the highest are "
        f"5 % of them, as far as they are positive. One scale for all runs and their differences "
        f"({_scale_words(runs.scales)})."
    )
    return _index(
        title=title,
        compared=True,
        figures=[*figures, f"{compared} pairs of maps compared", f"{len(lines) - compared} not"],
        kinds=[("", "all rows"), ("compared", "compared"), ("refused", "not compared")],
        heads=[*heads, *_FIGURES],
        lines=lines,
        note=note,
        picture_heading=f"{first} · {second} · difference",
    )


def compared_lines(case: ComparedCase, has_run: bool) -> list[Line]:
    """A row for each map that a run shares with the first, or that it does not; ``has_run``: the other run is named."""
    return [_pair_line(case, line, has_run) for line in case.lines]


def _index(lines: Sequence[Line], **words: Any) -> str:
    classes = sorted({line.words for line in lines if line.words})
    return rendered("index.html", assets="assets", scripts=["cohort.js"], lines=lines, classes=classes, **words)


def _scale_words(scales: Mapping[str, float]) -> str:
    return "; ".join(f"{words}: up to {scale:g}" for words, scale in scales.items())


def _figures(cohort: Cohort, failed: int) -> list[str]:
    explained = [case for case in cohort.cases if case.rows]
    words = [f"{len(explained)} case{'s' * (len(explained) != 1)} explained", f"{failed} failed"]
    inside = [row["peak_in_label"] == "True" for case in explained for row in case.rows if row.get("peak_in_label")]
    if inside:
        words.append(f"{sum(inside)} of {len(inside)} peaks in the label")
    seconds = [float(case.rows[0]["seconds"]) for case in explained if case.rows[0].get("seconds")]
    if np.isfinite(seconds).any():
        words.append(f"{np.nansum(seconds):,.0f} s of explaining")
    return words


def _map_lines(case: CaseFiles, columns: Sequence[_Column], thumbnails: Sequence[str]) -> list[Line]:
    lines = []
    for place, row in enumerate(case.rows):
        address = f"cases/{case.id}.html" + (f"#map={place}" if place else "")
        kinds = "explained" + _SIDES.get(row.get("peak_in_label", ""), "") + " chance" * _may_be_chance(row)
        cells = [_summary_cell(_text(row, column.name), column) for column in columns]
        lines.append(Line(case.case, kinds, class_words(row), address, thumbnails[place : place + 1], cells))
    return lines


def _summary_cell(text: str, column: _Column) -> _Cell:
    if column.name in ("explained", "prediction"):
        return _Cell(text)
    if column.name == "place":
        return _Cell(text, {"class": "number"})
    if text in _YES:
        return _Cell(_YES[text], {"data-value": int(text == "True")})
    return _number_cell(text, digits=column.digits)


def _number_cell(value: Any, hint: str = "", digits: int = 3) -> _Cell:
    """A number in a few digits, sorted by all of them; ``hint`` is why there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return _Cell("-", {"class": "number", "title": hint or "a map is flat, so there is nothing to compare"})
    whole = str(value) or None
    return _Cell(number(value, digits), {"class": "number", "data-value": whole, "title": whole})


def _text(row: Row, name: str) -> str:
    if name == "explained":
        return class_words(row)
    if name == "place":
        places = [row.get(f"peak_{axis}_mm", "") for axis in "xyz"]
        return ", ".join(number(each, 4) for each in places if each)
    return row.get(name, "")


def _may_be_chance(row: Row) -> bool:
    """Whether no value is further from 0 than five times its noise, as the summary's figures count it."""
    if not row.get("noise"):
        return False
    largest = max(abs(float(row[name])) for name in ("peak_saliency", "lowest_saliency") if row.get(name))
    return largest <= 5 * float(row["noise"])


def _pair_line(case: ComparedCase, line: Compared, has_run: bool) -> Line:
    address, pictures = "", []
    if case.shown is not None and line.words:
        places = case.places(line)
        address = f"cases/{case.files.id}.html#map={places[-1] if places else 0}"
        count = len(case.shown.thumbnails)
        pictures = [f"thumbnails/{case.files.id}-{place}.png" for place in places if place < count]
    cells = [_Cell(line.words), *[_Cell(line.run)] * has_run]
    for key in ("score", "peak_saliency"):
        cells += [_number_cell(row.get(key, "") if row else "") for row in (line.first, line.second)]
    if line.agreement is None:
        return Line(case.files.case, "refused", line.words, address, pictures, cells, line.problem)
    cells += _agreement_cells(line)
    return Line(case.files.case, "compared", line.words, address, pictures, cells)


def _agreement_cells(line: Compared) -> list[_Cell]:
    return [_number_cell(getattr(line.agreement, key), line.problem) for key, *_ in _FIGURES]


# A case's page. -------------------------------------------------------------------------------------------------------


def case_page(
    case: CaseFiles,
    data: Mapping[str, Any] | None,
    problem: str = "",
    near: Sequence[CaseFiles | None] = (None, None),
    mark: str = "",
    compared: ComparedCase | None = None,
) -> str:
    """The page of a case.

    Its viewer shows ``data``, or ``problem`` where that is None. ``near`` are the cases before and after it, ``mark``
    is what it was made of, and ``compared`` is the case in several runs.
    """
    scripts = ["niivue.umd.js", "volume.js"] if data is not None and len(data["shape"]) == 3 else ["picture.js"]
    is_photograph = data is not None and bool(data["rowsDown"])
    return rendered(
        "case.html",
        title=case.case,
        assets="../assets",
        scripts=[] if data is None else [*scripts, "case.js"],
        mark=mark,
        before=near[0],
        after=near[1],
        rows=case.rows,
        data=data,
        problem=problem,
        thinned=1 if data is None else math.prod(data["stride"]),
        agreement=None if compared is None else _agreement(compared),
        known=[(class_words(row), _facts(row, is_photograph)) for row in case.rows],
        curves=curve_charts(case.rows),
        charts=_charts(case.regions),
    )


def _agreement(case: ComparedCase) -> dict[str, Any]:
    """How far a case's maps agree."""
    lines = [(line, _agreement_cells(line) if line.agreement else []) for line in case.lines]
    return {"first": case.first, "heads": _FIGURES, "lines": lines}


def _facts(row: Row, is_photograph: bool) -> list[tuple[str, str]]:
    facts = [(each.heading, number(_text(row, each.name), max(each.digits, 4))) for each in _COLUMNS]
    if is_photograph:  # it lies in no scanner
        pixel = ", ".join(number(row.get(f"peak_{axis}_mm", ""), 6) for axis in "xy")
        facts = [("Peak at pixel", pixel) if "(mm)" in name and value else (name, value) for name, value in facts]
    facts = [(name, value) for name, value in facts if value]
    facts[3:3] = [("Score is", row.get("quantity", "")), ("Unit", row.get("unit", ""))]
    facts += [("Noise", number(row.get("noise", ""))), ("Stopped", row.get("stopped", ""))]
    facts += [("Not measured", row.get("trust_problem", "")), ("Settings", row.get("settings", ""))]
    return [(name, _YES.get(value, value)) for name, value in facts]


def _charts(regions: Sequence[Row]) -> list[tuple[str, list[tuple[float, Row]], float]]:
    """A bar chart for each map of regions: its words, the values, the largest contributions first, and the largest."""
    groups: dict[str, list[tuple[float, Row]]] = {}
    for row in regions:
        value = _float(row.get("saliency", ""))
        groups.setdefault(class_words(row), []).append((value if math.isfinite(value) else 0.0, row))
    ordered = {words: sorted(rows, key=lambda each: -abs(each[0])) for words, rows in groups.items()}
    return [(words, rows, abs(rows[0][0]) or 1.0) for words, rows in ordered.items()]


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
