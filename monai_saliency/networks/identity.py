"""What decides the scores: the network, and for stored scores also the settings, the image and its file.

Whoever keeps a result asks here whether it may be used again: the score store, the dataset that caches maps, and the
copies of a network on other devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.cases import Case
from monai_saliency.networks.runtime import runtime_settings
from monai_saliency.storage.fingerprint import (
    Unfingerprintable,
    fingerprint,
    library_versions,
    module_attributes,
    module_shell,
    outline,
)
from monai_saliency.storage.input_files import checksum_of, input_files
from monai_saliency.storage.installed import is_installed
from monai_saliency.utils.monai_private import global_hooks, script_digest, script_text, tensor_version
from monai_saliency.utils.precision import chosen_arithmetic

__all__ = [
    "NetworkParts",
    "module_settings",
    "network_fingerprint",
    "network_parts",
    "network_structure",
    "own_attributes",
    "scores_key",
    "strict_network_fingerprint",
]

# Attributes that say where a network runs.
_PLACES = {"rank", "local_rank", "global_rank", "device_id", "device_index"}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_known: WeakKeyDictionary[torch.nn.Module, tuple[Any, str]] = WeakKeyDictionary()
_strictly_known: WeakKeyDictionary[torch.nn.Module, tuple[Any, str]] = WeakKeyDictionary()


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

    Example::

        >>> import torch
        >>> network = torch.nn.Linear(2, 1)
        >>> before = network_fingerprint(network)
        >>> with torch.no_grad():
        ...     _ = network.weight.add_(1)
        >>> before == network_fingerprint(network)
        False
        >>> network_fingerprint(lambda images: images) is None
        True
    """
    if network_id:
        return fingerprint(_named(network, network_id))
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

    It holds only where all that is reachable from the module can be hashed: the code of its parts' classes, parameters
    and buffers, hooks, and all other attributes, whatever holds them: numbers, text, tensors, arrays, functions, and
    objects and containers of these (:func:`monai_saliency.storage.fingerprint.fingerprint` says how, and what it cannot
    follow), and the content of the files that text among them names. A ``network_id`` stands for all of it.
    What a compiler makes of a module is taken to be the same.

    Args:
        network: a module, or any other callable.
        network_id: as for :func:`network_fingerprint`.

    Returns:
        the hash; None for a callable without a ``network_id``.

    Raises:
        Unfingerprintable: when a part holds something that cannot be identified, such as a lambda, a class defined in a
            function, or an object of an extension module.
    """
    if network_id:
        return fingerprint([fingerprint(_named(network, network_id)), []])
    if not isinstance(network, torch.nn.Module):
        return None
    found = outline([network, global_hooks()])
    tensors = {str(number): value.detach() for number, value in enumerate(found.large) if _is_tensor(value)}
    scripts = [value for value in found.large if not _is_tensor(value)]
    tensors |= {
        f"{number} {name}": tensor.detach() for number, part in enumerate(scripts) for name, tensor in _tensors_of(part)
    }
    files = [checksum_of(file) for file in found.files]
    signs = _signs([found.digest, files, [script_text(part) for part in scripts]], tensors, in_order=True)
    known = _strictly_known.get(network)
    if signs is not None and known is not None and known[0] == signs:
        return known[1]
    large = [fingerprint(value) if _is_tensor(value) else script_digest(value) for value in found.large]
    result = fingerprint([found.digest, large, *([files] if files else [])])
    if signs is not None:
        _strictly_known[network] = signs, result
    return result


class NetworkParts:
    """What decides a network's scores beside its parameters and buffers: its code, hooks and attributes.

    A network may count its calls, or keep what it has computed. What has changed by itself once the network ran is not
    comparable between processes, or between a run and the one that resumes it. So this is made before the first
    forward, and looked at after it.

    Args:
        network: a module, or any other callable.
        network_id: a name for the network, which stands for all of it.
        by_code: as for :func:`~monai_saliency.storage.fingerprint.fingerprint`.
    """

    def __init__(self, network: Any, network_id: str | None = None, by_code: bool = False) -> None:
        self._network = network
        self._by_code = by_code
        self._before = None if network_id else network_parts(network, by_code)

    def unknown(self) -> list[str]:
        """The parts that could not be identified before the network ran."""
        return [name for name, known in (self._before or {}).items() if known is None]

    def steady(self) -> dict[str, str | None]:
        """The hashes of :func:`network_parts` that are what they were. None for a part that has changed, or that cannot
        be identified. Empty where a ``network_id`` stands for it.
        """
        if self._before is None:
            return {}
        now = network_parts(self._network, self._by_code)
        return {
            name: self._before.get(name) if self._before.get(name) == now.get(name) else None
            for name in {**self._before, **now}
        }


def own_attributes(network: Any) -> dict[str, Any]:
    """The attributes of a network, and of the modules inside it, whose classes are the user's own, such as
    ``head.temperature``. Devices and ranks are left out: they say where it runs.
    """
    if not isinstance(network, torch.nn.Module):
        return {}
    return {
        f"{name}.{key}" if name else key: value
        for name, part in network.named_modules()
        if not is_installed(type(part).__module__)
        for key, value in module_attributes(part).items()
        if not isinstance(value, torch.device) and key not in _PLACES
    }


def network_parts(network: Any, by_code: bool = False) -> dict[str, str | None]:
    """A hash of each thing beside parameters and buffers that decides a network's scores: of ``code`` (with hooks, and
    the attributes of installed classes' modules), and of each attribute in :func:`own_attributes`. None for what cannot
    be identified. ``by_code`` is that of :func:`~monai_saliency.storage.fingerprint.fingerprint`.
    """
    print_of = functools.partial(_print_of, by_code=by_code)
    if not isinstance(network, torch.nn.Module):
        return {"code": print_of(network)}
    shells = [
        [name, module_shell(part), module_attributes(part) if is_installed(type(part).__module__) else {}]
        for name, part in network.named_modules()
    ]
    code = print_of([global_hooks(), shells]) or print_of([*map(print_of, shells)])
    return {"code": code} | {name: print_of(value) for name, value in own_attributes(network).items()}


def _named(network: Any, network_id: str) -> Any:
    """What a name stands for: the network, run as it is. Its precision is no part of the name."""
    settings = runtime_settings(network)
    return [network_id, settings] if settings else network_id


def _print_of(value: Any, by_code: bool = False) -> str | None:
    try:
        return fingerprint(value, by_code)
    except Unfingerprintable:
        return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def network_structure(network: torch.nn.Module) -> str | None:
    """All of a module but the values of its parameters and buffers: while it stays equal, a copy can follow these.

    Returns:
        the hash of the tensors' shapes and types, and of all else that :func:`strict_network_fingerprint` looks at;
        None where something cannot be identified.
    """
    named = [
        (name, each)
        for named in (network.named_parameters, network.named_buffers)
        for name, each in named(remove_duplicate=False)
    ]
    followed = {id(each) for _, each in named}
    try:
        found = outline([network, global_hooks()])
        held = [
            script_text(value) if not _is_tensor(value) else fingerprint(value)
            for value in found.large
            if id(value) not in followed
        ]
        layouts = [(name, tuple(each.shape), each.dtype, each.device.type) for name, each in named]
        return fingerprint([found.digest, held, layouts])
    except Unfingerprintable:
        return None


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
    decides.append(chosen_arithmetic())
    return fingerprint(decides)[:32]


def _signs(parts: Any, tensors: dict[str, torch.Tensor], in_order: bool = False) -> Any:
    """Values that show that a network changed, read at the speed of memory; None where they cannot be read.

    Args:
        parts: what decides its output beside the tensors.
        tensors: its tensors.
        in_order: look at the order of rows and columns too. Two rows of a permutation matrix that change places keep
            the sums along both.
    """
    shown = []
    sums: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        bits = _BITS.get(tensor.element_size())
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_inference() or bits is None:
            return None
        if tensor.is_conj() or tensor.is_neg():  # their bits are not those of their values
            return None
        shown.append((name, tensor.shape, tensor.dtype, tensor.device, tensor_version(tensor)))
        matrix = tensor.view(bits).flatten(1) if tensor.ndim > 1 else tensor.view(bits).reshape(1, -1)
        # Sums wrap around. They are at least 32 bits wide, and as wide as the bits where those are wider: a wider sum
        # would first copy them on the CPU.
        width = max(bits, torch.int32, key=lambda dtype: dtype.itemsize)
        for axis in (0, 1):
            sums.setdefault((tensor.device, width), []).append(matrix.sum(axis, dtype=width))
        if in_order and len(matrix) > 1:
            weighted = _weighted(tensor)
            sums.setdefault((tensor.device, weighted.dtype), []).append(weighted)
    # One copy a device, as each waits for it.
    return parts, shown, [torch.cat(found).numpy(force=True).tobytes() for found in sums.values()]


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each row of a tensor, which shows where in the row its values are."""
    matrix = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten(1)
    matrix = matrix.float() if matrix.dtype not in (torch.float32, torch.float64) else matrix
    weights = torch.arange(1, matrix.shape[1] + 1, device=matrix.device, dtype=matrix.dtype).sqrt()
    with torch.autocast(matrix.device.type, enabled=False):
        return matrix @ weights
