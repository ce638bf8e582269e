"""Does the map depend on what the network has learned? Maps of the network are compared with a randomised copy's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.metrics.ranks import rank_correlation
from monai_saliency.metrics.repeatability import other_maps
from monai_saliency.metrics.scored import NetworkMetric, OneMap
from monai_saliency.utils.arguments import instance, whole_number

__all__ = ["EfficientParameterRandomisation", "ParameterRandomisation", "entropy", "randomised", "resemblance"]


class ParameterRandomisation(NetworkMetric):
    """Spearman's rank correlation between a map and the map of a randomised copy of the network (Adebayo et al.,
    NeurIPS 2018, section 3). In [-1, 1], lower is better, about 0 where the map depends on what was learned.

    A flat map of the randomised network, in which nothing matters, has nothing in common with the map: 0. NaN where the
    map itself is flat.

    Args:
        inferer: what made the maps.
        network: the module that was explained. A deep copy is randomised (:func:`randomised`), the network itself is
            left as it is.
        seed: of the random parameters.
        **options: as for :class:`~monai_saliency.metrics.scored.NetworkMetric`.

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
        super().__init__(inferer, network, **options)
        self.randomised = randomised(network, seed)

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        others = other_maps(maps, self.inferer, self.randomised)
        return resemblance(torch.stack([one.saliency for one in maps]), others)


class EfficientParameterRandomisation(ParameterRandomisation):
    """How far the entropy of the map rises when the network is randomised (efficient MPRT of Hedstroem et al., Sanity
    Checks Revisited, arXiv 2401.06465): ``(H(randomised) - H(map)) / H(map)``. Higher is better: what was learned gave
    the map its order. About 0 where the map does not depend on the parameters.

    H is the entropy of the histogram of a map's values, :func:`entropy`. It knows nothing of where values lie: read it
    together with :class:`ParameterRandomisation`. NaN where the map is flat.

    ``inferer``, ``network``, ``seed`` and ``options`` are those of :class:`ParameterRandomisation`.

    Args:
        bins: of the histogram, at least 2; 100 as in the paper.

    Raises:
        ValueError: when the network is not a module, or has no parameters, or for settings out of range.
    """

    higher_is_better = True

    def __init__(
        self, inferer: PerturbationInferer, network: torch.nn.Module, seed: int = 0, bins: int = 100, **options: Any
    ) -> None:
        super().__init__(inferer, network, seed, **options)
        self.bins = whole_number("bins", bins, 2)

    def of_case(self, maps: Sequence[OneMap]) -> torch.Tensor:
        before = torch.stack([entropy(one.saliency, self.bins) for one in maps])
        after = torch.stack([entropy(other, self.bins) for other in other_maps(maps, self.inferer, self.randomised)])
        return torch.where(before > 0, (after - before) / before, torch.nan)


def resemblance(maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation ``(K,)`` of maps ``(K, *spatial)`` with a randomised network's."""
    ours, others = maps.flatten(1), others.to(maps.device).flatten(1)
    nothing = (others.amax(1) == others.amin(1)) & (ours.amax(1) > ours.amin(1))
    return torch.where(nothing, 0.0, rank_correlation(ours, others))


def entropy(values: torch.Tensor, bins: int = 100) -> torch.Tensor:
    """The entropy of the histogram of values, in nats: 0 where all are equal, ``log(bins)`` where they are even."""
    found = values.detach().flatten().to("cpu", torch.float64)
    low, high = found.min(), found.max()
    if low == high:
        return torch.zeros((), dtype=torch.float64)
    place = ((found - low) / (high - low) * bins).long().clamp(max=bins - 1)
    share = place.bincount(minlength=bins).double() / len(found)
    return -torch.special.xlogy(share, share).sum()


def randomised(network: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """A deep copy of a network with random parameters. The network itself is left as it is, to the byte."""
    instance("network", network, torch.nn.Module, "a module, whose parameters can be drawn anew")
    whole_number("seed", seed, 0)
    if not any(True for _ in network.parameters()):
        raise ValueError("`network` has no parameters that could be drawn anew")
    copied = copy.deepcopy(network)
    device = next(copied.parameters()).device
    copied.cpu()
    before = {name: tensor.detach().clone() for name, tensor in copied.named_parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in copied.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        for name, parameter in copied.named_parameters():
            if torch.equal(parameter, before[name]) and parameter.is_floating_point():
                wide = parameter.double().std(correction=0)
                wide = wide if wide > 0 else parameter.double().abs().mean()
                if wide > 0:
                    parameter.copy_((torch.randn(parameter.shape, dtype=torch.float64) * wide).to(parameter))
    return copied.to(device)
