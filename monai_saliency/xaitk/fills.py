"""xaitk-saliency's loop of MC-RISE, whose masks replace a pixel by one of several fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from smqtk_classifier.interfaces.classify_image import ClassifyImage

from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.xaitk.array_masks import BoundFillMasks
from monai_saliency.xaitk.arrays import bound_to, chunks, empty_image, map_from
from monai_saliency.xaitk.loop import classified
from monai_saliency.xaitk.networks import Classifier

__all__ = ["fill_maps", "fill_maps_of", "rendered_fills"]


def rendered_fills(masks: Masks, image: np.ndarray, device: torch.device | str | None = None) -> np.ndarray:
    """All masks of an image ``(fills, masks, H, W)``.

    Args:
        masks: the settings.
        image: ``(H, W)`` or ``(H, W, C)``.
        device: where masks are made.
    """
    bound = bound_to(masks, image, device, np.float64)
    found = np.empty((bound.channels or 1, len(bound), *image.shape[:2]))
    for chunk in chunks(bound):
        found[:, chunk.start : chunk.stop] = bound.render(chunk).movedim(1, 0).cpu().numpy()
    return found


def fill_maps_of(
    estimator: Estimator, scores: np.ndarray, masks: np.ndarray, device: torch.device | str | None = None
) -> np.ndarray:
    """Maps ``(fills, K, H, W)`` of scores and of masks that are there as an array, not scaled.

    Args:
        estimator: makes the maps.
        scores: ``(masks, K)``.
        masks: ``(fills, masks, H, W)`` in [0, 1].
        device: where maps are made.
    """
    bound = BoundFillMasks(empty_image(masks.shape[2:], device), masks)
    return _by_fill(map_from(estimator, bound, np.zeros(np.shape(scores)[1]), scores), bound)


def fill_maps(
    image: np.ndarray,
    blackbox: ClassifyImage,
    masks: Masks,
    estimator: Estimator,
    fills: Sequence[Sequence[float]],
    device: torch.device | str | None = None,
) -> np.ndarray:
    """Maps of a classifier, ``(fills, classes, H, W)``, not scaled.

    Args:
        image: ``(H, W)`` or ``(H, W, C)``.
        blackbox: classifies images.
        masks: replace a pixel by one of the fills, of which they hold all but the first.
        estimator: makes the maps.
        fills: the fills, each one number per channel.
        device: where masks and maps are made; None for a GPU where there is one.

    Raises:
        ValueError: when the fills do not fit the image, or the black box does not classify every image.
    """
    channels = 1 if image.ndim == 2 else image.shape[2]
    if len(fills[0]) != channels:
        raise ValueError(f"fill colors have {len(fills[0])} channels, and the image of shape {image.shape} {channels}")
    bound = bound_to(masks, image, device, np.float64)
    within = np.min(fills) >= 0 and np.max(fills) <= 255  # otherwise mixtures are cut
    if isinstance(blackbox, Classifier) and within:
        reference, scores = blackbox.scores(image, masks, fills[0])
    else:
        reference, scores = classified(blackbox, image, _perturbed(image, bound, fills), len(bound))
    return _by_fill(map_from(estimator, bound, reference, scores), bound)


def _perturbed(image: np.ndarray, bound: BoundMasks, fills: Sequence[Sequence[float]]) -> Iterator[np.ndarray]:
    """Perturbed images of an image's shape and type, made a few at a time, in double precision."""
    like = empty_image((), bound.device)
    numbers = torch.from_numpy(np.array(image, dtype=np.float64).reshape(*image.shape[:2], -1)).to(like)
    others = torch.as_tensor(np.asarray(fills, dtype=np.float64)).to(like)
    for chunk in chunks(bound):
        hidden = 1 - bound.render(chunk).to(like)
        with exact_arithmetic(bound.device):
            # In the order in which xaitk-saliency adds them: whole numbers are cut.
            filled, total = torch.zeros_like(numbers), torch.zeros_like(hidden[:, 0])
            for number, other in enumerate(others):
                filled = filled + hidden[:, number, :, :, None] * other
                total = total + hidden[:, number]
            batch = (1 - total)[..., None] * numbers + filled.clamp_(0, 255)
        yield from batch.reshape(len(batch), *image.shape).cpu().numpy().astype(image.dtype)


def _by_fill(maps: np.ndarray, bound: BoundMasks) -> np.ndarray:
    """Maps ordered by class, then by fill, as ``(fills, classes, H, W)``."""
    return np.moveaxis(maps.reshape(-1, bound.channels or 1, *bound.spatial_shape), 1, 0)
