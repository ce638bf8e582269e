"""The table and the plot of a sweep, whose settings each have an output folder: ``python -m monai_saliency gather``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from monai_saliency.bundle.command import settings_of
from monai_saliency.handlers.summary import figures
from monai_saliency.storage.files import atomic_path
from monai_saliency.storage.tables import CaseTable, Failures, refuse_foreign, write_csv
from monai_saliency.utils.tensors import correlation
from monai_saliency.visualize.pictures import new_figure
from monai_saliency.visualize.report.cases import MapFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = (
    *("cases", "missing", "failures", "forwards", "seconds", "mean_score", "mean_peak_saliency", "hits"),
    *("agreement", "compared"),
)


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
        """The figures of the cohort, and of the sweep; ``peak_in_label`` is called ``hits`` here."""
        values = figures(self.rows, len(self.failures))
        values |= {"missing": len(self.missing), "compared": self.compared}
        if "peak_in_label" in values:
            values["hits"] = values["peak_in_label"]
        if self.agreement is not None:
            values["agreement"] = self.agreement
        return values

    @property
    def forwards_per_case(self) -> float:
        """The mean number of forwards of an explained case. 0 without such a case."""
        values = self.figures
        return values["forwards"] / values["cases"] if values["cases"] else 0.0

    @property
    def marks(self) -> set[str]:
        """The marks of the settings that made the rows: one, unless a run with others was stopped."""
        return {row["settings"] for row in self.rows}

    @property
    def complete(self) -> bool:
        """Whether there are maps of one run's settings, and no case is missing or has failed."""
        return len(self.marks) == 1 and not self.missing and not self.failures


@dataclass
class Sweep:
    """The settings of a sweep. All maps are compared with the maps of the setting with the most forwards a case.

    The agreement of a setting is the Pearson correlation of the maps of one case, class and channel over the voxels of
    the scan, as a mean. (A rank correlation would mostly compare the many voxels that do not matter.) Constant maps
    and classes that only one setting explains are left out.
    """

    settings: list[Setting]
    reference: Setting

    @property
    def complete(self) -> bool:
        """Whether every setting has a map of every case."""
        return all(setting.complete for setting in self.settings)

    def __str__(self) -> str:
        lines = [f"settings: {len(self.settings)}", f"agreement is with {self.reference.name}"]
        for setting in self.settings:
            if setting.complete:
                continue
            shown = setting.missing[:5] + (["..."] if len(setting.missing) > 5 else [])
            without = ", ".join(shown) or "-"
            lines.append(f"not complete: {setting.name}: maps of {len(setting.cases)} cases, none of {without}")
            if len(setting.marks) > 1:
                lines.append(f"  made by {len(setting.marks)} settings (column `settings`): run it again to the end")
            if setting.failures:
                first = setting.failures[0]
                lines.append(f"  {first['case']} failed: {first['error']}")
        return "\n".join(lines)

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``sweep.csv``, with a row for each setting, and ``sweep.png``."""
        ids: dict[str, None] = {}
        rows = []
        for setting in self.settings:
            ids |= dict.fromkeys(setting.values)
            written = {name: f"{value:.10g}" for name, value in setting.figures.items()}
            rows.append({"setting": setting.name, **setting.values, **written})
        table, picture = Path(folder) / "sweep.csv", Path(folder) / "sweep.png"
        refuse_foreign(table, ["setting"])
        write_csv(table, ["setting", *ids, *FIGURES], rows)
        with atomic_path(picture) as temporary:
            plot_sweep(self).savefig(temporary, dpi=100)
        return [table, picture]


def gather(sweep_dir: str | Path) -> Sweep:
    """Read the results of a sweep so far. Nothing is written, and the runs need not have ended."""
    settings = _settings(Path(sweep_dir))
    known = {row["case"] for setting in settings for row in [*setting.rows, *setting.failures]}
    reference = max(settings, key=lambda setting: setting.forwards_per_case)
    for setting in settings:
        nothing = CaseTable(setting.folder / Failures.NOTHING_FILE, columns=Failures.NOTHING_COLUMNS).read()
        setting.missing = sorted(known - setting.cases - {row["case"] for row in nothing})
        agreements = [_agreement(setting, reference, case) for case in sorted(known)]
        defined = [agreement for agreement in agreements if np.isfinite(agreement)]
        setting.compared = len(defined)
        setting.agreement = float(np.mean(defined)) if defined else None
    return Sweep(settings, reference)


def _settings(sweep_dir: Path) -> list[Setting]:
    settings = []
    for folder in sweep_dir.iterdir():
        homes = [home for home in (folder, folder / "saliency") if (home / "summary.csv").is_file()]
        values = settings_of(folder.name)
        # A setting whose job has no table yet counts too.
        if folder.is_dir() and (homes or values):
            home = homes[0] if homes else folder
            failures = CaseTable(home / "failures.csv", columns=Failures.COLUMNS).read()
            settings.append(Setting(folder.name, home, values, CaseTable(home / "summary.csv").read(), failures))
    if not settings:
        raise ValueError(
            f"{sweep_dir} holds no settings: folders named id=value,id=value, or with a summary.csv in them"
        )
    return sorted(settings, key=_in_order)


def _in_order(setting: Setting) -> list[int | str]:
    """Sorts ``num_masks=500`` before ``num_masks=1000``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", setting.name)]


def _agreement(setting: Setting, reference: Setting, case: str) -> float:
    """The mean correlation of two settings' maps of a case; NaN where they have nothing to compare."""
    ours, theirs = _maps(setting, case), _maps(reference, case)
    defined = []
    for key in ours.keys() & theirs.keys():
        value = float(correlation(ours[key], theirs[key]))
        if np.isfinite(value):  # a constant map has none
            defined.append(value)
    return float(np.mean(defined)) if defined else math.nan


def _maps(setting: Setting, case: str) -> dict[tuple[Any, ...], torch.Tensor]:
    """The maps ``(1, N)`` of a case, by class, channel and shape."""
    rows = [row for row in setting.rows if row["case"] == case]
    path = setting.folder / f"{case}_saliency.nii.gz"
    if not rows or not path.is_file():
        return {}
    maps = {}
    for row, own in zip(rows, MapFile(path, len(rows)).read(), strict=True):
        maps[row["class"], row["channel"], own.shape] = torch.tensor(own.reshape(1, -1)).double()
    return maps


def plot_sweep(sweep: Sweep) -> Figure:
    """Plot hits and agreement of each setting against its forwards per case. Incomplete ones are hollow."""
    panels = {"share of peaks inside their label": "hits", f"agreement with {sweep.reference.name}": "agreement"}
    size = 10.0, max(4.0, 1.0 + 0.165 * len(sweep.settings))
    figure = new_figure(size, layout="constrained")
    for ax, (label, name) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for number, setting in enumerate(sweep.settings, 1):
            # A point of NaN is drawn in the legend only.
            point = setting.forwards_per_case, setting.figures.get(name, math.nan)
            colour = f"C{(number - 1) % 10}"
            ax.plot(*point, "o", color=colour, markerfacecolor=colour if setting.complete else "white")
            if not math.isnan(point[1]):
                ax.annotate(str(number), point, (0, 4), textcoords="offset points")
        ax.set(xlabel="forwards per case", ylabel=label)
        ax.grid(alpha=0.3)
    names = [f"{number} {_name(setting)}" for number, setting in enumerate(sweep.settings, 1)]
    figure.legend(ax.lines, names, loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _name(setting: Setting) -> str:
    """The name of a setting in the plot's legend."""
    return setting.name if setting.complete else f"{setting.name} ({len(setting.missing)} missing)"
