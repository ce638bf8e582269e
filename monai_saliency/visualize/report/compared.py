"""The page of several runs: a row for each map of each case, and how far the runs agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from monai_saliency.visualize.report.cases import Row
from monai_saliency.visualize.report.comparison import Compared, ComparedCase, Runs
from monai_saliency.visualize.report.markup import Markup, element, number, page

__all__ = ["agreement_table", "compared_lines", "compared_page"]

#: of an agreement: its attribute, its heading, and what it is
_FIGURES = (
    ("pearson", "Pearson", "correlation of the values of all voxels; 1 where one map is the other one scaled"),
    ("spearman", "Spearman", "correlation of the ranks of all voxels"),
    ("overlap", "Top 5 % shared", "share of the first run's highest voxels that are among the other's highest"),
    ("peak_distance", "Peaks apart (mm)", "distance of the peaks in the scanner"),
    ("difference", "Largest difference", "of a voxel, in the score's unit"),
)


def compared_page(runs: Runs, lines: Sequence[Markup], title: str) -> str:
    """The first page.

    Args:
        runs: the runs.
        lines: the rows of its table, see :func:`compared_lines`.
        title: of the page.
    """
    first, *others = runs.names
    second = others[0] if len(others) == 1 else "other run"
    heads = [("case", "Case", ""), ("map", "Map", "the class or output channel that the maps are of")]
    heads += [("run", "Other run", f"the run that is compared with {first}")] * (len(others) > 1)
    heads += [(f"{name}_{i}", f"{words}: {run}", tip) for name, words, tip in (
        ("score", "Score", "of the unperturbed image"),
        ("peak", "Peak", "the map's highest value, in the score's unit"),
    ) for i, run in enumerate((first, second))]  # fmt: skip
    heads += list(_FIGURES)
    heading = [element("th", element("span", f"{first} · {second} · difference", class_="quiet"), class_="picture")]
    heading += [
        element("th", element("button", words, title=tip or None, type="button"), aria_sort="none", data_column=name)
        for name, words, tip in heads
    ]
    header = element("header", element("h1", title), element("p", _means(runs, lines), class_="figures"))
    whole = element("table", element("thead", element("tr", *heading)), element("tbody", *lines), id="cases")
    scales = "; ".join(f"{words}: up to {scale:g}" for words, scale in runs.scales.items())
    note = (
        f"Runs are compared with {first}. Correlations and overlap are of all voxels of the scan; the highest are "
        f"5 % of them, as far as they are positive. One scale for all runs and their differences ({scales})."
    )
    return page(
        title,
        header,
        _filters(),
        element("div", whole, class_="wide compared"),
        element("p", note, class_="quiet note"),
        styles=("assets/report.css",),
        scripts=("assets/cohort.js",),
    )


def _means(runs: Runs, lines: Sequence[Markup]) -> str:
    kinds = [kind for line in lines for kind in ("compared", "refused") if f'data-kind="{kind}' in line]
    words = [f"{name}: {len(cohort.cases)} cases" for name, cohort in zip(runs.names, runs.cohorts, strict=True)]
    return " · ".join([*words, f"{kinds.count('compared')} pairs of maps compared", f"{kinds.count('refused')} not"])


def _filters() -> Markup:
    kinds = ("", "all rows"), ("compared", "compared"), ("refused", "not compared")
    options = [element("option", words, value=value) for value, words in kinds]
    return element(
        "form",
        element("label", "Search ", element("input", type="search", id="search", placeholder="case, class or reason")),
        element("label", "Show ", element("select", *options, id="kind")),
        element("select", element("option", "", value=""), id="class", hidden=True),
        element("output", "", id="count"),
        class_="filters",
    )


def compared_lines(case: ComparedCase, has_run: bool) -> list[Markup]:
    """The rows of a case: one for each map that a run shares with the first, or that it does not.

    Args:
        case: the case.
        has_run: whether the other run is named.
    """
    lines = []
    address = f"cases/{case.files.id}.html"
    for line in case.lines:
        name: Any = case.files.case
        pictures = []
        if case.shown is not None and line.words:
            place = _place(case, line)
            name = element("a", name, href=f"{address}#map={place[-1] if place else 0}")
            pictures = [
                element("img", src=f"thumbnails/{case.files.id}-{each}.png", alt="", loading="lazy")
                for each in place
                if each < len(case.shown.thumbnails)
            ]
        cells = [element("td", element("span", *pictures, class_="pair"), class_="picture"), element("td", name)]
        cells += [element("td", line.words)] + [element("td", line.run)] * has_run
        cells += [_value(row.get(key, "") if row else "") for key in ("score", "peak_saliency") for row in _rows(line)]
        found = line.agreement
        if found is None:
            cells.append(element("td", element("p", line.problem), colspan=len(_FIGURES), class_="error"))
        else:
            cells += [_value(getattr(found, key), line.problem) for key, *_ in _FIGURES]
        kind = "compared" if found is not None else "refused"
        lines.append(element("tr", *cells, data_kind=kind, data_class=line.words))
    return lines


def agreement_table(case: ComparedCase) -> Markup:
    """How far a case's maps agree, for its page.

    Args:
        case: the case.
    """
    heads = [element("th", words, title=tip) for _, words, tip in _FIGURES]
    rows = [element("tr", element("th", ""), *heads)]
    for line in case.lines:
        name = element("th", f"{line.run}{f': {line.words}' if line.words else ''}")
        if line.agreement is None:
            rows.append(element("tr", name, element("td", line.problem, colspan=len(_FIGURES), class_="error")))
            continue
        cells = [_value(getattr(line.agreement, key), line.problem) for key, *_ in _FIGURES]
        rows.append(element("tr", name, *cells))
    notes = [element("p", line.problem, class_="quiet") for line in case.lines if line.agreement and line.problem]
    table = element("table", *rows, class_="agreement")
    return element("article", element("h2", f"Agreement with {case.first}"), table, *notes, class_="across")


def _rows(line: Compared) -> tuple[Row | None, Row | None]:
    return line.first, line.second


def _value(value: Any, problem: str = "") -> Markup:
    if isinstance(value, float) and not math.isfinite(value):
        return element("td", "-", class_="number", title=problem or "a map is flat, so there is nothing to compare")
    return element("td", number(value), class_="number", data_value=value, title=str(value) or None)


def _place(case: ComparedCase, line: Compared) -> list[int]:
    """Which of the shown maps are a line's: the first run's, the other's, and their difference."""
    assert case.shown is not None  # asked for pages only
    names = [each["name"] for each in case.shown.data["maps"]]
    first = case.first
    wanted = [f"{first}: {line.words}"] * (line.first is not None)
    wanted += [f"{line.run}: {line.words}"] * (line.second is not None) + [f"{line.words}: {line.run} minus {first}"]
    return [names.index(each) for each in wanted if each in names]
