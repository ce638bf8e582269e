"""The operator of MONAI Deploy, by a network that reads one voxel; also in an app of the SDK where it is installed."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import dicom_series
from helpers.dicom_series import check_parametric_map, expected_affine, stored, write
from monai.transforms import Compose, Orientationd
from monai.utils import OptionalImportError

import monai_saliency as ms
from monai_saliency import deploy
from monai_saliency.deploy import SeriesExplainer, saliency_operator
from monai_saliency.errors import AdviceError
from monai_saliency.storage.dicom import read_series

pydicom = pytest.importorskip("pydicom", reason="needs the dicom extra")

VOXEL = (1, 3, 2)  # of the image in RAS that the network gets


@pytest.fixture
def explain(tmp_path: Path) -> SeriesExplainer:
    method = ms.sliding_window(1, 1, target=ms.ClassScore([0], "none"), fill=ms.fills.ConstantFill(0.0))
    to_ras = Compose([Orientationd("image", axcodes="RAS", labels=None)])
    network = lambda images: images[:, 0, VOXEL[0], VOXEL[1], VOXEL[2]][:, None]  # noqa: E731
    return SeriesExplainer(method, network, to_ras, tmp_path / "out")


def check(maps: np.ndarray, folder: Path) -> None:
    """The map is the value of the one voxel, at its place in the scanner, and so is the Parametric Map."""
    volume = stored() * 2.0 - 1024
    turned = Orientationd("image", axcodes="RAS", labels=None)
    image = turned({"image": read_series([*folder.glob("in/*")])[None]})["image"]
    [(number, row, column)] = np.argwhere(maps)
    assert maps[number, row, column] == volume[number, row, column] == image[0][VOXEL]
    place = expected_affine() @ [column, row, number, 1]
    np.testing.assert_allclose(place, image.affine.numpy() @ [*VOXEL, 1], atol=1e-4)
    [file] = (folder / "out").glob("series-*_saliency.dcm")
    check_parametric_map(file, maps.T)
    assert len([*(folder / "out").glob("series-*_saliency_colour/*.dcm")]) == len(maps)


def test_the_map_of_a_series_and_images_that_do_not_lie_on_it(explain: SeriesExplainer, tmp_path: Path) -> None:
    slices = [pydicom.dcmread(file) for file in write(tmp_path / "in")]
    volume, lps = stored() * 2.0 - 1024, np.diag([-1, -1, 1, 1]) @ expected_affine()
    check(explain(volume, {"affine": lps, "space": "LPS"}, slices)[0], tmp_path)
    for metadata in ({}, {"affine": lps, "space": "RAS"}):
        with pytest.raises(AdviceError, match="does not lie on its series"):
            explain(volume, metadata, slices)


class Image:
    """The SDK's image."""

    def __init__(self, data: np.ndarray, metadata: dict[str, Any]) -> None:
        self.asnumpy, self.metadata = lambda: data, lambda: metadata


def test_the_operator_by_a_stub_of_the_sdk(explain: SeriesExplainer, tmp_path: Path, monkeypatch: Any) -> None:
    class Operator:
        def __init__(self, fragment: Any, **settings: Any) -> None:
            ports: list[str] = []
            port = SimpleNamespace(condition=lambda kind: None)
            self.setup(SimpleNamespace(input=ports.append, output=lambda name: ports.append(name) or port))  # type: ignore
            self.ports, self.settings = ports, settings

    core = ModuleType("monai.deploy.core")
    core.Operator, core.ConditionType = Operator, SimpleNamespace(NONE=0)  # type: ignore[attr-defined]
    for name, module in (("holoscan", ModuleType("holoscan")), ("monai.deploy", core), ("monai.deploy.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(deploy, "_operator_class", deploy._operator_class.__wrapped__)
    read = [pydicom.dcmread(file) for file in write(tmp_path / "in")]
    slices = [SimpleNamespace(get_native_sop_instance=lambda each=each: each) for each in read]
    chosen = SimpleNamespace(series=SimpleNamespace(get_sop_instances=lambda: slices))
    image = Image(stored() * 2.0 - 1024, {"affine": expected_affine(), "space": "RAS"})
    inputs = {"image": image, "study_selected_series_list": [SimpleNamespace(selected_series=[chosen])]}
    outputs: dict[str, Image] = {}
    operator = saliency_operator(None, explain, name="saliency")
    assert (operator.ports, operator.settings) == ([*inputs, "saliency_image"], {"name": "saliency"})
    to = SimpleNamespace(emit=lambda value, name: outputs.update({name: value}))
    operator.compute(SimpleNamespace(receive=inputs.get), to, None)
    check(outputs["saliency_image"].asnumpy(), tmp_path)
    inputs["study_selected_series_list"] *= 2
    with pytest.raises(AdviceError, match="1 selected DICOM series is explained, got 2"):
        operator.compute(SimpleNamespace(receive=inputs.get), to, None)


def test_without_the_sdk_the_pip_command_is_given(explain: SeriesExplainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "holoscan", None)
    monkeypatch.setattr(deploy, "_operator_class", deploy._operator_class.__wrapped__)
    with pytest.raises(OptionalImportError, match=r'pip install "monai-saliency\[deploy\]"'):
        saliency_operator(None, explain)


def test_in_an_app_of_the_sdk(explain: SeriesExplainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("monai.deploy.core", reason="needs the deploy extra")
    operators, conditions = (pytest.importorskip(f"monai.deploy.{name}") for name in ("operators", "conditions"))
    monkeypatch.setattr(dicom_series, "SPACING", (0.8, 0.8))  # the SDK misplaces other pixels
    write(tmp_path / "in")
    got = []

    class Keep(core.Operator):
        def setup(self, spec: Any) -> None:
            spec.input("image")

        def compute(self, op_input: Any, op_output: Any, context: Any) -> None:
            got.append(op_input.receive("image").asnumpy())

    class App(core.Application):
        def compose(self) -> None:
            once = conditions.CountCondition(self, 1)
            loader = operators.DICOMDataLoaderOperator(self, once, input_folder=tmp_path / "in", name="load")
            select = operators.DICOMSeriesSelectorOperator(self, name="select")
            volume = operators.DICOMSeriesToVolumeOperator(self, name="volume")
            saliency = saliency_operator(self, explain, name="saliency")
            series = {("study_selected_series_list", "study_selected_series_list")}
            self.add_flow(loader, select, {("dicom_study_list", "dicom_study_list")})
            self.add_flow(select, volume, series)
            self.add_flow(select, saliency, series)
            self.add_flow(volume, saliency, {("image", "image")})
            self.add_flow(saliency, Keep(self, name="keep"), {("saliency_image", "image")})

    App().run()
    check(got[0], tmp_path)
