"""The page "Which method": methods compared on a network's own scans."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monai_saliency.metrics.which_method import FIGURES, MethodComparison, in_words
from monai_saliency.visualize.pictures import new_figure, save_picture, svg_address
from monai_saliency.visualize.report.build import refuse_other_pages, rendered, write_page
from monai_saliency.visualize.report.kept_scan import case_id


def draw_map(folder: Path, case: str, name: str, values: torch.Tensor, label: torch.Tensor | None) -> None:
    """Draw a map ``(*spatial)``, of 3D the slice with most of the label, or else the middle one, for the page."""
    drawn = values.numpy(force=True)
    inside = np.zeros_like(drawn, bool) if label is None else label.numpy(force=True)
    if drawn.ndim == 3:
        place = int(inside.sum((0, 1)).argmax()) if inside.any() else drawn.shape[2] // 2
        drawn, inside = drawn[:, :, place], inside[:, :, place]
    figure = new_figure((1.2, 1.2 * drawn.shape[1] / drawn.shape[0]))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(drawn.T, cmap="gray", origin="lower", aspect="auto")
    if inside.any() and not inside.all():
        axes.contour(inside.T, [0.5], colors=["white"], linewidths=2.0)
        axes.contour(inside.T, [0.5], colors=["black"], linewidths=0.8)
    axes.set_axis_off()
    path = _picture(folder, case, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, path)


def write_methods(folder: Path, found: MethodComparison) -> Path:
    """Write the page into the report of an output folder, with the pictures that were drawn there."""
    report = folder / "report"
    refuse_other_pages(report)
    (report / "assets").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parent / "assets" / "report.css", report / "assets")
    # What decides is next to the names, also on a narrow screen.
    names = [name for name in ("auprc", *FIGURES) if any(name in row for row in found.summary)]
    shown = {name: FIGURES[name] for name in names}
    lines = [(row, [in_words(row, name) for name in shown]) for row in found.summary]
    cases = []
    for case in dict.fromkeys(row["case"] for row in found.cases):
        pictures = []
        for name in ["scan", *found.settings]:
            path = _picture(folder, case, name)
            if path.exists():
                pictures.append((name, path.relative_to(report).as_posix()))
        cases += [(case, pictures)] if pictures else []
    page = rendered("methods.html", found=found, shown=shown, lines=lines, plot=_plot(found.summary), cases=cases)
    return write_page(report / "methods.html", page)


def _picture(folder: Path, case: str, name: str) -> Path:
    return folder / "report" / "methods" / f"{case_id(case)}-{case_id(name)}.png"


def _plot(rows: Sequence[Any]) -> str:
    """AUPRC over seconds, each point with the number of its row, as the address of an SVG; empty without either."""
    points = [(number, row) for number, row in enumerate(rows, 1) if "auprc" in row and "seconds" in row]
    if not points:
        return ""
    figure = new_figure((6, 3), layout="constrained")
    axes = figure.subplots()
    for number, row in points:
        axes.errorbar(row["seconds"], row["auprc"], row["auprc_error"], fmt="ko", capsize=3, markersize=4)
        axes.annotate(str(number), (row["seconds"], row["auprc"]), (8, 0), textcoords="offset points", va="center")
    axes.set(xlabel="seconds a case", ylabel="AUPRC", ylim=(0, 1), xlim=(0, None))
    return svg_address(figure)
