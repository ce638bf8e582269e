"""Maps over their scan: the three planes through each map's peak."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import nibabel as nib
import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.arguments import check_option, require
from monai_saliency.visualize.legend import COLD, WARM, Legend, focus_voxel, gray_window, legends_of, opacities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURE_FORMATS", "plot_saliency", "save_picture"]

PICTURE_FORMATS = ("png", "svg")
# Of a PNG, and of the scan and the map in an SVG, whose lines and letters need none.
_DPI = 100  # of a PNG file
# The settings of the two are matplotlib's, for all threads.
_setting = threading.Lock()

_PLANES = (("sagittal", 0), ("coronal", 1), ("axial", 2))
_AXES = (("L", "R"), ("P", "A"), ("I", "S"))
_MANY_LABELS = 30


@dataclass(frozen=True)
class _Plane:
    """One plane through a map's peak: arrays ``(across, up)``, edges of a voxel in mm, and directions such as "L-R"."""

    scan: np.ndarray
    saliency: np.ndarray
    coloured: np.ndarray
    edges: Sequence[float]
    peak: tuple[int, ...]
    name: str
    across: str = ""
    up: str = ""
    label: np.ndarray | None = None

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, right, bottom and top in mm."""
        across, up = self.scan.shape
        return (0, across * self.edges[0], 0, up * self.edges[1])


def plot_saliency(
    scan: np.ndarray,
    maps: np.ndarray,
    affine: np.ndarray,
    title: str = "",
    labels: Sequence[str] | None = None,
    *,
    scale: float | None = None,
    standard_error: np.ndarray | None = None,
    label: np.ndarray | None = None,
    legends: Sequence[Legend] | None = None,
) -> Figure:
    """Draw maps over their scan: one row per map, with the three planes through the map's peak and a colour bar. Where
    the peak is not coloured, they go through the strongest voxel that is; where none is, through the scan's middle.

    Voxels are reordered to the axes nearest to the scanner's axes, but not resampled. Warm colours are positive (the
    image supports the score there), cold colours are negative.

    All maps of the figure have one scale, centred at zero; figures that are to be compared need the same ``scale``.
    Colours grow with the square root of the value. A voxel is coloured whose absolute value is at least a hundredth of
    the scale, and at least twice its standard error. Where no voxel is coloured, no peak is marked, and the title
    gives the reason.

    Args:
        scan: ``(*spatial)``, 2D or 3D.
        maps: ``(K, *spatial)`` on the scan's grid.
        affine: ``(4, 4)``, from voxels to scanner mm.
        title: the picture's title.
        labels: the label of each map's colour bar, K strings; by default ``"saliency (change of the score)"``.
        scale: the largest absolute value of the colour bars, in the maps' unit; by default the largest of all maps.
        standard_error: ``(K, *spatial)``, of the maps, in their unit.
        label: ``(*spatial)`` on the scan's grid, whole numbers: what is not 0 gets an outline.
        legends: what the colours of each map mean, K of them, instead of ``scale``
            (:meth:`~monai_saliency.visualize.legend.Legend.of`).

    Returns:
        a figure. Save it with ``savefig``; it needs no closing.

    Raises:
        OptionalImportError: when matplotlib is not installed.
        ValueError: when ``scale`` is not a number above 0, or an array has another shape.

    Example::

        >>> figure = plot_saliency(np.zeros((8, 8, 4)), np.zeros((2, 8, 8, 4)), np.eye(4), title="ct_7", scale=1)
        >>> len(figure.axes)  # 2 rows of 3 planes, and 2 colour bars
        8
    """
    # A bare Figure needs no pyplot, whose state is shared between threads and needs closing.
    figure_type = require("matplotlib.figure", extra="bundle").Figure
    legends = legends or legends_of(None, maps, scale)
    errors = [None] * len(maps) if standard_error is None else standard_error
    coloured = [legend.coloured(*each) for legend, *each in zip(legends, maps, errors, strict=True)]
    views = [_planes(scan, *each, label, affine) for each in zip(maps, coloured, strict=True)]
    width = 3.2 * len(views[0]) + 1.2
    figure = figure_type(figsize=(width, 3.4 * len(views) + 0.5), layout="constrained", facecolor="white", dpi=_DPI)
    verdicts = [legend.verdict(each, error) for legend, each, error in zip(legends, maps, errors, strict=True)]
    rows = [f"row {row}: {each}" if len(maps) > 1 else each for row, each in enumerate(verdicts, start=1) if each]
    words = [title] * bool(title) + rows
    # Fonts have no character for the bytes of a file name that is not UTF-8, and a name with dollars is not a formula.
    text = _wrapped(words, int(12 * width)).encode(errors="replace").decode()
    figure.suptitle(text, fontsize=10, parse_math=False)
    widths = [plane.extent[1] for plane in views[0]]
    axes = figure.subplots(len(views), len(views[0]), squeeze=False, width_ratios=widths)
    window = gray_window(scan)
    for row, (planes, legend) in enumerate(zip(views, legends, strict=True)):
        for ax, plane in zip(axes[row], planes, strict=True):
            drawn = _draw(ax, plane, window, legend, marked=bool(coloured[row].any()))
        has_error = standard_error is not None
        bar = _bar(figure, drawn, axes[row].tolist(), legend, maps[row], legend.floor(has_error))
        small = legend.small_print(has_error, label is not None and bool(np.any(label)))
        bar.set_label(_wrapped([labels[row] if labels else legend.words, *small], 54), fontsize=8, parse_math=False)
    return figure


def save_picture(figure: Figure, path: str | Path | IO[bytes], picture_format: str = "png") -> None:
    """Write a figure to a path or an open file, with the same bytes each time: as ``"png"``, or as ``"svg"``."""
    check_option("picture_format", picture_format, PICTURE_FORMATS)
    with _setting, require("matplotlib", extra="bundle").rc_context({"svg.fonttype": "none", "svg.hashsalt": "map"}):
        if picture_format == "svg":
            figure.savefig(path, format="svg", dpi=200, metadata={"Date": None})
        else:  # `savefig` would draw twice, the first time for the layout
            require("matplotlib.backends.backend_agg", extra="bundle").FigureCanvasAgg(figure).print_png(path)


def _wrapped(words: Sequence[str], width: int) -> str:
    """Lines of at most ``width`` characters."""
    return "\n".join("\n".join(textwrap.wrap(line, width) or [""]) for each in words for line in each.split("\n"))


def _colours(limit: float) -> dict[str, Any]:
    """The colour map, and a norm of signed square roots from ``-limit`` to ``limit``."""
    colors = require("matplotlib.colors", extra="bundle")
    # Two stops at the middle: no colour is between the weakest cold and the weakest warm one.
    places = [*np.linspace(0, 0.5, len(COLD)), *np.linspace(0.5, 1, len(WARM))]
    cmap = colors.LinearSegmentedColormap.from_list("saliency", list(zip(places, COLD + WARM, strict=True)), N=512)
    norm = colors.FuncNorm((_root, lambda values: values * np.abs(values)), vmin=-limit, vmax=limit)
    return {"cmap": cmap, "norm": norm}


def _root(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.sqrt(np.abs(values))


def _draw(ax: Any, plane: _Plane, window: tuple[float, float], legend: Legend, marked: bool) -> Any:
    """Draw one plane, with lines through a marked peak, and return the map's drawing for its colour bar."""
    ax.set_facecolor("black")  # where the scan is NaN
    ax.imshow(plane.scan.T, cmap="gray", vmin=window[0], vmax=window[1], origin="lower", extent=plane.extent)
    shown = np.nan_to_num(plane.saliency.T, posinf=0, neginf=0)
    drawn = ax.imshow(
        shown,
        **_colours(legend.scale),
        alpha=opacities(shown, plane.coloured.T, legend.scale)[1],
        origin="lower",
        extent=plane.extent,
        interpolation="bilinear",
    )
    if plane.label is not None:
        _outline(ax, plane)
    if marked:
        x, y = ((plane.peak[i] + 0.5) * plane.edges[i] for i in (0, 1))
        ax.axvline(x, color="lime", linewidth=0.5)
        ax.axhline(y, color="lime", linewidth=0.5)
    ax.set(xticks=[], yticks=[], xlabel=plane.across, ylabel=plane.up, xlim=plane.extent[:2], ylim=plane.extent[2:])
    ax.set_title(plane.name, fontsize=8)
    return drawn


