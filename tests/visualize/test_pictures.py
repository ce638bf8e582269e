import io
from collections.abc import Callable
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.maps import LEFTWARD, SHAPE, peaked, volume
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.contour import ContourSet

import monai_saliency as ms
from monai_saliency.visualize.legend import CHANCE, COLD, WARM, Legend, blended, is_noise
from monai_saliency.visualize.pictures import plot_saliency, save_picture

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
        peak = peak_mm(figure, edges)
        for ax, across in zip(figure.axes, range(3), strict=False):
            shown = [axis for axis in range(3) if axis != across]
            plane = voxels.take(int(peak[across] / edges[across]), across)
            outlines = [drawn for drawn in ax.collections if isinstance(drawn, ContourSet)]
            values = np.unique(plane[plane != 0])
            assert len(outlines) == len(values) >= 1
            for outline, value in zip(outlines, values, strict=True):
                check_outline(outline, plane == value, edges[shown])
            assert ax.get_xlim() == pytest.approx((0, voxels.shape[shown[0]] * edges[shown[0]]))
        assert figure.axes[3].get_ylabel().endswith("outline: the label")


def check_outline(outline: ContourSet, inside: np.ndarray, edges: np.ndarray) -> None:
    """It ends where the outermost voxels of a plane end that are inside, with voxels of some edge lengths in mm."""
    (path,) = outline.get_paths()
    voxels = np.argwhere(inside)
    np.testing.assert_allclose(path.vertices.min(axis=0), voxels.min(axis=0) * edges, atol=1e-5)
    np.testing.assert_allclose(path.vertices.max(axis=0), (voxels.max(axis=0) + 1) * edges, atol=1e-5)


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


# What a picture's colours mean, for every method and kind of score.
#: the probability of class 1 rises with the bright corner of the image
IMAGE = torch.zeros(1, 1, 16, 16)
IMAGE[..., 2:6, 8:12] = 1

METHODS: dict[str, Callable[..., Any]] = {
    "sliding_window": lambda **given: ms.sliding_window(4, 4, **given),
    "rise": lambda **given: ms.rise(40, 4, **given),
    "hierarchical_occlusion": lambda **given: ms.hierarchical_occlusion(8, 3, **given),
    "focused_rise": lambda **given: ms.focused_rise(40, **given),
    "shapley": lambda **given: ms.shapley(regions=ms.Supervoxels(6), **given),
    "hsic": lambda **given: ms.hsic(40, 4, **given),
    "sobol": lambda **given: ms.sobol(8, 4, **given),
    "minimal_region": lambda **given: ms.minimal_region(window_size=8, levels=2, **given),
    "mc_rise": lambda **given: ms.mc_rise(40, 4, more_fills=(), **given),
    "squared_difference": lambda **given: ms.squared_difference(4, 4, **given),
    "sbsm": lambda **given: ms.sbsm(4, 4, **given),
    "drise": lambda **given: ms.drise(40, 4, **given),
}


def explained(method: str = "sliding_window", gain: float = 1.0, activation: str = "softmax") -> ms.Explanation:
    """A network whose logit of class 1 is ``gain`` times the sum of the bright part, less 8."""

    def network(x: torch.Tensor) -> torch.Tensor:
        logit = gain * (x[:, 0, 2:6, 8:12].sum(dim=(1, 2)) - 8)
        return torch.stack([torch.zeros_like(logit), logit], dim=1)

    target = ms.ClassScore([1], activation, "probability")
    (found,) = METHODS[method](target=target).explain(IMAGE, network)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_what_the_colour_bar_says_of_each_method(method: str) -> None:
    (legend,) = Legend.of(explained(method))
    drop = "change of the score (softmax probability of the class)"
    expected = {
        "hierarchical_occlusion": (3, "score change, summed over 3 window sizes (softmax probability of the class)"),
        "hsic": (0.25, "dependence of the score (HSIC), without sign"),
        "sobol": (1, "share of the score's variance (Sobol)"),
        "minimal_region": (1, "1 in the smallest set that keeps the score"),
        "mc_rise": (1, "change of the score against each fill (softmax probability of the class)"),
        "squared_difference": (0.5, "half the squared change of the score"),
        "sbsm": (1, "loss of the score (softmax probability of the class)"),
    }.get(method, (1, drop))
    assert (legend.scale, legend.words) == expected
    assert legend.in_score_unit == (method not in ("hsic", "sobol", "minimal_region", "squared_difference"))
    assert legend.signed == (legend.in_score_unit and method != "sbsm")
    assert legend.note == ""


@pytest.mark.parametrize("method", METHODS)
def test_a_score_that_hardly_changes_has_no_map(method: str) -> None:
    """HSIC and Sobol indices have no unit: they are as large for a probability that changes by a thousandth."""
    weak, strong = explained(method, gain=1e-4), explained(method)
    for explanation, nothing in ((weak, True), (strong, False)):
        maps = explanation.saliency.numpy()
        legends = Legend.of(explanation)
        assert [legend.is_nothing(each) for legend, each in zip(legends, maps, strict=True)] == [nothing]
        words = " ".join(legend.verdict(each, None) for legend, each in zip(legends, maps, strict=True))
        assert ("changes the score by more than" in words) == nothing
    change = float((weak.scores - weak.reference_scores).abs().max())
    assert 0 < change < 0.01
    if method in ("hsic", "sobol"):
        assert float(weak.saliency.max()) > 0.1 * float(strong.saliency.max())
        (legend,) = Legend.of(weak)
        assert legend.verdict(weak.saliency[0].numpy(), None) == f"no mask changes the score by more than {change:.2g}"


