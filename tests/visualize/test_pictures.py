from __future__ import annotations

from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers.maps import LEFTWARD, PEAK, SHAPE, peaked, volume
from matplotlib.backends.backend_agg import FigureCanvasAgg

from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.visualize.pictures import plot_saliency

#: the scan's axes are superior, right, posterior
PERMUTED = np.array([[0.0, 2, 0, 1], [0, 0, -1, 2], [3, 0, 0, 3], [0, 0, 0, 1]])


def crosshair(ax: Any) -> tuple[float, float]:
    vertical, horizontal = ax.lines
    return float(vertical.get_xdata()[0]), float(horizontal.get_ydata()[0])


@pytest.mark.parametrize("affine", [np.eye(4), LEFTWARD, PERMUTED], ids=["identity", "leftward", "permuted"])
class TestPicture:
    def test_the_three_planes_through_the_peak(self, affine: np.ndarray) -> None:
        scan, saliency = volume(), peaked()
        figure = plot_saliency(scan, saliency[None], affine, title="ct_7")
        if affine is LEFTWARD:
            scan, saliency = scan[::-1], saliency[::-1]
        elif affine is PERMUTED:
            scan, saliency = (np.moveaxis(v, (1, 2, 0), (0, 1, 2))[:, ::-1] for v in (scan, saliency))
        x, y, z = np.unravel_index(saliency.argmax(), saliency.shape)
        for ax, plane in zip(figure.axes, [np.s_[x, :, :], np.s_[:, y, :], np.s_[:, :, z]], strict=False):
            below, above = ax.images
            assert np.array_equal(below.get_array(), scan[plane].T)
            assert np.array_equal(above.get_array(), saliency[plane].T)
            # Voxels are as large as they were scanned, and the lines cross at the peak's centre.
            row, column = np.unravel_index(saliency[plane].T.argmax(), saliency[plane].T.shape)
            _, right, _, top = below.get_extent()
            rows, columns = saliency[plane].T.shape
            np.testing.assert_allclose(
                crosshair(ax), [(column + 0.5) * right / columns, (row + 0.5) * top / rows], rtol=1e-6
            )
        assert figure.get_suptitle() == "ct_7"

    def test_planes_are_named_by_scanner_millimetres(self, affine: np.ndarray) -> None:
        figure = plot_saliency(volume(), peaked()[None], affine)
        x, y, z = affine[:3, :3] @ PEAK + affine[:3, 3]
        names = [ax.get_title() for ax in figure.axes[:3]]
        assert names == [f"sagittal, x = {x:.0f} mm", f"coronal, y = {y:.0f} mm", f"axial, z = {z:.0f} mm"]
        extents = [ax.images[0].get_extent() for ax in figure.axes[:3]]
        edges = {"sagittal": (1, 2), "coronal": (0, 2), "axial": (0, 1)}
        spans = np.abs(affine[:3, :3] @ SHAPE)
        for extent, (a, b) in zip(extents, edges.values(), strict=True):
            np.testing.assert_allclose(extent, (0, spans[a], 0, spans[b]))

    def test_a_plateau_is_shown_where_it_is_named(self, affine: np.ndarray) -> None:
        """Occlusion maps have many equal voxels: picture, names and summary must speak of the same one."""
        saliency = np.zeros(SHAPE, np.float32)
        saliency[1:5, 3:6, 2:4] = 1
        figure = plot_saliency(volume(), saliency[None], affine)
        mm = affine[:3, :3] @ peak_voxel(saliency) + affine[:3, 3]
        canonical = nib.as_closest_canonical(nib.Nifti1Image(saliency, affine)).affine
        for ax, (a, b) in zip(figure.axes, [(1, 2), (0, 2), (0, 1)], strict=False):
            shown = [
                canonical[i, 3] + position - nib.affines.voxel_sizes(canonical)[i] / 2
                for i, position in zip((a, b), crosshair(ax), strict=True)
            ]
            np.testing.assert_allclose(shown, [mm[a], mm[b]], atol=1e-5)

    def test_colours_are_centred_at_zero(self, affine: np.ndarray) -> None:
        maps = np.stack([peaked(), -10 * peaked()])
        figure = plot_saliency(volume(), maps, affine, labels=["tumour", "oedema"])
        limits = [ax.images[1].get_clim() for ax in figure.axes[:6]]
        assert limits == [(-4, 4)] * 3 + [(-40, 40)] * 3
        assert [ax.get_ylabel() for ax in figure.axes[6:]] == ["tumour", "oedema"]


def test_warm_supports_and_cold_speaks_against() -> None:
    """One quarter of the picture supports the score: the lower left one, where both voxel indices are low."""
    saliency = -np.ones((8, 6))
    saliency[:4, :3] = 1
    figure = plot_saliency(np.zeros((8, 6)), saliency[None], np.eye(4))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba()).astype(int)
    for x, y in ((1.7, 1.2), (1.7, 4.8), (6.2, 1.2), (6.2, 4.8)):
        column, row = figure.axes[0].transData.transform((x, y))
        red, _, blue = pixels[pixels.shape[0] - int(row) - 1, int(column), :3]
        warm = x < 4 and y < 3
        assert (red - blue > 20) if warm else (blue - red > 20), (x, y)


@pytest.mark.parametrize("dims", [2, 3])
def test_flat_maps_and_scans_can_be_drawn(dims: int) -> None:
    figure = plot_saliency(np.zeros(SHAPE[:dims]), np.zeros((1, *SHAPE[:dims])), np.eye(4))
    FigureCanvasAgg(figure).draw()
    assert figure.axes[0].images[1].get_clim() == (-1, 1)


def test_2d_picture() -> None:
    scan, saliency = volume()[:, :, 0], volume(1)[:, :, 0]
    figure = plot_saliency(scan, saliency[None], np.diag([2.0, 0.5, 1, 1]))
    below, above = figure.axes[0].images
    assert np.array_equal(below.get_array(), scan.T)
    assert np.array_equal(above.get_array(), saliency.T)
    peak = peak_voxel(saliency)
    assert crosshair(figure.axes[0]) == pytest.approx(((peak[0] + 0.5) * 2, (peak[1] + 0.5) * 0.5))
