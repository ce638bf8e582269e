"""Mistakes in arguments: each gets an error that names the parameter, says what was expected, and often what to write.

A row is how the mistake is made and what its error says. The error is a ``ValueError`` of ours (``CaseError`` is one).
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import SimpleInferer, SlidingWindowInferer
from monai.transforms import Compose
from torch.utils.data import DataLoader

import monai_saliency as ms
from monai_saliency import data, metrics, transforms
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.storage.tables import CaseTable, Failures

NAN, INF = math.nan, math.inf
TARGET = ms.FunctionScore(lambda output: output)
IMAGES = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
NETWORK = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
DATA = [{"image": IMAGES[0]}]
CASES = [{"case": "a", "image": "a.nii"}]


def window(target: Any = TARGET, **settings: Any) -> ms.PerturbationInferer:
    return ms.sliding_window(4, 4, target=target, **settings)


def explain(
    target: Any = TARGET, images: Any = IMAGES, network: Any = NETWORK, cases: Any = None, **settings: Any
) -> Any:
    return window(target, **settings).explain(images, network, cases=cases)


def inferer(masks: Any = ms.masks.SlidingWindowMasks(4), estimator: Any = ms.estimators.OcclusionScoring()) -> Any:  # noqa: B008
    return ms.PerturbationInferer(masks, TARGET, estimator)


def dataset(**changes: Any) -> Any:
    settings = {"data": CASES, "transform": [], "network": NETWORK, "inferer": window(), "cache": "none"}
    return ms.SaliencyDataset(**settings | changes)


def loader(**changes: Any) -> Any:
    return data.CohortLoader(**{"dataset": data.CachedDataset(CASES, [], cache="none")} | changes)


def handler(**changes: Any) -> Any:
    settings = {"inferer": window(), "network": NETWORK, "postprocessing": Compose([])}
    settings |= {"summary": CaseTable("nowhere/summary.csv"), "failures": Failures("nowhere/failures.csv")}
    return SaliencyHandler(**settings | changes)


def to_map(inputs: Any = None, **settings: Any) -> Any:
    return ms.Saliencyd("image", NETWORK, window(inputs=inputs), **settings)


Row = tuple[Callable[[], Any], str]

METHODS: list[Row] = [
    (lambda: window(lambda output: output), r"`target` must be a target such as .*FunctionScore"),
    (
        lambda: ms.explain(len, torch.ones(1, 1, 8, 8), method=ms.rise(9)),
        r"`method` must be a name .* without its brackets",
    ),
    (lambda: window(ms.ClassScore), r"`target` must be .* got the class ClassScore: write ClassScore\("),
    (lambda: window(fill="air"), r"`fill` must be one of .*'mean'.*, or a number such as 0 .*, got 'air'"),
    (lambda: inferer().replace(fill=0.5), r"`fill` must be a fill such as ConstantFill\(0\.0\).*, got 0\.5"),
    (
        lambda: window("lesion"),
        r"`classes` must be .*'predicted' or 'all', got 'lesion'. .* write the number, such as 1",
    ),
    (lambda: window(estimator="rise"), r"`estimator` must be an estimator such as .*, got 'rise'"),
    (lambda: window(inferer="sliding"), r"`inferer` must be a MONAI inferer .*, got 'sliding'"),
    (lambda: inferer(masks=ms.masks.RISEMasks), r"`masks` must be .* class RISEMasks: write RISEMasks\("),
    (lambda: window(inputs="image"), r"`inputs` must be an adapter such as DictInput\('image'\)"),
    (lambda: window(patch_memory=2**30), r"`patch_memory` must be True, False or PatchMemory"),
    (lambda: ms.PatchMemory("2GB"), r"`device_bytes` must be a finite number, got '2GB'"),
    (lambda: window(output=0.5), r"`output` must be a key, an index, .*, got 0\.5"),
    (lambda: explain(output="pred"), r"`?output.* has no part 'pred'"),
    (lambda: window(autocast=True), r"`autocast` must be the arguments of torch.autocast"),
    (lambda: window(per_channel="no"), r"`per_channel` must be True or False, got 'no'"),
    (lambda: ms.region_occlusion(regions="organs", target=TARGET), r"`regions` must be a function"),
    (lambda: ms.region_occlusion(num_supervoxels=0, target=TARGET), r"`num_supervoxels` must be a whole"),
]
MASKS: list[Row] = [
    (lambda: ms.masks.PatchWindowMasks(SlidingWindowInferer(8), 0), r"`divide` must be a whole number of at least 1"),
    (
        lambda: ms.mc_rise(more_fills=[ms.ScanUnitFill(-1000, Compose([]))], target=TARGET),
        r"`more_fills` must be functions .*; one that needs the case's file is the `fill`, got a ScanUnitFill",
    ),
    (
        lambda: ms.rise(target=TARGET, estimator=ms.estimators.MCRISEScoring())(IMAGES, NETWORK),
        r"MC-RISE compares several fills, got masks of RISEMasks, which have one: use MCRISEMasks",
    ),
    (lambda: ms.drise(form="debiased", target=TARGET), r"`form` must be one of .*, got 'debiased'"),
    (lambda: ms.Supervoxels(2.5), r"`num_regions` must be a whole number"),
    (lambda: ms.Supervoxels(9, 0), r"`compactness` must be a number above 0, got 0"),
]
FILLS: list[Row] = [
    (lambda: ms.ConstantFill("0"), r"`value` must be one or several finite numbers, got '0'"),
    (lambda: ms.BlurFill(NAN), r"`sigma` must be a number above 0, got nan"),
    (lambda: ms.fills.fill_in_unit(0, "HU"), r"`fill_unit` must be one of \['network', 'scan'\], got 'HU'"),
    (lambda: window(fill=ms.fills.fill_in_unit(ms.MeanFill)), r"`fill` must be .* class MeanFill"),
]
TARGETS: list[Row] = [
    (lambda: ms.ClassScore([1.5], "none"), r"`classes` must be an index or a list of indices, got \[1\.5\]"),
    (lambda: ms.ClassScore([1], None), r"`activation` must be one of .*, got None"),
    (lambda: ms.RegionScore(1, "none", [[0, 1]]), r"`region` must be 'predicted'.* got a list: write torch.as"),
    (lambda: ms.RegionScore(1, "none", label_values=1), r"`label_values` must have one entry for each"),
    (lambda: ms.RegressionScore(0.5), r"`values` must be an index or a list of indices, got 0\.5; or write 'all'"),
    (lambda: ms.DetectionScore(keys="box"), r"`keys` must name boxes, labels and scores, got 'box'"),
    (lambda: ms.DetectionScore(boxes="all"), r"`boxes` must be a tensor, got 'all'"),
    (lambda: ms.FunctionScore(1), r"`function` must be a function of the network's output, got 1"),
    (lambda: ms.EmbeddingSimilarity(reference=np.ones(3)), r"`reference` must be an embedding as a tensor"),
]
CALLS: list[Row] = [
    (lambda: explain(network=torch.nn.Flatten), r"`network` must be .* the class Flatten: write Flatten\("),
    (lambda: explain(network="model.pt"), r"`network` must be a network or another callable.*, got 'model.pt'"),
    (lambda: explain(images=torch.rand(1, 64, 48, 3)), r"must be channel-first.* write images.movedim"),
    (lambda: explain(images=IMAGES[0]), r"must be images of shape \(B, C, H, W\)"),
    (lambda: explain(images="scan.nii.gz"), r"must be images of shape .*, got a str: load it, .*\[None\]"),
    (lambda: explain(images=[Path("scan.nii.gz")]), r"got a list, whose first entry is a PosixPath: load it"),
    (lambda: explain(images=DataLoader(DATA)), r"got a DataLoader: write the loop, for batch in loader: .*image"),
    (lambda: explain(images=DATA), r"got a list, whose first entry is a dict .*: write batch"),
    (lambda: explain(images=IMAGES[0]), r"got shape \(1, 8, 8\): write images\[:, None\] .* images\[None\]"),
    (lambda: explain(images=["a.nii"], inputs=ms.ListInput()), r"must be a list of images .* one shape, got a str"),
    (lambda: explain(images=[IMAGES[0], IMAGES[0, :, :4]], inputs=ms.ListInput()), r"of one shape, got .*\(1, 4, 8\)"),
    (lambda: explain(images=NETWORK, network=IMAGES), r"`network` is a Tensor: .*, write explain\(images, network\)"),
    (lambda: ms.explain(IMAGES, NETWORK), r"`network` is a Tensor: .* swapped, write ms.explain\(network, images\)"),
    (lambda: ms.explain(NETWORK, IMAGES, method="Occlusion"), r"did you mean `sliding_window`"),
    (lambda: ms.explain(NETWORK, IMAGES, method="occlusion_sensitivity"), r"did you mean `sliding_window`"),
    (lambda: explain(ms.FunctionScore(lambda o: o[1])), r"output\[:, 1\]; of \(B, 2\) it failed with IndexError"),
    (lambda: explain(images=IMAGES[:, 0].long().numpy()), r"must be images of shape .*, got shape \("),
    (lambda: explain(images=[IMAGES[0]] * 2), r"`inputs` is a list of 2\. .* inputs=ms\.ListInput\(\)"),
    (lambda: explain(images={"image": IMAGES}), r"with the keys \['image'\]: write batch.*DictInput"),
    (lambda: explain(images=IMAGES[:0]), r"must be images of shape"),
    (lambda: explain(cases=["a"]), r"`cases` must be a list of cases such as Case\(.*, got 'a'"),
    (lambda: ms.DictInput(None), r"`perturb` must be the name of an input, or a list of names, got None"),
]
PIPELINES: list[Row] = [
    (lambda: ms.Saliency(NETWORK, ms.rise), r"`inferer` must be an inferer made by .*, got a function"),
    (lambda: ms.Saliency(NETWORK, window(), "gpu"), r"`device` must be a device such as 'cpu'.*, got 'gpu'"),
    (lambda: to_map()({"image": "scan.nii.gz"}), r"the image must be .*'scan.nii.gz': put LoadImaged .* before"),
    (lambda: to_map()({"image": IMAGES[0, 0]}), r"must have shape .*\(8, 8\): put EnsureChannelFirstd before"),
    (
        lambda: to_map(label_key="label")({"image": IMAGES[0], "label": Path("a.nii")}),
        r"the label map must be .*'a.nii': put LoadImaged",
    ),
    (
        lambda: to_map(held_keys="age", inputs=ms.DictInput("image"))({"image": IMAGES[0], "age": "62"}),
        r"the input 'age' must be a tensor",
    ),
    (lambda: transforms.SaveSaliencyd("saliency", None), r"`output_dir` must be a path, got None"),
    (
        lambda: transforms.SaveSaliencyd("saliency", "out", picture_format="jpg"),
        r"`picture_format` must be one of \['png', 'svg'\], got 'jpg'",
    ),
    (lambda: transforms.CheckScand("image", "3"), r"`spatial_dims` must be a whole number .*, got '3'"),
    (lambda: data.find_cases(None), r"`dataset_dir` must be a path, got None"),
    (lambda: dataset(data="scans"), r"`data` must be a list of cases such as find_cases\(folder\), got 'scans'"),
    (lambda: dataset(data=["a.nii"]), r"`data` must be a list of cases .*, got"),
    (lambda: dataset(transform="load"), r"`transform` must be the preprocessing, .*, got 'load'"),
    (lambda: dataset(cache="ram"), r"`cache` must be one of .*, got 'ram'"),
    (lambda: dataset(cache="disk"), r"`cache_dir`|cache_dir"),
    (lambda: loader(dataset="scans"), r"`dataset` must be a dataset of cases such as .*, got 'scans'"),
    (lambda: loader(num_workers=-1), r"`num_workers` must be a whole number of at least 0, got -1"),
    (lambda: loader(failures="failures.csv"), r"`failures` must be Failures\(path\), got 'failures"),
]
RUNS: list[Row] = [
    (lambda: handler(inferer=SimpleInferer()), r"`inferer` must be an inferer made by .*SimpleInferer"),
    (lambda: handler(postprocessing=[]), r"`postprocessing` must be a transform .*, got a list"),
    (lambda: handler(store="scores"), r"`store` must be ScoreStore\(folder\), got 'scores'"),
    (lambda: handler(network_id=NETWORK), r"`network_id` must be a name of the network, in quotes, got a Sequential"),
    (lambda: transforms.SaveSaliencyd("saliency", "null"), "where none is meant, give an empty"),
    (lambda: metrics.peak_voxel(torch.ones(3, 3)), r"`saliency` must be one map .* as an array, .* Tensor"),
]
MISTAKES = [*METHODS, *MASKS, *FILLS, *TARGETS, *CALLS, *PIPELINES, *RUNS]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_a_mistake_is_named(make: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        make()
    assert not list(tmp_path.iterdir())


class TestHonestValues:
    """NumPy's numbers, tensors of one number, ranges and arrays of indices are what they look like."""

    def test_of_masks(self) -> None:
        masks = ms.masks.RISEMasks(np.int64(9), np.array([4, 4]), np.float32(0.5), torch.tensor(3))
        assert (masks.num_masks, masks.seed, masks.p1) == (9, 3, 0.5)
        masks = ms.masks.RISEMasks(torch.tensor([9]), torch.tensor([4, 4]))
        assert masks.num_masks == 9

    @pytest.mark.parametrize(
        "classes", [1, np.int64(1), [1], (1,), range(1, 2), np.array([1]), torch.tensor([1]), [np.int32(1)]]
    )
    def test_of_classes(self, classes: Any) -> None:
        assert ms.ClassScore(classes, "none").classes == [1]

    @pytest.mark.parametrize("p1", [np.float64(0.5), torch.tensor(0.5)])
    def test_of_an_estimator(self, p1: Any) -> None:
        assert ms.estimators.RISEScoring(p1).p1 == 0.5

    def test_of_an_inferer(self) -> None:
        explain = window(
            fill=torch.zeros_like, output=lambda output: output, inferer=SimpleInferer(), patch_memory=None
        )
        assert explain(IMAGES, NETWORK).isfinite().all()

    @pytest.mark.parametrize(
        "fill", [ms.ConstantFill(torch.tensor(0.5)), ms.ConstantFill(np.array([0.5])), ms.BlurFill(np.float32(2))]
    )
    def test_of_fills(self, fill: Any) -> None:
        assert window(fill=fill)(IMAGES, NETWORK).isfinite().all()

    @pytest.mark.parametrize(
        "target",
        [ms.RegionScore(np.int64(1), "none", region=torch.ones(8, 8)), ms.DiceScore([1], "none")],
    )
    def test_of_targets_of_a_segmentation(self, target: Any) -> None:
        def segment(images: torch.Tensor) -> torch.Tensor:
            return torch.cat([1 - images, images], dim=1)

        assert window(target)(IMAGES, segment).isfinite().all()