@pytest.mark.parametrize(("gain", "scale"), [(1.0, 10), (0.1, 1), (4.0, 50)])
def test_logits_are_drawn_on_the_scale_of_the_case_unless_one_is_given(gain: float, scale: float) -> None:
    """8 times the gain, for the whole image and with a minus for none of it."""
    explanation = explained(gain=gain, activation="none")
    (own,), (given,) = Legend.of(explanation), Legend.of(explanation, 20)
    assert (own.scale, own.note) == (scale, "on this scan's own scale")
    assert (given.scale, given.note) == (20, "")
    assert own.span == given.span == pytest.approx(8 * gain)
    assert not own.is_nothing(explanation.saliency[0].numpy())


@pytest.mark.parametrize(
    ("peak", "noise", "error", "chance", "nothing"),
    [
        (0.5, 0.2, None, True, False),  # within five times the noise
        (0.5, 0.09, None, False, False),
        (0.5, 0.09, 0.3, True, False),  # beyond the map's noise, but not its own error
        (0.5, 0.09, 0.2, False, False),
        (0.005, 0.002, 0.001, True, True),
        (0.005, 0.0, 0.001, True, True),  # no value that matters is beyond its error
        (0.0, 0.0, None, True, True),
    ],
)
def test_one_predicate_for_what_may_be_chance(peak: Any, noise: float, error: Any, chance: bool, nothing: bool) -> None:
    """The verdict, the colours, and the rows of the table agree."""
    saliency, legend = np.zeros((4, 5)), Legend(1.0, 1.0, noise=noise)
    saliency[1, 2] = peak
    errors = None if error is None else np.full((4, 5), error)
    verdict = legend.verdict(saliency, errors)
    assert (CHANCE in verdict, "changes the score by more than" in verdict) == (chance, nothing)
    coloured = legend.coloured(saliency, errors)
    assert coloured.any() == (not verdict)
    words = "no place supports the score: all that is coloured speaks against it"
    assert [legend.against(each, coloured) for each in (saliency, -saliency)] == ["", "" if verdict else words]
    row = {"peak_saliency": peak, "lowest_saliency": 0.0, "noise": noise, "verdict": verdict}
    assert is_noise(row) == chance


# Deuteranopia, from Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009), severity 1, for linear RGB.
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
# From linear sRGB to XYZ, relative to the white point D65.
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def lightness_and_yellow(colours: np.ndarray, seen_by: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """CIELAB's L* and b* of sRGB colours ``(n, 3)`` in [0, 1]; b* is positive for yellow and negative for blue."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    linear = linear if seen_by is None else (linear @ np.asarray(seen_by).T).clip(0, 1)
    xyz = linear @ TO_XYZ.T / TO_XYZ.sum(axis=1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return 116 * f[:, 1] - 16, 200 * (f[:, 1] - f[:, 2])


def strengths(colours: tuple[str, ...]) -> np.ndarray:
    """101 colours from the weakest to the strongest."""
    stops = np.array([[int(each[i : i + 2], 16) / 255 for i in (1, 3, 5)] for each in colours])
    return np.stack([np.interp(np.linspace(0, len(stops) - 1, 101), range(len(stops)), each) for each in stops.T], 1)


def test_lightness_grows_with_strength_on_a_dark_scan() -> None:
    values = np.linspace(0.01, 1, 50)
    for sign in (1, -1):
        picture = blended(np.full((1, 50), 0.1), sign * values[None], np.ones((1, 50), bool), 1.0)
        lightness, _ = lightness_and_yellow(picture[0] / 255)
        assert (np.diff(lightness) > -0.3).all()  # up to the rounding to 8 bits
        assert lightness[-1] > lightness[0] + 15


def test_the_sign_survives_deuteranopia_and_grey_print() -> None:
    """Every warm colour is lighter than every cold one, and yellow stays yellow."""
    (warm, yellow), (cold, blue) = (
        lightness_and_yellow(strengths(colours), DEUTERANOPIA) for colours in (WARM, COLD[::-1])
    )
    assert yellow.min() > 30 > -30 > blue.max()
    assert warm.min() > cold.max() + 8
    (warm, _), (cold, _) = (lightness_and_yellow(strengths(colours)) for colours in (WARM, COLD[::-1]))
    assert warm.min() > cold.max() + 8


def test_tensors_channels_and_no_affine() -> None:
    """A picture of rows and columns, of one channel or three, as it is seen; a batch is refused by what to write."""
    image, saliency = torch.zeros(3, 8, 6), torch.zeros(1, 8, 6)
    saliency[0, 1, 4] = 1  # near the top, on the right
    figure = plot_saliency(image, saliency)
    assert figure.axes[0].get_title() == "peak at pixel (4, 1)"
    assert "this map: 0 to 1\n" in figure.axes[-1].get_ylabel()
    assert pixels_of(figure) == pixels_of(
        plot_saliency(image[0].T.numpy(), saliency.mT.numpy(), np.diag([1, -1, 1, 1]))
    )
    deep = torch.rand(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert pixels_of(plot_saliency(deep, deep)) == pixels_of(plot_saliency(deep[0].numpy(), deep.numpy(), np.eye(4)))
    with pytest.raises(ValueError, match=r"of a batch give maps\[0\] and images\[0\]"):
        plot_saliency(image[None], saliency[None])


def pixels_of(figure: Any) -> bytes:
    file = io.BytesIO()
    save_picture(figure, file)
    return file.getvalue()
