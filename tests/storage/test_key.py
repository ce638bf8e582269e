"""Equal values have one key in every process, other values have another one, and what is unknown has none."""

import functools
import importlib
import itertools
import math
import os
import random
import sys
import types
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import commands
from helpers.paths import ROOT, TESTS
from monai import transforms as mt
from monai.data import MetaTensor
from monai.inferers import SlidingWindowInferer
from monai.utils import GridSampleMode

import monai_saliency as ms
from monai_saliency.storage import key
from monai_saliency.storage.key import Unfingerprintable, checksum_of, fingerprint, input_files


def double(x: Any) -> Any:
    return 2 * x


class Settings(mt.Transform):
    """Holds whatever it is given."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __call__(self, data: Any) -> Any:
        return data


PLAIN = [
    *(0, 1, -1, True, False, None, 0.0, -0.0, 1.0, math.inf, math.nan, "", "1", "None", b"", b"1", 1j),
    *((), [], {}, set(), (1,), [1], {1: 2}, {2: 1}, {"1": 2}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {1}),
    *(["ab", "c"], ["a", "bc"], [["a"], "b"], [["a", "b"]], range(3), slice(3)),
    *(Path("a"), "a", torch.float32, torch.float64, "cpu", np.dtype("f4"), np.float32, float),
    *(GridSampleMode.NEAREST, GridSampleMode.BILINEAR, "nearest", Counter("ab"), OrderedDict(a=1)),
    *(types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
]
ARRAYS = [
    *(np.zeros(2), np.zeros(2, "f4"), np.zeros((2, 1)), np.zeros((1, 2)), np.array([0, 1.0]), np.float64(0)),
    *(torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1), torch.tensor([0.0, -0.0])),
]
CODE = [
    *(double, np.abs, np.clip, torch.abs, torch.relu, torch.nn.functional.pad, len, abs, math.sin, Settings),
    *(functools.partial(double), functools.partial(np.clip, a_min=0), functools.partial(np.clip, a_min=1)),
]
OBJECTS = [
    *(Settings(), Settings(a=1), Settings(a=2), Settings(b=1), Settings(a=Settings())),
    *(mt.Flipd("image", 0), mt.Flipd("image", 1), mt.Flipd("label", 0)),
    *(mt.Flipd("image", [0, 1]), mt.Flipd("image", lazy=True)),
    *(mt.Spacingd("image", (1, 1, 1)), mt.Spacingd("image", (1, 1, 2))),
    mt.Spacingd("image", (1, 1, 1), mode="nearest"),
    *(mt.ScaleIntensityRanged("image", 0, 1), mt.ScaleIntensityRanged("image", 0, 1, clip=True)),
    *(mt.LoadImaged("image"), mt.LoadImaged("image", dtype=np.float64), mt.LoadImaged("image", reader="NibabelReader")),
    mt.LoadImaged("image", reader="NibabelReader", as_closest_canonical=True),
    *(mt.EnsureTyped("image"), mt.EnsureTyped("image", dtype=torch.float64), mt.EnsureTyped("image", track_meta=False)),
    *(mt.Lambdad("image", np.abs), mt.Lambdad("image", double)),
    mt.Lambdad("image", functools.partial(np.clip, a_min=0)),
    *(mt.Compose([mt.Flipd("image", 0)]), mt.Compose([mt.Flipd("image", 0)], lazy=True)),
    mt.Compose([mt.Compose([mt.Flipd("image", 0)])]),
    *(ms.rise(10, seed=seed, target=ms.ClassScore([1], "none")).masks for seed in range(2)),
    *(ms.ClassScore([1], "none"), ms.ClassScore([0], "none"), ms.BlurFill(1.0), ms.BlurFill(2.0), ms.MeanFill()),
    *(SlidingWindowInferer((4, 4)), SlidingWindowInferer((4, 4), overlap=0.5)),
]
DISTINCT = [*PLAIN, *ARRAYS, *CODE, *OBJECTS]


def test_other_values_have_other_keys() -> None:
    seen: dict[str, Any] = {}
    for value in DISTINCT:
        assert seen.setdefault(fingerprint(value), value) is value


@pytest.mark.slow
def test_another_process_agrees() -> None:
    """Under another hash seed, with other memory addresses; without packages that MONAI takes seconds to import."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['ignite', 'matplotlib', 'mlflow', 'transformers']))\n"
        "import test_key as t, random; junk = [object() for _ in range(random.randrange(10**5))]\n"
        "print('\\n'.join(t.fingerprint(value) for value in t.DISTINCT))"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{TESTS}:{ROOT}", "PYTHONHASHSEED": "77"}
    found = commands.run(["-c", code], env=environment)
    assert found.returncode == 0, found.stderr
    # The module is imported as `test_key` here too.
    assert found.stdout.split() == [fingerprint(value) for value in DISTINCT]


def test_equal_values_agree() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"a": 1} | {"b": 2})
    assert fingerprint(Settings(a=1, b=2)) == fingerprint(Settings(b=2, a=1))
    assert fingerprint({"x", "y", "z"}) == fingerprint({"z", "x", "y"})
    assert fingerprint(np.arange(6).reshape(2, 3)) == fingerprint(np.asfortranarray(np.arange(6).reshape(2, 3)))
    assert fingerprint(mt.Spacingd("image", (1, 1, 1))) == fingerprint(mt.Spacingd("image", (1, 1, 1)))
    placed = SlidingWindowInferer((4, 4), device="cpu", sw_device="cpu", progress=True)
    assert fingerprint(placed) == fingerprint(SlidingWindowInferer((4, 4)))


