"""The module of 3D Slicer without Slicer: calls are stubs over nibabel, and the process is real in the slow test."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers.paths import BUNDLE, ROOT
from helpers.scans import OBLIQUE, write_scan


class Volume:
    """A volume of a scene, which keeps what is called on its display node."""

    def __init__(self, path: Path, name: str = "scan") -> None:
        image = nib.load(path)
        self.voxels, self.affine, self.name, self.transform = image.get_fdata(), image.affine, name, "from nowhere"
        self.GetImageData = lambda: SimpleNamespace(
            GetDimensions=lambda: self.voxels.shape, GetScalarRange=lambda: (self.voxels.min(), self.voxels.max())
        )
        self.calls: dict[str, tuple[Any, ...]] = {}
        calls = self.calls

        class Display:
            def __getattr__(self, call: str) -> Callable[..., None]:
                return lambda *given: calls.update({call: given})

        self.GetDisplayNode = Display
        self.GetName = lambda: name
        self.GetTransformNodeID = lambda: "a transform"
        self.SetAndObserveTransformNodeID = lambda id: setattr(self, "transform", id)
        self.GetIJKToRASMatrix = lambda matrix: setattr(matrix, "array", self.affine)


def module_of(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture
def slicer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The stubs, with the module's logic as ``logic``."""
    shown: dict[str, Any] = {}

    def export(scan: Volume, path: str, world: bool) -> bool:
        assert not world
        nib.save(nib.Nifti1Image(scan.voxels.astype(np.float32), scan.affine), path)
        return True

    def launch(command: list[str], useStartupEnvironment: bool, cwd: str | None) -> Any:
        assert useStartupEnvironment
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)

    util = SimpleNamespace(
        exportNode=export,
        loadVolume=lambda path, properties: Volume(Path(path), properties["name"]),
        launchConsoleProcess=launch,
        setSliceViewerLayers=lambda **given: shown.update(given),
        arrayFromVTKMatrix=lambda matrix: matrix.array,
        tryWithErrorDisplay=nullcontext,
    )
    scene, app = SimpleNamespace(RemoveNode=lambda node: shown.clear()), SimpleNamespace(processEvents=lambda: None)
    names = ("", "Logic", "Widget")
    base = {f"ScriptedLoadableModule{name}": type(f"Base{name}", (), {}) for name in names}
    stubs = [module_of("ctk"), module_of("qt"), module_of("vtk", vtkMatrix4x4=SimpleNamespace)]
    stubs += [module_of("slicer", util=util, mrmlScene=scene, app=app)]
    for stub in [*stubs, module_of("slicer.ScriptedLoadableModule", **base)]:
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    spec = importlib.util.spec_from_file_location("MonaiSaliency", ROOT / "tutorials/slicer/MonaiSaliency.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return SimpleNamespace(util=util, shown=shown, logic=found.MonaiSaliencyLogic())


def process(lines: list[str], code: int = 0) -> Any:
    return SimpleNamespace(stdout=iter(lines), wait=lambda: code)


def test_the_command_the_map_and_what_is_shown(slicer: SimpleNamespace, tmp_path: Path) -> None:
    scan, commands = Volume(write_scan(tmp_path / "scan.nii.gz", (5, 6, 7), OBLIQUE, seed=1)), []

    def launch(command: list[str], useStartupEnvironment: bool, cwd: str | None) -> Any:
        commands.append(command)
        if command[2] == "monai_saliency":
            return process(["a warning\n", "/bundle\n"])
        flags = dict(zip(command[4::2], command[5::2], strict=True))
        source = Path(flags["--dataset_dir"], "imagesTs", "scan.nii.gz")
        image, output = nib.load(source), Path(flags["--output_dir"])
        (output / "imagesTs").mkdir(parents=True)
        nib.save(nib.Nifti1Image(image.get_fdata() - 100, image.affine), output / "imagesTs/scan_saliency.nii.gz")
        (output / "summary.csv").write_text("case,class,score,verdict\nimagesTs/scan,1,0.9,nothing stands out\n")
        return process(["done\n"])

    slicer.util.launchConsoleProcess = launch
    found, words = slicer.logic.explain(scan, "/env/python", flags="--method rise --num_masks 9")
    assert words == "class 1 scores 0.9. nothing stands out"
    assert commands[1][:4] == ["/env/python", "-m", "monai.bundle", "run"]
    assert commands[1][4:6] == ["--config_file", str(Path("/bundle/configs/inference.yaml"))]
    assert commands[1][-4:] == ["--method", "rise", "--num_masks", "9"]
    assert slicer.shown == {"background": scan, "foreground": found, "foregroundOpacity": 0.5}
    assert (found.transform, found.name) == ("a transform", "scan saliency")
    np.testing.assert_allclose(found.voxels, scan.voxels - 100, atol=1e-3)
    peak = np.abs(found.voxels).max()
    slicer.logic.show(found, 0.5)
    assert found.calls["SetWindowLevelMinMax"] == (-peak, peak)
    assert found.calls["SetThreshold"] == (0.5 * peak, peak)
    slicer.logic.show(found, 0.5, opposing=True)
    assert found.calls["SetThreshold"] == (-peak, -0.5 * peak)
    load = slicer.util.loadVolume
    slicer.util.loadVolume = lambda *given: setattr(made := load(*given), "affine", scan.affine + 0.01) or made
    with pytest.raises(RuntimeError, match="does not lie on the scan"):
        slicer.logic.explain(scan, "/env/python")
    slicer.util.launchConsoleProcess = lambda *args, **given: process(["the reason\n"], code=1)
    with pytest.raises(RuntimeError, match="failed:\nthe reason"):
        slicer.logic.explain(scan, "/env/python", bundle=str(BUNDLE))
    with pytest.raises(ValueError, match="choose a scan"):
        slicer.logic.explain(None, "/env/python")


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["", str(BUNDLE)])
def test_a_real_process_explains_the_scan(bundle: str, slicer: SimpleNamespace, tmp_path: Path) -> None:
    """With our bundle as the demo's, and by the overlay as another one."""
    scan = Volume(write_scan(tmp_path / "scan.nii.gz", (40, 44, 36), OBLIQUE, seed=1))
    prefix = "--saliency_" if bundle else "--"
    given = {"method": "sliding_window", "window_size": 32, "stride": 32}
    flags = " ".join(f"{prefix}{name} {value}" for name, value in given.items())
    found, words = slicer.logic.explain(scan, sys.executable, bundle, flags)
    assert found.voxels.shape == scan.voxels.shape
    assert np.abs(found.voxels).max() > 0
    assert words.startswith("class ")
