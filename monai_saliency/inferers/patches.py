"""Remembered patches: the same scores from a fraction of the forwards, for sliding-window models.

A ``SlidingWindowInferer`` runs the network on overlapping patches and blends the outputs. The output of a patch depends
only on the voxels of the patch. So a mask changes only the patches in which it hides something, and masks that agree
inside a patch share its output. Each patch is therefore run once unperturbed, and once for each different restriction
of a mask to it; patches that the target does not read are not run for masks. A mask's output is the unperturbed output
with its patches exchanged: ``(sum + sum_p w * (new_p - old_p)) / count``, in the box that they cover.

The inferer may also stand inside a wrapper that does nothing but call it (:mod:`~monai_saliency.inferers.unwrapped`),
with further arguments that every patch gets alike, and under autocast, where each patch is rounded and blended as MONAI
rounds and blends it. Of each case one perturbed image is then run whole by the wrapper, and its scores are compared.

Positions, weights, padding and blending are MONAI's (:func:`monai.inferers.utils.sliding_window_inference`). A network
batch holds ``sw_batch_size`` patches, the number that the inferer was given as what fits the device. Which patches
share a batch depends only on the images, the masks and the target, not on what is remembered or stored: a forgotten
output is computed again in the batch that it came from. So on one device neither the memory's limits nor a stopped run
change a bit of the scores.

This helps masks that leave most patches alone or repeat themselves inside a patch: windows, and regions of a label map.
A patch batch is checked as batches of images are (:mod:`~monai_saliency.inferers.reference`): where a patch gives
something else beside other patches than alone, whole images go through one at a time. Rows that are left over in a
batch hold unperturbed patches again, never zeros: what they give is compared with what they gave first. Where the last
batch is full, one such patch goes through alone at the end. So a network that changes while it is explained is seen.

RISE changes every patch with every mask. There whole images are run, as they are wherever exactness cannot be known
beforehand; the log says why, once.

:mod:`~monai_saliency.inferers.patch_plan` finds what masks change, :mod:`~monai_saliency.inferers.patch_case` exchanges
patches, and :mod:`~monai_saliency.inferers.patch_memory` holds outputs.
"""

from __future__ import annotations

import functools
import itertools
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
from monai_saliency.inferers.expected import check_unchanged, faded
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.patch_case import PatchCase, cancels
from monai_saliency.inferers.patch_check import PatchCheck, WrapperCheck
from monai_saliency.inferers.patch_memory import OutputMemory, Outputs, PatchMemory, Row, owned
from monai_saliency.inferers.patch_plan import refusal
from monai_saliency.inferers.price import Batches, Price
from monai_saliency.inferers.unwrapped import inside_of, sliding_call, trials
from monai_saliency.inferers.whole_images import Plan, Rows, Scoring
from monai_saliency.networks.comparison import excerpt
from monai_saliency.networks.outputs import OutputPath, read
from monai_saliency.utils.boxes import everywhere
from monai_saliency.utils.monai_private import tensor_version
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.profiling import stage
from monai_saliency.utils.tensors import new_buffer

__all__ = ["RememberedPatches", "remember"]

logger = logging.getLogger(__name__)


