"""An explanation in one call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods.arguments import TargetLike
from monai_saliency.methods.arguments import method as reading_arguments
from monai_saliency.methods.settings import Method, find_method
from monai_saliency.utils.arguments import callable_network

__all__ = ["explain"]

_OF_CALL = ("labels", "spacing", "names", "within", "cases")


def explain(
    network: Callable[..., Any],
    images: Any,
    target: TargetLike = None,
    method: str | Method = "focused_rise",
    **settings: Any,
) -> torch.Tensor:
    """Saliency maps of a batch of images, in one call. A line on stderr says what they explain.

    Args:
        network: any callable on such images.
        images: a tensor or NumPy array ``(B, C, *spatial)``, floating point, or what the setting ``inputs`` takes.
        target: which number of the output is explained: a target, a class, a list of classes, or ``"all"``; a tensor
            ``(B,)`` of whole numbers is a class for each image, such as its label; by default what the network
            predicts (:class:`~monai_saliency.targets.auto.AutoTarget`). Its settings ``activation``, ``scale`` and
            ``against`` may be given here, too. An error asks for ``activation`` where it is not known what the output's
            numbers mean.
        method: a function such as ``ms.rise``, its name, or the dotted path of your own function.
        settings: of the method, such as ``num_masks`` and ``fill`` (a fill, a number, or a name such as ``"mean"``);
            and ``labels``, ``spacing``, ``names``, ``within`` and ``cases`` of
            :meth:`~monai_saliency.PerturbationInferer.explain`.

    Returns:
        ``(B, K, *spatial)``: K maps for each image, one for each explained score, in the score's unit.

    Raises:
        TypeError: for a setting that the method does not have.
        ValueError: when the images cannot be explained, with the reason.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> images = torch.ones(1, 1, 8, 8)
        >>> ms.explain(lambda images: images[:, 0, :2, :2].sum((1, 2)), images, num_masks=40).shape
        torch.Size([1, 1, 8, 8])
    """
    if isinstance(method, PerturbationInferer):
        raise ValueError(
            "`method` must be a name or a function such as ms.rise, without its brackets: give its settings to "
            "explain, or call what it made, explain = ms.rise(target=...); maps = explain(images, network)"
        )
    callable_network(network, images, "ms.explain(network, images)")
    of_call = {name: settings.pop(name) for name in _OF_CALL if name in settings}
    chosen = find_method(method)
    if inspect.isfunction(chosen):  # a user's own takes what ours take: a class as target, a name as fill
        chosen = reading_arguments(chosen)
    inferer = chosen(target=target, **settings)
    explanations = inferer.explain(images, network, **of_call)
    words = list(dict.fromkeys(explanation.target.words() for explanation in explanations))
    first = f" (the first of {len(explanations)} images)" if len(words) > 1 else ""
    print(f"monai_saliency: {words[0]}{first}", file=sys.stderr)
    return inferer.stacked(images, explanations)
