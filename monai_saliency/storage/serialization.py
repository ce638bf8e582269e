"""Preprocessed items as bytes and back, without pickle: reading bytes of unknown origin never runs code.

The bytes of an item are a few magic bytes, a checksum of all bytes after it, a JSON header, and the raw bytes of the
arrays. The header holds the key and the item: text, numbers, booleans, ``None`` and lists as plain JSON, other types as
``{"kind": ...}``. An array is given there as a slice of the raw bytes. :mod:`monai_saliency.storage.devices` says on
which device it comes back.
"""

from __future__ import annotations

import base64
import json
import pathlib
import struct
import sys
import zlib
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor

from monai_saliency.errors import AdviceError
from monai_saliency.storage.devices import copied, cupy_array, device_name, from_cupy, is_cupy, restored, stays

__all__ = ["DamagedEntry", "NotStorable", "decode", "encode"]

_MAGIC = b"MSALITM1"
_PREFIX = struct.Struct("<8sIQ")  # magic, checksum, length of the header
_ALIGNMENT = 64
_PATHS = {name: getattr(pathlib, name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}


class NotStorable(TypeError):
    """An item with a value that cannot be stored. The message gives the place of the value and its type."""


class DamagedEntry(ValueError):
    """Bytes that are damaged, incomplete, or stored under another key."""


class _Entry(bytearray):
    """The bytes of an item whose tensors, as far as they are on a GPU, stay there."""

    kept: list[torch.Tensor]


def encode(item: Any, key: str, on_device: bool = False) -> bytearray:
    """Convert an item to bytes.

    Example::

        >>> data = encode({"image": torch.zeros(2), "name": "s3"}, key="scan 3")
        >>> decode(data, key="scan 3")
        {'image': tensor([0., 0.]), 'name': 's3'}

    Args:
        item: tensors, MetaTensors, arrays of NumPy and CuPy, numbers, text, paths, MONAI's enumerations, and containers
            of these.
        key: the key under which the bytes will be stored.
        on_device: copy tensors that are on a GPU there, beside the bytes, as far as
            :func:`monai_saliency.storage.devices.stays` allows. Then only this very object can be decoded.

    Raises:
        NotStorable: when the item holds a value of another type.
    """
    writer = _Writer(on_device)
    try:
        header = json.dumps({"key": key, "item": writer.node(item, "item")}, separators=(",", ":")).encode()
    except RecursionError as error:
        raise NotStorable("an item that holds itself") from error
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    start = _PREFIX.size + len(header)
    data = _Entry(start + writer.size)
    data.kept = writer.kept
    data[_PREFIX.size : start] = header
    target = np.frombuffer(data, np.uint8)
    for offset, content in writer.arrays:
        target[start + offset : start + offset + content.size] = content
    del target
    _PREFIX.pack_into(data, 0, _MAGIC, 0, len(header))
    _PREFIX.pack_into(data, 0, _MAGIC, _checksum(data), len(header))
    return data


def decode(data: bytes | bytearray | memoryview, key: str, trusted: bool = False) -> Any:
    """Convert bytes back to an item. Its tensors and arrays are copies.

    Args:
        data: the bytes made by :func:`encode`.
        key: the key under which the bytes were stored.
        trusted: skip the checksum, for bytes that never left the memory of this process.

    Raises:
        DamagedEntry: when the bytes are damaged or stored under another key, and for any other bytes.
        AdviceError: when a tensor or array cannot be put where it was.
    """
    try:
        magic, checksum, length = _PREFIX.unpack_from(data)
        if magic != _MAGIC or not (trusted or checksum == _checksum(data)):
            raise DamagedEntry("its checksum differs")
        start = _PREFIX.size + length
        header = json.loads(bytes(memoryview(data)[_PREFIX.size : start]))
        if header["key"] != key:
            raise DamagedEntry("it belongs to another key")
        return _Reader(np.frombuffer(data, np.uint8)[start:], getattr(data, "kept", [])).value(header["item"])
    except (DamagedEntry, AdviceError):
        raise
    # Bytes of unknown origin can raise errors of any type. The item is computed again.
    except Exception as error:
        raise DamagedEntry(f"{type(error).__name__}: {error}") from error


def _checksum(data: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(memoryview(data)[12:], len(data) & 0xFFFFFFFF)


class _Writer:
    """Converts values to JSON, and collects the arrays, and the tensors that stay on their device."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device
        self.arrays: list[tuple[int, np.ndarray]] = []
        self.kept: list[torch.Tensor] = []
        self.size = 0

    def raw(self, content: np.ndarray) -> list[int]:
        """Add bytes, ``(n,)`` uint8, and return their offset and length."""
        offset = self.size
        self.arrays.append((offset, content))
        self.size = offset + content.size + (-content.size % _ALIGNMENT)
        return [offset, content.size]

    def node(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.node(content, f"{where}[{i}]") for i, content in enumerate(value)]
        if kind in (tuple, torch.Size):
            content = [self.node(content, f"{where}[{i}]") for i, content in enumerate(value)]
            return {"kind": "tuple" if kind is tuple else "size", "of": content}
        if kind is dict:
            pairs = [[self.node(k, f"a key of {where}"), self.node(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return {"kind": "dict", "of": pairs}
        if kind is MetaTensor:
            # All attributes as they are, since a new MetaTensor would derive some of them in another way.
            return self._tensor(value.as_tensor(), where) | {"meta": self.node(value.__dict__, where)}
        if kind is torch.Tensor:
            return self._tensor(value, where)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, where)
        if is_cupy(value):
            return {"kind": "cupy", "of": self._array(from_cupy(value), where)}
        if isinstance(value, Enum) and kind.__module__.partition(".")[0] == "monai":
            return {"kind": "enum", "of": [kind.__module__, kind.__qualname__, value.name]}
        if kind in (torch.dtype, torch.device):
            return {"kind": kind.__name__, "of": str(value).removeprefix("torch.")}
        if isinstance(value, np.dtype) and not value.hasobject and value.names is None:
            return {"kind": "numpy dtype", "of": value.str}
        if kind is type and issubclass(value, np.generic) and hasattr(np, value.__name__):
            return {"kind": "numpy type", "of": value.__name__}
        if kind.__name__ in _PATHS and kind is _PATHS[kind.__name__]:
            return {"kind": "path", "of": [kind.__name__, str(value)]}
        if kind is bytes:
            return {"kind": "bytes", "of": base64.b64encode(value).decode()}
        if kind is complex:
            return {"kind": "complex", "of": [value.real, value.imag]}
        raise NotStorable(f"{where} is of type {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: torch.Tensor, where: str) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_quantized or value.requires_grad:
            raise NotStorable(f"{where} is a tensor that is sparse, quantized or needs a gradient")
        if value.is_meta:
            raise NotStorable(f"{where} is a tensor on the meta device, which holds no values")
        plain = value.resolve_conj().resolve_neg()
        # The order in memory is kept: it decides in which order kernels add, and with it the last bits of results.
        order = sorted(range(plain.ndim), key=lambda axis: -plain.stride()[axis])
        ordered = plain.permute(order)
        if not ordered.is_contiguous():
            order, ordered = list(range(plain.ndim)), plain.contiguous()
        strides = [0] * plain.ndim
        for axis, stride in zip(order, ordered.stride(), strict=True):
            strides[axis] = stride
        flat, node = ordered.reshape(-1), {"kind": "tensor", "shape": list(value.shape), "strides": strides}
        if self.on_device and stays(flat):
            self.kept.append(flat.clone())
            return node | {"kept": len(self.kept) - 1}
        at = self.raw(flat.cpu().view(torch.uint8).numpy())
        dtype = str(value.dtype).removeprefix("torch.")
        return node | {"dtype": dtype, "device": device_name(value.device), "at": at}

    def _array(self, value: np.ndarray | np.generic, where: str) -> dict[str, Any]:
        if value.dtype.hasobject or value.dtype.names is not None or value.dtype.subdtype is not None:
            raise NotStorable(f"{where} is an array of {value.dtype}")
        fortran = isinstance(value, np.ndarray) and value.flags.fnc
        flat = np.frombuffer(value.tobytes("F" if fortran else "C"), np.uint8)
        return {
            "kind": "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "fortran": fortran,
            "at": self.raw(flat),
        }


class _Reader:
    """Converts JSON back to values. Arrays are copies of slices of ``raw``, ``(n,)`` uint8, or of what was kept."""

    def __init__(self, raw: np.ndarray, kept: list[torch.Tensor]) -> None:
        self.raw, self.kept = raw, kept

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(content) for content in node]
        return _READERS[node["kind"]](self, node) if isinstance(node, dict) else node

    def slice(self, node: dict[str, Any]) -> np.ndarray:
        offset, size = node["at"]
        found = self.raw[offset : offset + size]
        if found.size != size:
            raise DamagedEntry("it is cut off")
        return found

    def tensor(self, node: dict[str, Any]) -> torch.Tensor:
        # A copy in either case: whoever reads an item may change its voxels in place.
        flat = self._copy_of_kept(node["kept"]) if "kept" in node else self._from_bytes(node)
        tensor = flat.as_strided(node["shape"], node["strides"])
        if "meta" in node:
            tensor = tensor.as_subclass(MetaTensor)
            tensor.__dict__.update(self.value(node["meta"]))
        return tensor

    def _copy_of_kept(self, number: int) -> torch.Tensor:
        found = self.kept[number]
        return copied(found, found.device)

    def _from_bytes(self, node: dict[str, Any]) -> torch.Tensor:
        content = self.slice(node)
        # Memory from torch has the alignment of a computed tensor.
        memory = torch.empty(content.size, dtype=torch.uint8, device="cpu")
        memory.numpy()[...] = content
        return restored(memory.view(_torch_dtype(node["dtype"])), node["device"])

    def array(self, node: dict[str, Any]) -> np.ndarray:
        flat = np.frombuffer(self.slice(node).tobytes(), np.dtype(node["dtype"]))
        return flat.reshape(node["shape"], order="F" if node["fortran"] else "C").copy("K")

    def enum(self, node: dict[str, Any]) -> Enum:
        module, name, member = node["of"]
        # The module is looked up and never imported, since an import runs code.
        found: Any = sys.modules[module] if module.partition(".")[0] == "monai" else None
        for part in name.split("."):
            found = vars(found)[part]
        if not (isinstance(found, type) and issubclass(found, Enum) and found.__module__ == module):
            raise DamagedEntry(f"{module}.{name} is not an enumeration of MONAI")
        return found[member]


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise DamagedEntry(f"torch.{name} is not a type of tensors")
    return found


def _numpy_type(name: str) -> type:
    found = getattr(np, name)
    if not (isinstance(found, type) and issubclass(found, np.generic)):
        raise DamagedEntry(f"numpy.{name} is not a type of arrays")
    return found


_READERS: dict[str, Callable[[_Reader, dict[str, Any]], Any]] = {
    "tuple": lambda reader, node: tuple(reader.value(node["of"])),
    "size": lambda reader, node: torch.Size(reader.value(node["of"])),
    "dict": lambda reader, node: {reader.value(key): reader.value(content) for key, content in node["of"]},
    "tensor": _Reader.tensor,
    "array": _Reader.array,
    "cupy": lambda reader, node: cupy_array(reader.array(node["of"])),
    "scalar": lambda reader, node: reader.array(node)[()],
    "enum": _Reader.enum,
    "dtype": lambda reader, node: _torch_dtype(node["of"]),
    "device": lambda reader, node: torch.device(node["of"]),
    "numpy dtype": lambda reader, node: np.dtype(node["of"]),
    "numpy type": lambda reader, node: _numpy_type(node["of"]),
    "path": lambda reader, node: _PATHS[node["of"][0]](node["of"][1]),
    "bytes": lambda reader, node: base64.b64decode(node["of"]),
    "complex": lambda reader, node: complex(*node["of"]),
}
