"""Checks of a method: does its map repeat with another seed or fill, and does it depend on what the network learned?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from monai_saliency.fills.base import CaseFill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.metrics.agreement import rank_correlation
from monai_saliency.metrics.base import NetworkMetric, OneMap, SaliencyMetric, checked_maps
from monai_saliency.utils.arguments import instance, whole_number

__all__ = ["EfficientParameterRandomisation", "FillAgreement", "ParameterRandomisation", "RankAgreement"]
__all__ += ["Repeatability", "entropy", "randomised", "resemblance"]


class RankAgreement(SaliencyMetric):
    """Spearman's rank correlation of two maps of one scan, such as maps of two seeds, fills or methods. In [-1, 1],
    higher is better. NaN where a map is flat.
    """

    def compute(self, y_pred: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        maps = checked_maps(y_pred)
        if y is None or y.shape != maps.shape:
            raise ValueError(f"`y` must be other maps of the scans, {maps.shape}, got {getattr(y, 'shape', None)}")
        others = checked_maps(y)
        return torch.stack([rank_correlation(a.flatten(1), b.flatten(1)) for a, b in zip(maps, others, strict=True)])


class _AgainstOthers(NetworkMetric):
    """Compares the K maps of a case with those that other inferers, or another network, give for it."""

    def __init__(self, inferer: PerturbationInferer, network: Callable[..., Any], **options: Any) -> None:
        super().__init__(inferer, network, **options)
        self.inferers = [self.inferer]

    def against(self, maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The numbers ``(K,)`` of maps ``(K, *spatial)`` compared with others."""
        return rank_correlation(maps.flatten(1), others.flatten(1))

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        first, ours = maps[0], torch.stack([one.saliency for one in maps])
        found = []
        for inferer in self.inferers:
            (explanation,) = inferer.explain(first.image[None], self.network, cases=[first.case])
            others = explanation.saliency.to(ours.device)
            if len(others) not in (1, len(maps)):
                raise ValueError(
                    f"case {first.case.name} has {len(maps)} maps and `inferer` makes {len(others)}: give the inferer "
                    "that made the maps"
                )
            found.append(self.against(ours, others.expand_as(ours)))
        return torch.stack(found).mean(0)


