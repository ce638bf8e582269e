"""Searches for masks that are sent given scores, in place of those of a network."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

import monai_saliency as ms
from monai_saliency.inferers.perturbation import Whole
from monai_saliency.inferers.scores import Scores
from monai_saliency.inferers.walk import Walk
from monai_saliency.masks.base import BoundMasks, Ids, Observed

__all__ = ["after", "asks_of", "driven", "observed_of", "searched"]


def after(bound: BoundMasks, reference: torch.Tensor, *scores: torch.Tensor) -> Any:
    """What a search asks for once its first rounds have some scores ``(n, 1)`` each; what it has observed, at its end.

    Args:
        bound: the masks.
        reference: ``(1,)``, the score of the unperturbed image.
        scores: of each round.
    """
    search = bound.search(reference)
    wanted = next(search)
    for of_round in scores:
        try:
            wanted = search.send(of_round)
        except StopIteration as end:
            return end.value
    return wanted


def driven(bound: BoundMasks, reference: torch.Tensor, scores_of: Callable[[Ids], torch.Tensor]) -> Observed:
    """What a search has observed at its end, where a function gives the scores ``(n, K)`` of masks."""
    search = bound.search(reference)
    wanted = next(search)
    while True:
        try:
            wanted = search.send(scores_of(wanted))
        except StopIteration as end:
            found: Observed = end.value
            return found


def searched(bound: BoundMasks, scores: torch.Tensor, reference: torch.Tensor) -> list[Observed]:
    """What the search of each score ``(K,)`` has observed, or the one of all: the i-th mask of a case that is asked for
    has the i-th row of some scores ``(n, K)``.
    """
    known = Scores("case")
    for ask in asks_of(bound, reference, known):
        if not isinstance(ask, list):
            return ask.observed
        known.add(ask, scores[len(known) :][: len(ask)])
    raise AssertionError


def asks_of(bound: BoundMasks, reference: torch.Tensor, scores: Scores) -> Iterator[Any]:
    """What a case asks for, round after round, and its explanation at last. Whoever takes an ask adds its scores."""
    images: Any = SimpleNamespace(masks=bound)
    target: Any = SimpleNamespace(if_nan="", vouch=None, nothing="")
    none: Any = None
    walk = Walk(ms.Case("case"), images, target, none, scores)
    walk.target = target
    scores.begin(reference, "", target)
    steps = walk.steps()
    while True:
        try:
            ask = next(steps)
        except StopIteration as end:
            yield end.value
            return
        yield [name for name in ask if not isinstance(name, Whole)]


def observed_of(bound: BoundMasks, scores: torch.Tensor, reference: torch.Tensor) -> Observed:
    """The first masks of a family that does not depend on scores, with their scores ``(n, K)``."""
    return Observed(bound, reference, range(len(scores)), scores)
