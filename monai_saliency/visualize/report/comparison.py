"""Several runs over one cohort, case by case: what their maps are beside each other, and how far they agree."""

from __future__ import annotations

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
        first: its row of the first run's ``summary.csv``; None where that run has no such map.
        second: its row of the other run's.
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


class Runs:
    """The output folders of several runs over one cohort. Runs are compared with the first of them.

    Args:
        folders: two or more output folders.

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
        found = [cases.get(name) for cases in self._cases]
        named = [(run, each) for run, each in zip(self.names, found, strict=True) if each is not None]
        rows = [{**row, "run": run} for run, each in named for row in each.rows]
        regions = [{**row, "run": run} for run, each in named for row in each.regions]
        files = CaseFiles(name, rows, regions=regions)
        opened: list[_Maps | str] = [
            _opened(each, run, scales=self.scales) for run, each in zip(self.names, found, strict=True)
        ]
        first, *others = opened
        lines: list[Compared] = []
        layers: list[tuple[str, Layer]] = []
        beside: list[_Maps] = []
        for run, other in zip(self.names[1:], others, strict=True):
            if isinstance(first, str) or isinstance(other, str):
                problem = "; ".join(each for each in (first, other) if isinstance(each, str))
                lines.append(Compared("", run, problem=problem))
            elif reason := first.other_scan(other):
                lines.append(Compared("", run, problem=reason))
            else:
                beside.append(other)
        if isinstance(first, str) or not beside:
            return ComparedCase(self.names[0], files, lines)
        together = [first, *beside]
        kept, has_scan = _kept(name, together)
        for each in together:
            layers += each.layers(kept)
        for other in beside:
            for line, difference in first.against(other):
                lines.append(line)
                if difference is not None:
                    layers.append((f"{line.words}: {other.run} minus {first.run}", difference.shown(kept)))
        shown_rows = [row for row in rows if row["run"] in {each.run for each in together}]
        files = replace(files, rows=shown_rows)
        return ComparedCase(self.names[0], files, lines, laid_out(name, kept, has_scan, layers, self.scales))


@dataclass(frozen=True)
class _Difference:
    """The difference of two maps ``(*spatial)``, and what its colours mean."""

    values: np.ndarray
    legend: Legend

    def shown(self, kept: KeptScan) -> Layer:
        return Layer.of(self.values[kept.part], None, self.legend)


@dataclass(frozen=True)
class _Maps:
    """The maps of one case in one run."""

    run: str
    case: CaseFiles
    file: MapFile
    values: np.ndarray
    errors: np.ndarray | None
    legends: Sequence[Legend]
    scales: Mapping[str, float]

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
        errors = [None] * len(self.values) if self.errors is None else [each[kept.part] for each in self.errors]
        values = [each[kept.part] for each in self.values]
        made = [Layer.of(*each) for each in zip(values, errors, self.legends, strict=True)]
        return [(f"{self.run}: {class_words(row)}", layer) for row, layer in zip(self.case.rows, made, strict=True)]

    def against(self, other: _Maps) -> list[tuple[Compared, _Difference | None]]:
        """Each map beside the other run's of the same class and channel."""
        ours, theirs = ({class_words(row): i for i, row in enumerate(each.case.rows)} for each in (self, other))
        found: list[tuple[Compared, _Difference | None]] = []
        for words in dict.fromkeys([*ours, *theirs]):
            if words in ours and words in theirs:
                found.append(self._pair(words, other, ours[words], theirs[words]))
                continue
            run, rows = (self.run, self.case.rows) if words in ours else (other.run, other.case.rows)
            line = Compared(words, other.run, problem=f"only {run} explains {words}")
            row = rows[(ours if words in ours else theirs)[words]]
            found.append((replace(line, first=row) if words in ours else replace(line, second=row), None))
        return found

    def _pair(self, words: str, other: _Maps, i: int, j: int) -> tuple[Compared, _Difference | None]:
        first, second = self.case.rows[i], other.case.rows[j]
        line = Compared(words, other.run, first, second)
        for key in ("quantity", "unit"):
            if first.get(key, "") != second.get(key, ""):
                problem = (
                    f"the scores differ: {self.run} explains the {key} {first.get(key) or 'unknown'!r}, {other.run} "
                    f"{second.get(key) or 'unknown'!r}, so their maps are not compared"
                )
                return replace(line, problem=problem), None
        try:
            agreement = map_agreement(self.values[i], other.values[j], self.file.affine)
        except ValueError as error:
            return replace(line, problem=f"the maps cannot be compared: {error}"), None
        ours, theirs = self.legends[i], other.legends[j]
        if ours.words != theirs.words or ours.in_score_unit != theirs.in_score_unit:
            problem = f"no difference map: one map is {ours.words!r}, the other {theirs.words!r}"
            return replace(line, agreement=replace(agreement, difference=float("nan")), problem=problem), None
        scale = self.scales.get(ours.words, max(ours.scale, theirs.scale))
        legend = replace(
            ours, scale=scale, words=f"difference, {other.run} minus {self.run}: {ours.words}", signed=True, noise=0.0
        )
        difference = other.values[j].astype(np.float32) - self.values[i].astype(np.float32)
        return replace(line, agreement=agreement), _Difference(difference, legend)


def run_names(folders: Sequence[str | Path]) -> list[str]:
    """What runs are called: the last parts of their folders, as many as tell them apart.

    Raises:
        ValueError: when there are fewer than two folders, or when one is given twice.

    Example::

        >>> run_names(["rise/eval", "windows/eval"]), run_names(["out/a", "out/b"])
        (['rise/eval', 'windows/eval'], ['a', 'b'])
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


def _opened(case: CaseFiles | None, run: str, scales: Mapping[str, float]) -> _Maps | str:
    """The maps of a case in a run, or why there are none."""
    if case is None:
        return f"not in {run}"
    if not case.rows:
        return f"failed in {run}: {case.failure.get('error', '') if case.failure is not None else ''}"
    if case.map_file is None:
        return f"its map is not in the folder of {run} any more"
    count = len(case.rows)
    try:
        file = MapFile.open(case.map_file, count)
        errors = None if case.error_file is None else MapFile.open(case.error_file, count)
        same = errors is not None and errors.shape == file.shape
        legends = case.legends(count)
        return _Maps(run, case, file, file.read(), errors.read() if errors and same else None, legends, scales)
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
