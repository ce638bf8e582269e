"""The bases of all metrics of maps: MONAI's cumulative metrics, with a value for each map. Those that run the network
score masks by the loop that makes the maps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from monai.metrics import do_metric_reduction
from monai.utils import MetricReduction

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.cohort_explainer import Keeper
from monai_saliency.inferers.explanation import with_maps
from monai_saliency.inferers.inferer import PerturbationInferer, explaining
from monai_saliency.masks.base import BoundMasks, Id, Masks
from monai_saliency.targets.base import Quantity, to_float
from monai_saliency.utils.arguments import callable_network, check_option
from monai_saliency.utils.monai_private import BatchMetric
from monai_saliency.utils.tensors import checked_label, plain, shape_in_words


class SaliencyMetric(BatchMetric):
    """A number for each saliency map, usable in any MONAI evaluator. A subclass implements :meth:`compute`.

    Called with a batch, it returns the numbers ``(B, K)`` and keeps them; :meth:`aggregate` reduces what was kept, and
    ``reset`` begins anew. Batches are tensors ``(B, K, *spatial)`` or lists of channel-first items. A value that
    cannot be measured, such as for a case with an empty label, is NaN and left out of the mean.

    Args:
        reduction: how :meth:`aggregate` reduces cases and maps, as MONAI's metrics do: ``"mean"``, ``"sum"``,
            ``"mean_batch"``, ``"sum_batch"``, ``"mean_channel"``, ``"sum_channel"`` or ``"none"``.

    Attributes:
        higher_is_better: the direction of the metric.
    """

    higher_is_better: bool = True

    def __init__(self, reduction: MetricReduction | str = "mean") -> None:
        super().__init__()
        self.reduction = check_option("reduction", getattr(reduction, "value", reduction), [*MetricReduction])

    @abstractmethod
    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Measure one batch, without keeping the numbers.

        Args:
            y_pred: saliency maps ``(B, K, *spatial)``, finite, 2D or 3D.
            y: what the metric compares them with, batch first.

        Returns:
            ``(B, K)``, on the maps' device.
        """

    def aggregate(self, reduction: MetricReduction | str | None = None) -> torch.Tensor:
        """Reduce the numbers of all batches since the last reset, by the class's ``reduction`` or another.

        Returns:
            the reduced numbers, NaN where all of them are.

        Raises:
            ValueError: when no batch was measured.
        """
        values = self.get_buffer()
        if not isinstance(values, torch.Tensor):
            raise ValueError(f"{type(self).__name__} has measured no map yet: call it with maps first")
        reduction = reduction or self.reduction
        result, not_nans = do_metric_reduction(values, reduction)
        if reduction == MetricReduction.NONE:
            return result
        # MONAI gives 0 where nothing could be measured, which would read as the worst map or as the best.
        return torch.where(not_nans > 0, result, torch.nan)


