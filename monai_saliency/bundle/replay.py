"""Predicting perturbed images as a bundle's evaluator predicts images: its inferer is recorded, and replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from monai.inferers import Inferer, SlidingWindowInferer

from monai_saliency.utils.monai_private import tree_leaves, tree_map
from monai_saliency.utils.tensors import plain


@dataclass(frozen=True)
class Call:
    """The arguments that an evaluator gave its inferer."""

    inputs: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None

    @property
    def images(self) -> list[torch.Tensor]:
        """The images, each ``(C, *spatial)``."""
        images = [plain(image) for image in self.inputs]
        if not images or not all(isinstance(image, torch.Tensor) for image in images):
            raise ValueError(
                f"the evaluator gives its inferer a {type(self.inputs).__name__} without images, where a batch or a "
                "list of them can be explained"
            )
        return images

    @property
    def is_list(self) -> bool:
        """Whether the images are a list, as a detector takes them."""
        return isinstance(self.inputs, (list, tuple))

    def groups(self) -> list[list[int]]:
        """The images that can be explained together: each alone if they are a list, or come with further tensors."""
        count = len(self.inputs)
        further = tree_leaves((tuple(self.args), dict(self.kwargs)))
        if self.is_list or any(isinstance(value, torch.Tensor) for value in further):
            return [[i] for i in range(count)]
        return [list(range(count))]

    def of(self, group: Sequence[int]) -> Call:
        """The call for a group of the images. Further tensors with a row an image keep the row of a single image."""

        def row(value: Any) -> Any:
            if len(group) > 1 or not isinstance(value, torch.Tensor) or value.ndim == 0:
                return value
            return value[group[0] : group[0] + 1] if len(value) == len(self.inputs) else value

        inputs = [self.inputs[i] for i in group]
        return Call(inputs, tree_map(row, tuple(self.args)), tree_map(row, dict(self.kwargs)))

    def taken(self, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], Call]:
        """Some of the further arguments, by name, and the call without them."""
        others = dict(self.kwargs)
        taken = {name: others.pop(name, None) for name in names}
        missing = [name for name, value in taken.items() if not isinstance(value, torch.Tensor)]
        if missing:
            given = f"the evaluator gives its network the arguments {sorted(self.kwargs)} by name"
            raise ValueError(f"`numbers` names {missing}, and {given}: name tensors among them")
        return taken, Call(self.inputs, self.args, others, self.output)


class Recorder(Inferer):
    """A bundle's inferer that keeps its calls."""

    def __init__(self, inferer: Any) -> None:
        super().__init__()
        self.inferer = inferer
        self.calls: list[Call] = []

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inferer(inputs, network, *args, **kwargs)
        self.calls.append(Call(inputs, args, kwargs, output))
        return output

    def __getattr__(self, name: str) -> Any:
        if name == "inferer":  # not there yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.inferer, name)

    def take(self) -> Call:
        """The call, which is then forgotten."""
        calls, self.calls = self.calls, []
        if not calls:
            raise ValueError(
                "the bundle's evaluator predicts without its inferer, so nothing is known of how: give it an inferer "
                "that it calls, such as monai.inferers.SimpleInferer"
            )
        if len(calls) > 1:
            raise ValueError(
                f"the evaluator calls its inferer {len(calls)} times for one batch, as with test-time augmentation or "
                "from coarse to fine, and what it makes of the outputs is not known: put these steps into one inferer, "
                "which the evaluator calls once"
            )
        return calls[0]


class Replay(Inferer):
    """Runs a bundle's inferer on perturbed images, with the further inputs of the image that they are made of."""

    def __init__(self, inferer: Any, call: Call) -> None:
        super().__init__()
        self.inferer = inferer
        self.args = tuple(call.args)
        self.kwargs = dict(call.kwargs)

    @staticmethod
    def of(inferer: Any, call: Call, all_boxes: bool = False) -> Inferer:
        """The inferer that explains a call: a ``SlidingWindowInferer`` itself if it takes no further inputs, else a
        replay. With ``all_boxes`` a detector gives boxes of any score.
        """
        if all_boxes:
            inferer = _without_threshold(inferer)
        if getattr(inferer, "progress", False):
            # One bar for each batch of perturbed images would hide everything else.
            inferer = copy.copy(inferer)
            inferer.progress = False
        if isinstance(inferer, SlidingWindowInferer) and not (call.args or call.kwargs):
            return inferer
        return Replay(inferer, call)

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def repeated(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (1,):
                return value
            return value.expand(len(inputs), *value.shape[1:])

        if not isinstance(self.inferer, SlidingWindowInferer):
            return self.inferer(inputs, network, *tree_map(repeated, self.args), **tree_map(repeated, self.kwargs))
        # What comes with patches must suit any number of them.
        return self.inferer(inputs, network, *self.args, **self.kwargs)


def _without_threshold(inferer: Any) -> Any:
    """A copy of an inferer that holds a detector, whose boxes may have any score."""
    inferer = copy.copy(inferer)
    for name, part in vars(inferer).items():
        if hasattr(part, "box_selector"):
            detector = copy.copy(part)
            detector.box_selector = copy.copy(part.box_selector)
            detector.box_selector.score_thresh = 0.0
            setattr(inferer, name, detector)
    return inferer


def own_inferer(evaluator: Any) -> Any:
    """The bundle's inferer, without a recorder that we put around it."""
    inferer = evaluator.inferer
    while isinstance(inferer, Recorder):
        inferer = inferer.inferer
    return inferer