class Repeatability(_AgainstOthers):
    """How well a map repeats with another seed: Spearman's rank correlation with the map that the same method makes of
    the image with masks of another seed. In [-1, 1], higher is better. NaN where a map is flat.

    Repeatable is not right: a method that always shows the middle of the scan repeats perfectly.

    For ``network`` and ``options`` see :class:`~monai_saliency.metrics.base.NetworkMetric`.

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
        masks = _with_seed(self.inferer.masks, whole_number("seed", seed, 0))
        self.inferers = [self.inferer.replace(masks=masks)]


class FillAgreement(_AgainstOthers):
    """How far a map depends on the fill: the mean of Spearman's rank correlations with the maps that the same method
    makes with other fills. In [-1, 1], higher is better. NaN where a map is flat.

    Where it is low, the map shows what the fill brings in as much as what the scan holds.

    For ``inferer``, ``network`` and ``options`` see :class:`~monai_saliency.metrics.base.NetworkMetric`.

    Args:
        fills: other fills, at least one, such as ``[MeanFill(), BlurFill()]``.
    """

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., Any],
        fills: Sequence[Callable[[torch.Tensor], torch.Tensor] | CaseFill],
        **options: Any,
    ) -> None:
        super().__init__(inferer, network, **options)
        self.inferers = [self.inferer.replace(fill=fill) for fill in fills]


class ParameterRandomisation(_AgainstOthers):
    """Spearman's rank correlation between a map and the map of a randomised copy of the network (Adebayo et al.,
    NeurIPS 2018, section 3). In [-1, 1], lower is better, about 0 where the map depends on what was learned.

    If the map of the randomised network is flat, the value is 0. NaN where the
    map itself is flat.

    Args:
        inferer: what made the maps.
        network: the module that was explained. A deep copy is randomised (:func:`randomised`), the network itself is
            left as it is.
        seed: of the random parameters.
        **options: as for :class:`~monai_saliency.metrics.base.NetworkMetric`.

    Attributes:
        randomised: the randomised copy.

    Raises:
        ValueError: when the network is not a module, or has no parameters.

    Example::

        >>> import monai_saliency as ms
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        >>> inferer = ms.sliding_window(1, 1, target=ms.ClassScore([1], "none"))
        >>> images = torch.rand(1, 1, 8, 8)
        >>> -0.6 < ParameterRandomisation(inferer, network)(inferer(images, network), images).item() < 0.6
        True
    """

    higher_is_better = False

    def __init__(self, inferer: PerturbationInferer, network: torch.nn.Module, seed: int = 0, **options: Any) -> None:
        self.randomised = randomised(network, seed)
        super().__init__(inferer, self.randomised, **options)

    def against(self, maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return resemblance(maps, others)


class EfficientParameterRandomisation(ParameterRandomisation):
    """How far the entropy of the map rises when the network is randomised (efficient MPRT of Hedstroem et al., Sanity
    Checks Revisited, arXiv 2401.06465): ``(H(randomised) - H(map)) / H(map)``. Higher is better: what was learned gave
    the map its order. About 0 where the map does not depend on the parameters.

    H is the entropy of the histogram of a map's values, :func:`entropy`. It does not depend on where the values lie:
    read it together with :class:`ParameterRandomisation`. NaN where the map is flat.

    For ``inferer``, ``network``, ``seed`` and ``options`` see :class:`ParameterRandomisation`.

    Args:
        bins: of the histogram, at least 2; 100 as in the paper.
    """

    higher_is_better = True

    def __init__(
        self, inferer: PerturbationInferer, network: torch.nn.Module, seed: int = 0, bins: int = 100, **options: Any
    ) -> None:
        super().__init__(inferer, network, seed, **options)
        self.bins = whole_number("bins", bins, 2)

    def against(self, maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        before, after = (torch.tensor([entropy(one, self.bins) for one in each]) for each in (maps, others))
        return torch.where(before > 0, (after - before) / before, torch.nan)


def resemblance(maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation ``(K,)`` of maps ``(K, *spatial)`` with a randomised network's."""
    ours, others = maps.flatten(1), others.to(maps.device).flatten(1)
    nothing = (others.amax(1) == others.amin(1)) & (ours.amax(1) > ours.amin(1))
    return torch.where(nothing, 0.0, rank_correlation(ours, others))


def entropy(values: torch.Tensor, bins: int = 100) -> float:
    """The entropy of the histogram of values, in nats: 0 where all are equal, ``log(bins)`` where they are even."""
    return float(stats.entropy(np.histogram(values.double().numpy(force=True), bins)[0]))


def randomised(network: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """A deep copy of a network with random parameters. The network itself is left as it is, to the byte."""
    instance("network", network, torch.nn.Module, "a module, whose parameters can be drawn anew")
    whole_number("seed", seed, 0)
    parameter = next(network.parameters(), None)
    if parameter is None:
        raise ValueError("`network` has no parameters that could be drawn anew")
    place, copied = parameter.device, copy.deepcopy(network).cpu()
    before = {name: tensor.detach().clone() for name, tensor in copied.named_parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in copied.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        for name, each in copied.named_parameters():
            if torch.equal(each, before[name]) and each.is_floating_point():
                wide = each.double().std(correction=0)
                wide = wide if wide > 0 else each.double().abs().mean()
                if wide > 0:
                    each.copy_(torch.randn(each.shape, dtype=torch.float64) * wide)
    return copied.to(place)


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
        raise ValueError(f"`seed` must differ from the seed of the map's masks, got {seed}")
    changed.seed = seed
    return changed
