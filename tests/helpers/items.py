"""Preprocessed cases, compared."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch


def assert_same(a: Any, b: Any) -> None:
    """Equal to the bit, in type, order of keys, and memory's order too."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert len(a) == len(b)
        for (key_a, value_a), (key_b, value_b) in zip(a.items(), b.items(), strict=True):
            assert_same(key_a, key_b)
            assert_same(value_a, value_b)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for value_a, value_b in zip(a, b, strict=True):
            assert_same(value_a, value_b)
    elif isinstance(a, torch.Tensor):
        plain_a, plain_b = a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        assert (
            plain_a.contiguous().reshape(-1).view(torch.uint8).equal(plain_b.contiguous().reshape(-1).view(torch.uint8))
        )
        assert_same(a.__dict__, b.__dict__)
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert a.dtype.byteorder == b.dtype.byteorder
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    else:
        assert a == b
