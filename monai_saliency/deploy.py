"""An operator for the apps of MONAI Deploy: it explains what a network finds in a DICOM series, and writes the map as
DICOM.

The operator's class derives from the SDK's, so it is made when :func:`saliency_operator` is called: importing this
module needs no extra.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, Invertd

from monai_saliency.cases import Case
from monai_saliency.errors import AdviceError
from monai_saliency.inferers.explanation import with_maps
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.storage.dicom import read_series, series_id
from monai_saliency.transforms.save_dicom import SaveDicomd
from monai_saliency.utils.arguments import require
from monai_saliency.utils.tensors import with_meta_of

__all__ = ["SeriesExplainer", "saliency_operator"]


@dataclass(frozen=True)
class SeriesExplainer:
    """Explains a volume that MONAI Deploy has made of a DICOM series, and writes its maps as DICOM.

    Args:
        explain: explains, as made by :func:`monai_saliency.rise` and the other methods.
        network: any callable on batches ``(B, 1, *spatial)``.
        preprocessing: invertible transforms of the key ``"image"``, ``(1, columns, rows, slices)``: the ones of the
            app's inference, without loading.
        output_folder: where the files are written.
        scale: the value with the last colour, in the map's unit; by default the score's range where it is known.
        device: where to explain.
    """

    explain: PerturbationInferer
    network: Callable[..., Any]
    preprocessing: Compose
    output_folder: str | Path = "output"
    scale: float | None = None
    device: torch.device | str = "cpu"

    def __call__(self, volume: np.ndarray, metadata: Mapping[str, Any], slices: Sequence[Any]) -> np.ndarray:
        """The maps ``(K, slices, rows, columns)`` in the score's unit, on the grid of the series.

        Args:
            volume: ``(slices, rows, columns)``, as ``DICOMSeriesToVolumeOperator`` makes it.
            metadata: with its ``affine`` ``(4, 4)`` and the affine's ``space``, ``"RAS"`` or ``"LPS"``.
            slices: the slices of the series as pydicom has read them from their files.

        Raises:
            AdviceError: when the volume does not lie on the series' grid. MONAI Deploy 4.0 exchanges the two pixel
                spacings in its affine, so this is also raised where pixels are not square.
            CaseError: when the volume cannot be explained.
        """
        files = [dicom.filename for dicom in slices]
        series = read_series(files)
        _check_place(volume, _affine_of(metadata), series)
        voxels = torch.from_numpy(np.ascontiguousarray(volume.T[None]).astype(np.float32))
        image = MetaTensor(voxels, affine=series.affine, meta={"filename_or_obj": str(files[0])})
        item = self.preprocessing({"image": image})
        item["case"] = series_id(str(slices[0].SeriesInstanceUID))
        save = SaveDicomd("saliency", self.output_folder, self.scale)
        saved = save(self._mapped(item))
        return saved["saliency"].numpy(force=True).transpose(0, 3, 2, 1)

    def _mapped(self, item: dict[Any, Any]) -> dict[Any, Any]:
        """A case with its maps on the scan's grid."""
        image = item["image"]
        case = Case.of(image[None], name=item["case"])
        (explanation,) = with_maps(self.explain.explain(image[None].to(self.device), self.network, cases=[case]))
        item["explanation"] = explanation
        item["saliency"] = with_meta_of(image, explanation.saliency.to(image.device))
        nearest = self.explain.by_region
        return Invertd("saliency", self.preprocessing, orig_keys="image", nearest_interp=nearest)(item)


def _affine_of(metadata: Mapping[str, Any]) -> np.ndarray:
    """The affine of an image of the SDK, to RAS; NaN where it has none."""
    affine = np.asarray(metadata.get("affine", np.full((4, 4), np.nan)), dtype=np.float64)
    if metadata.get("space") == "LPS":
        affine = np.diag([-1.0, -1, 1, 1]) @ affine
    return affine


def _check_place(volume: np.ndarray, affine: np.ndarray, series: Any) -> None:
    """Refuse a volume ``(slices, rows, columns)`` that does not lie on its series ``(columns, rows, slices)``."""
    if volume.T.shape != series.shape or not np.allclose(affine, series.affine, rtol=0, atol=1e-3):
        raise AdviceError(
            f"the image of shape {volume.T.shape}, affine {affine.round(3).tolist()}, does not lie on its series "
            f"{tuple(series.shape)}, {series.affine.numpy().round(3).tolist()}: connect "
            "DICOMSeriesToVolumeOperator, and resample a series whose pixels are not square, which it misplaces"
        )


def saliency_operator(fragment: Any, explain: SeriesExplainer, **settings: Any) -> Any:
    """An operator of MONAI Deploy that explains a DICOM series.

    Its inputs are ``image``, of ``DICOMSeriesToVolumeOperator``, and ``study_selected_series_list``, of
    ``DICOMSeriesSelectorOperator``, with one series. Its output ``saliency_image`` is an image of the SDK, ``(slices,
    rows, columns)``, with the metadata of the input; ``(K, slices, rows, columns)`` for several maps. A Parametric Map
    ``<series>_saliency.dcm`` and a folder ``<series>_saliency_colour`` of Secondary Captures are written to the output
    folder (:class:`~monai_saliency.transforms.SaveDicomd`).

    Args:
        fragment: the app.
        explain: explains a series.
        settings: the operator's own, such as ``name`` and conditions.

    Raises:
        OptionalImportError: when the SDK is not installed. It gives the pip command.

    Example::

        operator = saliency_operator(self, SeriesExplainer(ms.rise(1000, target=target), network, preprocessing))
        self.add_flow(series_to_volume, operator, {("image", "image")})
        self.add_flow(selector, operator, {("study_selected_series_list", "study_selected_series_list")})
    """
    return _operator_class()(fragment, explain, **settings)


@functools.cache
def _operator_class() -> type:
    """The operator's class, which derives from the SDK's."""
    require("holoscan", "deploy")
    core: Any = require("monai.deploy.core", "deploy")

    class SaliencyOperator(core.Operator):
        def __init__(self, fragment: Any, explain: SeriesExplainer, **settings: Any) -> None:
            self.explain = explain
            super().__init__(fragment, **settings)  # which calls `setup`

        def setup(self, spec: Any) -> None:
            spec.input("image")
            spec.input("study_selected_series_list")
            spec.output("saliency_image").condition(core.ConditionType.NONE)

        def compute(self, op_input: Any, op_output: Any, context: Any) -> None:
            image = op_input.receive("image")
            selected = []
            for study in op_input.receive("study_selected_series_list"):
                selected += study.selected_series
            if len(selected) != 1:
                raise AdviceError(f"1 selected DICOM series is explained, got {len(selected)}: select it by a rule")
            slices = [instance.get_native_sop_instance() for instance in selected[0].series.get_sop_instances()]
            maps = self.explain(image.asnumpy(), image.metadata(), slices)
            saliency = maps[0] if len(maps) == 1 else maps
            op_output.emit(type(image)(saliency, image.metadata()), "saliency_image")

    return SaliencyOperator
