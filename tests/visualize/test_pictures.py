from __future__ import annotations

from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers.maps import LEFTWARD, SHAPE, peaked, volume
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.contour import ContourSet

from monai_saliency.visualize.pictures import plot_saliency

#: the scan's axes are superior, right, posterior
PERMUTED = np.array([[0.0, 2, 0, 1], [0, 0, -1, 2], [3, 0, 0, 3], [0, 0, 0, 1]])


def crosshair(ax: Any) -> tuple[float, float]:
    vertical, horizontal = ax.lines
    return float(vertical.get_xdata()[0]), float(horizontal.get_ydata()[0])


def peak_mm(figure: Any, edges: np.ndarray) -> dict[int, float]:
    """Where the lines cross, by axis, in mm from the corner."""
    (y, z), (x, _) = crosshair(figure.axes[0]), crosshair(figure.axes[1])
    return {0: x, 1: y, 2: z}


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

    def test_the_outline_lies_where_the_label_does(self, affine: np.ndarray) -> None:
        """At the label's edges in mm: two labels that touch are told apart, and one at the scan's border is closed."""
        saliency, label = peaked(), np.zeros(SHAPE, np.int16)
        label[4:6, 2:5, :3] = 1
        label[6, 2:5, :3] = 2
        figure = plot_saliency(volume(), saliency[None], affine, label=label)
        turned = nib.as_closest_canonical(nib.Nifti1Image(label, affine))
        edges, voxels = nib.affines.voxel_sizes(turned.affine), np.asarray(turned.dataobj)
        for ax, (a, b) in zip(figure.axes, [(1, 2), (0, 2), (0, 1)], strict=False):
            plane = voxels.take([int(v / edges[i]) for i, v in peak_mm(figure, edges).items()][3 - a - b], 3 - a - b)
            outlines = [each for each in ax.collections if isinstance(each, ContourSet)]
            expected = [plane == value for value in np.unique(plane[plane != 0])]
            assert len(outlines) == len(expected) >= 1
            for outline, part in zip(outlines, expected, strict=True):
                (path,) = outline.get_paths()
                low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
                places = np.argwhere(part)
                np.testing.assert_allclose(low, places.min(axis=0) * edges[[a, b]], atol=1e-5)
                np.testing.assert_allclose(high, (places.max(axis=0) + 1) * edges[[a, b]], atol=1e-5)
            assert ax.get_xlim() == pytest.approx((0, voxels.shape[a] * edges[a]))
        assert figure.axes[3].get_ylabel().endswith("outline: the label")


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


# What is coloured. ----------------------------------------------------------------------------------------------------


def opacities(figure: Any) -> list[float]:
    """The largest opacity of each plane's colours; 0 where nothing is coloured."""
    return [float(np.max(ax.images[1].get_alpha())) for ax in figure.axes if len(ax.images) == 2]


def uncoloured(figure: Any) -> float:
    """The share of all shown voxels that have no colour."""
    shown = [np.asarray(ax.images[1].get_alpha()).ravel() for ax in figure.axes if len(ax.images) == 2]
    return float(np.mean(np.concatenate(shown) == 0))


def a_lesion(peak: float = 0.9) -> np.ndarray:
    """A map with one spot, and chance around it that is smaller than a hundredth."""
    noise = np.random.default_rng(3).uniform(-0.004, 0.004, (24, 24, 24))
    distance = np.linalg.norm(np.indices(noise.shape) - np.array([8, 14, 12]).reshape(3, 1, 1, 1), axis=0)
    return noise + peak * np.exp(-(distance**2) / 8)


def test_a_healthy_scan_and_a_lesion_look_as_different_as_they_are() -> None:
    scan = np.random.default_rng(4).normal(size=(24, 24, 24))
    healthy, lesion = (plot_saliency(scan, a_lesion(peak)[None], np.eye(4), "ct_7", scale=1) for peak in (0, 0.9))
    clims = [ax.images[1].get_clim() for figure in (healthy, lesion) for ax in figure.axes[:3]]
    assert clims == [(-1, 1)] * 6
    assert healthy.get_suptitle() == "ct_7\nno part of this scan changes the score by more than 0.004"
    assert lesion.get_suptitle() == "ct_7"
    assert uncoloured(healthy) == 1
    assert 0.05 < 1 - uncoloured(lesion) < 0.3
    # No lines mark a peak where there is none.
    assert [len(ax.lines) for ax in (*healthy.axes[:3], *lesion.axes[:3])] == [0] * 3 + [2] * 3


def test_what_lies_below_twice_its_standard_error_is_not_coloured() -> None:
    saliency = np.full((4, 5), 0.3)
    error = np.full((4, 5), 0.2)
    saliency[1, 2], error[1, 2] = 0.5, 0.24  # beyond
    saliency[3, 4], error[3, 4] = -0.5, 0.25  # just there
    saliency[0, 0], error[0, 0] = 0.005, 0.0  # certain, and nothing
    error[2, 2] = np.nan
    figure = plot_saliency(np.zeros((4, 5)), saliency[None], np.eye(4), scale=1, standard_error=error[None])
    alpha = np.asarray(figure.axes[0].images[1].get_alpha()).T
    assert np.argwhere(alpha).tolist() == [[1, 2], [3, 4]]
    assert figure.axes[1].get_ylabel().endswith("not coloured: below 0.01, or 2 standard errors")


def test_a_map_that_only_speaks_against_is_shown_where_it_does() -> None:
    """Its peak is a voxel of nearly 0, where nothing could be seen."""
    saliency = -np.abs(a_lesion()) - 1e-4
    figure = plot_saliency(np.zeros_like(saliency), saliency[None], np.eye(4), scale=1)
    assert crosshair(figure.axes[2]) == (8.5, 14.5)
    assert min(opacities(figure)) > 0
    flat = [plot_saliency(each[8], each[8:9], np.eye(4), scale=1) for each in (saliency, -saliency, 0 * saliency)]
    assert [each.axes[0].get_title() for each in flat] == ["strongest at pixel (14, 12)", "peak at pixel (14, 12)", ""]


@pytest.mark.parametrize("scale", [0, -1, float("nan"), "1"])
def test_a_wrong_scale_is_named(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"`scale` must be .*above 0, got"):
        plot_saliency(np.zeros((4, 4)), np.zeros((1, 4, 4)), np.eye(4), scale=scale)
