"""A device that is none: tensors on it are on the CPU, but everything that would wait for a GPU, or be an error on one,
is seen.

A tensor of this device says that it is on another device than the CPU. Each operation on it is run on the CPU tensor
inside. What would make the host wait until the device has finished its work is noted: reading a number, operations
whose result has a shape that the values decide, comparing whole tensors, and copies between the two sides that are not
announced as ``non_blocking``. Operations that mix tensors of both sides fail, as on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["DEVICE", "Counted", "OnDevice", "off_device", "on_device"]

#: of a kind that the CPU build of torch knows by name, and autocast too
DEVICE = torch.device("lazy:0")

#: operations that return what only the device's values decide
_READS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
    "repeat_interleave",
    "bincount",
}


class OnDevice(torch.Tensor):
    """A tensor that pretends to be on :data:`DEVICE`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})[0]


def on_device(tensor: torch.Tensor) -> OnDevice:
    """A copy of a tensor on the pretended device."""
    return OnDevice(tensor.detach().clone())


def off_device(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor inside, without any waiting: for the test's own use."""
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


class Counted(TorchDispatchMode):
    """Notes the operations outside of the network, and those that wait for the device.

    Attributes:
        stretches: the names of operations, in one list for each stretch between two forwards. Views, which compute and
            move nothing, are left out.
        waits: as ``stretches``, the operations that wait, each with the line of the package that asked for it.
        sizes: how many images each forward was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.begin()

    def __enter__(self) -> Counted:
        # Tensors made of Python's numbers are made on the CPU and copied, where this can be seen.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    def begin(self) -> None:
        """Forget what was noted."""
        self.stretches: list[list[str]] = [[]]
        self.waits: list[list[str]] = [[]]
        self.sizes: list[int] = []

    def network(self, inner: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """A network on the pretended device, in which nothing is noted.

        Args:
            inner: runs on the CPU.
        """

        def forward(batch: torch.Tensor) -> Any:
            self.sizes.append(len(batch))
            self.inside = True
            try:
                return tree_map(OnDevice, inner(off_device(batch)))
            finally:
                self.inside = False
                self.stretches.append([])
                self.waits.append([])

        return forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, waits, there = _run(func, args, kwargs or {})
        if not self.inside and func.namespace != "profiler":
            if there and not func.is_view:
                self.stretches[-1].append(str(func))
            if waits:
                self.waits[-1].append(f"{func} in {_asked_by()}")
        return result


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool, bool]:
    """The result of an operation, whether it waits for the device, and whether the device takes part in it."""
    leaves = tree_flatten((args, kwargs))[0]
    given = [each for each in leaves if isinstance(each, OnDevice)]
    hosted = [each for each in leaves if isinstance(each, torch.Tensor) and not isinstance(each, OnDevice)]
    others = [each for each in hosted if each.ndim]  # a single number on the host fits everywhere
    name = func.overloadpacket.__name__
    asked = kwargs.get("device")
    to = asked.type if isinstance(asked, torch.device) else asked
    lands = to == DEVICE.type if to is not None else bool(given)
    waits = bool(given) and _waits(name, args, leaves)
    crosses = bool(given) != lands if name == "_to_copy" else name == "copy_" and bool(given and others)
    if crosses:
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
    elif given and others and name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
        raise RuntimeError(f"{func} was given tensors of two devices")
    inside = {id(each.inner): each for each in given}
    if to is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map(off_device, (args, kwargs))
    result = func(*args, **kwargs)

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not lands:
            return value
        return inside[id(value)] if id(value) in inside else OnDevice(value)

    return tree_map(back, result), waits, bool(given) or lands


def _waits(name: str, args: Any, leaves: Any) -> bool:
    if name in _READS:
        return True
    if not name.startswith("index") or name in ("index_select", "index_add_", "index_add", "index_copy_"):
        return False
    # Indices: those on the host are copied, and a mask is turned into places, whose number must be known.
    indices = [each for each in tree_flatten(args[1])[0] if isinstance(each, torch.Tensor)]
    return any(not isinstance(each, OnDevice) or each.dtype == torch.bool for each in indices)


def _asked_by() -> str:
    """The innermost line of the package."""
    frame = sys._getframe()
    while frame is not None and "/monai_saliency/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "the test"
    return f"{frame.f_code.co_filename.rpartition('/monai_saliency/')[2]}:{frame.f_lineno}"
