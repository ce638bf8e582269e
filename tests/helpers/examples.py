"""An example of every target, found by their classes, with an output that it reads; and settings of every method."""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.targets import Target

T = TypeVar("T")


def found_in_package(base: type[T]) -> list[type[T]]:
    """All classes of a room that are its ``base`` and can be made, and those that another room lists as public: not
    what only wraps one, nor xaitk-saliency's, which are tested beside it.
    """
    room = import_module(base.__module__.rpartition(".")[0])
    for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        import_module(module.name)
    found, left = [], [base]
    while left:
        left += (each := left.pop()).__subclasses__()
        package, own, *_ = [*each.__module__.split("."), ""]
        is_listed = package == "monai_saliency" and own != "xaitk" and each.__name__ in _listed(own)
        ours = each.__module__.startswith(f"{room.__name__}.") or is_listed
        if ours and not inspect.isabstract(each) and not each.__name__.startswith("_"):
            found.append(each)
    return sorted(set(found), key=lambda each: each.__name__)


def _listed(room: str) -> list[str]:
    """The public names of a room."""
    return getattr(import_module(f"monai_saliency.{room}"), "__all__", [])


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


#: for each target some examples, and what makes an output for one image of so many axes
TARGETS: dict[type[Target], list[tuple[Target, Callable[[int], Any]]]] = {
    ms.AutoTarget: [
        *((ms.AutoTarget(activation="softmax"), output) for output in (classes, volume)),
        (ms.AutoTarget(), boxes),
    ],
    ms.ClassScore: [(ms.ClassScore("all", activation), classes) for activation in ("softmax", "sigmoid", "none")],
    ms.DetectionScore: [(ms.DetectionScore(), boxes)],
    ms.DiceScore: [(ms.DiceScore(1, "softmax"), volume)],
    ms.EmbeddingSimilarity: [(ms.EmbeddingSimilarity(measure), volume) for measure in ("cosine", "distance")],
    ms.FieldSimilarity: [(ms.FieldSimilarity(), lambda dims: volume(dims)[:, :1].expand(1, dims, *[8] * dims))],
    ms.FunctionScore: [(ms.FunctionScore(lambda output: output.sum(dim=1)), classes)],
    ms.RegionScore: [(ms.RegionScore(1, "softmax"), volume), (ms.RegionScore(1, "none", components=2), volume)],
    ms.RegressionScore: [(ms.RegressionScore("all"), classes)],
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


class WholeImages(SlidingWindowInferer):
    """Says where patches lie, and runs the network on whole images, whatever its output is."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return network(inputs, *args, **kwargs)


def quarters(image: torch.Tensor, spacing: Sequence[float] | None) -> torch.Tensor:
    labels = torch.zeros(1, *image.shape[1:], dtype=torch.long)
    labels[:, :4, :4], labels[:, :4, 4:], labels[:, 4:, 4:] = 1, 2, 3
    return labels


#: settings of each method, some of each
METHODS: dict[str, list[Callable[[int], dict[str, Any]]]] = {
    "rise": [
        lambda dims: {"num_masks": 12, "grid_size": 3},
        lambda dims: {"num_masks": 12, "grid_size": 3, "p1": 0.3, "per_channel": True},
        lambda dims: {"num_masks": 8, "grid_size": 3, "until": 0.9, "budget": 30},
    ],
    "sliding_window": [
        lambda dims: {"window_size": 4, "stride": 3},
        lambda dims: {"window_size": 4, "stride": 4, "per_channel": True},
        lambda dims: {"window_size": 4, "stride": 3, "smooth": 2},
    ],
    "patch_windows": [lambda dims: {"inferer": WholeImages([4] * dims), "patch_memory": False}],
    "hierarchical_occlusion": [
        lambda dims: {"window_size": 4, "levels": 3, "keep": 0.2},
        lambda dims: {"window_size": 4, "levels": 3, "keep": 0.4, "regions": quarters},
    ],
    "focused_rise": [lambda dims: {"num_masks": 24, "p1": 0.4}, lambda dims: {"num_masks": 40, "seed": 3}],
    "region_occlusion": [
        lambda dims: {"regions": quarters},
        lambda dims: {"regions": quarters, "num_coalitions": 12, "p1": 0.4},
        lambda dims: {"regions": quarters, "num_coalitions": 12, "per_channel": True},
    ],
    "channel_occlusion": [lambda dims: {}],
    "shapley": [
        lambda dims: {"regions": quarters},
        lambda dims: {"regions": quarters, "num_coalitions": 13},
        lambda dims: {"regions": quarters, "num_coalitions": 25, "per_channel": True},
        lambda dims: {"regions": quarters, "num_coalitions": 13},
    ],
    "hsic": [lambda dims: {"num_masks": 20, "grid_size": 3}],
    # The image's score is above the fill's.
    "minimal_region": [lambda dims: {"window_size": 4, "levels": 2, "share": 0.6, "fill": ms.ConstantFill(3.0 - dims)}],
    "sobol": [lambda dims: {"num_designs": 4, "grid_size": 2}],
    "mc_rise": [
        lambda dims: {"num_masks": 12, "grid_size": 3},
        lambda dims: {"num_masks": 12, "grid_size": 3, "p1": 0.3, "more_fills": [2.0, ms.BlurFill(1.0)]},
    ],
    "random_grid": [
        lambda dims: {"num_masks": 12, "cell_size": 3},
        lambda dims: {"num_masks": 12, "cell_size": 3, "p1": 0.3, "per_channel": True},
    ],
    "multi_scale_window": [lambda dims: {"window_size": 4, "levels": 2}],
    "sliding_radial": [
        lambda dims: {"radius": 2.5, "stride": 3},
        lambda dims: {"radius": 3, "stride": 3, "sigma": 1.0, "per_channel": True},
    ],
    "squared_difference": [lambda dims: {"radius": 2.5, "stride": 3, "sigma": 1.0}],
    "sbsm": [lambda dims: {"window_size": 4, "stride": 3}],
    "drise": [lambda dims: {"num_masks": 12, "grid_size": 3}],
    "integrated_gradients": [lambda dims: {"steps": 7}],
    "smoothgrad": [
        lambda dims, each=each: {"num_samples": 7, "reading": each} for each in ("times_input", "absolute", "signed")
    ],
    "grad_cam": [lambda dims: {}],
}
