"""nnU-Net v2's own preprocessing as a MONAI transform, with the way back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import InvertibleTransform, MapTransform
from monai.utils import TraceKeys

from monai_saliency.utils.arguments import require
from monai_saliency.utils.tensors import everywhere, plain


class NNUNetPreprocessd(MapTransform, InvertibleTransform):
    """Preprocesses scans as nnU-Net does, by nnU-Net's own preprocessor: transposes, crops, normalizes and resamples.

    Place it after ``LoadImaged`` and ``EnsureChannelFirstd``, and after ``Orientationd(axcodes="RAS")`` where the
    model's reader turns scans so (``reorients`` of :class:`~monai_saliency.networks.nnunet.NNUNetModel`).

    The result is a MetaTensor ``(C, *spatial)`` with nnU-Net's order of axes and the affine of its voxels. Its inverse
    is what nnU-Net does to its logits: it resamples to the cropped scan, fills up with zeros, and transposes.

    Args:
        keys: the keys of the images ``(C, x, y, z)``.
        plans: the content of the model's ``plans.json``.
        dataset_json: the content of its ``dataset.json``.
        configuration: the name of a configuration of the plans.
        allow_missing_keys: whether items may lack a key.

    Raises:
        ValueError: when called, for an image with other axes.
    """

    def __init__(
        self,
        keys: KeysCollection,
        plans: Mapping[str, Any],
        dataset_json: Mapping[str, Any],
        configuration: str,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        require("nnunetv2", extra="nnunet")
        self.plans = dict(plans)
        self.dataset_json = dict(dataset_json)
        self.configuration = configuration
        # A cache keeps what this version made.
        self.version = version("nnunetv2")

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self._preprocess(d[key])
        return d

    def inverse(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self._back(d[key])
        return d

    def _managers(self) -> tuple[Any, Any]:
        handler = require("nnunetv2.utilities.plans_handling.plans_handler", extra="nnunet")
        plans = handler.PlansManager(dict(self.plans))
        return plans, plans.get_configuration(self.configuration)

    def _preprocess(self, image: MetaTensor) -> MetaTensor:
        plans, settings = self._managers()
        affine = image.affine.numpy(force=True).astype(np.float64)
        if image.ndim != 4:
            raise ValueError(f"nnU-Net's preprocessing takes scans (C, x, y, z), got {tuple(image.shape)}")
        array = plain(image).permute(0, 3, 2, 1).numpy(force=True)
        properties: dict[str, Any] = {"spacing": _spacing(image, affine)[::-1]}
        preprocessed, *_ = settings.preprocessor_class(verbose=False).run_case_npy(
            np.ascontiguousarray(array, dtype=np.float32), None, properties, plans, settings, dict(self.dataset_json)
        )
        info = {
            "spacing": np.asarray(properties["spacing"], dtype=np.float64).tolist(),
            "box": np.asarray(properties["bbox_used_for_cropping"]).tolist(),
            "cropped": np.asarray(properties["shape_after_cropping_and_before_resampling"]).tolist(),
            "before": np.asarray(properties["shape_before_cropping"]).tolist(),
            "affine": affine.tolist(),
            "mode": "bilinear",  # which Invertd(nearest_interp=True) changes
        }
        out = MetaTensor(torch.as_tensor(preprocessed), meta=image.meta, applied_operations=[*image.applied_operations])
        axes = [2 - axis for axis in plans.transpose_forward]
        out.affine = torch.as_tensor(affine @ _place(axes, info["box"], info["cropped"], out.shape[1:]))
        self.push_transform(out, orig_size=image.shape[1:], extra_info=info)
        return out

    def _back(self, image: MetaTensor) -> MetaTensor:
        plans, settings = self._managers()
        info = self.pop_transform(image)[TraceKeys.EXTRA_INFO]
        values = plain(image)
        if info["mode"] == "nearest":
            values = torch.nn.functional.interpolate(values[None], tuple(info["cropped"]), mode="nearest-exact")[0]
        else:
            spacing = [info["spacing"][axis] for axis in plans.transpose_forward]
            # A 2D configuration has no spacing along its slices, which stay as they are.
            resampled = [*spacing[: len(spacing) - len(settings.spacing)], *settings.spacing]
            array = settings.resampling_fn_probabilities(values.numpy(force=True), info["cropped"], resampled, spacing)
            values = torch.as_tensor(array).to(values)
        whole = values.new_zeros(len(values), *info["before"])
        whole[everywhere(tuple(slice(*side) for side in info["box"]))] = values
        whole = whole.permute(0, *(axis + 1 for axis in plans.transpose_backward)).permute(0, 3, 2, 1)
        out = MetaTensor(whole.contiguous(), meta=image.meta, applied_operations=image.applied_operations)
        out.affine = torch.as_tensor(info["affine"], dtype=torch.float64)
        return out


def _place(
    axes: Sequence[int], box: Sequence[Sequence[int]], cropped: Sequence[int], shape: Sequence[int]
) -> np.ndarray:
    """The matrix ``(4, 4)`` from preprocessed voxels to the scan's: of axis i, which runs along the scan's axis
    ``axes[i]``, ``cropped[i]`` voxels from the start of ``box[i]`` on became ``shape[i]``.
    """
    scale = np.divide(cropped, shape)
    starts = np.array([start for start, _ in box])
    place = np.zeros((4, 4))
    place[axes, range(3)] = scale
    # Voxels' edges fall together, so their centres lie half a voxel from there.
    place[axes, 3] = starts + (scale - 1) / 2
    place[3, 3] = 1
    return place


def _spacing(image: MetaTensor, affine: np.ndarray) -> list[float]:
    """The voxel sizes in mm by axis, as the header lists them where it does."""
    # MONAI's ITKReader has them as `spacing`.
    listed = np.ravel(image.meta.get("pixdim", ()))[1:4].tolist()
    listed = listed or np.ravel(image.meta.get("spacing", ())).tolist()
    spacing = []
    for axis, size in enumerate(nib.affines.voxel_sizes(affine)[:3].tolist()):
        # The axes may have been turned: otherwise each has its own.
        sizes = [*listed[axis : axis + 1], *listed]
        near = [own for own in sizes if abs(own - size) <= 1e-4 * size]
        spacing.append(near[0] if near else size)
    return spacing
