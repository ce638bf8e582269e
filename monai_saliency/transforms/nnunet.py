"""nnU-Net v2's own preprocessing as a MONAI transform, with the way back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
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

__all__ = ["NNUNetPreprocessd"]


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
        spacing = _spacing(image, affine)
        order = [2 - axis for axis in plans.transpose_forward]
        properties: dict[str, Any] = {"spacing": spacing[::-1]}
        made = settings.preprocessor_class(verbose=False).run_case_npy(
            np.ascontiguousarray(array, dtype=np.float32), None, properties, plans, settings, dict(self.dataset_json)
        )
        box = [[int(edge) for edge in side] for side in properties["bbox_used_for_cropping"]]
        cropped = [int(size) for size in properties["shape_after_cropping_and_before_resampling"]]
        result = torch.as_tensor(made[0])
        info = {
            "spacing": [float(size) for size in properties["spacing"]],
            "box": box,
            "cropped": cropped,
            "before": [int(size) for size in properties["shape_before_cropping"]],
            "affine": affine.tolist(),
            "mode": "bilinear",  # which Invertd(nearest_interp=True) changes
        }
        scale = [old / new for old, new in zip(cropped, result.shape[1:], strict=True)]
        place = np.zeros((4, 4))
        place[3, 3] = 1
        for axis, (of, size, (start, _)) in enumerate(zip(order, scale, box, strict=True)):
            # Voxels' edges fall together, so their centres lie half a voxel from there.
            place[of, axis], place[of, 3] = size, start + (size - 1) / 2
        out = MetaTensor(result, meta=image.meta, applied_operations=[*image.applied_operations])
        out.affine = torch.as_tensor(affine @ place)
        self.push_transform(out, orig_size=image.shape[1:], extra_info=info)
        return out

    def _back(self, image: MetaTensor) -> MetaTensor:
        plans, settings = self._managers()
        info = self.pop_transform(image)[TraceKeys.EXTRA_INFO]
        values = plain(image)
        spacing = [info["spacing"][axis] for axis in plans.transpose_forward]
        network = [*spacing[: len(spacing) - len(settings.spacing)], *settings.spacing]
        if info["mode"] == "nearest":
            values = torch.nn.functional.interpolate(values[None], tuple(info["cropped"]), mode="nearest-exact")[0]
        else:
            array = values.numpy(force=True)
            found = settings.resampling_fn_probabilities(array, info["cropped"], network, spacing)
            values = torch.as_tensor(found).to(values)
        whole = values.new_zeros(len(values), *info["before"])
        whole[everywhere(tuple(slice(*side) for side in info["box"]))] = values
        whole = whole.permute(0, *(axis + 1 for axis in plans.transpose_backward)).permute(0, 3, 2, 1)
        out = MetaTensor(whole.contiguous(), meta=image.meta, applied_operations=image.applied_operations)
        out.affine = torch.as_tensor(info["affine"], dtype=torch.float64)
        return out


def _spacing(image: MetaTensor, affine: np.ndarray) -> list[float]:
    """The voxel sizes in mm by axis, as the header lists them where it does."""
    pixdim = np.asarray(image.meta.get("pixdim", ()), dtype=np.float64).reshape(-1)[1:4].tolist()
    # MONAI's ITKReader has them as `spacing`.
    listed = pixdim or np.asarray(image.meta.get("spacing", ()), dtype=np.float64).reshape(-1).tolist()
    found = []
    for axis, size in enumerate(nib.affines.voxel_sizes(affine)[:3].tolist()):
        # The axes may have been turned: otherwise each has its own.
        near = [each for each in [*listed[axis : axis + 1], *listed] if abs(each - size) <= 1e-4 * size]
        found.append(near[0] if near else size)
    return found
