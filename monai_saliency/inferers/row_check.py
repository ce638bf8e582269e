"""Whether a row of a batch is what its image gives alone, and what was predicted (law 10): looked at once a case.

A softmax over the wrong axis, statistics of the batch or a prompt that takes the batch axis make no error, and a map of
such scores is wrong. ``num_forwards`` does not count what is run here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakSet

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Cancelled, Forward
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import OutputPath, check_rows, read, rows
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.monai_private import holds_compiled
from monai_saliency.utils.precision import rounding_of
from monai_saliency.utils.tensors import plain

__all__ = [
    "RowCheck",
    "Rows",
    "RowsDepend",
    "Seen",
    "difference",
    "predicted",
    "refuse_changed",
    "say_once",
    "tolerance_of",
    "unlike",
]

logger = logging.getLogger(__name__)

#: a case's place, its first row, and its last row + 1
Rows: TypeAlias = tuple[int, int, int]

#: values of a tensor that are compared at most, and the share of them that may differ, as labels at borders do
_VALUES, _FEW = 2**20, 1e-3
#: share of what perturbing changes in a score that does not show in a map
_SHOWN = 0.02
_NOT_PREDICTED = (
    "what is explained is not what was predicted: {}. The evaluator's other images of the batch may change its "
    "prediction (let it predict one image at a time), or it predicts with another inferer, network or precision"
)
_SUPPOSED = "Such a network draws random numbers (a dropout that is left on), or keeps something from call to call"

_noted: WeakSet[Any] = WeakSet()


class RowsDepend(CaseError):
    """An image gives something else next to other images than alone, so images must go through one at a time."""


@dataclass(frozen=True)
class Seen:
    """What one image gave: copies, since a network may write its next output to the same memory."""

    words: str
    parts: Mapping[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    scores: torch.Tensor | None = None

    @staticmethod
    def of(output: Any, words: str, target: BoundTarget | None = None) -> Seen:
        """Copy what is compared of an output ``(1, ...)``."""
        parts = {path: _values(tensor) for path, tensor in _tensors(output)}
        return Seen(words, parts, None if target is None else target(output)[0].detach().clone())

    @property
    def largest(self) -> float:
        """The largest finite magnitude of its values."""
        return max((_largest(values) for values in self.parts.values()), default=0.0)

    def figures(self, labels: Sequence[int | str] = ()) -> str:
        """Its scores, or its first tensor, in words."""
        if self.scores is not None:
            named = zip(labels, self.scores.tolist(), strict=True)
            return ", ".join(f"{label_name(label)} {score:.6g}" for label, score in named) + f" {self.words}"
        values = next(iter(self.parts.values()), torch.zeros(0))
        return f"an output with mean {values.double().mean().item():.6g} {self.words}"


def difference(
    one: Seen, other: Seen, tolerance: Callable[[torch.dtype], float], unperturbed: Seen | None = None
) -> str:
    """How two outputs differ by more than rounding, in words; empty where they do not."""
    if one.parts.keys() != other.parts.keys():
        return "the outputs have other parts"
    for path, values in one.parts.items():
        others = other.parts[path].to(values.device)
        if values.shape != others.shape:
            return "the outputs have other shapes"
        allowed, scale = 0.0, 1.0
        if values.is_floating_point() and others.is_floating_point():
            allowed = max(map(tolerance, (values.dtype, others.dtype)))
            third = unperturbed.parts.get(path) if unperturbed else None
            scale = max(_largest(each) for each in (values, others, third) if each is not None)
        same = (values == others) | ((values != values) & (others != others))  # NaN is equal to itself
        gaps = torch.where(same, 0, (values.double() - others.double()).abs()).nan_to_num(nan=math.inf)
        if bool((gaps > allowed * scale).double().mean() > _FEW):
            found = float(gaps.max()) / scale if scale else math.inf
            return f"outputs differ by {found:.2g} of their largest value, rounding explains {allowed:.0e}"
    return ""


def scores_differ(
    state: CaseState, one: Seen, other: Seen, tolerance: Callable[[torch.dtype], float], times: float = 1
) -> bool:
    """Whether the scores of one image differ by more than rounding, and by enough to show in a map."""
    if one.scores is None or other.scores is None:
        return False
    first, second = one.scores, other.scores.to(one.scores)
    gaps, sizes = (first - second).abs(), torch.maximum(first.abs(), second.abs())
    if not isinstance(state.target, BoundTarget) or state.target.quantity().unit != "probability":
        sizes = sizes.clamp(min=min(1.0, max(one.largest, other.largest)))
    return bool(((gaps > times * tolerance(gaps.dtype) * sizes) & (gaps > _SHOWN * state.spread())).any())


def unlike(
    state: CaseState,
    here: Seen,
    other: Seen,
    tolerance: Callable[[torch.dtype], float],
    unperturbed: Seen | None = None,
    times: float = 1,
) -> str:
    """Both figures of an image that gives something else here than it must, in words; empty where it does not."""
    gap = difference(other, here, tolerance, unperturbed)
    if not gap and not scores_differ(state, other, here, tolerance, times):
        return ""
    both = f"{here.figures(state.target.labels)} and {other.figures(state.target.labels)}"
    return f"{both} ({gap})" if gap else both


class RowCheck:
    """Compares rows of each case's first batch with their images alone, and the unperturbed image at the end."""

    def __init__(
        self,
        forward: Forward,
        states: Sequence[CaseState],
        split: SplitInputs,
        output: OutputPath | None,
        size: int,
        found: RowsDepend | None = None,
    ) -> None:
        self.forward, self.states, self.split, self.output = forward, states, split, output
        self.size, self.found = size, found
        self.tolerance = tolerance_of(forward, states[0])

    def check(self, batch: Sequence[Rows], output: Any) -> None:
        """Check the cases that begin in a batch, whose rows have their scores."""
        here = f"in a batch of {self.size}" if self.size > 1 else "explained alone"
        seen = []
        for index, row, offset in _looked_at(self.states, batch):
            part = rows(output, offset, offset + 1, self.size)
            seen.append((index, row, Seen.of(part, here, self.states[index].target)))
        # All are copied first: the next forward may overwrite them.
        for index, row, found in seen:
            self._compare(index, row, found, next(each for i, _, each in seen if i == index))
        for index, start, _ in batch:
            if start == 0:
                self.states[index].forget_prediction()

    def check_unperturbed(self, index: int, output: Any, target: BoundTarget) -> None:
        """Compare the output ``(1, ...)`` of an unperturbed image that went through alone with what was predicted."""
        here = Seen.of(output, "explained alone", target)
        other = predicted(self.states[index], self.output, here, target)
        if other is not None and (gap := difference(other, here, self.tolerance)):
            both = f"{here.figures(target.labels)} and {other.figures(target.labels)} ({gap})"
            problem = _NOT_PREDICTED.format(f"the unperturbed image gives {both}")
            raise CaseError(self.states[index].case.name, f"{problem}. {_SUPPOSED}")

    def _compare(self, index: int, row: int, here: Seen, unperturbed: Seen) -> None:
        state = self.states[index]
        other = predicted(state, self.output, here, state.target) if row == 0 else None
        is_predicted = other is not None
        if other is None and self.size == 1 and (row or self.found is None):
            return
        other = other or self.alone(index, row)
        # Where images go through alone no way is left, and nothing tells yet how much masks change: be sure.
        times = 100 if self.size == 1 and is_predicted else 1
        if both := unlike(state, here, other, self.tolerance, unperturbed, times):
            words = f"{f'a perturbed image (row {row})' if row else 'the unperturbed image'} gives {both}"
            if self.size > 1:
                raise RowsDepend(state.case.name, words)
            problem = _NOT_PREDICTED.format(words) if is_predicted else f"the network gives no fixed output: {words}"
            raise CaseError(state.case.name, f"{problem}. {_SUPPOSED}")

    def look_again(self, index: int) -> None:
        """Run the unperturbed image of a case once more, alone, and compare its scores with the first ones."""
        state = self.states[index]
        now, before = self.alone(index, 0), Seen("before them", {}, state.state.reference_scores)
        if scores_differ(state, now, before, self.tolerance):
            labels = state.target.labels
            after = Seen("after other images", now.parts, now.scores).figures(labels)
            refuse_changed(self.states, f"the unperturbed image gives {after} and {before.figures(labels)}", index)

    def alone(self, index: int, row: int) -> Seen:
        """What a case's row gives alone; in a batch of its copies where the network takes no batch of one image."""
        state = self.states[index]
        image = torch.cat([state.case.image, state.held])[None]
        state.perturb(row, row + 1, out=image)
        # Compiling again for another batch size takes minutes, and may change the bits of all other batches.
        if self.size == 1 or not holds_compiled(self.forward.network):
            try:
                return self._run(index, image, "alone")
            except Cancelled:
                raise
            except Exception:
                if self.size == 1:
                    raise
                logger.debug("the network takes no batch of one image", exc_info=True)
        copies = image.expand(self.size, *image.shape[1:]).contiguous()
        return self._run(index, copies, f"in a batch of {self.size} copies of it")

    def _run(self, index: int, batch: torch.Tensor, words: str) -> Seen:
        count = len(batch)
        output = self.forward.images(batch, self.split, self.split.values_of([(index, count)], count))
        output = read(output, self.output)
        check_rows(output, count)
        return Seen.of(rows(output, 0, 1, count), words, self.states[index].target)


