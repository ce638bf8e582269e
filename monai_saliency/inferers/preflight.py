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

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two outputs are equal but for rounding, and for labels at a few borders."""
        if one.shape != other.shape:
            return False
        first, second = one.double(), other.to(one.device).double()
        allowed = max(self.tolerance(one.dtype), self.tolerance(other.dtype)) if one.is_floating_point() else 0.0
        largest = torch.cat([first.flatten(), second.flatten()]).abs().nan_to_num(0, 0, 0).max() if len(first) else 0.0
        close = first.isclose(second, rtol=0, atol=allowed * float(largest), equal_nan=True)
        return bool((~close).double().mean() <= _FEW)

    def differ(self, one: Seen, other: Seen, target: BoundTarget, spread: torch.Tensor, times: float = 1) -> bool:
        """Whether outputs differ by more than rounding, or scores by enough to show in a map; ``spread`` ``(K,)`` is
        how much perturbing changes them.
        """
        if one.values and other.values and not all(map(self.same, one.values, other.values)):
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
        CaseError: where the network gives no fixed output.
    """
    image = walk.images.unperturbed()
    # A function's own target may mix rows.
    ways = repr(walk.unbound_target), type(forward.inferer), repr(forward.output), forward.autocast_dtype(image)
    ways = *ways, forward.seed
    kind = ("rows", tuple(image.shape), image.dtype, str(image.device), size > 1, *ways)
    known = known_of(forward.network)
    if kind not in known:
        known[kind] = _Trial(forward, walk, split, size).found()
    if known[kind] and size > 1:
        say_once(forward.network, "images go through the network one at a time, which takes longer", known[kind])
    return bool(known[kind])


class _Trial:
    """Runs the image of a case, and the image with everything hidden, alone and side by side."""

    def __init__(self, forward: Forward, walk: Walk, split: SplitInputs, size: int) -> None:
        self.forward, self.case, self.split, self.size = forward, walk.case, split, size
        self.images = torch.cat([walk.images.unperturbed(), walk.images.hidden()])
        self.numbers = walk.images.hidden_numbers([Whole.IMAGE, Whole.HIDDEN])
        # Compiling again for another batch size takes minutes, and may change the bits of all other batches.
        self.compiled = size > 1 and holds_compiled(forward.network)
        self.count = size if self.compiled else 1
        output = self.alone()
        self.target = walk.unbound_target
        if not isinstance(self.target, BoundTarget):
            self.target = bound_target(self.target, output, walk.case)
        words = "alone" if self.count == 1 else f"in a batch of {self.count} copies of it"
        self.first = Seen.of(output, self.target, words)
        (hidden,) = self.rows([1] * self.count, 1)
        self.hidden = Seen.of(hidden, self.target, words)
        self.rounding = Rounding(forward, walk.case.image)

    def rows(self, places: list[int], count: int) -> list[Any]:
        """The first rows ``(1, ...)`` of the output of a batch of these two images."""
        numbers = self.numbers[places] if self.split.numbers else None
        output = self.forward.images(self.images[places], self.split, [(0, len(places))], self.case.name, numbers)
        return [tree_map(copied, rows(output, row, row + 1, len(places))) for row in range(count)]

    def alone(self) -> Any:
        """The image's output alone, or in a batch of its copies if the network takes no batch of one."""
        if self.count == 1 and self.size > 1:
            try:
                return self.rows([0], 1)[0]
            except OF_SHAPES:
                self.count = self.size
        return self.rows([0] * self.count, 1)[0]

    def found(self) -> str:
        """How the rows of a batch depend on each other, in words; empty where they do not."""
        words = self.beside() if self.size > 1 else ""
        again = Seen.of(self.rows([0] * self.count, 1)[0], self.target, "at its second call")
        if self.differ(again, self.first):
            both = f"{self.first._replace(words='at its first call').figures(self.target)}"
            problem = _NOT_FIXED.format(f"the unperturbed image gives {both} and {again.figures(self.target)}")
            raise CaseError(self.case.name, f"{problem}. {_SUPPOSED}")
        return words

    def beside(self) -> str:
        """Compare each image next to the other one with the same alone."""
        count = self.size if self.compiled else 2
        try:
            beside = self.pair(count)
        except OF_SHAPES as error:
            try:
                count, beside = self.size, self.pair(self.size)
            except OF_SHAPES:
                return self.refuse_or_run_alone(error)
        both = zip(
            ("unperturbed image", "image with everything hidden"), beside, (self.first, self.hidden), strict=True
        )
        for what, here, alone in both:
            if self.differ(here, alone):
                figures = f"{here.figures(self.target)} and {alone.figures(self.target)}"
                return f"case {self.case.name}: the {what} gives {figures}"
        return ""

    def refuse_or_run_alone(self, error: Exception) -> str:
        """Where a batch fails and one image runs: the only image of a call goes through alone, for the reason in words.
        Of several images, the network may use a further input of one of them.
        """
        words = (
            f"the network fails on a batch of 2 and runs one image alone ({getattr(error, 'problem', error)}): if it "
            "takes one image at a time, set mask_batch_size=1; if it uses another input of one image, give that of all "
            "images, ms.explain(network, (images, other), inputs=ms.ArgumentInputs(perturb=0))"
        )
        if len(self.split.images) > 1:
            raise CaseError(self.case.name, words) from error
        return f"case {self.case.name}: {words}"

    def pair(self, count: int) -> list[Seen]:
        """Both images next to each other, in a batch of ``count``."""
        places = [place % 2 for place in range(count)]
        words = f"in a batch of {count}"
        return [Seen.of(output, self.target, words) for output in self.rows(places, 2)]

    def differ(self, one: Seen, other: Seen) -> bool:
        spread = (self.first.scores - self.hidden.scores).abs().nan_to_num(0, 0, 0)
        return self.rounding.differ(one, other, self.target, spread)


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
    known, rounding = known_of(forward.network), Rounding(forward, patches)
    kind = "patches", tuple(patches.shape[1:]), patches.dtype, str(patches.device), size, repr(forward.output)
    if kind in known:
        return str(known[kind])

    def alone(place: int) -> torch.Tensor:
        def copies(count: int) -> torch.Tensor:
            return sampled(run(patches[[place] * count])[:1])[0]

        return alone_or_copies(forward.network, size, copies)

    first, words = [alone(0), alone(1)], ""
    if size > 1:
        places = [place % 2 for place in range(size if holds_compiled(forward.network) else 2)]
        beside = run(patches[places])
        for place, one in enumerate(first):
            here = sampled(beside[place : place + 1])[0]
            if not rounding.same(one, here):
                both = f"mean {float(here.mean()):.6g} next to another patch and {float(one.mean()):.6g} alone"
                words = f"the network's output of a patch has a {both}"
    if not rounding.same(first[0], alone(0)):
        raise CaseError(case, f"{_NOT_FIXED.format('a patch gives something else at its second call')}. {_SUPPOSED}")
    known[kind] = words
    return words


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
    # Nothing tells yet how much masks change: be sure.
    spread = torch.zeros_like(here.scores)
    if Rounding(forward, walk.case.image).differ(here, prediction, walk.target, spread, 100):
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

    return alone_or_copies(forward.network, size, run)


def alone_or_copies(network: Any, size: int, run: Callable[[int], Any]) -> Any:
    """What ``run`` gives for a batch of one; or of ``size`` copies, if the network takes no batch of one."""
    if size == 1 or not holds_compiled(network):
        try:
            return run(1)
        except OF_SHAPES:
            if size == 1:
                raise
    return run(size)


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
