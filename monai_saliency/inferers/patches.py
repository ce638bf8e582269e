"""Remembered patches: the same scores from a fraction of the forwards, for sliding-window models.

The output of a patch depends only on the voxels of the patch. So a mask changes only the patches where it hides
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
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.data.utils import compute_importance_map
from monai.inferers import SliceInferer, SlidingWindowInferer, SlidingWindowInfererAdapt

from monai_saliency.inferers.case_patches import CasePatches, cancels
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.inferers.patch_memory import OutputMemory, PatchMemory
from monai_saliency.inferers.perturbation import Whole
from monai_saliency.inferers.preflight import check_predicted, patches_depend, say_once
from monai_saliency.inferers.runner import Asks, Run, Scorer
from monai_saliency.inferers.walk import Walk
from monai_saliency.masks.base import BoundMasks, Id
from monai_saliency.networks.inputs import TensorInput
from monai_saliency.networks.outputs import placed, read
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.tensors import everywhere
from monai_saliency.utils.timing import stage

_EXACT = (SlidingWindowInferer, SlidingWindowInfererAdapt, SliceInferer, NNUNetInferer)
_EXACT_CALLS = tuple(kind.__call__ for kind in _EXACT)


def remember(forward: Forward, walks: Sequence[Walk], limits: PatchMemory) -> RememberedPatches | None:
    """Begin to explain by remembered patches: run the unperturbed images and bind their targets."""
    try:
        for walk in walks:
            if walk.images.fill_of is not None:
                raise _NotExact("the fill depends on the whole mask (InpaintFill does)")
            if reason := next(_problems(forward, walk.masks, walk.case.image), None):
                raise _NotExact(reason)
        return RememberedPatches(forward, walks, limits)
    except _NotExact as error:
        say_once(forward.network, "no patches are remembered, every mask runs whole images", str(error))
    for walk in walks:
        walk.scores.forwards = 0
    return None


class _NotExact(ValueError):
    """Remembered patches might not give the scores of whole images."""


def _problems(forward: Forward, masks: BoundMasks, image: torch.Tensor) -> Iterator[str]:
    """Why remembered patches might not give the scores of whole images, as far as is known before anything is run."""
    inferer: Any = forward.inferer
    kind = type(inferer)
    if kind.__call__ not in _EXACT_CALLS:
        yield f"{kind.__name__} runs the network in a way of its own (if it calls a SlidingWindowInferer, give that)"
        return
    adapts = isinstance(inferer, SlidingWindowInfererAdapt) and image.is_cuda and inferer.cpu_thresh is not None
    if inferer.buffer_steps or (adapts and math.prod(image.shape[1:]) > inferer.cpu_thresh):
        yield "the inferer stitches through buffers (`buffer_steps`)"
    if inferer.with_coord:
        yield "the network reads where a patch lies (`with_coord`)"
    if type(forward.inputs) is not TensorInput:
        yield f"the network takes several inputs ({type(forward.inputs).__name__})"
    if callable(forward.output):
        yield "the target reads a function of the network's output"
    if known := {"device", "buffer_steps", "buffer_dim", "condition"} & set(forward.kwargs):
        yield f"the inferer is called with {sorted(known)}"
    if image.dtype not in (torch.float32, torch.float64):
        yield f"images of {image.dtype} are blended too coarsely"
    if masks.restrict(masks.first_round()[:1], PatchGrid(inferer, image.shape[1:]).boxes[0]) is None:
        yield (
            f"{masks.key[0].removeprefix('_Bound')} do not tell what they hide inside a patch (masks such as RISE's "
            "change every patch); windows and regions do"
        )


class RememberedPatches(Scorer):
    """Scores the rows of some cases by patches: the cases of one call on their way through patches of the network."""

    def __init__(self, forward: Forward, walks: Sequence[Walk], limits: PatchMemory) -> None:
        inferer: Any = forward.inferer
        image = walks[0].case.image
        path = walks[0].unbound_target.path
        if path is not None:  # all that is read, of a prediction too
            outside = forward.output
            forward = replace(forward, output=lambda output: placed(read(read(output, outside), path), path))
        self.forward, self.walks, self.path = forward, walks, path
        self.grid = PatchGrid(inferer, image.shape[1:])
        self.padding = {"mode": str(inferer.padding_mode), "value": inferer.cval}
        self.network_device = torch.device(inferer.sw_device or image.device)
        self.device = _stitching_device(inferer, image)
        weights = inferer.roi_weight_map
        if weights is None:
            weights = compute_importance_map(
                self.grid.roi_size, inferer.mode, inferer.sigma_scale, self.network_device, image.dtype
            )
        self.weights = weights.to(self.network_device, image.dtype).reshape(self.grid.roi_size)
        self.weight_sum = torch.zeros(image.shape[1:], dtype=image.dtype, device=self.device)
        for box in self.grid.boxes:
            self.weight_sum[box] += self.weights[self.grid.crop].to(self.device)
        self.num_patches = self.per_prediction = len(self.grid.boxes)
        self.batch_size = min(int(inferer.sw_batch_size), self.num_patches * len(walks))
        self.batch = image.new_zeros(self.batch_size, len(image), *self.grid.roi_size)
        # What each case has asked for so far; the unperturbed image comes first.
        self.names: list[list[Id]] = [[Whole.IMAGE, Whole.HIDDEN] for _ in walks]
        if problem := patches_depend(forward, walks[0].case.name, self._patch_with_most(), self._run, self.batch_size):
            raise _NotExact(problem)
        self._advance: Callable[[int], None] = lambda count: None
        # Rows of slots: a case, the place of an image in its names, and a patch.
        self.slots = np.array([(case, 0, patch) for case in range(len(walks)) for patch in range(self.num_patches)])
        self.num_unperturbed = self.done = len(self.slots)
        self.uses = np.zeros(self.num_unperturbed, dtype=int)  # how often masks still need the output of a slot
        self.memory = OutputMemory(self.device, limits)
        self.cases = self._start(OutputMemory(self.device, limits))

    def plan(self, asks: Asks, batches: Sequence[Sequence[Run]]) -> int:
        """Give slots to the contents of patches that the masks of a round bring."""
        self._number_slots(asks)
        swaps = [swap for run in self._todo(batches) for mask in run.ids for swap in self.cases[run.case].swaps(mask)]
        self.uses = np.bincount([slot for swap in swaps for slot in swap[1:]], minlength=len(self.slots))
        if any(walk.masks.adaptive for walk in self.walks):  # later rounds need unperturbed patches again
            self.uses[: self.num_unperturbed] += 1
        for slot in self.memory:
            if not self.uses[slot]:
                self.memory.pop(slot)
        # Batches that will give some slots, if nothing is forgotten: each once.
        needed = {slot // self.batch_size for swap in swaps for slot in swap[1:] if slot not in self.memory}
        return sum(len(self._slots_of(number)) for number in needed)

    def score(self, batches: Sequence[Sequence[Run]], advance: Callable[[int], None]) -> None:
        """Score the masks of a round that have no scores yet."""
        self._advance = advance
        for run in self._todo(batches):
            scores = [self.cases[run.case].score(mask, self._take) for mask in run.ids]
            self.walks[run.case].scores.add(run.ids, torch.stack(scores))

    def _patch_with_most(self) -> torch.Tensor:
        """The patch of the first image with the largest values, unperturbed and with everything hidden."""
        image = self.walks[0].case.image
        contents = torch.stack([image[everywhere(box)].abs().sum() for box in self.grid.boxes])
        patch = int(contents.nan_to_num(0, 0, 0).argmax())
        both = self.batch.new_zeros(2, *self.batch.shape[1:])
        self._perturb([(0, 0, patch), (0, 1, patch)], both)
        return both

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

    def _todo(self, batches: Sequence[Sequence[Run]]) -> list[Run]:
        """The runs with masks that have no scores yet."""
        return [run for batch in batches for run in batch if self.walks[run.case].scores.missing(run.ids)]

    def _start(self, whole: OutputMemory) -> list[CasePatches]:
        """Run the unperturbed images, remember their patches, and bind the targets."""
        cases = []
        for index, sums in enumerate(self._sums(whole)):
            walk, volume = self.walks[index], (sums / self.weight_sum)[None]
            if not bool(torch.isfinite(volume).all()):  # a difference of infinities is NaN
                raise _NotExact("the network's output of the unperturbed image is not finite everywhere")
            if cancels(volume):
                raise _NotExact("the network masks voxels by values so large that others are lost in their rounding")
            walk.bind(placed(volume, self.path))
            check_predicted(self.forward, walk, placed(volume, self.path))
            walk.scores.per_prediction = self.num_patches
            walk.scores.forwards += self.num_patches
            cases.append(CasePatches(walk, sums, self.weight_sum, volume, self.grid, index * self.num_patches))
            self._hide_everything(index, list(cases[index].trims), volume)
        for slot in whole:
            case, patch = divmod(slot, self.num_patches)
            output = whole.pop(slot)
            if patch in cases[case].trims:
                self.memory.put(slot, cases[case].trim(patch, output))
        return cases

    def _hide_everything(self, index: int, patches: Sequence[int], volume: torch.Tensor) -> None:
        """Score a case with everything hidden, by the patches that the target reads: by one where all are alike."""
        walk = self.walks[index]
        # One number for all voxels of a channel, which is expanded: its values are not read, nor waited for.
        steps = zip(walk.images.fill.shape[1:], walk.images.fill.stride()[1:], strict=True)
        alike = not any(stride for size, stride in steps if size > 1)
        run, sums = patches[:1] if alike else patches, torch.zeros_like(volume[0])
        parts = [run[first : first + self.batch_size] for first in range(0, len(run), self.batch_size)]
        outputs = chain.from_iterable(self._forward([(index, 1, patch) for patch in part]) for part in parts)
        for patch, output in zip(patches, repeat(next(outputs)) if alike and run else outputs, strict=False):
            sums[everywhere(self.grid.boxes[patch])] += output.to(self.device)
        hidden = placed((sums / self.weight_sum)[None], self.path)
        walk.scores.hidden = walk.target(hidden)[0].clone()

    def _sums(self, keep: OutputMemory) -> Iterator[torch.Tensor]:
        """The weighted sums ``(C, *spatial)`` of all patches of each unperturbed image; their outputs are kept."""
        entries = self.slots.tolist()
        sums: torch.Tensor | None = None
        for first in range(0, len(entries), self.batch_size):
            some = entries[first : first + self.batch_size]
            for slot, ((_, _, patch), output) in enumerate(zip(some, self._forward(some), strict=True), first):
                if sums is None:
                    sums = self.weight_sum.new_zeros(len(output), *self.weight_sum.shape)
                sums[everywhere(self.grid.boxes[patch])] += output.to(self.device)
                keep.put(slot, output.clone())
                if patch + 1 == self.num_patches:
                    yield sums
                    sums = None

    def _run(self, patches: torch.Tensor) -> torch.Tensor:
        """The part of the network's output of patches that is explained, one tensor ``(n, C, *roi_size)``."""
        output = self.forward.patches(patches.to(self.network_device))
        try:
            output = read(read(output, self.forward.output), self.path)
        except ValueError as error:
            raise _NotExact(str(error)) from error
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            raise _NotExact(f"the network gives a {type(output).__name__} for a patch, not one tensor of numbers")
        if output.ndim != patches.ndim or (len(output), *output.shape[2:]) != (len(patches), *self.grid.roi_size):
            raise _NotExact(f"the network gives {tuple(output.shape)} for patches {tuple(patches.shape)}")
        return output

    def _number_slots(self, asks: Asks) -> None:
        """Give a slot to each content of a patch that the masks of a round bring."""
        # A new batch begins, so that outputs of earlier rounds can be computed again without these.
        gap = -len(self.slots) % self.batch_size
        tables = [self.slots, np.full((gap, 3), -1)]
        count = len(self.slots) + gap
        for index, ask in asks.items():
            ids = [name for name in ask if not isinstance(name, Whole)]
            new = self.cases[index].begin(ids, count)
            places = new + np.array([len(self.names[index]), 0])
            tables.append(np.insert(places, 0, index, axis=1))
            self.names[index] += ids
            count += len(new)
        self.slots = np.concatenate(tables)

    def _slots_of(self, number: int) -> list[int]:
        slots = range(number * self.batch_size, min((number + 1) * self.batch_size, len(self.slots)))
        return [slot for slot in slots if self.slots[slot, 0] >= 0]

    def _run_batch(self, number: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Run a batch; its slots, each with what the target needs of the output."""
        slots = self._slots_of(number)
        entries = self.slots[slots].tolist()
        outputs = self._forward(entries)
        self.done += len(slots)
        self._advance(len(slots))
        for slot, (case, _, patch), output in zip(slots, entries, outputs, strict=True):
            self.walks[case].scores.forwards += 1
            if patch in self.cases[case].trims:
                yield slot, self.cases[case].trim(patch, output)

    def _forward(self, entries: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run patches (case, place, patch) as one batch; their weighted outputs ``(n, C, *box)``."""
        count = len(entries)
        with stage("perturb"):
            # Rows that are left over repeat the first one, so that a batch is the same whenever it is run.
            self._perturb([*entries, *[entries[0]] * (self.batch_size - count)], self.batch)
        with stage("forward"):
            output = self._run(self.batch)
        # Weighted in the output's own precision, as MONAI does it.
        return (output[:count] * self.weights).to(output.dtype)[everywhere(everywhere(self.grid.crop))]

    def _perturb(self, entries: Sequence[Sequence[int]], out: torch.Tensor) -> None:
        """Write patches ``(n, C, *roi_size)``."""
        parts = out[everywhere(everywhere(self.grid.crop))]
        for part, (case, place, patch) in zip(parts.split(1), entries, strict=True):
            self.walks[case].images.write_box(self.names[case][place], self.grid.boxes[patch], part)
        if any(self.grid.pad):
            out[:] = F.pad(parts, self.grid.pad, **self.padding)


def _stitching_device(inferer: SlidingWindowInferer, image: torch.Tensor) -> torch.device:
    """Where the inferer puts its patches together."""
    device = inferer.device
    if device is None and inferer.cpu_thresh is not None and image[0].numel() > inferer.cpu_thresh:
        device = "cpu"
    return torch.device(device or image.device)
