"""Remembered patches: the same scores from a fraction of the network's forwards, for sliding-window models.

A ``SlidingWindowInferer`` runs the network on overlapping patches and blends what comes out. What it gives for one
patch depends on that patch's voxels only, so a mask changes nothing but the patches inside which it hides something,
and masks that agree inside a patch share its output. :class:`~monai_saliency.inferers.inferer.PerturbationInferer`
therefore
runs each patch once unperturbed and once for each different restriction of a mask to it, and of these only the
patches that the target reads. A mask's output is the unperturbed one with its patches exchanged:
``(sum + sum_p w * (new_p - old_p)) / count``, in the box that they cover.

Positions, weights, padding and blending are MONAI's own (:func:`monai.inferers.utils.sliding_window_inference`).
Network batches hold ``sw_batch_size`` patches, the number that the inferer was given as what fits the device. Which
patches share a batch depends on the images, the masks and the target alone, not on what is remembered or was stored:
what was forgotten is computed again in the batch that it came from. So on one device neither the memory nor a stopped
run changes a bit of the scores. What is told before any patch is run is in :mod:`monai_saliency.inferers.patch_plan`,
what holds
outputs in :mod:`monai_saliency.inferers.patch_memory`.

It helps masks that leave most patches alone or repeat themselves inside a patch: windows, and regions of a label map.
RISE changes every patch with every mask; there, whole images are run, as they are wherever exactness cannot be told
beforehand, which the log says once.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.data.utils import compute_importance_map
from monai.inferers import Inferer, SimpleInferer, SliceInferer, SlidingWindowInferer
from monai.utils import PytorchPadMode, look_up_option

from monai_saliency.inferers.patch_memory import OutputMemory, Outputs, PatchMemory, Size, owned
from monai_saliency.inferers.patch_plan import find_touches, find_trims, refusal
from monai_saliency.networks.outputs import read
from monai_saliency.utils.boxes import Box, within
from monai_saliency.utils.patch_grid import PatchGrid
from monai_saliency.utils.profiling import stage

if TYPE_CHECKING:
    from monai_saliency.inferers.case_state import CaseRun
    from monai_saliency.inferers.inferer import PerturbationInferer

__all__ = ["RememberedPatches", "remember"]

logger = logging.getLogger(__name__)


def remember(
    settings: PerturbationInferer,
    runs: Sequence[CaseRun],
    cuts: Sequence[Sequence[tuple[int, int, int]]],
    network: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> RememberedPatches | None:
    """Start to explain by remembered patches: run the unperturbed images and bind their targets.

    Args:
        settings: what explains.
        runs: the cases, all of one shape.
        cuts: the ranges of rows that are scored together.
        network: the network.
        args: of the network.
        kwargs: of the network.

    Returns:
        None where whole images are to be run, which the log gives the reason for.
    """
    inferer, memory = settings.inferer, settings.patch_memory
    if memory is None or not isinstance(inferer, SlidingWindowInferer):
        return None
    image = runs[0].case.image
    reason = next(filter(None, (refusal(settings, image, run.masks, args, kwargs) for run in runs)), None)
    if reason is None:
        predict = (
            (lambda patches: inferer.network_wrapper(network, patches))  # which takes no arguments
            if isinstance(inferer, SliceInferer)
            else (lambda patches: network(patches, *args, **kwargs))
        )
        try:
            return RememberedPatches(settings, inferer, memory, runs, cuts, predict)
        except _NotExact as error:
            reason = str(error)
            for run in runs:
                run.num_forwards = 0
    _say_once(f"no patches are remembered, every mask runs whole images: {reason}")
    return None


class _NotExact(ValueError):
    """The network's output is none that patches can be exchanged in."""


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


