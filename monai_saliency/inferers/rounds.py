"""A round of masks: cut into full batches of one shape at fixed places (law 7), and scored by forwards of whole images.

Where outputs of patches are remembered, :mod:`monai_saliency.inferers.patches` scores it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from monai_saliency.inferers.case_state import HIDDEN, CaseState
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.row_check import RowCheck, Seen, run_alone
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import rows
from monai_saliency.sharding import Part
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.monai_private import tensor_version
from monai_saliency.utils.timing import stage

__all__ = ["AutoSize", "Plan", "Rows", "WholeImages", "batch_size", "cut", "of_part", "rows_in_batch"]

#: a case's place, its first row, and its last row + 1
Rows: TypeAlias = tuple[int, int, int]

#: values in a batch of perturbed images where its size is found by itself, 64 MB in float32, and the most images; on a
#: GPU twice as many values, since it runs larger batches faster
_VALUES, _MOST = 2**24, 16
_VALUES_ON_GPU, _MOST_ON_GPU = 2**25, 64


class AutoSize(int):
    """A batch size that the image decides. As a number it is the one to take where no image is known."""


def batch_size(value: Any) -> int:
    """Check a setting ``mask_batch_size``: a whole number of at least 1, or ``"auto"``."""
    if isinstance(value, AutoSize) or (isinstance(value, str) and value == "auto"):
        return AutoSize(_MOST)
    return whole_number("mask_batch_size", value, 1)


def rows_in_batch(setting: int, states: Sequence[CaseState]) -> int:
    """Rows in each batch of a call: as many as the setting allows, or all of the first round where these are fewer."""
    image = states[0].case.image
    if isinstance(setting, AutoSize):
        values, most = (_VALUES_ON_GPU, _MOST_ON_GPU) if image.is_cuda else (_VALUES, _MOST)
        setting = max(1, min(most, values // max(1, image.numel())))
    spans = [state.rows_of_round(0) for state in states]
    return min(setting, sum(stop - start for start, stop in spans))


def cut(spans: Sequence[tuple[int, int]], size: int) -> Iterator[list[Rows]]:
    """Cut runs of rows, laid end to end, into batches."""
    batch: list[Rows] = []
    room = size
    for index, (start, end) in enumerate(spans):
        while start < end:
            stop = min(end, start + room)
            batch.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def of_part(batches: list[list[Rows]], part: Part) -> list[list[Rows]]:
    """The batches of a round that a part runs: its share, and all that hold an unperturbed image."""
    if part.count == 1:
        return batches
    shared = [number for number, rows in enumerate(batches) if all(start > 0 for _, start, _ in rows)]
    others = set(shared) - {shared[i] for i in part.of(len(shared))}
    return [rows for number, rows in enumerate(batches) if number not in others]


class Plan(NamedTuple):
    """The forwards of a round, and how many of them are one prediction."""

    total: int
    done: int = 0
    per_prediction: int = 1


class WholeImages:
    """Scores the rows of some cases by the inner inferer, on batches of whole perturbed images."""

    def __init__(self, forward: Forward, states: Sequence[CaseState], split: SplitInputs, batch_size: int) -> None:
        self.forward, self.states, self.split = forward, states, split
        self.check = RowCheck(forward, states, f"in a batch of {batch_size}" if batch_size > 1 else "")
        self._ran: int | None = None  # the last case that had a batch after its first one
        self._alone: list[tuple[int, torch.Tensor | int, Seen]] = []  # rows of cases that ran alone, to be compared
        self._checked: list[int] = []  # their cases
        self._version = 0  # of the batch before the network ran
        # One buffer serves all batches, so memory does not grow with the masks. Rows past the end of the last batch
        # hold what they held before, and nothing reads their outputs.
        image = states[0].case.image
        self.batch = image.new_zeros(batch_size, len(image) + split.held_images.shape[1], *image.shape[1:])

    def plan(self, spans: Sequence[tuple[int, int]], batches: Sequence[Sequence[Rows]]) -> Plan:
        """The forwards of a round."""
        return Plan(sum(stop - start for batch in batches for _, start, stop in batch))

    def score(self, batches: Sequence[Sequence[Rows]], advance: Callable[[int], None]) -> None:
        """Score the rows of a round that have no scores yet."""
        for batch in batches:
            if not all(self.states[index].has(start, stop) for index, start, stop in batch):
                self._run(batch)
            advance(sum(stop - start for _, start, stop in batch))
        now = None if self._ran is None else self._run_alone(self._ran, self._unperturbed(self._ran))
        self._compare()
        if self._ran is not None and now is not None:
            self.check.look_again(self._ran, now)
            self._ran = None

    def _run(self, batch: Sequence[Rows]) -> None:
        """Make masks, perturb, run the network, and read scores."""
        with stage("perturb"):
            self._perturb(batch)
        with stage("forward"):
            output = self._forward(batch)
        with stage("read scores"):
            self._read(batch, output)
        # While this batch runs, a GPU need not wait for the host that compares the one before.
        self._compare()
        offset = 0
        for index, start, stop in batch:
            if start == 0:
                self._check(index, offset, stop)
            offset += stop - start

    def _check(self, index: int, offset: int, stop: int) -> None:
        """Run two rows of a case alone, of which those below ``stop`` stand at ``offset`` of the batch: the unperturbed
        image, and the perturbed one that changed most. The image with everything hidden is run too.
        """
        self._checked.append(index)
        state, check = self.states[index], self.check
        if not check.is_predicted(index) and (check.words or state.one_by_one):
            self._alone.append((index, 0, self._run_alone(index, self._unperturbed(index))))
        if check.words and stop > 1:
            changed = state.most_changed(stop)
            image = self._perturbed(index, offset, changed)
            self._alone.append((index, changed, self._run_alone(index, image, changed)))
        hidden = self._unperturbed(index)
        state.perturb(HIDDEN, HIDDEN + 1, out=hidden)
        state.hidden_scores = self._run_alone(index, hidden, HIDDEN).scores

    def _compare(self) -> None:
        """Compare what rows gave alone with what they gave in their batch."""
        alone, self._alone = self._alone, []
        for index, row, seen in alone:
            self.check.compare(index, int(row), seen)
        for index in self._checked:
            self.states[index].forget_prediction()
        self._checked.clear()

    def _perturb(self, batch: Sequence[Rows]) -> None:
        offset = 0
        for index, start, stop in batch:
            self.states[index].perturb(start, stop, out=self.batch[offset : offset + stop - start])
            offset += stop - start

    def _forward(self, batch: Sequence[Rows]) -> Any:
        first = batch[0][0]
        name, counts = self.states[first].case.name, [(index, stop - start) for index, start, stop in batch]
        self._version = tensor_version(self.batch)
        return self.forward.images(self.batch, self.split, counts, name, self._hidden(batch))

    def _hidden(self, batch: Sequence[Rows]) -> np.ndarray | None:
        """Which numbers each row of a batch hides; None where the image alone is hidden."""
        if not self.split.numbers:
            return None
        return np.concatenate([self.states[index].hidden_numbers(*rows) for index, *rows in batch])

    def _read(self, batch: Sequence[Rows], output: Any) -> None:
        offset = 0
        for index, start, stop in batch:
            state = self.states[index]
            state.read(start, stop, output, offset, len(self.batch))
            state.forwards_here += stop - start
            offset += stop - start
            self._ran = index if start > 0 else self._ran

    def _unperturbed(self, index: int) -> torch.Tensor:
        """The image of a case as the network gets it, ``(1, C, *spatial)``."""
        return torch.cat([self.states[index].case.image, self.states[index].held])[None]

    def _perturbed(self, index: int, offset: int, row: torch.Tensor) -> torch.Tensor:
        """The image of a row ``(1,)`` of a case whose rows stand at ``offset`` of the batch."""
        if tensor_version(self.batch) == self._version:
            return self.batch.index_select(0, (offset + row).to(self.batch.device))
        image, number = self._unperturbed(index), int(row)  # the network has changed the batch in place
        self.states[index].perturb(number, number + 1, out=image)
        return image

    def _run_alone(self, index: int, image: torch.Tensor, row: torch.Tensor | int = 0) -> Seen:
        """The output of the image ``(1, C, *spatial)`` of a case's row when run alone."""
        state = self.states[index]
        number = int(row) if self.split.numbers else 0

        def run(batch: torch.Tensor, words: str) -> Seen:
            hidden = self._hidden([(index, number, number + 1)] * len(batch))
            output = self.forward.images(batch, self.split, [(index, len(batch))], state.case.name, hidden)
            return Seen.of(rows(output, 0, 1, len(batch)), state.target, words)

        return cast(Seen, run_alone(self.forward.network, image, len(self.batch), run))
