"""What an image must give, and what is said where it gives something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Forward
from monai_saliency.networks.comparison import Difference, Excerpt, difference, excerpt
from monai_saliency.networks.outputs import OutputPath, check_rows, read
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.monai_private import tensor_version, tree_map
from monai_saliency.utils.precision import rounding_of
from monai_saliency.utils.tensors import plain

__all__ = [
    "Expected",
    "RowsDepend",
    "are_detections",
    "check_unchanged",
    "copied",
    "figures",
    "largest",
    "predicted",
    "same_boxes",
    "tolerance_of",
]

#: values of an output that is kept whole, so that errors can show its scores
_KEPT = 2**22


class RowsDepend(CaseError):
    """The unperturbed image gives something else beside other images than alone.

    Args:
        case: the case's name.
        problem: both figures.
        expected: what cases of the batch give alone, by their places in the batch, as far as it is known.
    """

    def __init__(self, case: str, problem: str, expected: Mapping[int, Expected] | None = None) -> None:
        super().__init__(case, problem)
        self.expected = dict(expected or {})


@dataclass(frozen=True)
class Expected:
    """What the unperturbed image must give.

    Attributes:
        words: where it comes from, after a figure: ``"alone"``.
        excerpt: what is compared.
        output: the output itself ``(1, ...)``, None where it is large.
        predicted: whether an evaluator gave it.
        alone: whether it is of the image alone, and not of a batch of its copies.
    """

    words: str
    excerpt: Excerpt
    output: Any = None
    predicted: bool = False
    alone: bool = True

    @staticmethod
    def of(output: Any, words: str, **known: Any) -> Expected:
        """What is kept of an output ``(1, ...)``."""
        found = excerpt(output)
        small = sum(shape.numel() for shape, _ in found.values()) <= _KEPT
        return Expected(words, found, copied(output) if small else None, **known)


def check_unchanged(state: CaseState, batch: torch.Tensor, version: int) -> None:
    """Refuse a network that changes its input in place, where an evaluator has given it the image before.

    What would be explained is the changed image, while other images are perturbed: not what was predicted.

    Args:
        state: a case of the batch.
        batch: what the network was given.
        version: its :func:`~monai_saliency.utils.monai_private.tensor_version` before.

    Raises:
        CaseError: when it has changed since.
    """
    if state.case.was_given and tensor_version(batch) != version:
        raise CaseError(
            state.case.name,
            "the network changes its input in place, so the image is no longer the one that was predicted: let the "
            "network work on a copy (x = x.clone())",
        )


def tolerance_of(forward: Forward, state: CaseState) -> Callable[[torch.dtype], float]:
    """What is rounding for a network and a case, by the type of an output."""
    image = state.case.image
    autocast = None
    if forward.autocast is not None and image.is_cuda:
        autocast = forward.autocast.get("dtype") or torch.float16
    return rounding_of(forward.network, image.device, autocast)


def predicted(state: CaseState, output: OutputPath | None) -> Expected | None:
    """What an evaluator predicted for a case; None where it is not known, or has no such part."""
    if state.case.prediction is None:
        return None
    try:
        part = read(state.case.prediction, output)
        check_rows(part, 1)
    except ValueError:  # the evaluator gives something else than the network
        return None
    return Expected.of(part, "as the evaluator predicted it", predicted=True)


def figures(bind: Callable[[Any], BoundTarget], expected: Expected, row: Any, here: str, gap: Difference | None) -> str:
    """What an image gives here, and what it must give, in words; with the outputs' difference."""
    try:
        if expected.output is None:
            raise ValueError("the output is not kept")
        bound = bind(expected.output)
        wanted, found = (
            ", ".join(f"{label_name(label)} {score:.6g}" for label, score in zip(bound.labels, scores, strict=True))
            for scores in (bound(each)[0].tolist() for each in (expected.output, row))
        )
        if wanted == found:
            raise ValueError("the outputs differ where the target does not look")
    except Exception:  # a target that cannot be bound to this output: the outputs' own figures say enough
        wanted, found = (largest(each) for each in (expected.excerpt, excerpt(row)))
    words = f"{found} {here} and {wanted} {expected.words}"
    return words if gap is None else f"{words} ({gap})"


def largest(output: Excerpt) -> str:
    """The first tensor of an output in a few words."""
    shape, values = next(iter(output.values()), (torch.Size(), torch.empty(0)))
    if not values.numel():
        return f"an output of shape {tuple(shape)}"
    return f"an output of shape {tuple(shape)} with mean {values.double().mean().item():.6g}"


def same_boxes(
    bind: Callable[[Any], BoundTarget], expected: Any, row: Any, tolerance: Callable[[torch.dtype], float]
) -> bool:
    """Whether a detector finds the same boxes, in whatever order, by their scores."""
    try:
        bound = bind(expected)
        wanted, found = (bound(each) for each in (expected, row))
    except ValueError:
        return False
    # Overlaps are quotients of differences of coordinates, which have more rounding than these.
    gap = difference(excerpt(wanted), excerpt(found), lambda dtype: 10 * tolerance(dtype))
    return gap is not None and not gap.beyond_rounding


def are_detections(output: Any) -> bool:
    """Whether an output is a list of dictionaries, as of a detector, which may find any number of boxes."""
    return isinstance(output, (list, tuple)) and bool(output) and all(isinstance(each, Mapping) for each in output)


def copied(output: Any) -> Any:
    """An output whose tensors are plain copies."""
    return tree_map(lambda value: plain(value).detach().clone() if isinstance(value, torch.Tensor) else value, output)
