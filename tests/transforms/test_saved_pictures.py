"""What a saved picture is drawn with: the scale, the standard error and the label of its case."""

import base64
import io
import logging
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nibabel as nib
import numpy as np
import pytest
import torch
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from monai.data import DataLoader, Dataset, MetaTensor, decollate_batch
from monai.transforms import Compose, EnsureChannelFirstd, Flipd, Invertd, LoadImaged
from PIL import Image

import monai_saliency as ms
from monai_saliency.storage.scans import scan_loader
from monai_saliency.transforms import SaveSaliencyd, save

SHAPE = (12, 10, 8)
AFFINE = np.diag([-1.0, 1.5, 2.0, 1.0])
AFFINE[:3, 3] = [10, -7, 3]
#: where an SVG holds an image's bytes
HREF = "{http://www.w3.org/1999/xlink}href"
#: the label's box, in voxels of the scan
BOX = np.s_[3:7, 2:6, 4:6]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Figure, dict[str, Any]]]:
    """The figures that are drawn, and what they are drawn with."""
    found: list[tuple[Figure, dict[str, Any]]] = []
    plot = save.plot_saliency

    def noted(*args: Any, **given: Any) -> Figure:
        found.append((plot(*args, **given), given))
        return found[-1][0]

    monkeypatch.setattr(save, "plot_saliency", noted)
    return found


