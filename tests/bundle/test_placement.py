import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.scans import volume
from monai.data import DataLoader, Dataset, MetaTensor

from monai_saliency.bundle.placement import Placement
from monai_saliency.transforms import case_writers

AFFINE = np.array([[2.0, 0.1, 0, 5], [-0.1, 1.5, 0.2, 6], [0, -0.2, 3.0, 7], [0, 0, 0, 1]])


scan = partial(volume, shape=(10, 8, 6), affine=AFFINE, seed=0)


class Placing(Placement):
    """Writes what it has placed."""

    def __init__(self, folder: Path, loader: Any, key: Any, keeps_place: bool = False) -> None:
        super().__init__(loader, key, keeps_place=keeps_place)
        self.writers = case_writers(folder, image_key=key, picture=False, report=False)

    def __call__(self, case: dict[Any, Any]) -> dict[Any, Any]:
        return self.writers(super().__call__(case))


def place(placement: Placement, image: Any, key: Any = "image") -> dict[Any, Any]:
    """Place a map that is the image itself."""
    image = image if isinstance(image, MetaTensor) else MetaTensor(image)
    case = {key: image}
    case["case"] = placement.name(case, "0")
    case["saliency"] = MetaTensor(image.as_tensor().clone()).copy_meta_from(image)
    return placement(case)


def test_cases_are_called_by_their_path_below_the_common_folder(tmp_path: Path) -> None:
    files = [scan(tmp_path / each / "ct.nii.gz") for each in ("a/x", "b")]
    dataset = Dataset([{"image": str(file)} for file in files], mt.LoadImaged("image"))
    placement = Placing(tmp_path / "maps", DataLoader(dataset), "image")
    assert [placement.name(dataset[i], str(i)) for i in (0, 1, 0)] == ["a/x/ct", "b/ct", "a/x/ct"]
    assert placement.name(dataset[0], "2") == ""  # a loader that ended has begun anew
    assert placement.all_names(dataset[0]) == ["a/x/ct", "b/ct"]


def test_files_of_one_name_elsewhere_get_names_of_their_own(tmp_path: Path) -> None:
    """The same ones whichever of them a process meets, and in which order."""
    images = [mt.LoadImage()(scan(tmp_path / each / "ct.nii.gz")) for each in "ab"]
    names = []
    for order in ((0, 1), (1, 0), (1,)):
        placement = Placing(tmp_path / "maps", None, "image")
        assert placement.all_names({"image": images[0]}) == []
        found = {i: placement.name({"image": images[i]}, str(i)) for i in order}
        names.append(found[1])
        assert found[1].startswith("ct-")
        assert found.get(0) != found[1]
    assert len(set(names)) == 1


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["scan.nii", "scan.nii.gz", "other.nii"], ["scan.nii", "scan.nii.gz", "other"]),
        (["frame.png", "frame.jpg"], ["frame.png", "frame.jpg"]),
        # Folders of DICOM slices, whose last number looks like a suffix.
        (["1.2.113", "1.2.114"], ["1.2.113", "1.2.114"]),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_files_that_differ_in_their_suffix_have_names_of_their_own(
    files: list[str], names: list[str], listed: bool, tmp_path: Path
) -> None:
    """Or the second one's map would replace the first one's."""
    paths = [tmp_path / file for file in files]
    for path in paths:
        path.touch()
    dataset = Dataset([{"image": str(path)} for path in paths]) if listed else None
    placement = Placing(tmp_path / "maps", None if dataset is None else DataLoader(dataset), "image")
    images = [MetaTensor(torch.rand(1, 4, 3), meta={"filename_or_obj": str(path)}) for path in paths]
    found = [placement.name({"image": image}, str(i)) for i, image in enumerate(images)]
    assert len(set(found)) == len(files)
    # Whichever of them a process meets, and in which order.
    again = Placing(tmp_path / "maps", None if dataset is None else DataLoader(dataset), "image")
    assert again.name({"image": images[-1]}, "9") == found[-1]
    if listed:
        assert found == names
        assert placement.all_names({"image": images[0]}) == names


