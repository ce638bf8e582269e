"""The one seam around every call of the network, for whole images and for patches alike.

Autocast, and halving a batch that is too large for the memory belong here alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from monai.inferers import Inferer, SliceInferer, SlidingWindowInferer

from monai_saliency.errors import CaseError, SettingError
from monai_saliency.networks.inputs import SplitInputs, TensorInput
from monai_saliency.networks.outputs import OutputPath, check_rows, in_parts, read
from monai_saliency.utils.monai_private import tensor_version, tree_leaves

logger = logging.getLogger(__name__)

Call = Callable[[torch.Tensor, Mapping[Any, torch.Tensor]], Any]

#: words in the errors of libraries that do not raise ``torch.OutOfMemoryError``
_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")

#: errors of networks that were given something else than they take
OF_SHAPES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError)

_STEPS = 5  # from a callable to the modules that it holds: a partial, its method, its object, a list, a module

_known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

#: by the id of a module that was in training mode: how many calls of :func:`evaluating` run it now
_evaluated: Counter[int] = Counter()
_modes = Lock()  # around every change of modes and counts


def known_of(network: Any) -> dict[Any, Any]:
    """Facts that were found out about a network, kept as long as it lives."""
    try:
        return _known.setdefault(network, {})
    except TypeError:  # it cannot be referred to weakly
        return {}


@dataclass(frozen=True)
class Forward:
    """Calls the network, on whole images by the inner inferer, or on patches."""

    inferer: Inferer
    inputs: TensorInput
    network: Callable[..., Any]
    output: OutputPath | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    autocast: Mapping[str, Any] | None = None
    seed: int | None = None

    def images(
        self,
        batch: torch.Tensor,
        split: SplitInputs,
        counts: Sequence[tuple[int, int]],
        case: str,
        hidden: np.ndarray | None = None,
    ) -> Any:
        """The part of the network's output of whole images that is explained, as the inner inferer gives it.

        ``counts`` are pairs of a case's place and the number of its rows, from the first row on; ``hidden`` tells which
        numbers each of these rows hides.
        """

        def infer(batch: Any, network: Callable[..., Any]) -> Any:
            return self.inferer(batch, network, *self.args, **self.kwargs)

        def call(part: torch.Tensor, values: Mapping[Any, torch.Tensor]) -> Any:
            with self._cast(part):
                return self.inputs.run(infer, self._seeded(), part, partial(split.take_apart, values=values))

        output = self._run(batch, split.values_of(counts, len(batch), hidden), call)
        try:
            output = read(output, self.output)
            check_rows(output, len(batch))
        except SettingError:
            raise
        except ValueError as error:
            raise CaseError(case, f"{error}{_other_input(self.network)}") from error
        return output

    def patches(self, batch: torch.Tensor) -> Any:
        """The network's output of patches ``(n, C, *roi_size)``, as a ``SlidingWindowInferer`` runs them."""

        def call(part: torch.Tensor, values: Mapping[Any, torch.Tensor]) -> Any:
            with self._cast(part):
                if isinstance(self.inferer, SliceInferer):  # its network takes no further arguments
                    return self.inferer.network_wrapper(self._seeded(), part)
                return self._seeded()(part, *self.args, **self.kwargs)

        return self._run(batch, {}, call)

    def _seeded(self) -> Callable[..., Any]:
        """The network; with a seed, each call draws the same random numbers, and the caller's generators stay."""
        return self.network if self.seed is None else partial(_call_seeded, self.network, self.seed)

    def autocast_dtype(self, image: torch.Tensor) -> torch.dtype | None:
        """The type of ``torch.autocast`` around the network for images like this one; None where nothing is cast."""
        if self.autocast is None or not image.is_cuda:
            return None
        return self.autocast.get("dtype") or torch.float16

    def _run(self, batch: torch.Tensor, values: Mapping[Any, torch.Tensor], call: Call) -> Any:
        """Call the network, in halves if the memory is too small. The size that fits is remembered."""
        fits, kind = known_of(self.network), (*batch.shape[1:], str(batch.device), batch.dtype)
        ran = "ran", len(batch), kind
        size, version = min(len(batch), fits.get(kind, len(batch))), tensor_version(batch)
        while True:
            try:
                output = _in_parts(batch, values, size, call)
                fits[ran] = True
                return output
            except Exception as error:
                # What the network has changed in place cannot be run again.
                if size == 1 or not _is_out_of_memory(error) or tensor_version(batch) != version:
                    if ran not in fits and type(error) in OF_SHAPES:
                        error.args = (f"{self._given(batch, error)}: {error}",)
                    raise
            # Here the error is gone, and with it the tensors that its traceback held.
            if batch.is_cuda:
                torch.cuda.empty_cache()
            fits[kind] = half = -(-size // 2)
            logger.warning(
                "no memory for %d images of %s in the network at once: it goes on with %d. A smaller mask_batch_size "
                "(or sw_batch_size) saves the attempt",
                size,
                tuple(batch.shape[1:]),
                half,
            )
            size = half

    def _given(self, batch: torch.Tensor, error: Exception) -> str:
        """What a network that fails at its first batch of this kind was given, and what may be wrong with it."""
        words = f"the network failed on images {tuple(batch.shape)}, {str(batch.dtype)[6:]}, on {batch.device}"
        if isinstance(error, AttributeError) and isinstance(self.inferer, SlidingWindowInferer):
            words += "; SlidingWindowInferer takes tensors only: if the network returns a tuple such as (seg, None), "
            return f"{words}explain lambda images: network(images)[0]"
        return words + (_mismatch(self.network, batch) or f"; it needs (B, C, *spatial){_other_input(self.network)}")

    def _cast(self, batch: torch.Tensor) -> AbstractContextManager[Any]:
        """Autocast around a call of the network, where it is asked for."""
        if self.autocast is None or not batch.is_cuda:
            return nullcontext()
        return torch.autocast("cuda", **self.autocast)


def _call_seeded(network: Callable[..., Any], seed: int, *inputs: Any, **others: Any) -> Any:
    tensors = (each for each in tree_leaves((inputs, others)) if isinstance(each, torch.Tensor))
    devices = sorted({each.device.index for each in tensors if each.is_cuda})
    with torch.random.fork_rng(devices):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)):
            generator.manual_seed(seed)
        return network(*inputs, **others)


