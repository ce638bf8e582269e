"""The table and the plot of a sweep, whose settings each have an output folder: ``python -m monai_saliency gather``."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monai_saliency.bundle.command import settings_of
from monai_saliency.handlers.summary import Summary, figures
from monai_saliency.metrics.agreement import read_map
from monai_saliency.storage.files import atomic_path
from monai_saliency.storage.tables import CaseTable, Failures, cell
from monai_saliency.utils.arguments import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Setting", "Sweep", "gather", "plot_sweep"]

FIGURES = ("cases", "missing", "failures", "forwards", "seconds", "mean_score", "mean_peak_saliency", "hits")
AGREEMENT = ("agreement", "compared")

# So many voxels, drawn at random, give the correlation over all voxels to about 0.002.
_VOXELS = 2**18


@dataclass
class Setting:
    """One setting of a sweep: its folder, the values in the folder's name, and the tables of its run by now."""

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
        """The cases with maps."""
        return {row["case"] for row in self.rows}

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the cohort, and ``missing``; ``peak_in_label`` is called ``hits`` here."""
        found = figures(self.rows, len(self.failures)) | {"missing": len(self.missing)}
        if "peak_in_label" in found:
            found["hits"] = found.pop("peak_in_label")
        return found

    @property
    def forwards_per_case(self) -> float:
        """The mean number of forwards of an explained case. 0 without such a case."""
        found = self.figures
        return found["forwards"] / found["cases"] if found["cases"] else 0.0

    @property
    def complete(self) -> bool:
        """Whether there are maps, and no case is missing or has failed."""
        return bool(self.rows) and not self.missing and not self.failures


@dataclass
class Sweep:
    """The settings of a sweep, and how far their maps agree: the Pearson correlation of the maps of one case, class and
    channel over the voxels of the scan. (A rank correlation would mostly compare the many voxels that do not matter.)
    Constant maps, and classes that only one setting explains, are left out.
    """

    settings: list[Setting]
    matrix: np.ndarray
    reference: int

    @property
    def ids(self) -> list[str]:
        """The ids of all settings, in the order of their first appearance."""
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
        """Write ``sweep.csv`` (one row for each setting), ``sweep_agreement.csv`` (the matrix) and ``sweep.png``."""
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
                csv.writer(file).writerows(map(cell, row) for row in table)
        written.append(folder / "sweep.png")
        with atomic_path(written[-1]) as temporary:
            plot_sweep(self).savefig(temporary, dpi=100)
        return written


def _cell(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.10g}"


def gather(sweep_dir: str | Path, reference: str | None = None) -> Sweep:
    """Read the results of a sweep so far. Nothing is written, and the runs need not have ended."""
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
        raise ValueError(f"{sweep_dir} is not a folder: give the folder with the output folders of the sweep")
    settings = []
    for folder in sweep_dir.iterdir():
        home = next((home for home in (folder, folder / "saliency") if (home / "summary.csv").is_file()), None)
        values = settings_of(folder.name)
        # A setting whose job has no table yet counts too.
        if folder.is_dir() and (home is not None or values):
            home = home or folder
            failures = CaseTable(home / "failures.csv", columns=Failures.COLUMNS).read()
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
    """The correlations ``(S, S)`` of the settings' maps of one case. NaN where two settings have nothing to compare."""
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
    """The class, channel and shape of each map of a case, with its voxels scaled to mean 0 and norm 1."""
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
        # A constant map has no correlation with anything.
        if np.isfinite(values).all() and values.min() < values.max():
            centred = values.astype(np.float64) - values.mean(dtype=np.float64)
            yield (row["class"], row["channel"], each.shape), centred / np.linalg.norm(centred)


def plot_sweep(sweep: Sweep) -> Figure:
    """Plot the hits and the agreement of each setting against its forwards per case. The point of an incomplete setting
    is hollow.
    """
    figure_type = require("matplotlib.figure", extra="bundle").Figure
    panels: dict[str, list[float | None]] = {
        "share of peaks inside their label": [setting.figures.get("hits") for setting in sweep.settings],
        f"agreement with {sweep.reference + 1} (mean correlation of maps)": [
            setting.agreement if setting.rows else None for setting in sweep.settings
        ],
    }
    shown = {label: values for label, values in panels.items() if any(value is not None for value in values)}
    names = [f"{number} {_name(setting)}" for number, setting in enumerate(sweep.settings, 1)]
    colours = [f"C{index % 10}" for index in range(len(names))]
    size = 4.5 * max(len(shown), 1) + 0.5 + 0.06 * max(map(len, names)), max(4.0, 0.8 + 0.165 * len(names))
    figure = figure_type(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(1, max(len(shown), 1), squeeze=False)[0]
    for ax, (label, values) in zip(axes, shown.items(), strict=False):
        _panel(ax, sweep, values, colours)
        ax.set_ylabel(label)
    # Drawn for the list only, since a setting may have no point in a panel.
    handles = [axes[0].plot([], [], "o", color=colour, markersize=4)[0] for colour in colours]
    figure.legend(handles, names, loc="outside right upper", fontsize=7, frameon=False, handletextpad=0.1)
    return figure


def _panel(ax: Any, sweep: Sweep, values: Sequence[float | None], colours: Sequence[str]) -> None:
    """Draw one value of each setting, with the number of the setting, against its forwards per case."""
    forwards = []
    for number, (setting, value, colour) in enumerate(zip(sweep.settings, values, colours, strict=True), 1):
        if value is None:
            continue
        forwards.append(setting.forwards_per_case)
        inside = colour if setting.complete else "white"
        ax.plot(forwards[-1], value, "o", color=colour, markerfacecolor=inside, markersize=5)
        ax.annotate(str(number), (forwards[-1], value), (0, 4), textcoords="offset points", ha="center", fontsize=7)
    if 0 < 5 * min(forwards) < max(forwards):
        ax.set_xscale("log")
    ax.margins(0.12)
    ax.grid(alpha=0.3)
    ax.set_xlabel("forwards per case")


def _name(setting: Setting) -> str:
    """A setting in the list beside the plot."""
    name = setting.name if len(setting.name) <= 60 else f"{setting.name[:57]}..."
    return name if setting.complete else f"{name} ({len(setting.missing)} missing)"
