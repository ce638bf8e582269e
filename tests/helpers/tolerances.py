"""How near two results must be, in one place.

The last bits of a product or a sum of floats depend on the CPU, on the kernel that a library picks for it, on how many
rows, columns and threads there are, and on a row's place in its batch. So a test asks for one of three things:

* `assert_same_bits`: of what is drawn, counted, copied, stored or chosen, and of what one process computes twice by the
  same calls with the same shapes.
* `assert_close`: of all else that is computed in floats, as batches of other sizes, one class or several, parts of an
  image, or plain loops.
* a bound of its own, with its reason: half precision, a statistic of random draws, a solver, a file that rounds.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

#: allowed differences, relative to the largest value: of arithmetic in double and in single precision
DOUBLE, SINGLE = 1e-12, 1e-5
#: of the solution of linear equations in double precision, whose condition takes digits
SOLVED = 1e-9
#: of masks rendered in single precision, as law 2 has it: each voxel is a product of a few numbers
MASKS = 1e-6


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Fails unless two tensors, arrays, numbers or lists hold the same values; NaN equals NaN."""
    torch.testing.assert_close(_tensor(actual), _tensor(expected), rtol=0, atol=0, equal_nan=True)


def assert_close(actual: Any, expected: Any, *, scale: Any = None, within: float | None = None) -> None:
    """Fails unless two results of float arithmetic are equal but for rounding.

    Args:
        actual: a tensor, an array, a number, a list of numbers, or a mapping to them.
        expected: the same, or one number for all. Two tensors must have one dtype. NaN equals NaN.
        scale: a number; the size that the tolerance is relative to; default: the largest absolute value expected. Where
            larger numbers cancel in the arithmetic, such as scores near 1 whose difference is a map, it is their size.
        within: the tolerance; default: ``SINGLE`` if one of both is of float32, else ``DOUBLE``. Python floats do not
            show that they were computed in single precision.
    """
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        actual, expected = [actual[key] for key in expected], list(expected.values())
    ours, theirs = _tensor(actual), _tensor(expected)
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert ours.dtype == theirs.dtype
    if within is None:
        within = SINGLE if torch.float32 in (ours.dtype, theirs.dtype) else DOUBLE
    ours, theirs = ours.double(), theirs.double()
    if scale is None:
        finite = theirs[theirs.isfinite()].abs()
        scale = finite.max() if len(finite) else 0
    theirs = theirs.expand_as(ours) if theirs.ndim == 0 else theirs
    torch.testing.assert_close(ours, theirs, rtol=0, atol=within * float(scale), equal_nan=True)


def _tensor(numbers: Any) -> torch.Tensor:
    """The numbers on the CPU, without what a MetaTensor knows; Python's are in double precision."""
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.as_tensor(np.array(numbers))
    return numbers.detach().cpu().as_subclass(torch.Tensor)