class RememberedPatches:
    """The cases of one call on their way through patches of the network.

    Every output has a *slot*: first come the patches of the unperturbed images, then, case by case and mask by mask,
    those whose content no earlier mask of the case has. ``sw_batch_size`` slots at a time are a network batch.

    Attributes:
        total: patch forwards from the beginning to the end of the run, including what must be run again.
        done: those so far.
        summary: a line that tells them.
    """

    def __init__(
        self,
        settings: PerturbationInferer,
        inferer: SlidingWindowInferer,
        memory: PatchMemory,
        runs: Sequence[CaseRun],
        cuts: Sequence[Sequence[tuple[int, int, int]]],
        predict: Callable[[torch.Tensor], Any],
    ) -> None:
        image = runs[0].case.image
        self.runs = runs
        self.predict = predict
        self.once: Inferer = SimpleInferer() if settings.meter is None else settings.meter.watch(SimpleInferer())
        self.output = settings.output
        self.grid = PatchGrid(inferer, image.shape[1:])
        self.padding = {"mode": look_up_option(inferer.padding_mode, PytorchPadMode).value, "value": inferer.cval}
        self.network_device = torch.device(inferer.sw_device or image.device)
        device = inferer.device
        if device is None and inferer.cpu_thresh is not None and image[0].numel() > inferer.cpu_thresh:
            device = "cpu"
        self.device = torch.device(device or image.device)
        weights = inferer.roi_weight_map
        if weights is None:
            weights = compute_importance_map(
                self.grid.roi_size, inferer.mode, inferer.sigma_scale, self.network_device, image.dtype
            )
        self.weights = weights.to(self.network_device, image.dtype).reshape(self.grid.roi_size)
        count = len(self.grid.boxes)
        self.batch_size = min(int(inferer.sw_batch_size), count * len(runs))
        self.batch = image.new_zeros(self.batch_size, len(image), *self.grid.roi_size)
        self.done = 0
        self._advance: Callable[[int], Any] = lambda count: None
        # Rows of slots: a case, a row of its run (0 for the unperturbed image, i + 1 for mask i), and a patch.
        self.slots = np.array([(case, 0, patch) for case in range(len(runs)) for patch in range(count)])

        whole = OutputMemory(self.device, memory)
        self.cases = self._start(settings, whole)
        self.todo = [
            (case, max(start, 1), stop)
            for cut in cuts
            for case, start, stop in cut
            if max(start, 1) < stop and not runs[case].has(max(start, 1), stop)
        ]
        self._number_slots()
        uses = np.bincount([slot for pair in self._order() for slot in pair], minlength=len(self.slots))
        kept = OutputMemory(self.device, memory)
        for slot, output in whole.empty():
            if uses[slot]:
                kept.put(slot, self._trim(slot, output))
        self.total = self.done + self._still_needed(uses, kept)
        self.outputs = Outputs(uses, self.batch_size, self._run_batch, kept)
        plain = count * (len(runs) + sum(stop - start for _, start, stop in self.todo))
        self.summary = (
            f"{', '.join(run.case.name for run in runs)}: {self.total} patch forwards, {self.done} of them for "
            f"unperturbed images; whole images would need {plain}, {plain / self.total:.1f} times as many"
        )
        logger.info(self.summary)

    def score(self, advance: Callable[[int], Any]) -> None:
        """Score all masks that have no scores yet, telling ``advance`` how many patches went through the network."""
        self._advance = advance
        for index, start, stop in self.todo:
            case = self.cases[index]
            scores = [case.score(mask, self.outputs.take) for mask in range(start - 1, stop - 1)]
            self.runs[index].add(start, stop, torch.stack(scores))

    def _start(self, settings: PerturbationInferer, memory: OutputMemory) -> list[_Case]:
        """Run the unperturbed images, remember their patches, and bind the targets."""
        shape = self.runs[0].case.image.shape[1:]
        image = self.runs[0].case.image
        sums: list[torch.Tensor] = []
        for number in range(-(-len(self.slots) // self.batch_size)):
            for slot, output in self._forward(number):
                if not sums:
                    sums = [torch.zeros(len(output), *shape, dtype=image.dtype, device=self.device) for _ in self.runs]
                case, _, patch = self.slots[slot]
                sums[case][_everywhere(self.grid.boxes[patch])] += output.to(self.device)
                memory.put(slot, owned(output))
        weights = self.weights[self.grid.crop].to(self.device)
        weight_sum = torch.zeros(shape, dtype=image.dtype, device=self.device)
        for box in self.grid.boxes:
            weight_sum[box] += weights
        if not all(bool(torch.isfinite(each).all()) for each in sums):
            # A difference of infinities tells nothing.
            raise _NotExact("the network's output of the unperturbed image is not finite everywhere")
        cases = []
        for index, run in enumerate(self.runs):
            output = sums.pop(0)
            volume = (output / weight_sum)[None]
            run.read(0, 1, volume, 0, 1, settings)
            cases.append(_Case(run, output, weight_sum, volume, self.grid, index * len(self.grid.boxes)))
        return cases

    def _number_slots(self) -> None:
        """Give a slot to each content of a patch that masks bring."""
        # A new batch begins, so that the unperturbed images' outputs can be computed again without the masks'.
        gap = -len(self.slots) % self.batch_size
        tables = [self.slots, np.full((gap, 3), -1)]
        count = len(self.slots) + gap
        for index, case in enumerate(self.cases):
            new = case.touches[case.touches[:, 0] == case.touches[:, 2], :2]
            # Both ascend by mask, then by patch.
            known, wanted = (t @ [len(self.grid.boxes), 1] for t in (new, case.touches[:, [2, 1]]))
            case.slots = count + np.searchsorted(known, wanted)
            tables.append(np.insert(new + np.array([1, 0]), 0, index, axis=1))
            count += len(new)
        self.slots = np.concatenate(tables)

    def _order(self) -> Iterator[tuple[int, int]]:
        """The pairs of slots that the masks still to be scored need, one after the other."""
        for index, start, stop in self.todo:
            for mask in range(start - 1, stop - 1):
                for _, old, new in self.cases[index].exchanges(mask):
                    yield old, new

    def _still_needed(self, uses: np.ndarray, memory: OutputMemory) -> int:
        """The patch forwards of the masks still to be scored, found by going through the motions."""
        forwards = 0

        def pretend(number: int) -> Iterator[tuple[int, Size]]:
            nonlocal forwards
            slots = self._slots_of(number)
            forwards += len(slots)
            for slot in slots:
                case, _, patch = self.slots[slot]
                if patch in self.cases[case].trims:
                    values = len(self.cases[case].sums) * _voxels(self.cases[case].trims[patch])
                    yield slot, Size(values * self.itemsize)

        outputs = Outputs(uses.copy(), self.batch_size, pretend, memory.sketch())
        for pair in self._order():
            for slot in pair:
                outputs.take(slot)
        return forwards

    def _slots_of(self, number: int) -> list[int]:
        slots = range(number * self.batch_size, min((number + 1) * self.batch_size, len(self.slots)))
        return [slot for slot in slots if self.slots[slot, 0] >= 0]

    def _run_batch(self, number: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Run a batch; its slots, each with what the target needs of the output."""
        for slot, output in self._forward(number):
            case, _, patch = self.slots[slot]
            if patch in self.cases[case].trims:
                yield slot, self._trim(slot, output)

    def _trim(self, slot: int, output: torch.Tensor) -> torch.Tensor:
        case, _, patch = self.slots[slot]
        return self.cases[case].trim(patch, output, self.grid.boxes[patch])

    def _forward(self, number: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Run a batch; its slots, each with its weighted output ``(C, *box)``."""
        slots = self._slots_of(number)
        with stage("perturb"):
            for place, slot in enumerate(slots):
                self._perturb(slot, self.batch[place])
        # So that batches that are run again are the same to the last row, whatever was run between.
        self.batch[len(slots) :] = 0
        with stage("forward"):
            output: Any = self.once(self.batch.to(self.network_device), self.predict)
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
        if output.ndim != self.batch.ndim or (len(output), *output.shape[2:]) != (
            self.batch_size,
            *self.grid.roi_size,
        ):
            raise _NotExact(f"the network gives {tuple(output.shape)} for patches {tuple(self.batch.shape)}")
        if not output.is_floating_point():
            raise _NotExact(f"the network gives {output.dtype}, which cannot be blended")
        self.itemsize = output.itemsize
        for slot in slots:
            self.runs[self.slots[slot, 0]].num_forwards += 1
        self.done += len(slots)
        self._advance(len(slots))
        for place, slot in enumerate(slots):
            # Weighted in the output's own precision, as MONAI does it.
            yield slot, (output[place] * self.weights).to(output.dtype)[_everywhere(self.grid.crop)]

    def _perturb(self, slot: int, out: torch.Tensor) -> None:
        case, row, patch = self.slots[slot]
        box = self.grid.boxes[patch]
        part = out[_everywhere(self.grid.crop)]
        self.runs[case].perturb(row, row + 1, out=part[None], box=box)
        if any(self.grid.pad):
            out[:] = F.pad(part[None], self.grid.pad, **self.padding)[0]


class _Case:
    """One case's unperturbed output, and the patches in which each mask exchanges it.

    Args:
        run: the case.
        sums: ``(C, *spatial)``, the weighted outputs of its patches, summed.
        weight_sum: ``(*spatial)``, their weights, summed.
        volume: ``(1, C, *spatial)``, the ratio.
        grid: the patches.
        first_slot: of the unperturbed image's first patch.

    Attributes:
        trims: by patch, the box that the target reads.
        touches: rows (mask, patch, first mask that changes it in the same way), ascending.
        slots: the slot of each row of ``touches``.
    """

    slots: np.ndarray

    def __init__(
        self,
        run: CaseRun,
        sums: torch.Tensor,
        weight_sum: torch.Tensor,
        volume: torch.Tensor,
        grid: PatchGrid,
        first_slot: int,
    ) -> None:
        self.target = run.target
        self.reference_scores = run.state.reference_scores
        self.first_slot = first_slot
        self.trims = find_trims(grid, self.target.reach())
        self.touches = find_touches(run.masks, grid, self.trims)
        self._rows = np.searchsorted(self.touches[:, 0], np.arange(len(run.masks) + 1))
        channels = self.target.channels_read
        self.channels = slice(None) if channels is None else list(channels)
        # Outside of this box nothing is read.
        self.box = _around(self.trims.values()) if self.trims else (slice(0, 0),) * (volume.ndim - 2)
        self.sums = owned(sums[self.channels][_everywhere(self.box)])
        self.weight_sum = owned(weight_sum[self.box])
        # A copy, since the target may hold on to what it was bound to.
        self.volume = None if self.target.additive else volume.clone()
        self._contributions: dict[tuple, torch.Tensor] = {}

    def exchanges(self, mask: int) -> Iterator[tuple[int, int, int]]:
        """The patches that a mask changes, each with the slots of its unperturbed and its perturbed output."""
        for row in range(self._rows[mask], self._rows[mask + 1]):
            patch = int(self.touches[row, 1])
            yield patch, self.first_slot + patch, int(self.slots[row])

    def trim(self, patch: int, output: torch.Tensor, box: Box) -> torch.Tensor:
        """What the target needs of an output ``(C, *box)``."""
        return owned(output[self.channels][_everywhere(within(self.trims[patch], box))])

    def score(self, mask: int, take: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Scores ``(K,)`` of a mask, whose patches' outputs ``take`` gives."""
        exchanges = list(self.exchanges(mask))
        if not exchanges:
            return self.reference_scores
        box = _around(self.trims[patch] for patch, _, _ in exchanges)
        here = within(box, self.box)
        values = self.sums[_everywhere(here)].clone()
        for patch, old, new in exchanges:
            part = values[_everywhere(within(self.trims[patch], box))]
            part -= take(old).to(values.device)
            part += take(new).to(values.device)
        values /= self.weight_sum[here]
        if self.volume is None:
            return self.reference_scores + (self.target.contribution(values[None], box)[0] - self._reference(box))
        place = (0, self.channels, *box)
        kept = self.volume[place].clone()
        self.volume[place] = values
        scores = self.target(self.volume)[0].clone()
        self.volume[place] = kept
        return scores

    def _reference(self, box: Box) -> torch.Tensor:
        """What a box of the unperturbed output adds to the scores; masks that change the same patches share it."""
        key = tuple((side.start, side.stop) for side in box)
        if key not in self._contributions:
            here = within(box, self.box)
            values = self.sums[_everywhere(here)] / self.weight_sum[here]
            self._contributions[key] = self.target.contribution(values[None], box)[0]
        return self._contributions[key]


def _voxels(box: Box) -> int:
    return math.prod(side.stop - side.start for side in box)


def _everywhere(box: Box) -> Box:
    """A box in all channels."""
    return (slice(None), *box)


def _around(boxes: Iterable[Box]) -> Box:
    """The smallest box around some."""
    return tuple(
        slice(min(side.start for side in sides), max(side.stop for side in sides)) for sides in zip(*boxes, strict=True)
    )
