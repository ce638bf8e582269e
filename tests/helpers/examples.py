"""An example of every target, found by their classes, with an output that it reads."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch

import monai_saliency
from monai_saliency.targets import (
    ClassScore,
    DetectionScore,
    DiceScore,
    EmbeddingSimilarity,
    FieldSimilarity,
    FunctionScore,
    RegionScore,
    RegressionScore,
    Target,
)
from monai_saliency.targets.auto import AutoTarget
from monai_saliency.targets.base import MemberTarget
from monai_saliency.targets.postprocessing import Reading
from monai_saliency.targets.segmentation import PredictedRegionScore

T = TypeVar("T")


def found_in_package(base: type[T]) -> list[type[T]]:
    """All classes of the package that are a ``base`` and can be made, by the modules of its rooms."""
    room = import_module(base.__module__.rpartition(".")[0])
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        import_module(module.name)
    found, left = [], [base]
    while left:
        left += (each := left.pop()).__subclasses__()
        ours = each.__module__.startswith(f"{monai_saliency.__name__}.")
        if ours and not inspect.isabstract(each) and not each.__name__.startswith("_"):
            found.append(each)
    return sorted(set(found), key=lambda each: each.__name__)


def classes(_: int) -> torch.Tensor:
    return torch.tensor([[0.3, 2.1, -1.7]])


def volume(dims: int) -> torch.Tensor:
    """Two channels, of which the second wins in a corner."""
    output = torch.full((1, 2, *[8] * dims), 1.3)
    output[(slice(None), 1, *[slice(2, 5)] * dims)] = 2.9
    return output


def boxes(dims: int) -> list[dict[str, torch.Tensor]]:
    box = torch.tensor([[1.0] * dims + [5.0] * dims])
    return [{"boxes": box, "labels": torch.tensor([1]), "scores": torch.tensor([0.7])}]


def sigmoid_and_argmax(output: torch.Tensor) -> Any:
    return Reading("sigmoid", "argmax").labels(output, "sigmoid")


#: for each target some examples, and what makes an output for one image of so many axes
TARGETS: dict[type[Target], list[tuple[Target, Callable[[int], Any]]]] = {
    AutoTarget: [(AutoTarget(), classes), (AutoTarget(), volume), (AutoTarget(), boxes)],
    ClassScore: [(ClassScore("all", activation), classes) for activation in ("softmax", "sigmoid", "none")],
    DetectionScore: [(DetectionScore(), boxes)],
    DiceScore: [(DiceScore(1, "softmax"), volume)],
    EmbeddingSimilarity: [(EmbeddingSimilarity(measure), volume) for measure in ("cosine", "distance")],
    FieldSimilarity: [(FieldSimilarity(), lambda dims: volume(dims)[:, :1].expand(1, dims, *[8] * dims))],
    FunctionScore: [(FunctionScore(lambda output: output.sum(dim=1)), classes)],
    MemberTarget: [
        (MemberTarget(ClassScore([0], "none"), 3), classes),
        (MemberTarget(DiceScore(0, "sigmoid"), 2), volume),
    ],
    PredictedRegionScore: [(PredictedRegionScore(1, "sigmoid", sigmoid_and_argmax), volume)],
    RegionScore: [(RegionScore(1, "softmax"), volume), (RegionScore(1, "none", components=2), volume)],
    RegressionScore: [(RegressionScore("all"), classes)],
}


def target_examples() -> list[tuple[str, Target | None, Callable[[int], Any] | None]]:
    """Each target's name, examples and outputs; None for a target without an example."""
    rows: list[tuple[str, Target | None, Callable[[int], Any] | None]] = []
    for kind in found_in_package(Target):  # type: ignore[type-abstract]
        examples = TARGETS.get(kind, [(None, None)])  # type: ignore[list-item]
        rows += [(f"{kind.__name__} {i}", *each) for i, each in enumerate(examples)]
    return rows


def repeated(output: Any, count: int) -> Any:
    """The output of a network that says the same of every image."""
    if isinstance(output, list):
        return output * count
    return output.repeat(count, *[1] * (output.ndim - 1))
