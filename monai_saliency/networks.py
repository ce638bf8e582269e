"""A user's network: putting a checkpoint into it, taking it as MONAI's are, and telling whether it changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.fingerprint import fingerprint
from monai_saliency.outputs import read

__all__ = ["OnImageGrid", "load_checkpoint", "network_fingerprint"]

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}  # by the number of axes
_WRAPPERS = ("state_dict", "model", "network", "net", "model_state_dict")


def load_checkpoint(network: torch.nn.Module, path: str | Path | None) -> torch.nn.Module:
    """Load weights into a network, all of them or none.

    Args:
        network: the module, on any device.
        path: a file of ``torch.save``: a state dictionary, alone or under one of the usual keys (``"state_dict"``,
            ``"model"``, ...), with or without the ``module.`` prefix of data-parallel
            training. None or ``""`` loads nothing.

    Returns:
        the network.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is not a state dictionary (pickled code is never run), or does not fit the network.
    """
    if not path:
        return network
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist: pass --checkpoint with the path of the weights")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} is not a file of weights that can be read without running code in it "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): save it again with "
            "torch.save(network.state_dict(), path); for a TorchScript file set network_def to "
            "$torch.jit.load(path) and checkpoint to "
            " (empty)"
        ) from error
    weights = _state_dict(content)
    if weights is None:
        raise ValueError(f"checkpoint {path} holds no state dictionary, but a {type(content).__name__}")
    expected = network.state_dict()
    missing = [name for name in expected if name not in weights]
    surplus = [name for name in weights if name not in expected]
    other = [
        f"{name} {tuple(weights[name].shape)} for {tuple(expected[name].shape)}"
        for name in expected
        if name in weights and weights[name].shape != expected[name].shape
    ]
    if missing or surplus or other:
        parts = [("missing", missing), ("not in the network", surplus), ("of another shape", other)]
        raise ValueError(
            f"checkpoint {path} does not fit the network {type(network).__name__}: "
            + "; ".join(
                f"{len(names)} {what} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
                for what, names in parts
                if names
            )
            + ". Set network_def to the network that the checkpoint was trained with"
        )
    network.load_state_dict(dict(weights))
    return network


class OnImageGrid(torch.nn.Module):
    """A segmentation network of another library as MONAI's are: images in, logits on the images' grid out.

    SegFormer, and most others of ``transformers``, give an object whose ``logits`` have a quarter of the image's
    resolution. They are brought to the image's grid linearly, between voxel centres, as that library's own
    postprocessing does. So the network predicts in a bundle, patch by patch too, and its regions are the image's.

    Args:
        network: it, such as ``SegformerForSemanticSegmentation.from_pretrained(folder)``.
        output: which part of its output the logits are: a key, an index, or several from the outside in; all of it
            where None.

    Example::

        OnImageGrid(SegformerForSemanticSegmentation(SegformerConfig(num_labels=3)), output="logits")
    """

    def __init__(self, network: torch.nn.Module, output: str | int | Sequence[str | int] | None = None) -> None:
        super().__init__()
        self.network = network
        self.output = output

    def extra_repr(self) -> str:
        """For printing, and for :func:`network_fingerprint`."""
        return f"output={self.output!r}"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(B, classes, *spatial)`` of images ``(B, C, *spatial)``.

        Raises:
            ValueError: when the network gives no logits of as many axes as the images.
        """
        logits = read(self.network(images), self.output)
        if not isinstance(logits, torch.Tensor) or logits.ndim != images.ndim:
            found = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise ValueError(
                f"`output` must read logits (B, classes, *spatial) of images of shape {tuple(images.shape)}, got "
                f"{found}"
            )
        if logits.shape[2:] == images.shape[2:]:
            return logits
        return torch.nn.functional.interpolate(logits, images.shape[2:], mode=_LINEAR[images.ndim], align_corners=False)


def _state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    """The state dictionary in what a checkpoint file holds."""
    if not isinstance(content, Mapping):
        return None
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _state_dict(content[key])
    if not content or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()):
        return None
    prefixed = all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if prefixed else name: value for name, value in content.items()}


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
    parts = {name: _settings(part) for name, part in network.named_modules()}
    tensors = {name: tensor.detach() for name, tensor in [*network.named_parameters(), *network.named_buffers()]}
    signs = _signs(parts, tensors)
    known = _known.get(network)
    if signs is not None and known is not None and known[0] == signs:
        return known[1]
    found = fingerprint([parts, tensors])
    if signs is not None:
        _known[network] = signs, found
    return found


def _settings(part: torch.nn.Module) -> list[str]:
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
        shown.append((name, tensor.shape, tensor.dtype, tensor.device, tensor._version))
        matrix = tensor.view(bits).flatten(1) if tensor.ndim > 1 else tensor.view(bits).reshape(1, -1)
        # Sums wrap around. They are at least 32 bits wide, and as wide as the bits where those are wider: a wider sum
        # would first copy them on the CPU.
        width = max(bits, torch.int32, key=lambda dtype: dtype.itemsize)
        for axis in (0, 1):
            sums.setdefault((tensor.device, width), []).append(matrix.sum(axis, dtype=width))
    # One copy a device, as each waits for it.
    return parts, shown, [torch.cat(found).numpy(force=True).tobytes() for found in sums.values()]
