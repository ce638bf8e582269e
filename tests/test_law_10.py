"""Law 10: a map is right, or it is refused; over every method and target, which are found by looking.

Rows of a network's output that depend on each other make no error, and a map of such scores is wrong. Whatever
explains, the map is that of images which go through one at a time. Only a network that gives NaN for an image alone is
refused (``NAN_ALONE``). What is new needs an example.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.dependent import COUPLINGS, Coupled, Layered, classify, segment
from helpers.examples import METHODS, found_in_package
from helpers.forked_ranks import on_ranks
from helpers.tolerances import SINGLE, assert_close
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.distributed.process_group import MasksOverRanks
from monai_saliency.errors import CaseError
from monai_saliency.targets.base import Target

SHAPE = (9, 8)
LABELS = torch.arange(3).repeat_interleave(3)[None, :, None].expand(1, *SHAPE)
BATCH = 4
#: divides by the deviation of what it gets, which is 0 where the whole image is hidden
NAN_ALONE = "normalised over the batch"


def images(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 1, *SHAPE, generator=torch.Generator().manual_seed(2))


def check_one_at_a_time(
    make: Callable[[int], ms.PerturbationInferer],
    network: Callable[[torch.Tensor], Any],
    inputs: torch.Tensor,
    within: float = SINGLE,
) -> None:
    """The map of a batch is the map of images one at a time, also of networks whose rows depend on each other.

    Args:
        make: an inferer with batches of a size.
        network: rows that are independent.
        inputs: the images.
        within: how near maps are, of scores of at most about 1.
    """

    def explain(batch: int, run: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
        cases = [ms.Case(f"ct_{i}", labels=LABELS) for i in range(len(inputs))]
        return [each.saliency for each in make(batch).explain(inputs, run, cases=cases)]

    for one, other in zip(explain(BATCH, network), explain(1, network), strict=True):
        assert_close(one, other, scale=1, within=within)
    for coupling in COUPLINGS:
        dependent = Coupled(network, coupling)
        expected = []
        with suppress(CaseError):
            expected = explain(1, dependent)
        if not expected:
            assert coupling == NAN_ALONE, f"{coupling} is refused"
            for batch in (1, BATCH):
                with pytest.raises(CaseError, match="network scores are NaN or infinite"):
                    explain(batch, dependent)
            continue
        for one, other in zip(explain(BATCH, dependent), expected, strict=True):
            assert_close(one, other, scale=1, within=within)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("method", ms.methods.__all__)
def test_methods(method: str, sliding: bool) -> None:
    given = METHODS[method][0](2)
    if sliding:
        given = {"inferer": SlidingWindowInferer((6, 6), 3, overlap=0.5)} | given
    target: Target = ms.RegionScore(1, "softmax", "all") if "inferer" in given else ms.ClassScore([0, 2], "softmax")
    network = Layered(segment if "inferer" in given else classify)  # for methods that read a layer

    def make(batch: int) -> ms.PerturbationInferer:
        # One at a time are whole images: remembered patches run batches of patches.
        settings = given | {"target": target, "mask_batch_size": batch, "patch_memory": batch > 1}
        return getattr(ms.methods, method)(**settings)

    # Sobol indices are divided by the variance of the scores.
    check_one_at_a_time(make, network, images(), within=1e-4 if method == "sobol" else SINGLE)


def detect(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    boxes = torch.tensor([[0.0, 0, 6, 6], [4, 4, 10, 12]])
    return [{"boxes": boxes, "labels": torch.tensor([0, 1]), "scores": each[:2]} for each in classify(x).sigmoid()]


#: targets by name, each with networks that it explains
TARGETS: dict[str, list[tuple[Callable[[], Target], Callable[[torch.Tensor], Any]]]] = {
    "AutoTarget": [
        (lambda: ms.AutoTarget(activation="softmax"), classify),
        (lambda: ms.AutoTarget(activation="softmax"), segment),
        (lambda: ms.AutoTarget(), detect),
        (lambda: ms.AutoTarget(activation="softmax", output="pred"), lambda x: {"f": segment(x), "pred": classify(x)}),
    ],
    "ClassScore": [(lambda: ms.ClassScore("predicted", "softmax"), classify)],
    "DetectionScore": [(lambda: ms.DetectionScore(0.0), detect)],
    "DiceScore": [(lambda: ms.DiceScore(1, "softmax"), segment)],
    "EmbeddingSimilarity": [
        (lambda measure=each: ms.EmbeddingSimilarity(measure), classify) for each in ("cosine", "distance")
    ],
    "FieldSimilarity": [(lambda: ms.FieldSimilarity(), lambda x: segment(x)[:, :2])],
    "FunctionScore": [(lambda: ms.FunctionScore(lambda output: output.mean(dim=1)), classify)],
    "RegionScore": [(lambda: ms.RegionScore(1, "softmax"), segment)],
    "RegressionScore": [(lambda: ms.RegressionScore(), classify)],
}


@pytest.mark.parametrize("kind", found_in_package(Target))  # type: ignore[type-abstract]
def test_targets(kind: type[Target]) -> None:
    for make, network in TARGETS[kind.__name__]:
        check_one_at_a_time(
            lambda batch, make=make: ms.sliding_window(5, 4, target=make(), mask_batch_size=batch), network, images()
        )


def over_ranks(network: Callable[..., Any]) -> list[torch.Tensor]:
    sharing = MasksOverRanks()
    explain = ms.sliding_window(5, 4, target=ms.ClassScore([0], "none"), mask_batch_size=BATCH, sharing=sharing)
    return on_ranks(2, lambda rank: explain(images(), network))


def test_sharing() -> None:
    for coupling in COUPLINGS:
        network = Coupled(classify, coupling)
        alone = ms.sliding_window(5, 4, target=ms.ClassScore([0], "none"), mask_batch_size=1)(images(), network)
        for found in over_ranks(network):
            assert torch.equal(found, alone), coupling
