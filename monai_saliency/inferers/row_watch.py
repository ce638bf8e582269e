"""Watches the batches of whole images: of a network's first cases, some rows are run alone, and compared (law 10).

A forward of one image takes a GPU as long as a forward of sixteen. So later cases of the same network, shape, batch
size and target are compared with what was predicted alone, if that is known. The image with everything hidden has a row
that a batch leaves free; it runs alone where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.batches import Rows
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Forward, known_of
from monai_saliency.inferers.perturbation import HIDDEN
from monai_saliency.inferers.row_check import RowCheck, RowsDepend, Seen, run_alone
from monai_saliency.networks.outputs import rows
from monai_saliency.utils.monai_private import tensor_version


class RowWatch:
    """Runs rows alone, of the cases in the first call for a network: the unperturbed image, the perturbed one that
    changed most, and at the end of a round the unperturbed image again.

    Args:
        forward: calls the network.
        states: the cases.
        batch: the buffer of all batches.
        run: runs images ``(n, C, *spatial)``, which are some rows of cases.
    """

    def __init__(
        self,
        forward: Forward,
        states: Sequence[CaseState],
        batch: torch.Tensor,
        run: Callable[[torch.Tensor, Sequence[Rows]], Any],
    ) -> None:
        self.forward, self.states, self.batch, self.run = forward, states, batch, run
        self.check = RowCheck(forward, states, f"in a batch of {len(batch)}" if len(batch) > 1 else "")
        target = repr(states[0].unbound_target)  # a function's own may mix rows
        ways = type(forward.inferer), repr(forward.output), forward.autocast_dtype(batch), forward.seed
        self._kind = "rows", tuple(batch.shape), batch.dtype, str(batch.device), target, ways
        self._is_first = self._kind not in known_of(forward.network)
        self._last: int | None = None  # the last case that had a batch after its first one
        self._alone: list[tuple[int, torch.Tensor | int, Seen]] = []  # rows of cases that ran alone, to be compared
        self._begun: list[int] = []  # their cases
        self._version = 0  # of the batch before the network ran

    def before(self, batch: Sequence[Rows]) -> None:
        """Before the network runs."""
        self._version = tensor_version(self.batch)

    def failed(self, batch: Sequence[Rows], error: Exception) -> None:
        """After the network failed on the first batch of a call: find out whether it takes one image alone. If so, the
        only image of a call goes through alone. Of several, the network may use further inputs of one of them.
        """
        case, size = self.states[0].case.name, len(self.batch)
        if batch[0][:2] != (0, 0) or size == 1:
            return
        try:
            self.run(self.states[0].images.unperturbed(), [(0, 0, 1)])
        except Exception:
            return
        kind = RowsDepend if len(self.states) == 1 else CaseError
        raise kind(
            case,
            f"the network fails on a batch of {size} and runs one image alone ({getattr(error, 'problem', error)}): if "
            "it takes one image at a time, set mask_batch_size=1; if it uses another input of one image, give that of "
            "all images, ms.explain(network, (images, other), inputs=ms.ArgumentInputs(perturb=0))",
        ) from error

    def after(self, batch: Sequence[Rows]) -> None:
        """After the scores are read."""
        # While the last batch ran, a GPU need not have waited for the host that compares the one before.
        self._compare()
        offset = 0
        for index, start, stop in batch:
            if start == 0:
                self._run_alone_of(index, offset, stop)
            elif self._is_first:
                self._last = index
            offset += stop - start

    def end_round(self) -> None:
        """After the batches of a round."""
        index = self._last
        now = None if index is None else self._run_alone(index, self.states[index].images.unperturbed())
        self._compare()
        if index is not None and now is not None:
            self.check.look_again(index, now)
            self._last = None
        for index, state in enumerate(self.states):
            if state.hidden_scores is None:  # no batch had a free row
                hidden = state.images.unperturbed()
                state.images.write(HIDDEN, HIDDEN + 1, out=hidden)
                state.hidden_scores = self._run_alone(index, hidden, HIDDEN).scores
        if not all(state.target.nothing for state in self.states):  # such cases have no scores to compare
            known_of(self.forward.network)[self._kind] = True

    def _run_alone_of(self, index: int, offset: int, stop: int) -> None:
        """Run two rows of a case alone, of which those below ``stop`` lie at ``offset`` of the batch: the unperturbed
        image, and the perturbed one that changed most.
        """
        self._begun.append(index)
        state, check = self.states[index], self.check
        is_predicted = check.is_predicted(index)
        if self._is_first and not is_predicted and (check.words or state.one_by_one):
            self._alone.append((index, 0, self._run_alone(index, state.images.unperturbed())))
        if self._is_first and check.words and stop > 1:
            changed = state.most_changed(stop)
            image = self._perturbed(index, offset, changed)
            self._alone.append((index, changed, self._run_alone(index, image, changed)))

    def _compare(self) -> None:
        """Compare what rows gave alone with what they gave in their batch."""
        alone, self._alone = self._alone, []
        for index, row, seen in alone:
            self.check.compare(index, int(row), seen)
        for index in self._begun:
            self.states[index].forget_prediction()
        self._begun.clear()

    def _perturbed(self, index: int, offset: int, row: torch.Tensor) -> torch.Tensor:
        """The image of a row ``(1,)`` of a case whose rows lie at ``offset`` of the batch."""
        if tensor_version(self.batch) == self._version:
            return self.batch.index_select(0, (offset + row).to(self.batch.device))
        number = int(row)  # the network has changed the batch in place
        image = self.states[index].images.unperturbed()
        self.states[index].images.write(number, number + 1, out=image)
        return image

    def _run_alone(self, index: int, image: torch.Tensor, row: torch.Tensor | int = 0) -> Seen:
        """The output of the image ``(1, C, *spatial)`` of a case's row when run alone."""
        state = self.states[index]
        number = int(row) if state.masks.numbers else 0  # on a GPU, to know the row is to wait

        def run(images: torch.Tensor, words: str) -> Seen:
            output = self.run(images, [(index, number, number + 1)] * len(images))
            return Seen.of(rows(output, 0, 1, len(images)), state.target, words)

        return cast(Seen, run_alone(self.forward.network, image, len(self.batch), run))
