"""Remembered patches: the same scores from a fraction of the forwards, for sliding-window models.

The output of a patch depends only on the voxels of the patch. So a mask changes only the patches in which it hides
something, and masks that agree inside a patch share its output: each patch is run once unperturbed, and once for each
different restriction of a mask to it. A mask's output is the unperturbed output with its patches exchanged:
``(sum + sum_p w * (new_p - old_p)) / count``, in the box that they cover. Patches that the target does not read are not
run for masks. Positions, weights, padding and blending are MONAI's
(:func:`monai.inferers.utils.sliding_window_inference`).

A network batch holds ``sw_batch_size`` patches. Which patches share a batch depends only on the images, the masks and
the target, not on what is remembered or stored: a forgotten output is computed again in the batch that it came from.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.data.utils import compute_importance_map
from monai.inferers import SlidingWindowInferer
from monai.utils import PytorchPadMode, look_up_option

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Cancelled, Forward
from monai_saliency.inferers.patch_case import PatchCase, Swap, cancels
from monai_saliency.inferers.patch_memory import OutputMemory, Outputs, PatchMemory
from monai_saliency.inferers.patch_plan import refusal
from monai_saliency.inferers.rounds import Plan, Scoring
from monai_saliency.inferers.row_check import (
    Rows,
    RowsDepend,
    Seen,
    difference,
    predicted,
    refuse_changed,
    tolerance_of,
    unlike,
)
from monai_saliency.networks.outputs import OutputPath, read
from monai_saliency.utils.boxes import everywhere
from monai_saliency.utils.monai_private import holds_compiled
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.timing import stage

__all__ = ["RememberedPatches", "remember"]

logger = logging.getLogger(__name__)


def remember(
    forward: Forward, states: Sequence[CaseState], output: OutputPath | None, memory: PatchMemory | None
) -> RememberedPatches | None:
    """Begin to explain by remembered patches: run the unperturbed images and bind their targets."""
    inferer, image = forward.inferer, states[0].case.image
    inside = isinstance(inferer, SlidingWindowInferer) or any(
        isinstance(each, SlidingWindowInferer) for each in getattr(inferer, "__dict__", {}).values()
    )
    if memory is None or not inside:
        return None
    reason = next(filter(None, (refusal(forward, state.masks, image, output) for state in states)), None)
    if reason is None:
        try:
            return RememberedPatches(forward, states, output, memory)
        except _NotExact as error:
            reason = str(error)
            for state in states:
                state.forwards_here = 0
    _say_once(f"no patches are remembered, every mask runs whole images: {reason}")
    return None


class _NotExact(ValueError):
    """Patches of this network's output cannot be exchanged."""


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