USED: dict[str, Any] = {
    "crop": lambda: mt.CropForegroundd("image", source_key="image"),
    "space": lambda: mt.Spacingd("image", (2, 1, 1)),
    "turn": lambda: mt.Orientationd("image", axcodes="LPS", labels=None),
    "normalise": lambda: mt.NormalizeIntensityd("image", nonzero=True),
}


def test_a_transform_that_was_used_agrees(tmp_path: Path) -> None:
    """A transform that changes itself when it runs is not cached, so MONAI's own must not seem to."""
    for name, make in USED.items():
        transform = make()
        before = fingerprint(transform)
        transform({"image": MetaTensor(torch.rand(1, 5, 6, 7), torch.eye(4))})
        assert fingerprint(transform) == before, name
    nib.save(nib.Nifti1Image(np.zeros((2, 3, 4), np.float32), np.eye(4)), tmp_path / "a.nii")
    load = mt.LoadImaged("image")
    load({"image": str(tmp_path / "a.nii")})
    assert fingerprint(load) == fingerprint(mt.LoadImaged("image"))


def _local() -> Any:
    def inner(x: Any) -> Any:
        return x

    class Inner(mt.Transform):
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
        (mt.Compose([mt.Lambdad("image", lambda x: x)]), "a lambda"),
        (open(os.devnull), "TextIOWrapper, which holds more"),  # noqa: SIM115
        (torch.Generator(), "Generator"),
        (np.random.RandomState(0), "RandomState"),
        (np.random.normal, "RandomState|the random function normal"),  # the second in numpy 1
        (random.random, "the random function random"),
        (Settings(x=mt.RandFlipd("image")), "the random transform .*RandFlipd"),
        (torch.eye(2).to_sparse(), "a tensor of layout"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_identified(value: Any, why: str) -> None:
    with pytest.raises(Unfingerprintable, match=why):
        fingerprint(value)


def test_an_edited_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's code has no version: the file that defines a class or a function, or a base, counts. A file that is
    newer than the process may not be what runs.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(key, "_BEGUN", math.inf)
    (tmp_path / "ms_code.py").write_text("from ms_base import *\nclass Mine(Base): pass\n")
    found: list[str] = []
    for factor in (0, 0, 1):
        (tmp_path / "ms_base.py").write_text(f"class Base:\n    factor = {factor}\ndef step(x):\n    return {factor}\n")
        for name in ("ms_base", "ms_code"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        module = importlib.import_module("ms_code")
        found.append(fingerprint([module.Mine(), module.step]))
    assert found[0] == found[1] != found[2]
    monkeypatch.setattr(key, "_BEGUN", (tmp_path / "ms_base.py").stat().st_mtime - 1)
    key._code_mark.cache_clear()
    with pytest.raises(key.Unfingerprintable, match="ms_base, whose file has changed since this process began"):
        fingerprint(module.step)


def test_versions_of_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"monai_saliency", "monai", "torch", "numpy", "nibabel"} <= set(key.library_versions())
    assert key.library_versions()["torch"] == torch.__version__
    assert [key.package_version(name) for name in ("time", "no_such_package")] == ["", ""]
    before = fingerprint(mt.Flipd("image", 0))
    monkeypatch.setattr(key, "package_version", lambda package: "another")
    key._code_mark.cache_clear()
    try:
        assert fingerprint(mt.Flipd("image", 0)) != before
    finally:
        key._code_mark.cache_clear()


def test_the_files_of_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files under any key and depth, and all of a folder; not a case's name that happens to be a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.nii", "b.nii", "l.nii", "dicom/1.dcm", "dicom/x/2.dcm", "sub/1"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    case = {"case": "sub", "image": [str(tmp_path / "a.nii"), Path("b.nii")], "label": "", "gone": "gone.nii"}
    case |= {"more": {"deep": ("dicom",)}, "text": "x" * 5000, "nul": "a\0b", "number": 3}
    found = [row[0] for row in input_files(case)]
    assert found == [str(tmp_path / "a.nii"), "b.nii", "dicom/1.dcm", "dicom/x/2.dcm"]


@pytest.mark.parametrize("checksum", [True, False])
def test_a_file_is_known_by_size_and_time_or_by_its_content(checksum: bool, tmp_path: Path) -> None:
    scan = tmp_path / "a.nii"
    found = []
    for content, time in ((b"one", 1), (b"one", 2), (b"two", 2), (b"four", 2)):
        scan.write_bytes(content)
        os.utime(scan, ns=(time, time))
        found.append(input_files({"image": scan}, checksum)[0][1])
    assert [later != earlier for earlier, later in itertools.pairwise(found)] == (
        [False, True, True] if checksum else [True, False, True]
    )
    os.utime(scan, ns=(3, 3))
    assert checksum_of(scan) == checksum_of(str(scan)) != checksum_of(tmp_path / "gone") == ""
