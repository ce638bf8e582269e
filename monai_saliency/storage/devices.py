"""Which device the voxels of a cached item were on, and where they come back.

- A tensor comes back on the device it was on. One that was on the current GPU comes back on the GPU that is current at
  the read, so that the processes of a run share entries.
- Where the process cannot use this device, the tensor comes back on the CPU: on a machine without a GPU, and from disk
  in a worker process that was forked after its parent had used the GPU.
- An array of CuPy comes back on the current GPU, where CuPy makes its arrays. Without a GPU or CuPy, it cannot come
  back, and an error says so.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from monai_saliency.errors import AdviceError
from monai_saliency.utils.monai_private import cuda_is_lost

__all__ = ["copied", "cupy_array", "device_name", "from_cupy", "is_cupy", "restored", "stays"]


def device_name(device: torch.device) -> str:
    """The name under which a device is stored: without its number where it is the current one of its kind."""
    return device.type if device.type == "cpu" or device == _current(device.type) else str(device)


def _current(kind: str) -> torch.device:
    return torch.empty(0, device=kind).device


def restored(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor on the device of a stored name, or as it is where this process cannot use that device.

    Args:
        tensor: on the CPU.
        name: as :func:`device_name` gives it.

    Raises:
        AdviceError: when the device does not take the tensor, such as for lack of memory.
    """
    device = torch.device(name)
    return copied(tensor, device) if device.type != "cpu" and _is_usable(device) else tensor


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor on a device.

    Raises:
        AdviceError: when the device does not take it, such as for lack of memory.
    """
    try:
        return tensor.to(device, copy=True)
    except RuntimeError as error:
        raise AdviceError(
            f"a cached tensor cannot be put on {device} ({error}): free its memory, or end the cached transforms with "
            "ToDeviced(keys, 'cpu')"
        ) from error


def _is_usable(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type or cuda_is_lost():
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def stays(tensor: torch.Tensor) -> bool:
    """Whether the memory cache leaves a tensor on its GPU: until half of the GPU's memory is in use, since the network
    needs the rest. Reading the copy there is faster than from the host, and gives the same.
    """
    if not tensor.is_cuda:
        return False
    free, total = torch.cuda.mem_get_info(tensor.device)
    # What torch holds, but does not use.
    free += torch.cuda.memory_reserved(tensor.device) - torch.cuda.memory_allocated(tensor.device)
    return free - tensor.nbytes >= total // 2


def is_cupy(value: Any) -> bool:
    """Whether a value is an array of CuPy, which is not imported to know it."""
    return type(value) is getattr(sys.modules.get("cupy"), "ndarray", None)


def from_cupy(array: Any) -> np.ndarray:
    """The values of an array of CuPy in the host's memory, in the same order in memory."""
    return np.asarray(sys.modules["cupy"].asnumpy(array, order="A"))


def cupy_array(array: np.ndarray) -> Any:
    """An array of CuPy on the current GPU.

    Raises:
        AdviceError: when CuPy cannot be imported, or finds no GPU.
    """
    # Looked up and never imported, since an import runs code. MONAI imports it wherever it is installed.
    cupy: Any = sys.modules.get("cupy")
    advice = "or empty the cache and end the cached transforms with EnsureTyped(keys)"
    if cupy is None:
        raise AdviceError(
            "the cached item holds an array of CuPy, which cannot be imported: pip install cupy-cuda12x (or that "
            f"of your version of CUDA), {advice}"
        )
    try:
        return cupy.array(array, order="A")
    except RuntimeError as error:  # CuPy's own are a kind of it
        raise AdviceError(
            f"the cached item holds an array of CuPy, which cannot be put on a GPU ({error}): read it where there is "
            f"one, {advice}"
        ) from error
