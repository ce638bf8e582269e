"""How a network takes its inputs (one tensor, several, a dictionary or a list), and which of them are perturbed.

Perturbed inputs are joined as channels of one image. Held inputs go to the network unchanged with the perturbed copies
of their case: on the images' grid as further channels, which a sliding window cuts too; others (an age) row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import torch
from monai.inferers import Inferer, PatchInferer, SlidingWindowInferer

from monai_saliency.cases import Number, with_own_meta
from monai_saliency.utils.arguments import number, written
from monai_saliency.utils.tensors import plain, shape_in_words, to_device

Infer = Callable[..., Any]
#: tensors by the names of the network's inputs
Named = Mapping[Any, torch.Tensor]
TakeApart = Callable[[torch.Tensor], Named]
#: where an input is among the channels of a batch, and its own type, by name
Channels = Mapping[Any, tuple[slice, torch.dtype]]
#: by input, the baseline of each of its numbers by name
Baselines = Mapping[Any, Mapping[str, float]]


@dataclass(frozen=True)
class SplitInputs:
    """The inputs of a batch of B cases, split into perturbed and held ones.

    Attributes:
        images: the perturbed inputs, joined as channels ``(B, C, *spatial)``.
        meta: the first perturbed input as it was given, with its meta data.
        held_images: held inputs on the images' grid, joined as channels ``(B, H, *spatial)``.
        held_values: all other held inputs ``(B, ...)``, by name.
        channels: where an input is in a batch ``(n, C + H, *spatial)`` and its own type, by name.
        names: the names of all inputs, in the order in which they were given.
        numbers: the baselines of numbers that are hidden like regions, by input and name.
    """

    images: torch.Tensor
    meta: torch.Tensor
    held_images: torch.Tensor
    held_values: Named = field(default_factory=dict)
    channels: Channels = field(default_factory=dict)
    names: Sequence[Any] = ()
    numbers: Baselines = field(default_factory=dict)

    def take_apart(self, batch: torch.Tensor, values: Named) -> Named:
        """The network's inputs by name, from a batch ``(n, C + H, *spatial)`` and held values ``(n, ...)``."""
        inputs: dict[Any, torch.Tensor] = {}
        for name in self.names:
            if name in self.channels:
                channels, dtype = self.channels[name]
                inputs[name] = batch[:, channels].to(dtype)
            else:
                inputs[name] = values[name]
        return inputs

    def numbers_of(self, index: int) -> dict[str, Number]:
        """The numbers of a case that are hidden like regions, by name."""
        numbers: dict[str, Number] = {}
        for key, baselines in self.numbers.items():
            values = self.held_values[key][index].reshape(-1).tolist()
            for (name, baseline), value in zip(baselines.items(), values, strict=True):
                numbers[name] = Number(value, baseline)
        return numbers

    def values_of(self, counts: Sequence[tuple[int, int]], total: int, hidden: np.ndarray | None = None) -> Named:
        """The held values ``(total, ...)`` for the rows of a batch, by name.

        Args:
            counts: pairs of a case's place and the number of its rows, from the first row on. The last case's value
                fills the rows behind them.
            total: the rows of the batch.
            hidden: bool ``(rows, numbers)``, where a number is replaced by its baseline.
        """
        if not self.held_values:
            return {}
        cases = [case for case, count in counts for _ in range(count)]
        cases += cases[-1:] * (total - len(cases))
        values = {}
        for name, value in self.held_values.items():
            values[name] = value.index_select(0, to_device(np.array(cases), value.device))
        if hidden is not None:
            self._hide(values, hidden)
        return values

    def _hide(self, values: Named, hidden: np.ndarray) -> None:
        """Replace hidden numbers by their baselines, in place."""
        start = 0
        for key, baselines in self.numbers.items():
            stop = start + len(baselines)
            rows = values[key][: len(hidden)].view(len(hidden), -1)
            is_hidden = to_device(hidden[:, start:stop], rows.device)
            baseline = to_device(np.array(list(baselines.values())), rows.device, rows.dtype)
            rows.copy_(torch.where(is_hidden, baseline, rows))
            start = stop


