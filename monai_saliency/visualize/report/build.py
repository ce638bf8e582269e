"""Making the report of a finished output folder."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.version import __version__
from monai_saliency.visualize.report.cases import CaseFiles, Cohort, read_cohort
from monai_saliency.visualize.report.compared import agreement_table, compared_lines, compared_page
from monai_saliency.visualize.report.comparison import Runs
from monai_saliency.visualize.report.markup import Markup
from monai_saliency.visualize.report.pages import Neighbours, case_page, cohort_page
from monai_saliency.visualize.report.shown import show

__all__ = ["try_report", "write_comparison", "write_report"]

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_ASSETS = (*(f"assets/{name}" for name in ("report.css", "cohort.js", "case.js", "volume.js", "picture.js")),)
_VENDORED = ("vendored/niivue.umd.js", "vendored/niivue.LICENSE")
_MARK = re.compile(r'<meta name="made-of" content="([0-9a-f]*)">')


def write_report(folder: str | Path, title: str | None = None) -> Path:
    """Make the report of an output folder: ``report/index.html`` in it, which opens from disk, without a network.

    Pages that are there already and whose case has not changed are left as they are. A case whose maps cannot be read
    has a page that says why.

    Args:
        folder: the output folder of our bundle's run or of the overlay's. Nothing outside of it is read.
        title: of the cohort's page; by default the folder's name.

    Returns:
        the path of ``index.html``.

    Raises:
        ValueError: when the folder holds no table of cases.
        OutputError: when the report cannot be written.

    Example::

        >>> from tempfile import TemporaryDirectory
        >>> from monai_saliency.handlers import Summary
        >>> with TemporaryDirectory() as folder:
        ...     Summary(f"{folder}/summary.csv").add([{"case": "a", "class": "1", "score": 0.9}])
        ...     write_report(folder).relative_to(folder).as_posix()
        'report/index.html'
    """
    folder = Path(folder)
    cohort = read_cohort(folder)
    report = folder / "report"
    with locked(report / ".lock"):
        for name in (*_ASSETS, *_VENDORED):
            _copy(_HERE / name, report / "assets" / Path(name).name)
        explained = [case for case in cohort.cases if case.rows]
        thumbnails: dict[str, Sequence[str]] = {}
        for place, case in enumerate(explained):
            before = explained[place - 1] if place else None
            after = explained[place + 1] if place + 1 < len(explained) else None
            _write_case(report, case, cohort.scales, Neighbours(before, after))
            found = sorted((report / "thumbnails").glob(f"{case.id}-[0-9]*.png"), key=_number)
            thumbnails[case.case] = [f"thumbnails/{path.name}" for path in found]
        _remove_others(report, cohort)
        words = title or f"Saliency maps: {folder.resolve().name}"
        _write(report / "index.html", cohort_page(cohort, words, thumbnails))
    return report / "index.html"


def write_comparison(folders: Sequence[str | Path], output_dir: str | Path, title: str | None = None) -> Path:
    """Make one report of several runs over one cohort, such as of several methods, seeds, checkpoints or fills.

    Maps of the same case, class and channel stand beside each other, on one scale, with their difference and how far
    they agree (:class:`~monai_saliency.metrics.MapAgreement`). Runs are compared with the first. Where scores or grids
    differ, and where only one run has a case, the page says so instead.

    Args:
        folders: the output folders of two or more runs. Only these are read.
        output_dir: gets a folder ``report`` with the pages; not the output folder of a run.
        title: of the first page; by default the runs' names.

    Returns:
        the path of ``index.html``.

    Raises:
        ValueError: when a folder holds no table of cases, when one is given twice, or when ``output_dir`` is a run's.
        OutputError: when the report cannot be written.

    Example::

        >>> from tempfile import TemporaryDirectory
        >>> from monai_saliency.handlers import Summary
        >>> with TemporaryDirectory() as folder:
        ...     for run in ("rise", "windows"):
        ...         Summary(f"{folder}/{run}/summary.csv").add([{"case": "a", "class": "1", "score": 0.9}])
        ...     page = write_comparison([f"{folder}/rise", f"{folder}/windows"], f"{folder}/both")
        ...     page.relative_to(folder).as_posix()
        'both/report/index.html'
    """
    output_dir = Path(output_dir)
    if any((output_dir / name).exists() for name in ("summary.csv", "failures.csv")):
        raise ValueError(f"{output_dir} is the output folder of a run, whose own report is there: give another folder")
    runs = Runs(folders)
    report = output_dir / "report"
    with locked(report / ".lock"):
        for name in (*_ASSETS, *_VENDORED):
            _copy(_HERE / name, report / "assets" / Path(name).name)
        for old in [*(report / "cases").glob("*.html"), *(report / "thumbnails").glob("*.png")]:
            old.unlink(missing_ok=True)
        lines: list[Markup] = []
        for name in runs.cases:
            case = runs.case(name)
            pictures = [] if case.shown is None else case.shown.thumbnails
            for place, picture in enumerate(pictures):
                with atomic_path(report / "thumbnails" / f"{case.files.id}-{place}.png", durable=False) as temporary:
                    temporary.write_bytes(picture)
            if case.shown is not None:
                further = [agreement_table(case)]
                page = case_page(case.files, case.shown.data, "", Neighbours(None, None), further=further)
                _write(report / "cases" / f"{case.files.id}.html", page)
            lines += compared_lines(case, len(runs.names) > 2)
        words = title or f"Saliency maps compared: {', '.join(runs.names)}"
        _write(report / "index.html", compared_page(runs, lines, words))
    return report / "index.html"


def try_report(folder: str | Path) -> None:
    """Make the report at the end of a run and print its path. A finished run never fails by it: an error is logged."""
    try:
        path = write_report(folder)
    except Exception as error:
        logger.error(
            "the report of %s could not be made: %s. The maps are there; `python -m monai_saliency report FOLDER` "
            "tries again",
            folder,
            error,
        )
        return
    print(path, flush=True)


def _write_case(report: Path, case: CaseFiles, scales: Mapping[str, float], near: Neighbours) -> None:
    """Write the page of a case and its thumbnails, unless they are there."""
    path = report / "cases" / f"{case.id}.html"
    mark = _mark(case, scales, near)
    if path.is_file() and _mark_of(path) == mark:
        return
    data: dict[str, Any] | None = None
    problem, pictures = "", []
    try:
        shown = show(case, scales)
        data, pictures = shown.data, shown.thumbnails
    except ValueError as error:
        problem = str(error)
        logger.warning("case %s: its page shows no map: %s", case.case, problem)
    for old in (report / "thumbnails").glob(f"{case.id}-[0-9]*.png"):
        old.unlink(missing_ok=True)
    for place, picture in enumerate(pictures):
        with atomic_path(report / "thumbnails" / f"{case.id}-{place}.png", durable=False) as temporary:
            temporary.write_bytes(picture)
    _write(path, case_page(case, data, problem, near, mark))


def _mark(case: CaseFiles, scales: Mapping[str, float], near: Neighbours) -> str:
    """What the page of a case is made of."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in case.files]
    rows = [dict(row) for row in (*case.rows, *case.regions)]
    beside = [each.case if each is not None else None for each in near]
    parts = [__version__, _code(), case.case, files, rows, dict(scales), beside]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _code() -> list[int]:
    """Of what makes pages, so that another version makes them anew."""
    return [path.stat().st_size for path in sorted(_HERE.rglob("*.py"))]


def _mark_of(path: Path) -> str:
    with open(path, encoding="utf-8") as file:
        found = _MARK.search(file.read(4096))
    return found[1] if found else ""


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _remove_others(report: Path, cohort: Cohort) -> None:
    """Remove pages and pictures of cases that the cohort has no more."""
    ids = {case.id for case in cohort.cases if case.rows}
    for path in (report / "cases").glob("*.html"):
        if path.stem not in ids:
            path.unlink(missing_ok=True)
    for path in (report / "thumbnails").glob("*.png"):
        if path.stem.rpartition("-")[0] not in ids:
            path.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return
    with atomic_path(target, durable=False) as temporary:
        shutil.copyfile(source, temporary)


def _write(path: Path, text: str) -> None:
    with atomic_path(path, durable=False) as temporary:
        temporary.write_text(text, encoding="utf-8")