def a_case(folder: Path, name: str = "ct_7", peak: float = 0.5, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """An item with a map of one box, of ``peak``, on its scan."""
    path = folder / f"{name}.nii.gz"
    nib.save(nib.Nifti1Image(np.random.default_rng(0).normal(size=shape).astype(np.float32), AFFINE), path)
    item = Compose([LoadImaged("image"), EnsureChannelFirstd("image")])({"image": str(path), "case": name})
    maps = torch.zeros(1, *shape)
    maps[0][BOX] = peak
    item["saliency"] = MetaTensor(maps).copy_meta_from(item["image"])
    return item


def saved_label(folder: Path, coarse: bool = False) -> Path:
    """The box, on the scan's grid or on one of another origin, other axes and finer voxels."""
    path, values = folder / "label.nii.gz", np.zeros(SHAPE, np.uint8)
    values[BOX] = 3
    if not coarse:
        nib.save(nib.Nifti1Image(values, AFFINE), path)
        return path
    # Each voxel of the scan is 2 x 2 x 2 of the label's, whose first axis runs from inferior to superior.
    fine = values.repeat(2, axis=0).repeat(2, axis=1).repeat(2, axis=2)[2:, 2:, 2:]
    to_scan = np.array([[0.5, 0, 0, 0.75], [0, 0.5, 0, 0.75], [0, 0, 0.5, 0.75], [0, 0, 0, 1]])
    turned = nib.Nifti1Image(fine, AFFINE @ to_scan).as_reoriented(np.array([[2, 1], [1, 1], [0, 1]]))
    nib.save(turned, path)
    return path


@pytest.mark.parametrize("other_grid", [False, True])
def test_the_label_is_outlined_on_the_scans_grid(tmp_path: Path, drawn: list[Any], other_grid: bool) -> None:
    item = a_case(tmp_path) | {"label": str(saved_label(tmp_path, other_grid))}
    SaveSaliencyd("saliency", tmp_path / "out")(item)
    ((figure, given),) = drawn
    expected = np.zeros(SHAPE)
    expected[BOX] = 3
    assert np.array_equal(given["label"], expected)
    outlines = [each for ax in figure.axes for each in ax.collections if isinstance(each, ContourSet)]
    assert len(outlines) == 3


def test_a_broken_label_costs_no_map(tmp_path: Path, drawn: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    broken = tmp_path / "label.nii.gz"
    broken.write_bytes(b"no image")
    with caplog.at_level(logging.WARNING):
        item = SaveSaliencyd("saliency", tmp_path / "out")(a_case(tmp_path) | {"label": str(broken)})
    assert Path(item["saliency_path"]).exists()
    assert drawn[0][1]["label"] is None
    assert "case ct_7: its label" in caplog.text


@pytest.mark.parametrize("place", ["beside", "nowhere", "off the grid", "of another shape"])
def test_the_standard_error_beside_the_map_decides(tmp_path: Path, drawn: list[Any], place: str) -> None:
    item = a_case(tmp_path)
    errors = torch.full((1, *SHAPE), 0.3)
    errors[:, :5] = 0.2
    if place == "of another shape":
        item["standard_error"] = MetaTensor(errors[:, 1:]).copy_meta_from(item["saliency"])
    elif place != "nowhere":
        item["standard_error"] = MetaTensor(errors).copy_meta_from(item["saliency"])
    if place == "off the grid":
        item["standard_error"].affine = item["saliency"].affine + torch.eye(4)
    SaveSaliencyd("saliency", tmp_path / "out", scale=1)(item)
    ((figure, _),) = drawn
    axial = np.asarray(figure.axes[2].images[1].get_alpha()).T
    # The first axis runs to the left, and is drawn to the right.
    coloured = sorted({SHAPE[0] - 1 - int(x) for x, _ in np.argwhere(axial)})
    assert coloured == ([3, 4] if place == "beside" else [3, 4, 5, 6])


@pytest.mark.parametrize(("scale", "end"), [("probability", 1), ("log_odds", 5)])
def test_a_cohort_has_one_scale_in_any_order(tmp_path: Path, drawn: list[Any], scale: str, end: float) -> None:
    """Of a probability without being asked, and of log-odds where the network is not sure: 4, rounded up. Each picture
    is drawn once, when its case is done.
    """
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2, bias=False))
    torch.nn.init.constant_(network[1].weight[0], 0.0)
    torch.nn.init.constant_(network[1].weight[1], 0.03)
    explain = ms.sliding_window(2, 2, target=ms.ClassScore([1], "softmax", scale))
    cases = []
    for name, level in (("healthy", 1e-4), ("lesion", 1.0)):
        (explanation,) = explain.explain(torch.full((1, 1, 4, 4, 4), level), network)
        peak = float(explanation.saliency.max())
        cases.append(a_case(tmp_path, name, peak) | {"explanation": explanation})
    save_them = SaveSaliencyd("saliency", tmp_path / "out")
    for item in (*cases, *reversed(cases)):
        save_them(item)
    assert {ax.images[1].get_clim() for figure, _ in drawn for ax in figure.axes[:3]} == {(-end, end)}
    titles = [figure.get_suptitle().partition("\n")[2] for figure, _ in drawn]
    assert titles[1:3] == ["", ""]
    assert titles[0] == titles[3] != ""
    assert titles[0].startswith("no part of this scan changes the score by more than ")


