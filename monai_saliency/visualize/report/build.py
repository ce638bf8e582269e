"""Making the report of a finished output folder: its pages and pictures, and the table of a cohort's regions."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from monai_saliency.inferers.explanation import FILL_LEAVES
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.storage.tables import write_csv
from monai_saliency.visualize.legend import is_noise
from monai_saliency.visualize.report.cases import CaseFiles, Cohort, Row, beyond, class_words, number, read_cohort
from monai_saliency.visualize.report.plots import cohort_plots, curve_charts
from monai_saliency.visualize.report.shown import Shown

__all__ = ["begin_report", "cohort_regions", "rendered", "try_report", "write_page", "write_report", "write_thumbnails"]

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
# Pages are made side by side: most of their time is reading and packing volumes. Each holds its volumes meanwhile.
_THREADS = 4
# What makes figures of several cases comparable.
_SAME = ("class", "channel", "quantity", "unit", "region", "name")
_COLUMNS = (*_SAME, "class_name", "cases", "saliency_mean", "saliency_sd", "mass_mean", "mass_sd")


def write_report(folder: str | Path, title: str | None = None) -> Path:
    """Make the report of an output folder: ``report/index.html`` in it, which opens from disk, without a network.

    Where cases have label maps, ``cohort_regions.csv`` holds the mean of the maps in each region over the cohort
    (:func:`cohort_regions`).

    An earlier report there is made anew. A case whose maps cannot be read has a page with the reason.

    Args:
        folder: the output folder of our bundle's run or of the overlay's.
        title: of the cohort's page; by default the folder's name.

    Returns:
        the path of ``index.html``.

    Raises:
        ValueError: when the folder holds no table of cases.
    """
    folder = Path(folder)
    cohort = read_cohort(folder)
    report = folder / "report"
    with locked(report / ".lock"):
        begin_report(report)
        explained = [case for case in cohort.cases if case.rows]
        around = zip([None, *explained[:-1]], [*explained[1:], None], strict=True)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            made = pool.map(partial(_write_case, report, cohort), explained, around)
        thumbnails = dict(zip([case.case for case in explained], made, strict=True))
        title = title or f"Saliency maps: {folder.resolve().name}"
        (folder / "cohort_regions.csv").unlink(missing_ok=True)
        has_regions = any(case.label_regions for case in explained)
        panels = _region_panels(_save_cohort_regions(folder, cohort)) if has_regions else []
        return write_page(report / "index.html", _cohort_page(cohort, title, thumbnails, panels))


def try_report(folder: str | Path) -> None:
    """Make the report at the end of a run and print its path. A finished run never fails by it: an error is logged."""
    try:
        print(write_report(folder), flush=True)
    except Exception as error:
        again = "the maps are there, and `monai-saliency report FOLDER` tries again"
        logger.error("the report of %s could not be made: %s: %s", folder, error, again)


def begin_report(report: Path) -> None:
    """Remove the pages and pictures of an earlier report, and copy what pages need."""
    for folder in ("cases", "thumbnails", "assets"):
        shutil.rmtree(report / folder, ignore_errors=True)
    shutil.copytree(_HERE / "assets", report / "assets")
    for source in (_HERE / "vendored").glob("niivue.*"):
        shutil.copy(source, report / "assets")


def _write_case(
    report: Path, cohort: Cohort, case: CaseFiles, around: tuple[CaseFiles | None, CaseFiles | None]
) -> list[str]:
    """Write the page of a case and its thumbnails, and return their addresses."""
    shown, problem = None, ""
    try:
        shown = Shown.of(case, cohort.scales)
    except Exception as error:  # such as of a damaged file
        problem = f"its map cannot be read: {error}"
        logger.warning("case %s: its page shows no map: %s", case.case, problem)
    thumbnails = write_thumbnails(report, case.id, [] if shown is None else shown.thumbnails())
    write_page(report / "cases" / f"{case.id}.html", _case_page(case, shown, problem, around, cohort.settings))
    return thumbnails


def write_thumbnails(report: Path, name: str, pictures: Sequence[bytes]) -> list[str]:
    """Write pictures, and return their addresses."""
    addresses = [f"thumbnails/{name}-{place}.png" for place in range(len(pictures))]
    for address, picture in zip(addresses, pictures, strict=True):
        with atomic_path(report / address, durable=False) as temporary:
            temporary.write_bytes(picture)
    return addresses


def write_page(path: Path, text: str) -> Path:
    """Write a page, and return its path."""
    with atomic_path(path, durable=False) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


# Pages. ---------------------------------------------------------------------------------------------------------------


@functools.cache
def _environment() -> Any:
    import jinja2  # which `import monai_saliency` need not wait for

    loader = jinja2.FileSystemLoader(_HERE / "templates")
    found = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"number": number, "class_words": class_words, "text": _text, "may_be_chance": is_noise}
    found.filters["beyond"] = beyond
    found.filters["fill_is_none"] = lambda row: float(row.get("fill_leaves") or 0) > FILL_LEAVES
    return found


def rendered(template: str, **words: Any) -> str:
    """A page by a template of ``templates/``, which escapes all that it is given."""
    # Bytes of a file name that are not UTF-8 have no character.
    return _environment().get_template(template).render(words).encode(errors="replace").decode()


def _cohort_page(cohort: Cohort, title: str, thumbnails: Mapping[str, Sequence[str]], panels: Sequence[Any]) -> str:
    """The page of a cohort; ``thumbnails`` are the addresses of the pictures of each case's maps, by its name."""
    rows = [row for case in cohort.cases for row in case.rows]
    return rendered(
        "cohort.html",
        title=title,
        cases=cohort.cases,
        thumbnails=thumbnails,
        rows=rows,
        figures=_figures(cohort),
        scales=cohort.scales,
        panels=panels,
        plots=cohort_plots(cohort) if len(cohort.cases) > 1 else [],
        runs=_runs(rows, cohort.settings),
    )


