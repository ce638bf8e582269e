"""Law 10: a map is right, or it is refused; over every method, target and engine, which are found by looking.

Rows of a network's output that depend on each other make no error, and a map of such scores is wrong. Whatever
explains, the map is that of images which go through one at a time, or the case fails.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
import torch
from helpers.dependent import COUPLINGS, Coupled, Layered, classify, segment
from helpers.files import maps, rows_of
from helpers.forked_ranks import on_ranks
from helpers.own_bundle import rank, settings
from helpers.scans import write_scans
from monai.inferers import SlidingWindowInferer
from monai.utils import OptionalImportError

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.distributed.base import Engine
from monai_saliency.errors import CaseError
from monai_saliency.inferers.inferer import Sharing
from monai_saliency.targets.base import Target
from monai_saliency.targets.postprocessing import Reading
from monai_saliency.targets.segmentation import PredictedRegionScore

SHAPE = (12, 10)
LABELS = torch.arange(3).repeat_interleave(4)[None, :, None].expand(1, *SHAPE)
BATCH = 4


def classes_of(package: str, base: type) -> dict[str, type]:
    """The public classes of a package, by name, that one can make and that derive from a class."""
    room = importlib.import_module(package)
    modules = [room]
    for each in pkgutil.iter_modules(room.__path__, f"{package}."):
        with suppress(OptionalImportError):  # an engine whose library is not installed
            modules.append(importlib.import_module(each.name))
    return {
        name: each
        for module in modules
        for name, each in vars(module).items()
        if inspect.isclass(each)
        and issubclass(each, base)
        and not inspect.isabstract(each)
        and not name.startswith("_")
        and each.__module__.startswith("monai_saliency.")
    }


def example(table: dict[str, Any], name: str, where: str) -> Any:
    """What a table has for something that was found.

    Raises:
        Failed: when it has nothing.
    """
    if name not in table:
        pytest.fail(
            f"{name} is new: add an example of it to {where} in {Path(__file__).name}, so that law 10 holds of it"
        )
    return table[name]


def images(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 1, *SHAPE, generator=torch.Generator().manual_seed(2))


def one_at_a_time_or_refused(
    make: Callable[[int], ms.PerturbationInferer], network: Callable[[torch.Tensor], Any], inputs: torch.Tensor
) -> None:
    """Of a network whose rows depend on each other, the map is right or there is an error; of another it is right.

    Args:
        make: an inferer with batches of a size.
        network: rows that are independent.
        inputs: the images.
    """

    def explain(batch: int, run: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        cases = [Case(f"ct_{i}", labels=LABELS) for i in range(len(inputs))]
        return [each.saliency for each in make(batch).explain(inputs, run, cases=cases)]

    for one, other in zip(explain(BATCH, network), explain(1, network), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for coupling in COUPLINGS:
        dependent = Coupled(network, coupling)
        try:
            expected = explain(1, dependent)
        except CaseError:  # what is alone cannot be explained, such as an image without a box
            with pytest.raises(CaseError):
                explain(BATCH, dependent)
            continue
        try:
            found = explain(BATCH, dependent)
        except CaseError:
            continue
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=coupling)


# Methods. -------------------------------------------------------------------------------------------------------------

#: what methods cannot do without
METHODS: dict[str, dict[str, Any]] = {
    "rise": {"num_masks": 20, "grid_size": 3},
    # Windows that matter in the first batch, where rows are compared.
    "sliding_window": {"window_size": 6, "stride": 3},
    "patch_windows": {"inferer": SlidingWindowInferer((6, 6), 3, overlap=0.5)},
    "focused_rise": {"num_masks": 16},
    "hierarchical_occlusion": {"window_size": 6, "levels": 2, "keep": 0.3},
    "region_occlusion": {},
    "channel_occlusion": {},
    "shapley": {},
    "hsic": {"num_masks": 20, "grid_size": 3},
    "minimal_region": {"window_size": 6, "levels": 2, "keep": 0.3},
    "sobol": {"num_designs": 2, "grid_size": 2},
    "mc_rise": {"num_masks": 20, "grid_size": 3},
    "random_grid": {"num_masks": 20, "cell_size": 4},
    "multi_scale_window": {"window_size": 6, "levels": 2},
    "sliding_radial": {"radius": 3, "stride": 3},
    "squared_difference": {"radius": 3, "stride": 3, "sigma": 0.5},
    "sbsm": {"window_size": 6, "stride": 3},
    "drise": {"num_masks": 20, "grid_size": 3},
    "integrated_gradients": {"steps": 6},
    "smoothgrad": {"num_samples": 6},
    "grad_cam": {},
}


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("method", ms.methods.__all__)
def test_methods(method: str, sliding: bool) -> None:
    given = example(METHODS, method, "METHODS")
    if sliding:
        given = {"inferer": SlidingWindowInferer((6, 6), 3, overlap=0.5)} | given
    target: Target = ms.RegionScore(1, "softmax", "all") if "inferer" in given else ms.ClassScore([0, 2], "softmax")
    network = Layered(segment if "inferer" in given else classify)  # for methods that read a layer

    def make(batch: int) -> ms.PerturbationInferer:
        # One at a time are whole images: remembered patches run batches of patches.
        return getattr(ms.methods, method)(**given, target=target, mask_batch_size=batch, patch_memory=batch > 1)

    one_at_a_time_or_refused(make, network, images())


# Targets. -------------------------------------------------------------------------------------------------------------


def detect(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    boxes = torch.tensor([[0.0, 0, 6, 6], [4, 4, 10, 12]])
    return [{"boxes": boxes, "labels": torch.tensor([0, 1]), "scores": each[:2]} for each in classify(x).sigmoid()]


def displace(x: torch.Tensor) -> torch.Tensor:
    return segment(x)[:, :2]


SIGMOID = Reading("sigmoid", "argmax")
#: targets by name, each with networks that it explains
TARGETS: dict[str, list[tuple[Callable[[], Target], Callable[[torch.Tensor], Any]]]] = {
    "AutoTarget": [
        (lambda: ms.targets.auto.AutoTarget(), network)
        for network in (classify, segment, detect, lambda x: {"features": segment(x), "pred": classify(x)})
    ],
    "ClassScore": [(lambda: ms.ClassScore("predicted", "softmax"), classify)],
    "DetectionScore": [(lambda: ms.DetectionScore(0.0), detect)],
    "DiceScore": [(lambda: ms.DiceScore(1, "softmax"), segment)],
    "EmbeddingSimilarity": [
        (lambda measure=each: ms.EmbeddingSimilarity(measure), classify) for each in ("cosine", "distance")
    ],
    "FieldSimilarity": [(lambda: ms.FieldSimilarity(), displace)],
    "FunctionScore": [(lambda: ms.FunctionScore(lambda output: output.mean(dim=1)), classify)],
    "MemberTarget": [
        (lambda: ms.targets.base.MemberTarget(ms.ClassScore([0], "none"), 3), classify),
        (lambda: ms.targets.base.MemberTarget(ms.RegionScore(0, "none", "all"), 3), segment),
    ],
    "RegionScore": [(lambda: ms.RegionScore(1, "softmax"), segment)],
    "PredictedRegionScore": [
        (lambda: PredictedRegionScore(1, "sigmoid", lambda output: SIGMOID.labels(output, "sigmoid")), segment)
    ],
    "RegressionScore": [(lambda: ms.RegressionScore(), classify)],
}


@pytest.mark.parametrize("name", classes_of("monai_saliency.targets", Target))
def test_targets(name: str) -> None:
    for make, network in example(TARGETS, name, "TARGETS"):
        one_at_a_time_or_refused(
            lambda batch, make=make: ms.sliding_window(5, 4, target=make(), mask_batch_size=batch), network, images()
        )


# Ways of sharing masks, for pipelines of one's own. -------------------------------------------------------------------


def over_devices(network: Callable[..., Any]) -> list[torch.Tensor]:
    sharing = ms.distributed.MasksOverDevices(["cpu", "cpu"])
    return [
        ms.sliding_window(5, 4, target=ms.ClassScore([0], "none"), mask_batch_size=BATCH, sharing=sharing)(
            images(), network
        )
    ]


def over_ranks(network: Callable[..., Any]) -> list[torch.Tensor]:
    sharing = ms.distributed.process_group.MasksOverRanks()
    explain = ms.sliding_window(5, 4, target=ms.ClassScore([0], "none"), mask_batch_size=BATCH, sharing=sharing)
    return on_ranks(2, lambda rank: explain(images(), network))


SHARINGS = {"MasksOverDevices": over_devices, "MasksOverRanks": over_ranks}


@pytest.mark.parametrize("name", classes_of("monai_saliency.distributed", Sharing))
def test_sharing(name: str) -> None:
    explain = example(SHARINGS, name, "SHARINGS")
    for coupling in COUPLINGS:
        network = Coupled(classify, coupling)
        alone = ms.sliding_window(5, 4, target=ms.ClassScore([0], "none"), mask_batch_size=1)(images(), network)
        for found in explain(network):
            assert torch.equal(found, alone), coupling


# Engines, which share a cohort. ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scans, and their maps of images that go through one at a time in ``alone``."""
    folder = tmp_path_factory.mktemp("law")
    write_scans(folder, 2)
    run(folder, "alone", mask_batch_size=1)
    assert len(maps(folder / "alone")) == 2
    return folder


