"""The base of metrics that run the network: they score masks by the loop that makes the maps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from monai_saliency.cases import Case
from monai_saliency.inferers.inferer import PerturbationInferer, explaining
from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.metrics.base import SaliencyMetric, checked_maps
from monai_saliency.utils.arguments import callable_network
from monai_saliency.utils.tensors import plain

__all__ = ["NetworkMetric", "OneMap", "Scored"]


class OneMap(NamedTuple):
    """One map ``(*spatial)`` of ``num_maps`` of a case, and its image ``(C, *spatial)``."""

    saliency: torch.Tensor
    number: int
    num_maps: int
    image: torch.Tensor
    case: Case


class Scored(NamedTuple):
    """Scores ``(N,)`` of perturbed images of one case, for one map, and the score of the unperturbed image."""

    masks: BoundMasks
    ids: Sequence[Id]
    scores: torch.Tensor
    reference: torch.Tensor


class NetworkMetric(SaliencyMetric):
    """A metric of a map and its image that runs the network. A subclass implements :meth:`of_case`.

    Call it with maps ``(B, K, *spatial)`` and images ``(B, C, *spatial)``. Where the target explains K values, map k is
    measured by value k; where it explains one, every map is, so that several maps of one score can be compared.

    Perturbed images go through the inferer that made the maps, with other masks: the same target, fill, inner inferer,
    autocast, batch size and remembered patches.

    Args:
        inferer: what made the maps, such as ``rise(target=...)``.
        network: any callable on images.
            Another fill: ``inferer.replace(fill=BlurFill())``.
        **options: ``reduction`` and ``get_not_nans``, as for :class:`~monai_saliency.metrics.base.SaliencyMetric`.

    Attributes:
        num_forwards: the forwards that :meth:`score` has spent so far, counted as
            :attr:`Explanation.num_forwards <monai_saliency.Explanation.num_forwards>` counts them.

    Raises:
        ValueError: when ``inferer`` is not an inferer that explains, and (when called) when images and maps do not
            belong together.
    """

    def __init__(self, inferer: PerturbationInferer, network: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        # Ranks measure cases of their own, so none waits for another.
        self.inferer = explaining(inferer).replace(progress=False, sharing=None)
        self.network = callable_network(network)
        self.num_forwards = 0

    @abstractmethod
    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        """The numbers ``(K,)`` of the K maps of one case."""

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Measure one batch, without keeping the numbers.

        Args:
            y_pred: saliency maps ``(B, K, *spatial)``.
            y: the images that they explain, ``(B, C, *spatial)``, as the network takes them.

        Returns:
            ``(B, K)``, on the maps' device.
        """
        maps = checked_maps(y_pred)
        return torch.stack([self.of_case(each).to(maps.device) for each in self.each(y_pred, y)])

    def each(
        self, y_pred: torch.Tensor, y: torch.Tensor | None, cases: Sequence[Case] | None = None
    ) -> list[list[OneMap]]:
        """The K maps of each of B cases, with their image.

        Arguments as for :meth:`compute`; ``cases`` are known by the images' meta data otherwise.
        """
        maps = checked_maps(y_pred)
        if not isinstance(y, torch.Tensor) or y.ndim != maps.ndim:
            got = f"shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
            raise ValueError(f"`y` must be the images (B, C, *spatial) that the maps explain, got {got}")
        if len(y) != len(maps) or y.shape[2:] != maps.shape[2:]:
            raise ValueError(f"maps {tuple(maps.shape)} and images {tuple(y.shape)} are not of one batch and one grid")
        known = [Case.of(y, index) for index in range(len(maps))] if cases is None else cases
        images, count = plain(y), maps.shape[1]
        pairs = zip(maps, images, known, strict=True)
        return [[OneMap(own[k], k, count, image, case) for k in range(count)] for own, image, case in pairs]

    def score(self, one: OneMap, masks: Masks) -> Scored:
        """Score perturbed images of one case, by masks that hide all channels alike."""
        (state,) = self.inferer.replace(masks=masks).score(one.image[None], self.network, cases=[one.case])
        self.num_forwards += state.num_forwards
        scores, reference = state.state.scores.double(), state.state.reference_scores.double()
        if state.masks.channels is not None:
            raise ValueError(f"`masks` must hide all channels alike for {type(self).__name__}: use the masks inside")
        if len(reference) not in (1, one.num_maps):
            raise ValueError(
                f"case {one.case.name} has {one.num_maps} maps and the target explains {len(reference)} values: give "
                "the maps of this target, or a target of one value"
            )
        k = one.number if len(reference) > 1 else 0
        return Scored(state.masks, state.state.ids, scores[:, k], reference[k])