class RememberedPatches(Scoring):
    """The cases of one call on their way through patches of the network."""

    def __init__(
        self, forward: Forward, states: Sequence[CaseState], output: OutputPath | None, limits: PatchMemory
    ) -> None:
        inferer: Any = forward.inferer
        image = states[0].case.image
        self.forward, self.states, self.output = forward, states, output
        self.tolerance = tolerance_of(forward, states[0])
        self.grid = PatchGrid(inferer, image.shape[1:])
        self.padding = {"mode": look_up_option(inferer.padding_mode, PytorchPadMode).value, "value": inferer.cval}
        self.network_device = torch.device(inferer.sw_device or image.device)
        self.device = _stitching_device(inferer, image)
        weights = inferer.roi_weight_map
        if weights is None:
            weights = compute_importance_map(
                self.grid.roi_size, inferer.mode, inferer.sigma_scale, self.network_device, image.dtype
            )
        self.weights = weights.to(self.network_device, image.dtype).reshape(self.grid.roi_size)
        self.num_patches = len(self.grid.boxes)
        self.batch_size = min(int(inferer.sw_batch_size), self.num_patches * len(states))
        self.batch = image.new_zeros(self.batch_size, len(image), *self.grid.roi_size)
        self.done = 0
        self._advance: Callable[[int], None] = lambda count: None
        # The first patches of the batches that hold the middle of each image, where its content is, are checked.
        middles = [case * self.num_patches + self.grid.middle for case in range(len(states))]
        self._checked = {middle // self.batch_size * self.batch_size for middle in middles}
        self._first = middles[0]
        self._seen: Seen | None = None
        self._compared: set[int] = set()  # cases of which a perturbed patch was checked
        # Rows of slots: a case, a row of its state (0 for the unperturbed image), and a patch.
        self.slots = np.array([(case, 0, patch) for case in range(len(states)) for patch in range(self.num_patches)])
        self.num_unperturbed = len(self.slots)
        # Whole outputs of the unperturbed images, until the masks show which are needed.
        self.whole = OutputMemory(self.device, limits)
        self.memory = OutputMemory(self.device, limits)
        self.cases = self._start()
        self.outputs = Outputs(np.zeros(0, dtype=int), self.batch_size, self._run_batch, self.memory)

    def plan(self, spans: Sequence[tuple[int, int]], batches: Sequence[Sequence[Rows]]) -> Plan:
        """Give slots to the contents of patches that the masks of a round bring."""
        self._number_slots(spans)
        todo = self._todo(batches)
        swaps = [each for case, start, stop in todo for row in range(start, stop) for each in self._swaps(case, row)]
        uses = np.bincount([slot for swap in swaps for slot in swap[1:]], minlength=len(self.slots))
        if any(state.masks.in_rounds for state in self.states):  # later rounds need unperturbed patches again
            uses[: self.num_unperturbed] += [patch in self.cases[case].trims for case, _, patch in self._unperturbed]
        for slot, output in self.whole.empty():
            if uses[slot]:
                case, _, patch = self.slots[slot].tolist()
                self.memory.put(slot, self.cases[case].trim(patch, output))
        self.outputs = Outputs(uses, self.batch_size, self._run_batch, self.memory)
        # Batches that will give some slots, if nothing is forgotten: each once.
        needed = {slot // self.batch_size for swap in swaps for slot in swap[1:] if slot not in self.memory}
        total = self.done + sum(len(self._slots_of(number)) for number in needed)
        plain = self.num_patches * (len(self.states) + sum(stop - start for _, start, stop in todo))
        note = f"at least {total} patch forwards, {self.done} of them "
        if any(start for start, _ in spans):
            note += "done"
        else:
            note += f"for unperturbed images; whole images would need {plain}, {plain / total:.1f} times as many"
        return Plan(total, self.done, self.num_patches, note)

    @property
    def _unperturbed(self) -> list[list[int]]:
        return self.slots[: self.num_unperturbed].tolist()

    def _swaps(self, case: int, row: int) -> list[Swap]:
        return self.cases[case].swaps(row)

    def score(self, batches: Sequence[Sequence[Rows]], advance: Callable[[int], None]) -> None:
        self._advance = advance
        todo = self._todo(batches)
        for index, start, stop in todo:
            scores = [self.cases[index].score(row, self.outputs.take) for row in range(start, stop)]
            self.states[index].add(start, stop, torch.stack(scores))
        if todo:
            self._look_again()

    def _todo(self, batches: Sequence[Sequence[Rows]]) -> list[Rows]:
        """The rows of masks that have no scores yet."""
        rows = [(case, max(start, 1), stop) for batch in batches for case, start, stop in batch]
        return [
            (case, start, stop) for case, start, stop in rows if start < stop and not self.states[case].has(start, stop)
        ]

    def _start(self) -> list[PatchCase]:
        """Run the unperturbed images, remember their patches, and bind the targets."""
        image = self.states[0].case.image
        shape = image.shape[1:]
        sums: list[torch.Tensor] = []
        for number in range(-(-len(self.slots) // self.batch_size)):
            outputs = self._forward(number)
            if not sums:
                channels = outputs.shape[1]
                sums = [torch.zeros(channels, *shape, dtype=image.dtype, device=self.device) for _ in self.states]
            for output, slot in zip(outputs, self._slots_of(number), strict=True):
                case, _, patch = self.slots[slot]
                sums[case][everywhere(self.grid.boxes[patch])] += output.to(self.device)
                self.whole.put(slot, output.clone())
        weights = self.weights[self.grid.crop].to(self.device)
        weight_sum = torch.zeros(shape, dtype=image.dtype, device=self.device)
        for box in self.grid.boxes:
            weight_sum[box] += weights
        if not all(bool(torch.isfinite(each).all()) for each in sums):
            # A difference of infinities says nothing.
            raise _NotExact("the network's output of the unperturbed image is not finite everywhere")
        cases = []
        for index, state in enumerate(self.states):
            output = sums.pop(0)
            volume = (output / weight_sum)[None]
            if cancels(volume):
                raise _NotExact("the network masks voxels by values so large that others are lost in their rounding")
            state.bind(volume)
            self._check_volume(state, volume)
            state.per_prediction = self.num_patches
            cases.append(PatchCase(state, output, weight_sum, volume, self.grid, index * self.num_patches))
        return cases

    def _check_volume(self, state: CaseState, volume: torch.Tensor) -> None:
        """Compare a stitched output with what an evaluator predicted."""
        here = Seen.of(volume, f"in patch batches of {self.batch_size}", state.target)
        other = predicted(state, self.output, here, state.target)
        state.forget_prediction()
        if other is not None and (both := unlike(state, here, other, self.tolerance, times=100)):
            raise RowsDepend(state.case.name, f"the unperturbed image gives {both}")

    def _check_patch(self, slot: int, output: torch.Tensor) -> None:
        """Compare the output ``(1, C, *roi_size)`` of a patch next to others with what the patch gives alone."""
        case, row, _ = self.slots[slot].tolist()
        here, alone = Seen.of(output, f"in a batch of {self.batch_size} patches"), self._alone(slot)
        if gap := difference(alone, here, self.tolerance, self._seen):
            what = "a perturbed patch" if row else "a patch of the unperturbed image"
            both = f"{here.figures()} and {alone.figures()} ({gap})"
            raise RowsDepend(self.states[case].case.name, f"{what} gives {both}")

    def _look_again(self) -> None:
        """Compare a patch of the unperturbed image with what it gave at first."""
        assert self._seen is not None
        if gap := difference(self._seen, self._alone(self._first), self.tolerance):
            what = "a patch of the unperturbed image gives something else after other patches than before them"
            refuse_changed(self.states, f"{what} ({gap})")

    def _alone(self, slot: int) -> Seen:
        """What a patch gives alone; in a batch of its copies where the network takes no batch of one patch."""
        patch = self.batch.new_zeros(1, *self.batch.shape[1:])
        self._perturb([slot], patch)
        if self.batch_size == 1 or not holds_compiled(self.forward.network):
            try:
                return Seen.of(self._run(patch), "alone")
            except Cancelled:
                raise
            except Exception:
                if self.batch_size == 1:
                    raise
                logger.debug("the network takes no batch of one patch", exc_info=True)
        copies = patch.expand(self.batch_size, *patch.shape[1:]).contiguous()
        return Seen.of(self._run(copies)[:1], f"in a batch of {self.batch_size} copies of it")

    def _run(self, patches: torch.Tensor) -> torch.Tensor:
        """The network's output of patches."""
        return self._explained(self.forward.patches(patches.to(self.network_device)), len(patches))

    def _number_slots(self, spans: Sequence[tuple[int, int]]) -> None:
        """Give a slot to each content of a patch that the masks of some rows bring."""
        # A new batch begins, so that outputs of earlier rounds can be computed again without these.
        gap = -len(self.slots) % self.batch_size
        tables = [self.slots, np.full((gap, 3), -1)]
        count = len(self.slots) + gap
        for index, (case, (start, stop)) in enumerate(zip(self.cases, spans, strict=True)):
            new = case.begin(max(start, 1), max(stop, 1), count)
            tables.append(np.insert(new, 0, index, axis=1))
            count += len(new)
        self.slots = np.concatenate(tables)

    def _slots_of(self, number: int) -> list[int]:
        slots = range(number * self.batch_size, min((number + 1) * self.batch_size, len(self.slots)))
        return [slot for slot in slots if self.slots[slot, 0] >= 0]

    def _run_batch(self, number: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Run a batch; its slots, each with what the target needs of the output."""
        outputs = self._forward(number)
        for slot, output in zip(self._slots_of(number), outputs, strict=True):
            case, _, patch = self.slots[slot].tolist()
            if patch in self.cases[case].trims:
                yield slot, self.cases[case].trim(patch, output)

    def _forward(self, number: int) -> torch.Tensor:
        """Run a batch; the weighted outputs ``(n, C, *box)`` of its slots."""
        slots = self._slots_of(number)
        with stage("perturb"):
            # Rows that are left over repeat the first one, so that a batch is the same whenever it is run.
            self._perturb(slots + slots[:1] * (self.batch_size - len(slots)), self.batch)
        with stage("forward"):
            output = self._run(self.batch)
        for slot in slots:
            self.states[self.slots[slot, 0]].forwards_here += 1
        self.done += len(slots)
        self._advance(len(slots))
        # Weighted in the output's own precision, as MONAI does it.
        weighted = (output[: len(slots)] * self.weights).to(output.dtype)[everywhere(everywhere(self.grid.crop))]
        self._check(slots, output)
        return weighted

    def _check(self, slots: Sequence[int], output: torch.Tensor) -> None:
        """Check a patch of each unperturbed image, and of each case the first perturbed one that changed most."""
        places = {slot: place for place, slot in enumerate(slots)}
        if self._seen is None and self._first in places:
            place = places[self._first]
            self._seen = Seen.of(output[place : place + 1], "before them")
        chosen = [slot for slot in slots if slot in self._checked] + self._most_hidden(slots)
        if self.batch_size > 1:
            self._checked -= set(chosen)
            # All are copied first: the next forward may overwrite them.
            for slot, copied in [(slot, output[places[slot]][None].clone()) for slot in chosen]:
                self._check_patch(slot, copied)

    def _most_hidden(self, slots: Sequence[int]) -> list[int]:
        """Of each case of which no perturbed patch was checked, the patch in a batch whose voxels changed most."""
        changes: dict[int, dict[int, float]] = {}
        for place, slot in enumerate(slots):
            case, row, patch = self.slots[slot].tolist()
            if row and case not in self._compared:
                box = everywhere(self.grid.boxes[patch])
                gap = self.batch[place][everywhere(self.grid.crop)] - self.states[case].case.image[box]
                changes.setdefault(case, {})[slot] = float(gap.abs().sum())
        self._compared |= changes.keys()
        return [max(each, key=each.__getitem__) for each in changes.values()]

    def _perturb(self, slots: Sequence[int], out: torch.Tensor) -> None:
        """Write the patches of some slots ``(n, C, *roi_size)``."""
        parts = out[everywhere(everywhere(self.grid.crop))]
        for part, (case, row, patch) in zip(parts.split(1), self.slots[list(slots)].tolist(), strict=True):
            self.states[case].perturb(row, row + 1, part, self.grid.boxes[patch])
        if any(self.grid.pad):
            out[:] = self._padded(parts)

    def _padded(self, parts: torch.Tensor) -> torch.Tensor:
        """What lies inside the image of patches ``(n, C, *box)``, padded to patches ``(n, C, *roi_size)``."""
        return F.pad(parts, self.grid.pad, **self.padding) if any(self.grid.pad) else parts

    def _explained(self, output: Any, count: int) -> torch.Tensor:
        """The part of the network's output that is explained, one tensor ``(n, C, *roi_size)``."""
        if self.output is not None:
            # Of a tuple with one entry MONAI makes a tensor, which has no parts.
            if not isinstance(output, Mapping) and (isinstance(output, torch.Tensor) or len(output) == 1):
                raise _NotExact("the network gives one output, of which the target reads a part")
            try:
                output = read(output, self.output)
            except ValueError as error:
                raise _NotExact(str(error)) from error
        if not isinstance(output, torch.Tensor):
            raise _NotExact(f"the network gives a {type(output).__name__} for a patch, not one tensor")
        if output.ndim != self.batch.ndim or (len(output), *output.shape[2:]) != (count, *self.grid.roi_size):
            given = (count, *self.batch.shape[1:])
            raise _NotExact(f"the network gives {tuple(output.shape)} for patches {given}")
        if not output.is_floating_point():
            raise _NotExact(f"the network gives {output.dtype}, which cannot be blended")
        return output


def _stitching_device(inferer: SlidingWindowInferer, image: torch.Tensor) -> torch.device:
    """Where the inferer puts its patches together."""
    device = inferer.device
    if device is None and inferer.cpu_thresh is not None and image[0].numel() > inferer.cpu_thresh:
        device = "cpu"
    return torch.device(device or image.device)