def _outline(ax: Any, plane: _Plane) -> None:
    """Draw a line around the label, or around each of its numbers."""
    effects = require("matplotlib.patheffects", extra="bundle")
    # Closed at the plane's edge, and drawn in a plane that is one voxel thin.
    label = np.pad(np.nan_to_num(np.asarray(plane.label)), 1).T
    right, top = plane.extent[1], plane.extent[3]
    extent = (-plane.edges[0], right + plane.edges[0], -plane.edges[1], top + plane.edges[1])
    values = np.unique(label[label != 0])
    parts = [label == value for value in values] if len(values) <= _MANY_LABELS else [label != 0]
    for part in parts:
        lines = ax.contour(part, levels=[0.5], origin="lower", extent=extent, colors="white", linewidths=0.8)
        lines.set(path_effects=[effects.withStroke(linewidth=1.8, foreground="black")])


def _bar(figure: Figure, drawn: Any, axes: list[Any], legend: Legend, saliency: np.ndarray, floor: float) -> Any:
    """The colour bar of a row, gray below the floor. It ends in a point where the map goes beyond the scale."""
    finite, full = np.isfinite(saliency), legend.scale * (1 + 1e-6)
    above = np.max(saliency, where=finite, initial=0) > full
    below = np.min(saliency, where=finite, initial=0) < -full
    extend = "both" if above and below else "max" if above else "min" if below else "neither"
    bar: Any = figure.colorbar(drawn, ax=axes, shrink=0.8, extend=extend)
    # Without this the bar would be as transparent as the map.
    bar.solids.set_alpha(1)
    bar.set_ticks([share * legend.scale for share in (-1, -0.5, -0.1, 0, 0.1, 0.5, 1) if legend.signed or share >= 0])
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    bar.minorticks_off()
    bar.ax.axhspan(-min(floor, legend.scale), min(floor, legend.scale), color="lightgray")
    if not legend.signed:
        bar.ax.set_ylim(0, legend.scale)
    return bar


