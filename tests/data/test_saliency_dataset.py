"""A cohort with its saliency maps: image and map together, the same to the bit wherever it comes from."""

import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.tolerances import assert_same_bits
from helpers.warned import our_warnings

import monai_saliency as ms
from monai_saliency.errors import CaseError

BOTH = ("image", "saliency")
SHAPE = (8, 12, 8)
BOX = (slice(0, 4), slice(4, 8), slice(4, 8))
# Windows of 4 voxels tile the volume, and one of them is the box.
NUM_MASKS = 12
TURN = mt.RandRotate90d(BOTH, prob=1.0, max_k=1, spatial_axes=(1, 2))
AFFINE = np.diag([-2.0, 2.0, 3.0, 1.0])


def note(what: str, times: int = 1) -> None:
    with open(os.environ["NOTES"], "a") as log:
        log.write(f"{what}\n" * times)


class Logged(mt.MapTransform):
    """Notes each scan that is preprocessed, in any process."""

    def __call__(self, data: Any) -> Any:
        note("scan")
        return data


def box_sum(x: torch.Tensor) -> torch.Tensor:
    """``(B, 1)``. Notes each image."""
    note("forward", len(x))
    return x[(slice(None), slice(None), *BOX)].sum(dim=(1, 2, 3, 4))[:, None]


