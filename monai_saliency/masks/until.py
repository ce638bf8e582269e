"""Random masks in rounds, until two halves of them agree on the map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Masks, Observed, Search, Spacing
from monai_saliency.utils.arguments import number, whole_number
from monai_saliency.utils.precision import accumulation_dtype
from monai_saliency.utils.tensors import correlation

# The first round has at least two masks for each half.
_FEWEST = 4
_FIRST = 100
# Fewer regions agree by chance.
_REGIONS = 5


class UntilMasks(Masks):
    """Random masks of another family, in rounds until the map is good enough, or all are used.

    After each round the map is made twice, of the masks at even and at odd places. r is the correlation of the two
    (Pearson) over voxels, or over regions where masks hide regions. The *agreement* is ``2 r / (1 + r)``
    (Spearman-Brown): the correlation to be expected between this map and one of as many masks of another seed. Of
    several maps, the lowest agreement counts. That of a map without any difference is 0.

    Each further round has half as many masks as were scored before it, so that few maps are made on the way: 100, 150,
    225, 337, ... masks in all. Mask i is mask i of the other family, so a map that stops after n masks is the map
    of n masks.

    Args:
        masks: the other family. Its masks are drawn at random, and ``num_masks`` of it is the largest number of masks.
        estimator: makes the map, such as :class:`~monai_saliency.estimators.RISEScoring`.
        until: the wanted agreement, above 0 and below 1.
        first: masks of the first round, at least 4; by default 100, or all where there are fewer.

    Raises:
        ValueError: for settings out of range, where the other masks are not drawn at random, and (from ``bind``) where
            they depend on earlier scores, or hide fewer than 5 regions, which agree by chance.

    Example::

        >>> import torch
        >>> from monai_saliency.estimators import RISEScoring
        >>> from monai_saliency.masks import RISEMasks, UntilMasks
        >>> bound = UntilMasks(RISEMasks(1000, 4), RISEScoring(), until=0.9).bind(torch.zeros(1, 16, 16))
        >>> search = bound.search(torch.ones(1))
        >>> first = next(search)
        >>> scores = bound.render(first)[:, :, 2, 2]  # a network whose score is the voxel (2, 2) of the mask
        >>> search.send(scores)
        range(100, 150)
    """

    def __init__(self, masks: Masks, estimator: Any, until: float = 0.95, first: int | None = None) -> None:
        self.masks = masks
        most = getattr(getattr(masks, "masks", masks), "num_masks", None)  # channel masks: the number of their family
        if most is None:
            raise ValueError(
                f"`until` needs masks that are drawn at random, with a `num_masks`, and {type(masks).__name__} are not"
            )
        self.estimator = estimator
        self.until = wanted_agreement(until)
        self.first = min(_FIRST, most) if first is None else whole_number("first", first, 1)
        if not _FEWEST <= self.first <= most:
            raise ValueError(
                f"the first round must have at least {_FEWEST} masks, two for each half, and at most the budget of "
                f"{most}, got {self.first}"
            )
        self.by_region, self.needs_labels = masks.by_region, masks.needs_labels

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        bound: Any = self.masks.bind(image, labels, spacing)
        if bound.adaptive:
            raise ValueError("masks that depend on earlier scores have their own end: leave out `until`")
        if bound.regions is not None and len(bound.regions.values) < _REGIONS:
            raise ValueError(
                f"`until` compares at least {_REGIONS} regions, and there are {len(bound.regions.values)}, which agree "
                "by chance: leave out `until`"
            )
        bound.stop = _Stop(self.estimator, self.until, self.first)
        bound.key = ("UntilMasks", self.until, self.first, type(self.estimator).__name__, *bound.key)
        return bound


@dataclass(frozen=True)
class _Stop:
    """Splits one round of masks into several."""

    estimator: Any
    until: float
    first: int

    def search(self, masks: BoundMasks, reference_scores: Tensor) -> Search:
        """Ask for more and more masks, until two halves of them agree."""
        observed, count = Observed(masks, reference_scores), self.first
        while True:
            yield from observed.ask(range(len(observed.ids), count))
            agreement = self.agreement(observed)
            if count == len(masks) or agreement >= self.until:
                return observed.ended(ended(agreement, self.until))
            count = min(len(masks), count + count // 2)

    def agreement(self, observed: Observed) -> float:
        """How far the map would agree with one of as many masks of another seed, in [-1, 1]."""
        maps = []
        for half in range(2):
            ids, scores = observed.ids[half::2], observed.scores[half::2]
            compared = Observed(observed.masks, observed.reference_scores, ids, scores)
            places = _places(observed.masks, self.estimator.compute(compared))
            maps.append(places.to(accumulation_dtype(places.device)))
        found = correlation(*maps).nan_to_num()  # of a map without any difference 0
        agreements = torch.where(found > 0, 2 * found / (1 + found), found)  # Spearman-Brown
        return float(agreements.min())


def _places(masks: BoundMasks, maps: Tensor) -> Tensor:
    """The values of maps ``(K, *spatial)`` that are compared, ``(K, places)``."""
    regions = masks.regions
    if regions is None:
        return maps.flatten(1)
    # All voxels of a region have its value: the first is taken.
    index = regions.index.flatten().long()
    first = torch.full((len(regions.values) + 1,), len(index), device=index.device)
    first.scatter_reduce_(0, index, torch.arange(len(index), device=index.device), "amin")
    return maps.flatten(1)[:, first[1:]]


def wanted_agreement(until: float) -> float:
    """Check a wanted agreement."""
    if not 0 < number("until", until) < 1:
        raise ValueError(f"`until` must be above 0 and below 1, a wanted agreement such as 0.95, got {until}")
    return float(until)


def ended(found: float, until: float) -> str:
    """Why rounds ended, of the agreement that was found and the one that was wanted."""
    if found >= until:
        return f"agreement {found:.3f} reached"
    return f"the budget is used, agreement {found:.3f} is below {until:g}"
