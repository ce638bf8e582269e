"""What must hold of a network before a map of it means anything (law 10): a row of a batch gives what its image gives
alone, an image gives the same output again, and this output is what was predicted.

A softmax over the wrong axis, statistics of the batch or a prompt that takes the batch axis make no error, and a map of
such scores is wrong. So before the first case of a network, a shape and a target is explained, its image and the image
with everything hidden run alone, side by side, and the first once more. ``num_forwards`` does not count these. Where
rows depend on each other, images go through the network one at a time for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.inferers.forward import OF_SHAPES, Forward, known_of
from monai_saliency.inferers.perturbation import Whole
from monai_saliency.inferers.walk import Walk, bound_target
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import check_rows, read, rows
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.monai_private import holds_compiled, tree_leaves, tree_map
from monai_saliency.utils.precision import rounding_of
from monai_saliency.utils.tensors import copied, plain

logger = logging.getLogger(__name__)

#: share of what hiding everything changes in a score that does not show in a map
_SHOWN = 0.02
#: share of an output's values that may differ
_FEW = 1e-3
_NOT_PREDICTED = (
    "what is explained is not what was predicted: {}. The evaluator's other images of the batch may change its "
    "prediction (let it predict one image at a time), its postprocessing may change the output in place, or it "
    "predicts with another inferer, network or precision, or in training mode"
)
_NOT_FIXED = "the network gives no fixed output: {}"
_SUPPOSED = (
    "Such a network draws random numbers (a dropout that is left on: call .eval(), also on networks in a list or "
    "behind a function), or keeps something from call to call. If it is random on purpose, give seed_network=0"
)


class Seen(NamedTuple):
    """The scores ``(K,)`` of an image, how it was run, and values of the network's output."""

    scores: torch.Tensor
    words: str
    values: Sequence[torch.Tensor] = ()

    @staticmethod
    def of(output: Any, target: BoundTarget, words: str) -> Seen:
        """Read an output ``(1, ...)``."""
        return Seen(target(output)[0].detach().clone(), words, sampled(output))

    def figures(self, target: BoundTarget) -> str:
        """The scores in words."""
        named = zip(target.labels, self.scores.tolist(), strict=True)
        return ", ".join(f"{label_name(label)} {score:.6g}" for label, score in named) + f" {self.words}"


class Rounding:
    """Whether outputs and scores of a network differ by more than rounding.

    Args:
        forward: calls the network.
        image: what it is given, of this type and on this device.
    """

    def __init__(self, forward: Forward, image: torch.Tensor) -> None:
        # nnU-Net adds its patches up in float16.
        coarse = forward.autocast_dtype(image) or getattr(forward.inferer, "blended_in", None)
        self.tolerance = rounding_of(forward.network, image.device, coarse, image.dtype)

    def same(self, one: torch.Tensor, other: torch.Tensor, times: float = 1) -> bool:
        """Whether two outputs are equal but for some times the rounding, and for labels at a few borders."""
        if one.shape != other.shape:
            return False
        first, second = one.double(), other.to(one.device).double()
        allowed = max(self.tolerance(one.dtype), self.tolerance(other.dtype)) if one.is_floating_point() else 0.0
        largest = torch.cat([first.flatten(), second.flatten()]).abs().nan_to_num(0, 0, 0).max() if len(first) else 0.0
        close = first.isclose(second, rtol=0, atol=times * allowed * float(largest), equal_nan=True)
        return bool((~close).double().mean() <= _FEW)

    def differ(self, one: Seen, other: Seen, target: BoundTarget, spread: torch.Tensor, times: float = 1) -> bool:
        """Whether outputs differ by more than rounding, or scores by enough to show in a map; ``spread`` ``(K,)`` is
        how much perturbing changes them.
        """
        if (
            one.values
            and other.values
            and not all(self.same(*pair, times) for pair in zip(one.values, other.values, strict=False))
        ):
            return True
        first, second = one.scores, other.scores.to(one.scores)
        gaps, sizes = (first - second).abs(), torch.maximum(first.abs(), second.abs())
        largest = [float(each.abs().nan_to_num(0, 0, 0).max()) for each in other.values if each.numel()]
        least = min(1.0, max(largest, default=0.0))
        if target.quantity().unit != "probability":
            sizes = sizes.clamp(min=least)
        same = (gaps <= times * self.tolerance(gaps.dtype) * sizes) | (gaps <= _SHOWN * spread)
        return not bool((same | (first.isnan() & second.isnan())).all())