def _mismatch(network: Any, batch: torch.Tensor) -> str:
    """How a batch differs from what a module takes: in device, type, axes or channels; empty where it does not."""
    modules = list(network.modules()) if isinstance(network, torch.nn.Module) else []
    first = next((each for each in modules if isinstance(each, (torch.nn.Conv2d, torch.nn.Conv3d))), None)
    weight = next(iter(network.parameters()), None) if modules else None
    if weight is not None and weight.device != batch.device:
        return f", and its weights are on {weight.device}: move the images there"
    if weight is not None and weight.dtype != batch.dtype:
        return f", and its weights are {str(weight.dtype)[6:]}: convert the images by images.to({weight.dtype})"
    if first is not None and first.weight.ndim != batch.ndim:
        axes = "write images[:, None] if the channel axis is missing, images[None] if the batch axis is"
        return f", and it takes {first.weight.ndim - 2} spatial axes: {axes}"
    if first is not None and first.in_channels != batch.shape[1]:
        is_series = batch.ndim == 5 and first.in_channels == 1
        advice = ": the volumes of a 4D file are channels, explain one by images[:, :1]" if is_series else ""
        return f", and its first convolution takes {first.in_channels} channels{advice}"
    return ""


def _other_input(network: Any) -> str:
    """The advice for a network that uses a tensor which is not among its inputs, such as a function that closes over a
    clinical variable; else nothing.
    """
    parts = vars(network).values() if isinstance(network, torch.nn.Module) else _parts(network)
    shapes = [tuple(part.shape) for part in parts if isinstance(part, (torch.Tensor, np.ndarray))]
    if not shapes:
        return ""
    return (
        f"; the network uses a tensor {shapes[0]} that is none of its inputs: if it has a row for each image, write "
        "ms.explain(network, (images, other), inputs=ms.ArgumentInputs(perturb=0))"
    )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _in_parts(batch: torch.Tensor, values: Mapping[Any, torch.Tensor], size: int, call: Call) -> Any:
    """All parts have one shape, as compiled networks need it."""
    if size == len(batch):
        return call(batch, values)

    def part(places: list[int]) -> Any:
        return call(batch[places], {name: value[places] for name, value in values.items()})

    return in_parts(len(batch), size, size, part)


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Put the modules of a network into evaluation mode. Afterwards each part has the mode it had before: the last of
    several threads that run it, or networks that share it, restores it.

    Found are a module with its submodules, and the modules that another callable obviously holds: in a closure, in a
    global variable that a function names, in the object of a method, in a partial, and in plain attributes, lists and
    dictionaries, at most a few steps away. Whoever hides a module deeper calls ``.eval()``.
    """
    parts = [part for module in _held_modules(network) for part in module.modules()]
    with _modes:
        # Frozen TorchScript has no mode.
        ours = [part for part in parts if getattr(part, "training", False) or id(part) in _evaluated]
        for part in ours:
            if part.training:
                _evaluate(part)
        _evaluated.update(map(id, ours))
    try:
        yield
    finally:
        with _modes:
            _evaluated.subtract(map(id, ours))
            for part in ours:
                if not _evaluated[id(part)]:
                    part.training = True
                    del _evaluated[id(part)]


def _held_modules(network: Any) -> list[torch.nn.Module]:
    """The modules within a few steps from a callable; their submodules are not listed."""
    found: list[torch.nn.Module] = []
    level = [network]
    for _ in range(_STEPS):
        found += [value for value in level if isinstance(value, torch.nn.Module)]
        level = [part for value in level for part in _parts(value)]
    return found


def _parts(value: Any) -> Iterable[Any]:
    """What a value holds that is no module itself: items, attributes, and what a function refers to by a name."""
    if isinstance(value, (type, ModuleType, torch.nn.Module, torch.Tensor)):
        return ()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        return _named_by(value)
    return getattr(value, "__dict__", {}).values()


def _named_by(function: FunctionType) -> Iterator[Any]:
    """What a function encloses, and the global variables that its code names, with the code of functions inside it."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # its variable has no value yet
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _evaluate(module: torch.nn.Module) -> None:
    try:
        module.eval()
    except NotImplementedError:  # the mode of an exported program is fixed, whatever this says
        module.training = False