class TensorInput:
    """One tensor ``(B, C, *spatial)``: the input of most networks, and the default. Other adapters derive from it."""

    __repr__ = written

    def split(self, inputs: Any) -> SplitInputs:
        """Split the inputs of a batch of cases, as the user gives them: a tensor, or a NumPy array."""
        if isinstance(inputs, (list, tuple)) and all(isinstance(each, (torch.Tensor, np.ndarray)) for each in inputs):
            raise ValueError(
                f"`inputs` is a {type(inputs).__name__} of {len(inputs)}. If it is a loader's batch of images and "
                "labels, give batch[0]. If the network takes a list of images "
                "(C, *spatial), write ms.explain(network, images, inputs=ms.ListInput()). If it takes several "
                "inputs, write ms.explain(network, inputs, inputs=ms.ArgumentInputs(perturb=0))"
            )
        inputs = _from_numpy(inputs)
        images = _images("`inputs`", inputs)
        return SplitInputs(images, with_own_meta(inputs), images[:, :0])

    def join(self, image: torch.Tensor, held: Named) -> Any:
        """Make the inputs that :meth:`split` takes of the image ``(B, C, *spatial)`` and held inputs ``(B, ...)``."""
        if held:
            words = f"held inputs {list(held)} are given, and the inferer's `inputs` takes one tensor"
            raise ValueError(f"{words}: set DictInput or ArgumentInputs")
        return image

    def check_inferer(self, split: SplitInputs, inferer: Inferer) -> None:
        """Refuse an inner MONAI inferer that cannot run these inputs."""
        inner = getattr(inferer, "inferer", inferer)  # of a bundle, which is replayed
        if split.held_values and isinstance(inner, (SlidingWindowInferer, PatchInferer)):
            words = f"held inputs {list(split.held_values)} are not on the images' grid"
            raise ValueError(f"{words}, so {type(inner).__name__} cannot cut them into patches: use SimpleInferer")

    def run(self, infer: Infer, network: Infer, batch: torch.Tensor, take_apart: TakeApart) -> Any:
        """The network's output for a batch ``(n, C + H, *spatial)`` of perturbed and held images, run by the inner
        inferer; ``take_apart`` returns the network's inputs by name, for the batch or for a patch of it.
        """
        return infer(batch, network)


class ListInput(TensorInput):
    """A list of images ``(C, *spatial)``, as detectors take it. The inner inferer gets the list too.

    The images to explain are a batch ``(B, C, *spatial)``, or a list of images ``(C, *spatial)`` of one shape.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, ListInput, sliding_window
        >>> def detector(images):  # a list of images in, scores out
        ...     return torch.stack([image.sum() for image in images])[:, None]
        >>> explain = sliding_window(2, target=ClassScore([0], "none"), inputs=ListInput())
        >>> explain(torch.ones(3, 1, 4, 4), detector).shape
        torch.Size([3, 1, 4, 4])
    """

    def split(self, inputs: Any) -> SplitInputs:
        if isinstance(inputs, (list, tuple)):
            images = [_from_numpy(image) for image in inputs]
            shapes = {shape_in_words(image) for image in images}
            if len(shapes) != 1 or not isinstance(images[0], torch.Tensor):
                raise ValueError(
                    f"`inputs` must be a list of images (C, *spatial) of one shape, got {', '.join(sorted(shapes))}: "
                    "load them, and explain images of other shapes in a call of their own"
                )
            inputs = torch.stack(images)
        return super().split(inputs)

    def check_inferer(self, split: SplitInputs, inferer: Inferer) -> None:
        if isinstance(inferer, (SlidingWindowInferer, PatchInferer)):
            words = "use SimpleInferer, and the detector's own sliding window if it has one"
            raise ValueError(f"{type(inferer).__name__} does not take a list of images: {words}")

    def run(self, infer: Infer, network: Infer, batch: torch.Tensor, take_apart: TakeApart) -> Any:
        return infer(list(batch), network)