def remember(
    forward: Forward, states: Sequence[CaseState], output: OutputPath | None, memory: PatchMemory | None
) -> RememberedPatches | None:
    """Begin to explain by remembered patches: run the unperturbed images and bind their targets.

    Args:
        forward: calls the network.
        states: the cases, all of one shape.
        output: the part of the network's output that is explained.
        memory: limits of what is remembered; None to run whole images.

    Returns:
        None where whole images are to be run; the log says why, once.
    """
    if memory is None or inside_of(forward.inferer) is None:
        return None
    image = states[0].case.image
    call = sliding_call(forward.inferer, forward.args, forward.kwargs, trials(states[0]))
    if isinstance(call, str):
        reason: str | None = call
    else:
        cuts, whole = call.inferer, forward
        forward = forward.of(cuts, call.args, call.kwargs)
        reason = next(filter(None, (refusal(forward, state.masks, image, output) for state in states)), None)
    if reason is None:
        try:
            wrapper = WrapperCheck(None if cuts is whole.inferer else whole, states, output)
            return RememberedPatches(forward, cuts, states, output, memory, wrapper)
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
    """The cases of one call on their way through patches of the network.

    Every output has a *slot*: first come the patches of the unperturbed images, then, round by round, case by case and
    mask by mask, those whose content no earlier mask of the case and round has. ``sw_batch_size`` slots at a time are a
    network batch.

    Args:
        forward: calls the network.
        inferer: cuts the patches.
        states: the cases.
        output: the part of the network's output that is explained.
        limits: of what is remembered.
        wrapper: compares a perturbed image with what an inferer around ``inferer`` gives.
    """

    def __init__(
        self,
        forward: Forward,
        inferer: SlidingWindowInferer,
        states: Sequence[CaseState],
        output: OutputPath | None,
        limits: PatchMemory,
        wrapper: WrapperCheck,
    ) -> None:
        self.wrapper = wrapper
        image = states[0].case.image
        self.forward = forward
        self.states = states
        self.output = output
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
        self.batch = new_buffer(image, self.batch_size, len(image), *self.grid.roi_size)
        self.done = 0
        self._is_seen = True
        self._doubted: set[int] = set()
        self._advance: Callable[..., Any] = lambda count: None
        self.reference = PatchCheck(forward, states, output, self.batch_size)
        # Unperturbed patches of the first case, for rows that are left over and for a last look: one that holds
        # something, rather than background, and one of the first batch.
        middle = self.grid.middle
        self.fillers = (middle, min(range(min(self.batch_size, self.num_patches)), key=lambda it: abs(it - middle)))
        self.reference.look_twice(self.fillers)
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
        for index, (_, stop) in enumerate(spans):
            self._doubt(index, stop)
        todo = self._todo(batches)
        pairs = [pair for case, start, stop in todo for row in range(start, stop) for pair in self._pairs(case, row)]
        uses = np.bincount([slot for pair in pairs for slot in pair], minlength=len(self.slots))
        if any(state.masks.in_rounds for state in self.states):
            uses[: self.num_unperturbed] += self._are_read()  # later rounds need them again
        for slot, output in self.whole.empty():
            if uses[slot]:
                self.memory.put(slot, self._trim(slot, output))
        self.outputs = Outputs(uses, self.batch_size, self._run_batch, self.memory)
        # Batches that will give some slots, if nothing is forgotten: each once.
        needed = {slot // self.batch_size for pair in pairs for slot in pair if slot not in self.memory}
        wholes = self.wrapper.left({case for case, _, _ in todo})
        total = self.done + sum(len(self._slots_of(number)) for number in needed) + wholes * self.num_patches
        plain = self.num_patches * (len(self.states) + sum(stop - start for _, start, stop in todo))
        note = f"at least {total} patch forwards, {self.done} of them "
        if any(start for start, _ in spans):
            note += f"done{self.wrapper.words(wholes)}"
        else:
            note += f"for unperturbed images{self.wrapper.words(wholes)}; whole images would need {plain}, "
            note += f"{plain / total:.1f} times as many"
        count = len(needed) + wholes * -(-self.num_patches // self.batch_size)
        price = Price(total, self.num_patches, Batches(count, self.batch.shape, "patches"))
        return Plan(total, self.done, price, note)

    def _are_read(self) -> np.ndarray:
        """Bool, for each patch of the unperturbed images: whether the target reads any of its output."""
        return np.array([patch in self.cases[case].trims for case, _, patch in self.slots[: self.num_unperturbed]])

    def score(self, batches: Sequence[Sequence[Rows]], advance: Callable[..., Any]) -> None:
        self._advance = advance
        self._is_seen = True
        todo = self._todo(batches)
        for index, start, stop in todo:
            self.states[index].add(start, stop, self.cases[index].scores(start, stop, self.outputs.take))
            if self.wrapper.wants(index):
                self._compare_whole(index, self.states[index].most_changed(stop))
        for index, start, _ in todo:
            if self.wrapper.wants(index):  # no row has changed a score
                self._compare_whole(index, start)
        if not self._is_seen:  # no row was left over in the last batch
            self.reference.check_again(self.fillers[1], None, self._alone)

    def _compare_whole(self, index: int, row: int | None) -> None:
        """Compare a row with its whole image by the wrapper."""
        if row is not None:
            self.wrapper.compare(index, row)
            for first in range(0, self.num_patches, self.batch_size):
                self._advance(min(self.batch_size, self.num_patches - first))

    def _todo(self, batches: Sequence[Sequence[Rows]]) -> list[Rows]:
        """The rows of masks that have no scores yet."""
        rows = [(case, max(start, 1), stop) for batch in batches for case, start, stop in batch]
        return [
            (case, start, stop) for case, start, stop in rows if start < stop and not self.states[case].has(start, stop)
        ]

    def _doubt(self, index: int, stop: int) -> None:
        """Where scores on disk are in doubt, score the mask again that changed the scores most, and compare it."""
        state = self.states[index]
        row = state.most_changed(stop) if state.is_doubtful and index not in self._doubted else None
        if row is None:
            return
        self._doubted.add(index)
        state.doubt(row, row + 1, self.cases[index].score(row, self._output)[None])

    def _output(self, slot: int) -> Any:
        """What the target needs of a slot's output, before it is known how often each will be taken."""
        if (whole := self.whole.get(slot)) is not None:
            return self._trim(slot, whole)
        if slot not in self.memory:
            for other, output in self._run_batch(slot // self.batch_size):
                self.memory.put(other, output)
                if other == slot:
                    found = output
            return found
        return self.memory.get(slot)

    def _start(self) -> list[PatchCase]:
        """Run the unperturbed images, remember their patches, and bind the targets."""
        image = self.states[0].case.image
        shape = image.shape[1:]
        sums: list[torch.Tensor] = []
        middle = self.fillers[0]
        self.reference.watch(
            [case * self.num_patches + middle for case in range(len(self.states))], self.num_unperturbed
        )
        for number in range(-(-len(self.slots) // self.batch_size)):
            outputs = owned(self._forward(number))
            if not sums:
                channels = outputs.shape[1]
                sums = [torch.zeros(channels, *shape, dtype=image.dtype, device=self.device) for _ in self.states]
            for place, slot in enumerate(self._slots_of(number)):
                case, _, patch = self.slots[slot]
                sums[case][everywhere(self.grid.boxes[patch])] += outputs[place].to(self.device)
                self.whole.put(slot, Row(outputs, place))
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
            self.reference.check(index, volume, self._alone)
            state.bind(volume)
            state.per_prediction = self.num_patches
            cases.append(PatchCase(state, output, weight_sum, volume, self.grid, index * self.num_patches))
        # Scores that are on disk were checked when they were made.
        new = next((index for index, state in enumerate(self.states) if not state.complete), None)
        if new is not None:
            self.reference.check_faded(new, self._faded(new, middle), self._run)
        return cases

    def _faded(self, case: int, patch: int) -> torch.Tensor:
        """A patch of an unperturbed image faded more and more, ``(batch_size, C, *roi_size)``."""
        state, box = self.states[case], everywhere(self.grid.boxes[patch])
        images = faded(state.case.image[box], state.fill[box], self.batch_size)
        return torch.cat([self._padded(part[None]) for part in images])

    def _run(self, patches: torch.Tensor) -> torch.Tensor:
        """The network's output of patches."""
        return self._check(self.forward.patches(patches.contiguous().to(self.network_device)), len(patches))

    def _alone(self, slot: int, count: int) -> torch.Tensor:
        """The network's output of one patch alone, or of a batch of its copies."""
        self._perturb([slot], self.batch[:1])
        return self._run(self.batch[:1].clone().expand(count, *self.batch.shape[1:]))[:1]

    def _number_slots(self, spans: Sequence[tuple[int, int]]) -> None:
        """Give a slot to each content of a patch that the masks of some rows bring."""
        # A new batch begins, so that outputs of earlier rounds can be computed again without these.
        gap = -len(self.slots) % self.batch_size
        tables = [self.slots, np.full((gap, 3), -1)]
        count = len(self.slots) + gap
        for index, (case, (start, stop)) in enumerate(zip(self.cases, spans, strict=True)):
            new = case.begin(max(start, 1), max(stop, 1))
            case.number(new, count)
            tables.append(np.insert(new, 0, index, axis=1))
            count += len(new)
        self.slots = np.concatenate(tables)

    def _pairs(self, case: int, row: int) -> list[tuple[int, int]]:
        """The slots that a row's mask needs: of unperturbed patches, and of the same ones perturbed."""
        return [(swap.old, swap.new) for swap in self.cases[case].exchanges(row)]

    def _slots_of(self, number: int) -> list[int]:
        slots = range(number * self.batch_size, min((number + 1) * self.batch_size, len(self.slots)))
        return [slot for slot in slots if self.slots[slot, 0] >= 0]

    def _run_batch(self, number: int) -> Iterator[tuple[int, Row]]:
        """Run a batch; its slots, each with what the target needs of the output."""
        slots = self._slots_of(number)
        outputs = self._forward(number)
        cases, patches = self.slots[slots][:, [0, 2]].T.tolist()
        for case in dict.fromkeys(cases):
            read = [place for place in range(len(slots)) if cases[place] == case]
            read = [place for place in read if patches[place] in self.cases[case].trims]
            if read:  # side by side, but where a patch is run again that the target does not read
                here = outputs[read[0] : read[-1] + 1] if len(read) == read[-1] + 1 - read[0] else outputs[read]
                block = self.cases[case].trim([patches[place] for place in read], here)
                yield from ((slots[place], Row(block, row)) for row, place in enumerate(read))

    def _trim(self, slot: int, row: Row) -> Row:
        """What the target needs of an output."""
        case, _, patch = self.slots[slot].tolist()
        whole = self.cases[case].needs_all(row.block)
        return row if whole else Row(self.cases[case].trim([patch], row.values[None]), 0)

    def _forward(self, number: int) -> torch.Tensor:
        """Run a batch; the weighted outputs ``(n, C, *box)`` of its slots."""
        slots = self._slots_of(number)
        with stage("perturb"):
            # Rows that are left over show unperturbed patches again, the same ones whenever the batch is run.
            places = range(len(slots), self.batch_size)
            left = list(zip(places, itertools.chain(self.fillers, itertools.repeat(self.fillers[0])), strict=False))
            self._perturb([*slots, *(slot for _, slot in left)], self.batch)
        self._is_seen = bool(left)
        version = tensor_version(self.batch)
        with stage("forward"):
            output: Any = self.forward.patches(self.batch.to(self.network_device))
        if self.batch_size == 1:  # where MONAI gives the network a part of the image itself, not a copy
            check_unchanged(self.states[self.slots[slots[0], 0]], self.batch, version, shared=True)
        output = self._check(output, self.batch_size)
        for place, slot in enumerate(slots):
            self.reference.see(slot, output[place : place + 1])
        again = [(slot, excerpt(output[place : place + 1])) for place, slot in left[: len(self.fillers)]]
        chosen = [(slots[place], excerpt(output[place : place + 1])) for place in self._most_hidden(slots)]
        for slot in slots:
            self.states[self.slots[slot, 0]].forwards_here += 1
        self.done += len(slots)
        self._advance(len(slots))
        # Weighted in the output's own precision, as MONAI does it.
        weighted = (output[: len(slots)] * self.weights).to(output.dtype)[everywhere(everywhere(self.grid.crop))]
        for slot, beside in chosen:
            self.reference.check_perturbed(int(self.slots[slot, 0]), slot, beside, self._alone)
        for slot, beside in again:
            self.reference.check_again(slot, beside, self._alone)
        return weighted

    def _most_hidden(self, slots: Sequence[int]) -> list[int]:
        """The places in a batch of the perturbed patches to compare: of each case of which none was compared yet, the
        patch whose voxels changed most.
        """
        changes: dict[int, dict[int, float]] = {}
        for place, slot in enumerate(slots):
            case, row, patch = self.slots[slot].tolist()
            if row and self.reference.wants_perturbed(case):
                box = everywhere(self.grid.boxes[patch])
                gap = self.batch[place][everywhere(self.grid.crop)] - self.states[case].case.image[box]
                changes.setdefault(case, {})[place] = float(gap.abs().sum())
        return [max(each, key=each.__getitem__) for each in changes.values() if any(each.values())]

    def _perturb(self, slots: Sequence[int], out: torch.Tensor) -> None:
        """Write the patches of some slots ``(n, C, *roi_size)``."""
        parts = out[everywhere(everywhere(self.grid.crop))]
        cases, rows, patches = self.slots[list(slots)].T.tolist()
        for case, row, patch, part in zip(cases, rows, patches, parts, strict=True):
            self.states[case].perturb(row, row + 1, part[None], self.grid.boxes[patch])
        if any(self.grid.pad):
            out[:] = self._padded(parts)

    def _padded(self, parts: torch.Tensor) -> torch.Tensor:
        """What lies inside the image of patches ``(n, C, *box)``, padded to patches ``(n, C, *roi_size)``."""
        return F.pad(parts, self.grid.pad, **self.padding) if any(self.grid.pad) else parts

    def _check(self, output: Any, count: int) -> torch.Tensor:
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