def test_the_label_of_a_photograph(tmp_path: Path, drawn: list[Any]) -> None:
    """Its rows count downwards, and so do the label's."""
    pixels = np.zeros((6, 9), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    pixels[0:2, 2:5] = 255
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    item = Compose([LoadImaged("image"), EnsureChannelFirstd("image")])({"image": str(tmp_path / "photo.png")})
    maps = torch.zeros(1, 9, 6)
    maps[0, 3, 0] = 0.5
    item |= {"case": "photo", "label": str(tmp_path / "mask.png")}
    item["saliency"] = MetaTensor(maps).copy_meta_from(item["image"])
    SaveSaliencyd("saliency", tmp_path / "out")(item)
    ((figure, _),) = drawn
    (outline,) = [each for each in figure.axes[0].collections if isinstance(each, ContourSet)]
    (path,) = outline.get_paths()
    assert path.get_extents().extents.tolist() == [2, 4, 5, 6]  # drawn from below


def test_a_photograph_is_drawn_as_it_was_explained(tmp_path: Path, drawn: list[Any]) -> None:
    """Upside down where MONAI's own reader has read it, which knows nothing of EXIF; else as viewers show it."""
    exif, pixels = Image.Exif(), np.arange(54, dtype=np.uint8).reshape(6, 9)
    exif[274] = 3
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    for loader, shown in ((LoadImaged("image"), pixels), (scan_loader("image"), pixels[::-1, ::-1])):
        item = Compose([loader, EnsureChannelFirstd("image")])({"image": str(tmp_path / "photo.png"), "case": "photo"})
        np.testing.assert_array_equal(item["image"][0].T, shown)
        item["saliency"] = MetaTensor(torch.rand(1, 9, 6)).copy_meta_from(item["image"])
        SaveSaliencyd("saliency", tmp_path / "out")(item)
        np.testing.assert_array_equal(drawn[-1][0].axes[0].images[0].get_array()[::-1], shown)  # from below


@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_pipelines_picture_of_a_scan_where_nothing_matters(tmp_path: Path, drawn: list[Any], scale: Any) -> None:
    """The transform's map has its legend with it, through a loader's batches and ``Invertd``: a score that hardly moves
    colours nothing, and the picture says why.
    """
    a_case(tmp_path)
    preprocessing = Compose([LoadImaged("image"), EnsureChannelFirstd("image"), Flipd("image", 0)])

    def network(images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(3 + 0.01 * images[:, :, 3:7, 2:6, 4:6].mean((2, 3, 4)), (1, 0))

    explain = ms.sliding_window(4, target=ms.ClassScore([1], "softmax"), progress=False)
    to_map = ms.Saliencyd("image", network, explain, names="saliency")
    items = Dataset([{"image": str(tmp_path / "ct_7.nii.gz"), "case": "ct_7"}], Compose([preprocessing, to_map]))
    back = Invertd("saliency", preprocessing, "image", nearest_interp=False)
    for batch in DataLoader(items, batch_size=1):
        for item in decollate_batch(batch):
            SaveSaliencyd("saliency", output_dir=tmp_path / "out", scale=scale)(back(item))
    figure, given = drawn[0]
    assert nib.load(tmp_path / "out" / "ct_7_saliency.nii.gz").get_fdata().any()
    assert "no part of this scan changes the score by more than" in figure.get_suptitle().replace("\n", " ")
    assert given["legends"][0].scale == (scale or 5.0)
    assert "log-odds" in given["legends"][0].words


def test_a_picture_as_svg(tmp_path: Path) -> None:
    """Its words are letters, its voxels the picture's in PNG, its bytes the same each time; and one picture is left."""
    out = tmp_path / "out"
    item = a_case(tmp_path) | {"title": "a lesion of $5"}
    SaveSaliencyd("saliency", out)(item)
    SaveSaliencyd("saliency", out, picture_format="svg")(item)
    assert {path.name for path in out.iterdir()} == {"ct_7_saliency.nii.gz", "ct_7_saliency.svg"}
    drawn = (out / "ct_7_saliency.svg").read_bytes()
    SaveSaliencyd("saliency", out, picture_format="svg")(item)
    assert (out / "ct_7_saliency.svg").read_bytes() == drawn
    assert not re.search(rb"20\d\d-\d\d-\d\d", drawn)
    root = ElementTree.fromstring(drawn)
    words = {"".join(each.itertext()) for each in root.iter() if each.tag.endswith("}text")}
    assert {"a lesion of $5", "L-R", "I-S"} <= words
    images = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(each.get(HREF, "").partition(",")[2]))), dtype=float)
        for each in root.iter()
        if each.tag.endswith("}image")
    ]
    planes = images[:3]  # each a scan with its map, and then the colour bar
    # Red is the box, of which each plane shows its share, and the rest is a gray scan.
    red = [float((each[..., 0] - each[..., 2] > 30).mean()) for each in planes]
    assert red == pytest.approx([4 * 2 / 80, 4 * 2 / 96, 4 * 4 / 120], abs=0.05)
    SaveSaliencyd("saliency", out, picture=False)(item)
    assert {path.name for path in out.iterdir()} == {"ct_7_saliency.nii.gz"}
    SaveSaliencyd("saliency", out, picture_format="svg")(item)
    SaveSaliencyd("saliency", out).withdraw("ct_7")
    assert not [*out.iterdir()]
