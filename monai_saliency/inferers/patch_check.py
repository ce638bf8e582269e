"""Whether patches give the same beside other patches as alone, see :mod:`~monai_saliency.inferers.reference`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.expected import (
    SUPPOSED,
    Expected,
    RowsDepend,
    distrust,
    figures,
    largest,
    predicted,
    score_figures,
    scores_differ,
    tolerance_of,
)
from monai_saliency.inferers.forward import Cancelled, Forward
from monai_saliency.inferers.once import Passed
from monai_saliency.networks.comparison import Difference, Excerpt, difference, excerpt
from monai_saliency.networks.outputs import OutputPath, check_rows, read
from monai_saliency.utils.monai_private import holds_compiled
from monai_saliency.utils.tensors import plain

__all__ = ["PatchCheck", "WrapperCheck"]

logger = logging.getLogger(__name__)


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
        self._scale: dict[int, Excerpt] = {}
        self._chosen: dict[int, tuple[Excerpt, str]] = {}
        self._perturbed: set[int] = set()
        self._twice: dict[int, Excerpt | None] = {}
        self._is_checked = False

    def look_twice(self, slots: Sequence[int]) -> None:
        """Choose unperturbed patches of the first case that will come again: what they first give is kept."""
        self._twice = dict.fromkeys(slots)

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
        if slot in self._twice and self._twice[slot] is None:
            self._twice[slot] = excerpt(output)
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
        gap = None if expected is None else difference(expected.excerpt, self._kept(state, volume), tolerance)
        if expected is not None and gap is not None and gap.beyond_rounding:
            words = figures(state.bound_to, expected, volume, f"in patch batches of {self.batch_size}", gap)
            raise RowsDepend(state.case.name, f"the unperturbed image gives {words}")
        self._is_checked = True
        for slot in self._watched[index]:
            if slot not in self._seen:  # compared already, for another case in its batch, or the only one in its own
                continue
            seen = self._seen.pop(slot)
            single, words, is_alone = self._alone(alone, slot)
            self._scale.setdefault(index, single)
            if slot == self._watched[index][0]:
                self._chosen[index] = single, words
            self._compare(index, "a patch of the unperturbed image", single, words, seen)
            if not is_alone:
                return

    def _kept(self, state: CaseState, volume: torch.Tensor) -> Excerpt:
        """What is compared with a prediction: a stitched output, without what the prediction has lost where patches
        count so little that its sums cannot hold them.
        """
        lost = getattr(self.forward.inferer, "lost", None)
        part = None if lost is None else read(state.case.prediction, self.output)
        if lost is None or not isinstance(part, torch.Tensor) or part.shape != volume.shape:
            return excerpt(volume)
        most = lost(volume.shape[2:]).to(volume)
        gaps = plain(part).to(volume) - volume
        return excerpt(volume + torch.clamp(gaps, -most, most))

    def check_again(self, slot: int, now: Excerpt | None, alone: Callable[[int, int], torch.Tensor]) -> None:
        """Compare a patch that comes again with what it gave first.

        Args:
            slot: the patch's slot, one of :meth:`look_twice`.
            now: its output beside others; None to run it alone.
            alone: as for :meth:`check`.

        Raises:
            RowsDepend: when it differs, and the network still gives what it gave at first for a patch alone.
            CaseError: when it differs, and the network has changed.
        """
        first, state = self._twice[slot], self.states[0]
        if first is None or not self._is_checked:  # patches may still be found to depend on each other
            return
        if now is None:
            now = self._alone(alone, slot)[0]
        gap = difference(first, now, tolerance_of(self.forward, state), self._scale.get(0))
        if gap is not None and not gap.beyond_rounding:
            return
        if self.batch_size > 1:
            single = self._alone(alone, self._watched[0][0])[0]
            changed = difference(self._scale[0], single, tolerance_of(self.forward, state))
            if changed is not None and not changed.beyond_rounding:
                self._compare(0, "a patch of the unperturbed image", first, "in another one", now)
        self._refuse_changed(gap)

    def _refuse_changed(self, gap: Difference | None) -> NoReturn:
        """Raise the error of a network that changed between the first patches and the last."""
        for each in self.states:
            distrust(each)
        raise CaseError(
            self.states[0].case.name,
            "the network gives no fixed output: a patch of the unperturbed image gives something else after other "
            f"patches than before them{'' if gap is None else f' ({gap})'}. {SUPPOSED}",
        )

    def wants_perturbed(self, index: int) -> bool:
        """Whether no perturbed patch of a case was compared yet."""
        return self.batch_size > 1 and index not in self._perturbed

    def check_perturbed(
        self, index: int, slot: int, beside: Excerpt, alone: Callable[[int, int], torch.Tensor]
    ) -> None:
        """Compare a perturbed patch beside others with the same alone, once a case.

        Args:
            index: the case's place.
            slot: the patch's slot.
            beside: its output beside others.
            alone: as for :meth:`check`.

        Raises:
            RowsDepend: when it differs.
        """
        self._perturbed.add(index)
        single, words, _ = self._alone(alone, slot)
        self._compare(index, "a perturbed patch", single, words, beside)

    def check_faded(self, index: int, patches: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compare patches that are faded more and more with the same in other rows, and the last of them, which then
        stands there twice, with itself alone. The first one, which is not faded, is compared with what it gave alone.
        Once a network.

        Args:
            index: the place of a case whose unperturbed patches are checked.
            patches: ``(batch_size, C, *roi_size)``, the patch of :meth:`watch` faded more and more.
            run: gives the network's output of a batch of patches.

        Raises:
            RowsDepend: when they differ.
        """
        count, state = len(patches), self.states[index]
        passed = Passed(self.forward, self.output, ["patches", count], state.case.image, state.fill)
        if count < 2 or passed or torch.equal(patches[0], patches[-1]):
            return
        order = [count - 1, count - 1, *range(count - 2)]
        copies = holds_compiled(self.forward.network)
        try:
            first, again = (
                [excerpt(row) for row in run(patches[rows]).split(1)] for rows in (list(range(count)), order)
            )
            single = excerpt(run(patches[-1:].expand(count if copies else 1, *patches.shape[1:]))[:1])
        except Cancelled:
            raise
        except Exception:
            logger.debug("the network does not take a patch faded by half, or no batch of one", exc_info=True)
            return
        what, words = "a patch faded by up to a half", f"in a batch of {count} copies of it" if copies else "alone"
        self._compare(index, what, single, words, first[-1])
        if index in self._chosen:
            self._compare(index, "a patch beside darker or brighter ones", *self._chosen[index], first[0])
        for row, patch in enumerate(order):
            self._compare(index, what, first[patch], "in another row", again[row])
        passed.note()

    def _compare(self, index: int, what: str, single: Excerpt, words: str, beside: Excerpt) -> None:
        """Raise an error where a patch beside others is not what it is alone."""
        state = self.states[index]
        gap = difference(single, beside, tolerance_of(self.forward, state), self._scale.get(index))
        if gap is None or gap.beyond_rounding:
            raise RowsDepend(
                state.case.name,
                f"{what} gives {largest(beside)} in a batch of {self.batch_size} patches and {largest(single)} {words}"
                + (f" ({gap})" if gap is not None else ""),
            )

    def _alone(self, alone: Callable[[int, int], torch.Tensor], slot: int) -> tuple[Excerpt, str, bool]:
        if not holds_compiled(self.forward.network):
            try:
                return excerpt(alone(slot, 1)), "alone", True
            except Cancelled:
                raise
            except Exception:
                logger.debug("the network takes no batch of one patch", exc_info=True)
        return excerpt(alone(slot, self.batch_size)), f"in a batch of {self.batch_size} copies of it", False