def run(folder: Path, out: str, network: str = "CoupledCounting", **overrides: Any) -> None:
    given = settings(folder, out) | {"method": "sliding_window", "window_size": 6, "stride": 6}
    for name in ("num_masks", "grid_size"):
        del given[name]
    given["network_def"] = {"_target_": f"helpers.dependent.{network}", "log": str(folder / "log")}
    monai.bundle.run(**given | overrides)


def ranks(folder: Path, out: str, **overrides: Any) -> None:
    for number in range(2):
        run(folder, out, **rank(number, 2, "masks"), **overrides)


def slurm(folder: Path, out: str, **overrides: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for task in range(2):
            of_task = {"TASK_ID": task, "TASK_MIN": 0, "TASK_MAX": 1, "TASK_STEP": 1, "TASK_COUNT": 2}
            for name, value in of_task.items():
                patch.setenv(f"SLURM_ARRAY_{name}", str(value))
            run(folder, out, **engine("SlurmEngine", split="masks"), **overrides)


def engine(name: str, **given: Any) -> dict[str, Any]:
    return {"saliency_engine": {"_target_": f"monai_saliency.distributed.{name}", **given}}


def one(name: str, **given: Any) -> Callable[..., None]:
    return lambda folder, out, **overrides: run(folder, out, **engine(name, **given), **overrides)


#: engines by name; what starts processes of its own is slow
ENGINES: dict[str, Callable[..., None]] = {
    "RankEngine": ranks,
    "SlurmEngine": slurm,
    "TorchrunEngine": one("TorchrunEngine"),
    "DevicesEngine": one("DevicesEngine", devices=["cpu", "cpu"]),
    "RayEngine": one("RayEngine", max_workers=2, split="masks"),
    "LightningEngine": one("lightning.LightningEngine", accelerator="cpu", devices=1, split="masks"),
    "AccelerateEngine": one("accelerate.AccelerateEngine", split="masks"),
}
SLOW = {"RayEngine", "LightningEngine", "AccelerateEngine"}


def engines() -> list[Any]:
    found = classes_of("monai_saliency.distributed", Engine)
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in found]


@pytest.mark.parametrize("name", engines())
def test_engines(name: str, cohort: Path, request: pytest.FixtureRequest) -> None:
    """The maps of images that go through one at a time; of a network that draws random numbers there is none."""
    explain = example(ENGINES, name, "ENGINES")
    if name == "RayEngine":
        request.getfixturevalue("cluster")
    explain(cohort, name)
    assert maps(cohort / name) == maps(cohort / "alone")
    if name in {"RankEngine", "DevicesEngine"}:
        with pytest.raises(SystemExit):
            explain(cohort, f"{name} random", network="DropoutCounting")
        assert not maps(cohort / f"{name} random")
        failed = rows_of(cohort / f"{name} random" / "failures.csv")
        assert all("not what was predicted" in row["error"] for row in failed)
        assert len(failed) >= 1