def predicted(state: CaseState, output: OutputPath | None, here: Seen, target: BoundTarget) -> Seen | None:
    """What an evaluator predicted for a case; None where it is not known, or of another form than what is seen here."""
    if state.case.prediction is None:
        return None
    try:
        part = read(state.case.prediction, output)
        check_rows(part, 1)
    except ValueError:  # the evaluator gives something else than the network
        return None
    words = "as the evaluator predicted it"
    shapes = [{path: values.shape for path, values in each.parts.items()} for each in (Seen.of(part, words), here)]
    return Seen.of(part, words, target) if shapes[0] == shapes[1] else None


def _looked_at(states: Sequence[CaseState], batch: Sequence[Rows]) -> Iterator[tuple[int, int, int]]:
    """A case, a row of it and its place in the batch: unperturbed images, and the perturbed ones that changed most."""
    offset = 0
    for index, start, stop in batch:
        if start == 0:
            changed = states[index].most_changed(stop)
            yield from ((index, row, offset + row) for row in (0, changed) if row is not None)
        offset += stop - start


def refuse_changed(states: Sequence[CaseState], words: str, index: int = 0) -> None:
    """Raise the error of a network that has changed while cases were explained, nobody knows when."""
    for state in states:
        if state.stored is not None:
            state.stored.discard()
    raise CaseError(states[index].case.name, f"the network gives no fixed output: {words}. {_SUPPOSED}")


