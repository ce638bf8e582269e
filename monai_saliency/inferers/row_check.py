"""Whether a row of a batch scores what its image scores alone, and what was predicted (law 10).

A softmax over the wrong axis, statistics of the batch or a prompt that takes the batch axis make no error, and a map of
such scores is wrong. ``num_forwards`` does not count what is run here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState, sampled
from monai_saliency.inferers.forward import Forward, known_of
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import check_rows, read, rows
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.monai_private import holds_compiled
from monai_saliency.utils.precision import rounding_of

logger = logging.getLogger(__name__)

#: share of what perturbing changes in a score that does not show in a map
_SHOWN = 0.02
#: share of an output's values that may differ
_FEW = 1e-3
_NOT_PREDICTED = (
    "what is explained is not what was predicted: {}. The evaluator's other images of the batch may change its "
    "prediction (let it predict one image at a time), its postprocessing may change the output in place, or it "
    "predicts with another inferer, network or precision, or in training mode (call .eval(), also on networks in a "
    "list or behind a function)"
)
_NOT_FIXED = "the network gives no fixed output: {}"
_SUPPOSED = (
    "Such a network draws random numbers (a dropout that is left on), or keeps something from call to call. If it is "
    "random on purpose, give seed_network=0"
)


class RowsDepend(CaseError):
    """An image gives something else next to other images than alone, so images must go through one at a time."""


class Seen(NamedTuple):
    """The scores ``(K,)`` of an image, how it was run, and values of the network's output if these are compared."""

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


class RowCheck:
    """Compares what cases' rows gave with what an evaluator predicted, and with what their images give alone.

    Args:
        forward: calls the network.
        states: the cases.
        words: how rows are run. Empty where images go through alone: then no other way is left.
    """

    def __init__(self, forward: Forward, states: Sequence[CaseState], words: str = "") -> None:
        self.forward, self.states, self.words = forward, states, words
        image = states[0].case.image
        # nnU-Net adds its patches up in float16.
        coarse = forward.autocast_dtype(image) or getattr(forward.inferer, "blended_in", None)
        self.tolerance = rounding_of(forward.network, image.device, coarse, image.dtype)

    def is_predicted(self, index: int) -> bool:
        """Compare a case's unperturbed image with what was predicted; False where this is not known."""
        prediction = self._predicted(self.states[index])
        if prediction is not None:
            self.compare(index, 0, prediction, is_predicted=True)
        return prediction is not None

    def compare(self, index: int, row: int, other: Seen, is_predicted: bool = False) -> None:
        """Compare a case's row, 0 for the unperturbed image, with what its image gives alone, or was predicted."""
        state, here = self.states[index], self._here(index, row)
        # Where images go through alone no way is left, and nothing tells yet how much masks change: be sure.
        times = 100 if is_predicted and not self.words else 1
        if self._differ(here, other, state.target, state.spread(), times):
            what = f"a perturbed image (row {row})" if row else "the unperturbed image"
            both = f"{what} gives {here.figures(state.target)} and {other.figures(state.target)}"
            if self.words:
                raise RowsDepend(state.case.name, both)
            self._refuse(index, both, is_predicted)

    def _here(self, index: int, row: int) -> Seen:
        state = self.states[index]
        return Seen(state.scores_of(row), self.words or "explained alone", () if row else state.values)

    def look_again(self, index: int, now: Seen) -> None:
        """Compare what the unperturbed image of a case gives at the end, alone, with what it gave at first."""
        state, before = self.states[index], self._here(index, 0)
        if self._differ(now, before, state.target, state.spread()):
            after = now._replace(words="after other images").figures(state.target)
            both = f"{after} and {before._replace(words='before them').figures(state.target)}"
            self.refuse_changed(index, f"the unperturbed image gives {both}")

    def refuse_changed(self, index: int, words: str) -> NoReturn:
        """Raise the error of a network that has changed while cases were explained, nobody knows when."""
        for state in self.states:
            state.kept.discard()
        self._refuse(index, words, False)

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two outputs are equal but for rounding, and for labels at a few borders."""
        if one.shape != other.shape:
            return False
        first, second = one.double(), other.to(one.device).double()
        allowed = max(self.tolerance(one.dtype), self.tolerance(other.dtype)) if one.is_floating_point() else 0.0
        largest = torch.cat([first.flatten(), second.flatten()]).abs().nan_to_num(0, 0, 0).max() if len(first) else 0.0
        close = first.isclose(second, rtol=0, atol=allowed * float(largest), equal_nan=True)
        return bool((~close).double().mean() <= _FEW)

    def _differ(self, one: Seen, other: Seen, target: BoundTarget, spread: torch.Tensor, times: float = 1) -> bool:
        """Whether outputs differ by more than rounding, or scores by enough to show in a map."""
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

    def _refuse(self, index: int, words: str, is_predicted: bool) -> NoReturn:
        problem = (_NOT_PREDICTED if is_predicted else _NOT_FIXED).format(words)
        raise CaseError(self.states[index].case.name, f"{problem}. {_SUPPOSED}")

    def _predicted(self, state: CaseState) -> Seen | None:
        """The evaluator's prediction for a case; None if it is unknown, or if the target cannot read it."""
        if state.case.prediction is None or self.forward.seed is not None:  # a prediction is another random draw
            return None
        try:
            output = read(state.case.prediction, self.forward.output)
            check_rows(output, 1)
            found = Seen.of(output, state.target, "as the evaluator predicted it")
        except Exception:  # the evaluator gives something else than the network
            return None
        return found if [each.shape for each in found.values] == [each.shape for each in state.values] else None


def run_alone(network: Any, image: torch.Tensor, size: int, run: Callable[[torch.Tensor, str], Any]) -> Any:
    """The output of an image ``(1, ...)`` alone, or in a batch of its copies if the network takes no batch of one."""
    # Compiling again for another batch size takes minutes, and may change the bits of all other batches.
    if size == 1 or not holds_compiled(network):
        try:
            return run(image, "alone")
        except Exception:
            if size == 1:
                raise
    return run(image.expand(size, *image.shape[1:]).contiguous(), f"in a batch of {size} copies of it")


def output_alone(forward: Forward, split: SplitInputs, index: int, case: Case, size: int) -> Any:
    """The output ``(1, ...)`` for the image of a case, the ``index``-th of its batch, when run alone; where
    the network takes no batch of one, in a batch of ``size`` copies.
    """
    image = torch.cat([case.image, split.held_images[index]])[None]

    def run(images: torch.Tensor, words: str) -> Any:
        return rows(forward.images(images, split, [(index, len(images))], case.name), 0, 1, len(images))

    return run_alone(forward.network, image, size, run)


def say_once(network: Any, what: str, why: str) -> None:
    """Warn of something once a network, and note further cases as information."""
    said = known_of(network)
    logger.log(logging.INFO if what in said else logging.WARNING, f"{what}: {why}")
    said[what] = True
