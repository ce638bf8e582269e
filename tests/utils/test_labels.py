"""What a label must be: checked alike, in whatever way it comes in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import AsDiscrete, Zoom

import monai_saliency as ms
from monai_saliency import masks, metrics
from monai_saliency.handlers.trust import label_on_grid
from monai_saliency.storage.label_maps import load_label
from monai_saliency.transforms import LoadRegionsd, Saliencyd
from monai_saliency.utils.tensors import checked_label
from monai_saliency.visualize import plot_saliency

IMAGE = MetaTensor(torch.arange(64.0).reshape(1, 8, 8) / 64)
ORGAN = torch.zeros(1, 8, 8)
ORGAN[0, 2:6, 2:6] = 1
LINEAR = Zoom(2, mode="bilinear", keep_size=False)(
    ORGAN[:, ::2, ::2]
).as_tensor()  # MONAI's default for a label without its own mode


def segment(images: torch.Tensor) -> torch.Tensor:
    return torch.cat([1 - images, images], 1)


def explained(label: Any, method: Callable[..., Any], target: ms.targets.Target, **settings: Any) -> Any:
    return method(target=target, **settings).explain(IMAGE[None], segment, labels=label[None])


def compared(label: Any) -> Any:
    labels = torch.as_tensor(label).repeat(3, 1, 1, 1)
    return metrics.compare_methods(segment, IMAGE.as_tensor().repeat(3, 1, 1, 1), ms.RegionScore(1, "none"), labels)


def as_a_file(read: Callable[[Path], Any]) -> Callable[[torch.Tensor], Any]:
    def way_in(label: torch.Tensor) -> Any:
        path = Path("label.nii")
        voxels = label.numpy(force=True).astype(np.float32)[..., None]  # (C, x, y, z)
        nib.save(nib.Nifti1Image(voxels[0] if len(voxels) == 1 else np.moveaxis(voxels, 0, 3), np.eye(4)), path)
        return read(path)

    return way_in


PIXELS, SCORE = ms.RegionScore(1, "none", "all"), ms.RegionScore(1, "none", "label")
# Some take a label with a channel for each of the output's, the others one label map.
BY_CHANNEL: dict[str, Callable[[Any], Any]] = {
    "region score": lambda label: explained(label, ms.channel_occlusion, SCORE),
    "false positives": lambda label: explained(
        label, ms.channel_occlusion, ms.RegionScore(1, "none", "false_positive", label_values=None)
    ),
    "dice score": lambda label: explained(label, ms.channel_occlusion, ms.DiceScore(1, "none", "label")),
    "a region": lambda label: explained(ORGAN, ms.channel_occlusion, ms.RegionScore(1, "none", label)),
    "Saliencyd": lambda label: Saliencyd("image", segment, ms.channel_occlusion(target=SCORE), label_key="label")(
        {"image": IMAGE, "label": label}
    ),
    "metrics": lambda label: metrics.AUPRC()(IMAGE.repeat(2, 1, 1)[None], label[None]),
}
ONE_MAP: dict[str, Callable[[Any], Any]] = {
    "regions": lambda label: explained(label, ms.region_occlusion, PIXELS),
    "shapley": lambda label: explained(label, ms.shapley, PIXELS),
    "regions, then windows": lambda label: masks.RegionHierarchyMasks(regions=None).bind(IMAGE, label),
    "parts of organs": lambda label: explained(label, ms.region_occlusion, PIXELS, regions=masks.OrganSupervoxels(4)),
    "parts of organs alone": lambda label: masks.OrganSupervoxels(4)(IMAGE, labels=label),
    "metrics of one map": lambda label: metrics.MassInLabel()(IMAGE[None], label[None]),
    "which method": compared,
    "figures of trust": lambda label: label_on_grid({"image": IMAGE, "label": label}, "image")(),
    "a picture": lambda label: plot_saliency(IMAGE, IMAGE, label=label),
    "a file": as_a_file(load_label),
    "regions in a file": as_a_file(lambda path: LoadRegionsd()({"image": IMAGE, "label": str(path), "case": "a"})),
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("way_in", [*BY_CHANNEL, *ONE_MAP])
def test_each_way_in(way_in: str) -> None:
    """What linear interpolation leaves, and other numbers of channels."""
    take = (BY_CHANNEL | ONE_MAP)[way_in]
    with pytest.raises(ValueError, match=r'that are not whole numbers, .*mode=\["bilinear", "nearest"\]'):
        take(LINEAR)
    allowed = "1 or 2 here" if way_in in BY_CHANNEL else "1 here: .*argmax"
    with pytest.raises(ValueError, match=f"the label has 3 channels, and must have {allowed}"):
        take(ORGAN.repeat(3, 1, 1))


@pytest.mark.parametrize("way_in", ONE_MAP)
def test_one_hot_labels_are_not_taken_for_one_label_map(way_in: str) -> None:
    """Their first channel is the background."""
    with pytest.raises(ValueError, match=r"`label.int\(\).argmax\(0, keepdim=True\)`"):
        ONE_MAP[way_in](AsDiscrete(to_onehot=2)(ORGAN))


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.uint8, torch.int32, torch.bool])
def test_the_advice_gives_the_label_map(kind: torch.dtype) -> None:
    label = AsDiscrete(to_onehot=2)(ORGAN).to(kind)
    assert torch.equal(checked_label(label.int().argmax(0, keepdim=True), (8, 8)), ORGAN.long())
    assert torch.equal(checked_label(label[None].int().argmax(1, keepdim=True)[0], (8, 8)), ORGAN.long())
    assert torch.equal(AsDiscrete(argmax=True)(label.float()), ORGAN)


def test_what_is_taken() -> None:
    """Arrays, tensors with meta data, and labels without an axis of channels; channels hold 0 and 1."""
    for label in (ORGAN, ORGAN[0], MetaTensor(ORGAN), ORGAN.numpy().astype(np.uint16), 255 * ORGAN):
        assert checked_label(label, (8, 8), 4).shape == (1, 8, 8)
    assert checked_label(ORGAN.repeat(4, 1, 1), (8, 8), 4).shape == (4, 8, 8)
    with pytest.raises(ValueError, match=r"0 and 1 in each, and it has 0, 255: write `\(label > 0\).float\(\)`"):
        checked_label(255 * ORGAN.repeat(4, 1, 1), (8, 8), 4)
    with pytest.raises(ValueError, match=r"0 and 1 in each, and it has 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\.: "):
        checked_label(torch.arange(128).reshape(2, 8, 8), (8, 8), 2)


def test_why_what_linear_interpolation_leaves_is_refused() -> None:
    """It is larger than the organ, so a perfect map would look worse than it is; nearest neighbour leaves the organ."""
    label = torch.zeros(1, 1, 16, 16)
    label[..., 4:12, 4:12] = 1
    around = Zoom(2, mode="bilinear", keep_size=False)(label[0, :, ::2, ::2])[None]
    assert metrics.AUPRC()(label, (around != 0).int()).item() < 0.9
    nearest = Zoom(2, mode="nearest", keep_size=False)(label[0, :, ::2, ::2])[None]
    assert metrics.AUPRC()(label, nearest).item() == 1