def test_a_file_that_gives_several_cases(tmp_path: Path) -> None:
    """Listed twice, with other prompts perhaps."""
    file = scan(tmp_path / "ct.nii.gz")
    image = mt.LoadImage()(file)
    listed = Placing(tmp_path, DataLoader(Dataset([{"image": str(file), "prompt": i} for i in range(2)])), "image")
    assert [listed.name({"image": image}, place) for place in "011"] == ["ct-0", "ct-1", "ct-1"]
    assert listed.all_names({"image": image}) == []


def test_patch_of_a_slide_is_saved_by_its_place_on_its_own_grid(tmp_path: Path, caplog: Any) -> None:
    slide = scan(tmp_path / "slide.tif.nii")
    dataset = Dataset([{"image": str(slide)}], mt.Compose([]))
    placement = Placing(tmp_path / "maps", DataLoader(dataset), "image")
    meta = {"path": str(slide), "location": np.array([32, 64])}
    patches = [MetaTensor(torch.rand(1, 5, 4), meta=meta | {"location": np.array([x, 64])}) for x in (0, 32)]
    with caplog.at_level(logging.WARNING):
        for patch in patches:
            place(placement, patch)
    for x, patch in zip((0, 32), patches, strict=True):
        written = nib.load(tmp_path / "maps" / f"slide.tif_patch-{x}-64_saliency.nii.gz")
        np.testing.assert_allclose(written.get_fdata(), patch[0].numpy(), rtol=1e-6)
    assert caplog.text.count("patches of a larger image") == 1


class Cut(mt.MapTransform):
    """Cuts voxels off without recording it, and its inverse fails."""

    def __call__(self, data: Any) -> Any:
        return {**data, "image": data["image"][:, 2:]}


class CutInvertible(Cut, mt.InvertibleTransform):
    def inverse(self, data: Any) -> Any:
        raise KeyError("what was cut off is gone")


@pytest.mark.parametrize("cut", [Cut("image"), CutInvertible("image")])
def test_a_map_that_does_not_get_back_lies_on_the_networks_input(cut: Any, tmp_path: Path, caplog: Any) -> None:
    """A computed map is not thrown away, and the log says where it lies."""
    file = scan(tmp_path / "scan.nii.gz")
    dataset = Dataset([{"image": str(file)}], mt.Compose([mt.LoadImaged("image", ensure_channel_first=True), cut]))
    placement = Placing(tmp_path / "maps", DataLoader(dataset), "image")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            place(placement, dataset[0]["image"])
    saved = nib.load(tmp_path / "maps" / "scan_saliency.nii.gz")
    np.testing.assert_allclose(saved.get_fdata(), dataset[0]["image"][0].numpy(), rtol=1e-6)
    said = "maps lie on the grid of the network's input, .* since the bundle's preprocessing does not lead back to"
    assert len(re.findall(said, caplog.text)) == 1
    assert ("what was cut off is gone" in caplog.text) == isinstance(cut, CutInvertible)


class WithoutAllowing(mt.MapTransform):
    """What ``Invertd`` does not take: its keys may not be missing, as it has no word for that."""

    def __init__(self) -> None:
        self.keys = ("image",)

    def __call__(self, data: Any) -> Any:
        return {**data, "image": data["image"] * 2}


def rises(shape: tuple[int, ...]) -> np.ndarray:
    """Values that resampling keeps."""
    return sum(
        np.meshgrid(*(factor * np.arange(n) for factor, n in zip((1, 20, 300), shape, strict=True)), indexing="ij")
    )


