"""Whether two outputs of a network are the same but for rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monai_saliency.utils.tensors import plain

__all__ = ["Difference", "Excerpt", "difference", "excerpt"]

#: values of a tensor that are compared at most, 4 MB in float32
_VALUES = 2**20
#: share of the whole numbers that may differ: labels flip where two of them are equally likely
_FLIPS = 1e-3

#: the path, the shape and some values of each tensor of an output
Excerpt = dict[tuple[Any, ...], tuple[torch.Size, torch.Tensor]]


@dataclass(frozen=True)
class Difference:
    """How far two outputs differ, at the tensor where it matters most.

    Attributes:
        found: the largest difference, relative to the largest magnitude of the tensor, or of its channel. Infinity
            where only one is NaN.
        allowed: how much of it is rounding.
    """

    found: float
    allowed: float

    @property
    def beyond_rounding(self) -> bool:
        """Whether the outputs differ by more than rounding."""
        return not self.found <= self.allowed

    def __str__(self) -> str:
        return f"outputs differ by {self.found:.2g} of their largest value, rounding explains {self.allowed:.0e}"


def excerpt(output: Any) -> Excerpt:
    """Copy what is compared of an output: tensors with up to 2^20 values whole, of larger ones every k-th value.

    Rows that depend on each other do so nearly everywhere, so that an excerpt shows it, at no cost in memory.

    Args:
        output: a tensor, or dictionaries, tuples and lists of tensors. Other values are left out.
    """
    return {path: (tensor.shape, _values(tensor)) for path, tensor in _tensors(output)}


def difference(
    one: Excerpt, other: Excerpt, tolerance: Callable[[torch.dtype], float], beside: Excerpt | None = None
) -> Difference | None:
    """How far two outputs differ.

    Each channel of a volume ``(B, C, *spatial)`` is measured by its own magnitude, but not by less than 1, where the
    volume has such values: one that holds -1e9 throughout, as for a class that is left out, says nothing of the others.

    Args:
        one: an excerpt of an output.
        other: an excerpt of another output of the same network.
        tolerance: the relative difference that is rounding, by the type of a tensor.
        beside: an output whose magnitude counts too: what a network makes of nothing may be rounding of that.

    Returns:
        the difference at the tensor where it is largest beside its tolerance; None where the outputs have other parts
        or shapes, or no tensors, so that they cannot be compared.
    """
    if not one or {path: shape for path, (shape, _) in one.items()} != {p: shape for p, (shape, _) in other.items()}:
        return None
    each = []
    for path, (shape, values) in one.items():
        third = beside[path][1] if beside and path in beside and beside[path][0] == shape else None
        others = other[path][1].to(values.device)
        if values.is_floating_point() and others.is_floating_point():
            lowest = max(values.dtype, others.dtype, key=tolerance)
            each.append(Difference(_relative(values, others, third, shape), tolerance(lowest)))
        else:
            flips = (values != others).float().mean().item() if values.numel() else 0.0
            each.append(Difference(flips, _FLIPS))
    return max(each, key=lambda it: it.found / it.allowed)


def _tensors(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(output, torch.Tensor):
        yield path, plain(output)
    elif isinstance(output, (Mapping, tuple, list)):
        for key, part in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _tensors(part, (*path, key))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Some values of a tensor, as a copy: networks may write their next output to the same memory."""
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1)[:: _step(tensor.shape)].clone()


def _step(shape: Sequence[int]) -> int:
    """Every how many-th value of a tensor is compared."""
    step = -(-math.prod(shape) // _VALUES)
    # So that not all values come from one column.
    while step > 1 and math.gcd(step, shape[-1]) > 1:
        step += 1
    return max(step, 1)


def _relative(one: torch.Tensor, other: torch.Tensor, third: torch.Tensor | None, shape: Sequence[int]) -> float:
    """The largest difference relative to the largest finite magnitude; NaN and infinity are equal to themselves."""
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    one, other = one.to(dtype), other.to(dtype)
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0.0
    gaps = torch.where(same, 0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    sizes = torch.maximum(_finite(one), _finite(other))
    if third is not None:
        sizes = torch.maximum(sizes, _finite(third.to(sizes)))
    channels = _channels(shape, len(one)).to(one.device)
    gap, scale = (each.new_zeros(int(channels.max()) + 1) for each in (gaps, sizes))
    gap.scatter_reduce_(0, channels, gaps, "amax")
    scale.scatter_reduce_(0, channels, sizes, "amax")
    scale = scale.clamp(min=min(1.0, float(sizes.max())))
    return float(torch.where(scale > 0, gap / scale, math.inf)[gap > 0].max())


def _channels(shape: Sequence[int], count: int) -> torch.Tensor:
    """The channel of each value of an excerpt of a volume ``(B, C, *spatial)``; 0 for those of anything else."""
    step = _step(shape)
    if len(shape) < 4 or count != -(-math.prod(shape) // step):
        return torch.zeros(count, dtype=torch.long)
    return torch.arange(count).mul_(step).div_(math.prod(shape[2:]), rounding_mode="floor").remainder_(shape[1])


def _finite(values: torch.Tensor) -> torch.Tensor:
    """The magnitudes of values, 0 where these are not finite."""
    return values.abs().nan_to_num(nan=0.0, posinf=0.0)
