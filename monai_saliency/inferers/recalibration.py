"""Fitting the temperatures of a recalibrated target, once for a cohort."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.progress import following
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.networks.identity import network_key
from monai_saliency.targets.base import ACTIVATIONS
from monai_saliency.targets.classification import ClassScore
from monai_saliency.targets.recalibrated import STRENGTHS, Recalibrated, fit_temperature

__all__ = ["recalibrated"]

logger = logging.getLogger(__name__)

#: cases of the cohort, and masks of each at each strength
_CASES, _MASKS = 8, 6


def recalibrated(
    inferer: PerturbationInferer,
    network: Callable[..., Any],
    cases: Iterable[tuple[Any, Case]],
    network_id: str | None = None,
) -> PerturbationInferer:
    """Fit the temperatures of a :class:`~monai_saliency.Recalibrated` target on the first eight cases that can be
    explained, without labels.

    Six RISE masks of each case and each strength hide parts by the inferer's fill. The temperature of a strength has
    the least cross-entropy between the softened probabilities of these images, and the network's own probability of the
    unperturbed image (Decker et al. take labels instead). It takes 70 forwards of a case. The temperatures depend on
    the fill. They are kept with the fingerprint of the network, so that a changed network is fitted again.

    Args:
        inferer: explains the cohort; one with another target, or whose temperatures fit the network, is returned
            unchanged.
        network: the network.
        cases: inputs of one image ``(1, C, *spatial)``, each with its case, in the order of the cohort.
        network_id: a name of the network, needed where it is not a module.

    Returns:
        the inferer with the temperatures.

    Raises:
        ValueError: when no case can be explained.
        Unfingerprintable: when the network cannot be identified.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> target = ms.Recalibrated(ms.ClassScore([1], "softmax"))
        >>> explain = ms.rise(100, target=target)
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        >>> fitted = recalibrated(explain, network, [(torch.rand(1, 1, 4, 4), ms.Case("ct_7"))])
        >>> len(fitted.target.temperatures)
        10
    """
    target = inferer.target
    if not isinstance(target, Recalibrated) or (target.temperatures and target.network is None):
        return inferer
    known = network_key(network, network_id)
    if target.network == known:
        return inferer
    activation, fits = target.target.activation, list[list[tuple[torch.Tensor, torch.Tensor]]]()
    for inputs, case in cases:
        try:
            masks = [RISEMasks(_MASKS, p1=1 - strength, seed=len(fits)) for strength in STRENGTHS]
            fits.append([_logits(inferer, network, inputs, case, each) for each in masks])
        except Exception as error:
            logger.info("case %s is left out in the fit of temperatures: %s", case.name, error)
        if len(fits) == _CASES:
            break
    if not fits:
        raise ValueError("no temperature can be fitted, since none of the first cases can be explained")
    temperatures = []
    for strength in zip(*fits, strict=True):
        logits, unperturbed = (torch.cat(each) for each in zip(*strength, strict=True))
        temperatures.append(fit_temperature(logits, ACTIVATIONS[activation](unperturbed), activation))
    words = ", ".join(f"{each:.3g}" for each in temperatures)
    line = f"recalibration: for a hidden share of 0.05, 0.15 ... 0.95 the temperatures are {words} ({len(fits)} cases)"
    logger.info(line)
    if inferer.progress:
        with following(inferer.progress) as progress:
            progress.say(line)
    return inferer.replace(target=Recalibrated(target.target, temperatures, known))


def _logits(
    inferer: PerturbationInferer, network: Any, inputs: Any, case: Case, masks: RISEMasks
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits ``(n, C)`` of perturbed images of a case, and of the unperturbed image, repeated; of an
    ensemble's members one after another.
    """
    changes: dict[str, Any] = {"masks": masks, "target": ClassScore("all", "none"), "estimator": OcclusionScoring()}
    (scored,) = inferer.replace(**changes, progress=False, sharing=None).score(inputs, network, cases=[case])
    found, unperturbed = scored.state.scores, scored.state.reference_scores.expand_as(scored.state.scores)
    classes = found.shape[1] // scored.target.members
    return found.double().reshape(-1, classes), unperturbed.double().reshape(-1, classes)
