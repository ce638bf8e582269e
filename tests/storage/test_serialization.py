from __future__ import annotations

import json
import math
import pickle
import struct
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from helpers.items import assert_same
from monai.data import MetaTensor
from monai.utils import GridSampleMode, GridSamplePadMode, InterpolateMode, MetaKeys, SpaceKeys, TraceKeys

from monai_saliency.storage.serialization import DamagedEntry, NotStorable, decode, encode

TENSORS = [
    torch.arange(-3, 5, dtype=torch.float32).reshape(2, 4),
    torch.tensor(-1.5, dtype=torch.float64),
    torch.tensor([1.0, float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
    torch.tensor([1.0, 2.0], dtype=torch.float16),
    torch.tensor([True, False, True]),
    torch.tensor([[1], [-7]], dtype=torch.int64),
    torch.tensor([1, 255], dtype=torch.uint8),
    torch.tensor([1, -2], dtype=torch.int16),
    torch.tensor([1 + 2j, -3j]),
    torch.tensor([1 + 2j, -3j]).conj(),
    torch.tensor([0.5, 1.0]).to(torch.float8_e4m3fn),
    torch.empty(0),
    torch.empty(2, 0, 3, dtype=torch.int32),
    torch.rand(3, 4, 5).permute(2, 0, 1),
    torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.rand(6, 6)[1::2, ::3],
    torch.rand(3, 1).expand(3, 4),
]


@pytest.mark.parametrize("value", TENSORS, ids=lambda value: f"{value.dtype}-{tuple(value.shape)}")
def test_tensors(value: torch.Tensor) -> None:
    again = decode(encode(value, "k"), "k")
    assert_same(again, value.resolve_conj())
    dense = (value.numel() == math.prod(value.shape) and value.is_contiguous()) or value.ndim < 2
    if dense or value.shape in {(5, 3, 4), (1, 3, 4, 5)}:
        assert again.stride() == value.stride()


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            False,
            0,
            -(10**30),
            1.5,
            -0.0,
            math.nan,
            math.inf,
            -math.inf,
            5e-324,
            "",
            "ü\udc80\0",
            b"\x00\xff",
        ),
        *(2 + 3j, (), [], {}, (1, (2, [3, {"a": (4,)}])), {1: "a", None: 2, (1, 2): 3, 2.5: 5, False: 4}),
        {"kind": "enum", "of": [1]},
        torch.Size([1, 2]),
        *(torch.bfloat16, torch.device("cpu"), torch.device("cuda:1"), np.dtype("<f4"), np.dtype(">i2"), np.float32),
        *(Path("a/b"), PurePosixPath("/x")),
        *(InterpolateMode.BILINEAR, GridSampleMode.NEAREST, GridSamplePadMode.BORDER, TraceKeys.NONE, SpaceKeys.RAS),
        {TraceKeys.ID: TraceKeys.NONE, MetaKeys.AFFINE: 1},
        *(
            np.float64(math.nan),
            np.int8(-3),
            np.bool_(True),
            np.str_("x"),
            np.complex64(1j),
            np.datetime64("2020-01-01"),
        ),
        np.array(348, dtype=">i4"),
        np.array(["a", "bc"]),
        np.arange(24, dtype=np.float16).reshape(2, 3, 4),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::-2],
        np.zeros((0, 3)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values(value: Any) -> None:
    again = decode(encode({"x": value, "y": [value]}, "k"), "k")
    assert_same(again, {"x": value, "y": [value]})
    if isinstance(value, np.ndarray):
        assert again["x"].flags.writeable
        assert again["x"].flags.fnc == value.flags.fnc


def test_metatensor() -> None:
    image = MetaTensor(
        torch.rand(1, 2, 3), affine=torch.eye(4, dtype=torch.float64) * 2, meta={"filename_or_obj": "a", "n": [1, {}]}
    )
    image.applied_operations = [{TraceKeys.CLASS_NAME: "Spacing", TraceKeys.EXTRA_INFO: {"mode": InterpolateMode.AREA}}]
    image.is_batch = True
    again = decode(encode([image, image.meta], "k"), "k")
    assert_same(again, [image, image.meta])
    again[0].meta["n"][1]["new"] = 1
    again[0].zero_()
    assert image.meta["n"] == [1, {}]
    assert image.any()


def test_no_memory_is_shared() -> None:
    """Edits of what was decoded change neither the bytes nor what is decoded next."""
    data = encode([torch.zeros(4), np.zeros(4), {"a": [0]}], "k")
    before = bytes(data)
    tensor, array, rest = decode(data, "k", trusted=True)
    tensor += 1
    array += 1
    rest["a"].append(1)
    assert bytes(data) == before


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [object()]}, r"item\['a'\]\[0\] is of type builtins.object"),
        ({1, 2}, "item is of type builtins.set"),
        (np.array([object()]), "item is an array of object"),
        (np.zeros(2, dtype=[("a", "<f4")]), "item is an array of"),
        (torch.zeros(2, requires_grad=True), "item is a tensor that is sparse, quantized or needs a gradient"),
        (torch.eye(2).to_sparse(), "item is a tensor that is sparse"),
        ({"f": len}, r"item\['f'\] is of type builtins.builtin_function_or_method"),
        (type("Text", (str,), {})("x"), "item is of type .*Text"),
        (pytest.ExitCode.OK, "item is of type .*ExitCode"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_not_storable(value: Any, where: str) -> None:
    with pytest.raises(NotStorable, match=where):
        encode(value, "k")


def test_an_item_that_holds_itself() -> None:
    item: dict[str, Any] = {}
    item["self"] = item
    with pytest.raises(NotStorable, match="holds itself"):
        encode(item, "k")


class TestDamage:
    DATA = bytes(encode({"x": torch.arange(50.0), "name": "a"}, "key"))

    def test_every_flipped_bit(self) -> None:
        for place in range(len(self.DATA)):
            damaged = bytearray(self.DATA)
            damaged[place] ^= 1 << (place % 8)
            with pytest.raises(DamagedEntry):
                decode(damaged, "key")

    def test_every_truncation(self) -> None:
        for length in range(len(self.DATA)):
            with pytest.raises(DamagedEntry):
                decode(self.DATA[:length], "key")

    @pytest.mark.parametrize(
        "data", [b"", b"\0" * 500, DATA + b"\0", pickle.dumps([1, 2, 3]), b"x" * 100], ids=lambda data: repr(data[:8])
    )
    def test_other_bytes(self, data: bytes) -> None:
        with pytest.raises(DamagedEntry):
            decode(data, "key")

    def test_another_key(self) -> None:
        with pytest.raises(DamagedEntry, match="another key"):
            decode(self.DATA, "other")


def forged(node: Any) -> bytes:
    """An entry with a right checksum and a header of one's own."""
    header = json.dumps({"key": "k", "item": node}).encode()
    body = struct.pack("<Q", len(header)) + header + b"\0" * 64
    return b"MSALITM1" + struct.pack("<I", zlib.crc32(body, (len(body) + 12) & 0xFFFFFFFF)) + body


class TestForged:
    """Whoever knows the format can still only make values, and reach nothing outside."""

    def test_the_forger_works(self) -> None:
        assert decode(forged({"kind": "tuple", "of": [1]}), "k") == (1,)

    @pytest.mark.parametrize(
        "node",
        [
            {"kind": "enum", "of": ["os", "system", "x"]},
            {"kind": "enum", "of": ["signal", "Signals", "SIGINT"]},
            {"kind": "enum", "of": ["monai.utils.enums", "Enum", "x"]},
            {"kind": "enum", "of": ["monai.utils.module", "optional_import", "x"]},
            {"kind": "enum", "of": ["monai.not.there", "X", "x"]},
            {"kind": "dtype", "of": "load"},
            {"kind": "numpy type", "of": "load"},
            {"kind": "path", "of": ["os", "x"]},
            {"kind": "pickle", "of": "x"},
            {"kind": "array", "dtype": "|O", "shape": [1], "fortran": False, "at": [0, 8]},
            {"kind": "array", "dtype": "<f4", "shape": [100], "fortran": False, "at": [0, 400]},
            {"kind": "tensor", "dtype": "float32", "shape": [10**6], "strides": [1], "device": "cpu", "at": [0, 8]},
            {"kind": "tensor", "dtype": "float32", "shape": [2], "strides": [-1], "device": "cpu", "at": [0, 8]},
            {"kind": "dict", "of": [[[1], 2]]},
            {},
        ],
        ids=str,
    )
    def test_refused(self, node: Any) -> None:
        with pytest.raises(DamagedEntry):
            decode(forged(node), "k")
