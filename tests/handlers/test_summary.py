import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.maps import LEFTWARD, PEAK, SHAPE, peaked
from monai.inferers import SlidingWindowInferer
from monai.transforms import Compose, ScaleIntensityRanged, Spacingd

import monai_saliency as ms
from monai_saliency.handlers import run_settings
from monai_saliency.handlers import summary as summaries
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.storage.tables import SUMMARY_COLUMNS, CaseTable
from monai_saliency.visualize.legend import is_noise


def explanation(maps: np.ndarray) -> ms.Explanation:
    """Classes 2 and 0 of three, of which 1 is predicted with three quarters."""
    output = torch.tensor([[0.05, 0.75, 0.2]])
    image = torch.zeros(1, *maps.shape[1:])
    target = ms.ClassScore([2, 0][: len(maps)], "none").bind(output, ms.Case("ct_7", image))
    masks, scores = RISEMasks(5).bind(image), target(output)[0]
    observed = ms.masks.Observed(masks, scores, range(5), torch.zeros(5, len(maps)))
    given = ("ct_7", observed.scores, range(5), scores, target, masks, [observed])
    return ms.Explanation(*given, num_forwards=6, maps=torch.from_numpy(maps))


def with_noise(found: ms.Explanation, *noise: float) -> ms.Explanation:
    """An explanation whose noise is known, as where its estimator tells it."""
    vars(found)["noise"] = torch.tensor(noise)
    return found


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
        first, second = summaries.summarize("sub/ct_7", explanation(maps), maps, LEFTWARD)
        assert tuple(first) == SUMMARY_COLUMNS[:-3]
        assert first == {
            "case": "sub/ct_7",
            "prediction": 1,
            "probability": 0.75,
            "class": 2,
            "channel": "",
            "score": pytest.approx(0.2),
            "score_without_peak": "",
            "quantity": "network output of the class",
            "unit": "network output",
            # (10 - 2 * 5, -20 + 2, 30 + 3 * 1)
            "peak_x_mm": 0.0,
            "peak_y_mm": -18.0,
            "peak_z_mm": 33.0,
            "peak_saliency": 4.0,
            "lowest_saliency": float(maps[0].min()),
            "noise": "",
            "verdict": "",
            "peak_in_label": "",
            "fill_leaves": "",
            "images": 6,
            "forwards": 6,
            "predictions": 6.0,
            "stopped": "",
        }
        assert (second["class"], second["score"], second["peak_saliency"]) == (0, pytest.approx(0.05), -0.5)
        assert (second["peak_x_mm"], second["peak_y_mm"], second["peak_z_mm"]) == (10.0, -20.0, 30.0)

    def test_noise_of_each_map(self) -> None:
        """A noise for each explained value, repeated for each channel; a peak is read beside it."""
        maps = np.stack([peaked(), np.full(SHAPE, 0.5, np.float32)])
        rows = summaries.summarize("ct_7", with_noise(explanation(maps), 0.5, 0.25), maps, LEFTWARD)
        assert [row["noise"] for row in rows] == [0.5, 0.25]
        assert [is_noise(row) for row in rows] == [False, True]
        assert summaries.figures([row | {"seconds": 1} for row in rows])["maps_of_noise"] == 1
        assert not any(is_noise(row) for row in summaries.summarize("ct_7", explanation(maps), maps, LEFTWARD))
        flat = with_noise(explanation(maps), 0.0, 0.0)
        assert [is_noise(row) for row in summaries.summarize("ct_7", flat, 0 * maps, LEFTWARD)] == [True, True]

    @pytest.mark.parametrize(("voxel", "expected"), [(PEAK, True), ((5, 2, 2), False), (None, "")])
    def test_peak_in_label(self, label: Any, voxel: tuple[int, ...] | None, expected: bool | str) -> None:
        data = np.zeros(SHAPE)
        if voxel:
            data[voxel] = 3
        maps = peaked()[None]
        (row,) = summaries.summarize("ct", explanation(maps), maps, LEFTWARD, label(data, LEFTWARD))
        assert row["peak_in_label"] == expected

    def test_a_label_of_another_place(self, label: Any, caplog: pytest.LogCaptureFixture) -> None:
        """It misses every peak, which tells nothing about the map: it is reported, not counted."""
        data = np.zeros(SHAPE)
        data[PEAK] = 1
        away = LEFTWARD.copy()
        away[:3, 3] += 500
        maps = peaked()[None]
        (row,) = summaries.summarize("ct", explanation(maps), maps, LEFTWARD, label(data, away))
        assert row["peak_in_label"] == ""
        assert "lies outside of the scan, so `peak_in_label` is empty: correct the label's affine" in caplog.text


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
        summary = CaseTable(tmp_path / "summary.csv")
        summary.add(rows)
        expected = {"cases": 2, "failures": 4, "forwards": 16, "seconds": 1.5}
        expected |= {"mean_score": 0.5, "mean_peak_saliency": 5.0, "peak_in_label": 0.5}
        assert summaries.figures(summary.read() if read else rows, failures=4) == expected


# What made the rows.
def words(*steps: Any, weight: float = 1.0, **changes: Any) -> dict[str, str]:
    network = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(network.weight, weight)
    torch.nn.init.constant_(network.bias, 0)
    given = {"num_masks": 50, "grid_size": 3, "target": ms.ClassScore([1], "softmax"), "fill": ms.ConstantFill(0.0)}
    loader = SimpleNamespace(dataset=SimpleNamespace(dataset=SimpleNamespace(transform=Compose(steps))))
    return run_settings.described(ms.rise(**given | changes), network, loader=loader)


SPACING = Spacingd("image", (1, 1, 2))
OTHERS: dict[str, dict[str, str]] = {
    "masks.seed": words(SPACING, seed=1),
    "target.classes.0": words(SPACING, target=ms.ClassScore([0], "softmax")),
    "fill.value": words(SPACING, fill=ms.ConstantFill(-1.0)),
    "inferer": words(SPACING, inferer=SlidingWindowInferer((2, 2))),
    "network": words(SPACING, weight=2.0),
    "preprocessing.transforms": words(SPACING, ScaleIntensityRanged("image", 0, 1)),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_rows_of_other_settings_are_marked(difference: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = CaseTable(tmp_path / "summary.csv", columns=("case", "settings"))
    mark = run_settings.note_settings(table, words(SPACING))
    table.add([{"case": "a", "settings": mark}])
    assert run_settings.note_settings(table, words(SPACING, mask_batch_size=3, progress=True)) == mark  # decides no map
    assert not caplog.messages
    other = run_settings.note_settings(table, OTHERS[difference])
    (message,) = caplog.messages
    assert "1 cases (the first is a) were explained with other settings" in message
    known = json.loads((tmp_path / "summary.settings.json").read_text())
    assert known[mark][difference] != known[other][difference]
    run_settings.warn_of_others(table, ["b"])
    assert "1 cases (the first is a) are not of this cohort" in caplog.text


def test_a_scan_is_known_by_its_content(tmp_path: Path) -> None:
    for name, content in (("a", b"1"), ("moved", b"1"), ("b", b"2")):
        (tmp_path / name).write_bytes(content)
    first, moved, other, none = (run_settings.scan_mark(str(tmp_path / name)) for name in ("a", "moved", "b", "none"))
    assert first == moved != other
    assert none == ""