def _planes(
    scan: np.ndarray, saliency: np.ndarray, coloured: np.ndarray, label: np.ndarray | None, affine: np.ndarray
) -> list[_Plane]:
    """The planes through a map's focus: three of a 3D scan, or the 2D scan itself."""
    layers: dict[str, Any] = {"scan": scan, "saliency": saliency, "coloured": coloured}
    layers |= {} if label is None else {"label": label}
    finite = saliency if np.isfinite(saliency).all() else np.nan_to_num(saliency, posinf=0, neginf=0)
    peak = focus_voxel(finite, coloured)
    if scan.ndim == 2:
        flip = -1 if affine[1, 1] < 0 else 1  # rows count downwards
        layers = {name: layer[:, ::flip] for name, layer in layers.items()}
        shown = peak if flip == 1 else (peak[0], scan.shape[1] - 1 - peak[1])
        name = f"{'peak' if peak == peak_voxel(finite) else 'strongest'} at pixel {peak}" if coloured.any() else ""
        return [_Plane(**layers, edges=nib.affines.voxel_sizes(affine)[:2], peak=shown, name=name)]
    # The peak is found before reordering: in a flat map, reordering could choose another voxel.
    mm = affine @ [*peak, 1]
    turn = nib.io_orientation(affine)
    layers = {name: nib.apply_orientation(layer, turn) for name, layer in layers.items()}
    turned = affine @ nib.orientations.inv_ornt_aff(turn, scan.shape)
    edges = nib.affines.voxel_sizes(turned)
    peak = tuple(np.rint(np.linalg.inv(turned) @ mm).astype(int)[:3].tolist())
    planes = []
    for name, axis in _PLANES:
        a, b = (other for other in range(3) if other != axis)
        planes.append(
            _Plane(
                **{name: layer.take(peak[axis], axis) for name, layer in layers.items()},
                edges=(edges[a], edges[b]),
                peak=(peak[a], peak[b]),
                name=f"{name}, {'xyz'[axis]} = {round(mm[axis])} mm",
                across="-".join(_AXES[a]),
                up="-".join(_AXES[b]),
            )
        )
    return planes