def checked_maps(y_pred: torch.Tensor) -> torch.Tensor:
    """Finite 2D or 3D maps ``(B, K, *spatial)`` as a plain tensor, float32 or float64; ValueError for anything else."""
    maps = plain(y_pred)
    if not isinstance(maps, torch.Tensor) or maps.ndim not in (4, 5) or not maps.numel():
        raise ValueError(f"`y_pred` must be saliency maps (B, K, *spatial), 2D or 3D, got {shape_in_words(maps)}")
    finite = torch.isfinite(maps).flatten(1).all(dim=1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        raise ValueError(f"`y_pred` must be finite: the maps of item {first} hold NaN or infinity")
    return to_float(maps)


def checked_labels(maps: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    """The voxels of each map's label, bool ``(B, K, *spatial)`` on the maps' device."""
    labels = plain(y)
    if not isinstance(labels, torch.Tensor):
        raise ValueError("`y` must be label maps (B, 1, *spatial), got nothing to compare the maps with")
    expected = (len(maps), 1, *maps.shape[2:])
    if labels.ndim != maps.ndim or (len(labels), *labels.shape[2:]) != (len(maps), *maps.shape[2:]):
        raise ValueError(f"`y` must be label maps {expected}, on the grid of the maps, got {tuple(labels.shape)}")
    for label in labels:
        checked_label(label, maps.shape[2:], maps.shape[1])
    return (labels != 0).to(maps.device).expand_as(maps)


def check_one_grid(maps: torch.Tensor, images: torch.Tensor) -> None:
    """Refuse images ``(B, C, *spatial)`` that are not of the batch and the grid of the maps ``(B, K, *spatial)``."""
    if images.ndim != maps.ndim or len(images) != len(maps) or images.shape[2:] != maps.shape[2:]:
        raise ValueError(f"maps {tuple(maps.shape)} and images {tuple(images.shape)} are not of one batch and one grid")


class OneMap(NamedTuple):
    """One map ``(*spatial)`` of ``num_maps`` of a case, and its image ``(C, *spatial)``."""

    saliency: torch.Tensor
    number: int
    num_maps: int
    image: torch.Tensor
    case: Case


class Scored(NamedTuple):
    """Scores ``(N,)`` of perturbed images of one case, for one map, the score of the unperturbed image, and what these
    are.
    """

    masks: BoundMasks
    ids: Sequence[Id]
    scores: torch.Tensor
    reference: torch.Tensor
    quantity: Quantity


class NetworkMetric(SaliencyMetric):
    """A metric of a map and its image that runs the network. A subclass implements :meth:`of_case`.

    Call it with maps ``(B, K, *spatial)`` and images ``(B, C, *spatial)``. Where the target explains K values, map k is
    measured by value k; where it explains one, every map is, so that several maps of one score can be compared.

    Perturbed images go through the inferer that made the maps, with other masks: the same target, fill, inner inferer,
    autocast, batch size and remembered patches.

    Args:
        inferer: what made the maps, such as ``rise(target=...)``. Another fill: ``inferer.replace(fill=BlurFill())``.
        network: any callable on images.
        keeper: finds scores on disk, which are not computed again; by default none are kept.
        **options: ``reduction``, as for :class:`~monai_saliency.metrics.base.SaliencyMetric`.

    Attributes:
        num_forwards: the forwards that :meth:`score` has spent so far, counted as
            :attr:`Explanation.num_forwards <monai_saliency.Explanation.num_forwards>` counts them.

    Raises:
        ValueError: when ``inferer`` is not an inferer that explains, and (when called) when images and maps do not
            belong together.
    """

    def __init__(
        self, inferer: PerturbationInferer, network: Callable[..., Any], keeper: Keeper | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.keeper = keeper or Keeper()
        # Ranks measure cases of their own, so none waits for another.
        self.inferer = explaining(inferer).replace(progress=False, sharing=None)
        self.network = callable_network(network)
        self.num_forwards = 0

    @abstractmethod
    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        """The numbers ``(K,)`` of the K maps of one case."""

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """As for :class:`SaliencyMetric`; ``y`` are the images ``(B, C, *spatial)`` that the maps explain."""
        by_case = self.maps_by_case(y_pred, y)
        return torch.stack([self.of_case(maps_of_case).to(y_pred.device) for maps_of_case in by_case])

    def maps_by_case(
        self, y_pred: torch.Tensor, y: torch.Tensor | None, cases: Sequence[Case] | None = None
    ) -> list[list[OneMap]]:
        """The K maps of each of B cases, with their image; ``cases`` are known by the images' meta data otherwise."""
        maps = checked_maps(y_pred)
        if not isinstance(y, torch.Tensor) or y.ndim != maps.ndim:
            raise ValueError(f"`y` must be the images (B, C, *spatial) that the maps explain, got {shape_in_words(y)}")
        check_one_grid(maps, y)
        if cases is None:
            cases = [Case.of(y, index) for index in range(len(maps))]
        by_case = []
        for of_case, image, case in zip(maps, plain(y), cases, strict=True):
            by_case.append([OneMap(one, k, len(of_case), image, case) for k, one in enumerate(of_case)])
        return by_case

    def score(self, one: OneMap, masks: Masks) -> Scored:
        """Score perturbed images of one case, by masks that hide all channels alike."""
        # No map is made: any estimator takes these masks.
        inferer = self.inferer.replace(masks=masks, estimator=OcclusionScoring())
        stored = self.keeper(inferer, self.network, [replace(one.case, image=one.image)])
        found: list[Any] = inferer.score(one.image[None], self.network, cases=[one.case], stored=stored)
        (scored,) = with_maps(found)
        self.num_forwards += scored.num_forwards
        scores, reference = scored.scores.double(), scored.reference_scores.double()
        bound: Any = scored.masks
        if bound.channels is not None:
            raise ValueError(f"`masks` must hide all channels alike for {type(self).__name__}: use the masks inside")
        if len(reference) not in (1, one.num_maps):
            raise ValueError(
                f"case {one.case.name} has {one.num_maps} maps and the target explains {len(reference)} values: give "
                "the maps of this target, or a target of one value"
            )
        k = one.number if len(reference) > 1 else 0
        return Scored(bound, scored.ids, scores[:, k], reference[k], scored.target.quantity())
