"""Maps over their scan: the three planes through each map's peak."""

from __future__ import annotations

import base64
import io
import textwrap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import nibabel as nib
import numpy as np
import torch

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.arguments import check_option, require
from monai_saliency.utils.tensors import checked_label
from monai_saliency.visualize.legend import Legend, colour_map, finite, focus_voxel, gray_window, legends_of, opacities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: an array or a tensor
Array: TypeAlias = Any
PICTURE_FORMATS = ("png", "svg")
_DPI = 100  # of a PNG file
# Settings of matplotlib are of all threads.
_setting = threading.Lock()

# Each plane's name, the axis across which it lies, and its horizontal and vertical axis.
_PLANES = (("sagittal", 0, 1, 2), ("coronal", 1, 0, 2), ("axial", 2, 0, 1))
_AXES = ("L-R", "P-A", "I-S")
_MANY_LABELS = 30


@dataclass(frozen=True)
class _Plane:
    """One plane through a map's peak: arrays ``(across, up)``, edges of a voxel in mm, and directions such as "L-R"."""

    layers: Mapping[str, np.ndarray]  # "scan", "saliency", "coloured", and "label" where there is one
    edges: Sequence[float]
    peak: tuple[int, int]
    name: str
    across: str = ""
    up: str = ""

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, right, bottom and top in mm."""
        columns, rows = self.layers["scan"].shape
        width, height = self.edges
        return 0, columns * width, 0, rows * height


@dataclass(frozen=True)
class _Row:
    """One map ``(*spatial)`` of a figure, and the planes that are drawn of it."""

    saliency: np.ndarray
    legend: Legend
    verdict: str
    is_coloured: bool
    has_error: bool
    planes: Sequence[_Plane]


def plot_saliency(
    scan: Array,
    maps: Array,
    affine: Array | None = None,
    title: str = "",
    labels: Sequence[str] | None = None,
    *,
    scale: float | None = None,
    standard_error: Array | None = None,
    label: Array | None = None,
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
        scan: ``(*spatial)``, 2D or 3D, or ``(C, *spatial)``, of which the mean of the channels is shown.
        maps: ``(K, *spatial)`` on the scan's grid.
        affine: ``(4, 4)``, from voxels to scanner mm; without one the first axis of a 2D scan runs down, as in a tensor
            of a photograph, and voxels of a 3D scan are cubes.
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
        ValueError: when ``scale`` is not a number above 0, or ``scan``, ``maps`` or ``label`` has another shape.

    Example::

        >>> figure = plot_saliency(np.zeros((8, 8, 4)), np.zeros((2, 8, 8, 4)), np.eye(4), title="ct_7", scale=1)
        >>> len(figure.axes)  # 2 rows of 3 planes, and 2 colour bars
        8
    """
    scan, maps, standard_error, label = map(_array, (scan, maps, standard_error, label))
    if scan.ndim == maps.ndim:
        scan = scan.mean(axis=0)
    if scan.ndim not in (2, 3) or maps.shape[1:] != scan.shape:
        raise ValueError(
            f"`maps` must have shape (K, *spatial) and `scan` (*spatial) or (C, *spatial), 2D or 3D, of one case, got "
            f"{maps.shape} and {scan.shape}: of a batch give maps[0] and images[0]"
        )
    if label is not None:
        label = checked_label(np.nan_to_num(label), scan.shape)[0].numpy()
    if affine is None and scan.ndim == 2:  # (rows, columns)
        scan, maps, standard_error, label = map(_transposed, (scan, maps, standard_error, label))
        affine = np.diag([1, -1, 1, 1])
    affine = np.eye(4) if affine is None else _array(affine)
    rows = []
    for place, legend in enumerate(legends or legends_of(None, maps, scale)):
        error = None if standard_error is None else standard_error[place]
        rows.append(_row(legend, maps[place], error, scan, label, affine))
    columns = len(rows[0].planes)
    width, height = 3.2 * columns + 1.2, 3.4 * len(rows) + 0.5
    figure = new_figure((width, height), layout="constrained", facecolor="white", dpi=_DPI)
    heading = _wrapped(_heading(title, rows), int(12 * width))
    # Fonts have no character for the bytes of a file name that is not UTF-8, and a name with dollars is not a formula.
    figure.suptitle(heading.encode(errors="replace").decode(), fontsize=10, parse_math=False)
    widths = [plane.extent[1] for plane in rows[0].planes]
    axes = figure.subplots(len(rows), columns, squeeze=False, width_ratios=widths)
    window = gray_window(scan)
    has_label = label is not None and bool(np.any(label))
    for place, row in enumerate(rows):
        for ax, plane in zip(axes[place], row.planes, strict=True):
            drawn = _draw(ax, plane, window, row)
        bar = _bar(figure, drawn, axes[place].tolist(), row)
        words = labels[place] if labels else row.legend.words
        values = row.saliency[np.isfinite(row.saliency)]
        reach = f"this map: {values.min(initial=0):.2g} to {values.max(initial=0):.2g}"
        lines = [words, reach, *row.legend.small_print(row.has_error, has_label)]
        bar.set_label(_wrapped(lines, 54), fontsize=8, parse_math=False)
    return figure


