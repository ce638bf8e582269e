"""Several runs over one cohort, map by map: how far they agree with those of the first run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from monai_saliency.metrics.map_agreement import MapAgreement, map_agreement
from monai_saliency.visualize.report.cases import CaseFiles, MapFile, Row, class_words, read_cohort
from monai_saliency.visualize.report.shown import Shown

__all__ = ["Compared", "Runs"]


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
        if len(paths) < 2:
            raise ValueError(f"a comparison needs the output folders of two runs or more, got {len(paths)}")
        if len(set(paths)) < len(paths):
            raise ValueError(f"each run must be given once, got {', '.join(map(str, folders))}")
        # As many of the last parts of their folders as tell the runs apart.
        length = next(n for n in range(1, 1000) if len({path.parts[-n:] for path in paths}) == len(paths))
        self.names = [Path(*path.parts[-length:]).as_posix() for path in paths]
        self.cohorts = [read_cohort(folder) for folder in folders]
        self.scales: dict[str, float] = {}
        for cohort in self.cohorts:
            for words, scale in cohort.scales.items():
                self.scales[words] = max(self.scales.get(words, 0.0), scale)

    def compared(self) -> Iterator[Compared]:
        """Compare the maps of all cases, sorted by the cases' names."""
        first, *others = ({case.case: case for case in cohort.cases} for cohort in self.cohorts)
        for name in sorted(set(first).union(*others)):
            for run, cases in zip(self.names[1:], others, strict=True):
                try:
                    maps = _opened(first.get(name), self.names[0]), _opened(cases.get(name), run)
                    self._check_grids(*maps, run)
                    yield from self._of_case(first[name], cases[name], maps, run)
                except ValueError as error:
                    yield Compared(name, run, problem=str(error))

    def _check_grids(self, first: MapFile, second: MapFile, run: str) -> None:
        if first.shape != second.shape:
            raise ValueError(
                f"the grids differ: {first.shape} voxels in {self.names[0]}, {second.shape} in {run}. Explain the same "
                "scans"
            )
        if not np.allclose(first.affine, second.affine, rtol=1e-4, atol=1e-3):
            raise ValueError(f"the affines differ between {self.names[0]} and {run}: explain the same scans")

    def _of_case(
        self, first: CaseFiles, second: CaseFiles, maps: tuple[MapFile, MapFile], run: str
    ) -> Iterator[Compared]:
        """Compare the maps of one case that explain the same class and channel."""
        ours, theirs = ({class_words(row): place for place, row in enumerate(case.rows)} for case in (first, second))
        values = [file.read() for file in maps]
        pictures = [Shown.of(case, self.scales).thumbnails() for case in (first, second)]
        for words in dict.fromkeys([*ours, *theirs]):
            if words not in ours or words not in theirs:
                owner = self.names[0] if words in ours else run
                yield Compared(first.case, run, words, problem=f"only {owner} explains {words}")
                continue
            i, j = ours[words], theirs[words]
            found = Compared(first.case, run, words, (first.rows[i], second.rows[j]))
            found = replace(found, thumbnails=[*pictures[0][i : i + 1], *pictures[1][j : j + 1]])
            if problem := self._difference(first.rows[i], second.rows[j], run):
                yield replace(found, problem=problem)
                continue
            agreement = map_agreement(values[0][i], values[1][j], maps[0].affine)
            if first.legends()[i].words != second.legends()[j].words:  # such as a change of the score and a variance
                agreement = replace(agreement, difference=math.nan)
            yield replace(found, agreement=agreement)

    def _difference(self, first: Row, second: Row, run: str) -> str:
        """Why two maps are not of one score of one scan; empty where they are."""
        for key, what in (("scan", "scans"), ("quantity", "scores"), ("unit", "scores")):
            ours, theirs = first.get(key, ""), second.get(key, "")
            if ours != theirs and (key != "scan" or (ours and theirs)):
                return f"the {what} differ: `{key}` is {ours!r} in {self.names[0]}, {theirs!r} in {run}"
        return ""


def _opened(case: CaseFiles | None, run: str) -> MapFile:
    """The maps of a case in a run; ValueError says why there are none."""
    if case is None:
        raise ValueError(f"not in {run}")
    if case.failure is not None and not case.rows:
        raise ValueError(f"failed in {run}: {case.failure.get('error', '')}")
    try:
        return case.open_maps()[0]
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from error
