"""The report of several runs over one cohort: how far their maps agree."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from monai_saliency.metrics.agreement import MapAgreement, map_agreement
from monai_saliency.storage.files import locked
from monai_saliency.visualize.report.build import begin_report, rendered, write_page, write_thumbnails
from monai_saliency.visualize.report.cases import CaseFiles, Cohort, Row, class_words, read_cohort
from monai_saliency.visualize.report.kept_scan import case_id
from monai_saliency.visualize.report.shown import Shown


def write_comparison(folders: Sequence[str | Path], output_dir: str | Path) -> Path:
    """Make one report of several runs over one cohort, such as of several methods, seeds, checkpoints or fills.

    The report is a table of the maps of each case, class and channel, and how far they agree with the maps of the first
    run (:class:`~monai_saliency.metrics.MapAgreement`), or why they cannot be compared. Cases that the runs predict
    differently come first.

    Args:
        folders: the output folders of two or more runs.
        output_dir: gets a folder ``report`` with the page; not the output folder of a run.

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
        for number, line in enumerate(sorted(runs.compared(), key=lambda line: not line.is_flipped)):
            lines.append((line, write_thumbnails(report, f"{case_id(line.case)}-{number}", line.thumbnails)))
        compared = sum(line.agreement is not None for line, _ in lines)
        sizes = [f"{name}: {len(cohort.cases)} cases" for name, cohort in zip(runs.names, runs.cohorts, strict=True)]
        cases = len({line.case for line, _ in lines if line.is_flipped})
        flipped = [f"cases predicted differently: {cases}"] if cases else []
        page = rendered(
            "compared.html",
            title=f"Saliency maps compared: {', '.join(runs.names)}",
            first=runs.names[0],
            lines=lines,
            figures=[*sizes, f"{compared} pairs of maps compared", f"{len(lines) - compared} not", *flipped],
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
    predictions: Sequence[str] = ("", "")

    @property
    def is_flipped(self) -> bool:
        """Whether the runs predict the case differently."""
        return "" not in self.predictions and len(set(self.predictions)) > 1


class Runs:
    """The output folders of several runs over one cohort. Runs are compared with the first of them."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        paths = [Path(folder).resolve() for folder in folders]
        if len(set(paths)) < len(paths):
            raise ValueError(f"give the output folders of several runs, each once, got {', '.join(map(str, folders))}")
        self.names = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
        self.cohorts = [read_cohort(folder) for folder in folders]
        self.scales = Cohort([case for cohort in self.cohorts for case in cohort.cases]).scales

    def compared(self) -> Iterator[Compared]:
        """Compare the maps of all cases, sorted by the cases' names."""
        first, *others = ({case.case: case for case in cohort.cases} for cohort in self.cohorts)
        for name in sorted(set(first).union(*others)):
            for run, cases in zip(self.names[1:], others, strict=True):
                try:
                    ours = _Maps(first.get(name), self.names[0], self.scales)
                    yield from _of_case(ours, _Maps(cases.get(name), run, self.scales))
                except Exception as error:  # such as of a damaged file
                    yield Compared(name, run, problem=str(error))


class _Maps:
    """The maps of a case in a run: their file, small pictures of the first of them, and their places by what they
    explain; a ValueError with the reason if the run has none.
    """

    def __init__(self, case: CaseFiles | None, run: str, scales: Mapping[str, float]) -> None:
        if case is None:
            raise ValueError(f"not in {run}")
        if case.failure is not None and not case.rows:
            raise ValueError(f"failed in {run}: {case.failure.get('error', '')}")
        if case.nothing and not case.rows:
            raise ValueError(f"nothing to explain in {run}: {case.nothing}")
        self.case, self.run = case, run
        self.pictures = [] if case.kept is None else Shown.of(case, scales).thumbnails()
        self.class_names = {} if case.kept is None else case.kept.class_names
        self.file, _ = case.open_maps()
        # By the class's number: one run may know names that another does not.
        self.places = {class_words({**row, "class_name": ""}): place for place, row in enumerate(case.rows)}

    @cached_property
    def values(self) -> np.ndarray:
        """``(K, *spatial)``."""
        return self.file.read()

    def meaning(self, place: int) -> str:
        """What the values of a map are; empty where no scan was kept."""
        return "".join(legend.words for legend in self.case.legends[place : place + 1])


def _of_case(ours: _Maps, theirs: _Maps) -> Iterator[Compared]:
    """Compare the maps of one case that explain the same class and channel."""
    if ours.file.shape != theirs.file.shape:
        shapes = f"{ours.file.shape} and {theirs.file.shape}"
        raise ValueError(f"the grids differ, {shapes} voxels: explain the same scans")
    if not np.allclose(ours.file.affine, theirs.file.affine, rtol=1e-4, atol=1e-3):
        raise ValueError("the affines differ: explain the same scans")
    # By a name if one of the runs knows it.
    names = ours.class_names | theirs.class_names
    predicted = [maps.case.rows[0].get("prediction", "") for maps in (ours, theirs)]
    predictions = [names.get(each, each) for each in predicted]
    for words in dict.fromkeys([*ours.places, *theirs.places]):
        shared = words in ours.places and words in theirs.places
        line = _compared(ours, theirs, words) if shared else _alone(ours, theirs, words)
        yield replace(line, predictions=predictions)


def _alone(ours: _Maps, theirs: _Maps, words: str) -> Compared:
    """The line of a map that only one of two runs has."""
    owner = ours if words in ours.places else theirs
    place = owner.places[words]
    rows = [owner.case.rows[place] if maps is owner else {} for maps in (ours, theirs)]
    problem = f"only {owner.run} explains {words}: give both runs the same list of classes"
    return Compared(ours.case.case, theirs.run, words, rows, None, problem, owner.pictures[place : place + 1])


def _compared(ours: _Maps, theirs: _Maps, words: str) -> Compared:
    """Compare the maps of two runs that explain the same class and channel."""
    i, j = ours.places[words], theirs.places[words]
    rows = ours.case.rows[i], theirs.case.rows[j]
    pictures = [*ours.pictures[i : i + 1], *theirs.pictures[j : j + 1]]
    problem, agreement = _difference(*rows), None
    if not problem:
        agreement = map_agreement(ours.values[i], theirs.values[j], ours.file.affine)
        if ours.meaning(i) != theirs.meaning(j):  # such as a change of the score and a variance
            agreement = replace(agreement, difference=math.nan)
    return Compared(ours.case.case, theirs.run, words, rows, agreement, problem, pictures)


def _difference(first: Row, second: Row) -> str:
    """Why two maps are not of one score of one scan; empty where they are."""
    for column, what in (("scan", "scans"), ("quantity", "scores"), ("unit", "scores")):
        ours, theirs = first.get(column, ""), second.get(column, "")
        is_known = column != "scan" or (ours and theirs)
        if ours != theirs and is_known:
            return f"the {what} differ: `{column}` is {ours!r} and {theirs!r}"
    return ""
