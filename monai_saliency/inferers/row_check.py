"""Whether a row of a batch is what its image gives alone, and what was predicted (law 10): looked at once a case.

A softmax over the wrong axis, statistics of the batch or a prompt that takes the batch axis make no error, and a map of
such scores is wrong. ``num_forwards`` does not count what is run here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Cancelled, Forward, known_of
from monai_saliency.inferers.rounds import Rows
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import OutputPath, check_rows, read, rows
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.monai_private import holds_compiled, tree_leaves
from monai_saliency.utils.precision import rounding_of
from monai_saliency.utils.tensors import plain

__all__ = [
    "RowCheck",
    "RowsDepend",
    "Seen",
    "difference",
    "predicted",
    "refuse_changed",
    "run_alone",
    "say_once",
    "tolerance_of",
    "unlike",
]

logger = logging.getLogger(__name__)

Tolerance: TypeAlias = Callable[[torch.dtype], float]

#: values of a tensor that are compared at most, and the share of them that may differ, as labels at borders do
_VALUES, _FEW = 2**20, 1e-3
#: share of what perturbing changes in a score that does not show in a map
_SHOWN = 0.02
_NOT_PREDICTED = (
    "what is explained is not what was predicted: {}. The evaluator's other images of the batch may change its "
    "prediction (let it predict one image at a time), or it predicts with another inferer, network or precision"
)
_NOT_FIXED = "the network gives no fixed output: {}"
_SUPPOSED = "Such a network draws random numbers (a dropout that is left on), or keeps something from call to call"


class RowsDepend(CaseError):
    """An image gives something else next to other images than alone, so images must go through one at a time."""


@dataclass(frozen=True)
class Seen:
    """What one image gave: copies, since a network may write its next output to the same memory."""

    words: str
    values: Sequence[torch.Tensor] = ()
    scores: torch.Tensor | None = None

    @staticmethod
    def of(output: Any, words: str, target: BoundTarget | None = None) -> Seen:
        """Copy what is compared of an output ``(1, ...)``: some values of each tensor, but for lists of boxes."""
        is_boxes = isinstance(output, (list, tuple)) and any(isinstance(each, Mapping) for each in output)
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and not is_boxes]
        scores = None if target is None else target(output)[0].detach().clone()
        return Seen(words, [_some(each) for each in tensors], scores)

    def figures(self, target: BoundTarget | None = None) -> str:
        """Its scores, or its first tensor, in words."""
        if self.scores is not None and target is not None:
            named = zip(target.labels, self.scores.tolist(), strict=True)
            return ", ".join(f"{label_name(label)} {score:.6g}" for label, score in named) + f" {self.words}"
        mean = self.values[0].double().mean().item() if self.values else 0.0
        return f"an output with mean {mean:.6g} {self.words}"


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """At most 2^20 values of a tensor, evenly spread, as a copy."""
    values = plain(tensor).detach().flatten()
    step = max(1, -(-len(values) // _VALUES))
    return values[:: step + (step > 1 and step % 2 == 0)].clone()  # of an even step all may come from some columns


def _largest(seen: Sequence[torch.Tensor]) -> float:
    finite = [each[torch.isfinite(each)].double().abs() for each in seen]
    return max((float(each.max()) for each in finite if len(each)), default=0.0)


def tolerance_of(forward: Forward, image: torch.Tensor) -> Tolerance:
    """What is rounding for a network and an image, by the type of an output."""
    # nnU-Net adds its patches up in float16.
    coarse = forward.autocast_dtype(image) or getattr(forward.inferer, "blended_in", None)
    return rounding_of(forward.network, image.device, coarse, image.dtype)


def difference(one: Seen, other: Seen, tolerance: Tolerance, unperturbed: Seen | None = None) -> str:
    """How two outputs differ by more than rounding, in words; empty where they do not."""
    if [each.shape for each in one.values] != [each.shape for each in other.values]:
        return "the outputs have other shapes"
    for place, (values, others) in enumerate(zip(one.values, other.values, strict=True)):
        largest = allowed = 0.0
        if values.is_floating_point():
            third = [unperturbed.values[place]] if unperturbed else []
            largest = _largest([values, others, *third])
            allowed = max(tolerance(values.dtype), tolerance(others.dtype))
        others = others.to(values.device).double()
        same = values.double().isclose(others, rtol=0, atol=allowed * largest, equal_nan=True)
        if bool((~same).double().mean() > _FEW):
            return f"outputs differ by more than {allowed:.0e} of their largest value, which rounding explains"
    return ""


def scores_differ(state: CaseState, one: Seen, other: Seen, tolerance: Tolerance, times: float = 1) -> bool:
    """Whether the scores of one image differ by more than rounding, and by enough to show in a map."""
    if one.scores is None or other.scores is None:
        return False
    first, second = one.scores, other.scores.to(one.scores)
    gaps, sizes = (first - second).abs(), torch.maximum(first.abs(), second.abs())
    if not isinstance(state.target, BoundTarget) or state.target.quantity().unit != "probability":
        sizes = sizes.clamp(min=min(1.0, _largest([*one.values, *other.values])))
    return bool(((gaps > times * tolerance(gaps.dtype) * sizes) & (gaps > _SHOWN * state.spread())).any())


def unlike(
    state: CaseState,
    here: Seen,
    other: Seen,
    tolerance: Tolerance,
    unperturbed: Seen | None = None,
    times: float = 1,
) -> str:
    """Both figures of an image that gives something else here than it must, in words; empty where it does not."""
    gap = difference(other, here, tolerance, unperturbed)
    if not gap and not scores_differ(state, other, here, tolerance, times):
        return ""
    return f"{here.figures(state.target)} and {other.figures(state.target)}" + (f" ({gap})" if gap else "")


class RowCheck:
    """Compares rows of each case's first batch with their images alone, and the unperturbed image at the end."""

    def __init__(self, forward: Forward, states: Sequence[CaseState], split: SplitInputs, size: int) -> None:
        self.forward, self.states, self.split, self.size = forward, states, split, size
        self.tolerance = tolerance_of(forward, states[0].case.image)

    def check(self, batch: Sequence[Rows], output: Any) -> None:
        """Check the cases that begin in a batch, whose rows have their scores."""
        words, seen, offset = f"in a batch of {self.size}" if self.size > 1 else "explained alone", [], 0
        for index, start, stop in batch:
            changed = self.states[index].most_changed(stop) if start == 0 else None
            for row in [0] * (start == 0) + [changed] * (changed is not None):
                part = rows(output, offset + row, offset + row + 1, self.size)
                seen.append((index, row, Seen.of(part, words, self.states[index].target)))
            offset += stop - start
        # All are copied first: the next forward may overwrite them.
        for index, row, here in seen:
            self._compare(index, row, here, next(each for i, _, each in seen if i == index))
            self.states[index].forget_prediction()

    def check_unperturbed(self, index: int, output: Any, target: BoundTarget) -> None:
        """Compare the output ``(1, ...)`` of an unperturbed image that went through alone with what was predicted."""
        here = Seen.of(output, "explained alone", target)
        other = predicted(self.states[index], self.forward.output, here, target)
        if other is not None and difference(other, here, self.tolerance):
            self._refuse(index, f"the unperturbed image gives {here.figures(target)} and {other.figures(target)}", True)

    def _compare(self, index: int, row: int, here: Seen, unperturbed: Seen) -> None:
        state = self.states[index]
        prediction = predicted(state, self.forward.output, here, state.target) if row == 0 else None
        if self.size == 1 and prediction is None and (row or not state.one_by_one):
            return
        other = prediction or self.alone(index, row)
        # Where images go through alone no way is left, and nothing tells yet how much masks change: be sure.
        times = 100 if self.size == 1 and prediction else 1
        if both := unlike(state, here, other, self.tolerance, unperturbed, times):
            words = f"{f'a perturbed image (row {row})' if row else 'the unperturbed image'} gives {both}"
            if self.size > 1:
                raise RowsDepend(state.case.name, words)
            self._refuse(index, words, prediction is not None)

    def _refuse(self, index: int, words: str, is_predicted: bool) -> NoReturn:
        problem = (_NOT_PREDICTED if is_predicted else _NOT_FIXED).format(words)
        raise CaseError(self.states[index].case.name, f"{problem}. {_SUPPOSED}")

    def look_again(self, index: int) -> None:
        """Run the unperturbed image of a case once more, alone, and compare its scores with the first ones."""
        state = self.states[index]
        now, before = self.alone(index, 0), Seen("before them", (), state.state.reference_scores)
        if scores_differ(state, now, before, self.tolerance):
            after = Seen("after other images", now.values, now.scores).figures(state.target)
            refuse_changed(
                self.states, f"the unperturbed image gives {after} and {before.figures(state.target)}", index
            )

    def alone(self, index: int, row: int) -> Seen:
        """What a case's row gives alone."""
        state = self.states[index]
        image = torch.cat([state.case.image, state.held])[None]
        state.perturb(row, row + 1, out=image)

        def run(batch: torch.Tensor) -> Any:
            return self.forward.images(batch, self.split, [(index, len(batch))], state.case.name)

        return Seen.of(*run_alone(self.forward.network, image, self.size, run), state.target)


