"""Label maps whose regions are hidden, on the image's grid."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform
from monai.utils import CommonKeys

from monai_saliency.errors import AdviceError, CaseError, as_case_error
from monai_saliency.storage.label_maps import load_label, on_image
from monai_saliency.utils.affines import affine_in_mm
from monai_saliency.utils.tensors import checked_label


class LoadRegionsd(MapTransform):
    """Loads label maps (organs or an atlas) and resamples them to an image's grid by nearest neighbour.

    Place it at the end of the preprocessing. A label map may have any grid: it is placed by its affine, or, on a
    photograph, stretched over it. Outside the label map the label is 0.

    Args:
        keys: the keys of the label maps' files.
        names: the keys of the loaded label maps ``(1, *spatial)``, one for each of ``keys``.
        image_key: the key of the preprocessed image ``(C, *spatial)``.
        allow_missing_keys: whether items may lack a key.

    Raises:
        ValueError: when there is not one name for each key.
        CaseError: when called, if a case has no label map, one that cannot be loaded, one with several channels, one
            whose values are not labels, or one whose header puts it nowhere or outside the scan.

    Example::

        item = LoadRegionsd("organs")({"image": image, "organs": "organs.nii.gz", "case": "a"})
        item["regions"]  # (1, *spatial) on the image's grid
    """

    def __init__(
        self,
        keys: KeysCollection = CommonKeys.LABEL,
        names: str | Sequence[str] = "regions",
        image_key: str = CommonKeys.IMAGE,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.names = (names,) if isinstance(names, str) else tuple(names)
        if len(self.names) != len(self.keys):
            raise ValueError(f"`names` must name one place for each of the keys {self.keys}, got {self.names}")
        self.image_key = image_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key, name in self.key_iterator(d, self.names):
            case = str(d.get("case", key))
            if not d[key]:
                raise CaseError(
                    case,
                    f"it has no label map (its {key!r} is empty), so it has no regions to hide: list one in "
                    "dataset.json, or make regions from the scan itself (supervoxels)",
                )
            try:
                d[name] = self._loaded(d[key], d[self.image_key])
            except AdviceError as error:
                raise CaseError(case, f"its label map {d[key]} cannot be used: {error}") from error
            except Exception as error:  # the scan itself may be in order, so the file is named
                raise as_case_error(
                    error,
                    case,
                    before=f"its label map {d[key]} cannot be used: ",
                    after=". Replace that file, or make regions from the scan itself (supervoxels)",
                ) from error
        return d

    def _loaded(self, path: str, image: MetaTensor) -> MetaTensor:
        """A label map ``(1, *spatial)`` on an image's grid."""
        values, affine = load_label(path, image)
        checked_label(values, values.shape[1:])  # NaN too, which the figures of a label take for 0
        found = on_image(values[0], affine, image)
        if values.any() and not found.any():
            raise AdviceError(
                f"all of its labels lie outside the preprocessed scan: correct its affine {affine.round(3).tolist()}"
            )
        # float64 holds large labels exactly
        return MetaTensor(torch.as_tensor(found[None].astype(np.float64)), affine=torch.as_tensor(affine_in_mm(image)))
