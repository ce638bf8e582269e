"""What decides the scores: the network, and for stored scores also the settings, the image and its file.

Whoever keeps a result asks here whether it may be used again: the score store, the dataset that caches maps, and the
copies of a network on other devices.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.cases import Case
from monai_saliency.storage.fingerprint import Unfingerprintable, fingerprint, input_files, library_versions
from monai_saliency.utils.monai_private import is_compiled, tensor_version

__all__ = ["module_settings", "network_fingerprint", "network_structure", "scores_key", "strict_network_fingerprint"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Values that are identified by their text.
_VALUES = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
# Attributes of torch's own, and the `forward` that Accelerate wraps: they are not settings of a module.
_NO_SETTINGS = {*vars(torch.nn.Module()), "forward"}

_known: WeakKeyDictionary[torch.nn.Module, tuple[Any, str]] = WeakKeyDictionary()


def network_fingerprint(network: Any, network_id: str | None = None) -> str | None:
    """A hash of a network: of its parts as torch prints them, TorchScript's code, parameters and buffers.

    The hash of a module reads every byte, so it is computed again only when the module has changed. A change shows in
    its parts, in the shape, type and version of a tensor (autograd counts changes in place), or in the sums of a
    tensor's bits along rows and columns (for changes that autograd does not see: through ``.data`` or NumPy, or by a
    fused optimizer). A change of the last kind that keeps all of these sums goes unnoticed. Stored scores are safe from
    it, since they are used only where the unperturbed image still scores the same.

    Args:
        network: a module, or any other callable.
        network_id: a name chosen by the caller, which must change whenever the network does. Needed for everything but
            a module.

    Returns:
        the hash; None for a callable without a ``network_id``, whose scores must not be used again.
    """
    if network_id:
        return fingerprint(network_id)
    if not isinstance(network, torch.nn.Module):
        return None
    parts = {name: module_settings(part) for name, part in network.named_modules()}
    tensors = {name: tensor.detach() for name, tensor in [*network.named_parameters(), *network.named_buffers()]}
    signs = _signs(parts, tensors)
    known = _known.get(network)
    if signs is not None and known is not None and known[0] == signs:
        return known[1]
    found = fingerprint([parts, tensors])
    if signs is not None:
        _known[network] = signs, found
    return found


def strict_network_fingerprint(network: Any, network_id: str | None = None) -> str | None:
    """A hash of a network for results that no reference score confirms, such as cached maps.

    On top of :func:`network_fingerprint` it covers the files that define the classes of the module's parts, and the
    plain attributes of each part: numbers, strings, functions, and containers of these. Other objects that a part holds
    are not looked at. A ``network_id`` stands for all of it.

    Args:
        network: a module, or any other callable.
        network_id: as for :func:`network_fingerprint`.

    Returns:
        the hash; None for a callable without a ``network_id``.

    Raises:
        Unfingerprintable: when a part holds a function that cannot be identified, such as a lambda.
    """
    known = network_fingerprint(network, network_id)
    if known is None:
        return None
    return fingerprint([known, [] if network_id else [*_code(network), *_attributes(network)]])


def network_structure(network: torch.nn.Module) -> Any:
    """All of a module but the values of its parameters and buffers: while it stays equal, a copy can follow these.

    Returns:
        values to compare with ``==``: the tensors' names, shapes, types and layouts; and of each part its printed
        settings, and its attributes that are numbers, truth values or text.
    """
    tensors = [
        (name, each.shape, each.dtype, each.layout)
        for named in (network.named_parameters, network.named_buffers)
        for name, each in named(remove_duplicate=False)
    ]
    kinds = (bool, int, float, str, type(None))
    parts = [
        (name, module_settings(part), {key: value for key, value in vars(part).items() if isinstance(value, kinds)})
        for name, part in network.named_modules()
    ]
    return tensors, parts


def module_settings(part: torch.nn.Module) -> list[str]:
    """What a part of a module does beside its tensors: its class, its printed settings (a stride is not a parameter),
    and TorchScript's code.
    """
    kind = getattr(part, "original_name", type(part).__qualname__)
    return [kind, part.extra_repr(), str(getattr(part, "code", ""))]


def scores_key(network: str, settings: Sequence[str], case: Case, reads_file: bool = False) -> str:
    """The key under which the scores of a case are stored: a hash of all that decides them.

    Args:
        network: its hash, see :func:`network_fingerprint`.
        settings: the hash of each of the inferer's parts that decide scores.
        case: the image, and its label map and voxel sizes where it has them.
        reads_file: whether the case's file decides the scores too, as it does where the fill reads the scan.

    Returns:
        32 hexadecimal digits.

    Raises:
        Unfingerprintable: when the image or the label map cannot be hashed.
    """
    files = input_files(case.file) if reads_file else []
    decides = [library_versions(), network, list(settings), case.image, files, case.labels, case.spacing]
    return fingerprint(decides)[:32]


def _signs(parts: dict[str, list[str]], tensors: dict[str, torch.Tensor]) -> Any:
    """Values that show that a network changed, read at the speed of memory; None where they cannot be read."""
    shown = []
    sums: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        bits = _BITS.get(tensor.element_size())
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_inference() or bits is None:
            return None
        shown.append((name, tensor.shape, tensor.dtype, tensor.device, tensor_version(tensor)))
        matrix = tensor.view(bits).flatten(1) if tensor.ndim > 1 else tensor.view(bits).reshape(1, -1)
        # Sums wrap around. They are at least 32 bits wide, and as wide as the bits where those are wider: a wider sum
        # would first copy them on the CPU.
        width = max(bits, torch.int32, key=lambda dtype: dtype.itemsize)
        for axis in (0, 1):
            sums.setdefault((tensor.device, width), []).append(matrix.sum(axis, dtype=width))
    # One copy a device, as each waits for it.
    return parts, shown, [torch.cat(found).numpy(force=True).tobytes() for found in sums.values()]


def _code(network: torch.nn.Module) -> list[str]:
    """The code of the classes of a module's parts, where it can be read."""
    found = []
    for kind in {type(part) for part in network.modules()}:
        try:
            found.append(fingerprint(kind))
        except Unfingerprintable:
            continue
    return sorted(found)


def _attributes(network: torch.nn.Module) -> list[str]:
    """The plain attributes of a module's parts, which may steer it: values, functions, and containers of them."""
    return [
        f"{name}.{key}={value!r}" if isinstance(value, _VALUES) else f"{name}.{key}:{fingerprint(value)}"
        for name, part in network.named_modules()
        if not is_compiled(part)
        for key, value in sorted(vars(part).items())
        if key not in _NO_SETTINGS and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_plain([*value.keys(), *value.values()])
    if isinstance(value, functools.partial):
        return _is_plain([value.func, value.args, value.keywords])
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, (*_VALUES, types.FunctionType, types.BuiltinFunctionType))