def predicted(state: CaseState, output: OutputPath | None, here: Seen, target: BoundTarget) -> Seen | None:
    """What an evaluator predicted for a case; None where it is not known, or of another form than what is seen here."""
    if state.case.prediction is None:
        return None
    try:
        part = read(state.case.prediction, output)
        check_rows(part, 1)
        found = Seen.of(part, "as the evaluator predicted it", target)
    except Exception:  # the evaluator gives something else than the network
        return None
    return found if [each.shape for each in found.values] == [each.shape for each in here.values] else None


def run_alone(network: Any, image: torch.Tensor, size: int, run: Callable[[torch.Tensor], Any]) -> tuple[Any, str]:
    """What an image ``(1, ...)`` gives alone, or in a batch of its copies where the network takes no batch of one."""
    # Compiling again for another batch size takes minutes, and may change the bits of all other batches.
    if size == 1 or not holds_compiled(network):
        try:
            return run(image), "alone"
        except Cancelled:
            raise
        except Exception:
            if size == 1:
                raise
    copies = image.expand(size, *image.shape[1:]).contiguous()
    return rows(run(copies), 0, 1, size), f"in a batch of {size} copies of it"


def refuse_changed(states: Sequence[CaseState], words: str, index: int = 0) -> NoReturn:
    """Raise the error of a network that has changed while cases were explained, nobody knows when."""
    for state in states:
        if state.stored is not None:
            state.stored.discard()
    raise CaseError(states[index].case.name, f"{_NOT_FIXED.format(words)}. {_SUPPOSED}")


def say_once(network: Any, what: str, why: str) -> None:
    """Warn of something once a network, and note further cases as information."""
    said = known_of(network)
    logger.log(logging.INFO if what in said else logging.WARNING, f"{what}: {why}")
    said[what] = True
