"""How a network takes its inputs: one tensor, several, a dictionary or a list; which are perturbed and which are held.

Inputs that are perturbed are laid side by side as channels of one image, so that masks, fills and maps treat them as
such. Held inputs go to the network as they are, each beside the perturbed copies of its own case. Those on the images'
grid travel as further channels of the batch, in its floating type, so that a sliding window cuts them too; others (an
age, a prompt's embedding) go whole with their rows, which only an inferer that takes no patches can do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from monai.inferers import Inferer, PatchInferer, SlidingWindowInferer

from monai_saliency.utils.tensors import plain

__all__ = ["ArgumentInputs", "DictInput", "InputAdapter", "ListInput", "SplitInputs", "TensorInput"]


@dataclass(frozen=True)
class SplitInputs:
    """A batch of B cases, taken apart.

    Attributes:
        images: what is perturbed ``(B, C, *spatial)``.
        meta: the first of the perturbed inputs, as it was given, with its meta data.
        held_images: held inputs on the images' grid, side by side, ``(B, H, *spatial)``; H may be 0.
        held_values: other held inputs ``(B, ...)``, by name.
        channels: where each input stands among the C + H channels, with its own type.
        names: all inputs, in the order in which they were given.
    """

    images: torch.Tensor
    meta: torch.Tensor
    held_images: torch.Tensor
    held_values: Mapping[Any, torch.Tensor] = field(default_factory=dict)
    channels: Mapping[Any, tuple[slice, torch.dtype]] = field(default_factory=dict)
    names: Sequence[Any] = ()

    def take_apart(self, batch: torch.Tensor, values: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """The inputs by name, of a batch ``(n, C + H, *spatial)`` and held values ``(n, ...)``."""
        images = {name: batch[:, channels].to(dtype) for name, (channels, dtype) in self.channels.items()}
        return {name: images[name] if name in images else values[name] for name in self.names}

    def values_of(self, counts: Sequence[tuple[int, int]], total: int) -> dict[Any, torch.Tensor]:
        """The held values ``(total, ...)`` of a batch's rows, the last one's repeated to fill it.

        Args:
            counts: pairs of a case's place and its number of rows, in the batch's order.
            total: rows of the batch.
        """
        filled = [*counts, (counts[-1][0], total - sum(count for _, count in counts))]
        return {
            name: torch.cat([value[i : i + 1].expand(count, *value.shape[1:]) for i, count in filled])
            for name, value in self.held_values.items()
        }


class InputAdapter(ABC):
    """How a network takes its inputs."""

    @abstractmethod
    def split(self, inputs: Any) -> SplitInputs:
        """Take a batch of cases apart.

        Raises:
            TypeError, ValueError: when the inputs are not what the adapter is for.
        """

    @abstractmethod
    def join(self, image: torch.Tensor, held: Mapping[Any, torch.Tensor]) -> Any:
        """What :meth:`split` takes, made of the image that is perturbed ``(B, C, *spatial)`` and held inputs by name.

        Raises:
            ValueError: when the network does not take them.
        """

    def check_inferer(self, split: SplitInputs, inferer: Inferer) -> None:
        """Refuse an inner inferer that cannot run these inputs.

        Raises:
            ValueError: saying what can.
        """
        if split.held_values and isinstance(inferer, (SlidingWindowInferer, PatchInferer)):
            raise ValueError(
                f"held inputs {list(split.held_values)} are not on the images' grid, so they do not follow their cases "
                f"into the patches of {type(inferer).__name__}: use SimpleInferer"
            )

    @abstractmethod
    def run(
        self,
        infer: Callable[..., Any],
        network: Callable[..., Any],
        batch: torch.Tensor,
        take_apart: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
    ) -> Any:
        """The network's output of a batch.

        Args:
            infer: runs a network on a batch, as the inner inferer does.
            network: the network.
            batch: ``(n, C + H, *spatial)``, perturbed images and held ones.
            take_apart: gives the network's inputs by name, of the batch or of a patch of it.
        """


class TensorInput(InputAdapter):
    """One tensor ``(B, C, *spatial)``, as most networks take it."""

    def split(self, inputs: Any) -> SplitInputs:
        images = _images("`inputs`", inputs)
        return SplitInputs(images, inputs, images[:, :0])

    def join(self, image: torch.Tensor, held: Mapping[Any, torch.Tensor]) -> Any:
        if held:
            raise ValueError(
                f"held inputs {list(held)} are given, and the inferer's `inputs` takes one tensor: set DictInput or "
                "ArgumentInputs"
            )
        return image

    def run(
        self,
        infer: Callable[..., Any],
        network: Callable[..., Any],
        batch: torch.Tensor,
        take_apart: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
    ) -> Any:
        return infer(self.as_taken(batch), network)

    def as_taken(self, batch: torch.Tensor) -> Any:
        """A batch as the network takes it."""
        return batch


class ListInput(TensorInput):
    """A list of images ``(C, *spatial)``, as detectors take it. The inner inferer gets the list too."""

    def check_inferer(self, split: SplitInputs, inferer: Inferer) -> None:
        if isinstance(inferer, (SlidingWindowInferer, PatchInferer)):
            raise ValueError(
                f"{type(inferer).__name__} takes no list of images: use SimpleInferer, and a detector's own sliding "
                "window where it has one"
            )

    def as_taken(self, batch: torch.Tensor) -> list[torch.Tensor]:
        return list(batch)


class _NamedInputs(InputAdapter):
    """Several inputs: a dictionary of tensors ``(B, ...)``, or a sequence of them, named 0, 1, ...

    Args:
        perturb: the name of the input that is perturbed, or several, which are masked alike; all others are held.
    """

    def __init__(self, perturb: str | int | Sequence[str | int]) -> None:
        self.perturb = [perturb] if isinstance(perturb, (str, int)) else list(perturb)
        if not self.perturb:
            raise ValueError("`perturb` must name at least one input")

    def split(self, inputs: Any) -> SplitInputs:
        if not isinstance(inputs, Mapping) and (isinstance(inputs, torch.Tensor) or not isinstance(inputs, Sequence)):
            raise ValueError(
                f"`inputs` must be a dictionary or a sequence of tensors for {type(self).__name__}, got "
                f"{type(inputs).__name__}"
            )
        tensors = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        missing = [name for name in self.perturb if name not in tensors]
        if missing:
            raise ValueError(f"`perturb` names {missing}, the inputs are {list(tensors)}")
        perturbed = [_images(f"input {name!r}", tensors[name]) for name in self.perturb]
        first = perturbed[0]
        for name, image in zip(self.perturb, perturbed, strict=True):
            if image.shape[2:] != first.shape[2:] or len(image) != len(first) or image.dtype != first.dtype:
                raise ValueError(
                    f"the perturbed inputs must agree in batch, grid and type: {self.perturb[0]!r} is "
                    f"{tuple(first.shape)} {first.dtype}, {name!r} is {tuple(image.shape)} {image.dtype}"
                )
        held_images: dict[Any, torch.Tensor] = {}
        held_values: dict[Any, torch.Tensor] = {}
        for name, value in tensors.items():
            if name in self.perturb:
                continue
            if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != len(first):
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(
                    f"held input {name!r} must be a tensor with one row for each of {len(first)} cases, got {shape}"
                )
            value = plain(value).to(first.device)
            on_grid = value.ndim == first.ndim and value.shape[2:] == first.shape[2:]
            (held_images if on_grid else held_values)[name] = value
        channels, start = {}, 0
        for name, image in [*zip(self.perturb, perturbed, strict=True), *held_images.items()]:
            channels[name] = (slice(start, start + image.shape[1]), image.dtype)
            start += image.shape[1]
        return SplitInputs(
            images=first if len(perturbed) == 1 else torch.cat(perturbed, dim=1),
            meta=tensors[self.perturb[0]],
            held_images=torch.cat([first[:, :0], *(image.to(first) for image in held_images.values())], dim=1),
            held_values=held_values,
            channels=channels,
            names=list(tensors),
        )

    def join(self, image: torch.Tensor, held: Mapping[Any, torch.Tensor]) -> Any:
        if len(self.perturb) > 1:
            raise ValueError(f"one image is given, and {self.perturb} are perturbed: give all inputs to `explain`")
        return {self.perturb[0]: image, **held}

    def run(
        self,
        infer: Callable[..., Any],
        network: Callable[..., Any],
        batch: torch.Tensor,
        take_apart: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
    ) -> Any:
        def call(part: torch.Tensor, *more: Any, **named: Any) -> Any:
            return self.call(network, take_apart(part), more, named)

        return infer(batch, call)

    @abstractmethod
    def call(
        self, network: Callable[..., Any], inputs: dict[Any, torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call the network with its inputs, and with what the inner inferer passes on."""


