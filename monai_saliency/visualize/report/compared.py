"""The report of several runs over one cohort: how far their maps agree."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from monai_saliency.metrics.agreement import MapAgreement, map_agreement
from monai_saliency.storage.files import locked
from monai_saliency.visualize.report.build import begin_report, rendered, write_page, write_thumbnails
from monai_saliency.visualize.report.cases import CaseFiles, Cohort, MapFile, Row, case_id, class_words, read_cohort
from monai_saliency.visualize.report.shown import Shown

__all__ = ["Compared", "Runs", "write_comparison"]


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
        begin_report(report)
        lines = []
        for number, line in enumerate(runs.compared()):
            lines.append((line, write_thumbnails(report, f"{case_id(line.case)}-{number}", line.thumbnails)))
        compared = sum(line.agreement is not None for line, _ in lines)
        sizes = [f"{name}: {len(cohort.cases)} cases" for name, cohort in zip(runs.names, runs.cohorts, strict=True)]
        page = rendered(
            "compared.html",
            title=title or f"Saliency maps compared: {', '.join(runs.names)}",
            first=runs.names[0],
            lines=lines,
            figures=[*sizes, f"{compared} pairs of maps compared", f"{len(lines) - compared} not"],
            classes=sorted({line.words for line, _ in lines if line.words}),
            scales=runs.scales,
        )
        return write_page(report / "index.html", page)


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
