"""Several runs over one cohort, case by case: their maps, the differences of these, and how far they agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from monai_saliency.metrics.map_agreement import MapAgreement, map_agreement
from monai_saliency.visualize.legend import Legend
from monai_saliency.visualize.report.cases import CaseFiles, MapFile, Row, class_words, read_cohort
from monai_saliency.visualize.report.kept_scan import KeptScan
from monai_saliency.visualize.report.shown import Layer, Shown, laid_out

__all__ = ["Compared", "ComparedCase", "Runs", "run_names"]


@dataclass(frozen=True)
class Compared:
    """One map of a case in the first run and in another.

    Attributes:
        words: which map, such as ``"class 1"``; empty where a run has none of this case.
        run: the name of the other run.
        first, second: its rows of ``summary.csv`` in both runs; None where a run has no such map.
        agreement: how far the maps agree; None where they cannot be compared.
        problem: why they cannot be compared, or why there is no difference map.
    """

    words: str
    run: str
    first: Row | None = None
    second: Row | None = None
    agreement: MapAgreement | None = None
    problem: str = ""


@dataclass(frozen=True)
class ComparedCase:
    """A case in all runs.

    Attributes:
        first: the name of the first run, with which the others are compared.
        files: what the runs have of it, as one case: each row of its tables has the run's name under ``"run"``.
        lines: its maps in the first run and in each other.
        shown: its maps and their differences; None where no two runs have maps on one grid.
    """

    first: str
    files: CaseFiles
    lines: Sequence[Compared]
    shown: Shown | None = None

    def places(self, line: Compared) -> list[int]:
        """Which of the shown maps are a line's: the first run's, the other's, and their difference."""
        names = [] if self.shown is None else [each["name"] for each in self.shown.data["maps"]]
        wanted = [f"{self.first}: {line.words}"] * (line.first is not None)
        wanted += [f"{line.run}: {line.words}"] * (line.second is not None)
        wanted += [f"{line.words}: {line.run} minus {self.first}"]
        return [names.index(each) for each in wanted if each in names]


