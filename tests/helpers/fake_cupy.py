"""A CuPy that is none: its arrays hold NumPy's, so that what is done with them can be seen without a GPU.

It has of CuPy (14.2) what MONAI and this package call, and refuses what CuPy refuses. Other than CuPy's, its arrays say
that they are on the CPU when torch asks, since torch would read their memory on a GPU.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

__all__ = ["CUDARuntimeError", "fake_cupy"]


class CUDARuntimeError(RuntimeError):
    """CuPy's is a RuntimeError too."""


class ndarray:
    """An array. It has no attribute but CuPy's, and does not become NumPy's unasked."""

    __slots__ = ("_inner",)

    def __init__(self, inner: np.ndarray) -> None:
        self._inner = inner

    shape = property(lambda self: self._inner.shape)
    dtype = property(lambda self: self._inner.dtype)
    ndim = property(lambda self: self._inner.ndim)
    strides = property(lambda self: self._inner.strides)

    @property
    def flags(self) -> Any:
        flags = self._inner.flags
        return types.SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous)

    def get(self, order: str = "C") -> np.ndarray:
        return np.array(self._inner, order=order)  # type: ignore[call-overload]

    def __array__(self, *given: Any, **named: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct one")

    def __dlpack__(self, **given: Any) -> Any:
        return self._inner.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._inner.__dlpack_device__()

    def __getitem__(self, place: Any) -> ndarray:
        return ndarray(self._inner[place])

    def __setitem__(self, place: Any, value: Any) -> None:
        self._inner[place] = value

    def __mul__(self, factor: float) -> ndarray:
        return ndarray(self._inner * factor)


# As CuPy's own names itself.
ndarray.__module__ = "cupy"


def fake_cupy(monkeypatch: pytest.MonkeyPatch, gpus: int = 1) -> Any:
    """Let `import cupy` give this module, also in MONAI, which has imported it long ago.

    Args:
        monkeypatch: ends it.
        gpus: how many there are. Without any, CuPy can be imported, and no array be made.
    """

    def array(found: Any, dtype: Any = None, order: str = "K") -> ndarray:
        if not gpus:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        if type(found) is ndarray:
            found = found._inner
        elif isinstance(found, torch.Tensor):
            found = found.numpy()
        return ndarray(np.array(found, dtype, order=order))  # type: ignore[call-overload]

    def asnumpy(found: Any, stream: Any = None, order: str = "C") -> np.ndarray:
        return found.get(order) if type(found) is ndarray else np.asarray(found, order=order)  # type: ignore[call-overload]

    module: Any = types.ModuleType("cupy")
    module.__dict__.update(ndarray=ndarray, array=array, asarray=array, ascontiguousarray=array, asnumpy=asnumpy)
    monkeypatch.setitem(sys.modules, "cupy", module)
    for name, value in {"cp": module, "has_cp": True, "cp_ndarray": ndarray}.items():
        monkeypatch.setattr(f"monai.utils.type_conversion.{name}", value)
    return module
