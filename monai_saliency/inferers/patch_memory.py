"""The memory of patch outputs: on the device, then on the host, least recently used outputs dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from monai_saliency.utils.arguments import number


@dataclass(frozen=True)
class PatchMemory:
    """Limits of the memory of patch outputs. Beyond them the least recently used outputs are dropped and run again.

    Outputs that no mask needs any more are dropped at once. So windows, which rarely share a patch's content, need
    little more than the outputs of the unperturbed image. The limits count the outputs themselves; the C library's
    allocator may keep gaps between them.

    Args:
        device_bytes: bytes on the device where patches are stitched, if that is not the CPU.
        host_bytes: bytes in the host's memory, for outputs that the device has no room for.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> from monai.inferers import SlidingWindowInferer
        >>> patches = {"inferer": SlidingWindowInferer((8, 8)), "patch_memory": PatchMemory(host_bytes=2**30)}
        >>> explain = ms.sliding_window(4, target=ms.RegionScore(0, "none", "all"), **patches)
        >>> explain(torch.rand(1, 1, 16, 16), torch.nn.Conv2d(1, 2, 1)).shape
        torch.Size([1, 1, 16, 16])
    """

    device_bytes: int = 2 * 2**30
    host_bytes: int = 8 * 2**30

    def __post_init__(self) -> None:
        number("device_bytes", self.device_bytes, 0)
        number("host_bytes", self.host_bytes, 0)


class OutputMemory:
    """Outputs by number (their *slot*): on the device while it has room, then on the host."""

    def __init__(self, device: torch.device, limits: PatchMemory) -> None:
        host = torch.device("cpu")
        self.limits = {device: limits.device_bytes} if device != host else {}
        self.limits[host] = limits.host_bytes
        self.used = dict.fromkeys(self.limits, 0)
        self._outputs: OrderedDict[int, tuple[torch.device, torch.Tensor]] = OrderedDict()

    def __contains__(self, slot: int) -> bool:
        return slot in self._outputs

    def __iter__(self) -> Iterator[int]:
        """The slots, least recently used first."""
        return iter(list(self._outputs))

    def put(self, slot: int, output: torch.Tensor) -> None:
        """Keep an output, which must not share its memory with others."""
        for device, limit in self.limits.items():
            if self.used[device] + output.nbytes <= limit:
                break
        if output.nbytes > limit:
            return
        while self.used[device] + output.nbytes > limit:  # the host is full
            self.pop(next(each for each, (place, _) in self._outputs.items() if place == device))
        self._outputs[slot] = device, output.to(device)
        self.used[device] += output.nbytes

    def get(self, slot: int) -> torch.Tensor | None:
        """An output, None where it is not remembered."""
        if slot not in self._outputs:
            return None
        self._outputs.move_to_end(slot)
        return self._outputs[slot][1]

    def pop(self, slot: int) -> torch.Tensor:
        """Take an output out."""
        device, output = self._outputs.pop(slot)
        self.used[device] -= output.nbytes
        return output