class Runs:
    """The output folders of several runs over one cohort. Runs are compared with the first of them.

    Raises:
        ValueError: when there are fewer than two folders, when one is given twice, or when one holds no table of cases.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.names = run_names(folders)
        self.cohorts = [read_cohort(folder) for folder in folders]
        self.scales: dict[str, float] = {}
        for cohort in self.cohorts:
            for words, scale in cohort.scales.items():
                self.scales[words] = max(self.scales.get(words, 0.0), scale)
        self._cases = [{case.case: case for case in cohort.cases} for cohort in self.cohorts]

    @property
    def cases(self) -> list[str]:
        """The names of the cases of any run, sorted."""
        return sorted({name for cases in self._cases for name in cases})

    def case(self, name: str) -> ComparedCase:
        """Compare the maps of one case."""
        found = [(run, cases.get(name)) for run, cases in zip(self.names, self._cases, strict=True)]
        rows = [{**row, "run": run} for run, each in found if each is not None for row in each.rows]
        regions = [{**row, "run": run} for run, each in found if each is not None for row in each.regions]
        first, *others = (_opened(case, run) for run, case in found)
        lines: list[Compared] = []
        together: list[_Maps] = []
        for run, other in zip(self.names[1:], others, strict=True):
            problem = "; ".join(each for each in (first, other) if isinstance(each, str))
            if isinstance(first, _Maps) and isinstance(other, _Maps):
                problem = first.other_scan(other)
                together += [other] * (not problem)
            if problem:
                lines.append(Compared("", run, problem=problem))
        if isinstance(first, str) or not together:
            return ComparedCase(self.names[0], CaseFiles(name, rows, regions=regions), lines)
        kept, has_scan = _kept(name, [first, *together])
        layers = [layer for each in (first, *together) for layer in each.layers(kept)]
        for other in together:
            for words in dict.fromkeys([*first.rows, *other.rows]):
                line, layer = first.against(other, words, kept, self.scales)
                lines.append(line)
                layers += [] if layer is None else [(f"{words}: {other.run} minus {first.run}", layer)]
        names = {each.run for each in (first, *together)}
        files = CaseFiles(name, [row for row in rows if row["run"] in names], regions=regions)
        return ComparedCase(self.names[0], files, lines, laid_out(name, kept, has_scan, layers, self.scales))


@dataclass(frozen=True)
class _Maps:
    """The maps of one case in one run."""

    run: str
    case: CaseFiles
    file: MapFile
    values: np.ndarray
    errors: np.ndarray | None
    legends: Sequence[Legend]

    @property
    def rows(self) -> dict[str, int]:
        """The number of each map."""
        return {class_words(row): number for number, row in enumerate(self.case.rows)}

    def other_scan(self, other: _Maps) -> str:
        """Why the voxels of two runs are not the same places of one scan; empty where they are."""
        ours, theirs = ({row["scan"] for row in each.case.rows if row.get("scan")} for each in (self, other))
        if ours and theirs and ours != theirs:
            return (
                f"the maps are of different scans of this name: `scan` is {', '.join(sorted(map(str, ours)))} in "
                f"{self.run}, {', '.join(sorted(map(str, theirs)))} in {other.run}. Explain the same files (images "
                "without a file must be preprocessed alike)"
            )
        if self.file.shape != other.file.shape:
            return (
                f"the grids differ: {self.file.shape} voxels in {self.run}, {other.file.shape} in {other.run}. Explain "
                "the same scans"
            )
        if not np.allclose(self.file.affine, other.file.affine, rtol=1e-4, atol=1e-3):
            return f"the affines differ between {self.run} and {other.run}: explain the same scans"
        return ""

    def layers(self, kept: KeptScan) -> list[tuple[str, Layer]]:
        found = []
        for place, row in enumerate(self.case.rows):
            error = None if self.errors is None else self.errors[place][kept.part]
            layer = Layer.of(self.values[place][kept.part], error, self.legends[place])
            found.append((f"{self.run}: {class_words(row)}", layer))
        return found

    def against(
        self, other: _Maps, words: str, kept: KeptScan, scales: Mapping[str, float]
    ) -> tuple[Compared, Layer | None]:
        """One map compared with the other run's of the same class and channel, and their difference."""
        i, j = self.rows.get(words), other.rows.get(words)
        first, second = None if i is None else self.case.rows[i], None if j is None else other.case.rows[j]
        line = Compared(words, other.run, first, second)
        if i is None or j is None:
            return replace(line, problem=f"only {self.run if j is None else other.run} explains {words}"), None
        for key in ("quantity", "unit"):
            ours, theirs = ((row or {}).get(key, "") for row in (first, second))
            if ours != theirs:
                problem = (
                    f"the scores differ: {self.run} explains the {key} {ours or 'unknown'!r}, {other.run} "
                    f"{theirs or 'unknown'!r}, so their maps are not compared"
                )
                return replace(line, problem=problem), None
        try:
            agreement = map_agreement(self.values[i], other.values[j], self.file.affine)
        except ValueError as error:
            return replace(line, problem=f"the maps cannot be compared: {error}"), None
        legend, another = self.legends[i], other.legends[j]
        if legend.words != another.words or legend.in_score_unit != another.in_score_unit:
            problem = f"no difference map: one map is {legend.words!r}, the other {another.words!r}"
            return replace(line, agreement=replace(agreement, difference=math.nan), problem=problem), None
        scale = scales.get(legend.words, max(legend.scale, another.scale))
        title = f"difference, {other.run} minus {self.run}: {legend.words}"
        legend = replace(legend, scale=scale, words=title, signed=True, noise=0.0)
        difference = (other.values[j] - self.values[i])[kept.part]
        return replace(line, agreement=agreement), Layer.of(difference, None, legend)


def run_names(folders: Sequence[str | Path]) -> list[str]:
    """The names of runs: the last parts of their folders, as many as tell them apart.

    Raises:
        ValueError: when there are fewer than two folders, or when one is given twice.
    """
    if len(folders) < 2:
        raise ValueError(f"a comparison needs the output folders of two runs or more, got {len(folders)}")
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"each run must be given once, got {', '.join(map(str, folders))}")
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return [Path(*path.parts[-length:]).as_posix() for path in paths]


def _opened(case: CaseFiles | None, run: str) -> _Maps | str:
    """The maps of a case in a run, or why there are none."""
    if case is None:
        return f"not in {run}"
    if not case.rows:
        return f"failed in {run}: {case.failure.get('error', '') if case.failure is not None else ''}"
    if case.map_files[0] is None:
        return f"its map is not in the folder of {run} any more"
    try:
        file, errors = case.open_maps()
        return _Maps(run, case, file, file.read(), None if errors is None else errors.read(), case.legends())
    except ValueError as error:
        return f"{run}: {error}"


def _kept(name: str, runs: Sequence[_Maps]) -> tuple[KeptScan, bool]:
    """The scan that a run has kept, and whether one has; else the places of all voxels that are shown."""
    for each in runs:
        kept = each.case.kept
        if kept is not None and kept.lies_on(each.file.shape, each.file.affine):
            return kept, True
    first = runs[0]
    maps = np.concatenate([each.values for each in runs])
    legends = [legend for each in runs for legend in each.legends]
    nothing = np.zeros(first.file.shape, np.float32)
    return KeptScan.of(name, nothing, maps, first.file.affine, legends, layers=2 * len(maps)), False
