"""Making the report of a finished output folder, or of several, map by map."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from monai_saliency.metrics.agreement import MapAgreement, map_agreement
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.visualize.report.cases import CaseFiles, Cohort, MapFile, Row, class_words, read_cohort
from monai_saliency.visualize.report.cohort_regions import save_cohort_regions
from monai_saliency.visualize.report.kept_scan import case_id
from monai_saliency.visualize.report.pages import case_page, cohort_page, rendered, scale_words
from monai_saliency.visualize.report.shown import Shown

__all__ = ["Compared", "Runs", "try_report", "write_comparison", "write_report"]

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
# Pages are made side by side: most of their time is reading and packing volumes. Each holds its volumes meanwhile.
_THREADS = 4


def write_report(folder: str | Path, title: str | None = None) -> Path:
    """Make the report of an output folder: ``report/index.html`` in it, which opens from disk, without a network.

    Where cases have label maps, ``cohort_regions.csv`` holds the mean of the maps in each region over the cohort
    (:func:`~monai_saliency.visualize.report.cohort_regions.cohort_regions`).

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
        _begin(report)
        explained = [case for case in cohort.cases if case.rows]
        around = zip([None, *explained[:-1]], [*explained[1:], None], strict=True)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            made = pool.map(partial(_write_case, report, cohort), explained, around)
        thumbnails = dict(zip([case.case for case in explained], made, strict=True))
        title = title or f"Saliency maps: {folder.resolve().name}"
        save_cohort_regions(folder, cohort)
        return _write(report / "index.html", cohort_page(cohort, title, thumbnails))


def write_comparison(folders: Sequence[str | Path], output_dir: str | Path, title: str | None = None) -> Path:
    """Make one report of several runs over one cohort, such as of several methods, seeds, checkpoints or fills.

    The report is a table of the maps of each case, class and channel, and how far they agree with the maps of the first
    run (:class:`~monai_saliency.metrics.MapAgreement`), or why they cannot be compared.

    Args:
        folders: the output folders of two or more runs.
        output_dir: gets a folder ``report`` with the page; not the output folder of a run.
        title: of the first page; by default the runs' names.

    Returns:
        the path of ``index.html``.

    Raises:
        ValueError: when a folder holds no table of cases, when one is given twice, or when ``output_dir`` is a run's.
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
        compared = sum(line.agreement is not None for line, _ in lines)
        sizes = [f"{name}: {len(cohort.cases)} cases" for name, cohort in zip(runs.names, runs.cohorts, strict=True)]
        page = rendered(
            "compared.html",
            title=title or f"Saliency maps compared: {', '.join(runs.names)}",
            first=runs.names[0],
            lines=lines,
            figures=[*sizes, f"{compared} pairs of maps compared", f"{len(lines) - compared} not"],
            classes=sorted({line.words for line, _ in lines if line.words}),
            scales=scale_words(runs.scales),
        )
        return _write(report / "index.html", page)


def try_report(folder: str | Path) -> None:
    """Make the report at the end of a run and print its path. A finished run never fails by it: an error is logged."""
    try:
        print(write_report(folder), flush=True)
    except Exception as error:
        logger.error(
            "the report of %s could not be made: %s. The maps are there; `python -m monai_saliency report FOLDER` "
            "tries again",
            folder,
            error,
        )


def _begin(report: Path) -> None:
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
    thumbnails = _write_thumbnails(report, case.id, [] if shown is None else shown.thumbnails())
    _write(report / "cases" / f"{case.id}.html", case_page(case, shown, problem, around, cohort.settings))
    return thumbnails


def _write_thumbnails(report: Path, name: str, pictures: Sequence[bytes]) -> list[str]:
    """Write pictures, and return their addresses."""
    addresses = [f"thumbnails/{name}-{place}.png" for place in range(len(pictures))]
    for address, picture in zip(addresses, pictures, strict=True):
        with atomic_path(report / address, durable=False) as temporary:
            temporary.write_bytes(picture)
    return addresses


def _write(path: Path, text: str) -> Path:
    with atomic_path(path, durable=False) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


# Several runs. --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One map of a case in the first run and in another."""

    case: str
    run: str
    words: str = ""
    rows: Sequence[Row] = ({}, {})
    agreement: MapAgreement | None = None
    problem: str = ""
    thumbnails: Sequence[bytes] = ()