def _array(values: Any) -> Any:
    """A tensor as an array; arrays and None as they are."""
    return values.numpy(force=True) if isinstance(values, torch.Tensor) else values


def _transposed(values: Any) -> Any:
    """Arrays ``(..., rows, columns)`` as ``(..., columns, rows)``."""
    return None if values is None else values.swapaxes(-1, -2)


def _row(
    legend: Legend,
    saliency: np.ndarray,
    error: np.ndarray | None,
    scan: np.ndarray,
    label: np.ndarray | None,
    affine: np.ndarray,
) -> _Row:
    """A map ``(*spatial)`` with what is drawn of it."""
    coloured = legend.coloured(saliency, error)
    planes = _planes(scan, saliency, coloured, label, affine)
    return _Row(
        saliency,
        legend,
        verdict=legend.verdict(saliency, error) or legend.against(saliency, coloured),
        is_coloured=bool(coloured.any()),
        has_error=error is not None,
        planes=planes,
    )


def new_figure(size: tuple[float, float], **settings: Any) -> Figure:
    """An empty figure of a size in inches, without pyplot, whose state is shared between threads and needs closing."""
    return require("matplotlib.figure", extra="bundle").Figure(size, **settings)


def svg_address(figure: Figure) -> str:
    """A figure as an SVG, in an address for a page."""
    file = io.BytesIO()
    save_picture(figure, file, "svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def save_picture(figure: Figure, path: str | Path | IO[bytes], picture_format: str = "png") -> None:
    """Write a figure to a path or an open file, with the same bytes each time: as ``"png"``, or as ``"svg"``."""
    check_option("picture_format", picture_format, PICTURE_FORMATS)
    with _setting, require("matplotlib", extra="bundle").rc_context({"svg.fonttype": "none", "svg.hashsalt": "map"}):
        if picture_format == "svg":
            figure.savefig(path, format="svg", dpi=200, metadata={"Date": None})
        else:  # `savefig` would draw twice, the first time for the layout
            require("matplotlib.backends.backend_agg", extra="bundle").FigureCanvasAgg(figure).print_png(path)


def _heading(title: str, rows: Sequence[_Row]) -> list[str]:
    """The lines above a figure: its title, and a sentence for each row where nothing supports the score."""
    lines = [title] if title else []
    for number, row in enumerate(rows, start=1):
        if row.verdict:
            lines.append(f"row {number}: {row.verdict}" if len(rows) > 1 else row.verdict)
    return lines


def _wrapped(lines: Sequence[str], width: int) -> str:
    """Lines of at most ``width`` characters."""
    wrapped = []
    for line in "\n".join(lines).split("\n"):
        wrapped += textwrap.wrap(line, width) or [""]
    return "\n".join(wrapped)


def _draw(ax: Any, plane: _Plane, window: tuple[float, float], row: _Row) -> Any:
    """Draw one plane of a row, with lines through its peak, and return the map's drawing for the colour bar."""
    scan, saliency, coloured = (plane.layers[name].T for name in ("scan", "saliency", "coloured"))
    place = {"origin": "lower", "extent": plane.extent}
    ax.set_facecolor("black")  # where the scan is NaN
    ax.imshow(scan, cmap="gray", vmin=window[0], vmax=window[1], **place)
    cmap, norm = colour_map(row.legend.scale)
    drawn = ax.imshow(
        finite(saliency),
        cmap=cmap,
        norm=norm,
        alpha=opacities(saliency, coloured, row.legend.scale),
        interpolation="bilinear",
        **place,
    )
    if "label" in plane.layers:
        _outline(ax, plane)
    if row.is_coloured:
        x, y = (np.array(plane.peak) + 0.5) * plane.edges
        ax.axvline(x, color="lime", linewidth=0.5)
        ax.axhline(y, color="lime", linewidth=0.5)
    ax.set(xticks=[], yticks=[], xlabel=plane.across, ylabel=plane.up)
    ax.set(xlim=plane.extent[:2], ylim=plane.extent[2:])
    ax.set_title(plane.name, fontsize=8)
    return drawn


def _outline(ax: Any, plane: _Plane) -> None:
    """Draw a line around the label, or around each of its numbers."""
    effects = require("matplotlib.patheffects", extra="bundle")
    # Closed at the plane's edge, and drawn in a plane that is one voxel thin.
    label = np.pad(np.nan_to_num(plane.layers["label"]), 1).T
    width, height = plane.edges
    _, right, _, top = plane.extent
    extent = (-width, right + width, -height, top + height)
    halo = effects.withStroke(linewidth=1.8, foreground="black")
    numbers = np.unique(label[label != 0])
    parts = [label == number for number in numbers]
    if len(numbers) > _MANY_LABELS:
        parts = [label != 0]
    for part in parts:
        lines = ax.contour(part, levels=[0.5], origin="lower", extent=extent, colors="white", linewidths=0.8)
        lines.set(path_effects=[halo])


def _bar(figure: Figure, drawn: Any, axes: list[Any], row: _Row) -> Any:
    """The colour bar of a row, gray below the floor. It ends in a point where the map goes beyond the scale."""
    legend = row.legend
    bar: Any = figure.colorbar(drawn, ax=axes, shrink=0.8, extend=_extend(row))
    # Without this the bar would be as transparent as the map.
    bar.solids.set_alpha(1)
    ticks = legend.scale * np.array([-1, -0.5, -0.1, 0, 0.1, 0.5, 1])
    bar.set_ticks(ticks if legend.signed else ticks[3:])
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    bar.minorticks_off()
    gray = min(legend.floor(row.has_error), legend.scale)
    bar.ax.axhspan(-gray, gray, color="lightgray")
    if not legend.signed:
        bar.ax.set_ylim(0, legend.scale)
    return bar


def _extend(row: _Row) -> str:
    """At which ends a row's map goes beyond its scale, as matplotlib calls it."""
    largest = row.legend.scale * (1 + 1e-6)
    values = row.saliency[np.isfinite(row.saliency)]
    is_above = values.max(initial=0) > largest
    if values.min(initial=0) < -largest:
        return "both" if is_above else "min"
    return "max" if is_above else "neither"


def _planes(
    scan: np.ndarray, saliency: np.ndarray, coloured: np.ndarray, label: np.ndarray | None, affine: np.ndarray
) -> list[_Plane]:
    """The planes through a map's focus: three of a 3D scan, or the 2D scan itself."""
    layers = {"scan": scan, "saliency": saliency, "coloured": coloured}
    if label is not None:
        layers["label"] = np.asarray(label)
    known = finite(saliency)
    focus = focus_voxel(known, coloured)
    if scan.ndim == 3:
        return _three_planes(layers, focus, affine)
    rows_down = affine[1, 1] < 0
    name = ""
    if coloured.any():
        name = f"peak at pixel {focus}" if focus == peak_voxel(known) else f"strongest at pixel {focus}"
    if rows_down:
        layers = {layer: pixels[:, ::-1] for layer, pixels in layers.items()}
        focus = (focus[0], scan.shape[1] - 1 - focus[1])
    return [_Plane(layers, nib.affines.voxel_sizes(affine)[:2], (focus[0], focus[1]), name)]


def _three_planes(layers: Mapping[str, np.ndarray], focus: tuple[int, ...], affine: np.ndarray) -> list[_Plane]:
    """The planes of volumes ``(*spatial)`` through a voxel, in the order of the scanner's axes."""
    # The voxel is found before reordering: in a flat map, reordering could choose another one.
    mm = affine @ [*focus, 1]
    turn = nib.io_orientation(affine)
    back = nib.orientations.inv_ornt_aff(turn, layers["scan"].shape)
    turned = affine @ back
    volumes = {name: nib.apply_orientation(volume, turn) for name, volume in layers.items()}
    edges = nib.affines.voxel_sizes(turned)
    voxel = np.linalg.inv(turned) @ mm
    place = np.rint(voxel).astype(int).tolist()
    planes = []
    for name, axis, across, up in _PLANES:
        number = place[axis]
        parts = {layer: volume.take(number, axis) for layer, volume in volumes.items()}
        planes.append(
            _Plane(
                parts,
                edges=(edges[across], edges[up]),
                peak=(place[across], place[up]),
                name=f"{name}, {'xyz'[axis]} = {round(mm[axis])} mm",
                across=_AXES[across],
                up=_AXES[up],
            )
        )
    return planes
