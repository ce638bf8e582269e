"""What the first cases of a cohort decide: its fill, and the temperatures of a recalibrated target."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import torch

from monai_saliency.cases import Case
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.named import AutoFill
from monai_saliency.inferers.explanation import FILL_LEAVES, share_left
from monai_saliency.inferers.forward import evaluating
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.progress import following
from monai_saliency.inferers.row_check import run_alone
from monai_saliency.masks.base import BoundMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.outputs import rows
from monai_saliency.networks.runtime import network_key
from monai_saliency.targets.base import ACTIVATIONS, MemberTarget
from monai_saliency.targets.classification import ClassScore
from monai_saliency.targets.recalibrated import STRENGTHS, Recalibrated, fit_temperature
from monai_saliency.utils.tensors import blend, plain

__all__ = ["choose_fill", "recalibrated"]

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

#: the cases that choose the fill of a cohort
_CASES = 3
#: of candidates that are as good, but for this share, the first is taken
_ALIKE = 0.03
#: random halves of a scan that are hidden, with their complements, and the cells of these masks along each axis
_HALVES, _CELLS = 2, 7
#: the cases that fit temperatures, and masks of each at each strength
_FITTED, _MASKS = 8, 6


def _of_first(
    cases: Iterable[tuple[Any, Case]], most: int, what: str, of: Callable[[Any, Case], _Found]
) -> list[_Found]:
    """What is found of the first cases, as many as ``most``; those that cannot be explained are left out."""
    found: list[_Found] = []
    for inputs, case in cases:
        try:
            found.append(of(inputs, case))
        except Exception as error:
            logger.info("case %s is left out in %s: %s", case.name, what, error)
        if len(found) == most:
            break
    return found


def _announce(inferer: PerturbationInferer, line: str) -> None:
    logger.info(line)
    if inferer.progress:
        with following(inferer.progress) as progress:
            progress.say(line)


def choose_fill(
    inferer: PerturbationInferer, network: Callable[..., Any], cases: Iterable[tuple[Any, Case]]
) -> PerturbationInferer:
    """Choose the fill of a cohort: the candidate under which the effects of two halves of a scan add up best.

    With a fill that takes away a region's content and adds nothing, hiding a random half of the scan and hiding the
    other half change the score, together, as much as hiding all of it. The difference, as a share of the effect of
    hiding all, is averaged over two divisions of each of the first three cases that can be explained. Of candidates
    within 0.03 of the least, the first is taken. A candidate is not taken if it leaves more than half of the scores
    when all is hidden.

    A score does not count if every candidate leaves more than half of it, such as the probability of a healthy scan:
    the absence of a lesion cannot be hidden. Without another score, the first candidate is taken. A line in the log
    names the fill. It takes one forward of each case unperturbed, and five for each candidate. The same network,
    settings and cases give the same fill, whoever chooses it.

    Args:
        inferer: explains the cohort, with an :class:`~monai_saliency.fills.AutoFill`.
        network: the network.
        cases: inputs of one image ``(1, C, *spatial)``, each with its case, in the order of the cohort.

    Returns:
        the inferer with the fill that was chosen. An inferer with another fill is returned unchanged.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.sliding_window(1, target=ms.RegressionScore(), fill=ms.fills.AutoFill())
        >>> image = torch.tensor([[[[0.0, 0.0, 3.0]]]])
        >>> network = lambda images: (images == 0).float().mean((1, 2, 3))[:, None]  # it counts zeros
        >>> chosen = choose_fill(explain, network, [(image, ms.Case("ct_7"))])
        >>> type(chosen.fill).__name__
        'MeanFill'
    """
    if not isinstance(inferer.fill, AutoFill):
        return inferer
    candidates = inferer.fill.candidates
    found = _of_first(cases, _CASES, "the choice of the fill", lambda *each: _tried(inferer, network, *each))
    left, missed = torch.cat(found or [torch.ones(2, len(candidates), 1)], dim=2)
    counts = left.amin(dim=0) <= FILL_LEAVES
    means = missed[:, counts].mean(dim=1).nan_to_num(torch.inf, torch.inf)
    means[left[:, counts].mean(dim=1) > FILL_LEAVES] = torch.inf
    best = next(name for name, mean in zip(candidates, means, strict=True) if mean <= means.min() + _ALIKE)
    each = ", ".join(_words(*pair) for pair in zip(candidates, means.tolist(), strict=True))
    why = f"two halves hidden apart miss of the effect of hiding all {each}"
    why = why if counts.any() else "no candidate hides any of the scores"
    _announce(inferer, f"fill auto: {best} is taken, since {why} ({len(found)} case{'s' * (len(found) != 1)})")
    return inferer.replace(fill=candidates[best])


def _words(name: str, missed: float) -> str:
    return f"{missed:.0%} with {name}" if missed < torch.inf else f"too much with {name}"


def _tried(inferer: PerturbationInferer, network: Any, inputs: Any, case: Case) -> torch.Tensor:
    """For each candidate and each of the K scores of a case ``(2, candidates, K)``: the share that is left with all
    hidden, and the share of this effect that two halves miss when they are hidden apart.
    """
    target: Any = inferer.target
    auto: Any = inferer.fill
    if isinstance(network, Ensemble):
        target, network = MemberTarget(target, len(network)), network.members
    split = inferer.inputs.split(inputs)
    case = replace(case.with_image(split.images[0], 0, split.meta), labels=plain(case.labels))
    forward, held = inferer.forward(network, (), {}, None), split.held_images[0]

    def scored(image: torch.Tensor) -> Any:
        def run(batch: torch.Tensor, words: str) -> Any:
            return rows(forward.images(batch, split, [(0, len(batch))], case.name), 0, 1, len(batch))

        return run_alone(network, torch.cat([image, held])[None], inferer.mask_batch_size, run)

    with torch.no_grad(), evaluating(network):
        output = scored(case.image)
        bound = target.bind(output, case)
        before = bound(output)[0].clone()
        masks = RISEMasks(_HALVES, _CELLS).bind(case.image)
        fills = [each.bind(case) if isinstance(each, CaseFill) else each for each in auto.candidates.values()]
        scores = torch.stack(
            [
                torch.stack([bound(scored(image))[0].clone() for image in _halved(case.image, each, masks)])
                for each in fills
            ]
        )
    changes = (before - scores).double().cpu()
    hidden, halves = changes[:, :1], changes[:, 1::2] + changes[:, 2::2]
    left = share_left(bound, before, scores[:, 0], changes.abs().amax(dim=(0, 1)))
    return torch.stack([left, ((halves - hidden) / hidden).abs().mean(dim=1)])


def _halved(image: torch.Tensor, fill: Any, masks: BoundMasks) -> Iterator[torch.Tensor]:
    """An image with everything hidden, then with each half and its complement."""
    halves = (masks.render([number]).to(image) for number in range(_HALVES))
    for mask in itertools.chain([torch.zeros_like(image[None, :1])], *((half, 1 - half) for half in halves)):
        filled = fill.of(image[None], mask) if hasattr(fill, "of") else fill(image[None])
        yield blend(filled.to(image), image[None], mask, bool(image.isfinite().all()))[0]


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
    seeds = count()

    def of_case(inputs: Any, case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
        seed = next(seeds)
        masks = [RISEMasks(_MASKS, p1=1 - strength, seed=seed) for strength in STRENGTHS]
        return [_logits(inferer, network, inputs, case, each) for each in masks]

    fits = _of_first(cases, _FITTED, "the fit of temperatures", of_case)
    if not fits:
        raise ValueError("no temperature can be fitted, since none of the first cases can be explained")
    activation, temperatures = target.target.activation, []
    for strength in zip(*fits, strict=True):
        logits, unperturbed = (torch.cat(each) for each in zip(*strength, strict=True))
        temperatures.append(fit_temperature(logits, ACTIVATIONS[activation](unperturbed), activation))
    words = ", ".join(f"{each:.3g}" for each in temperatures)
    line = f"recalibration: for a hidden share of 0.05, 0.15 ... 0.95 the temperatures are {words} ({len(fits)} cases)"
    _announce(inferer, line)
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
