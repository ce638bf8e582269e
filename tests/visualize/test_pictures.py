from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from monai_saliency.cases import Case
from monai_saliency.handlers.summary import COLUMNS, Summary, figures, summarize
from monai_saliency.inferers.case_state import Explanation
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.targets import ClassScore, RegressionScore
from monai_saliency.visualize.pictures import plot_saliency

SHAPE = (7, 9, 6)
PEAK = (5, 2, 1)
#: x runs to the left, spacing 2, 1, 3 mm
LEFTWARD = np.array([[-2.0, 0, 0, 10], [0, 1, 0, -20], [0, 0, 3, 30], [0, 0, 0, 1]])
#: the scan's axes are superior, right, posterior
PERMUTED = np.array([[0.0, 2, 0, 1], [0, 0, -1, 2], [3, 0, 0, 3], [0, 0, 0, 1]])


def volume(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def peaked() -> np.ndarray:
    saliency = volume(1).clip(-1, 1)
    saliency[PEAK] = 4
    return saliency


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


def test_peak_voxel() -> None:
    assert peak_voxel(peaked()) == PEAK
    assert peak_voxel(np.array([[-5.0, -3.0], [-4.0, -9.0]])) == (0, 1)
    # Zeros, and what resampling leaves of them, are voxels that no mask hid.
    assert peak_voxel(np.array([[-5.0, -3.0], [0.0, -1e-15]])) == (0, 1)


def test_peak_voxel_of_a_plateau_is_its_middle() -> None:
    saliency = volume().clip(-1, 1)
    saliency[1:6, 2:5, 1:4] = 2 * (1 + np.random.default_rng(2).normal(size=(5, 3, 3)) * 1e-8)
    assert peak_voxel(saliency) == (3, 3, 2)


def explanation(maps: np.ndarray) -> Explanation:
    """Classes 2 and 0 of three, of which 1 is predicted with three quarters."""
    output = torch.tensor([[0.05, 0.75, 0.2]])
    image = torch.zeros(1, *maps.shape[1:])
    target = ClassScore([2, 0][: len(maps)], "none").bind(output, Case("ct_7", image))
    masks, scores = RISEMasks(5).bind(image), target(output)[0]
    return Explanation("ct_7", torch.from_numpy(maps), torch.zeros(5, len(maps)), scores, target, masks, num_forwards=6)


@pytest.fixture
def label(tmp_path: Path) -> Any:
    def save(data: np.ndarray, affine: np.ndarray) -> Path:
        nib.save(nib.Nifti1Image(data.astype(np.uint8), affine), tmp_path / "label.nii.gz")
        return tmp_path / "label.nii.gz"

    return save


class TestSummarize:
    def test_rows_by_hand(self) -> None:
        maps = np.stack([peaked(), np.full(SHAPE, -1, np.float32)])
        maps[1, 0, 0, 0] = -0.5
        first, second = summarize("sub/ct_7", explanation(maps), maps, LEFTWARD, seconds=1.23456)
        assert tuple(first) == COLUMNS
        assert first == {
            "case": "sub/ct_7",
            "prediction": 1,
            "probability": 0.75,
            "class": 2,
            "channel": "",
            "score": pytest.approx(0.2),
            # (10 - 2 * 5, -20 + 2, 30 + 3 * 1)
            "peak_x_mm": 0.0,
            "peak_y_mm": -18.0,
            "peak_z_mm": 33.0,
            "peak_saliency": 4.0,
            "peak_in_label": "",
            "forwards": 6,
            "seconds": 1.235,
        }
        assert (second["class"], second["score"], second["peak_saliency"]) == (0, pytest.approx(0.05), -0.5)
        assert (second["peak_x_mm"], second["peak_y_mm"], second["peak_z_mm"]) == (10.0, -20.0, 30.0)

    def test_values_that_are_no_classes(self) -> None:
        maps, output = peaked()[None], torch.tensor([[61.5]])
        image = torch.zeros(1, *SHAPE)
        target, masks = (
            RegressionScore(names=["age (years)"]).bind(output, Case("ct_7", image)),
            RISEMasks(5).bind(image),
        )
        regressed = Explanation("ct_7", torch.from_numpy(maps), torch.zeros(5, 1), output[0], target, masks, 6)
        (row,) = summarize("ct_7", regressed, maps, LEFTWARD)
        assert tuple(row) == COLUMNS
        assert [row[key] for key in ("class", "prediction", "probability", "score")] == [
            "age (years)",
            "61.5",
            "",
            61.5,
        ]

    def test_2d_scan(self) -> None:
        maps = peaked()[None, :, :, 1]
        (row,) = summarize("xray", explanation(maps), maps, LEFTWARD)
        assert (row["peak_x_mm"], row["peak_y_mm"], row["peak_z_mm"]) == (0.0, -18.0, 30.0)

    @pytest.mark.parametrize(("voxel", "expected"), [(PEAK, True), ((5, 2, 2), False), (None, "")])
    def test_peak_in_label(self, label: Any, voxel: tuple[int, ...] | None, expected: bool | str) -> None:
        data = np.zeros(SHAPE)
        if voxel:
            data[voxel] = 3
        maps = peaked()[None]
        (row,) = summarize("ct", explanation(maps), maps, LEFTWARD, label(data, LEFTWARD))
        assert row["peak_in_label"] == expected

    @pytest.mark.parametrize(
        ("inside", "expected"), [(((2, 7), (0, 3), (0, 3)), True), (((0, 2), (0, 9), (0, 6)), False)]
    )
    def test_label_on_another_grid(self, label: Any, inside: Any, expected: bool) -> None:
        """Half the spacing, other orientation: found by its place in the scanner."""
        data = np.zeros(SHAPE)
        data[tuple(slice(*each) for each in inside)] = 1
        flip = np.diag([-0.5, 0.5, 0.5, 1])
        flip[0, 3] = SHAPE[0] - 1 + 0.25
        flip[1:3, 3] = -0.25
        fine = np.kron(data, np.ones((2, 2, 2)))[::-1]
        maps = peaked()[None]
        (row,) = summarize("ct", explanation(maps), maps, LEFTWARD, label(fine, LEFTWARD @ flip))
        assert row["peak_in_label"] is expected

    def test_peak_outside_the_labels_field_of_view(self, label: Any) -> None:
        maps = peaked()[None]
        for far in (-1000.0, 1000.0):
            affine = LEFTWARD.copy()
            affine[1, 3] = far
            (row,) = summarize("ct", explanation(maps), maps, LEFTWARD, label(np.ones(SHAPE), affine))
            assert row["peak_in_label"] is False

    @pytest.mark.parametrize("dims", [2, 3])
    def test_label_with_an_axis_of_one(self, label: Any, dims: int) -> None:
        """(X, Y, Z, 1) and (X, Y, 1) are common ways to store a label."""
        data = np.zeros(SHAPE[:dims])
        data[PEAK[:dims]] = 1
        maps = peaked()[None] if dims == 3 else peaked()[None, :, :, 1]
        (row,) = summarize("ct", explanation(maps), maps, LEFTWARD, label(data[..., None], LEFTWARD))
        assert row["peak_in_label"] is True


class TestSummary:
    @staticmethod
    def rows(*cases: str) -> list[dict[str, Any]]:
        maps = peaked()[None]
        return [row for case in cases for row in summarize(case, explanation(maps), maps, LEFTWARD, seconds=1)]

    @staticmethod
    def read(path: Path) -> list[dict[str, str]]:
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def test_whole_after_every_case(self, tmp_path: Path) -> None:
        summary = Summary(tmp_path / "out" / "summary.csv")
        summary.add(self.rows("a, with comma"))
        assert [row["case"] for row in self.read(summary.path)] == ["a, with comma"]
        summary.add(self.rows("b", "ç"))
        rows = self.read(summary.path)
        assert [row["case"] for row in rows] == ["a, with comma", "b", "ç"]
        assert tuple(rows[0]) == COLUMNS
        assert (rows[1]["peak_y_mm"], rows[1]["class"], rows[1]["peak_in_label"]) == ("-18.0", "2", "")
        assert sorted(path.name for path in summary.path.parent.iterdir()) == [".summary.csv.lock", "summary.csv"]

    def test_a_failed_write_keeps_the_table(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        summary = Summary(tmp_path / "summary.csv")
        summary.add(self.rows("a"))

        def fail(*_: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(csv.DictWriter, "writerows", fail)
        with pytest.raises(OSError, match="No space left"):
            summary.add(self.rows("b"))
        assert [row["case"] for row in self.read(summary.path)] == ["a"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".summary.csv.lock", "summary.csv"]


class TestFigures:
    @pytest.mark.parametrize("read", [False, True])
    def test_by_hand(self, read: bool, tmp_path: Path) -> None:
        """A case of two rows, its peaks in the label and beside it, and one without label or time."""
        row = {"prediction": 1, "probability": 0.75, "peak_x_mm": 0, "peak_y_mm": 0, "peak_z_mm": 0, "class": 0}
        rows = [
            row | {"case": case, "score": score, "peak_saliency": 10 * score}
            | {"peak_in_label": inside, "forwards": forwards, "seconds": seconds}
            for case, score, inside, forwards, seconds in [
                ("a", 0.5, True, 7, 1.5), ("a", 0.25, False, 7, 1.5), ("b", 0.75, "", 9, float("nan"))
            ]
        ]  # fmt: skip
        summary = Summary(tmp_path / "summary.csv")
        summary.add(rows)
        assert figures(summary.read() if read else rows, failures=4) == {
            "cases": 2,
            "failures": 4,
            "forwards": 16,
            "seconds": 1.5,
            "mean_score": 0.5,
            "mean_peak_saliency": 5.0,
            "peak_in_label": 0.5,
        }

    def test_no_case(self, tmp_path: Path) -> None:
        nothing = {"cases": 0, "failures": 2, "forwards": 0, "seconds": 0}
        assert figures(Summary(tmp_path / "summary.csv").read(), failures=2) == nothing
