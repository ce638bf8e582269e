"""Predicting perturbed images as a bundle's evaluator predicts images: its inferer is recorded, and replayed."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from monai.inferers import Inferer, SlidingWindowInferer

from monai_saliency.utils.monai_private import tree_leaves, tree_map
from monai_saliency.utils.tensors import plain
from monai_saliency.utils.timing import WatchedInferer

__all__ = ["Call", "Recorder", "Replay", "own_inferer", "randomness_untouched"]


@dataclass(frozen=True)
class Call:
    """What an evaluator gave its inferer.

    Attributes:
        inputs: a batch of images, or a list of them.
        args: further inputs of the network.
        kwargs: further inputs of the network, by name.
        output: what the inferer gave: the prediction before any postprocessing. None where it is not known.
    """

    inputs: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output: Any = None

    @property
    def images(self) -> list[torch.Tensor]:
        """The images, each ``(C, *spatial)``.

        Raises:
            ValueError: when there are none.
        """
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
        alone = self.is_list or any(isinstance(value, torch.Tensor) for value in further)
        return [[i] for i in range(count)] if alone else [list(range(count))]

    def of(self, group: Sequence[int]) -> Call:
        """The call for a group of the images. Further tensors with a row an image keep the row of a single image."""

        def row(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(self.inputs) and len(group) == 1:
                return value[group[0] : group[0] + 1]
            return value

        inputs = [self.inputs[i] for i in group]
        return Call(inputs, *tree_map(row, (tuple(self.args), dict(self.kwargs))))


class Recorder(Inferer):
    """A bundle's inferer that keeps its call.

    Args:
        inferer: the bundle's inferer.
    """

    def __init__(self, inferer: Any) -> None:
        super().__init__()
        self.inferer = inferer
        self._call: Call | None = None
        self._outputs = 0

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._call = Call(inputs, args, kwargs)  # known also where the inferer fails
        output = self.inferer(inputs, network, *args, **kwargs)
        self._call = Call(inputs, args, kwargs, output)
        self._outputs += 1
        return output

    def __getattr__(self, name: str) -> Any:
        if name == "inferer":  # not there yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.inferer, name)

    def note(self, call: Call) -> None:
        """Keep a call that went another way."""
        self._call, self._outputs = call, 1

    def forget(self) -> None:
        """Forget what an iteration has left that came to no end."""
        self._call, self._outputs = None, 0

    def take(self) -> Call:
        """The call, which is then forgotten.

        Raises:
            ValueError: when there was none; when there were several, of which nobody knows what they came to.
        """
        if self._call is None:
            raise ValueError(
                "the bundle's evaluator predicts without its inferer, so nothing is known of how: give it an inferer "
                "that it calls, such as monai.inferers.SimpleInferer"
            )
        call, outputs = self._call, self._outputs
        self.forget()
        if outputs > 1:
            raise ValueError(
                f"the evaluator calls its inferer {outputs} times for one batch, as with test-time augmentation or "
                "from coarse to fine, and what it makes of the outputs is not known: put these steps into one inferer, "
                "which the evaluator calls once"
            )
        return call


class Replay(Inferer):
    """Runs a bundle's inferer on perturbed images, with the further inputs of the image that they are made of.

    Args:
        inferer: the bundle's inferer.
        call: the evaluator's call for this image, see :meth:`Call.of`.
    """

    def __init__(self, inferer: Any, call: Call) -> None:
        super().__init__()
        self.inferer = inferer
        self.args = tuple(call.args)
        self.kwargs = dict(call.kwargs)

    @staticmethod
    def of(inferer: Any, call: Call, all_boxes: bool = False) -> Inferer:
        """The inferer that explains a call: a ``SlidingWindowInferer`` itself if it takes no further inputs, else a
        replay.

        Args:
            inferer: the bundle's inferer.
            call: the evaluator's call for the images.
            all_boxes: let a detector report boxes below its own threshold.
        """
        if getattr(inferer, "progress", False):
            # One bar for each batch of perturbed images would hide everything else.
            inferer = copy.copy(inferer)
            inferer.progress = False
        inferer = _without_threshold(inferer) if all_boxes else inferer
        if isinstance(inferer, SlidingWindowInferer) and not (call.args or call.kwargs):
            return inferer
        return Replay(inferer, call)

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        patches = isinstance(self.inferer, SlidingWindowInferer)

        def repeated(name: str, value: Any) -> Any:
            # What comes with patches must suit any number of them; but of a condition each image has its own patches.
            single = isinstance(value, torch.Tensor) and value.ndim and len(value) == 1
            if single and (not patches or name == "condition"):
                return value.expand(len(inputs), *value.shape[1:])
            return value

        args = tree_map(lambda value: repeated("", value), self.args)
        kwargs = {name: tree_map(functools.partial(repeated, name), value) for name, value in self.kwargs.items()}
        return self.inferer(inputs, network, *args, **kwargs)


def _without_threshold(inferer: Any) -> Any:
    """A copy of an inferer that holds a detector, whose boxes may have any score."""
    detectors = [name for name, part in vars(inferer).items() if hasattr(part, "box_selector")]
    if not detectors:
        return inferer
    detector = copy.copy(getattr(inferer, detectors[0]))
    detector.box_selector = copy.copy(detector.box_selector)
    detector.box_selector.score_thresh = 0.0
    inferer = copy.copy(inferer)
    setattr(inferer, detectors[0], detector)
    return inferer


@contextmanager
def randomness_untouched() -> Iterator[None]:
    """Leave the global random generators as they were: a bundle's later predictions may draw from them."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002, the global one is meant
    # Where CUDA has not begun, it has no generators, and need not begin.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def own_inferer(evaluator: Any) -> Any:
    """The bundle's inferer, without what we put around it: the meter of our own evaluator, and a recorder."""
    inferer = evaluator.inferer
    while isinstance(inferer, (WatchedInferer, Recorder)):
        inferer = inferer.inferer
    return inferer
