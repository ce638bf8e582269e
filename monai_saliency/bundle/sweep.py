"""One table and one plot of a sweep, whose settings each wrote to a folder: ``python -m monai_saliency gather``."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monai_saliency.bundle.folder_names import settings_of
from monai_saliency.handlers.summary import Summary, figures
from monai_saliency.metrics.agreement import read_map
from monai_saliency.storage.failures import Failures
from monai_saliency.storage.files import atomic_path
from monai_saliency.storage.tables import CaseTable
from monai_saliency.utils.optional_imports import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Setting", "Sweep", "gather", "plot_sweep"]

FIGURES = ("cases", "missing", "failures", "forwards", "seconds", "mean_score", "mean_peak_saliency", "hits")
AGREEMENT = ("agreement", "compared")

# Maps are smooth: a correlation over so many voxels, drawn at random, is that over all to about 0.002.
_VOXELS = 2**18


@dataclass
class Setting:
    """One setting of a sweep, and what its run has come to.

    Attributes:
        name: of its folder.
        folder: in which its run has put maps and tables.
        values: its settings, by id, in the order of the name.
        rows: of its ``summary.csv``.
        failures: rows of its ``failures.csv``.
        missing: the cases that it has no map of, while another setting knows them; those that failed are among them.
        agreement: the mean of its maps' correlations with those of the sweep's reference, in [-1, 1]; see
            :class:`Sweep`. None where there is nothing to correlate.
        compared: over how many cases that is a mean.
    """

    name: str
    folder: Path
    values: dict[str, str]
    rows: list[dict[str, str]]
    failures: list[dict[str, str]]
    missing: list[str] = field(default_factory=list)
    agreement: float | None = None
    compared: int = 0

    @property
    def cases(self) -> set[str]:
        """The cases that it has maps of."""
        return {row["case"] for row in self.rows}

    @property
    def figures(self) -> dict[str, float]:
        """The cohort's figures (:func:`monai_saliency.handlers.summary.figures`), ``hits`` being their
        ``peak_in_label``.
        """
        found = figures(self.rows, len(self.failures)) | {"missing": len(self.missing)}
        if "peak_in_label" in found:
            found["hits"] = found.pop("peak_in_label")
        return found

    @property
    def forwards_per_case(self) -> float:
        """The forwards of an explained case, on average; 0 without one."""
        found = self.figures
        return found["forwards"] / found["cases"] if found["cases"] else 0.0

    @property
    def complete(self) -> bool:
        """Whether it has maps, and lacks none."""
        return bool(self.rows) and not self.missing and not self.failures


@dataclass
class Sweep:
    """A sweep's settings, and how far their maps agree.

    Two settings agree on a case by the Pearson correlation of their maps over the scan's voxels: 1 where one map is the
    other one scaled or shifted, 0 where they have nothing in common, -1 where one is the other's negative. (Not by that
    of their ranks, which the many voxels that do not matter would decide.) Where a case has several maps, those of one
    class and channel are correlated, and the mean counts. Maps that are flat or of different shapes, and classes that
    one of the two does not explain, have no correlation and are left out.

    Attributes:
        settings: in the order of their names, numbers by size.
        matrix: ``(S, S)``, the agreement of each setting with each: the mean over the cases; NaN where there is none.
        reference: the index of the setting that the others' ``agreement`` is with.
    """

    settings: list[Setting]
    matrix: np.ndarray
    reference: int

    @property
    def ids(self) -> list[str]:
        """The ids of all settings, in the order in which names have them."""
        return list(dict.fromkeys(name for setting in self.settings for name in setting.values))

    @property
    def complete(self) -> bool:
        """Whether every setting has a map of every case."""
        return all(setting.complete for setting in self.settings)

    def __str__(self) -> str:
        known = {row["case"] for setting in self.settings for row in [*setting.rows, *setting.failures]}
        lines = [
            f"settings: {len(self.settings)}, of {len(known)} cases",
            f"agreement is with {self.settings[self.reference].name}",
        ]
        for setting in self.settings:
            if not setting.complete:
                names = ", ".join(setting.missing[:5]) + ", ..." * (len(setting.missing) > 5)
                line = f"not complete: {setting.name}: maps of {len(setting.cases)} cases"
                line += f", none of {len(setting.missing)} ({names})" if names else ""
                if setting.failures:
                    first = setting.failures[0]
                    line += f"; {len(setting.failures)} failed, the first is {first['case']}: {first['error']}"
                lines.append(line)
        return "\n".join(lines)

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``sweep.csv`` (a row a setting), ``sweep_agreement.csv`` (the matrix) and ``sweep.png``.

        ``sweep.csv`` has each setting's folder and settings, then ``cases``, ``missing`` and ``failures``, the sums
        ``forwards`` and ``seconds``, the means ``mean_score``, ``mean_peak_saliency`` and ``hits`` (the share of peaks
        inside their label), ``agreement``, and ``compared``, the number of cases that this is a mean of. What a setting
        does not have is empty.

        Returns:
            the files.
        """
        folder = Path(folder)
        rows: list[list[Any]] = [["setting", *self.ids, *FIGURES, *AGREEMENT]]
        for setting in self.settings:
            found: dict[str, float | None] = {**setting.figures, "agreement": setting.agreement}
            numbers = [*map(found.get, FIGURES), setting.agreement, setting.compared]
            rows.append([setting.name, *(setting.values.get(name, "") for name in self.ids), *map(_cell, numbers)])
        names = [setting.name for setting in self.settings]
        matrix: list[list[Any]] = [["setting", *names]]
        matrix += [[name, *map(_cell, values)] for name, values in zip(names, self.matrix.tolist(), strict=True)]
        written = []
        for name, table in (("sweep.csv", rows), ("sweep_agreement.csv", matrix)):
            written.append(folder / name)
            with atomic_path(written[-1]) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(table)
        written.append(folder / "sweep.png")
        with atomic_path(written[-1]) as temporary:
            plot_sweep(self).savefig(temporary, dpi=100)
        return written


