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

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.data.utils import compute_importance_map
from monai.inferers import SliceInferer, SlidingWindowInferer, SlidingWindowInfererAdapt
from monai.utils import PytorchPadMode, look_up_option

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.inferers.patch_case import PatchCase, cancels
from monai_saliency.inferers.patch_memory import OutputMemory, PatchMemory
from monai_saliency.inferers.rounds import Plan, Rows, Scoring
from monai_saliency.inferers.row_check import (
    RowsDepend,
    Seen,
    difference,
    predicted,
    refuse_changed,
    run_alone,
    say_once,
    tolerance_of,
    unlike,
)
from monai_saliency.masks.base import BoundMasks
from monai_saliency.networks.inputs import TensorInput
from monai_saliency.networks.outputs import read
from monai_saliency.utils.boxes import everywhere
from monai_saliency.utils.monai_private import tree_leaves
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.timing import stage

__all__ = ["RememberedPatches", "remember"]

_EXACT = (SlidingWindowInferer, SlidingWindowInfererAdapt, SliceInferer, NNUNetInferer)
_EXACT_CALLS = tuple(kind.__call__ for kind in _EXACT)


def remember(forward: Forward, states: Sequence[CaseState], limits: PatchMemory) -> RememberedPatches | None:
    """Begin to explain by remembered patches: run the unperturbed images and bind their targets."""
    try:
        for state in states:
            _check_exact(forward, state.masks, state.case.image)
        return RememberedPatches(forward, states, limits)
    except _NotExact as error:
        say_once(forward.network, "no patches are remembered, every mask runs whole images", str(error))
    for state in states:
        state.forwards_here = 0
    return None


class _NotExact(ValueError):
    """Remembered patches might not give the scores of whole images."""


def _check_exact(forward: Forward, masks: BoundMasks, image: torch.Tensor) -> None:
    inferer, kind = forward.inferer, type(forward.inferer)
    if not isinstance(inferer, SlidingWindowInferer):
        raise _NotExact(f"{kind.__name__} is not a SlidingWindowInferer (if it only calls one, give that one)")
    _check_inferer(inferer, image)
    _check_call(forward, inferer.sw_batch_size)
    if image.dtype not in (torch.float32, torch.float64):
        raise _NotExact(f"images of {image.dtype} are blended too coarsely")
    try:
        grid = PatchGrid(inferer, image.shape[1:])
    except ValueError as error:
        raise _NotExact(str(error)) from error
    weights = inferer.roi_weight_map
    if weights is not None and weights.shape not in (grid.roi_size, (1, 1, *grid.roi_size)):
        raise _NotExact(f"`roi_weight_map` has shape {tuple(weights.shape)}, patches have {grid.roi_size}")
    if masks.restrict(masks.first_round()[:1], grid.boxes[0]) is None:
        raise _NotExact(
            f"{masks.key[0].removeprefix('_Bound')} do not tell what they hide inside a patch (masks such as RISE's "
            "change every patch); windows and regions do"
        )


def _check_inferer(inferer: SlidingWindowInferer, image: torch.Tensor) -> None:
    kind = type(inferer)
    if kind.__call__ not in _EXACT_CALLS or (
        isinstance(inferer, SliceInferer) and kind.network_wrapper is not SliceInferer.network_wrapper
    ):
        raise _NotExact(f"{kind.__name__} runs the network in a way of its own")
    adapts = isinstance(inferer, SlidingWindowInfererAdapt) and image.is_cuda and inferer.cpu_thresh is not None
    if inferer.buffer_steps or (adapts and math.prod(image.shape[1:]) > inferer.cpu_thresh):
        raise _NotExact("the inferer stitches through buffers (`buffer_steps`)")
    if inferer.with_coord:
        raise _NotExact("the network reads where a patch lies (`with_coord`)")