def rows_depend(forward: Forward, walk: Walk, split: SplitInputs, size: int) -> bool:
    """Whether images of a network, of a case's shape and target, must go through it one at a time. It is found out
    once.

    Args:
        forward: calls the network.
        walk: the first of the cases.
        split: the inputs of the call.
        size: images in a batch, at the most.

    Raises:
        CaseError: where the network gives no fixed output, or fails on a batch of several images.
    """
    image = walk.images.unperturbed()
    # A function's own target may mix rows.
    ways = repr(walk.unbound_target), type(forward.inferer), repr(forward.output), forward.seed
    counts = size > 1, len(split.images) > 1
    kind = "rows", *image.shape, image.dtype, str(image.device), forward.autocast_dtype(image), *counts, *ways
    known = known_of(forward.network)
    if kind not in known:
        known[kind] = _dependence(forward, walk, split, size)
    if known[kind]:
        say_once(forward.network, "images go through the network one at a time, which takes longer", known[kind])
    return bool(known[kind])


def _dependence(forward: Forward, walk: Walk, split: SplitInputs, size: int) -> str:
    """How the rows of a batch depend on each other, in words; empty where they do not."""
    images = torch.cat([walk.images.unperturbed(), walk.images.hidden()])
    numbers = walk.images.hidden_numbers([Whole.IMAGE, Whole.HIDDEN])

    def run(places: list[int]) -> list[Any]:
        hidden = numbers[places] if split.numbers else None
        output = forward.images(images[places], split, [(0, len(places))], walk.case.name, hidden)
        return [tree_map(copied, rows(output, row, row + 1, len(places))) for row in range(min(2, len(places)))]

    looks = _looked(forward.network, size, run)
    unbound = walk.unbound_target
    target = unbound if isinstance(unbound, BoundTarget) else bound_target(unbound, looks.alone[0], walk.case)
    first, hidden = (Seen.of(output, target, looks.words) for output in looks.alone)
    again = Seen.of(looks.again, target, "at its second call")
    rounding, spread = Rounding(forward, walk.case.image), (first.scores - hidden.scores).abs().nan_to_num(0, 0, 0)
    if rounding.differ(again, first, target, spread):
        both = f"{first._replace(words='at its first call').figures(target)} and {again.figures(target)}"
        raise CaseError(walk.case.name, f"{_NOT_FIXED.format(f'the unperturbed image gives {both}')}. {_SUPPOSED}")
    if looks.error is not None:
        words = (
            f"the network fails on a batch of {size} and runs one image alone "
            f"({getattr(looks.error, 'problem', looks.error)}): if it takes one image at a time, set "
            "mask_batch_size=1; if it uses another input of one image, give that of all images, "
            "ms.explain(network, (images, other), inputs=ms.ArgumentInputs(perturb=0))"
        )
        if len(split.images) > 1:  # the network may use a further input of one of them
            raise CaseError(walk.case.name, words) from looks.error
        return f"case {walk.case.name}: {words}"
    for what, alone, output in zip((Whole.IMAGE, Whole.HIDDEN), (first, hidden), looks.beside, strict=False):
        here = Seen.of(output, target, "in a batch with another one")
        if rounding.differ(here, alone, target, spread):
            return f"case {walk.case.name}: {what.value} gives {here.figures(target)} and {alone.figures(target)}"
    return ""


def patches_depend(
    forward: Forward, case: str, patches: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], size: int
) -> str:
    """How the rows of a batch of patches depend on each other, in words; empty where they do not. It is found out once
    a network and size of patches.

    Args:
        forward: calls the network.
        case: the case that the patches are of, for errors.
        patches: two different ones, ``(2, C, *roi_size)``.
        run: gives the network's output of patches ``(n, C, *roi_size)``.
        size: patches in a batch.
    """
    known, same = known_of(forward.network), Rounding(forward, patches).same
    kind = "patches", tuple(patches.shape[1:]), patches.dtype, str(patches.device), size, repr(forward.output)
    if kind not in known:
        looks = _looked(
            forward.network, size, lambda places: [sampled(row[None])[0] for row in run(patches[places])[:2]]
        )
        if not same(looks.again, looks.alone[0]):
            problem = _NOT_FIXED.format("a patch gives something else at its second call")
            raise CaseError(case, f"{problem}. {_SUPPOSED}")
        known[kind] = str(looks.error or "")
        for here, alone in zip(looks.beside, looks.alone, strict=False):
            if not same(here, alone):
                both = f"{float(here.mean()):.6g} next to another patch and {float(alone.mean()):.6g} alone"
                known[kind] = f"the network's output of a patch has a mean {both}"
    return str(known[kind])