PIPELINES = {
    "without allow_missing_keys": [
        mt.Flipd("image", 0),
        WithoutAllowing(),
        mt.Spacingd("image", (1.5, 1.5, 2.5)),
        mt.SqueezeDimd("image", 0),
        mt.EnsureChannelFirstd("image", channel_dim="no_channel"),
    ],
    "an inverse that is an array": [
        mt.ToTensord("image"),
        mt.Flipd("image", 0),
        mt.Lambdad("image", lambda x: x * 2),
        mt.Spacingd("image", (1.5, 1.5, 2.5)),
        mt.SpatialPadd("image", (20, 20, 20)),
    ],
    "of two files": [
        mt.Flipd(["first", "second"], 0),
        mt.Spacingd(["first", "second"], (1.5, 1.5, 2.5)),
        mt.ResampleToMatchd("second", "first"),
        mt.ConcatItemsd(["first", "second"], "both"),
        mt.CopyItemsd("both", names="image"),
        mt.SpatialPadd("image", (20, 20, 20)),
    ],
}


@pytest.mark.parametrize("steps", PIPELINES.values(), ids=PIPELINES)
def test_a_map_goes_back_through_what_can_be_inverted(steps: list[Any], tmp_path: Path) -> None:
    """To the file, or to the first of several, which also names the case."""
    keys = ["image"] if len(steps) == 5 else ["first", "second"]
    files = {key: tmp_path / f"{key}.nii.gz" for key in keys}
    for i, file in enumerate(files.values()):
        shape = (10 + 2 * i, 8, 6 + i)
        nib.save(nib.Nifti1Image((rises(shape) + i).astype(np.float32), AFFINE + 0.5 * i * np.eye(4, 4)), file)
    load = [mt.LoadImaged(keys), mt.EnsureChannelFirstd(keys)]
    dataset = Dataset([{key: str(file) for key, file in files.items()}], mt.Compose([*load, *steps]))
    placement = Placing(tmp_path / "maps", DataLoader(dataset), "image", keeps_place=True)
    image = dataset[0]["image"]
    assert placement.all_names({"image": image}) == [keys[0]]
    scale = 2 if keys == ["image"] else 1
    case: dict[Any, Any] = {"image": image, "case": keys[0]}
    case["saliency"] = MetaTensor(image[:1].as_tensor() / scale).copy_meta_from(image)
    placement(case)
    saved = nib.load(tmp_path / "maps" / f"{keys[0]}_saliency.nii.gz")
    assert saved.shape == (10, 8, 6)
    np.testing.assert_allclose(saved.affine, AFFINE, atol=1e-4)
    inside = (slice(2, -2),) * 3
    np.testing.assert_allclose(saved.get_fdata()[inside], rises((10, 8, 6))[inside], atol=2)


class Mirror(mt.MapTransform):
    """Turns an image round without recording it."""

    def __call__(self, data: Any) -> Any:
        return {**data, "image": data["image"].flip(1)}


UNKNOWN = "{} may move voxels and records nothing: if it changes values only, set `keeps_place`"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (mt.Lambdad("image", lambda image: image * 2), UNKNOWN),
        (Mirror("image"), UNKNOWN),
        (mt.GridDistortiond("image", (2, 2, 2), [(1.0, 1.3, 0.9)] * 3), "{} moves voxels and does not record it"),
    ],
    ids=["a function", "an own step", "distorted"],
)
@pytest.mark.parametrize("keeps_place", [False, True])
def test_steps_that_move_voxels_without_recording_it(
    step: Any, words: str, keeps_place: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shape and affine would lead back to the scan, and the map would not lie on what it shows."""
    file = scan(tmp_path / "scan.nii.gz")
    steps = [mt.LoadImaged("image"), mt.EnsureChannelFirstd("image"), mt.Resized("image", (9, 8, 7)), step]
    dataset = Dataset([{"image": str(file)}], mt.Compose(steps))
    placement = Placing(tmp_path / "maps", DataLoader(dataset), "image", keeps_place=keeps_place)
    with caplog.at_level(logging.WARNING):
        place(placement, dataset[0]["image"])
    stays = words != UNKNOWN or not keeps_place
    assert (words.format(type(step).__name__) in caplog.text) == stays
    assert nib.load(tmp_path / "maps" / "scan_saliency.nii.gz").shape == ((9, 8, 7) if stays else (10, 8, 6))
