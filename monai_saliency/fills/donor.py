"""Another scan of the cohort."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from os import PathLike
from typing import Any

import monai.transforms as mt
import numpy as np
import torch
from monai.data import MetaTensor

from monai_saliency.cases import Case
from monai_saliency.errors import AdviceError, root_cause
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.scan_unit import run_step, steps_on
from monai_saliency.storage.key import input_files
from monai_saliency.utils.affines import affine_in_mm
from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.tensors import plain


class DonorFill(CaseFill):
    """Another scan, such as a healthy one: a hidden voxel takes the donor's value at the same place.

    The donor must be preprocessed as the explained scans are, and lie in the same space, such as a template that all
    scans were registered to. If its grid differs, it is resampled linearly to the explained scan's grid by the two
    affines. Beyond the donor's border the voxel at the border is repeated.

    Args:
        donor: the donor's file, or an image ``(C, *spatial)`` in the network's input space.
        transform: the preprocessing that takes ``{key: file}``, such as a bundle's. None for a file that has been
            preprocessed: it is only loaded.
        key: where the items of ``transform`` hold the image.

    Raises:
        ValueError: when there is no such file, and from :meth:`bind`, when the donor cannot be preprocessed, has other
            channels, has another shape without an affine, or covers less than half of the scan.

    Example::

        >>> import torch
        >>> from monai_saliency.cases import Case
        >>> image = torch.tensor([[[1.0, 2.0]]])
        >>> DonorFill(torch.tensor([[[5.0, 6.0]]])).bind(Case("a", image))(image[None]).tolist()
        [[[[5.0, 6.0]]]]
    """

    def __init__(
        self,
        donor: str | PathLike[str] | torch.Tensor | np.ndarray,
        transform: Callable[[Any], Any] | None = None,
        key: Hashable = "image",
    ) -> None:
        self.files: Any = []  # their sizes and times, for the key of kept scores
        self.donor: str | torch.Tensor
        if isinstance(donor, (torch.Tensor, np.ndarray)):
            self.donor = torch.as_tensor(donor)
        else:
            self.donor = str(a_path("donor", donor).expanduser())
            self.files = input_files(self.donor)
            if not self.files:
                raise ValueError(f"`donor` must be a scan, and there is no file {self.donor}")
        load: Any = [mt.LoadImaged(key), mt.EnsureChannelFirstd(key)] if transform is None else transform
        self.transform = load if isinstance(load, mt.Compose) else mt.Compose(load)
        self.key = key

    def bind(self, case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
        fill = self._on_grid(self._image(), case)[None]
        return lambda images: fill.to(images)

    def _image(self) -> torch.Tensor:
        """The donor ``(C, *spatial)``, preprocessed."""
        if isinstance(self.donor, torch.Tensor):
            return self.donor
        image: Any = self.donor
        try:
            for step in steps_on(self.transform, self.key):
                image = run_step(step, self.key, image)
        except Exception as error:
            cause = root_cause(error)
            raise AdviceError(
                f"the donor {self.donor} could not be preprocessed ({type(cause).__name__}: {cause}): give a file that "
                "the preprocessing of the explained scans takes, or a preprocessed image"
            ) from error
        return torch.as_tensor(image)

    def _on_grid(self, donor: torch.Tensor, case: Case) -> torch.Tensor:
        """The donor on the grid of a case."""
        own = affine_in_mm(donor) if isinstance(donor, MetaTensor) else None
        wanted = case.affine
        same_place = own is None or wanted is None or np.allclose(own, wanted, atol=1e-3)
        if donor.shape == case.image.shape and same_place:
            return plain(donor)
        if own is None or wanted is None or donor.ndim != case.image.ndim or len(donor) != len(case.image):
            raise ValueError(
                f"the donor has shape {tuple(donor.shape)}, and the image {tuple(case.image.shape)}: their channels "
                "must agree, and without an affine for both (LoadImaged gives one) their shapes"
            )
        shape = case.image.shape[1:]
        covered = _resampled(torch.ones_like(plain(donor)[:1]), own, wanted, shape, beyond="zeros")
        if (share := float(covered.mean())) < 0.5:
            raise ValueError(f"the donor covers {share:.0%} of the scan: register the scans to one space first")
        return _resampled(plain(donor), own, wanted, shape, beyond="border")


def _resampled(
    values: torch.Tensor, affine: np.ndarray, wanted: np.ndarray, shape: Sequence[int], beyond: str
) -> torch.Tensor:
    """An image ``(C, *spatial)`` of an affine on the grid ``(C, *shape)`` of another, interpolated linearly."""
    image = MetaTensor(values.double(), affine=torch.as_tensor(affine))
    return plain(mt.SpatialResample("bilinear", padding_mode=beyond)(image, torch.as_tensor(wanted), shape))
