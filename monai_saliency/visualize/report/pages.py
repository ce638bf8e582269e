"""The pages of a report: the cohort's, and one for each case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from monai_saliency.visualize.report.cases import CaseFiles, Cohort, Row, class_words
from monai_saliency.visualize.report.curves import curve_figures
from monai_saliency.visualize.report.markup import Markup, element, number, page, table

__all__ = ["Neighbours", "case_page", "cohort_page"]

_MOST_BARS, _MOST_SCORES = 40, 4
_YES = {"True": "yes", "False": "no"}
_SIDES = {"True": ("inside",), "False": ("outside",)}


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


class Neighbours(NamedTuple):
    """The cases before and after one; None at the ends."""

    before: CaseFiles | None
    after: CaseFiles | None


def cohort_page(cohort: Cohort, title: str, thumbnails: Mapping[str, Sequence[str]], mark: str = "") -> str:
    """The page of a cohort.

    Args:
        cohort: its cases.
        title: of the page.
        thumbnails: the addresses of the pictures of each case's maps, by the case's name.
        mark: what it was made of.
    """
    rows = [(case, row) for case in cohort.cases for row in case.rows]
    shown = [column for column in _COLUMNS if any(_cell(row, column.name) for _, row in rows)]
    if all(
        row.get("forwards") == number(row.get("predictions", ""), 9) for _, row in rows
    ):  # nothing is cut in patches
        shown = [column for column in shown if column.name != "predictions"]
    heads = [("case", "Case", "")] + [(each.name, each.heading, each.words) for each in shown]
    heading = [element("th", element("span", "Map", class_="quiet"), class_="picture")]
    heading += [
        element("th", element("button", words, title=tip or None, type="button"), aria_sort="none", data_column=name)
        for name, words, tip in heads
    ]
    body: list[Markup] = []
    for case in cohort.cases:
        body += _map_lines(case, shown, thumbnails.get(case.case, ()))
        if case.failure is not None:
            body.append(_failure_line(case, case.failure, len(shown)))
    classes = sorted({class_words(row) for _, row in rows})
    failed = sum(case.failure is not None for case in cohort.cases)
    content = [
        element("header", element("h1", title), element("p", _figures(cohort, failed), class_="figures")),
        _filters(classes, failed),
        element(
            "div",
            element("table", element("thead", element("tr", *heading)), element("tbody", *body), id="cases"),
            class_="wide",
        ),
        element("p", _explanation(cohort), class_="quiet note"),
    ]
    return page(title, *content, styles=("assets/report.css",), scripts=("assets/cohort.js",), mark=mark)


def _figures(cohort: Cohort, failed: int) -> str:
    explained = sum(bool(case.rows) for case in cohort.cases)
    rows = [row for case in cohort.cases for row in case.rows]
    words = [f"{explained} case{'s' * (explained != 1)} explained", f"{failed} failed"]
    inside = [row["peak_in_label"] == "True" for row in rows if row.get("peak_in_label")]
    if inside:
        words.append(f"{sum(inside)} of {len(inside)} peaks in the label")
    seconds = [float(case.rows[0]["seconds"]) for case in cohort.cases if case.rows and case.rows[0].get("seconds")]
    if seconds and np.isfinite(seconds).any():
        words.append(f"{np.nansum(seconds):,.0f} s of explaining")
    return " · ".join(words)


def _filters(classes: Sequence[str], failed: int) -> Markup:
    kinds = [("", "all cases"), ("explained", "explained"), ("failed", f"failed ({failed})")]
    kinds += [("outside", "peak outside the label"), ("inside", "peak in the label"), ("chance", "may be chance")]
    options = [element("option", words, value=value) for value, words in kinds]
    of = [element("option", "all classes", value="")] + [element("option", each, value=each) for each in classes]
    return element(
        "form",
        element("label", "Search ", element("input", type="search", id="search", placeholder="case, class or error")),
        element("label", "Show ", element("select", *options, id="kind")),
        element("label", "Class ", element("select", *of, id="class")),
        element("output", "", id="count"),
        class_="filters",
    )


def _map_lines(case: CaseFiles, columns: Sequence[_Column], thumbnails: Sequence[str]) -> list[Markup]:
    lines = []
    for place, row in enumerate(case.rows):
        address = f"cases/{case.id}.html" + (f"#map={place}" if place else "")
        picture: Any = ""
        if place < len(thumbnails):
            picture = element("a", element("img", src=thumbnails[place], alt="", loading="lazy"), href=address)
        cells = [element("td", picture, class_="picture"), element("td", element("a", case.case, href=address))]
        for column in columns:
            text = _cell(row, column.name)
            cells.append(_table_cell(text, column))
        kinds = ["explained", *_SIDES.get(row.get("peak_in_label", ""), ())]
        kinds += ["chance"] * _may_be_chance(row)
        lines.append(element("tr", *cells, data_kind=" ".join(kinds), data_class=class_words(row)))
    return lines


def _table_cell(text: str, column: _Column) -> Markup:
    if column.name in ("explained", "prediction", "place"):
        return element("td", text, class_="number" if column.name == "place" else None)
    if text in ("True", "False"):
        return element("td", _YES[text], data_value=int(text == "True"))
    return element("td", number(text, column.digits), class_="number", data_value=text, title=text or None)


def _failure_line(case: CaseFiles, failure: Row, columns: int) -> Markup:
    words = element("strong", f"failed ({failure.get('stage', '')}): ")
    return element(
        "tr",
        element("td", class_="picture"),
        element("td", case.case),
        element("td", element("p", words, failure.get("error", "")), colspan=max(columns, 1), class_="error"),
        class_="failure",
        data_kind="failed",
    )


def _explanation(cohort: Cohort) -> str:
    scales = "; ".join(f"{words}: up to {scale:g}" for words, scale in cohort.scales.items())
    return (
        f"Warm colours support the score, cold colours speak against it; one scale for the whole cohort ({scales}). "
        "Colours grow with the square root of the value. What lies below a hundredth of the scale, or within two "
        "standard errors of zero, is not coloured."
    )


def _cell(row: Row, name: str) -> str:
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


def case_page(
    case: CaseFiles,
    data: dict[str, Any] | None,
    problem: str,
    near: Neighbours,
    mark: str = "",
    further: Sequence[Markup] = (),
) -> str:
    """The page of a case.

    Args:
        case: the case.
        data: what its viewer shows; None where nothing can be shown.
        problem: why nothing can be shown.
        near: the cases before and after it.
        mark: what it was made of.
        further: what stands before the figures of its maps.
    """
    links = [element("a", "← cohort", href="../index.html")]
    for each, words in ((near.before, "previous"), (near.after, "next")):
        if each is not None:
            links.append(element("a", words, href=f"{each.id}.html", title=each.case, class_=words))
    head = element("header", element("nav", *links), element("h1", case.case), element("p", _said(case)), class_="case")
    is_photograph = data is not None and bool(data["rowsDown"])
    known = [*(_facts(row, is_photograph) for row in case.rows), *curve_figures(case.rows), *_bars(case.regions)]
    facts = element("section", *further, *known, class_="facts")
    scripts: tuple[str, ...] = ()
    viewer = element("p", f"Nothing can be shown of this case: {problem}", class_="error")
    if data is not None:
        is_volume = len(data["shape"]) == 3
        scripts = (*(("niivue.umd.js", "volume.js") if is_volume else ("picture.js",)), "case.js")
        viewer = element("main", _stage(is_volume), _controls(data), class_="viewer")
    return page(
        case.case,
        head,
        viewer,
        facts,
        data=data,
        styles=("../assets/report.css",),
        scripts=tuple(f"../assets/{name}" for name in scripts),
        mark=mark,
    )


def _said(case: CaseFiles) -> str:
    """What the network says of a case, and how much of it is explained."""
    row = case.rows[0]
    words = [f"predicted {row['prediction']}"] if row.get("prediction") else []
    if words and row.get("probability"):
        words[0] += f" ({number(row['probability'])})"
    words += [f"{class_words(each)} scores {number(each.get('score', ''))}" for each in case.rows[:_MOST_SCORES]]
    return " · ".join(words) + " · ..." * (len(case.rows) > _MOST_SCORES)


def _stage(is_volume: bool) -> Markup:
    canvas = element("canvas", id="stage", tabindex="0", aria_label="the scan with its map")
    over = [] if is_volume else [element("div", id="across"), element("div", id="down")]
    return element("div", canvas, *over, id="frame", class_="volume" if is_volume else "flat")


def _slider(name: str, words: str) -> Markup:
    return element(
        "label",
        element("span", words),
        element("input", type="range", id=name, min=0, max=1000, value=0),
        element("output", "", id=f"{name}-value"),
        class_="slider",
    )


def _controls(data: dict[str, Any]) -> Markup:
    is_volume = len(data["shape"]) == 3
    maps = [element("option", each["name"], value=f"{i}") for i, each in enumerate(data["maps"])]
    maps += [
        element("option", f"standard error of {each['name']}", value=f"{i}e")
        for i, each in enumerate(data["maps"])
        if each["error"] is not None
    ]
    planes = ("x", "sagittal (x)"), ("y", "coronal (y)"), ("z", "axial (z)")
    scan = [
        element("label", element("span", "Window"), element("select", id="window"), class_="choice"),
        _slider("level", "Level"),
        _slider("width", "Width"),
    ]
    has_errors = any(each["error"] is not None for each in data["maps"])
    label = element("label", element("input", type="checkbox", id="outline", checked=True), " outline of the label")
    chance = element("label", element("input", type="checkbox", id="chance", checked=True), " hide what may be chance")
    return element(
        "aside",
        element("label", element("span", "Map"), element("select", *maps, id="map"), class_="choice"),
        element("canvas", id="bar", width=560, height=64),
        element("p", "", id="words", class_="quiet"),
        element("h2", "At the crosshair"),
        element("table", element("tbody", id="readout"), class_="readout"),
        element("h2", "Colours"),
        element("label", element("span", "Scale"), element("select", id="scale"), class_="choice"),
        _slider("opacity", "Opacity"),
        _slider("threshold", "Threshold"),
        element("div", *([chance] if has_errors else []), *([label] if data["label"] else []), class_="checks"),
        *([element("h2", "Slices"), *(_slider(name, words) for name, words in planes)] if is_volume else []),
        *([element("h2", "Scan"), *scan] if data["gray"] else []),
        element("p", _small_print(data), class_="quiet"),
    )


def _small_print(data: dict[str, Any]) -> str:
    words = ["Drag to move the crosshair; turn the rendering with the mouse."] if len(data["shape"]) == 3 else []
    if data["scan"] is None:
        words.append("The scan was not kept in this folder (report: false), so the map is shown alone.")
    elif data["step"] != 1:
        words.append(f"Scan values are shown to ±{data['step'] / 2:.2g}, map values to a thousandth of the largest.")
    if max(data["stride"]) > 1:
        words.append(
            f"One of {math.prod(data['stride'])} voxels is shown, to keep the page small; the NIfTI file has all."
        )
    return " ".join(words)


def _facts(row: Row, is_photograph: bool) -> Markup:
    known = [(f"{each.heading}", number(_cell(row, each.name), max(each.digits, 4))) for each in _COLUMNS]
    if is_photograph:  # it lies in no scanner
        pixel = ", ".join(number(row.get(f"peak_{axis}_mm", ""), 6) for axis in "xy")
        known = [("Peak at pixel", pixel) if "(mm)" in name and value else (name, value) for name, value in known]
    facts = [(name, value) for name, value in known if value]
    facts[3:3] = [("Score is", row.get("quantity", "")), ("Unit", row.get("unit", ""))]
    facts += [("Noise", number(row.get("noise", ""))), ("Stopped", row.get("stopped", ""))]
    facts += [("Not measured", row.get("trust_problem", "")), ("Settings", row.get("settings", ""))]
    facts = [(name, _YES.get(value, value)) for name, value in facts]
    return element("article", element("h2", class_words(row)), table(facts, class_="known"))


def _bars(regions: Sequence[Row]) -> list[Markup]:
    """A bar chart for each map of regions, the largest contributions first."""
    charts = []
    groups: dict[str, list[Row]] = {}
    for row in regions:
        groups.setdefault(class_words(row), []).append(row)
    for words, rows in groups.items():
        ordered = sorted(rows, key=lambda row: -abs(_float(row.get("saliency", ""))))
        largest = max((abs(_float(row.get("saliency", ""))) for row in ordered), default=0.0) or 1.0
        lines = [_bar(row, largest) for row in ordered[:_MOST_BARS]]
        more = len(ordered) - len(lines)
        rest = [element("p", f"and {more} smaller ones, see regions.csv", class_="quiet")] if more else []
        chart = element("table", *lines, class_="bars")
        charts.append(element("article", element("h2", f"Regions: {words}"), chart, *rest, class_="chart"))
    return charts


def _bar(row: Row, largest: float) -> Markup:
    value = _float(row.get("saliency", ""))
    share = 50 * abs(value) / largest
    left = 50 if value >= 0 else 50 - share
    bar = element("span", class_="warm" if value >= 0 else "cold", style=f"left:{left:.2f}%;width:{share:.2f}%")
    name = row.get("name") or f"region {row.get('region', '')}"
    volume = f"{number(row['volume_ml'])} ml" if row.get("volume_ml") else ""
    return element(
        "tr",
        element("th", name),
        element("td", bar, class_="bar"),
        element("td", number(row.get("saliency", "")), class_="number"),
        element("td", volume, class_="number quiet"),
    )


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if np.isfinite(value) else 0.0
