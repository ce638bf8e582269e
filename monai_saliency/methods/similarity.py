"""What makes an image similar to another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.similarity import SimilarityScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.methods.checks import check_unit
from monai_saliency.targets import Target

__all__ = ["sbsm"]


def sbsm(
    window_size: float | Sequence[float] | None = None,
    stride: float | Sequence[float] | None = None,
    window_unit: str = "voxel",
    smooth: float | Sequence[float] = 0,
    *,
    target: Target,
    estimator: Estimator | None = None,
    **settings: Any,
) -> PerturbationInferer:
    """Similarity-based saliency maps, SBSM (Dong et al., CVPR workshops 2019): sliding windows, and how much similarity
    to a query is lost while a voxel is hidden. The value has no sign.

    Which similarity is the target's: ``EmbeddingSimilarity("distance", reference=queries)`` explains the distances to
    some embeddings, each by its own map.

    Args:
        window_size: edge of the hidden box, one number or one per axis; an eighth of each axis by default.
        stride: step from window to window, one number or one per axis; half of the window by default.
        window_unit: of both: ``"voxel"`` (of the network's input) or ``"mm"``.
        smooth: width in voxels over which the edge of a window rises, one number or one per axis; crisp by default.
        target: which number is explained, best an :class:`~monai_saliency.EmbeddingSimilarity`.
        estimator: ``SimilarityScoring()`` by default.
        settings: shared by all methods, see :mod:`monai_saliency.methods`.

    Raises:
        ValueError: when ``window_unit`` is another word.

    Example::

        >>> import torch
        >>> from monai_saliency import EmbeddingSimilarity
        >>> explain = sbsm(2, 2, target=EmbeddingSimilarity("cosine"))
        >>> saliency = explain(torch.tensor([[[[3.0, 3.0, 0.0, 0.0], [3.0, 3.0, 1.0, 1.0]]]]), torch.nn.Flatten())
        >>> bool(saliency[0, 0, 0, 0] > saliency[0, 0, 0, 3] > 0)
        True
    """
    check_unit(window_unit)
    masks = SlidingWindowMasks(window_size, stride, window_unit, smooth)
    return PerturbationInferer(masks, target, estimator or SimilarityScoring(), **settings)
