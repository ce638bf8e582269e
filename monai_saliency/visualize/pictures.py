"""Maps over their scan: the three planes through each map's peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import nibabel as nib
import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.optional_imports import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_saliency"]

_PLANES = (("sagittal", 0), ("coronal", 1), ("axial", 2))
_AXES = (("L", "R"), ("P", "A"), ("I", "S"))


@dataclass(frozen=True)
class _Plane:
    """One plane through a map's peak.

    Attributes:
        scan: the scan's voxels, ``(across, up)``.
        saliency: the map's voxels, of the same shape.
        edges: a voxel's edges in mm, across and up.
        peak: the peak's voxel, across and up.
        name: the title.
        across: the direction of the horizontal axis, such as ``"L-R"``.
        up: the direction of the vertical axis.
    """

    scan: np.ndarray
    saliency: np.ndarray
    edges: Sequence[float]
    peak: tuple[int, ...]
    name: str
    across: str = ""
    up: str = ""

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
) -> Figure:
    """Draw maps over their scan: one row per map, with the three planes through the map's peak and a colour bar.

    Voxels are shown as they were scanned: reordered to the axes nearest to the scanner's axes, but not resampled. Warm
    colours are positive (the image supports the score there), cold colours are negative. The colours are centred at
    zero, and weak values let the scan show through.

    Args:
        scan: ``(*spatial)``, 2D or 3D.
        maps: ``(K, *spatial)`` on the scan's grid.
        affine: ``(4, 4)``, from voxels to scanner mm.
        title: the picture's title.
        labels: the label of each map's colour bar, K strings; by default ``"saliency (change of the score)"``.

    Returns:
        a figure. Save it with ``savefig``; it needs no closing.

    Raises:
        OptionalImportError: when matplotlib is not installed.

    Example::

        >>> scan, maps = np.zeros((8, 8, 4)), np.zeros((2, 8, 8, 4))
        >>> len(plot_saliency(scan, maps, np.eye(4)).axes)  # 2 rows of 3 planes, and 2 colour bars
        8
    """
    # A bare Figure needs no pyplot, whose state is shared between threads and needs closing.
    figure_type = require("matplotlib.figure", extra="bundle").Figure
    views = [_planes(scan, each, affine) for each in maps]
    figure = figure_type(
        figsize=(3.2 * len(views[0]) + 1.2, 3.4 * len(views) + 0.5), layout="constrained", facecolor="white"
    )
    # Fonts have no character for the bytes of a file name that is not UTF-8, and a name with dollars is not a formula.
    figure.suptitle(title.encode(errors="replace").decode(), fontsize=10, parse_math=False)
    widths = [plane.extent[1] for plane in views[0]]
    axes = figure.subplots(len(views), len(views[0]), squeeze=False, width_ratios=widths)
    # A small lesion can be the brightest part of the scan, so almost nothing is clipped at the upper end.
    low, high = np.percentile(scan, [0.5, 99.99])
    for row, (planes, saliency) in enumerate(zip(views, maps, strict=True)):
        limit = float(np.abs(saliency).max()) or 1.0
        for ax, plane in zip(axes[row], planes, strict=True):
            drawn = _draw(ax, plane, (low, max(high, low + 1e-6)), limit)
        bar = figure.colorbar(drawn, ax=axes[row].tolist(), shrink=0.8)
        # Without this the bar would be as transparent as the map.
        bar.solids.set_alpha(1)
        bar.set_label(labels[row] if labels else "saliency (change of the score)", fontsize=8, parse_math=False)
    return figure


def _draw(ax: Any, plane: _Plane, window: tuple[float, float], limit: float) -> Any:
    """Draw one plane, and return the map's drawing for its colour bar.

    Args:
        ax: where to draw.
        plane: the plane.
        window: the scan's values that are drawn black and white.
        limit: the map's largest absolute value.
    """
    ax.imshow(plane.scan.T, cmap="gray", vmin=window[0], vmax=window[1], origin="lower", extent=plane.extent)
    drawn = ax.imshow(
        plane.saliency.T,
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        # Strong values cover the scan, weak values let it show through.
        alpha=0.6 * np.clip(np.abs(plane.saliency.T) / limit, 0, 1),
        origin="lower",
        extent=plane.extent,
        interpolation="bilinear",
    )
    x, y = ((plane.peak[i] + 0.5) * plane.edges[i] for i in (0, 1))
    ax.axvline(x, color="lime", linewidth=0.5)
    ax.axhline(y, color="lime", linewidth=0.5)
    ax.set(xticks=[], yticks=[], xlabel=plane.across, ylabel=plane.up)
    ax.set_title(plane.name, fontsize=8)
    return drawn


def _planes(scan: np.ndarray, saliency: np.ndarray, affine: np.ndarray) -> list[_Plane]:
    """The planes through a map's peak: three of a 3D scan, or the 2D scan itself."""
    if scan.ndim == 2:
        edges = nib.affines.voxel_sizes(affine)[:2]
        peak = shown = peak_voxel(saliency)
        if affine[1, 1] < 0:  # rows count downwards
            scan, saliency = scan[:, ::-1], saliency[:, ::-1]
            shown = peak[0], scan.shape[1] - 1 - peak[1]
        return [_Plane(scan, saliency, edges, shown, f"peak at voxel {peak}")]
    # The peak is found before reordering: in a flat map, reordering could choose another voxel.
    mm = affine @ [*peak_voxel(saliency), 1]
    ras = [nib.as_closest_canonical(nib.Nifti1Image(np.asarray(v, np.float32), affine)) for v in (scan, saliency)]
    scan, saliency = (np.asarray(image.dataobj) for image in ras)
    edges = nib.affines.voxel_sizes(ras[0].affine)
    peak = tuple(np.rint(np.linalg.inv(ras[0].affine) @ mm).astype(int)[:3].tolist())
    planes = []
    for name, axis in _PLANES:
        a, b = (other for other in range(3) if other != axis)
        planes.append(
            _Plane(
                scan.take(peak[axis], axis),
                saliency.take(peak[axis], axis),
                (edges[a], edges[b]),
                (peak[a], peak[b]),
                f"{name}, {'xyz'[axis]} = {round(mm[axis])} mm",
                "-".join(_AXES[a]),
                "-".join(_AXES[b]),
            )
        )
    return planes
