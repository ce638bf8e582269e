"""The pages of a report: the first one, of a cohort or of several runs, and one for each case."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from monai_saliency.visualize.report.cases import CaseFiles, Cohort, Row, class_words, number
from monai_saliency.visualize.report.comparison import Compared, Runs
from monai_saliency.visualize.report.curves import curve_charts
from monai_saliency.visualize.report.shown import Shown

__all__ = ["case_page", "cohort_page", "compared_page"]

_YES = {"True": "yes", "False": "no"}


class _Column(NamedTuple):
    """A column of the cohort's table: of ``summary.csv``, its heading, what it is, and how many digits are shown."""

    name: str
    heading: str
    words: str
    digits: int = 3


_COLUMNS = (
    _Column("prediction", "Prediction", "what the network predicts", 0),
    _Column("probability", "Probability", "of the prediction"),
    _Column("explained", "Explained", "the class or output channel that the map is of", 0),
    _Column("score", "Score", "of the unperturbed image; the case's page says what it is"),
    _Column("peak_saliency", "Peak", "the map's highest value, in the score's unit"),
    _Column("lowest_saliency", "Lowest", "the map's lowest value, in the score's unit"),
    _Column("place", "Peak at", "in scanner mm: right, anterior, superior are positive; of a photograph its pixel", 0),
    _Column("peak_in_label", "Peak in label", "whether the peak lies in the label map", 0),
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


@functools.cache
def _environment() -> Any:
    import jinja2  # which `import monai_saliency` need not wait for

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    found = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"number": number, "class_words": class_words, "text": _text, "may_be_chance": _may_be_chance}
    return found


def _rendered(template: str, **words: Any) -> str:
    """A page by a template of ``templates/``, which escapes all that it is given."""
    # Bytes of a file name that are not UTF-8 have no character.
    return _environment().get_template(template).render(words).encode(errors="replace").decode()


def cohort_page(cohort: Cohort, title: str, thumbnails: Mapping[str, Sequence[str]]) -> str:
    """The page of a cohort; ``thumbnails`` are the addresses of the pictures of each case's maps, by its name."""
    rows = [row for case in cohort.cases for row in case.rows]
    return _rendered(
        "cohort.html",
        title=title,
        cases=cohort.cases,
        thumbnails=thumbnails,
        columns=[column for column in _COLUMNS if any(_text(row, column.name) for row in rows)],
        classes=sorted({class_words(row) for row in rows}),
        figures=_figures(cohort),
        scales=_scale_words(cohort.scales),
    )


def compared_page(runs: Runs, lines: Sequence[tuple[Compared, Sequence[str]]], title: str) -> str:
    """The page of several runs: all compared maps, each with the addresses of its pictures."""
    compared = sum(line.agreement is not None for line, _ in lines)
    sizes = [f"{name}: {len(cohort.cases)} cases" for name, cohort in zip(runs.names, runs.cohorts, strict=True)]
    return _rendered(
        "compared.html",
        title=title,
        first=runs.names[0],
        lines=lines,
        figures=[*sizes, f"{compared} pairs of maps compared", f"{len(lines) - compared} not"],
        columns=_FIGURES,
        classes=sorted({line.words for line, _ in lines if line.words}),
        scales=_scale_words(runs.scales),
    )


def _scale_words(scales: Mapping[str, float]) -> str:
    return "; ".join(f"{words}: up to {scale:g}" for words, scale in scales.items())


def _figures(cohort: Cohort) -> list[str]:
    explained = [case for case in cohort.cases if case.rows]
    failed = sum(case.failure is not None for case in cohort.cases)
    words = [f"{len(explained)} case{'s' * (len(explained) != 1)} explained", f"{failed} failed"]
    inside = [row["peak_in_label"] == "True" for case in explained for row in case.rows if row.get("peak_in_label")]
    if inside:
        words.append(f"{sum(inside)} of {len(inside)} peaks in the label")
    seconds = [float(case.rows[0]["seconds"]) for case in explained if case.rows[0].get("seconds")]
    if np.isfinite(seconds).any():
        words.append(f"{np.nansum(seconds):,.0f} s of explaining")
    return words


def _text(row: Row, name: str) -> str:
    if name == "explained":
        return class_words(row)
    if name == "place":
        places = [row.get(f"peak_{axis}_mm", "") for axis in "xyz"]
        return ", ".join(number(each, 4) for each in places if each)
    text = row.get(name, "")
    return _YES.get(text, text)


def _may_be_chance(row: Row) -> bool:
    """Whether no value is further from 0 than five times its noise, as the summary's figures count it."""
    if not row.get("noise"):
        return False
    largest = max(abs(float(row[name])) for name in ("peak_saliency", "lowest_saliency") if row.get(name))
    return largest <= 5 * float(row["noise"])


def case_page(case: CaseFiles, shown: Shown | None, problem: str, near: Sequence[CaseFiles | None]) -> str:
    """The page of a case: its viewer, or ``problem``. ``near`` are the cases before and after it."""
    data = None if shown is None else shown.data()
    scripts = ["niivue.umd.js", "volume.js"] if data is not None and len(data["shape"]) == 3 else ["picture.js"]
    return _rendered(
        "case.html",
        title=case.case,
        scripts=[] if data is None else [*scripts, "case.js"],
        before=near[0],
        after=near[1],
        rows=case.rows,
        data=data,
        problem=problem,
        thinned=1 if data is None else math.prod(data["stride"]),
        known=[(class_words(row), _facts(row)) for row in case.rows],
        curves=curve_charts(case.rows),
        charts=_charts(case.regions),
    )


def _facts(row: Row) -> list[tuple[str, str]]:
    facts = [(each.heading, number(_text(row, each.name), max(each.digits, 4))) for each in _COLUMNS]
    facts = [(name, value) for name, value in facts if value]
    facts[3:3] = [("Score is", row.get("quantity", "")), ("Unit", row.get("unit", ""))]
    facts += [("Noise", number(row.get("noise", ""))), ("Stopped", row.get("stopped", ""))]
    return [*facts, ("Not measured", row.get("trust_problem", "")), ("Settings", row.get("settings", ""))]


def _charts(regions: Sequence[Row]) -> list[tuple[str, list[tuple[float, Row]], float]]:
    """A bar chart for each map of regions: its words, the values, the largest contributions first, and the largest."""
    groups: dict[str, list[tuple[float, Row]]] = {}
    for row in regions:
        value = float(np.nan_to_num(float(row.get("saliency") or 0), posinf=0, neginf=0))
        groups.setdefault(class_words(row), []).append((value, row))
    ordered = {words: sorted(rows, key=lambda each: -abs(each[0])) for words, rows in groups.items()}
    return [(words, rows, abs(rows[0][0]) or 1.0) for words, rows in ordered.items()]