def _figures(cohort: Cohort) -> list[str]:
    first = [case.rows[0] for case in cohort.cases if case.rows]
    failed = sum(case.failure is not None for case in cohort.cases)
    inside = [row["peak_in_label"] for case in cohort.cases for row in case.rows if row.get("peak_in_label")]
    images, forwards, seconds = (
        np.nansum([float(row.get(name) or 0) for row in first]) for name in ("images", "forwards", "seconds")
    )
    words = [f"{len(first)} case{'s' * (len(first) != 1)} explained", f"{failed} failed"]
    words += [f"{inside.count('True')} of {len(inside)} peaks in the label"] * bool(inside)
    words += [f"{images:,.0f} images scored"] * bool(images)
    return [*words, f"this run {forwards:,.0f} forwards, {seconds:,.0f} s"]


def _runs(rows: Sequence[Row], settings: Mapping[str, Mapping[str, str]]) -> list[tuple[str, Mapping[str, str], Row]]:
    """What made some rows: for each mark of settings the settings, and one of the rows."""
    first = {row.get("settings", ""): row for row in reversed(rows)}
    return [(mark, settings[mark], row) for mark, row in sorted(first.items()) if mark in settings]


def _text(row: Row, name: str) -> str:
    """A cell of a table."""
    if name == "explained":
        return class_words(row)
    if name == "place":
        if row["verdict"]:  # there is no peak
            return ""
        places = [row.get(f"peak_{axis}_mm", "") for axis in "xyz"]
        return ", ".join(number(each) for each in places if each)
    text = row.get(name, "")
    return {"True": "yes", "False": "no"}.get(text, text)


def _case_page(
    case: CaseFiles,
    shown: Shown | None,
    problem: str,
    near: Sequence[CaseFiles | None],
    settings: Mapping[str, Mapping[str, str]],
) -> str:
    """The page of a case: its viewer, or ``problem``. ``near`` are the cases before and after it."""
    data = None if shown is None else shown.data()
    is_flat = data is not None and len(data["shape"]) == 2
    scripts, element = (["picture.js"], "pixel") if is_flat else (["niivue.umd.js", "volume.js"], "voxel")
    return rendered(
        "case.html",
        title=case.case,
        scripts=[] if data is None else ["ratings.js", *scripts, "case.js"],
        near=near,
        case=case,
        data=data,
        problem=problem,
        curves=curve_charts(case.rows, element) if any(row.get("trust_curves") for row in case.rows) else [],
        element=element,
        runs=_runs(case.rows, settings),
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


# The regions of a cohort. ---------------------------------------------------------------------------------------------


def cohort_regions(cohort: Cohort) -> list[dict[str, Any]]:
    """The maps of a cohort in each region of the cases' label maps, from ``label_regions.csv``.

    A class by organ matrix over a cohort, after Agg2Exp (arXiv 2407.16653, section 3), which makes it of gradients.
    Maps of different scores are not mixed.

    Returns:
        a dictionary for each class, channel, score and region: the number of ``cases`` that have the region, the mean
        over these cases of ``saliency``, the map's mean in the region in the score's unit, and of ``mass``, the
        region's share of the map's values above 0; and their standard deviations of a sample, ``""`` for one case.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for case in cohort.cases:
        scores = {class_words(row): row for row in case.rows}
        for row in case.label_regions:
            known = {**scores.get(class_words(row), {}), **row}
            groups.setdefault(tuple(known.get(name, "") for name in _SAME), []).append(row)
    found = []
    for same, rows in groups.items():
        figures = [figure for name in ("saliency", "mass") for figure in _mean_and_spread(rows, name)]
        class_name = max(row.get("class_name", "") for row in rows)
        found.append(dict(zip(_COLUMNS, (*same, class_name, len(rows), *figures), strict=True)))
    return found


def _mean_and_spread(rows: Sequence[Row], name: str) -> tuple[float | str, float | str]:
    values = [float(row[name]) for row in rows if row[name]]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else ""
    return (float(np.mean(values)) if values else ""), spread


def _save_cohort_regions(folder: Path, cohort: Cohort) -> list[dict[str, Any]]:
    """Write ``cohort_regions.csv`` into an output folder, and return its rows."""
    path, rows = folder / "cohort_regions.csv", cohort_regions(cohort)
    write_csv(path, _COLUMNS, rows)
    return rows


def _region_panels(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], list[tuple[str, list[Any]]], float]]:
    """A matrix for each score: its words, the regions, for each class its cells, and the largest absolute mean."""
    scores: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        words = row["quantity"] + f" ({row['unit']})" * (row["unit"] not in ("", row["quantity"]))
        scores.setdefault(words or "score", []).append(row)
    found = []
    for words, own in scores.items():
        cells = {(class_words(row), _region(row)): row for row in own}
        regions = sorted({(int(row["region"]), _region(row)) for row in own})
        classes = sorted({explained for explained, _ in cells})
        lines = [(each, [cells.get((each, region)) for _, region in regions]) for each in classes]
        largest = max(abs(row["saliency_mean"]) for row in own) or 1.0
        found.append((words, [region for _, region in regions], lines, largest))
    return found


def _region(row: Row) -> str:
    return row["name"] or f"region {row['region']}"
