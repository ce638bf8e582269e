"""Scoring rows of perturbed images: the interface, and the implementation that runs whole images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.expected import RowsDepend, are_detections, check_unchanged, copied, distrust
from monai_saliency.inferers.forward import Cancelled, Forward, has_no_mode
from monai_saliency.inferers.once import Passed
from monai_saliency.inferers.price import Batches, Price
from monai_saliency.inferers.reference import ReferenceCheck
from monai_saliency.inferers.window_rows import WindowRows
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import OutputPath, check_rows, read, rows
from monai_saliency.utils.monai_private import tensor_version
from monai_saliency.utils.profiling import stage
from monai_saliency.utils.tensors import new_buffer

__all__ = ["Plan", "Rows", "Scoring", "WholeImages"]

# Perturbed images whose boxes are compared with those of the image alone, once a detector.
_ENOUGH = 7

#: a case's place, its first row, and its last row + 1
Rows: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """What the forwards of a round come to.

    Attributes:
        total: forwards from the beginning of the call to the end of the round, if nothing is run twice.
        done: forwards so far.
        price: what they cost; None where nothing is left to run.
        note: more for the user, empty for none.
    """

    total: int
    done: int = 0
    price: Price | None = None
    note: str = ""


class Scoring(ABC):
    """Scores the rows of some cases by forwards of the network."""

    def resize(self, size: int) -> None:
        """Take batches of another number of rows from now on.

        Args:
            size: rows in a batch, at the most.
        """
        return  # remembered patches have batches of their own

    @abstractmethod
    def plan(self, spans: Sequence[tuple[int, int]], batches: Sequence[Sequence[Rows]]) -> Plan:
        """Prepare a round.

        Args:
            spans: for each case the rows [start, stop) of the round.
            batches: the rows to score here, in batches; those of other workers are left out.
        """

    @abstractmethod
    def score(self, batches: Sequence[Sequence[Rows]], advance: Callable[..., Any]) -> None:
        """Score the rows of a round that have no scores yet.

        Args:
            batches: as given to :meth:`plan`.
            advance: called after each batch with the number of forwards, and with False where its scores were known and
                it was not run.
        """


class WholeImages(Scoring):
    """Runs the inner inferer on batches of whole perturbed images.

    Args:
        forward: calls the network.
        states: the cases, all of one shape.
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
        # The last case of which masks were run since its unperturbed image was.
        self._unseen: int | None = None
        self._compared, self._looks_on = 0, False
        self._sizes = {1}  # of batches whose rows are checked
        self.reference = ReferenceCheck(forward, states, split, output, batch_size, found)
        self.runs = 0  # batches that the network ran
        # One buffer serves all batches, so memory does not grow with the masks. Rows past the end of the last batch
        # hold what they held before, but for the unperturbed image in the last, and only its output is read.
        self.batch = self._buffer(batch_size)
        self._windows = WindowRows()

    def _buffer(self, size: int) -> torch.Tensor:
        image = self.states[0].case.image
        return new_buffer(image, size, len(image) + self.split.held_images.shape[1], *image.shape[1:])

    def resize(self, size: int, check: bool = True) -> None:
        """Run the next batches with another number of rows.

        Args:
            size: perturbed images in a batch.
            check: compare the rows of a batch of a new size with the same in other rows, once a network.
        """
        if not check:
            self._sizes.add(size)
        if size != len(self.batch):
            self.batch = torch.empty(0)  # so that there are never two
            self.batch = self._buffer(size)
            self._windows.forget()
            self.reference.batch_size = size

    def plan(self, spans: Sequence[tuple[int, int]], batches: Sequence[Sequence[Rows]]) -> Plan:
        return Plan(sum(stop - start for batch in batches for _, start, stop in batch), price=self._price(batches))

    def score(self, batches: Iterable[Sequence[Rows]], advance: Callable[..., Any]) -> None:
        for batch in batches:
            ran = not all(self.states[index].has(start, stop) for index, start, stop in batch)
            if ran:
                self._run(batch)
            advance(sum(stop - start for _, start, stop in batch), ran)
        if self._unseen is not None:  # no row of the last batch was left over for it
            again, self._unseen = self._unseen, None
            self.reference.look_again(again)

    def _price(self, batches: Sequence[Sequence[Rows]]) -> Price | None:
        """What the rows that have no scores yet cost; before the first batch, all that it may come to."""
        todo = [batch for batch in batches if not all(self.states[rows[0]].scored(*rows[1:]) for rows in batch)]
        count = sum(stop - start for batch in todo for _, start, stop in batch)
        inferer = self.forward.inferer
        words = [type(inferer).__name__, *(str(getattr(inferer, name, "")) for name in ("roi_size", "overlap"))]
        return Price(count, batches=Batches(len(todo), self.batch.shape, " ".join(words))) if count else None

    def _run(self, batch: Sequence[Rows]) -> None:
        """Make, run and read one batch."""
        count = len(self.batch)
        self.runs += 1
        first = [index for index, start, _ in batch if start == 0]
        for index in first:
            self.reference.expect(index)
        self._unseen = next((index for index, start, _ in reversed(batch) if start > 0), self._unseen)
        offset, counts = 0, [(index, stop - start) for index, start, stop in batch]
        with stage("perturb"):
            for index, start, stop in batch:
                if start and stop - start == count:
                    self._windows.write(self.states[index], start, stop, out=self.batch)
                else:
                    self.states[index].perturb(start, stop, out=self.batch[offset : offset + stop - start])
                offset += stop - start
            again = self._unseen if offset < count else None
            if again is not None:
                self.states[again].perturb(0, 1, out=self.batch[-1:])
                counts.append((again, count - offset))
            values = self.split.values_of(counts, count)
        version = tensor_version(self.batch)
        with stage("forward"):
            output = self._forward(batch, values)
        check_unchanged(self.states[batch[0][0]], self.batch, version)
        index, start, stop = batch[-1]
        if start == 0:
            self._windows.trust(self.states[index], self.batch[offset - stop : offset])
        try:
            output = read(output, self.output)
            check_rows(output, count)
        except ValueError as error:
            raise CaseError(self.states[batch[0][0]].case.name, str(error)) from error
        if first:
            output = self._check(batch, output)
        offset = 0
        with stage("read scores"):
            for index, start, stop in batch:
                self.states[index].read(start, stop, output, offset, count)
                self.states[index].forwards_here += stop - start
                offset += stop - start
        if count not in self._sizes and not first:
            output = self._check_size(batch, values, output)
        if again is not None:
            self._unseen = None
            self.reference.check_again(again, rows(output, count - 1, count, count))
        if first:
            self._check_scores(batch, output)
        if count > 1 and (first or self._looks_on):
            self._check_perturbed(batch, output)
        if first and count > 1:
            # Scores that are on disk were checked when they were made.
            new = next((index for index in first if not self.states[index].complete), None)
            if new is not None:
                self.reference.check_faded(new, self.batch)
        for index, start, stop in batch:
            if start == 0:
                self._doubt(index, stop)

    def _check_perturbed(self, batch: Sequence[Rows], output: Any) -> None:
        """Check the perturbed row of each case that begins here whose scores changed most.

        A detector may drop or lower single boxes beside other images: every perturbed row of its first batches is
        checked, once a network.
        """
        count, first = len(self.batch), self.states[batch[0][0]]
        passed: Passed | None = None  # which looks at the whole image: no cost where there are no boxes
        if are_detections(output):
            passed = Passed(self.forward, self.output, ["every row", count], first.case.image, first.fill)
        every = passed is not None and not passed
        chosen, offset = [], 0
        for index, start, stop in batch:
            found = self.states[index].most_changed(stop) if start == 0 and not every else None
            wanted = range(max(1, start), stop) if every else [] if found is None else [found]
            places = [(row, offset + row - start) for row in wanted]
            chosen += [(index, row, rows(output, place, place + 1, count)) for row, place in places]
            offset += stop - start
        self.reference.check_perturbed(chosen)
        self._sizes.add(count)
        self._compared += len(chosen)
        self._looks_on = every and self._compared < _ENOUGH
        if passed is not None and every and not self._looks_on:
            passed.note()

    def _check_size(self, batch: Sequence[Rows], values: Mapping[Any, torch.Tensor], output: Any) -> Any:
        """Check the rows of a batch of another size than the first, once a network and size; the output."""
        count, (index, start, stop) = len(self.batch), batch[0]
        state = self.states[index]
        passed = Passed(self.forward, self.output, ["size", count], state.case.image, state.fill)
        row = None if passed else state.most_changed(stop, start)
        if row is not None:
            output = copied(output)  # which the next forward may overwrite
            changed = index, row, rows(output, row - start, row - start + 1, count)
            places = [index for index, start, stop in batch for _ in range(start, stop)]
            try:
                self.reference.check_order(places, output, self.batch, values)
                self.reference.check_perturbed([changed])
            except CaseError:
                for each in self.states:  # this batch counts by now, and maybe some before it
                    distrust(each)
                raise
            passed.note()
        if passed or row is not None:
            self._sizes.add(count)
        return output

    def _doubt(self, index: int, stop: int) -> None:
        """Where scores on disk are in doubt, score the mask again that changed the scores most, and compare it: rows
        below ``stop``, of the first batch, may hide where nothing is.
        """
        state, count = self.states[index], len(self.batch)
        row = state.most_changed(state.num_rows) if state.is_doubtful else None
        if row is None or row < stop:
            return
        state.perturb(row, row + 1, out=self.batch[:1])
        self.batch[1:] = self.batch[:1]
        output = read(
            self._forward([(index, row, row + 1)], self.split.values_of([(index, count)], count)), self.output
        )
        known = state.state.scores[: stop - 1].clone()
        state.doubt(row, row + 1, state.target(rows(output, 0, 1, count)))
        if not state.has(1, stop):  # none on disk is used, but these are new
            state.add(1, stop, known)

    def _check_scores(self, batch: Sequence[Rows], output: Any) -> None:
        """Check the scores of the unperturbed rows of a batch that is scored."""
        for index, offset in _unperturbed(batch):
            self.reference.check_scores(index, rows(output, offset, offset + 1, len(self.batch)))

    def _forward(self, batch: Sequence[Rows], values: Mapping[Any, torch.Tensor]) -> Any:
        try:
            return self.forward.images(self.batch, self.split, values)
        except Cancelled:
            raise
        except Exception as error:
            if len(self.batch) > 1 and batch[0][1] == 0 and has_no_mode(self.forward.network):
                self.reference.check_batch_size(batch[0][0], error)
            # The evaluator's prediction was compared with a batch, so that this may be the first image alone.
            if self.reference.found is None or batch[0][1] > 0:
                raise
            raise self.reference.failed(error, batch[0][0]) from error

    def _check(self, batch: Sequence[Rows], output: Any) -> Any:
        """Check the unperturbed rows of a batch, before anything of it counts; the output."""
        count = len(self.batch)
        for index, offset in _unperturbed(batch):
            if self.reference.has_other_form(index, rows(output, offset, offset + 1, count)):
                output = copied(output)  # which the next forward may overwrite
                self.reference.expect_alone(index)
            self.reference.check(index, rows(output, offset, offset + 1, count))
        return output


def _unperturbed(batch: Sequence[Rows]) -> Iterator[tuple[int, int]]:
    """Each case whose unperturbed image is in a batch, and where it stands there."""
    offset = 0
    for index, start, stop in batch:
        if start == 0:
            yield index, offset
        offset += stop - start