def _cell(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.10g}"


def gather(sweep_dir: str | Path, reference: str | None = None) -> Sweep:
    """Read what the runs of a sweep have come to so far; nothing is written, and none need have ended.

    Args:
        sweep_dir: its folders are the settings: those that are named ``id=value,id=value``, and others that hold a
            ``summary.csv``. Of a bundle that is not ours, tables and maps may also be in their folder ``saliency``.
        reference: the setting with whose maps the others are compared. By default the one with the most forwards a
            case, as maps get better with them. (Forwards and seconds are what the last run of a case has spent on it:
            less where that took up scores of earlier ones, or the scores of others who shared its masks.)

    Raises:
        ValueError: when there are no settings, not the one named, or a map that cannot be read.
    """
    settings = _settings(Path(sweep_dir))
    known = {row["case"] for setting in settings for row in [*setting.rows, *setting.failures]}
    for setting in settings:
        setting.missing = sorted(known - setting.cases)
    names = [setting.name for setting in settings]
    if reference is not None and reference not in names:
        raise ValueError(f"there is no setting {reference!r}: choose one of {', '.join(names)}")
    chosen = (
        names.index(reference)
        if reference is not None
        else max(range(len(settings)), key=lambda index: settings[index].forwards_per_case)
    )
    sums, counts = np.zeros((2, len(settings), len(settings)))
    for case in sorted(known):
        correlations = _correlations(settings, case)
        sums += np.nan_to_num(correlations)
        counts += ~np.isnan(correlations)
    matrix = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    for setting, value, count in zip(settings, matrix[chosen], counts[chosen], strict=True):
        setting.agreement, setting.compared = (float(value) if count else None), int(count)
    return Sweep(settings, matrix, chosen)


def _settings(sweep_dir: Path) -> list[Setting]:
    if not sweep_dir.is_dir():
        raise ValueError(f"{sweep_dir} is no folder: give the one below which the sweep's output folders are")
    settings = []
    for folder in sweep_dir.iterdir():
        home = next((home for home in (folder, folder / "saliency") if (home / "summary.csv").is_file()), None)
        values = settings_of(folder.name)
        # A setting whose job has no table yet counts too.
        if folder.is_dir() and (home is not None or values):
            home = home or folder
            failures = CaseTable(home / "failures.csv", Failures.COLUMNS).read()
            settings.append(Setting(folder.name, home, values, Summary(home / "summary.csv").read(), failures))
    if not settings:
        raise ValueError(
            f"{sweep_dir} holds no settings: folders named id=value,id=value, or with a summary.csv in them"
        )
    # So that num_masks=500 stands before num_masks=1000.
    return sorted(
        settings, key=lambda setting: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", setting.name)]
    )


def _correlations(settings: Sequence[Setting], case: str) -> np.ndarray:
    """The correlations ``(S, S)`` of the settings' maps of one case; NaN where there is none."""
    found: dict[Any, list[tuple[int, np.ndarray]]] = {}
    for index, setting in enumerate(settings):
        for key, values in _maps(setting, case):
            found.setdefault(key, []).append((index, values))
    sums, counts = np.zeros((2, len(settings), len(settings)))
    for same in found.values():
        place = np.ix_(*[[index for index, _ in same]] * 2)
        values = np.stack([each for _, each in same])
        sums[place] += (values @ values.T).clip(-1, 1)
        counts[place] += 1
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _maps(setting: Setting, case: str) -> Iterator[tuple[Any, np.ndarray]]:
    """What a setting's maps of a case show, with their shape, and their voxels of mean 0 and norm 1."""
    rows = [row for row in setting.rows if row["case"] == case]
    path = setting.folder / f"{case}_saliency.nii.gz"
    if not rows or not path.is_file():
        return
    voxels, _ = read_map(path)
    maps = [voxels] if len(rows) == 1 else np.moveaxis(voxels, -1, 0)
    for row, each in zip(rows, maps, strict=False):
        values = each.ravel()
        if values.size > _VOXELS:
            values = values[np.random.default_rng(0).integers(values.size, size=_VOXELS)]
        # A flat map has no correlation with anything.
        if np.isfinite(values).all() and values.min() < values.max():
            centred = values.astype(np.float64) - values.mean(dtype=np.float64)
            yield (row["class"], row["channel"], each.shape), centred / np.linalg.norm(centred)


