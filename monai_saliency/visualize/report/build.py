"""Making the report of a finished output folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.visualize.report.cases import read_cohort
from monai_saliency.visualize.report.comparison import Runs
from monai_saliency.visualize.report.kept_scan import case_id
from monai_saliency.visualize.report.pages import case_page, cohort_page, compared_page
from monai_saliency.visualize.report.shown import Shown

__all__ = ["try_report", "write_comparison", "write_report"]

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent


def write_report(folder: str | Path, title: str | None = None) -> Path:
    """Make the report of an output folder: ``report/index.html`` in it, which opens from disk, without a network.

    An earlier report there is made anew. A case whose maps cannot be read has a page that says why.

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
        _begin(report)
        explained = [case for case in cohort.cases if case.rows]
        around = [None, *explained, None]
        thumbnails: dict[str, Sequence[str]] = {}
        for place, case in enumerate(explained):
            shown: Shown | None = None
            problem = ""
            try:
                shown = Shown.of(case, cohort.scales)
            except ValueError as error:
                problem = str(error)
                logger.warning("case %s: its page shows no map: %s", case.case, problem)
            pictures = [] if shown is None else shown.thumbnails()
            thumbnails[case.case] = _write_thumbnails(report, case.id, pictures)
            page = case_page(case, shown, problem, (around[place], around[place + 2]))
            _write(report / "cases" / f"{case.id}.html", page)
        words = title or f"Saliency maps: {folder.resolve().name}"
        _write(report / "index.html", cohort_page(cohort, words, thumbnails))
    return report / "index.html"


def write_comparison(folders: Sequence[str | Path], output_dir: str | Path, title: str | None = None) -> Path:
    """Make one report of several runs over one cohort, such as of several methods, seeds, checkpoints or fills.

    The report is a table of the maps of each case, class and channel, on one scale, and how far they agree
    (:class:`~monai_saliency.metrics.MapAgreement`). Runs are compared with the first. Where scores or grids differ, and
    where only one run has a case, the page says so instead.

    Args:
        folders: the output folders of two or more runs. Only these are read.
        output_dir: gets a folder ``report`` with the page; not the output folder of a run.
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
        _begin(report)
        lines = []
        for number, line in enumerate(runs.compared()):
            lines.append((line, _write_thumbnails(report, f"{case_id(line.case)}-{number}", line.thumbnails)))
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


def _begin(report: Path) -> None:
    """Remove the pages and pictures of an earlier report, and copy what pages need."""
    for folder in ("cases", "thumbnails", "assets"):
        shutil.rmtree(report / folder, ignore_errors=True)
    (report / "assets").mkdir(parents=True)
    for source in [*(_HERE / "assets").iterdir(), *(_HERE / "vendored").glob("niivue.*")]:
        shutil.copyfile(source, report / "assets" / source.name)


def _write_thumbnails(report: Path, name: str, pictures: Sequence[bytes]) -> list[str]:
    """Write pictures, and return their addresses."""
    addresses = [f"thumbnails/{name}-{place}.png" for place in range(len(pictures))]
    for address, picture in zip(addresses, pictures, strict=True):
        with atomic_path(report / address, durable=False) as temporary:
            temporary.write_bytes(picture)
    return addresses


def _write(path: Path, text: str) -> None:
    with atomic_path(path, durable=False) as temporary:
        temporary.write_text(text, encoding="utf-8")
