import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import Trap
from helpers.tolerances import assert_close, assert_same_bits
from monai.inferers import SlidingWindowInferer
from torch.export import Dim

import monai_saliency as ms
from monai_saliency.networks.checkpoints import exported_network


def network(seed: int = 0, out: int = 2) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, out, 1))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: weights,
        lambda weights: {"state_dict": weights, "epoch": 3},
        lambda weights: {"network": {"state_dict": weights}},
        *[
            lambda weights, prefix=prefix: {"state_dict": {f"{prefix}{name}": each for name, each in weights.items()}}
            for prefix in ("module.", "_orig_mod.", "model.", "module._orig_mod.", "model.module.")
        ],
    ],
)
def test_every_weight_is_loaded(tmp_path: Path, wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    trained, fresh = network(seed=1), network()
    assert not same(trained, fresh)
    torch.save(wrap(trained.state_dict()), tmp_path / "w.pt")
    assert ms.networks.load_checkpoint(fresh, tmp_path / "w.pt") is fresh
    assert same(trained, fresh)
    assert same(trained, ms.networks.load_checkpoint(network(), str(tmp_path / "w.pt")))
    (first, *_) = wrap(trained.state_dict()).get("state_dict", {"0.weight": None})
    prefix = first.removesuffix("0.weight")
    assert (f"w.pt: the prefix {prefix} is removed" in caplog.text) == bool(prefix)


def test_a_prefix_of_the_networks_own_stays(tmp_path: Path) -> None:
    networks = [torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"model": network(seed)})}) for seed in (0, 1)]
    torch.save(networks[1].state_dict(), tmp_path / "w.pt")
    assert same(ms.networks.load_checkpoint(networks[0], tmp_path / "w.pt"), networks[1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.update({"2.bias": torch.zeros(5)}), r"size mismatch for 2.bias: .*\[5\].*\[2\]"),
        (
            lambda w: [w.update({f"old.{name}": w.pop(name)}) for name in list(w)],
            r'Missing key\(s\) in state_dict: "0.weight", .*Unexpected key\(s\) in state_dict: "old.0.weight"',
        ),
    ],
    ids=["shape", "renamed"],
)
def test_a_misfit_names_the_file_what_to_do_and_the_keys(tmp_path: Path, change: Any, match: str) -> None:
    weights = network(seed=1).state_dict()
    change(weights)
    torch.save(weights, tmp_path / "w.pt")
    hint = r"w.pt does not fit the network Sequential\. Set network_def to the network that the checkpoint was trained"
    with pytest.raises(ValueError, match=rf"(?s){hint} with\. .*{match}"):
        ms.networks.load_checkpoint(network(), tmp_path / "w.pt")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*nowhere.pt does not exist: pass --checkpoint"):
        ms.networks.load_checkpoint(network(), tmp_path / "nowhere.pt")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut"])