class _Looks(NamedTuple):
    """What a network gave for two inputs."""

    alone: list[Any]
    beside: list[Any]  # next to each other; none where batches hold one, or fail
    again: Any  # for the first one once more, alone
    words: str  # how they were run alone
    error: Exception | None  # of a batch of several


def _looked(network: Any, size: int, run: Callable[[list[int]], list[Any]]) -> _Looks:
    """Run two inputs alone, next to each other, and the first one again. ``run`` gives the first two rows of the output
    for a batch of them, by their places; ``size`` is the largest batch.
    """
    count, (first, *_) = _smallest(network, [1, size], lambda count: run([0] * count))
    second = run([1] * count)[0]
    beside: list[Any] = []
    error: Exception | None = None
    if size > 1:
        try:
            # The first one comes second: where rows of zeros are the other ones, they may look the same at any place.
            places = [1 - place % 2 for place in range(size)]
            _, beside = _smallest(network, [2, size], lambda count: run(places[:count])[::-1])
        except OF_SHAPES as raised:
            error = raised
    words = "alone" if count == 1 else f"in a batch of {count} copies of it"
    return _Looks([first, second], beside, run([0] * count)[0], words, error)


def _smallest(network: Any, counts: list[int], run: Callable[[int], Any]) -> tuple[int, Any]:
    """The first of two batch sizes that the network takes, and what ``run`` gives for it."""
    # Compiling again for another batch size takes minutes, and may change the bits of all other batches.
    if counts[0] < counts[1] and not holds_compiled(network):
        try:
            return counts[0], run(counts[0])
        except OF_SHAPES:
            pass  # a network of one batch size
    return counts[1], run(counts[1])


def check_predicted(forward: Forward, walk: Walk, output: Any, how: str = "explained") -> None:
    """Refuse a case whose unperturbed image gives another output ``(1, ...)`` than an evaluator predicted for it, where
    that is known.
    """
    if walk.case.prediction is None or forward.seed is not None:  # with a seed a prediction is another random draw
        return
    here = Seen.of(output, walk.target, how)
    try:
        predicted = read(walk.case.prediction, forward.output)
        check_rows(predicted, 1)
        prediction = Seen.of(predicted, walk.target, "as the evaluator predicted it")
    except Exception:  # the evaluator gives something else than the network
        return
    if [each.shape for each in prediction.values] != [each.shape for each in here.values]:
        return
    # Nothing tells yet how much masks change, and another batch or blending may round otherwise: be sure.
    spread = torch.zeros_like(here.scores)
    if Rounding(forward, walk.case.image).differ(here, prediction, walk.target, spread, 10):
        both = f"the unperturbed image gives {here.figures(walk.target)} and {prediction.figures(walk.target)}"
        raise CaseError(walk.case.name, f"{_NOT_PREDICTED.format(both)}. {_SUPPOSED}")


def output_alone(forward: Forward, split: SplitInputs, index: int, case: Case, size: int) -> Any:
    """The output ``(1, ...)`` for the image of a case, the ``index``-th of its batch, when run alone; where
    the network takes no batch of one, in a batch of ``size`` copies.
    """
    image = torch.cat([case.image, split.held_images[index]])[None]

    def run(count: int) -> Any:
        batch = image.expand(count, *image.shape[1:]).contiguous()
        return rows(forward.images(batch, split, [(index, count)], case.name), 0, 1, count)

    return _smallest(forward.network, [1, size], run)[1]


def say_once(network: Any, what: str, why: str) -> None:
    """Warn of something once a network, and note further cases as information."""
    said = known_of(network)
    logger.log(logging.INFO if what in said else logging.WARNING, f"{what}: {why}")
    said[what] = True


def sampled(output: Any) -> list[torch.Tensor]:
    """At most 2^20 values of each tensor of an output, as copies; empty for a list of boxes, whose order may vary."""
    if isinstance(output, (list, tuple)) and any(isinstance(item, Mapping) for item in output):
        return []
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    # Of an even step all may come from some columns.
    return [plain(leaf).detach().flatten()[:: max(1, leaf.numel() // 2**20) | 1].clone() for leaf in leaves]