class DictInput(_NamedInputs):
    """One dictionary of tensors.

    Example::

        explain = ms.rise(target=..., inputs=DictInput(perturb="image"))
        explain({"image": images, "prior": priors, "age": ages}, network)  # network({"image": ..., ...})

    Args:
        perturb: the name of the input that is perturbed, or several on one grid, which are masked alike; all others are
            held.
    """

    def call(
        self, network: Callable[..., Any], inputs: dict[Any, torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        return network(inputs, *args, **kwargs)


class ArgumentInputs(_NamedInputs):
    """Several arguments.

    Example::

        explain = ms.rise(target=..., inputs=ArgumentInputs(perturb=1))
        explain((fixed, moving), network)  # network(fixed, moving)

    Args:
        perturb: the name of the input that is perturbed (its place, where the inputs are no dictionary), or several on
            one grid, which are masked alike; all others are held.
        positional: names of the inputs passed by position, in their order; the others are passed by their names. By
            default all are passed by position, in the order in which they are given.
    """

    def __init__(self, perturb: str | int | Sequence[str | int], positional: Sequence[str | int] | None = None) -> None:
        super().__init__(perturb)
        self.positional = None if positional is None else list(positional)

    def join(self, image: torch.Tensor, held: Mapping[Any, torch.Tensor]) -> Any:
        joined = super().join(image, held)
        if held and self.positional is None:
            if not all(isinstance(name, int) for name in joined):
                raise ValueError(
                    f"the inputs {list(joined)} come by name, which tells no order: give ArgumentInputs `positional` "
                    "([] passes all by name)"
                )
            return {place: joined[place] for place in sorted(joined)}
        return joined

    def call(
        self, network: Callable[..., Any], inputs: dict[Any, torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        positional = list(inputs) if self.positional is None else self.positional
        named = {name: value for name, value in inputs.items() if name not in positional}
        return network(*(inputs[name] for name in positional), *args, **named, **kwargs)


def _images(what: str, images: Any) -> torch.Tensor:
    """Images ``(B, C, *spatial)`` as a plain tensor."""
    if not isinstance(images, torch.Tensor) or images.ndim not in (4, 5) or not len(images):
        shape = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
        several = isinstance(images, (Mapping, list, tuple))
        raise ValueError(
            f"{what} must be images of shape (B, C, H, W) or (B, C, H, W, D), got {shape}"
            + ("; say by the inferer's `inputs` how the network takes several" if several else "")
        )
    if not images.is_floating_point():
        raise TypeError(f"{what} must be floating point, got {images.dtype}: scale the images, or call .float()")
    return plain(images)
