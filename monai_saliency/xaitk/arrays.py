"""Masks, perturbed images and maps of the engine as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.estimators.base import Estimator
from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.xaitk.array_masks import ArrayMasks
from monai_saliency.xaitk.images import fill_of, tensor_of

__all__ = [
    "bound_to",
    "chosen_device",
    "chunks",
    "empty_image",
    "map_from",
    "maps_of",
    "perturbed_images",
    "rendered",
]

# Masks that are rendered at once, and the most voxels of these.
_AT_ONCE, _VOXELS = 64, 2**21


def chosen_device(device: torch.device | str | None = None) -> torch.device:
    """The device that is asked for; for None the GPU where there is one, or else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bound_to(
    masks: Masks, image: np.ndarray, device: torch.device | str | None, kind: type[np.generic] = np.float32
) -> BoundMasks:
    """Masks, bound to an image in its precision; in double precision where it holds whole numbers, of which nothing may
    be taken by rounding, or where the masks are to be of this type.

    Raises:
        ValueError: when the masks do not fit the image.
    """
    like = empty_image((), device)
    single = image.dtype in (np.float16, np.float32) and kind is not np.float64
    return masks.bind(tensor_of(image, torch.float32 if single else like.dtype, like.device))


def empty_image(shape: Sequence[int], device: torch.device | str | None) -> torch.Tensor:
    """An image ``(1, *shape)`` without values, in double precision, for masks that do not read it."""
    device = chosen_device(device)
    return torch.empty(1, *shape, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def rendered(
    masks: Masks, image: np.ndarray, kind: type[np.generic], device: torch.device | str | None = None
) -> np.ndarray:
    """All masks of an image ``(masks, H, W)``.

    Args:
        masks: the settings.
        image: ``(H, W)`` or ``(H, W, C)``.
        kind: the type of the result.
        device: where masks are made.
    """
    bound = bound_to(masks, image, device, kind)
    found = np.empty((len(bound), *image.shape[:2]), dtype=kind)
    for chunk in chunks(bound):
        found[chunk.start : chunk.stop] = bound.render(chunk)[:, 0].cpu().numpy()
    return found


def chunks(bound: BoundMasks, channels: int = 1) -> Iterator[range]:
    """The masks, as many at a time as memory is spent on: few enough that it is used again, not asked for anew.

    Args:
        bound: the masks.
        channels: of the images that are made of them.
    """
    step = int(
        min(_AT_ONCE, max(1, _VOXELS // max(1, channels * (bound.channels or 1) * math.prod(bound.spatial_shape))))
    )
    for start in range(0, len(bound), step):
        yield range(start, min(start + step, len(bound)))


def perturbed_images(
    image: np.ndarray, bound: BoundMasks, kind: type[np.generic], fill: Any, in_image_type: bool
) -> Iterator[np.ndarray]:
    """Perturbed images of an image's shape and type, made a few at a time, as xaitk-saliency makes them.

    ``mask * image + (1 - mask) * fill`` is computed in the precision in which xaitk-saliency does, and cut to whole
    numbers where the image holds whole numbers.

    Args:
        image: ``(H, W)`` or ``(H, W, C)``.
        bound: the masks.
        kind: NumPy's type of the masks.
        fill: what replaces hidden pixels, as for :func:`fill_of`.
        in_image_type: whether the fill has the image's type, as xaitk-saliency has it for detectors and descriptors;
            otherwise a fill of several numbers has its own.

    Raises:
        ValueError: when the fill does not fit.
    """
    values = fill_of(fill, image)
    kind = np.float32 if kind is np.bool_ else kind  # 0 and 1
    kept = _torch_type(np.result_type(kind, image.dtype), bound)
    hidden = kept if in_image_type or not np.ndim(fill) else _torch_type(np.result_type(kind, values.dtype), bound)
    numbers, other = tensor_of(image, kept, bound.device), torch.as_tensor(0.0)
    if np.ndim(fill):
        other = tensor_of(np.broadcast_to(values, image.shape), hidden, bound.device)
    elif fill is not None:
        other = torch.as_tensor(float(values), dtype=hidden, device=bound.device)
    for chunk in chunks(bound, len(numbers)):
        masks = bound.render(chunk).to(_torch_type(kind, bound))
        with exact_arithmetic(bound.device):
            batch = masks * numbers
            if fill is not None:
                batch = batch + (1 - masks) * other
        for each in batch.cpu().numpy():
            yield _channel_last(each, image)


def _channel_last(perturbed: np.ndarray, image: np.ndarray) -> np.ndarray:
    """A new array ``(H, W)`` or ``(H, W, C)`` of an image's shape and type, of one with the channel first."""
    found = np.empty_like(image, order="C", subok=False)
    planes = [found] if image.ndim == 2 else [found[..., channel] for channel in range(len(perturbed))]
    for plane, values in zip(planes, perturbed, strict=True):
        np.copyto(plane, values, casting="unsafe")
    return found


def _torch_type(kind: Any, bound: BoundMasks) -> torch.dtype:
    precise = np.dtype(kind) == np.float64 and bound.device.type != "mps"
    return torch.float64 if precise else torch.float32


def maps_of(
    estimator: Estimator,
    reference: np.ndarray,
    scores: np.ndarray,
    masks: np.ndarray,
    device: torch.device | str | None = None,
) -> np.ndarray:
    """Maps ``(K, H, W)`` of scores and of masks that are there as an array, in double precision and not scaled.

    Args:
        estimator: makes the maps.
        reference: ``(K,)``, the scores of the image.
        scores: ``(masks, K)``.
        masks: ``(masks, H, W)`` in [0, 1].
        device: where maps are made.

    Raises:
        ValueError: for masks with other axes.
    """
    empty = empty_image(np.shape(masks)[1:], device)
    return map_from(estimator, ArrayMasks(masks).bind(empty), reference, scores)


@torch.no_grad()
def map_from(
    estimator: Estimator, bound: BoundMasks, reference: np.ndarray, scores: np.ndarray | Sequence[Any]
) -> np.ndarray:
    """Maps ``(K, H, W)`` of all scores of some masks, not scaled.

    Args:
        estimator: makes the maps.
        bound: the masks.
        reference: ``(K,)``, the scores of the image.
        scores: ``(masks, K)``.
    """
    state = estimator.start(bound, torch.as_tensor(np.asarray(reference, dtype=np.float64)))
    state.update(range(len(bound)), torch.as_tensor(np.asarray(scores, dtype=np.float64)))
    return state.compute().cpu().numpy()
