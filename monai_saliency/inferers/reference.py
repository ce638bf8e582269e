"""Whether what is explained is what the network gives for the image alone, and what was predicted.

A batch of perturbed images assumes that each row of the output belongs to one image and does not depend on the others.
A softmax over the wrong axis, statistics of the batch, a prompt that takes the batch axis, or rows in another order
break this without an error, and a map made of such scores is wrong. So the unperturbed row of the first batch is
compared before any score of the case counts:

- with what an evaluator predicted for the image (:attr:`Case.prediction <monai_saliency.cases.Case>`), where it is at
  hand and has the same form;
- otherwise with one more forward, of this image alone. Under remembered patches it is one more patch. Nothing more is
  run where images go through one at a time from the beginning (``mask_batch_size=1``): there a network that draws
  random numbers is only found out under an evaluator.
- A network that takes one batch size only (an exported engine), or that would be compiled again for another one, gets a
  batch of that size in which every row is the image.

The unperturbed row may be right where others are not: ``x / x.max()`` of a batch which holds the unperturbed image
leaves it as it is alone. So one perturbed row of the first batch, the one whose scores changed most, is compared with
its image alone too: one forward a case, or none where no perturbed row of the case in its first batch has other scores.

Where they differ by more than rounding (:func:`monai_saliency.utils.precision.rounding_of`), :class:`RowsDepend` is
raised, images go through one at a time, and the log says so. Where that does not agree either, the case fails.

What is run for this changes no score, and is not counted in ``num_forwards``, which counts what the scores need. What
is compared is all that ``output`` reads, so ``output`` leaves out a part that may differ. A detector's boxes may come
in another order, so there the scores of the same boxes are compared. What leaves both rows of the first batch as they
are alone is not seen.

An evaluator's prediction is compared where its network is the network that explains, as its inferer gave it, before any
postprocessing. It cannot be compared where the evaluator gives it another form, runs another object as its network (as
of ``torch.compile`` or ``DistributedDataParallel``), where postprocessing has changed it in place, or where a detector
found no box, so that boxes below its threshold are explained. Then the image alone is what is compared.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Cancelled, Forward
from monai_saliency.networks.comparison import Difference, Excerpt, difference, excerpt
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import OutputPath, check_rows, read, rows
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.monai_private import is_compiled, tree_map
from monai_saliency.utils.precision import rounding_of
from monai_saliency.utils.tensors import plain

__all__ = ["Expected", "ReferenceCheck", "RowsDepend", "copied", "say_once"]

logger = logging.getLogger(__name__)

#: values of an output that is kept whole, so that errors can show its scores
_KEPT = 2**22
_SUPPOSED = (
    "Such a network draws random numbers (a dropout that is left on), or keeps something from one call to the next"
)


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


class ReferenceCheck:
    """Compares the unperturbed row of a batch with the image alone.

    Args:
        forward: calls the network.
        states: the cases.
        split: the network's inputs, taken apart.
        output: the part of the network's output that is explained.
        batch_size: perturbed images in a batch.
        found: why images go through one at a time; None where they do not, or always did.
    """

    def __init__(
        self,
        forward: Forward,
        states: Sequence[CaseState],
        split: SplitInputs,
        output: OutputPath | None,
        batch_size: int,
        found: RowsDepend | None = None,
    ) -> None:
        self.forward = forward
        self.states = states
        self.split = split
        self.output = output
        self.batch_size = batch_size
        self.found = found
        self._expected: dict[int, Expected] = {} if found is None else dict(found.expected)
        self._unperturbed: dict[int, Excerpt] = {}

    @functools.cached_property
    def _tolerance(self) -> Callable[[torch.dtype], float]:
        return tolerance_of(self.forward, self.states[0])

    def expect(self, index: int) -> None:
        """Find out what a case must give, before its first batch: the network may write its outputs to one place."""
        prediction = predicted(self.states[index], self.output)
        if prediction is not None:
            self._expected[index] = prediction
            return
        if index not in self._expected and (self.batch_size > 1 or self.found is not None):
            self._expected[index] = self._run(index)

    def has_other_form(self, index: int, row: Any) -> bool:
        """Whether a case's prediction cannot be compared with the network's output, so that :meth:`expect_alone` must
        be called.
        """
        expected = self._expected.get(index)
        if expected is None or not expected.predicted or _detections(row):
            return False
        return difference(expected.excerpt, excerpt(row), self._tolerance) is None

    def expect_alone(self, index: int) -> None:
        """Expect what the network gives for the image alone rather than the evaluator's prediction."""
        del self._expected[index]
        if self.batch_size > 1 or self.found is not None:
            self._expected[index] = self._run(index)

    def check(self, index: int, row: Any) -> None:
        """Compare the unperturbed row of a case's first batch.

        Args:
            index: the case's place.
            row: the network's output ``(1, ...)`` of its unperturbed image.

        Raises:
            RowsDepend: when it differs from what the image gives alone, and other images are in the batch.
            CaseError: when it differs, and no way is left to explain the case.
        """
        expected = self._expected.get(index)
        found = excerpt(row)
        if self.batch_size > 1:
            self._unperturbed[index] = found
        if expected is None:
            return
        state = self.states[index]
        gap = difference(expected.excerpt, found, self._tolerance)
        differs = gap is None or gap.beyond_rounding
        if differs and _detections(row) and expected.output is not None:
            differs = not _same_boxes(state.bound_to, expected.output, row, self._tolerance)
        if not differs:
            return
        here = f"in a batch of {self.batch_size}" if self.batch_size > 1 else "explained alone"
        figures = f"the unperturbed image gives {_figures(state.bound_to, expected, row, here, gap)}"
        if self.batch_size > 1:
            raise self._depend(index, figures, expected.alone)
        if expected.predicted:
            raise CaseError(
                state.case.name,
                f"what is explained is not what was predicted: {figures}. {_SUPPOSED}, or "
                "the evaluator's other images of the batch change its prediction (let it predict one image at a time), "
                "or it predicts with another inferer, network or precision than explains",
            )
        again = figures.replace("explained alone", "alone again")
        raise CaseError(state.case.name, f"the network gives no fixed output: {again}. {_SUPPOSED}")

    def check_perturbed(self, chosen: Sequence[tuple[int, int, Any]]) -> None:
        """Compare perturbed rows of a batch with the same images alone, at most one row of a case.

        Args:
            chosen: for each a case's place, the row of its state, and the network's output ``(1, ...)`` of it.

        Raises:
            RowsDepend, CaseError: as :meth:`check`.
        """
        # All are copied first: the next forward may overwrite them.
        found = [(index, row, Expected.of(output, f"in a batch of {self.batch_size}")) for index, row, output in chosen]
        for index, row, here in found:
            state = self.states[index]
            alone = self._run(index, row)
            gap = difference(alone.excerpt, here.excerpt, self._tolerance, self._unperturbed.get(index))
            if gap is not None and not gap.beyond_rounding:
                continue
            bind = _as_bound(state)
            if _detections(here.output) and _same_boxes(bind, alone.output, here.output, self._tolerance):
                continue
            figures = _figures(bind, alone, here.output, here.words, gap)
            raise self._depend(index, f"a perturbed image (row {row}) gives {figures}", alone.alone)

    def _depend(self, index: int, figures: str, alone: bool) -> CaseError:
        """The error of a case whose row of a batch is not what its image gives alone, or in a batch of copies."""
        name = self.states[index].case.name
        if alone or _is_compiled(self.forward.network):
            return RowsDepend(name, figures, {place: each for place, each in self._expected.items() if each.alone})
        return CaseError(
            name,
            f"the network's rows depend on each other ({figures}), and it takes no batch of one image, so that images "
            "cannot go through one at a time either",
        )

    def failed(self, error: Exception, index: int) -> CaseError:
        """The error of a case whose image cannot go through alone, after a batch of it was found wrong."""
        assert self.found is not None
        return CaseError(
            self.states[index].case.name,
            f"the network's rows depend on each other ({self.found.problem}), and images cannot go through one at a "
            f"time either: {type(error).__name__}: {error}",
        )

    def _run(self, index: int, row: int = 0) -> Expected:
        """Run the image of a case's row alone, or where the network does not take it, a batch of copies of it."""
        state = self.states[index]
        image = torch.cat([state.case.image, state.held])[None]
        state.perturb(row, row + 1, out=image)
        # Compiling again for another batch size takes minutes, and may change the bits of all other batches.
        if self.found is not None or not _is_compiled(self.forward.network):
            try:
                return self._read(index, self._images(index, image, 1), 1, "alone")
            except Cancelled:
                raise
            except Exception as error:
                if self.batch_size == 1:
                    raise self.failed(error, index) from error
                logger.debug("the network takes no batch of one image", exc_info=True)
        size = self.batch_size
        copies = image.expand(size, *image.shape[1:]).contiguous()
        return self._read(index, self._images(index, copies, size), size, f"in a batch of {size} copies of it")

    def _images(self, index: int, batch: torch.Tensor, count: int) -> Any:
        return self.forward.images(batch, self.split, self.split.values_of([(index, count)], count))

    def _read(self, index: int, output: Any, count: int, words: str) -> Expected:
        try:
            output = read(output, self.output)
            check_rows(output, count)
        except ValueError as error:
            raise CaseError(self.states[index].case.name, str(error)) from error
        return Expected.of(rows(output, 0, 1, count), words, alone=count == 1)