class WrapperCheck:
    """Compares the scores of a perturbed image by its patches with those of the whole image, by an inferer that holds
    the one which cuts the patches. What such a wrapper does is tried with made-up values, and it may do more only with
    the network's own, or for as many channels as the network has. It costs one prediction a case.

    Args:
        whole: calls the network by the wrapper; None where there is none, so that nothing is run.
        states: the cases.
        output: the part of the network's output that is explained.
    """

    def __init__(self, whole: Forward | None, states: Sequence[CaseState], output: OutputPath | None) -> None:
        self.whole = whole
        self.states = states
        self.output = output
        self._compared: set[int] = set()

    def wants(self, index: int) -> bool:
        """Whether a case is still to be compared."""
        return self.whole is not None and index not in self._compared

    def left(self, cases: Iterable[int]) -> int:
        """How many of some cases are still to be compared, one prediction each."""
        return sum(map(self.wants, cases))

    def words(self, predictions: int) -> str:
        """What some predictions are for, in words that follow others."""
        name = "" if self.whole is None else type(self.whole.inferer).__name__
        return f", and {predictions} predictions by {name} itself, for comparison" if predictions else ""

    def compare(self, index: int, row: int) -> None:
        """Compare a row of a case that has its scores.

        Raises:
            RowsDepend: when it differs. The wrapper then runs whole images.
        """
        assert self.whole is not None
        self._compared.add(index)
        state = self.states[index]
        name = type(self.whole.inferer).__name__
        image = torch.empty_like(state.case.image)[None]
        state.perturb(row, row + 1, out=image)
        try:
            output = read(self.whole.images(image, self.whole.inputs.split(image), {}), self.output)
            check_rows(output, 1)
            here = Expected.of(output, f"by {name}", state)
        except Cancelled:
            raise
        except Exception as error:
            problem = f"fails with a whole image ({type(error).__name__}: {error})"
        else:
            patches = replace(here, words="by its patches", scores=state.state.scores[row - 1])
            if not scores_differ(state, patches, here, tolerance_of(self.whole, state)):
                return
            problem = f"a perturbed image gives {score_figures(state, here, patches)}"
        distrust(state)
        raise RowsDepend(state.case.name, f"{name} does more than call its SlidingWindowInferer: {problem}")