class _NamedInputs(TensorInput):
    """Several inputs: a dictionary of tensors ``(B, ...)``, or a sequence of tensors, which are named 0, 1, ..."""

    def __init__(self, perturb: str | int | Sequence[str | int], numbers: Mapping[Any, Any] | None = None) -> None:
        self.perturb = [perturb] if isinstance(perturb, (str, int)) else perturb
        names = self.perturb if isinstance(self.perturb, (list, tuple)) else []
        if not names or any(type(name) not in (str, int) for name in names):
            raise ValueError(f"`perturb` must be the name of an input, or a list of names, got {perturb!r}")
        self.numbers = None if numbers is None else _baselines(numbers)

    def split(self, inputs: Any) -> SplitInputs:
        tensors = self._named(inputs)
        perturbed = self._perturbed(tensors)
        first = perturbed[self.perturb[0]]
        on_grid: dict[Any, torch.Tensor] = {}
        values: dict[Any, torch.Tensor] = {}
        for name in tensors:
            if name in perturbed:
                continue
            held = _held(name, tensors[name], first)
            is_image = held.ndim == first.ndim and held.shape[2:] == first.shape[2:]
            if is_image:
                on_grid[name] = held
            else:
                values[name] = held
        numbers = self.numbers or {}
        for key, baselines in numbers.items():
            _check_columns(key, baselines, {**on_grid, **values})
        return SplitInputs(
            images=torch.cat(list(perturbed.values()), dim=1),
            meta=with_own_meta(tensors[self.perturb[0]]),
            held_images=torch.cat([first[:, :0], *(image.to(first) for image in on_grid.values())], dim=1),
            held_values=values,
            channels=_channels({**perturbed, **on_grid}),
            names=list(tensors),
            numbers=numbers,
        )

    def _named(self, inputs: Any) -> dict[Any, Any]:
        """The inputs by name, or by place."""
        if isinstance(inputs, Mapping):
            return {name: _from_numpy(value) for name, value in inputs.items()}
        if isinstance(inputs, Sequence):
            return {place: _from_numpy(value) for place, value in enumerate(inputs)}
        words = f"`inputs` must be a dictionary or a sequence of tensors for {type(self).__name__}"
        raise ValueError(f"{words}, got a {type(inputs).__name__}{_way_out(inputs)}")

    def _perturbed(self, tensors: Mapping[Any, Any]) -> Named:
        """The perturbed images ``(B, C, *spatial)`` by name, which agree in everything but their channels."""
        missing = [name for name in self.perturb if name not in tensors]
        if missing:
            raise ValueError(f"`perturb` names {missing}, the inputs are {list(tensors)}")
        perturbed = {name: _images(f"input {name!r}", tensors[name]) for name in self.perturb}
        first = perturbed[self.perturb[0]]
        for name, image in perturbed.items():
            if image.shape[2:] != first.shape[2:] or len(image) != len(first) or image.dtype != first.dtype:
                raise ValueError(
                    f"the perturbed inputs must agree in batch, grid and type: {self.perturb[0]!r} is "
                    f"{tuple(first.shape)} {first.dtype}, {name!r} is {tuple(image.shape)} {image.dtype}"
                )
        return perturbed

    def join(self, image: torch.Tensor, held: Named) -> Any:
        if len(self.perturb) > 1:
            raise ValueError(f"one image is given, and {self.perturb} are perturbed: give all inputs to `explain`")
        return {self.perturb[0]: image, **held}

    def run(self, infer: Infer, network: Infer, batch: torch.Tensor, take_apart: TakeApart) -> Any:
        def on_part(part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self.call(network, take_apart(part), args, kwargs)

        return infer(batch, on_part)

    def call(self, network: Infer, inputs: Named, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the network with its inputs by name, and with further arguments from the inner inferer."""
        raise NotImplementedError


class DictInput(_NamedInputs):
    """A network that takes one dictionary of tensors.

    Args:
        perturb: the name of the input that is perturbed, or several names. Several inputs must lie on one grid; they
            are masked together, as channels of one image. All other inputs are held.
        numbers: the held numbers, such as age and laboratory values, that :func:`~monai_saliency.shapley` hides like
            regions, so that each has a Shapley value: by input, the name of each of its columns with its *baseline*,
            such as ``{"clinical": {"age": 62.0, "sex": 0.5}}`` for an input ``(B, 2)``; ``{"age": 62.0}`` for an input
            of one number. The baseline stands in the number's place where it is hidden, in the unit that the network
            takes: the mean over the cohort, or a value that is normal. It decides what the number's value means, and
            has no default. None by default: all are held.

    Example::

        >>> import torch
        >>> from monai_saliency import ClassScore, DictInput, sliding_window
        >>> def network(batch):
        ...     return batch["image"].flatten(1).sum(1, keepdim=True) * batch["weight"]
        >>> explain = sliding_window(1, target=ClassScore([0], "none"), inputs=DictInput(perturb="image"))
        >>> images, weights = torch.ones(2, 1, 1, 3), torch.tensor([[1.0], [10.0]])
        >>> explain({"image": images, "weight": weights}, network).tolist()
        [[[[1.0, 1.0, 1.0]]], [[[10.0, 10.0, 10.0]]]]
    """

    def call(self, network: Infer, inputs: Named, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return network(inputs, *args, **kwargs)


class ArgumentInputs(_NamedInputs):
    """A network that takes several arguments.

    Inputs in a sequence are passed by position. Of inputs in a dictionary, the perturbed ones come first, by position
    and in the order of ``perturb``; the held ones are passed by name, as MONAI's evaluators pass extra inputs.

    Args:
        perturb: the name of the input that is perturbed (its position 0, 1, ... if the inputs are a sequence), or
            several names, as for :class:`DictInput`. All other inputs are held.
        numbers: held numbers that :func:`~monai_saliency.shapley` hides like regions, as for :class:`DictInput`.

    Example::

        >>> import torch
        >>> from monai_saliency import ArgumentInputs, ClassScore, sliding_window
        >>> def network(fixed, moving):
        ...     return (fixed * moving).flatten(1).sum(1, keepdim=True)
        >>> explain = sliding_window(1, target=ClassScore([0], "none"), inputs=ArgumentInputs(perturb=1))
        >>> fixed, moving = torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.ones(1, 1, 1, 3)
        >>> explain((fixed, moving), network).tolist()
        [[[[1.0, 2.0, 3.0]]]]
    """

    def call(self, network: Infer, inputs: Named, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if all(isinstance(name, int) for name in inputs):
            by_place = [inputs[place] for place in sorted(inputs)]
            return network(*by_place, *args, **kwargs)
        held = dict(inputs)
        perturbed = [held.pop(name) for name in self.perturb]
        return network(*perturbed, *args, **held, **kwargs)


def _channels(images: Named) -> Channels:
    """Where each of some images is, joined along the channels, and its own type."""
    channels, start = {}, 0
    for name, image in images.items():
        stop = start + image.shape[1]
        channels[name] = slice(start, stop), image.dtype
        start = stop
    return channels


def _baselines(numbers: Any) -> Baselines:
    """Check the setting ``numbers``: the baselines by input and name."""
    if not isinstance(numbers, Mapping):
        words = "such as {'clinical': {'age': 62.0, 'sex': 0.5}}"
        raise ValueError(f"`numbers` must be the baseline of each number by its input and name, {words}, got {numbers}")
    checked: dict[Any, dict[str, float]] = {}
    names: list[str] = []
    for key, given in numbers.items():
        baselines = given if isinstance(given, Mapping) else {key: given}
        checked[key] = {}
        for name, baseline in baselines.items():
            checked[key][str(name)] = number(f"baseline of {name}", baseline)
        names += checked[key]
    if len(set(names)) < len(names):
        raise ValueError(f"`numbers` must have different names, got {names}")
    return checked


def _check_columns(key: Any, baselines: Mapping[str, float], held: Named) -> None:
    """Check the input ``(B, n)`` of some numbers, or ``(B,)`` of one."""
    if key not in held:
        raise ValueError(f"`numbers` names the input {key!r}, and the inputs that are held are {list(held)}")
    value, count = held[key], len(baselines)
    if value.ndim > 2 or value[0].numel() != count:
        raise ValueError(
            f"input {key!r} must have shape (B, {count}), a column for each of the numbers {list(baselines)}, got "
            f"{tuple(value.shape)}"
        )
    if value.is_floating_point():
        return
    for name, baseline in baselines.items():
        if not baseline.is_integer():
            raise ValueError(
                f"input {key!r} is of {str(value.dtype)[6:]}, and the baseline {baseline:g} of {name!r} is not a whole "
                "number: call .float()"
            )


def _held(name: Any, value: Any, first: torch.Tensor) -> torch.Tensor:
    """Check a held input ``(B, ...)``."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != len(first):
        raise ValueError(
            f"held input {name!r} must be a tensor with one row for each of {len(first)} cases, got "
            f"{shape_in_words(value)}"
        )
    return plain(value).to(first.device)


def _from_numpy(value: Any) -> Any:
    """A NumPy array as a tensor; anything else unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(np.ascontiguousarray(value))  # a flipped array has steps that torch does not take


def _way_out(given: Any) -> str:
    """The end of an error: what to write in the place of what was given for images."""
    if isinstance(given, (list, tuple)) and given:
        return f", whose first entry is {shape_in_words(given[0])}{_way_out(given[0])}"
    if isinstance(given, Mapping):
        return (
            f' with the keys {list(given)}: write batch["image"], or, if the network takes a dictionary, set '
            'inputs=ms.DictInput("image")'
        )
    if isinstance(given, (str, PathLike)):
        return (
            ": load it, images = monai.transforms.LoadImage(ensure_channel_first=True)(path)[None], and preprocess it "
            "as in training"
        )
    if isinstance(given, torch.Tensor):
        axes = ": write images[:, None] if the channel axis is missing, images[None] if the batch axis is, "
        return f"{axes}images[None, None] if both are" if given.ndim < 4 else ""
    if hasattr(given, "__iter__") or hasattr(given, "__getitem__"):
        return ': write the loop, for batch in loader: maps = ms.explain(network, batch["image"])'
    return ""


def _images(what: str, images: Any) -> torch.Tensor:
    """Check images ``(B, C, *spatial)``, which errors call ``what``, and return them as a plain tensor."""
    if not isinstance(images, torch.Tensor) or images.ndim not in (4, 5) or not len(images):
        raise ValueError(
            f"{what} must be images of shape (B, C, H, W) or (B, C, H, W, D), got {shape_in_words(images)}"
            f"{_way_out(images)}"
        )
    *rows, last = images.shape[1:]
    if last <= 4 and last != 2 and min(rows) >= 16:
        words = "whose last axis looks like the channels: write images.movedim(-1, 1)"
        raise ValueError(f"{what} must be channel-first, (B, C, *spatial), got {tuple(images.shape)}, {words}")
    if not images.is_floating_point():
        raise TypeError(f"{what} must be floating point, got {images.dtype}: scale the images, or call .float()")
    return plain(images)