class PatchCheck:
    """Compares patches beside other patches with the same patches alone, and stitched patches with a prediction.

    Args:
        forward: calls the network.
        states: the cases.
        output: the part of the network's output that is explained.
        batch_size: patches in a batch.
    """

    def __init__(
        self, forward: Forward, states: Sequence[CaseState], output: OutputPath | None, batch_size: int
    ) -> None:
        self.forward = forward
        self.states = states
        self.output = output
        self.batch_size = batch_size
        self._watched: list[list[int]] = []
        self._seen: dict[int, Excerpt] = {}

    def watch(self, slots: Sequence[int], count: int) -> None:
        """Choose a patch of each case. The whole batch that holds it is compared, patch by patch.

        Args:
            slots: the patches' slots.
            count: how many slots there are.
        """
        firsts = [slot // self.batch_size * self.batch_size for slot in slots]
        batches = [range(first, min(first + self.batch_size, count)) for first in firsts]
        # First the patch that was chosen, which alone is compared where only batches of copies can be run.
        self._watched = [sorted(batch, key=slot.__ne__) for slot, batch in zip(slots, batches, strict=True)]

    def see(self, slot: int, output: torch.Tensor) -> None:
        """Note the output ``(1, C, *roi_size)`` of a slot beside others, the first time that it comes."""
        if self.batch_size > 1 and slot not in self._seen and any(slot in batch for batch in self._watched):
            self._seen[slot] = excerpt(output)

    def check(self, index: int, volume: torch.Tensor, alone: Callable[[int, int], torch.Tensor]) -> None:
        """Compare a case.

        The prediction is stitched of the same batches of patches, so it does not say whether they depend on each other.

        Args:
            index: the case's place.
            volume: ``(1, C, *spatial)``, the stitched output of its unperturbed image.
            alone: runs a slot's patch in a batch of copies; a slot and their number.

        Raises:
            RowsDepend: when it differs.
        """
        state = self.states[index]
        tolerance = tolerance_of(self.forward, state)
        expected = predicted(state, self.output)
        gap = None if expected is None else difference(expected.excerpt, excerpt(volume), tolerance)
        if expected is not None and gap is not None and gap.beyond_rounding:
            words = _figures(state.bound_to, expected, volume, f"in patch batches of {self.batch_size}", gap)
            raise RowsDepend(state.case.name, f"the unperturbed image gives {words}")
        for slot in self._watched[index]:
            if slot not in self._seen:  # compared already, for another case in its batch, or the only one in its own
                continue
            seen = self._seen.pop(slot)
            single, words, is_alone = self._alone(alone, slot)
            gap = difference(single, seen, tolerance)
            if gap is None or gap.beyond_rounding:
                raise RowsDepend(
                    state.case.name,
                    f"a patch of the unperturbed image gives {_largest(seen)} in a batch of {self.batch_size} patches "
                    f"and {_largest(single)} {words}" + (f" ({gap})" if gap is not None else ""),
                )
            if not is_alone:
                return

    def _alone(self, alone: Callable[[int, int], torch.Tensor], slot: int) -> tuple[Excerpt, str, bool]:
        if not _is_compiled(self.forward.network):
            try:
                return excerpt(alone(slot, 1)), "alone", True
            except Cancelled:
                raise
            except Exception:
                logger.debug("the network takes no batch of one patch", exc_info=True)
        return excerpt(alone(slot, self.batch_size)), f"in a batch of {self.batch_size} copies of it", False


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


def _figures(
    bind: Callable[[Any], BoundTarget], expected: Expected, row: Any, here: str, gap: Difference | None
) -> str:
    """What an image gives here, and what it must give, in words; with the outputs' difference."""
    try:
        if expected.output is None:
            raise ValueError("the output is not kept")
        bound = bind(expected.output)
        wanted, found = (
            ", ".join(f"{label_name(label)} {score:.6g}" for label, score in zip(bound.labels, scores, strict=True))
            for scores in (bound(each)[0].tolist() for each in (expected.output, row))
        )
    except Exception:  # a target that cannot be bound to this output: the outputs' own figures say enough
        wanted, found = (_largest(each) for each in (expected.excerpt, excerpt(row)))
    words = f"{found} {here} and {wanted} {expected.words}"
    return words if gap is None else f"{words} ({gap})"


def _as_bound(state: CaseState) -> Callable[[Any], BoundTarget]:
    return lambda output: state.target


def _largest(output: Excerpt) -> str:
    """The first tensor of an output in a few words."""
    shape, values = next(iter(output.values()), (torch.Size(), torch.empty(0)))
    if not values.numel():
        return f"an output of shape {tuple(shape)}"
    return f"an output of shape {tuple(shape)} with mean {values.double().mean().item():.6g}"


def _same_boxes(
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


def _detections(output: Any) -> bool:
    """Whether an output is a list of dictionaries, as of a detector, which may find any number of boxes."""
    return isinstance(output, (list, tuple)) and bool(output) and all(isinstance(each, Mapping) for each in output)


def copied(output: Any) -> Any:
    """An output whose tensors are plain copies."""
    return tree_map(lambda value: plain(value).detach().clone() if isinstance(value, torch.Tensor) else value, output)


def _is_compiled(network: Any) -> bool:
    """Whether a part of a network is compiled by ``torch.compile``."""
    return isinstance(network, torch.nn.Module) and any(map(is_compiled, network.modules()))


_noted: WeakSet[Any] = WeakSet()


def say_once(network: Any, message: str) -> None:
    """Warn of a network once, and note further cases as information."""
    try:
        first = network not in _noted
        _noted.add(network)
    except TypeError:  # it cannot be referred to weakly
        first = True
    logger.log(logging.WARNING if first else logging.INFO, message)