def _check_call(forward: Forward, sw_batch_size: int) -> None:
    if type(forward.inputs) is not TensorInput:
        raise _NotExact(f"the network takes several inputs ({type(forward.inputs).__name__})")
    if callable(forward.output) or isinstance(forward.output, (list, tuple)):
        raise _NotExact(f"the target reads {forward.output} of the network's output")
    if known := {"device", "buffer_steps", "buffer_dim", "condition"} & set(forward.kwargs):
        raise _NotExact(f"the inferer is called with {sorted(known)}")
    rows = [leaf.shape[0] for leaf in tree_leaves((forward.args, forward.kwargs)) if getattr(leaf, "ndim", 0)]
    # One row, or more rows than a batch has patches, cannot be one for each patch.
    if any(1 < count <= sw_batch_size for count in rows):
        raise _NotExact("an argument of the network is an array, which may hold something for each patch of a batch")


class RememberedPatches(Scoring):
    """The cases of one call on their way through patches of the network."""

    def __init__(self, forward: Forward, states: Sequence[CaseState], limits: PatchMemory) -> None:
        inferer: Any = forward.inferer
        image = states[0].case.image
        self.forward, self.states = forward, states
        self.tolerance = tolerance_of(forward, image)
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
        self._seen: Seen | None = None  # what a patch of the first image gave at first
        self._checked: set[tuple[int, bool]] = set()  # cases of which an unperturbed or a perturbed patch was checked
        # Rows of slots: a case, a row of its state (0 for the unperturbed image), and a patch.
        self.slots = np.array([(case, 0, patch) for case in range(len(states)) for patch in range(self.num_patches)])
        self.num_unperturbed = len(self.slots)
        self.uses = np.zeros(self.num_unperturbed, dtype=int)  # how often masks still need the output of a slot
        self.memory = OutputMemory(self.device, limits)
        self.cases = self._start(OutputMemory(self.device, limits))

    def plan(self, spans: Sequence[tuple[int, int]], batches: Sequence[Sequence[Rows]]) -> Plan:
        """Give slots to the contents of patches that the masks of a round bring."""
        self._number_slots(spans)
        swaps = [
            swap
            for case, start, stop in self._todo(batches)
            for row in range(start, stop)
            for swap in self.cases[case].swaps(row)
        ]
        self.uses = np.bincount([slot for swap in swaps for slot in swap[1:]], minlength=len(self.slots))
        if any(state.masks.in_rounds for state in self.states):  # later rounds need unperturbed patches again
            self.uses[: self.num_unperturbed] += 1
        for slot in self.memory:
            if not self.uses[slot]:
                self.memory.pop(slot)
        # Batches that will give some slots, if nothing is forgotten: each once.
        needed = {slot // self.batch_size for swap in swaps for slot in swap[1:] if slot not in self.memory}
        total = self.done + sum(len(self._slots_of(number)) for number in needed)
        return Plan(total, self.done, self.num_patches, f"at least {{}} patch forwards, {self.done} of them done")

    def score(self, batches: Sequence[Sequence[Rows]], advance: Callable[[int], None]) -> None:
        self._advance = advance
        todo = self._todo(batches)
        for index, start, stop in todo:
            scores = [self.cases[index].score(row, self._take) for row in range(start, stop)]
            self.states[index].add(start, stop, torch.stack(scores))
        if todo and self._seen is not None:
            now = self._alone(self.grid.middle // self.batch_size * self.batch_size)
            if gap := difference(self._seen, now, self.tolerance):
                what = "a patch of the unperturbed image gives something else after other patches than before them"
                refuse_changed(self.states, f"{what} ({gap})")

    def _take(self, slot: int) -> torch.Tensor:
        """The output of a slot, computed with the rest of its batch if it is not remembered."""
        output = self.memory.get(slot)
        self.uses[slot] -= 1
        if output is None:
            for other, computed in self._run_batch(slot // self.batch_size):
                if other == slot:
                    output = computed
                if self.uses[other] and other not in self.memory:
                    self.memory.put(other, computed)
        elif not self.uses[slot]:
            self.memory.pop(slot)
        assert output is not None
        return output

    def _todo(self, batches: Sequence[Sequence[Rows]]) -> list[Rows]:
        """The rows of masks that have no scores yet."""
        rows = [(case, max(start, 1), stop) for batch in batches for case, start, stop in batch]
        return [
            (case, start, stop) for case, start, stop in rows if start < stop and not self.states[case].has(start, stop)
        ]

    def _start(self, whole: OutputMemory) -> list[PatchCase]:
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
                whole.put(slot, output.clone())
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
        for slot in whole:
            case, patch = divmod(slot, self.num_patches)
            output = whole.pop(slot)
            if patch in cases[case].trims:
                self.memory.put(slot, cases[case].trim(patch, output))
        return cases

    def _check_volume(self, state: CaseState, volume: torch.Tensor) -> None:
        """Compare a stitched output with what an evaluator predicted."""
        here = Seen.of(volume, f"in patch batches of {self.batch_size}", state.target)
        other = predicted(state, self.forward.output, here, state.target)
        state.forget_prediction()
        if other is not None and (both := unlike(state, here, other, self.tolerance, times=100)):
            raise RowsDepend(state.case.name, f"the unperturbed image gives {both}")

    def _check(self, slots: Sequence[int], output: torch.Tensor) -> None:
        """Compare two patches of each case with the same alone: the first in the batch that holds the unperturbed
        middle, where the image's content is, and the one that changed most in the case's first perturbed batch.
        """
        found: dict[tuple[int, bool], tuple[float, int]] = {}
        for place, slot in enumerate(slots):
            case, row, patch = self.slots[slot].tolist()
            key = case, row > 0
            if key not in self._checked and (row or patch == self.grid.middle):
                unperturbed = self.states[case].case.image[everywhere(self.grid.boxes[patch])]
                gap = self.batch[place][everywhere(self.grid.crop)] - unperturbed
                found[key] = max(found.get(key, (-1.0, 0)), (float(gap.abs().sum()), place if row else 0))
        self._checked |= found.keys()
        # All are copied first: the next forward may overwrite them.
        words = f"in a batch of {self.batch_size} patches"
        seen = {place: Seen.of(output[place : place + 1], words) for _, place in found.values()}
        if (0, False) in found:
            self._seen = seen[found[0, False][1]]
        for place, here in seen.items() if self.batch_size > 1 else ():
            case, row, _ = self.slots[slots[place]].tolist()
            alone = self._alone(slots[place])
            if gap := difference(alone, here, self.tolerance, self._seen):
                what = "a perturbed patch" if row else "a patch of the unperturbed image"
                both = f"{here.figures()} and {alone.figures()} ({gap})"
                raise RowsDepend(self.states[case].case.name, f"{what} gives {both}")

    def _alone(self, slot: int) -> Seen:
        """What a patch gives alone."""
        patch = self.batch.new_zeros(1, *self.batch.shape[1:])
        self._perturb([slot], patch)
        return Seen.of(*run_alone(self.forward.network, patch, self.batch_size, self._run))

    def _run(self, patches: torch.Tensor) -> torch.Tensor:
        """The part of the network's output of patches that is explained, one tensor ``(n, C, *roi_size)``."""
        output = self.forward.patches(patches.to(self.network_device))
        try:
            output = read(output, self.forward.output)
        except ValueError as error:
            raise _NotExact(str(error)) from error
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            raise _NotExact(f"the network gives a {type(output).__name__} for a patch, not one tensor of numbers")
        if output.ndim != patches.ndim or (len(output), *output.shape[2:]) != (len(patches), *self.grid.roi_size):
            raise _NotExact(f"the network gives {tuple(output.shape)} for patches {tuple(patches.shape)}")
        return output

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
        # Weighted in the output's own precision, as MONAI does it; before the next forward may overwrite it.
        weighted = (output[: len(slots)] * self.weights).to(output.dtype)[everywhere(everywhere(self.grid.crop))]
        self._check(slots, output)
        return weighted

    def _perturb(self, slots: Sequence[int], out: torch.Tensor) -> None:
        """Write the patches of some slots ``(n, C, *roi_size)``."""
        parts = out[everywhere(everywhere(self.grid.crop))]
        for part, (case, row, patch) in zip(parts.split(1), self.slots[list(slots)].tolist(), strict=True):
            self.states[case].perturb(row, row + 1, part, self.grid.boxes[patch])
        if any(self.grid.pad):
            out[:] = F.pad(parts, self.grid.pad, **self.padding)


def _stitching_device(inferer: SlidingWindowInferer, image: torch.Tensor) -> torch.device:
    """Where the inferer puts its patches together."""
    device = inferer.device
    if device is None and inferer.cpu_thresh is not None and image[0].numel() > inferer.cpu_thresh:
        device = "cpu"
    return torch.device(device or image.device)