def test_not_a_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint .*w.pt is not a file of weights"):
        ms.networks.load_checkpoint(network(), tmp_path / "w.pt")
    torch.save({"epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"checkpoint .*w.pt holds no state dictionary"):
        ms.networks.load_checkpoint(network(), tmp_path / "w.pt")


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    trap, path = tmp_path / "trap", tmp_path / "w.pt"
    torch.save({"state_dict": network().state_dict(), "extra": Trap(trap)}, path)
    with pytest.raises(ValueError, match=r"w.pt is not a file of weights that can be read without running code in it"):
        ms.networks.load_checkpoint(network(), path)
    assert not trap.exists()
    # The trap works: it is the loader that keeps it shut.
    torch.load(path, weights_only=False)
    assert trap.exists()


class Halving(torch.nn.Module):
    """Logits at half the resolution, in an object of several parts."""

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        pool = {3: torch.nn.functional.avg_pool1d, 4: torch.nn.functional.avg_pool2d, 5: torch.nn.functional.avg_pool3d}
        return {"hidden": [images], "logits": pool[images.ndim](images, 2)}


def test_logits_on_the_images_grid() -> None:
    """Linear between the voxels' centres: of pairs' means a, b the four voxels are a, (3a + b) / 4, (a + 3b) / 4, b."""
    image = torch.tensor([1.0, 3.0, 10.0, 14.0])
    network = ms.networks.OnImageGrid(Halving(), output="logits")
    line = network(image[None, None])
    assert_close(line, torch.tensor([[[2.0, 4.5, 9.5, 12.0]]]))
    for axes in (2, 3):
        last = torch.zeros(2, 1, *[4] * axes) + image
        assert_close(network(last), torch.zeros_like(last) + line.flatten())
    # Where they lie on it already nothing is done.
    assert_same_bits(ms.networks.OnImageGrid(torch.nn.Identity())(image[None, None]), image[None, None])


def test_what_is_no_logits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a list"):
        ms.networks.OnImageGrid(Halving(), output="hidden")(torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"images of shape \(1, 1, 4, 4\), got shape \(1, 16\)"):
        ms.networks.OnImageGrid(torch.nn.Flatten())(torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="output='logits' reads"):
        ms.networks.OnImageGrid(Halving(), output="logit")(torch.zeros(1, 1, 4, 4))


# Exported networks: the map of the module that was exported, whatever batch sizes the program takes.
TARGET = ms.ClassScore([1], "softmax")
IMAGE = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(1))


def exportable() -> torch.nn.Module:
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
    inner = exportable()
    program = exported_network(export(tmp_path / "network.pt2", inner, *SIZES[sizes]))
    explain = ms.rise(21, 3, target=TARGET, mask_batch_size=10)
    torch.testing.assert_close(explain(IMAGE, program), explain(IMAGE, inner), rtol=1e-4, atol=1e-6)
    assert "one at a time" not in caplog.text
    assert ms.networks.network_fingerprint(program) is not None


@pytest.mark.parametrize("count", [1, 4, 11])
@pytest.mark.parametrize("sizes", SIZES)
def test_batches_of_any_size(sizes: str, count: int, tmp_path: Path) -> None:
    inner, batch = exportable(), torch.rand(count, 1, 12, 12)
    program = ms.networks.unloaded_network(torch.nn.Identity(), export(tmp_path / "network.pt2", inner, *SIZES[sizes]))
    with torch.no_grad():
        assert_close(program(batch), inner(batch))
    assert ms.networks.load_checkpoint(program, tmp_path / "network.pt2") is program


@pytest.mark.parametrize("sizes", SIZES)
def test_white_box_methods_differentiate_a_program(sizes: str, tmp_path: Path) -> None:
    inner = exportable()
    program = exported_network(export(tmp_path / "network.pt2", inner, *SIZES[sizes]))
    explain = ms.integrated_gradients(5, target=TARGET, mask_batch_size=4)
    torch.testing.assert_close(explain(IMAGE, program), explain(IMAGE, inner), rtol=1e-4, atol=1e-6)


def test_patches(tmp_path: Path) -> None:
    """Under a sliding window a program gets patches, here three at a time where the window gives two."""
    inner = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1)).eval()
    program = exported_network(export(tmp_path / "network.pt2", inner, 3, size=8))
    target = ms.RegionScore([1], "softmax", region="all")
    explain = ms.sliding_window(4, 4, target=target, inferer=SlidingWindowInferer(8, 2, overlap=0.5))
    torch.testing.assert_close(explain(IMAGE, program), explain(IMAGE, inner), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.pt2 cannot be read as an exported network"):
        ms.networks.unloaded_network(exportable(), tmp_path / "missing.pt2")
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be read as an exported network"):
        ms.networks.unloaded_network(exportable(), broken)
    with pytest.raises(ValueError, match="an ensemble needs files of weights"):
        ms.networks.unloaded_network(exportable(), [broken, broken])
    with pytest.raises(ValueError, match="whose weights fit no Sequential"):
        ms.networks.load_checkpoint(exportable(), broken)


@pytest.mark.parametrize(
    "part", ["sample_inputs/model.pt", "weights/weight_0", "constants/opaque_obj_0", "aotinductor/"]
)
def test_code_in_an_archive_is_never_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the archive says that a weight is pickled, and where the user's shell lets torch run anything."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    good, evil, trap = export(tmp_path / "good.pt2", exportable(), 1), tmp_path / "evil.pt2", tmp_path / "trap"
    content = io.BytesIO()
    torch.save(((), {"images": Trap(trap)}), content)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(evil, "w") as target:
        for name in source.namelist():
            kept = source.read(name).replace(b'"use_pickle": false', b'"use_pickle": true')
            target.writestr(name, content.getvalue() if part in name else kept)
        if not any(part in name for name in source.namelist()):
            target.writestr(f"good/data/{part}", content.getvalue())
    with pytest.raises(ValueError, match=r"evil\.pt2 holds pickled code, which is not run: export the network again"):
        ms.networks.unloaded_network(exportable(), evil)
    assert not trap.exists()
    assert [os.environ.get(f"TORCH_FORCE_{name}WEIGHTS_ONLY_LOAD") for name in ("", "NO_")] == [None, "1"]
    exported_network(good)
    torch.load(io.BytesIO(content.getvalue()), weights_only=False)
    assert trap.exists()  # the trap works: it is the loader that keeps it shut
