"""Insertion and deletion: how fast does the score change while the voxels that a map calls important come or go?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.order import OrderMasks
from monai_saliency.metrics.base import NetworkMetric, OneMap
from monai_saliency.utils.arguments import whole_number


@dataclass(frozen=True)
class PerturbationCurve:
    """The score while more and more of an image is perturbed, both ends included.

    Attributes:
        fractions: ``(n,)``, the true share of voxels that are deleted or inserted, from 0 to 1, ascending.
        scores: ``(n,)``, in the score's unit; the probability also where the target explains its log-odds.
    """

    fractions: torch.Tensor
    scores: torch.Tensor

    @property
    def auc(self) -> torch.Tensor:
        """The area under the curve by the trapezoidal rule: the mean score, in the score's unit."""
        return torch.trapezoid(self.scores, self.fractions)


class _Curve(NetworkMetric):
    """The base of insertion and deletion."""

    keep: bool

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., Any],
        steps: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(inferer, network, **options)
        self.steps = whole_number("steps", steps, 1)

    def curves(
        self, y_pred: torch.Tensor, y: torch.Tensor, cases: Sequence[Case] | None = None
    ) -> list[list[PerturbationCurve]]:
        """K curves for each of B images; arguments as for :meth:`compute`."""
        by_case = self.maps_by_case(y_pred, y, cases)
        return [[self._curve(one) for one in maps] for maps in by_case]

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        return torch.stack([self._curve(one).auc for one in maps])

    def _curve(self, one: OneMap) -> PerturbationCurve:
        scored = self.score(one, OrderMasks(one.saliency, self.steps, self.keep))
        masks: Any = scored.masks  # BoundOrderMasks
        hidden = torch.tensor(masks.hidden_fractions, dtype=torch.float64)
        scores = scored.quantity.reported(scored.scores).cpu()
        unperturbed = scored.quantity.reported(scored.reference[None]).cpu()
        if self.keep:
            inserted = torch.cat([1 - hidden, hidden.new_ones(1)])
            return PerturbationCurve(inserted, torch.cat([scores, unperturbed]))
        deleted = torch.cat([hidden.new_zeros(1), hidden])
        return PerturbationCurve(deleted, torch.cat([unperturbed, scores]))


class Deletion(_Curve):
    """The area under the score while the highest voxels of a map are replaced, highest first (Petsiuk et al., BMVC
    2018, section 4.1). Lower is better: the score falls at once where the map is right.

    The curve begins at the score of the unperturbed image and ends at the score of its fill. The area is the mean score
    on the way, in the score's unit. Voxels with equal values go at once (:class:`~monai_saliency.masks.OrderMasks`), so
    a flat map gives the mean of both ends.

    Deletion also rewards maps that destroy the image's structure early: compare with the controls
    (:func:`~monai_saliency.metrics.control_maps.with_controls`).

    For ``inferer``, ``network`` and ``options`` see :class:`~monai_saliency.metrics.base.NetworkMetric`.

    Args:
        steps: into how many equal shares the voxels are divided, at least 1: about as many perturbed images.

    Example::

        >>> import monai_saliency as ms
        >>> inferer = ms.sliding_window(1, 1, target=ms.ClassScore([0], "none"))
        >>> network = lambda x: x.flatten(1).sum(1, keepdim=True)  # the score is the sum of the image
        >>> image = torch.tensor([[[[6.0, 0.0], [2.0, 0.0]]]])
        >>> deletion = Deletion(inferer, network, steps=4)
        >>> deletion.curves(image, image)[0][0].scores.tolist()  # a map that equals the image; its zeros go at once
        [8.0, 2.0, 0.0, 0.0]
        >>> deletion(image, image).tolist()
        [[1.5]]
    """

    higher_is_better = False
    keep = False


class Insertion(_Curve):
    """The area under the score while the highest voxels of a map are put into the fill, highest first (Petsiuk et al.,
    BMVC 2018, section 4.1). Higher is better: the score rises at once where the map is right.

    The curve begins at the score of the fill and ends at the score of the unperturbed image; as for :class:`Deletion`
    otherwise. Petsiuk et al. insert into a blurred image: ``inferer.replace(fill=BlurFill())``.

    Insertion also rewards blurred maps, which insert smooth shapes: compare with the controls
    (:func:`~monai_saliency.metrics.control_maps.with_controls`).

    Args are the same as for :class:`Deletion`.
    """

    keep = True
