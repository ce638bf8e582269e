"""What decides the scores of a network."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.storage.fingerprint import fingerprint
from monai_saliency.utils.monai_private import tensor_version

__all__ = ["network_fingerprint"]


def network_fingerprint(network: Any, network_id: str | None = None) -> str | None:
    """What a network is, as a hash: equal for equal parts, as they are printed or coded, parameters and buffers.

    A module's hash, which reads every byte, is kept until the module changed. That is told by its parts, by each
    tensor's shape, type and version (which counts the changes in place that autograd sees), and by each tensor's bits,
    summed along rows and columns, which shows the changes that autograd does not see (through ``.data`` or NumPy, or by
    a fused optimizer). What goes unseen is a change of the latter kind that leaves every one of these sums as it was;
    then the reference score, without which no stored score is used, still shows it.

    Args:
        network: a module, or any other callable.
        network_id: the caller's own word for it, needed for anything but a module; it must change with the network.

    Returns:
        the hash, or None where nothing is known of the network, so that its scores must not be reused.
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


def module_settings(part: torch.nn.Module) -> list[str]:
    """What a part does beside its tensors: as torch prints it (a stride is no parameter), and TorchScript's code."""
    kind = getattr(part, "original_name", type(part).__qualname__)
    return [kind, part.extra_repr(), str(getattr(part, "code", ""))]


_known: WeakKeyDictionary[torch.nn.Module, tuple[Any, str]] = WeakKeyDictionary()


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signs(parts: dict[str, list[str]], tensors: dict[str, torch.Tensor]) -> Any:
    """What shows that a network changed, read at the speed of memory; None where that cannot be told."""
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
