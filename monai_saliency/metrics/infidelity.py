"""Does the sum of a map over what is hidden say how far the score falls? Infidelity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.metrics.base import NetworkMetric, OneMap, Scored
from monai_saliency.utils.arguments import flag, instance
from monai_saliency.utils.precision import accumulation_dtype


class Infidelity(NetworkMetric):
    """The mean squared difference between a map's sum over what is hidden and the fall of the score (Yeh et al.,
    NeurIPS 2019, equation 1). Lower is better, 0 is the best; in the score's unit, squared.

    With M a mask, S the map, f0 and f the scores of the unperturbed and of the perturbed image, it is the mean over the
    masks of ``(beta * sum((1 - M) * S) - (f0 - f)) ** 2``. Our maps say what hiding a voxel takes from the score, so
    the perturbation counts as the share that is hidden (captum's attributions that are multiplied by the input).

    For ``inferer``, ``network`` and ``options`` see :class:`~monai_saliency.metrics.base.NetworkMetric`.

    Args:
        masks: which perturbed images; by default ``RISEMasks(200, seed=1)``. Take another seed than the maps have.
        normalize: scale the map by the factor ``beta`` that suits it best (captum's ``normalize``), so that only its
            shape counts; otherwise ``beta`` is 1, and the map must be in the score's unit per voxel.

    Example::

        >>> import monai_saliency as ms
        >>> inferer = ms.sliding_window(1, 1, target=ms.ClassScore([0], "none"))
        >>> network = lambda x: x.flatten(1).sum(1, keepdim=True)  # the score is the sum of the image
        >>> image = torch.tensor([[[[6.0, 0.0], [2.0, 0.0]]]])
        >>> one_by_one = Infidelity(inferer, network, ms.masks.SlidingWindowMasks(1), normalize=False)
        >>> one_by_one(image, image).tolist(), one_by_one(image + 1, image).tolist()  # the second is wrong by 1
        ([[0.0]], [[1.0]])
    """

    higher_is_better = False

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., Any],
        masks: Masks | None = None,
        normalize: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(inferer, network, **options)
        instance("masks", masks, Masks, "masks such as RISEMasks(200)", none=True)
        self.masks = RISEMasks(200, seed=1) if masks is None else masks
        self.normalize = flag("normalize", normalize)

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        return torch.stack([self._of_map(one) for one in maps])

    def _of_map(self, one: OneMap) -> torch.Tensor:
        scored = self.score(one, self.masks)
        drops = (scored.reference - scored.scores).cpu()
        sums = _sums_of_hidden(scored, one.saliency)
        if self.normalize:
            power = (sums**2).mean()
            beta = (sums * drops).mean() / power if power > 0 else 1.0
            sums = beta * sums
        return ((sums - drops) ** 2).mean()


def _sums_of_hidden(scored: Scored, saliency: torch.Tensor) -> torch.Tensor:
    """The map's sum over what each mask hides, float64 ``(N,)``."""
    masks = scored.masks
    precise = accumulation_dtype(masks.device)
    values = saliency.to(masks.device, precise).flatten()
    sums = []
    for _, rendered in masks.stream(scored.ids):
        hidden = 1 - rendered.flatten(1).to(precise)
        sums.append(hidden @ values)
    return torch.cat(sums).double().cpu()