class Runs:
    """The output folders of several runs over one cohort. Runs are compared with the first of them."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        paths = [Path(folder).resolve() for folder in folders]
        if len(paths) < 2 or len(set(paths)) < len(paths):
            raise ValueError(
                f"give the output folders of two runs or more, each once, got {', '.join(map(str, folders))}"
            )
        self.names = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
        self.cohorts = [read_cohort(folder) for folder in folders]
        self.scales = Cohort([case for cohort in self.cohorts for case in cohort.cases]).scales

    def compared(self) -> Iterator[Compared]:
        """Compare the maps of all cases, sorted by the cases' names."""
        first, *others = ({case.case: case for case in cohort.cases} for cohort in self.cohorts)
        for name in sorted(set(first).union(*others)):
            for run, cases in zip(self.names[1:], others, strict=True):
                try:
                    maps = _opened(first.get(name), self.names[0]), _opened(cases.get(name), run)
                    yield from self._of_case(first[name], cases[name], maps, run)
                except Exception as error:  # such as of a damaged file
                    yield Compared(name, run, problem=str(error))

    def _of_case(
        self, first: CaseFiles, second: CaseFiles, maps: tuple[MapFile, MapFile], run: str
    ) -> Iterator[Compared]:
        """Compare the maps of one case that explain the same class and channel."""
        if maps[0].shape != maps[1].shape:
            raise ValueError(f"the grids differ, {maps[0].shape} and {maps[1].shape} voxels: explain the same scans")
        if not np.allclose(maps[0].affine, maps[1].affine, rtol=1e-4, atol=1e-3):
            raise ValueError("the affines differ: explain the same scans")
        ours, theirs = ({_unnamed(row): place for place, row in enumerate(case.rows)} for case in (first, second))
        values = [file.read() for file in maps]
        pictures = [Shown.of(case, self.scales).thumbnails() for case in (first, second)]
        for words in dict.fromkeys([*ours, *theirs]):
            if words not in ours or words not in theirs:
                owner = self.names[0] if words in ours else run
                yield Compared(first.case, run, words, problem=f"only {owner} explains {words}")
                continue
            i, j = ours[words], theirs[words]
            thumbnails = [*pictures[0][i : i + 1], *pictures[1][j : j + 1]]
            rows = first.rows[i], second.rows[j]
            found = Compared(first.case, run, words, rows, problem=_difference(*rows), thumbnails=thumbnails)
            if found.problem:
                yield found
                continue
            agreement = map_agreement(values[0][i], values[1][j], maps[0].affine)
            if first.legends()[i].words != second.legends()[j].words:  # such as a change of the score and a variance
                agreement = replace(agreement, difference=math.nan)
            yield replace(found, agreement=agreement)


def _opened(case: CaseFiles | None, run: str) -> MapFile:
    """The maps of a case in a run; a ValueError with the reason if it has none."""
    if case is None:
        raise ValueError(f"not in {run}")
    if case.failure is not None and not case.rows:
        raise ValueError(f"failed in {run}: {case.failure.get('error', '')}")
    return case.open_maps()[0]


def _unnamed(row: Row) -> str:
    """The class of a row by its number: one run may know names that another does not."""
    return class_words({**row, "class_name": ""})


def _difference(first: Row, second: Row) -> str:
    """Why two maps are not of one score of one scan; empty where they are."""
    for key, what in (("scan", "scans"), ("quantity", "scores"), ("unit", "scores")):
        ours, theirs = first.get(key, ""), second.get(key, "")
        if ours != theirs and (key != "scan" or (ours and theirs)):
            return f"the {what} differ: `{key}` is {ours!r} and {theirs!r}"
    return ""
