"""How far do maps of one scan agree that were made with other seeds or other fills?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.fills.base import CaseFill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.metrics.base import SaliencyMetric, checked_maps
from monai_saliency.metrics.ranks import rank_correlation
from monai_saliency.metrics.scored import NetworkMetric, OneMap
from monai_saliency.utils.arguments import whole_number

__all__ = ["FillAgreement", "RankAgreement", "Repeatability", "agreement", "other_maps"]


class RankAgreement(SaliencyMetric):
    """Spearman's rank correlation of two maps of one scan, such as maps of two seeds, fills or methods. In [-1, 1],
    higher is better. NaN where a map is flat.

    ``reduction`` and ``get_not_nans`` are those of :class:`~monai_saliency.metrics.base.SaliencyMetric`.

    Raises:
        ValueError: (when called) when the maps have different shapes.

    Example::

        >>> RankAgreement()(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[2.0, 9.0, 5.0]]]])).tolist()
        [[0.5]]
    """

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        if y is None or y.shape != maps.shape:
            got = "nothing" if y is None else tuple(y.shape)
            raise ValueError(f"`y` must be other maps of the same scans, {tuple(maps.shape)}, got {got}")
        others = checked_maps(y).to(maps.device)
        found = [rank_correlation(a.flatten(1), b.flatten(1)) for a, b in zip(maps, others, strict=True)]
        return torch.stack(found)


class Repeatability(NetworkMetric):
    """How well a map repeats with another seed: Spearman's rank correlation with the map that the same method makes of
    the image with masks of another seed. In [-1, 1], higher is better. NaN where a map is flat.

    Repeatable is not right: a method that always shows the middle of the scan repeats perfectly.

    ``network`` and ``options`` are those of :class:`~monai_saliency.metrics.scored.NetworkMetric`.

    Args:
        inferer: what made the maps. Its masks must have a seed.
        seed: of the second map's masks; another one than ``inferer`` has.

    Raises:
        ValueError: when the masks of ``inferer`` have no seed, or have this one.

    Example::

        >>> import monai_saliency as ms
        >>> network = lambda x: x[..., :4, :4].flatten(1).sum(1, keepdim=True)
        >>> inferer = ms.rise(400, 4, target=ms.ClassScore([0], "none"))
        >>> images = torch.ones(1, 1, 16, 16)
        >>> agreement = Repeatability(inferer, network, seed=1)(inferer(images, network), images)
        >>> 0.1 < agreement.item() < 1
        True
    """

    def __init__(
        self, inferer: PerturbationInferer, network: Callable[..., Any], seed: int = 1, **options: Any
    ) -> None:
        super().__init__(inferer, network, **options)
        self.inferer = self.inferer.replace(masks=_with_seed(self.inferer.masks, whole_number("seed", seed, 0)))

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        return agreement(maps, other_maps(maps, self.inferer, self.network))


class FillAgreement(NetworkMetric):
    """How far a map depends on the fill: the mean of Spearman's rank correlations with the maps that the same method
    makes with other fills. In [-1, 1], higher is better. NaN where a map is flat.

    Where it is low, the map shows what the fill brings in as much as what the scan holds.

    ``inferer``, ``network`` and ``options`` are those of :class:`~monai_saliency.metrics.scored.NetworkMetric`.

    Args:
        fills: other fills, at least one, such as ``[MeanFill(), BlurFill()]``.

    Raises:
        ValueError: when there is no fill.
    """

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., Any],
        fills: Sequence[Callable[[torch.Tensor], torch.Tensor] | CaseFill],
        **options: Any,
    ) -> None:
        super().__init__(inferer, network, **options)
        if not fills:
            raise ValueError("`fills` must hold at least one fill to compare with, got none")
        self.inferers = [self.inferer.replace(fill=fill) for fill in fills]

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        found = [agreement(maps, other_maps(maps, each, self.network)) for each in self.inferers]
        return torch.stack(found).mean(0)


def other_maps(maps: Sequence[OneMap], inferer: PerturbationInferer, network: Callable[..., Any]) -> torch.Tensor:
    """The maps ``(K, *spatial)`` that another inferer, or another network, gives for a case of K maps."""
    first = maps[0]
    (explanation,) = inferer.explain(first.image[None], network, cases=[first.case])
    found = explanation.saliency
    if len(found) not in (1, len(maps)):
        raise ValueError(
            f"case {first.case.name} has {len(maps)} maps and `inferer` makes {len(found)}: give the inferer that made "
            "the maps"
        )
    return found.expand(len(maps), *found.shape[1:])


def agreement(maps: Sequence[OneMap], others: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation ``(K,)`` of K maps of one case with others ``(K, *spatial)``."""
    ours = torch.stack([one.saliency for one in maps])
    return rank_correlation(ours.flatten(1), others.to(ours.device).flatten(1))


def _with_seed(masks: Masks, seed: int) -> Masks:
    """The same masks with another seed, also where masks of each channel hold them."""
    changed: Any = copy.copy(masks)
    inside = getattr(masks, "masks", None)
    if isinstance(inside, Masks):
        changed.masks = _with_seed(inside, seed)
        return changed
    if not hasattr(changed, "seed") or getattr(changed, "num_masks", 1) is None:
        raise ValueError(
            f"{type(masks).__name__} draw nothing at random, so their map is the same each time: `Repeatability` is "
            "for masks with a seed, such as RISEMasks"
        )
    if changed.seed == seed:
        raise ValueError(
            f"`seed` must be another one than that of the map's masks, got {seed}: the maps would be equal"
        )
    changed.seed = seed
    return changed
