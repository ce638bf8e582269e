"""How fast a network runs: in half precision, with channels last in memory, compiled.

Each setting changes scores by rounding, so each is off by default and counts as a part of the network. Masks, perturbed
images, scores and maps stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.utils.arguments import check_option, flag, instance
from monai_saliency.utils.monai_private import heeding_hooks, tree_leaves, tree_map

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

#: by network: what ``torch.compile`` made of it. No attribute, which would count as a part of the network
_compiled: WeakKeyDictionary[Accelerated, Callable[..., Any]] = WeakKeyDictionary()


def check_runtime(
    amp: str | bool | None = False,
    channels_last: bool = False,
    compile: bool | str | Mapping[str, Any] | None = False,
    prefix: str = "",
) -> dict[str, Any]:
    """The settings of :func:`accelerated` that are switched on, by name. ``prefix`` precedes the names in errors."""
    settings: dict[str, Any] = {}
    if amp not in (None, False, "false"):
        if not isinstance(amp, str) or amp not in _TYPES:
            raise ValueError(f"`{prefix}amp` must be false, bf16 or fp16, got {amp!r}")
        settings["amp"] = amp
    if flag(f"{prefix}channels_last", channels_last):
        settings["channels_last"] = True
    if isinstance(compile, Mapping):
        settings["compile"] = dict(compile)
    elif isinstance(compile, str) and compile not in ("true", "false"):
        settings["compile"] = {"mode": check_option(f"{prefix}compile", compile, _MODES)}
    elif compile is not None and flag(f"{prefix}compile", compile):
        settings["compile"] = {}
    return settings


def accelerated(
    network: Any,
    amp: str | bool | None = False,
    channels_last: bool = False,
    compile: bool | str | Mapping[str, Any] | None = False,
) -> Any:
    """A network that runs faster, for the inferer that explains. The network itself is left as it is.

    Args:
        network: a module, or an :class:`~monai_saliency.networks.Ensemble`, whose members then all run this way.
        amp: ``"bf16"`` or ``"fp16"``: under ``torch.autocast`` in this type, on the device of the images. Its outputs
            are converted to float32. False or None: as it is.
        channels_last: give it images in the memory format ``torch.channels_last``, or ``channels_last_3d`` for
            volumes. Its parameters are not touched.
        compile: True compiles it by ``torch.compile`` for each shape of batch, a text is the mode
            (``"reduce-overhead"`` records CUDA graphs), a dictionary holds arguments of ``torch.compile``. For
            derivatives, as in white-box methods, the network runs uncompiled.

    Example::

        >>> import torch
        >>> accelerated(torch.nn.Linear(4, 2), amp="bf16")(torch.rand(1, 4)).dtype
        torch.float32
    """
    settings = check_runtime(amp, channels_last, compile)
    if not settings:
        return network
    if isinstance(network, Ensemble):
        return Ensemble([Accelerated(member, settings) for member in network.networks])
    words = f"a torch module for {' and '.join(settings)}, which cannot look into anything else"
    instance("network", network, torch.nn.Module, words)
    return Accelerated(network, settings)


class Accelerated(torch.nn.Module):
    """A network that runs faster; :func:`accelerated` makes it. ``settings`` holds what is switched on."""

    def __init__(self, network: torch.nn.Module, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.settings = dict(settings)
        self.training = network.training
        weights = next(network.parameters(), torch.empty(0))
        if self.settings.get("amp") == "fp16" and weights.device.type == "cpu":
            # Most have no float16: torch fails there, or takes minutes.
            raise ValueError("`amp` fp16 cannot be run on the CPU: use bf16")

    @property
    def computes_in(self) -> torch.dtype | None:
        """The type that it computes in, if coarser than its parameters' type."""
        return _TYPES.get(self.settings.get("amp", ""))

    @property
    def compiles(self) -> bool:
        """Whether another shape of batch costs a compilation."""
        return "compile" in self.settings

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The network's output, in float32 where it computes in half precision."""
        if "channels_last" in self.settings:
            inputs, named = tree_map(_channels_last, (inputs, named))
        tensors = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, torch.Tensor)]
        kind = tensors[0].device.type if tensors else "cpu"
        with (
            nullcontext() if self.computes_in is None else torch.autocast(kind, self.computes_in),
            heeding_hooks() if self.compiles else nullcontext(),
        ):
            output = self._network()(*inputs, **named)
        return tree_map(self._plain, output)

    def _network(self) -> Callable[..., Any]:
        """The network; compiled where no derivative is taken."""
        if not self.compiles or torch.is_grad_enabled():
            return self.network
        if self not in _compiled:
            # One shape is what is run. Were sizes variables, code would be slower and compiled twice.
            _compiled[self] = torch.compile(self.network, **{"dynamic": False, **self.settings["compile"]})
        torch.compiler.cudagraph_mark_step_begin()
        return _compiled[self]

    def _plain(self, value: Any) -> Any:
        """A part of the output as the network alone would give it."""
        if not isinstance(value, torch.Tensor):
            return value
        if self.computes_in is not None and value.dtype in _TYPES.values():
            value = value.float()
        elif self.compiles and not torch.is_grad_enabled():
            value = value.clone()  # of memory that the next call overwrites, where CUDA graphs are recorded
        return value.contiguous() if "channels_last" in self.settings else value


def _channels_last(value: Any) -> Any:
    """An image ``(B, C, *spatial)`` in 2D or 3D with its channels last in memory; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.ndim not in (4, 5):
        return value
    if value.shape[1] > 1:
        return value.contiguous(memory_format=torch.channels_last if value.ndim == 4 else torch.channels_last_3d)
    # Of one channel both formats are the same memory, and torch takes it for the usual one unless the strides say so.
    value = value.contiguous()
    first, _, *spatial = value.stride()
    return value.as_strided(value.shape, (first, 1, *spatial))


def plain_network(network: Any) -> Any:
    """The network inside :func:`accelerated`; any other network, and an ensemble, as it is."""
    return network.network if isinstance(network, Accelerated) else network


def runtime_settings(network: Any) -> dict[str, Any]:
    """The settings that :func:`accelerated` switched on for a network, by name; empty for any other callable."""
    if isinstance(network, Ensemble):
        network = network.networks[0]  # all run alike
    return network.settings if isinstance(network, Accelerated) else {}