def tolerance_of(forward: Forward, state: CaseState) -> Callable[[torch.dtype], float]:
    """What is rounding for a network and a case, by the type of an output."""
    image = state.case.image
    # nnU-Net adds its patches up in float16.
    coarse = forward.autocast_dtype(image) or getattr(forward.inferer, "blended_in", None)
    return rounding_of(forward.network, image.device, coarse, image.dtype)


def say_once(network: Any, message: str) -> None:
    """Warn of a network once, and note further cases as information."""
    try:
        first = network not in _noted
        _noted.add(network)
    except TypeError:  # it cannot be referred to weakly
        first = True
    logger.log(logging.WARNING if first else logging.INFO, message)


def _tensors(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Each tensor of an output with its path; none of a list of dictionaries, as a detector gives it."""
    if isinstance(output, torch.Tensor):
        yield path, plain(output)
    elif isinstance(output, (Mapping, tuple, list)):
        if not isinstance(output, Mapping) and any(isinstance(part, Mapping) for part in output):
            return
        for key, part in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _tensors(part, (*path, key))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """At most 2^20 values of a tensor, evenly spread, as a copy."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    step = max(1, -(-tensor.numel() // _VALUES))
    while step > 1 and math.gcd(step, tensor.shape[-1]) > 1:  # or all values come from some columns
        step += 1
    return tensor.detach().reshape(-1)[::step].clone()


def _largest(values: torch.Tensor) -> float:
    finite = values[torch.isfinite(values)].double().abs()
    return float(finite.max()) if len(finite) else 0.0
