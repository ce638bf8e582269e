"""Pictures to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import nibabel as nib
import numpy as np

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.utils.optional_imports import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_saliency"]

_PLANES = (("sagittal", 0), ("coronal", 1), ("axial", 2))


_AXES = (("L", "R"), ("P", "A"), ("I", "S"))


def plot_saliency(
    scan: np.ndarray,
    maps: np.ndarray,
    affine: np.ndarray,
    title: str = "",
    labels: Sequence[str] | None = None,
) -> Figure:
    """Maps drawn over their scan: for each the three planes through its peak, and a colour bar.

    Voxels are shown as they were scanned, reordered to look along the axes nearest to the scanner's, and not
    resampled. Colours are centred at zero: warm where the map supports the score, cold where it speaks against.
    The weaker the map, the more of the scan shows through.

    Args:
        scan: ``(*spatial)``, 2D or 3D.
        maps: ``(K, *spatial)`` on the scan's grid.
        affine: ``(4, 4)``, voxel to scanner mm.
        title: of the picture.
        labels: of each map.

    Raises:
        OptionalImportError: when matplotlib is not installed.
    """
    # A bare Figure draws without pyplot, whose state is shared between threads and needs closing.
    figure_type = require("matplotlib.figure", extra="bundle").Figure
    views = [_planes(scan, each, affine) for each in maps]
    figure = figure_type(
        figsize=(3.2 * len(views[0]) + 1.2, 3.4 * len(views) + 0.5), layout="constrained", facecolor="white"
    )
    # No font has what stands for the bytes of a file name that is not UTF-8.
    figure.suptitle(title.encode(errors="replace").decode(), fontsize=10)
    axes = figure.subplots(
        len(views),
        len(views[0]),
        squeeze=False,
        width_ratios=[plane["shape"][0] * plane["edges"][0] for plane in views[0]],
    )
    # A small lesion may be the brightest thing in the scan, and must not be clipped away.
    low, high = np.percentile(scan, [0.5, 99.99])
    for row, (planes, saliency) in enumerate(zip(views, maps, strict=True)):
        limit = float(np.abs(saliency).max()) or 1.0
        for column, plane in enumerate(planes):
            ax = axes[row, column]
            extent = (0, plane["shape"][0] * plane["edges"][0], 0, plane["shape"][1] * plane["edges"][1])
            ax.imshow(plane["scan"].T, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), origin="lower", extent=extent)
            drawn = ax.imshow(
                plane["map"].T,
                cmap="RdBu_r",
                vmin=-limit,
                vmax=limit,
                # Strong values cover, weak ones leave the scan to see.
                alpha=0.6 * np.clip(np.abs(plane["map"].T) / limit, 0, 1),
                origin="lower",
                extent=extent,
                interpolation="bilinear",
            )
            x, y = ((plane["peak"][i] + 0.5) * plane["edges"][i] for i in (0, 1))
            ax.axvline(x, color="lime", linewidth=0.5)
            ax.axhline(y, color="lime", linewidth=0.5)
            ax.set(xticks=[], yticks=[], xlabel=plane["across"], ylabel=plane["up"])
            ax.set_title(plane["name"], fontsize=8)
        # The overlay's alpha would wash the bar out.
        bar = figure.colorbar(drawn, ax=axes[row].tolist(), shrink=0.8)
        bar.solids.set_alpha(1)
        bar.set_label(labels[row] if labels else "saliency (change of the score)", fontsize=8)
    return figure


def _planes(scan: np.ndarray, saliency: np.ndarray, affine: np.ndarray) -> list[dict]:
    """The slices through the peak with what is needed to draw them: voxel edges in mm, names and directions."""
    if scan.ndim == 2:
        edges = nib.affines.voxel_sizes(affine)[:2]
        peak = shown = peak_voxel(saliency)
        if affine[1, 1] < 0:  # rows count downwards
            scan, saliency = scan[:, ::-1], saliency[:, ::-1]
            shown = peak[0], scan.shape[1] - 1 - peak[1]
        return [
            {"scan": scan, "map": saliency, "shape": scan.shape, "edges": edges, "peak": shown}
            | {"name": f"peak at voxel {peak}", "across": "", "up": ""}
        ]
    mm = affine @ [*peak_voxel(saliency), 1]  # found once: where a map is flat, reordering it could choose another
    ras = [nib.as_closest_canonical(nib.Nifti1Image(np.asarray(v, np.float32), affine)) for v in (scan, saliency)]
    scan, saliency = (np.asarray(image.dataobj) for image in ras)
    edges = nib.affines.voxel_sizes(ras[0].affine)
    peak = tuple(np.rint(np.linalg.inv(ras[0].affine) @ mm).astype(int)[:3].tolist())
    planes = []
    for name, axis in _PLANES:
        a, b = (other for other in range(3) if other != axis)
        planes.append(
            {
                "scan": scan.take(peak[axis], axis),
                "map": saliency.take(peak[axis], axis),
                "shape": (scan.shape[a], scan.shape[b]),
                "edges": (edges[a], edges[b]),
                "peak": (peak[a], peak[b]),
                "name": f"{name}, {'xyz'[axis]} = {round(mm[axis])} mm",
                "across": "-".join(_AXES[a]),
                "up": "-".join(_AXES[b]),
            }
        )
    return planes
