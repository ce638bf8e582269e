"""Checks of a method: does its map repeat with another seed or fill, and does it depend on what the network learned?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.fills.base import CaseFill
from monai_saliency.inferers.explanation import with_maps
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import Masks
from monai_saliency.metrics.agreement import rank_correlation
from monai_saliency.metrics.base import NetworkMetric, OneMap
from monai_saliency.utils.arguments import instance, whole_number


class _AgainstOthers(NetworkMetric):
    """Compares the K maps of a case with those that other inferers, or another network, give for it."""

    def __init__(self, inferer: PerturbationInferer, network: Callable[..., Any], **options: Any) -> None:
        super().__init__(inferer, network, **options)
        self.inferers = [self.inferer]

    def against(self, maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The numbers ``(K,)`` of maps ``(K, *spatial)`` compared with others."""
        return rank_correlation(maps.flatten(1), others.flatten(1))

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        return torch.stack([self._compared(maps, inferer) for inferer in self.inferers]).mean(0)

    def _compared(self, maps: Sequence[OneMap], inferer: PerturbationInferer) -> torch.Tensor:
        """The numbers ``(K,)`` of the K maps of a case, compared with those that an inferer makes of it."""
        image, case = maps[0].image, maps[0].case
        (explanation,) = with_maps(inferer.explain(image[None], self.network, cases=[case]))
        ours = torch.stack([one.saliency for one in maps])
        others = explanation.saliency.to(ours.device)
        if len(others) not in (1, len(maps)):
            raise ValueError(
                f"case {case.name} has {len(maps)} maps and `inferer` makes {len(others)}: give the inferer that made "
                "the maps"
            )
        return self.against(ours, others.expand_as(ours))


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

    If the map of the randomised network is flat, the value is 0. NaN where the map itself is flat.

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


def resemblance(maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation ``(K,)`` of maps ``(K, *spatial)`` with a randomised network's."""
    ours, theirs = maps.flatten(1), others.to(maps.device).flatten(1)
    only_theirs_is_flat = (theirs.amax(1) == theirs.amin(1)) & (ours.amax(1) > ours.amin(1))
    return torch.where(only_theirs_is_flat, 0.0, rank_correlation(ours, theirs))


def randomised(network: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """A deep copy of a network with random parameters. The network itself is left as it is, to the byte."""
    instance("network", network, torch.nn.Module, "a module, whose parameters can be drawn anew")
    whole_number("seed", seed, 0)
    parameter = next(network.parameters(), None)
    if parameter is None:
        raise ValueError("`network` has no parameters that could be drawn anew")
    copied = copy.deepcopy(network).cpu()  # drawn on the CPU, so that every device gives the same
    before = {name: tensor.detach().clone() for name, tensor in copied.named_parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in copied.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        for name, values in copied.named_parameters():
            if torch.equal(values, before[name]) and values.is_floating_point():
                _draw_alike(values)
    return copied.to(parameter.device)


def _draw_alike(values: torch.Tensor) -> None:
    """Draw a parameter in place: normal numbers with its standard deviation, or its size where all are equal."""
    wide = values.double().std(correction=0)
    if wide == 0:
        wide = values.double().abs().mean()
    if wide > 0:
        values.copy_(torch.randn(values.shape, dtype=torch.float64) * wide)


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
