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
from monai_saliency.utils.tensors import blend, finite_between, plain

__all__ = [
    "BOXES",
    "SUPPOSED",
    "Expected",
    "RowsDepend",
    "are_detections",
    "check_unchanged",
    "copied",
    "distrust",
    "faded",
    "figures",
    "largest",
    "predicted",
    "same_boxes",
    "score_figures",
    "scores_differ",
    "scores_of",
    "tolerance_of",
]

#: why a network may give no fixed output
SUPPOSED = (
    "Such a network draws random numbers (a dropout that is left on), or keeps something from one call to the next"
)
#: values of an output that is kept whole, so that errors can show its scores
_KEPT = 2**22
#: share of what perturbing changes in a score that does not show in a map
_SHOWN = 0.02
#: how much more rounding overlaps have, quotients of differences of coordinates, than these
BOXES = 10


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
        scores: the target's scores ``(K,)`` of it, where the target was bound by then.
    """

    words: str
    excerpt: Excerpt
    output: Any = None
    predicted: bool = False
    alone: bool = True
    scores: torch.Tensor | None = None

    @staticmethod
    def of(output: Any, words: str, state: CaseState | None = None, keep: bool = True, **known: Any) -> Expected:
        """What is kept of an output ``(1, ...)``, with its scores if a case is given whose target is bound; the output
        itself is kept where it is small, or where it is boxes, which are compared by their scores.
        """
        found = excerpt(output)
        small = sum(shape.numel() for shape, _ in found.values()) <= _KEPT and (keep or are_detections(output))
        scores = None if state is None else scores_of(state, output)
        return Expected(words, found, copied(output) if small else None, scores=scores, **known)


def scores_of(state: CaseState, output: Any) -> torch.Tensor | None:
    """The scores ``(K,)`` of an output ``(1, ...)``; None before the target is bound, and for boxes, which may come in
    another order.
    """
    if output is None or not state.is_bound or are_detections(output):
        return None
    return state.target(output)[0].detach().clone()


def scores_differ(state: CaseState, one: Expected, other: Expected, tolerance: Callable[[torch.dtype], float]) -> bool:
    """Whether the scores of one image differ by more than rounding, and by enough to show in a map.

    Outputs are compared by their largest values, which may have nothing to do with what is explained: a class that is
    masked by -1e9, or a volume in voxels beside a probability. Probabilities are compared relative to themselves, other
    scores not relative to less than 1 where the output has such values. What is below a fiftieth of what perturbing has
    changed so far does not show.

    Args:
        state: the case.
        one: what the image gives.
        other: what it gives elsewhere.
        tolerance: the relative difference that is rounding, by the type of the scores.

    Returns:
        False as well where the scores of either are not known.
    """
    if one.scores is None or other.scores is None or one.scores.shape != other.scores.shape:
        return False
    gaps = (one.scores - other.scores).abs()
    sizes = torch.maximum(one.scores.abs(), other.scores.abs())
    if not isinstance(state.target, BoundTarget) or state.target.quantity().unit != "probability":
        sizes = sizes.clamp(min=min(1.0, _largest(one.excerpt)))
    return bool(((gaps > tolerance(gaps.dtype) * sizes) & (gaps > _SHOWN * state.spread())).any())


def _largest(output: Excerpt) -> float:
    values = [part.abs()[part.isfinite()].max() for _, part in output.values() if part.isfinite().any()]
    return max(map(float, values), default=0.0)


def distrust(state: CaseState) -> None:
    """Remove a case's scores on disk: its network changed while they were computed, nobody knows when."""
    if state.stored is not None:
        state.stored.discard()


def check_unchanged(state: CaseState, batch: torch.Tensor, version: int, shared: bool = False) -> None:
    """Refuse a network that changes its input in place, where others read this input too.

    An evaluator has given it the image before: what would be explained is the changed image, while other images are
    perturbed, and not what was predicted.

    Args:
        state: a case of the batch.
        batch: what the network was given.
        version: its :func:`~monai_saliency.utils.monai_private.tensor_version` before.
        shared: whether MONAI would have given it a part of the image, which the patches beside it read afterwards.

    Raises:
        CaseError: when it has changed since, and an evaluator has given the image before.
        RowsDepend: when it has changed since, and is shared. Whole images are then right: MONAI cuts them itself.
    """
    if tensor_version(batch) == version:
        return
    if state.case.was_given:
        raise CaseError(
            state.case.name,
            "the network changes its input in place, so the image is no longer the one that was predicted: let the "
            "network work on a copy (x = x.clone())",
        )
    if shared:
        raise RowsDepend(
            state.case.name,
            "the network changes its input in place, and with sw_batch_size=1 the patches beside it see the changed "
            "voxels: let the network work on a copy (x = x.clone()), or set sw_batch_size=2",
        )


def tolerance_of(forward: Forward, state: CaseState) -> Callable[[torch.dtype], float]:
    """What is rounding for a network and a case, by the type of an output."""
    image = state.case.image
    # nnU-Net adds its patches up in float16.
    coarse = forward.autocast_dtype(image) or getattr(forward.inferer, "blended_in", None)
    return rounding_of(forward.network, image.device, coarse, image.dtype)


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
        wanted, found = (_named(bound, bound(each)[0]) for each in (expected.output, row))
        if wanted == found:
            raise ValueError("the outputs differ where the target does not look")
    except Exception:  # a target that cannot be bound to this output: the outputs' own figures say enough
        wanted, found = (largest(each) for each in (expected.excerpt, excerpt(row)))
    words = f"{found} {here} and {wanted} {expected.words}"
    return words if gap is None else f"{words} ({gap})"


def _named(target: BoundTarget, scores: torch.Tensor) -> str:
    pairs = zip(target.labels, scores.tolist(), strict=True)
    return ", ".join(f"{label_name(label)} {score:.6g}" for label, score in pairs)


def score_figures(state: CaseState, here: Expected, expected: Expected) -> str:
    """The scores of an image here, and those that it must have, in words."""
    assert here.scores is not None
    assert expected.scores is not None
    found, wanted = (_named(state.target, each) for each in (here.scores, expected.scores))
    return f"{found} {here.words} and {wanted} {expected.words}"


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
    gap = difference(excerpt(wanted), excerpt(found), lambda dtype: BOXES * tolerance(dtype))
    return gap is not None and not gap.beyond_rounding


def faded(image: torch.Tensor, fill: torch.Tensor, count: int) -> torch.Tensor:
    """An image ``(C, *spatial)`` faded more and more, ``(count, C, *spatial)``: first as it is, last by half."""
    weights = torch.linspace(1, 0.5, count).to(image).reshape(-1, *[1] * image.ndim)
    fill = fill.expand_as(image)
    return blend(fill[None], image[None], weights, finite_between(fill, image))


def are_detections(output: Any) -> bool:
    """Whether an output is a list of dictionaries, as of a detector, which may find any number of boxes."""
    return isinstance(output, (list, tuple)) and bool(output) and all(isinstance(each, Mapping) for each in output)


def copied(output: Any) -> Any:
    """An output whose tensors are plain copies."""
    return tree_map(lambda value: plain(value).detach().clone() if isinstance(value, torch.Tensor) else value, output)
