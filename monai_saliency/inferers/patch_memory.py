"""The memory of patch outputs: on the device, then on the host, least recently used outputs dropped first.

Each output has a number, its *slot*. :mod:`monai_saliency.inferers.patches` runs the patches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from monai_saliency.utils.arguments import number

__all__ = ["OutputMemory", "Outputs", "PatchMemory"]


@dataclass(frozen=True)
class PatchMemory:
    """Limits of the memory of patch outputs. Beyond them the least recently used outputs are dropped and run again.

    Outputs that no mask needs any more are dropped at once. So windows, few of which share a patch's content, need
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


class Outputs:
    """The outputs of slots: remembered, or computed with the rest of their batch."""

    def __init__(
        self,
        uses: np.ndarray,
        batch_size: int,
        compute: Callable[[int], Iterator[tuple[int, torch.Tensor]]],
        memory: OutputMemory,
    ) -> None:
        self.uses = uses
        self.batch_size = batch_size
        self.compute = compute
        self.memory = memory

    def take(self, slot: int) -> torch.Tensor:
        """The output of a slot, computed if it is not remembered."""
        output = self.memory.get(slot)
        self.uses[slot] -= 1
        if output is None:
            for other, computed in self.compute(slot // self.batch_size):
                if other == slot:
                    output = computed
                if self.uses[other] and other not in self.memory:
                    self.memory.put(other, computed)
        elif not self.uses[slot]:
            self.memory.pop(slot)
        assert output is not None
        return output


class OutputMemory:
    """Outputs by slot, on the device, then on the host, then forgotten, least recently used first."""

    def __init__(self, device: torch.device, limits: PatchMemory) -> None:
        self.tiers = [_Tier(torch.device("cpu"), limits.host_bytes)]
        if device.type != "cpu":
            self.tiers.insert(0, _Tier(device, limits.device_bytes))

    def __contains__(self, slot: int) -> bool:
        return any(slot in tier.outputs for tier in self.tiers)

    def put(self, slot: int, output: torch.Tensor) -> None:
        """Keep an output, which must not share its memory with others."""
        fallen = [(slot, output)]
        for tier in self.tiers:
            fallen = [lower for upper in fallen for lower in tier.put(*upper)]

    def get(self, slot: int) -> torch.Tensor | None:
        """An output, which moves to the first tier, None where it is not remembered."""
        output = self.pop(slot)
        if output is not None:
            self.put(slot, output)
        return output

    def pop(self, slot: int) -> torch.Tensor | None:
        """Take an output out, None where it is not remembered."""
        return next((tier.pop(slot) for tier in self.tiers if slot in tier.outputs), None)

    def empty(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Take everything out, least recently used first."""
        for tier in reversed(self.tiers):
            for slot in list(tier.outputs):
                yield slot, tier.pop(slot)


class _Tier:
    """The part of a memory that lies on one device."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit
        self.used = 0
        self.outputs: OrderedDict[int, torch.Tensor] = OrderedDict()

    def put(self, slot: int, output: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Keep an output; returns the outputs that there is no more room for."""
        if output.nbytes > self.limit:
            return [(slot, output)]
        fallen = []
        while self.used + output.nbytes > self.limit:
            oldest = next(iter(self.outputs))
            fallen.append((oldest, self.pop(oldest)))
        self.outputs[slot] = output.to(self.device)
        self.used += output.nbytes
        return fallen

    def pop(self, slot: int) -> torch.Tensor:
        output = self.outputs.pop(slot)
        self.used -= output.nbytes
        return output
