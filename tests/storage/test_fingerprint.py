from __future__ import annotations

import copy
import functools
import importlib
import math
import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import fork_server
from helpers.paths import ROOT, TESTS
from monai.data import MetaTensor
from monai.transforms import (
    Affined,
    Compose,
    CropForegroundd,
    DivisiblePadd,
    EnsureTyped,
    Flipd,
    GaussianSmoothd,
    HistogramNormalized,
    Lambdad,
    LoadImaged,
    NormalizeIntensityd,
    Orientationd,
    RandFlipd,
    Resized,
    ResizeWithPadOrCropd,
    Rotated,
    ScaleIntensityRanged,
    ScaleIntensityRangePercentilesd,
    Spacingd,
    ThresholdIntensityd,
    Transform,
    Zoomd,
)
from monai.utils import GridSampleMode

from monai_saliency.storage.fingerprint import Unfingerprintable, fingerprint, library_versions


def double(x: Any) -> Any:
    return 2 * x


class Settings(Transform):
    """Holds whatever it is given."""

    __slots__ = ("__hidden",)

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)
        self.__hidden = values.get("hidden")

    def __call__(self, data: Any) -> Any:
        return data


DISTINCT = [
    *(0, 1, -1, True, False, None, 0.0, -0.0, 1.0, math.inf, math.nan, "", "1", "None", b"", b"1", 1j),
    *(
        (),
        [],
        {},
        set(),
        (1,),
        [1],
        {1: 2},
        {2: 1},
        {"1": 2},
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        {1},
        ["ab", "c"],
        ["a", "bc"],
        [["a"], "b"],
        [["a", "b"]],
    ),
    *(Path("a"), "a", torch.float32, torch.float64, torch.device("cpu"), "cpu", np.dtype("f4"), np.float32, float),
    *(np.zeros(2), np.zeros(2, "f4"), np.zeros((2, 1)), np.zeros((1, 2)), np.array([0, 1.0]), np.float64(0)),
    *(torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1), torch.tensor([0.0, -0.0])),
    *(GridSampleMode.NEAREST, GridSampleMode.BILINEAR, "nearest", math, np),
    *(double, np.abs, np.clip, torch.abs, torch.relu, torch.nn.functional.pad, len, abs, math.sin),
    *(functools.partial(double), functools.partial(np.clip, a_min=0), functools.partial(np.clip, a_min=1)),
    *(Settings(), Settings(a=1), Settings(a=2), Settings(b=1), Settings(hidden=1), Settings(a=Settings()), Settings),
    *(Flipd("image", 0), Flipd("image", 1), Flipd("label", 0), Flipd("image", [0, 1]), Flipd("image", lazy=True)),
    *(Spacingd("image", (1, 1, 1)), Spacingd("image", (1, 1, 2)), Spacingd("image", (1, 1, 1), mode="nearest")),
    ScaleIntensityRanged("image", 0, 1),
    ScaleIntensityRanged("image", 0, 1, clip=True),
    *(LoadImaged("image"), LoadImaged("image", dtype=np.float64), LoadImaged("image", reader="NibabelReader")),
    LoadImaged("image", reader="NibabelReader", as_closest_canonical=True),
    *(EnsureTyped("image"), EnsureTyped("image", dtype=torch.float64), EnsureTyped("image", track_meta=False)),
    *(Lambdad("image", np.abs), Lambdad("image", double), Lambdad("image", functools.partial(np.clip, a_min=0))),
    *(Compose([Flipd("image", 0)]), Compose([Flipd("image", 0)], lazy=True), Compose([Compose([Flipd("image", 0)])])),
]


def test_all_differ() -> None:
    seen: dict[str, Any] = {}
    for value in DISTINCT:
        assert seen.setdefault(fingerprint(value), value) is value


def test_another_process_agrees() -> None:
    """Under another hash seed, with other memory addresses."""
    code = (
        "import test_fingerprint as t, random; junk = [object() for _ in range(random.randrange(10**5))]\n"
        "print('\\n'.join(t.fingerprint(value) for value in t.DISTINCT))"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{TESTS}:{ROOT}", "PYTHONHASHSEED": "77"}
    found = fork_server.run(["-c", code], env=environment)
    assert found.returncode == 0, found.stderr
    # The module is imported as `test_fingerprint` here too.
    assert found.stdout.split() == [fingerprint(value) for value in DISTINCT]


def test_equal_values_agree() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"a": 1} | {"b": 2})
    assert fingerprint(Settings(a=1, b=2)) == fingerprint(Settings(b=2, a=1))
    assert fingerprint({"x", "y", "z"}) == fingerprint({"z", "x", "y"})
    assert fingerprint(np.arange(6).reshape(2, 3)) == fingerprint(np.asfortranarray(np.arange(6).reshape(2, 3)))
    assert fingerprint(Spacingd("image", (1, 1, 1))) == fingerprint(Spacingd("image", (1, 1, 1)))
    image = torch.rand(1, 3, 4)
    used = Flipd("image", 0)
    before = fingerprint(used)
    used({"image": image})
    assert fingerprint(used) == before