class BoxSum(torch.nn.Module):
    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([weight]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return box_sum(x) * self.weight.to(x.dtype)


def scan(path: Path, value: float) -> None:
    """The box is bright, all else -1. Its first axis runs from right to left, so that preprocessing turns it."""
    volume = np.full(SHAPE, -1, np.float32)
    volume[BOX] = value
    nib.save(nib.Nifti1Image(volume[::-1], AFFINE), path)


def expected_map(image: torch.Tensor) -> torch.Tensor:
    """What hiding a voxel's window takes from the sum of the box."""
    return 64 * image.clamp(min=0)


def preprocessing(*more: Any) -> mt.Compose:
    steps = [Logged("image"), mt.LoadImaged("image"), mt.EnsureChannelFirstd("image")]
    return mt.Compose([*steps, mt.Orientationd("image", axcodes="RAS", labels=None), *more])


def explain(**settings: Any) -> ms.PerturbationInferer:
    # One forward an image, so that forwards are counted without those that fill the last batch up.
    settings = {"mask_batch_size": 1} | settings
    return ms.sliding_window(4, 4, target=ms.ClassScore("all", activation="none"), **settings)


def dataset(
    cohort: Path, cache: str = "memory", transform: Any = None, network: Any = None, inferer: Any = None, **options: Any
) -> ms.SaliencyDataset:
    return ms.SaliencyDataset(
        ms.data.find_cases(cohort),
        preprocessing() if transform is None else transform,
        BoxSum() if network is None else network,
        explain() if inferer is None else inferer,
        cache,
        **{"cache_dir": cohort.parent / "cache"} | options,
    )


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """Scans preprocessed and scans explained since the last question."""
    log = tmp_path / "notes.txt"
    monkeypatch.setenv("NOTES", str(log))

    def read() -> dict[str, int]:
        found = Counter(log.read_text().split() if log.exists() else [])
        log.unlink(missing_ok=True)
        return {"scans": found["scan"], "maps": found["forward"] // (NUM_MASKS + 1)}

    return read


@pytest.fixture
def cohort(tmp_path: Path, notes: Any) -> Path:
    folder = tmp_path / "cohort"
    folder.mkdir()
    for number, name in enumerate("abc"):
        scan(folder / f"{name}.nii.gz", number + 1)
    return folder


@pytest.mark.parametrize(
    "random",
    [
        [],
        [mt.RandFlipd(BOTH, prob=0.7, spatial_axis=[0, 1])],
        [mt.RandRotate90d(BOTH, prob=0.7, max_k=3, spatial_axes=(0, 2))],
        [mt.RandSpatialCropd(BOTH, roi_size=(5, 7, 6), random_size=False)],
        [
            mt.OneOf([mt.RandFlipd(BOTH, prob=1.0, spatial_axis=0), mt.RandRotate90d(BOTH, prob=1.0)]),
            mt.RandFlipd(BOTH, prob=0.5),
        ],
    ],
    ids=["none", "flip", "rotate", "crop", "several"],
)
def test_augmented_alike(cohort: Path, notes: Any, random: list[Any]) -> None:
    """The network looks at a fixed place: the map is right only if it was made before, and turned with the image."""
    items = dataset(cohort, transform=preprocessing(*random).set_random_state(0))
    places = set()
    for _ in range(4):
        for item in items:
            image, saliency = item["image"].as_tensor(), item["saliency"].as_tensor()
            assert_same_bits(saliency, expected_map(image))
            assert_same_bits(item["saliency"].affine, item["image"].affine)
            places.add((tuple(image.shape), tuple(torch.nonzero(image > 0).flatten().tolist())))
    # They were augmented.
    assert (len(places) > 1) == bool(random)
    assert notes() == {"scans": 3, "maps": 3}


@pytest.mark.parametrize("cache", ["none", "disk"])
def test_inverted(cohort: Path, cache: str) -> None:
    """Cold and warm, an augmented map comes back to the scan's own grid, where the plain one comes to."""
    for read in range(2):
        spacing = mt.Spacingd("image", pixdim=(1.6, 2.5, 2.0))
        random = preprocessing(spacing, mt.RandFlipd(BOTH, prob=1.0, spatial_axis=1), TURN)
        plain = preprocessing(spacing)
        for turned, straight in zip(
            dataset(cohort, cache, random), dataset(cohort, "none", plain, inferer=explain()), strict=True
        ):
            assert turned["saliency"].shape != straight["saliency"].shape
            back, reference = (
                mt.Invertd(("saliency", "image"), transform, orig_keys="image", nearest_interp=False)(item)
                for item, transform in ((turned, random), (straight, plain))
            )
            for key in BOTH:
                assert tuple(back[key].shape) == (1, *SHAPE), (read, key)
                assert np.allclose(back[key].affine, AFFINE)
                assert torch.allclose(back[key].as_tensor(), reference[key].as_tensor(), atol=1e-3)
            # The scan's first axis runs the other way than the map's.
            assert int(back["saliency"].as_tensor().abs().argmax()) // (12 * 8) >= 4


def test_regions_of_a_label_map(tmp_path: Path, notes: Any) -> None:
    """Masks made of the item's own label map, which decides the map with the image."""
    image, labels = torch.full((1, *SHAPE), 2.0), torch.zeros(1, *SHAPE)
    labels[(0, *BOX)] = 1
    inferer = ms.PerturbationInferer(
        ms.masks.RegionMasks(), ms.ClassScore("all", "none"), ms.estimators.OcclusionScoring()
    )
    items = ms.SaliencyDataset(
        [{"case": "a", "image": image, "label": labels}, {"case": "b", "image": image, "label": 1 - labels}],
        None,
        BoxSum(),
        inferer,
        label_key="label",
    )
    for _ in range(2):
        first, second = (item["saliency"].as_tensor() for item in items)
        assert_same_bits(first, 128 * labels)
        assert not second.any()
    with pytest.raises(CaseError, match="case a"):
        ms.SaliencyDataset(items.data, None, BoxSum(), inferer)[0]


class Times(torch.nn.Module):
    """Of two inputs, one of which is a factor."""

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return box_sum(x["image"]) * x["factor"]


def test_a_network_with_another_input(notes: Any) -> None:
    """It is held, decides the map, and names its way in."""
    cases = [{"case": str(n), "image": torch.ones(1, *SHAPE), "factor": torch.tensor([n])} for n in (1.0, 3.0)]
    inferer = explain(inputs=ms.DictInput(perturb="image"))
    items = ms.SaliencyDataset(cases, None, Times(), inferer, held_keys="factor")
    for _ in range(2):
        assert [item["saliency"].max() for item in items] == [64, 3 * 64]
    assert notes()["maps"] == 2


def test_errors_name_the_case(cohort: Path) -> None:
    def first(match: str, transform: Any = None, **options: Any) -> None:
        with pytest.raises(CaseError, match=f"^case a: {match}"):
            dataset(cohort, transform=transform, **options)[0]

    first(
        "it could not be explained: TypeError: `inputs` must be floating point",
        preprocessing(mt.CastToTyped("image", dtype=torch.int32)),
    )
    first("the network's output of the unperturbed image is NaN or infinite", network=BoxSum(float("nan")))
    first("it could not be explained: RuntimeError", network=torch.nn.Conv2d(1, 1, 3))
    with pytest.raises(ValueError, match="needs `cache_dir`"):
        dataset(cohort, "disk", cache_dir=None)


@pytest.mark.parametrize(
    ("step", "key"),
    [
        (mt.RandFlipd("image", prob=1.0), "image"),
        (mt.RandSpatialCropd("saliency", (4, 4, 4)), "saliency"),
        (mt.RandFlipd(BOTH, prob=1.0), None),
        (mt.Compose([mt.RandFlipd(BOTH), mt.ScaleIntensityd("image")]), None),
    ],
)
def test_a_transform_that_moves_one_of_both_is_named(cohort: Path, step: Any, key: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset(cohort, transform=preprocessing(mt.RandFlipd(BOTH, prob=0.5), step))
    found = our_warnings(caught)
    assert len(found) == (key is not None)
    assert key is None or f"moves {key!r} alone, so the map does not lie on the image" in found[0]


def test_what_changed_is_computed(cohort: Path, notes: Any) -> None:
    cache = "disk"
    list(dataset(cohort, cache))
    assert notes() == {"scans": 3, "maps": 3}
    list(dataset(cohort, cache))
    assert notes() == {"scans": 0, "maps": 0}

    def changed(scans: int, maps: int, *more: Any, **options: Any) -> None:
        for expected in ({"scans": scans, "maps": maps}, {"scans": 0, "maps": 0}):
            found = [item["saliency"].as_tensor() for item in dataset(cohort, cache, preprocessing(*more), **options)]
            assert notes() == expected
        reference = [item["saliency"].as_tensor() for item in dataset(cohort, "none", preprocessing(*more), **options)]
        assert all(torch.equal(*maps) for maps in zip(found, reference, strict=True))
        notes()

    # The network and how it is explained: maps alone.
    changed(0, 3, network=BoxSum(2.0))
    changed(0, 3, network=box_sum, network_id="v1")
    changed(0, 3, network=box_sum, network_id="v2")
    changed(0, 3, inferer=explain(fill=ms.ConstantFill(1.0)))
    changed(0, 3, inferer=explain(estimator=ms.estimators.RISEScoring(form="plain")))
    # What changes no map.
    changed(0, 0, inferer=explain(mask_batch_size=NUM_MASKS + 1))
    changed(0, 0, mt.RandFlipd(BOTH, prob=0.0))
    # The scans: all of it.
    changed(3, 3, mt.ScaleIntensityd("image"))
    os.utime(cohort / "b.nii.gz", ns=(1, 1))
    changed(1, 1)
    scan(cohort / "c.nii.gz", 9)
    changed(1, 1)


def test_scans_are_shared_with_a_dataset_without_maps(cohort: Path, notes: Any) -> None:
    list(ms.data.CachedDataset(ms.data.find_cases(cohort), preprocessing(), "disk", cohort.parent / "cache"))
    list(dataset(cohort, "disk"))
    assert notes() == {"scans": 3, "maps": 3}


@pytest.mark.parametrize("how", ["in place", "behind autograd's back"])
def test_weights_changed_under_a_running_dataset(cohort: Path, notes: Any, how: str) -> None:
    network = BoxSum()
    items = dataset(cohort, network=network)
    list(items)
    if how == "in place":
        with torch.no_grad():
            network.weight.add_(2)
    else:
        network.weight.data.mul_(3)
    for _ in range(2):
        for item in items:
            assert_same_bits(item["saliency"].as_tensor(), 3 * expected_map(item["image"].as_tensor()))
    assert notes() == {"scans": 3, "maps": 6}


def test_what_cannot_be_told_is_not_cached(cohort: Path, notes: Any) -> None:
    class LocalFill(ms.ConstantFill):
        pass

    not_cached = "^saliency maps are not cached, but computed at each read: "
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"{not_cached}the network is not a module: give it a network_id", {"network": box_sum}),
        (f"{not_cached}the local class .*LocalFill", {"fill": LocalFill(0.0)}),
        (f"{not_cached}the network holds a tensor of layout .*sparse", {"sparse": True}),
    ]
    for match, options in cases:
        network = options.get("network") or BoxSum()
        if options.get("sparse"):
            network.register_buffer("odd", torch.eye(2).to_sparse())
        inferer = explain(fill=options.get("fill"))
        with pytest.warns(UserWarning, match=match) as caught:
            found = [item for items in [dataset(cohort, network=network, inferer=inferer)] for item in [*items, *items]]
        assert len(our_warnings(caught)) == 1
        for item in found:
            assert_same_bits(item["saliency"].as_tensor(), expected_map(item["image"].as_tensor()))
        assert notes() == {"scans": 3, "maps": 6}
    # Nothing is to be said where nothing is to be kept.
    assert len(list(dataset(cohort, "none", network=box_sum))) == 3
