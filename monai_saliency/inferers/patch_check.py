"""Whether patches give the same beside other patches as alone, see :mod:`~monai_saliency.inferers.reference`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.expected import RowsDepend, figures, largest, predicted, tolerance_of
from monai_saliency.inferers.forward import Cancelled, Forward
from monai_saliency.networks.comparison import Excerpt, difference, excerpt
from monai_saliency.networks.outputs import OutputPath
from monai_saliency.utils.monai_private import holds_compiled

__all__ = ["PatchCheck"]

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
            words = figures(state.bound_to, expected, volume, f"in patch batches of {self.batch_size}", gap)
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
                    f"a patch of the unperturbed image gives {largest(seen)} in a batch of {self.batch_size} patches "
                    f"and {largest(single)} {words}" + (f" ({gap})" if gap is not None else ""),
                )
            if not is_alone:
                return

    def _alone(self, alone: Callable[[int, int], torch.Tensor], slot: int) -> tuple[Excerpt, str, bool]:
        if not holds_compiled(self.forward.network):
            try:
                return excerpt(alone(slot, 1)), "alone", True
            except Cancelled:
                raise
            except Exception:
                logger.debug("the network takes no batch of one patch", exc_info=True)
        return excerpt(alone(slot, self.batch_size)), f"in a batch of {self.batch_size} copies of it", False
