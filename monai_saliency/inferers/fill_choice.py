"""The fill of a cohort, chosen on its first cases."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import SettingError
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.named import AutoFill
from monai_saliency.inferers.cohort_explainer import Keeper
from monai_saliency.inferers.explanation import FILL_LEAVES, share_left
from monai_saliency.inferers.forward import evaluating
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.preflight import output_alone
from monai_saliency.inferers.progress import following
from monai_saliency.masks.base import BoundMasks
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.utils.tensors import blend, plain

logger = logging.getLogger(__name__)

#: the cases that choose the fill of a cohort
_CASES = 3
#: of candidates that are as good, but for this share, the first is taken
_ALIKE = 0.03
#: random halves of a scan that are hidden, with their complements, and the cells of these masks along each axis
_HALVES, _CELLS = 2, 7


def choose_fill(
    inferer: PerturbationInferer,
    network: Callable[..., Any],
    cases: Iterable[tuple[Any, Case]],
    keeper: Keeper | None = None,
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
        keeper: finds scores on disk, which are not computed again; by default none are kept.

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
    tried = _first_tried(inferer, network, cases, keeper or Keeper())
    left, missed = torch.cat(tried or [torch.ones(2, len(candidates), 1)], dim=2)
    counts = left.amin(dim=0) <= FILL_LEAVES
    errors = missed[:, counts].mean(dim=1).nan_to_num(torch.inf, torch.inf)
    errors[left[:, counts].mean(dim=1) > FILL_LEAVES] = torch.inf
    limit = errors.min() + _ALIKE
    best = next(name for name, error in zip(candidates, errors, strict=True) if error <= limit)

    line = f"fill: {best} (chosen by auto on {len(tried)} case{'s' * (len(tried) != 1)})."
    if not tried:
        line = f"fill: {best} (auto could try none of the first cases, which could not be read or explained)."
    if counts.any():
        words = [_in_words(name, error) for name, error in zip(candidates, errors.tolist(), strict=True)]
        line += f" Error of each candidate: {', '.join(words)}."
    if tried and errors.min() >= 1:  # infinite where no score counts
        line += " No candidate hides these scores well: expected for an absence, such as a healthy scan"
    logger.info(line)
    if inferer.progress:
        with following(inferer.progress) as progress:
            progress.say(line)
    return inferer.replace(fill=candidates[best])


def _in_words(name: str, error: float) -> str:
    return f"{name} {error:.0%}" if error < torch.inf else f"{name} leaves the score"


def _first_tried(
    inferer: PerturbationInferer, network: Any, cases: Iterable[tuple[Any, Case]], keeper: Keeper
) -> list[torch.Tensor]:
    """What :func:`_tried` gives for the first cases; those that cannot be explained are left out."""
    tried: list[torch.Tensor] = []
    for inputs, case in cases:
        try:
            tried.append(_tried(inferer, network, inputs, case, keeper))
        except SettingError:
            raise
        except Exception as error:
            logger.info("case %s is left out in the choice of the fill: %s", case.name, error)
        if len(tried) == _CASES:
            break
    return tried


def _tried(inferer: PerturbationInferer, network: Any, inputs: Any, case: Case, keeper: Keeper) -> torch.Tensor:
    """For each candidate and each of the K scores of a case ``(2, candidates, K)``: the share that is left with all
    hidden, and the share of this effect that two halves miss when they are hidden apart.
    """
    auto: Any = inferer.fill
    split = inferer.inputs.split(inputs)
    case = replace(case.with_image(split.images[0], 0, split.meta), labels=plain(case.labels))
    forward = inferer.forward(network, (), {})

    def output(image: torch.Tensor) -> Any:
        return output_alone(forward, split, 0, case.with_image(image, 0, split.meta), inferer.mask_batch_size)

    with torch.no_grad(), evaluating(network):
        unperturbed = output(case.image)
        bound = inferer.target.bind(unperturbed, case)
        before = bound(unperturbed)[0].clone()
        masks = RISEMasks(_HALVES, _CELLS).bind(case.image)
        kept = keeper(inferer, network, [case]) or []
        for stored in kept:
            stored.resume(before, repr(masks.key), bound.vouch)
        known = [scores for stored in kept for _, scores in stored.load()]
        if known:
            scores = known[0]
        else:
            halved = []
            for candidate in auto.candidates.values():
                fill = candidate.bind(case) if isinstance(candidate, CaseFill) else candidate
                halved += [bound(output(image))[0].clone() for image in _halved(case, fill, masks)]
            scores = torch.stack(halved)
            for stored in kept:
                stored.add(range(len(scores)), scores)
                stored.flush()
    scores = scores.unflatten(0, (len(auto.candidates), -1)).to(before)
    changes = (before - scores).double().cpu()
    hidden, halves = changes[:, :1], changes[:, 1::2] + changes[:, 2::2]
    left = share_left(bound, before, scores[:, 0], changes.abs().amax(dim=(0, 1)))
    return torch.stack([left, ((halves - hidden) / hidden).abs().mean(dim=1)])


def _halved(case: Case, fill: Any, masks: BoundMasks) -> Iterator[torch.Tensor]:
    """A case's image with everything hidden, then with each half and its complement."""
    image = case.image
    halves = (masks.render([number]).to(image) for number in range(_HALVES))
    for mask in itertools.chain([torch.zeros_like(image[None, :1])], *((half, 1 - half) for half in halves)):
        mask = mask if case.within is None else torch.where(case.within, mask, 1.0)
        filled = fill.of(image[None], mask) if hasattr(fill, "of") else fill(image[None])
        yield blend(filled.to(image), image[None], mask, bool(image.isfinite().all()))[0]
