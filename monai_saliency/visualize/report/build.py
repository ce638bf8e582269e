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

from monai_saliency.errors import AdviceError
from monai_saliency.inferers.explanation import FILL_LEAVES
from monai_saliency.storage.files import locked, write_whole
from monai_saliency.storage.tables import refuse_foreign, write_csv
from monai_saliency.visualize.legend import is_noise, score_words
from monai_saliency.visualize.report.cases import CaseFiles, Cohort, Row, beyond, class_words, number, read_cohort
from monai_saliency.visualize.report.plots import cohort_plots, curve_charts
from monai_saliency.visualize.report.regions import COHORT_REGION_COLUMNS, cohort_regions, region_bars, region_panels
from monai_saliency.visualize.report.shown import Shown

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
# Pages are made side by side: most of their time is reading and packing volumes. Each holds its volumes meanwhile.
_THREADS = 4


def write_report(folder: str | Path) -> Path:
    """Make the report of an output folder: ``report/index.html`` in it, which opens from disk, without a network.

    Where cases have label maps, ``cohort_regions.csv`` holds the mean of the maps in each region over the cohort
    (:func:`~monai_saliency.visualize.report.regions.cohort_regions`).

    An earlier report there is made anew. A case whose maps cannot be read has a page with the reason.

    Args:
        folder: the output folder of our bundle's run or of the overlay's.

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
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            addresses = pool.map(partial(_write_case, report, cohort, explained), range(len(explained)))
        thumbnails = {case.case: pictures for case, pictures in zip(explained, addresses, strict=True)}
        title = f"Saliency maps: {folder.resolve().name}"
        page = _cohort_page(cohort, title, thumbnails, _panels(folder, cohort))
        return write_page(report / "index.html", page)


def _panels(folder: Path, cohort: Cohort) -> Sequence[Any]:
    """Write ``cohort_regions.csv`` if cases have label maps, and return what the page shows of it."""
    path = folder / "cohort_regions.csv"
    refuse_foreign(path, COHORT_REGION_COLUMNS)
    path.unlink(missing_ok=True)
    if not any(case.rows and case.label_regions for case in cohort.cases):
        return []
    means = cohort_regions(cohort)
    write_csv(path, COHORT_REGION_COLUMNS, means)
    return region_panels(means)


def try_report(folder: str | Path) -> None:
    """Make the report at the end of a run and print its path. A finished run never fails by it: an error is logged."""
    try:
        print(write_report(folder), flush=True)
    except Exception as error:
        again = "the maps are there, and `monai-saliency report FOLDER` tries again"
        logger.error("the report of %s could not be made: %s: %s", folder, error, again)


def begin_report(report: Path) -> None:
    """Remove the pages and pictures of an earlier report, and copy what pages need."""
    refuse_other_pages(report)
    for folder in ("cases", "thumbnails"):
        shutil.rmtree(report / folder, ignore_errors=True)
    shutil.copytree(_HERE / "assets", report / "assets", dirs_exist_ok=True)
    for source in (_HERE / "vendored").glob("niivue.*"):
        shutil.copy(source, report / "assets")


def refuse_other_pages(report: Path) -> None:
    """Refuse a folder with pages that are not ours: each of our reports has the same style sheet."""
    ours = (report / "assets" / "report.css").is_file()
    others = [name for name in ("index.html", "cases", "thumbnails", "assets") if (report / name).exists()]
    if others and not ours:
        raise AdviceError(
            f"{report} has a {others[0]} that is not of a report of monai-saliency, and is left as it is: move the "
            "folder away"
        )


def _write_case(report: Path, cohort: Cohort, cases: Sequence[CaseFiles], place: int) -> list[str]:
    """Write the page of one of the cases and its thumbnails, and return their addresses."""
    case = cases[place]
    shown, problem, pictures = None, "", []
    try:
        shown = Shown.of(case, cohort.scales)
        pictures = shown.thumbnails()
    except Exception as error:  # such as of a damaged file
        problem = f"its map cannot be read: {error}"
        logger.warning("case %s: its page shows no map: %s", case.case, problem)
    around = (cases[place - 1] if place else None, cases[place + 1] if place + 1 < len(cases) else None)
    write_page(report / "cases" / f"{case.id}.html", _case_page(case, shown, problem, around, cohort.settings))
    return write_thumbnails(report, case.id, pictures)


def write_thumbnails(report: Path, name: str, pictures: Sequence[bytes]) -> list[str]:
    """Write pictures, and return their addresses."""
    addresses = [f"thumbnails/{name}-{place}.png" for place in range(len(pictures))]
    for address, picture in zip(addresses, pictures, strict=True):
        write_whole(report / address, picture, durable=False)
    return addresses


def write_page(path: Path, text: str) -> Path:
    """Write a page, and return its path."""
    write_whole(path, text, durable=False)
    return path


# Pages. ---------------------------------------------------------------------------------------------------------------


@functools.cache
def _environment() -> Any:
    import jinja2  # which `import monai_saliency` need not wait for

    loader = jinja2.FileSystemLoader(_HERE / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "class_words": class_words, "text": _text, "may_be_chance": is_noise}
    environment.filters |= {"beyond": beyond, "fill_is_none": _fill_is_none, "score_words": _score_words}
    return environment


def _score_words(row: Row) -> str:
    return score_words(row.get("unit", ""), number(row["score"]), number(row.get("score_without_peak", "")))


def _fill_is_none(row: Row) -> bool:
    return float(row.get("fill_leaves") or 0) > FILL_LEAVES


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
    """What the header counts: cases, failures, peaks in the label, and the price of the run."""
    explained = [case.rows for case in cohort.cases if case.rows]
    failed = [case for case in cohort.cases if case.failure is not None]
    cases = "case" if len(explained) == 1 else "cases"
    figures = [f"{len(explained)} {cases} explained", f"{len(failed)} failed"]
    if nothing := sum(bool(case.nothing) for case in cohort.cases):
        figures.append(f"{nothing} with nothing to explain")
    in_label = [row.get("peak_in_label", "") for rows in explained for row in rows]
    inside, outside = in_label.count("True"), in_label.count("False")
    if inside or outside:
        figures.append(f"{inside} of {inside + outside} peaks in the label")
    images, forwards, seconds = (_total(explained, column) for column in ("images", "forwards", "seconds"))
    if images:
        figures.append(f"{images:,.0f} images scored")
    figures.append(f"this run {forwards:,.0f} forwards, {seconds:,.0f} s")
    return figures


def _total(cases: Sequence[Sequence[Row]], column: str) -> float:
    """The sum of a column over cases, each of which has it in its first row."""
    values = [float(rows[0].get(column) or 0) for rows in cases]
    return float(np.nansum(values))


def _runs(rows: Sequence[Row], settings: Mapping[str, Mapping[str, str]]) -> list[tuple[str, Mapping[str, str], Row]]:
    """What made some rows: for each mark of settings the settings, and the first of the rows."""
    runs = {}
    for row in rows:
        mark = row.get("settings", "")
        if mark in settings and mark not in runs:
            runs[mark] = (mark, settings[mark], row)
    return [runs[mark] for mark in sorted(runs)]


def _text(row: Row, column: str) -> str:
    """A cell of a table."""
    if column == "explained":
        return class_words(row)
    if column == "place":
        places = [] if row["verdict"] else [row.get(f"peak_{axis}_mm", "") for axis in "xyz"]
        return ", ".join(number(place) for place in places if place)
    text = row.get(column, "")
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
        curves=curve_charts(case.rows, element),
        element=element,
        runs=_runs(case.rows, settings),
        charts=region_bars(case.regions),
    )