def test_a_reader_that_has_read_agrees(tmp_path: Path) -> None:
    """Where the file that it read last counted, no second dataset with the same transforms would find the cache."""
    nib.save(nib.Nifti1Image(np.zeros((2, 3, 4), np.float32), np.eye(4)), tmp_path / "a.nii")
    load = LoadImaged("image")
    load({"image": str(tmp_path / "a.nii")})
    assert fingerprint(load) == fingerprint(LoadImaged("image"))


USED: dict[str, Any] = {
    "crop": lambda: CropForegroundd("image", source_key="image"),
    "crop lazily": lambda: CropForegroundd("image", source_key="image", lazy=True),
    "pad": lambda: ResizeWithPadOrCropd("image", spatial_size=(9, 2, 3)),
    "space": lambda: Spacingd("image", (2, 1, 1)),
    "turn": lambda: Orientationd("image", axcodes="LPS", labels=None),
    "rotate": lambda: Rotated("image", 0.3),
    "zoom": lambda: Zoomd("image", 1.5),
    "resize": lambda: Resized("image", (4, 4, 4)),
    "affine": lambda: Affined("image", rotate_params=(0.1, 0, 0)),
    "divide": lambda: DivisiblePadd("image", 4),
    "normalise": lambda: NormalizeIntensityd("image", nonzero=True),
    "percentiles": lambda: ScaleIntensityRangePercentilesd("image", 1, 99, 0, 1),
    "smooth": lambda: GaussianSmoothd("image", 1.0),
    "histogram": lambda: HistogramNormalized("image"),
    "threshold": lambda: ThresholdIntensityd("image", 0.5),
}


@pytest.mark.parametrize("name", USED)
def test_a_transform_that_was_used_agrees(name: str) -> None:
    """What changes itself when it runs is not cached, so MONAI's own must not seem to."""
    transform = USED[name]()
    before = fingerprint(transform)
    for shape in ((1, 5, 6, 7), (1, 8, 4, 5)):
        transform({"image": MetaTensor(torch.rand(shape), torch.eye(4))})
        assert fingerprint(transform) == before


@pytest.mark.parametrize("handle", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_was_copied_agrees(handle: Any) -> None:
    """Python notes on a class that its objects were copied or pickled."""
    if "__slotnames__" in vars(Settings):
        del Settings.__slotnames__
    before = fingerprint(Settings(a=1))
    handle(Settings())
    assert "__slotnames__" in vars(Settings)
    assert fingerprint(Settings(a=1)) == before


def test_cycles_end() -> None:
    one, two = Settings(), Settings()
    one.other, one.name, two.other, two.name = two, 1, one, 2  # type: ignore[attr-defined]
    assert fingerprint(one) != fingerprint(two)


def _local() -> Any:
    def inner(x: Any) -> Any:
        return x

    class Inner(Transform):
        def __call__(self, data: Any) -> Any:
            return data

    return inner, Inner()


module_lambda = lambda x: x  # noqa: E731


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda x: x, "a lambda"),
        (module_lambda, "a lambda"),
        (_local()[0], "a local function"),
        (_local()[1], "the local class .*Inner"),
        (functools.partial(lambda x: x), "a lambda"),
        (Lambdad("image", lambda x: x), "a lambda"),
        (Compose([Lambdad("image", lambda x: x)]), "a lambda"),
        (object(), "object, which shows no state"),
        (iter([1]), "list_iterator"),
        (torch.Generator(), "Generator"),
        (np.random.RandomState(0), "RandomState"),
        (np.random.normal, "RandomState"),
        (random.random, "Random"),
        (torch.jit.trace(torch.nn.Linear(1, 1), torch.zeros(1)), "holds more|shows no state|object of"),
        (Settings(x=RandFlipd("image")), "the random transform .*RandFlipd"),
        (torch.eye(2).to_sparse(), "a tensor of layout"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_told(value: Any, why: str) -> None:
    with pytest.raises(Unfingerprintable, match=why):
        fingerprint(value)


def test_changed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms of one's own have no version: the file that defines them, or a base, counts."""
    monkeypatch.syspath_prepend(tmp_path)
    prints = []
    (tmp_path / "ms_code.py").write_text("from ms_base import *\nclass Mine(Base): pass\n")
    for number in range(2):
        (tmp_path / "ms_base.py").write_text(f"class Base:\n    factor = {number}\n" + "#" * number)
        for name in ("ms_base", "ms_code"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        prints.append(fingerprint(importlib.import_module("ms_code").Mine()))
    assert prints[0] != prints[1]


def test_versions() -> None:
    assert set(library_versions()) == {"monai_saliency", "monai", "torch", "numpy", "nibabel"}
    assert library_versions()["torch"] == torch.__version__