def plot_sweep(sweep: Sweep) -> Figure:
    """Hits and agreement against the forwards of a case: a point a setting, numbered as in the list beside it.

    Where no label says what a hit is, or there are no maps, that part is left out. Points of one value of the first id
    that varies have one colour, and a hollow point's setting is not complete.

    Raises:
        OptionalImportError: when matplotlib is not installed.
    """
    figure_type = require("matplotlib.figure", extra="bundle").Figure
    line_type = require("matplotlib.lines", extra="bundle").Line2D
    ticker = require("matplotlib.ticker", extra="bundle")
    explained = [(i, setting) for i, setting in enumerate(sweep.settings) if setting.rows]
    panels = {
        "share of peaks inside their label": [
            (i, setting.forwards_per_case, setting.figures["hits"])
            for i, setting in explained
            if "hits" in setting.figures
        ],
        f"agreement with {sweep.reference + 1} (mean correlation of maps)": [
            (i, setting.forwards_per_case, setting.agreement)
            for i, setting in explained
            if setting.agreement is not None
        ],
    }
    shown = {label: points for label, points in panels.items() if points}
    title, names = _labels(sweep)
    colours = _colours(sweep)
    figure = figure_type(
        figsize=(4.5 * max(len(shown), 1) + 0.5 + 0.06 * max(map(len, names)), max(4.0, 0.8 + 0.165 * len(names))),
        layout="constrained",
        facecolor="white",
    )
    figure.suptitle(title, fontsize=9)
    figure.legend(
        [line_type([], [], linestyle="", marker="o", color=colour, markersize=4) for colour in colours],
        [f"{number} {name}" for number, name in enumerate(names, 1)],
        loc="outside right upper",
        fontsize=7,
        frameon=False,
        handletextpad=0.1,
    )
    axes = figure.subplots(1, max(len(shown), 1), squeeze=False)[0]
    for ax, (label, points) in zip(axes, shown.items(), strict=False):
        for i, x, y in points:
            inside = colours[i] if sweep.settings[i].complete else "white"
            ax.plot(x, y, "o", color=colours[i], markerfacecolor=inside, markersize=5)
        forwards = [x for _, x, _ in points]
        if 0 < 5 * min(forwards) < max(forwards):
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            ax.xaxis.set_minor_formatter(ticker.NullFormatter())
        ax.margins(0.12)
        ax.grid(alpha=0.3)
        ax.set_xlabel("forwards a case")
        ax.set_ylabel(label)
    # Where points lie on the picture is known once it is laid out.
    figure.draw_without_rendering()
    for ax, points in zip(axes, shown.values(), strict=False):
        _number(ax, points)
    return figure


def _labels(sweep: Sweep) -> tuple[str, list[str]]:
    """What all settings have in common, and what to call each."""
    common = {
        name: value
        for name, value in sweep.settings[0].values.items()
        if len(sweep.settings) > 1 and all(setting.values.get(name) == value for setting in sweep.settings)
    }
    names = []
    for setting in sweep.settings:
        own = ", ".join(f"{name} {value}" for name, value in setting.values.items() if name not in common)
        own = own or setting.name
        names.append(own if len(own) <= 60 else f"{own[:57]}...")
        if not setting.complete:
            names[-1] += f" ({len(setting.missing)} missing)"
    return ", ".join(f"{name} {value}" for name, value in common.items()), names


def _colours(sweep: Sweep) -> list[str]:
    """A colour for each setting."""
    for name in sweep.ids:
        values = [setting.values.get(name, "") for setting in sweep.settings]
        different = list(dict.fromkeys(values))
        if 1 < len(different) <= 10:
            return [f"C{different.index(value)}" for value in values]
    return ["C0"] * len(sweep.settings)


def _number(ax: Any, points: Sequence[tuple[int, float, float]]) -> None:
    """Write each point's number above it; those that lie on each other share one text."""
    groups: list[list[tuple[int, float, float]]] = []
    for point in points:
        place = ax.transData.transform(point[1:])
        near = (group for group in groups if np.abs(ax.transData.transform(group[0][1:]) - place).max() < 9)
        group = next(near, None)
        if group is None:
            groups.append(group := [])
        group.append(point)
    for group in groups:
        ax.annotate(
            _ranges([index + 1 for index, _, _ in group]),
            max((point[1:] for point in group), key=lambda place: place[1]),
            (0, 4),
            textcoords="offset points",
            horizontalalignment="center",
            fontsize=7,
            in_layout=False,
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, such as ``1-4, 7``; the first few where there are many."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs[:4]) + ", ..." * (len(runs) > 4)
