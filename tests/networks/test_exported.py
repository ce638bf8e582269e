"""Exported networks: the map of the module that was exported, whatever batch sizes the program takes."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.inferers import SlidingWindowInferer
from torch.export import Dim

import monai_saliency as ms
from monai_saliency.networks import load_checkpoint, network_fingerprint, network_of
from monai_saliency.networks.checkpoints import exported_network

TARGET = ms.ClassScore([1], "softmax")
IMAGE = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(1))


def network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolution = [torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
        return torch.nn.Sequential(*convolution, torch.nn.Flatten(), torch.nn.Linear(4 * 144, 3)).eval()


def export(path: Path, inner: torch.nn.Module, count: int, sizes: Any = None, size: int = 12) -> Path:
    shapes = None if sizes is None else ({0: sizes},)
    program = torch.export.export(inner, (torch.rand(count, 1, size, size),), dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


SIZES = {
    "one": (1, None),
    "four": (4, None),
    "seven at most": (3, Dim("batch", min=1, max=7)),
    "three or more": (4, Dim("batch", min=3, max=64)),
    "any": (3, Dim.DYNAMIC),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_the_map_of_the_module(sizes: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = network()
    program = exported_network(export(tmp_path / "network.pt2", inner, *SIZES[sizes]))
    explain = ms.rise(21, 3, target=TARGET, mask_batch_size=10)
    torch.testing.assert_close(explain(IMAGE, program), explain(IMAGE, inner), rtol=1e-4, atol=1e-6)
    assert "one at a time" not in caplog.text
    assert network_fingerprint(program) is not None


@pytest.mark.parametrize("count", [1, 4, 11])
@pytest.mark.parametrize("sizes", SIZES)
def test_batches_of_any_size(sizes: str, count: int, tmp_path: Path) -> None:
    inner, batch = network(), torch.rand(count, 1, 12, 12)
    program = network_of(torch.nn.Identity(), export(tmp_path / "network.pt2", inner, *SIZES[sizes]))
    with torch.no_grad():
        torch.testing.assert_close(program(batch), inner(batch), rtol=1e-5, atol=1e-6)
    assert load_checkpoint(program, tmp_path / "network.pt2") is program


def test_patches(tmp_path: Path) -> None:
    """Under a sliding window a program gets patches, here three at a time where the window gives two."""
    inner = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1)).eval()
    program = exported_network(export(tmp_path / "network.pt2", inner, 3, size=8))
    target = ms.RegionScore([1], "softmax", region="all")
    explain = ms.sliding_window(4, 4, target=target, inferer=SlidingWindowInferer(8, 2, overlap=0.5))
    torch.testing.assert_close(explain(IMAGE, program), explain(IMAGE, inner), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.pt2 cannot be read as an exported network"):
        network_of(network(), tmp_path / "missing.pt2")
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be read as an exported network"):
        network_of(network(), broken)
    with pytest.raises(ValueError, match="an ensemble needs files of weights"):
        network_of(network(), [broken, broken])
    with pytest.raises(ValueError, match="whose weights fit no Sequential"):
        load_checkpoint(network(), broken)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "part", ["sample_inputs/model.pt", "weights/weight_0", "constants/opaque_obj_0", "aotinductor/"]
)
def test_code_in_an_archive_is_never_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the archive says that a weight is pickled, and where the user's shell lets torch run anything."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    good, evil, trap = export(tmp_path / "good.pt2", network(), 1), tmp_path / "evil.pt2", tmp_path / "trap"
    content = io.BytesIO()
    torch.save(((), {"images": Trap(trap)}), content)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(evil, "w") as target:
        for name in source.namelist():
            kept = source.read(name).replace(b'"use_pickle": false', b'"use_pickle": true')
            target.writestr(name, content.getvalue() if part in name else kept)
        if not any(part in name for name in source.namelist()):
            target.writestr(f"good/data/{part}", content.getvalue())
    with pytest.raises(ValueError, match=r"evil\.pt2 holds pickled code, which is not run: export the network again"):
        network_of(network(), evil)
    assert not trap.exists()
    assert [os.environ.get(f"TORCH_FORCE_{name}WEIGHTS_ONLY_LOAD") for name in ("", "NO_")] == [None, "1"]
    exported_network(good)
    torch.load(io.BytesIO(content.getvalue()), weights_only=False)
    assert trap.exists()  # the trap works: it is the loader that keeps it shut
