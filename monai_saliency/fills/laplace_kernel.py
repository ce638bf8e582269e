"""One step towards a solution of the Laplace equation as one kernel of a GPU: by Triton, which comes with PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # in PyTorch for CPUs
    triton = tl = None

__all__ = ["gpu_kernel"]

logger = logging.getLogger(__name__)

_BLOCK = 1024


@cache
def gpu_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """``relaxed(values, right, factor, step)`` for contiguous tensors on the current GPU; None without a C compiler."""
    try:
        compiled = triton.jit(_relax)
        zeros = torch.zeros(1, 1, 2, device=device)
        _launched(compiled, zeros, None, zeros, None)
    except Exception as error:
        logger.info("InpaintFill takes about three times longer, since Triton compiles nothing here: %s", error)
        return None
    return lambda *given: _launched(compiled, *given)


def _launched(compiled: Any, values: Tensor, right: Tensor | None, factor: Tensor, step: float | None) -> Tensor:
    depth, height, width = (1, 1, *values.shape[2:])[-3:]
    rows, factors = (each.shape[0] * each.shape[1] for each in (values, factor))
    keep, scale = (0.0, 1.0) if step is None else (1.0, step)
    arrays = (out := torch.empty_like(values)), values, values if right is None else right, factor
    grid = -(-depth * height * width // _BLOCK), rows
    compiled[grid](*arrays, depth, height, width, rows // factors, keep, scale, right is not None, _BLOCK)
    return out


def _relax(  # type: ignore[no-untyped-def]
    out, values, right, factor, depth, height, width, share, keep, scale, has_right: tl.constexpr, block: tl.constexpr
):
    """A block of voxels of one channel of one image. ``share`` channels in a row have the same factor."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * block + tl.arange(0, block)
    x, y, z = at % width, at // width % height, at // (width * height)
    size = depth * height * width
    inside = at < size
    here = row * size + at
    own = tl.load(values + here, inside, 0)
    found = tl.load(right + here, inside, 0) if has_right else own * 0
    found += tl.load(values + here - 1, inside & (x > 0), own) - own
    found += tl.load(values + here + 1, inside & (x < width - 1), own) - own
    found += tl.load(values + here - width, inside & (y > 0), own) - own
    found += tl.load(values + here + width, inside & (y < height - 1), own) - own
    found += tl.load(values + here - width * height, inside & (z > 0), own) - own
    found += tl.load(values + here + width * height, inside & (z < depth - 1), own) - own
    weight = tl.load(factor + row // share * size + at, inside, 0)
    tl.store(out + here, (keep * own + scale * weight * found).to(own.dtype), inside)
