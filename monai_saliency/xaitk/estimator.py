"""Any scoring of xaitk-saliency as an estimator."""

from __future__ import annotations

import numpy as np
import torch
from xaitk_saliency import GenerateClassifierConfidenceSaliency

from monai_saliency.estimators.base import Estimator, Meaning
from monai_saliency.masks.base import BoundMasks, Observed
from monai_saliency.utils.arguments import instance


class ConfidenceScoring(Estimator):
    """Any ``GenerateClassifierConfidenceSaliency`` of xaitk-saliency as an estimator.

    Its interface takes all masks as one array. So, unlike under every estimator of this package, memory grows with the
    number of masks, which are rendered into one array when the map is made.

    Args:
        generator: makes maps of confidences; xaitk-saliency scales its maps to [-1, 1].

    Raises:
        ValueError: for another object, and (from ``compute``) when channels have masks of their own, and
            when it makes maps of another shape or with NaN.

    Example::

        >>> import torch
        >>> from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
        >>> from monai_saliency.masks import Observed, SlidingWindowMasks
        >>> from monai_saliency.xaitk import ConfidenceScoring
        >>> masks = SlidingWindowMasks((1, 2), (1, 2)).bind(torch.zeros(1, 1, 6))
        >>> observed = Observed(masks, torch.tensor([5.0]), range(3), torch.tensor([[5.0], [1.0], [4.0]]))
        >>> ConfidenceScoring(OcclusionScoring()).compute(observed).tolist()
        [[[0.0, 0.0, 1.0, 1.0, 0.25, 0.25]]]
    """

    def __init__(self, generator: GenerateClassifierConfidenceSaliency) -> None:
        words = "a GenerateClassifierConfidenceSaliency of xaitk-saliency"
        self.generator = instance("generator", generator, GenerateClassifierConfidenceSaliency, words)

    @property
    def p1(self) -> float | None:
        """The probability that the scoring takes off the masks, where it has one: it must be theirs."""
        return getattr(self.generator, "p1", None)

    def check(self, masks: BoundMasks) -> None:
        if masks.channels is not None:
            name = type(self.generator).__name__
            raise ValueError(f"{name} reads one mask for all channels, and here each channel has its own")

    def compute(self, observed: Observed) -> torch.Tensor:
        masks = observed.masks
        self.check(masks)
        kept = torch.empty(len(observed.ids), *masks.spatial_shape, dtype=masks.dtype)
        for chunk, rendered in masks.stream(observed.ids):
            kept[chunk] = rendered[:, 0].cpu()
        reference = observed.reference_scores.double().cpu()
        scores = observed.scores.double().cpu()
        maps = np.asarray(self.generator(reference.numpy(), scores.numpy(), kept.numpy()))
        expected = (scores.shape[1], *masks.spatial_shape)
        if maps.shape == masks.spatial_shape:  # one map of all scores
            maps = np.broadcast_to(maps, expected)
        self._check_maps(maps, expected)
        made = torch.from_numpy(maps.astype(np.float64))
        return made.to(masks.device, masks.dtype)

    def _check_maps(self, maps: np.ndarray, expected: tuple[int, ...]) -> None:
        """Refuse maps of another shape, or with values that are not finite."""
        name = type(self.generator).__name__
        if maps.shape != expected:
            raise ValueError(f"{name} must make maps {expected} (scores, *spatial), got {maps.shape}")
        if not np.isfinite(maps).all():
            raise ValueError(f"{name} made a map with NaN or infinite values, as some do where all scores are equal")

    def meaning(self, masks: BoundMasks) -> Meaning:
        return Meaning(f"map of {type(self.generator).__name__}", in_score_unit=False)
