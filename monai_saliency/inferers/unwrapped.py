"""The ``SlidingWindowInferer`` inside an inferer that does nothing but call it, so that its patches can be remembered.

An evaluator's inferer is often an object of the bundle's own that holds a ``SlidingWindowInferer``, or one that adds
further arguments to its call. What such a wrapper does is not read from its code but tried: it is called with a
stand-in for the inferer that it holds, which runs no network and answers made-up values: signed, small and large, and
zeros, of one and of several channels. Only where it hands on the very image and the very network, and gives back the
very output, untouched, for the image and for perturbed ones, is the inferer inside taken in its place. What it does
with the network's own values alone is then seen in one perturbed image, see
:class:`~monai_saliency.inferers.patch_check.WrapperCheck`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from monai.inferers import Inferer, SlidingWindowInferer

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.expected import faded
from monai_saliency.utils.monai_private import tensor_version, tree_leaves
from monai_saliency.utils.tensors import plain

__all__ = ["SlidingCall", "inside_of", "sliding_call", "trials"]

_TRIALS = 8  # perturbed images of a case with which a wrapper is tried
_MANY = 64  # channels of a stand-in for the output of a network of many classes


@dataclass(frozen=True)
class SlidingCall:
    """What an inferer comes down to.

    Attributes:
        inferer: cuts the patches.
        args: further arguments that it is called with.
        kwargs: further arguments that it is called with, by name.
    """

    inferer: SlidingWindowInferer
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None


def inside_of(inferer: Any) -> SlidingWindowInferer | None:
    """The one ``SlidingWindowInferer`` that an inferer is or holds; None where it holds none, or several.

    Args:
        inferer: any inferer. What it does with the one inside is not known from this: see :func:`sliding_call`.
    """
    path = _path_of(inferer)
    for name in path or ():
        inferer = vars(inferer)[name]
    return None if path is None else inferer


def sliding_call(inferer: Any, args: Sequence[Any], kwargs: Mapping[str, Any], images: Iterable[torch.Tensor]) -> Any:
    """What an inferer comes down to, for some images.

    Args:
        inferer: any inferer.
        args: further arguments that it is called with.
        kwargs: further arguments that it is called with, by name.
        images: ``(1, C, *spatial)`` each, with which it is tried if it is a wrapper.

    Returns:
        a :class:`SlidingCall`, or a text that says why it comes down to none.
    """
    if isinstance(inferer, SlidingWindowInferer):
        return SlidingCall(inferer, args, kwargs)
    name, path = type(inferer).__name__, _path_of(inferer)
    if path is None:
        return f"{name} is not a SlidingWindowInferer, and does not hold exactly one"
    try:
        calls = [
            _tried(inferer, path, args, kwargs, image, answer)
            for index, image in enumerate(images)
            for answer in _answers(image.shape, index)
        ]
    except Exception as error:
        return f"{name} does more than call its SlidingWindowInferer ({type(error).__name__}: {error})"
    if None in calls or any(not _same(calls[0], call) for call in calls[1:]):
        return f"{name} does more than call its SlidingWindowInferer"
    return calls[0]


def trials(state: CaseState) -> Iterator[torch.Tensor]:
    """Images ``(1, C, *spatial)`` that show what a wrapper does with perturbed images of a case: some of its own, and
    what is left where more is hidden. One at a time, and none where there is no wrapper.
    """
    image, fill = state.case.image[None], state.fill[None].expand_as(state.case.image[None])
    some = np.linspace(1, state.num_rows - 1, min(_TRIALS, state.num_rows - 1), dtype=int)
    yield image
    for row in some.tolist():
        perturbed = image.new_empty(1, image.shape[1] + len(state.held), *image.shape[2:])
        state.perturb(row, row + 1, out=perturbed)
        yield perturbed[:, : image.shape[1]]
    yield faded(image[0], fill[0], 2)[1:]
    yield fill.contiguous()


def _path_of(inferer: Any, depth: int = 4) -> tuple[str, ...] | None:
    """The names of the attributes that lead to the one ``SlidingWindowInferer`` inside an inferer."""
    if isinstance(inferer, SlidingWindowInferer):
        return ()
    held = getattr(inferer, "__dict__", {})
    found = [
        (name, *path)
        for name, value in held.items()
        if depth and isinstance(value, Inferer) and (path := _path_of(value, depth - 1)) is not None
    ]
    return found[0] if len(found) == 1 else None


def _answers(shape: torch.Size, index: int) -> Iterator[torch.Tensor]:
    """Outputs ``(1, channels, *spatial)`` that a network might give an image: five for the first, then one in turn."""
    generator = torch.Generator().manual_seed(0)
    # Signed, from 1e-3 to 1e6, with zeros between; a block is repeated, so that a CT costs a copy and no drawing.
    sizes = 10 ** (9 * torch.rand(4099, generator=generator) - 3)
    block = sizes * torch.randint(-1, 2, sizes.shape, generator=generator)
    voxels = math.prod(shape[2:])
    kinds = [(1, block), (3, block), (2, block.sigmoid()), (2, torch.zeros(1))]
    for channels, values in kinds[index % 4 : index % 4 + 1] if index else kinds:
        repeats = -(-channels * voxels // len(values))
        yield values.repeat(repeats)[: channels * voxels].reshape(1, channels, *shape[2:])
    if not index:  # as of many classes, in the memory of one: a wrapper may only do more from some number on
        one = block.repeat(-(-voxels // len(block)))[:voxels].reshape(1, 1, *shape[2:])
        yield one.expand(1, _MANY, *shape[2:])


def _tried(
    inferer: Any,
    path: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    image: torch.Tensor,
    answer: torch.Tensor,
) -> SlidingCall | None:
    """How a wrapper calls the inferer inside for an image, which then gives some answer; None where it does anything
    else.
    """
    calls: list[tuple[Any, Any, tuple, dict]] = []
    # Channels that share their memory go on doing so.
    values = answer[:, :1] if answer.stride(1) == 0 else answer
    values = values.to(image.device, image.dtype, copy=True)
    kept, answer = values.clone(), values.expand(answer.shape)
    version = tensor_version(answer)

    def network(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it runs the network itself")

    def note(_: Any, inputs: Any, predictor: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((inputs, predictor, args, kwargs))
        return answer

    given = image.clone()
    gave = _with_stand_in(inferer, path, note)(given, network, *args, **kwargs)
    if len(calls) != 1 or gave is not answer or tensor_version(answer) != version or not torch.equal(values, kept):
        return None
    inputs, predictor, further, named = calls[0]
    same = isinstance(inputs, torch.Tensor) and inputs.shape == image.shape and inputs.dtype == image.dtype
    if predictor is not network or not same or not torch.equal(plain(inputs), image):
        return None
    inner = inside_of(inferer)
    assert inner is not None
    return SlidingCall(inner, further, named)


def _with_stand_in(inferer: Any, path: Sequence[str], note: Callable[..., Any]) -> Any:
    """A copy of a wrapper in which the inferer inside only notes how it is called."""
    changed = copy.copy(inferer)
    if not path:
        # Of its own class, as far as the wrapper can tell.
        changed.__class__ = type(type(inferer).__name__, (type(inferer),), {"__call__": note})
        return changed
    vars(changed)[path[0]] = _with_stand_in(vars(inferer)[path[0]], path[1:], note)
    return changed


def _same(first: SlidingCall | None, second: SlidingCall | None) -> bool:
    """Whether two calls are given the same."""
    if first is None or second is None:
        return False
    ours, theirs = (tree_leaves((tuple(call.args), dict(call.kwargs or {}))) for call in (first, second))
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return tensors and first.shape == second.shape and torch.equal(plain(first), plain(second))
    return first is second or bool(first == second)
