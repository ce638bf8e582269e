"""Choosing the fill of a cohort: which candidate leaves least of the score when it hides everything?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.named import AutoFill
from monai_saliency.inferers.explanation import FILL_LEAVES, share_left
from monai_saliency.inferers.forward import evaluating
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.progress import following
from monai_saliency.inferers.row_check import run_alone
from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.outputs import rows
from monai_saliency.targets.base import MemberTarget
from monai_saliency.utils.tensors import plain

__all__ = ["choose_fill"]

logger = logging.getLogger(__name__)

#: the cases that choose the fill of a cohort
_CASES = 3
#: of candidates that leave as little, but for this share, the first is taken
_ALIKE = 0.05


def choose_fill(
    inferer: PerturbationInferer, network: Callable[..., Any], cases: Iterable[tuple[Any, Case]]
) -> PerturbationInferer:
    """Choose the fill of a cohort: the candidate that leaves least of the scores, on average over the first three cases
    that can be explained. Of candidates within 0.05 of it, the first is taken.

    A score does not count if every candidate leaves more than half of it, such as the probability of a healthy scan:
    the absence of a lesion cannot be hidden. Without another score, the first candidate is taken. A line in the log
    names the fill. It takes one forward of each case unperturbed, and one for each candidate. The same network,
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
    candidates, found, count = inferer.fill.candidates, list[torch.Tensor](), 0
    for inputs, case in cases:
        try:
            found.append(_left(inferer, network, inputs, case))
        except Exception as error:
            logger.info("case %s is left out in the choice of the fill: %s", case.name, error)
        if (count := len(found)) == _CASES:
            break
    left = torch.cat(found or [torch.ones(len(candidates), 1)], dim=1)
    left = left[:, left.amin(dim=0) <= FILL_LEAVES]
    means = left.mean(dim=1).nan_to_num().tolist()
    best = next(name for name, mean in zip(candidates, means, strict=True) if mean <= min(means) + _ALIKE)
    each = ", ".join(f"{mean:.0%} with {name}" for name, mean in zip(candidates, means, strict=True))
    why = f"hiding everything leaves {each} of the scores" if left.shape[1] else "no candidate hides any of the scores"
    line = f"fill auto: {best} is taken, since {why} ({count} case{'s' * (count != 1)})"
    logger.info(line)
    if inferer.progress:
        with following(inferer.progress) as progress:
            progress.say(line)
    return inferer.replace(fill=candidates[best])


def _left(inferer: PerturbationInferer, network: Any, inputs: Any, case: Case) -> torch.Tensor:
    """The share of the K scores of a case that each candidate leaves, ``(candidates, K)``."""
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
        fills = [each.bind(case) if isinstance(each, CaseFill) else each for each in auto.candidates.values()]
        images = [fill(case.image[None])[0].to(case.image) for fill in fills]
        hidden = torch.stack([bound(scored(image))[0].clone() for image in images])
    changed = (hidden - before).abs().amax(dim=0)
    return share_left(bound, before, hidden, changed)
