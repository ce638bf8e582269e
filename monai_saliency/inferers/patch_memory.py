"""The memory of patch outputs: on the device, then on the host, least recently used outputs dropped first.

Each output has a number, its *slot*. :mod:`monai_saliency.inferers.patches` runs the patches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monai_saliency.utils.arguments import number

__all__ = ["OutputMemory", "Outputs", "PatchMemory", "Row", "owned", "stacked"]


@dataclass(frozen=True)
class PatchMemory:
    """Limits of the memory of patch outputs. Beyond them the least recently used outputs are dropped and run again.

    Outputs that no mask needs any more are dropped at once. So windows, few of which share a patch's content, need
    little more than the outputs of the unperturbed image. The limits count the outputs themselves. The C library's
    allocator may keep gaps beside them; ``MALLOC_MMAP_THRESHOLD_=262144`` in the environment makes it return them.

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


@dataclass(frozen=True)
class Row:
    """The output of one patch, beside others of its batch.

    Attributes:
        block: ``(n, C, *box)``, what is remembered of a batch of patches.
        place: the patch's row.
    """

    block: torch.Tensor
    place: int

    @property
    def values(self) -> torch.Tensor:
        """``(C, *box)``."""
        return self.block[self.place]

    @property
    def nbytes(self) -> int:
        """What the output would need alone."""
        return self.block.nbytes // len(self.block)

    def to(self, device: torch.device) -> Row:
        """The row on a device, alone where it is on another one."""
        return self if self.block.device == device else Row(self.values.to(device)[None], 0)

    def alone(self) -> Row:
        """A copy that does not keep the others in memory."""
        return self if len(self.block) == 1 else Row(self.values.clone()[None], 0)


def stacked(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """The outputs ``(n, C, *box)`` of some patches."""
    return torch.stack([row.values.to(device) for row in rows])


class Outputs:
    """The outputs of slots: remembered, or computed with the rest of their batch.

    Args:
        uses: how many times each slot will still be taken; outputs of other slots are not remembered.
        batch_size: slots in a batch.
        compute: runs the batch of a number and gives its slots with their outputs.
        memory: holds outputs.
    """

    def __init__(
        self,
        uses: np.ndarray,
        batch_size: int,
        compute: Callable[[int], Iterator[tuple[int, Any]]],
        memory: OutputMemory,
    ) -> None:
        self.uses = uses
        self.batch_size = batch_size
        self.compute = compute
        self.memory = memory

    def take(self, slot: int) -> Any:
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
        return output


class OutputMemory:
    """Outputs by slot, on the device, then on the host, then forgotten, least recently used first."""

    def __init__(self, device: torch.device, limits: PatchMemory) -> None:
        self.device, self.limits = device, limits
        self.tiers = [_Tier(torch.device("cpu"), limits.host_bytes)]
        if device.type != "cpu":
            self.tiers.insert(0, _Tier(device, limits.device_bytes))

    def __contains__(self, slot: int) -> bool:
        return any(slot in tier.outputs for tier in self.tiers)

    def put(self, slot: int, output: Any) -> None:
        fallen = [(slot, output)]
        for tier in self.tiers:
            fallen = [lower for upper in fallen for lower in tier.put(*upper)]

    def get(self, slot: int) -> Any | None:
        """An output, which moves to the first tier, None where it is not remembered."""
        if slot in self.tiers[0].outputs:
            self.tiers[0].outputs.move_to_end(slot)
            return self.tiers[0].outputs[slot]
        output = self.pop(slot)
        if output is not None:
            self.put(slot, output)
        return output

    def pop(self, slot: int) -> Any | None:
        """Take an output out, None where it is not remembered."""
        return next((tier.pop(slot) for tier in self.tiers if slot in tier.outputs), None)

    def empty(self) -> Iterator[tuple[int, Any]]:
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
        self.outputs: OrderedDict[int, Any] = OrderedDict()
        self._rows: dict[int, int] = {}

    def put(self, slot: int, output: Any) -> list[tuple[int, Any]]:
        """Keep an output; returns the outputs that there is no more room for."""
        if output.nbytes > self.limit:
            return [(slot, output)]
        output = output.to(self.device)
        # Rows of one batch share their memory, which is free when the last one goes. Where there is no room for all of
        # them, each has its own.
        block, size = _held(output)
        if size > output.nbytes and block not in self._rows and self.used + size > self.limit:
            output = output.alone()
            block, size = _held(output)
        fallen = []
        while block not in self._rows and self.used + size > self.limit:
            oldest = next(iter(self.outputs))
            fallen.append((oldest, self.pop(oldest)))
        self.outputs[slot] = output
        self.used += 0 if block in self._rows else size
        self._rows[block] = self._rows.get(block, 0) + 1
        return fallen

    def pop(self, slot: int) -> Any:
        output = self.outputs.pop(slot)
        block, size = _held(output)
        self._rows[block] -= 1
        if not self._rows[block]:
            del self._rows[block]
            self.used -= size
        return output


def _held(output: Any) -> tuple[int, int]:
    """What an output keeps in memory, and how many bytes that is."""
    return (id(output.block), output.block.nbytes) if isinstance(output, Row) else (id(output), output.nbytes)


def owned(part: torch.Tensor) -> torch.Tensor:
    """A part of a tensor that does not keep the rest in memory."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
