"""Making the report of a finished output folder."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.version import __version__
from monai_saliency.visualize.report.cases import CaseFiles, read_cohort
from monai_saliency.visualize.report.comparison import Runs
from monai_saliency.visualize.report.pages import Line, case_page, cohort_page, compared_lines, compared_page
from monai_saliency.visualize.report.shown import show

__all__ = ["try_report", "write_comparison", "write_report"]

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
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

        write_report("eval")  # eval/report/index.html
    """
    folder = Path(folder)
    cohort = read_cohort(folder)
    report = folder / "report"
    with locked(report / ".lock"):
        _copy_assets(report)
        explained = [case for case in cohort.cases if case.rows]
        around = [None, *explained, None]
        thumbnails: dict[str, Sequence[str]] = {}
        for place, case in enumerate(explained):
            _write_case(report, case, cohort.scales, (around[place], around[place + 2]))
            names = [f"thumbnails/{case.id}-{number}.png" for number in range(len(case.rows))]
            thumbnails[case.case] = [name for name in names if (report / name).is_file()]
        _remove_others(report, keep=explained)
        words = title or f"Saliency maps: {folder.resolve().name}"
        _write(report / "index.html", cohort_page(cohort, words, thumbnails))
    return report / "index.html"


def write_comparison(folders: Sequence[str | Path], output_dir: str | Path, title: str | None = None) -> Path:
    """Make one report of several runs over one cohort, such as of several methods, seeds, checkpoints or fills.

    The report shows maps of the same case, class and channel on one scale, with their difference and how far they
    agree (:class:`~monai_saliency.metrics.MapAgreement`). Runs are compared with the first. Where scores or grids
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

        write_comparison(["rise/eval", "windows/eval"], "both")  # both/report/index.html
    """
    output_dir = Path(output_dir)
    if any((output_dir / name).exists() for name in ("summary.csv", "failures.csv")):
        raise ValueError(f"{output_dir} is the output folder of a run, whose own report is there: give another folder")
    runs = Runs(folders)
    report = output_dir / "report"
    with locked(report / ".lock"):
        _copy_assets(report)
        _remove_others(report, keep=())
        lines: list[Line] = []
        for name in runs.cases:
            case = runs.case(name)
            if case.shown is not None:
                _write_thumbnails(report, case.files, case.shown.thumbnails)
                page = case_page(case.files, case.shown.data, compared=case)
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


def _write_case(report: Path, case: CaseFiles, scales: Mapping[str, float], near: Sequence[CaseFiles | None]) -> None:
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
    _write_thumbnails(report, case, pictures)
    _write(path, case_page(case, data, problem, near, mark))


def _mark(case: CaseFiles, scales: Mapping[str, float], near: Sequence[CaseFiles | None]) -> str:
    """A hash of the files and rows behind the page of a case."""
    paths = [path for path in (case.kept_file, *case.map_files) if path is not None]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    rows = [dict(row) for row in (*case.rows, *case.regions)]
    names = [case.case, *(None if each is None else each.case for each in near)]
    return hashlib.sha256(json.dumps([__version__, names, files, rows, dict(scales)]).encode()).hexdigest()[:32]


def _mark_of(path: Path) -> str:
    with open(path, encoding="utf-8") as file:
        found = _MARK.search(file.read(4096))
    return found[1] if found else ""


def _write_thumbnails(report: Path, case: CaseFiles, pictures: Sequence[bytes]) -> None:
    for old in (report / "thumbnails").glob(f"{case.id}-[0-9]*.png"):
        old.unlink(missing_ok=True)
    for place, picture in enumerate(pictures):
        with atomic_path(report / "thumbnails" / f"{case.id}-{place}.png", durable=False) as temporary:
            temporary.write_bytes(picture)


def _remove_others(report: Path, keep: Collection[CaseFiles]) -> None:
    """Remove the pages and pictures of all other cases."""
    ids = {case.id for case in keep}
    for path in [*(report / "cases").glob("*.html"), *(report / "thumbnails").glob("*.png")]:
        if (path.stem if path.suffix == ".html" else path.stem.rpartition("-")[0]) not in ids:
            path.unlink(missing_ok=True)


def _copy_assets(report: Path) -> None:
    for source in [*(_HERE / "assets").iterdir(), *(_HERE / "vendored").glob("niivue.*")]:
        target = report / "assets" / source.name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            with atomic_path(target, durable=False) as temporary:
                shutil.copyfile(source, temporary)


def _write(path: Path, text: str) -> None:
    with atomic_path(path, durable=False) as temporary:
        temporary.write_text(text, encoding="utf-8")
