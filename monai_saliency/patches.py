"""Remembered patches: the same scores from a fraction of the network's forwards, for sliding-window models.

A ``SlidingWindowInferer`` runs the network on overlapping patches and blends what comes out. What it gives for one
patch depends on that patch's voxels only, so a mask changes nothing but the patches inside which it hides something,
and masks that agree inside a patch share its output. :class:`~monai_saliency.inferers.PerturbationInferer` therefore
runs each patch once unperturbed and once for each different restriction of a mask to it, and of these only the
patches that the target reads. A mask's output is the unperturbed one with its patches exchanged:
``(sum + sum_p w * (new_p - old_p)) / count``, in the box that they cover.

Positions, weights, padding and blending are MONAI's own (:func:`monai.inferers.utils.sliding_window_inference`).
Network batches hold ``sw_batch_size`` patches, the number that the inferer was given as what fits the device. Which
patches share a batch depends on the images, the masks and the target alone, not on what is remembered or was stored:
what was forgotten is computed again in the batch that it came from. So on one device neither the memory nor a stopped
run changes a bit of the scores.

It helps masks that leave most patches alone or repeat themselves inside a patch: windows, and regions of a label map.
RISE changes every patch with every mask; there, whole images are run, as they are wherever exactness cannot be told
beforehand, which the log says once.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.data.utils import compute_importance_map, dense_patch_slices
from monai.inferers import Inferer, SimpleInferer, SliceInferer, SlidingWindowInferer, SlidingWindowInfererAdapt
from monai.inferers.utils import _get_scan_interval
from monai.utils import PytorchPadMode, ensure_tuple_rep, fall_back_tuple, look_up_option
from torch.utils._pytree import tree_leaves

from monai_saliency.inputs import TensorInput
from monai_saliency.masks import BoundMasks, Masks, SlidingWindowMasks, _BoundSlidingWindowMasks
from monai_saliency.outputs import read
from monai_saliency.profiling import stage
from monai_saliency.utils import Box, whole_numbers, within

if TYPE_CHECKING:
    from monai_saliency.explanations import CaseRun
    from monai_saliency.inferers import PerturbationInferer

__all__ = ["PatchGrid", "PatchMemory", "PatchPlan", "PatchWindowMasks", "RememberedPatches", "plan", "remember"]

logger = logging.getLogger(__name__)
_EXACT_CALLS = (SlidingWindowInferer.__call__, SlidingWindowInfererAdapt.__call__, SliceInferer.__call__)


@dataclass(frozen=True)
class PatchMemory:
    """Limits of what is remembered of patches. Beyond them the least recently used outputs go, and are run again.

    Outputs that no mask needs any more are dropped at once, so windows, few of which share a patch's content, need
    little more than the outputs of the unperturbed image. The limits are of the outputs themselves. The C library's
    allocator may keep gaps beside them; ``MALLOC_MMAP_THRESHOLD_=262144`` in the environment makes it return them.

    Args:
        device_bytes: on the device where patches are stitched, if that is not the CPU.
        host_bytes: in the host's memory, for what the device has no room for.
    """

    device_bytes: int = 2 * 2**30
    host_bytes: int = 8 * 2**30


class PatchGrid:
    """Where a sliding-window inferer cuts its patches, for one spatial shape.

    Attributes:
        roi_size: a patch's size.
        step: from patch to patch along each axis.
        boxes: the part of the image that each patch sees, in MONAI's order.
        crop: where that part lies within a patch; the rest is padding, where a patch is larger than the image.
        pad: the padding, as ``F.pad`` reads it.

    Args:
        inferer: the inferer.
        spatial_shape: the image's.

    Raises:
        ValueError: when they do not fit each other.
    """

    def __init__(self, inferer: SlidingWindowInferer, spatial_shape: Sequence[int]) -> None:
        dims = len(spatial_shape)
        roi_size = inferer.roi_size
        if isinstance(inferer, SliceInferer):
            roi_size = list(inferer.orig_roi_size)
            if dims != 3 or len(roi_size) != 2 or inferer.spatial_dim > 2:
                raise ValueError(
                    f"SliceInferer needs a 3D image and a 2D `roi_size`, got {spatial_shape} and {roi_size}"
                )
            roi_size.insert(inferer.spatial_dim, 1)
        overlap = ensure_tuple_rep(inferer.overlap, dims)
        if not all(0 <= o < 1 for o in overlap):
            raise ValueError(f"`overlap` must be in [0, 1), got {overlap}")
        self.roi_size = tuple(int(size) for size in fall_back_tuple(ensure_tuple_rep(roi_size, dims), spatial_shape))
        padded = tuple(max(sizes) for sizes in zip(spatial_shape, self.roi_size, strict=True))
        before = [(size - own) // 2 for size, own in zip(padded, spatial_shape, strict=True)]
        self.pad: list[int] = []
        for size, own, half in reversed(list(zip(padded, spatial_shape, before, strict=True))):
            self.pad += [half, size - own - half]
        self.step = _get_scan_interval(padded, self.roi_size, dims, overlap)
        # A padded axis has one patch, which holds all of the image along it.
        self.crop = tuple(
            slice(half, half + own) if size > own else slice(0, roi)
            for size, own, half, roi in zip(padded, spatial_shape, before, self.roi_size, strict=True)
        )
        self.boxes: list[Box] = [
            tuple(
                slice(0, own) if size > own else slice(int(side.start), int(side.stop))
                for side, size, own in zip(patch, padded, spatial_shape, strict=True)
            )
            for patch in dense_patch_slices(padded, self.roi_size, self.step)
        ]


class PatchWindowMasks(Masks):
    """Windows beside each other on the grid of an inferer's patches, each of which therefore touches the fewest.

    A window is as large as the step from patch to patch, and the first lies in the first patch's corner: with half
    overlap each touches two patches along an axis, where windows of that size elsewhere touch up to three.

    Args:
        inferer: the inferer, whose patch size and overlap count.
        divide: windows for each step along each axis, for finer maps.
    """

    def __init__(self, inferer: SlidingWindowInferer, divide: int = 1) -> None:
        whole_numbers("divide", divide, 1)
        self.inferer = inferer
        self.divide = int(divide)

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        step = PatchGrid(self.inferer, image.shape[1:]).step
        # A patch that is larger than the image has a step that is too.
        window = [min(-(-s // self.divide), n) for s, n in zip(step, image.shape[1:], strict=True)]
        return _BoundPatchWindowMasks(SlidingWindowMasks(window, window), image, spacing)


class _BoundPatchWindowMasks(_BoundSlidingWindowMasks):
    def __init__(self, masks: SlidingWindowMasks, image: torch.Tensor, spacing: Sequence[float] | None) -> None:
        super().__init__(masks, image, spacing)
        self.starts = [np.arange(0, n, w) for n, w in zip(self.spatial_shape, self.window_shape, strict=True)]
        self.key = ("PatchWindowMasks", self.window_shape, self.spatial_shape)


@dataclass(frozen=True)
class PatchPlan:
    """How many forwards an explanation needs, counted in patches.

    Attributes:
        patches: of one image.
        forwards: with remembered patches, those of the unperturbed image among them.
        plain: when every mask runs all patches.
    """

    patches: int
    forwards: int
    plain: int

    @property
    def gain(self) -> float:
        """How many times fewer."""
        return self.plain / self.forwards


def plan(
    explain: PerturbationInferer,
    image: torch.Tensor,
    labels: torch.Tensor | None = None,
    spacing: Sequence[float] | None = None,
    reach: torch.Tensor | None = None,
) -> PatchPlan:
    """Count what explaining would cost, running nothing.

    Args:
        explain: what explains, with a sliding-window inferer inside.
        image: ``(C, *spatial)``; for windows its shape is enough (a tensor on the ``meta`` device).
        labels: its label map ``(1, *spatial)``, for masks of regions.
        spacing: voxel sizes in mm, for masks whose sizes are in mm.
        reach: the voxels that the target reads, bool ``(*spatial)``; None for all.

    Returns:
        the counts, with memory for all outputs.

    Raises:
        ValueError: when whole images would be run.
    """
    masks = explain.masks.bind(image, labels=labels, spacing=spacing)
    reason = _refusal(explain, image, masks, (), {})
    if reason:
        raise ValueError(f"no patches are remembered: {reason}")
    assert isinstance(explain.inferer, SlidingWindowInferer)
    grid = PatchGrid(explain.inferer, image.shape[1:])
    touches = _touches(masks, grid, _trims(grid, reach))
    forwards = len(grid.boxes) + int((touches[:, 0] == touches[:, 2]).sum())
    return PatchPlan(len(grid.boxes), forwards, len(grid.boxes) * (len(masks) + 1))


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
    reason = next(filter(None, (_refusal(settings, image, run.masks, args, kwargs) for run in runs)), None)
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


def _refusal(
    settings: PerturbationInferer, image: torch.Tensor, masks: BoundMasks, args: Any, kwargs: Any
) -> str | None:
    """Why remembered patches might not give the scores of whole images, if so."""
    inferer = settings.inferer
    kind = type(inferer)
    if not isinstance(inferer, SlidingWindowInferer):
        return f"{kind.__name__} is no SlidingWindowInferer"
    if kind.__call__ not in _EXACT_CALLS or (
        isinstance(inferer, SliceInferer) and type(inferer).network_wrapper is not SliceInferer.network_wrapper
    ):
        return f"{kind.__name__} runs the network in a way of its own"
    voxels = math.prod(image.shape[1:])
    adapts = isinstance(inferer, SlidingWindowInfererAdapt) and image.is_cuda
    if inferer.buffer_steps or (adapts and inferer.cpu_thresh is not None and voxels > inferer.cpu_thresh):
        return "the inferer stitches through buffers (`buffer_steps`)"
    if inferer.with_coord:
        return "the network reads where a patch lies (`with_coord`)"
    if type(settings.inputs) is not TensorInput:
        return f"the network takes several inputs ({type(settings.inputs).__name__})"
    if callable(settings.output) or isinstance(settings.output, (list, tuple)):
        return f"the target reads {settings.output} of the network's output"
    known = {"device", "buffer_steps", "buffer_dim"} & set(kwargs)
    if known:
        return f"the inferer is called with {sorted(known)}"
    if any(getattr(leaf, "ndim", 0) for leaf in tree_leaves((args, kwargs))):
        return "an argument of the network is an array, which may hold something for each patch of a batch"
    if image.dtype not in (torch.float32, torch.float64):
        return f"images of {image.dtype} are blended too coarsely"
    try:
        grid = PatchGrid(inferer, image.shape[1:])
    except ValueError as error:
        return str(error)
    weights = inferer.roi_weight_map
    if weights is not None and weights.shape not in (grid.roi_size, (1, 1, *grid.roi_size)):
        return f"`roi_weight_map` has shape {tuple(weights.shape)}, patches have {grid.roi_size}"
    if masks.restrict(range(1), grid.boxes[0]) is None:
        return (
            f"{type(settings.masks).__name__} do not tell what they hide inside a patch (masks such as RISE's change "
            "every patch); windows and regions do"
        )
    return None


def _trims(grid: PatchGrid, reach: torch.Tensor | None) -> dict[int, Box]:
    """For each patch with voxels that the target reads, the smallest box around these."""
    if reach is None:
        return dict(enumerate(grid.boxes))
    voxels = reach.numpy(force=True)
    trims = {}
    for patch, box in enumerate(grid.boxes):
        inside = voxels[box]
        sides = []
        for axis, side in enumerate(box):
            found = inside.any(axis=tuple(a for a in range(inside.ndim) if a != axis)).nonzero()[0]
            if not len(found):
                break
            sides.append(slice(side.start + int(found[0]), side.start + int(found[-1]) + 1))
        else:
            trims[patch] = tuple(sides)
    return trims


def _touches(masks: BoundMasks, grid: PatchGrid, patches: Iterable[int]) -> np.ndarray:
    """Which masks change which patches: rows (mask, patch, first mask that changes it in the same way), ascending."""
    rows = [np.empty((0, 3), dtype=int)]
    for patch in patches:
        restricted = masks.restrict(range(len(masks)), grid.boxes[patch])
        assert restricted is not None
        changed = restricted[0].nonzero()[0]
        if len(changed):
            _, first, same = np.unique(restricted[1][changed], axis=0, return_index=True, return_inverse=True)
            rows.append(np.stack([changed, np.full_like(changed, patch), changed[first][same.ravel()]], axis=1))
    touches = np.concatenate(rows)
    return touches[np.lexsort((touches[:, 1], touches[:, 0]))]


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

        whole = _Memory(self.device, memory)
        self.cases = self._start(settings, whole)
        self.todo = [
            (case, max(start, 1), stop)
            for cut in cuts
            for case, start, stop in cut
            if max(start, 1) < stop and not runs[case].has(max(start, 1), stop)
        ]
        self._number_slots()
        uses = np.bincount([slot for pair in self._order() for slot in pair], minlength=len(self.slots))
        kept = _Memory(self.device, memory)
        for slot, output in whole.empty():
            if uses[slot]:
                kept.put(slot, self._trim(slot, output))
        self.total = self.done + self._still_needed(uses, kept)
        self.outputs = _Outputs(uses, self.batch_size, self._run_batch, kept)
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

    def _start(self, settings: PerturbationInferer, memory: _Memory) -> list[_Case]:
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
                memory.put(slot, _own(output))
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

    def _still_needed(self, uses: np.ndarray, memory: _Memory) -> int:
        """The patch forwards of the masks still to be scored, found by going through the motions."""
        forwards = 0

        def pretend(number: int) -> Iterator[tuple[int, _Size]]:
            nonlocal forwards
            slots = self._slots_of(number)
            forwards += len(slots)
            for slot in slots:
                case, _, patch = self.slots[slot]
                if patch in self.cases[case].trims:
                    values = len(self.cases[case].sums) * _voxels(self.cases[case].trims[patch])
                    yield slot, _Size(values * self.itemsize)

        outputs = _Outputs(uses.copy(), self.batch_size, pretend, memory.sketch())
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
        self.trims = _trims(grid, self.target.reach())
        self.touches = _touches(run.masks, grid, self.trims)
        self._rows = np.searchsorted(self.touches[:, 0], np.arange(len(run.masks) + 1))
        channels = self.target.channels_read
        self.channels = slice(None) if channels is None else list(channels)
        # Outside of this box nothing is read.
        self.box = _around(self.trims.values()) if self.trims else (slice(0, 0),) * (volume.ndim - 2)
        self.sums = _own(sums[self.channels][_everywhere(self.box)])
        self.weight_sum = _own(weight_sum[self.box])
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
        return _own(output[self.channels][_everywhere(within(self.trims[patch], box))])

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


class _Outputs:
    """The outputs of slots: remembered, or computed with the rest of their batch.

    Args:
        uses: how many times each slot will still be taken; those that will not be are not remembered.
        batch_size: slots in a batch.
        compute: runs a batch, giving its slots with their outputs.
        memory: remembers.
    """

    def __init__(
        self,
        uses: np.ndarray,
        batch_size: int,
        compute: Callable[[int], Iterator[tuple[int, Any]]],
        memory: _Memory,
    ) -> None:
        self.uses = uses
        self.batch_size = batch_size
        self.compute = compute
        self.memory = memory

    def take(self, slot: int) -> Any:
        output = self.memory.get(slot)
        self.uses[slot] -= 1
        if output is None:
            for other, computed in self.compute(slot // self.batch_size):
                if other == slot:
                    output = computed
                if self.uses[other] and other not in self.memory:
                    self.memory.put(other, computed)
        elif not self.uses[slot]:
            self.memory.pop(slot)
        return output


class _Memory:
    """Outputs by slot, on the device, then on the host, then forgotten, least recently used first."""

    def __init__(self, device: torch.device, limits: PatchMemory) -> None:
        self.device, self.limits = device, limits
        self.tiers = [_Tier(torch.device("cpu"), limits.host_bytes)]
        if device.type != "cpu":
            self.tiers.insert(0, _Tier(device, limits.device_bytes))

    def __contains__(self, slot: int) -> bool:
        return any(slot in tier.outputs for tier in self.tiers)

    def put(self, slot: int, output: Any) -> None:
        fallen = [(slot, output)]
        for tier in self.tiers:
            fallen = [lower for upper in fallen for lower in tier.put(*upper)]

    def get(self, slot: int) -> Any | None:
        """An output, which moves to the first tier, None where it is not remembered."""
        if slot in self.tiers[0].outputs:
            self.tiers[0].outputs.move_to_end(slot)
            return self.tiers[0].outputs[slot]
        output = self.pop(slot)
        if output is not None:
            self.put(slot, output)
        return output

    def pop(self, slot: int) -> Any | None:
        """Take an output out, None where it is not remembered."""
        return next((tier.pop(slot) for tier in self.tiers if slot in tier.outputs), None)

    def empty(self) -> Iterator[tuple[int, Any]]:
        """Take everything out, least recently used first."""
        for tier in reversed(self.tiers):
            for slot in list(tier.outputs):
                yield slot, tier.pop(slot)

    def sketch(self) -> _Memory:
        """A memory that behaves as this one, of sizes without voxels."""
        copy = _Memory(self.device, self.limits)
        for tier, own in zip(copy.tiers, self.tiers, strict=True):
            for slot, output in own.outputs.items():
                tier.put(slot, _Size(output.nbytes))
        return copy


class _Tier:
    """One device's part of a memory."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit
        self.used = 0
        self.outputs: OrderedDict[int, Any] = OrderedDict()

    def put(self, slot: int, output: Any) -> list[tuple[int, Any]]:
        """Keep an output; those that there is no more room for."""
        if output.nbytes > self.limit:
            return [(slot, output)]
        fallen = []
        while self.used + output.nbytes > self.limit:
            oldest = next(iter(self.outputs))
            fallen.append((oldest, self.pop(oldest)))
        self.outputs[slot] = output.to(self.device)
        self.used += output.nbytes
        return fallen

    def pop(self, slot: int) -> Any:
        output = self.outputs.pop(slot)
        self.used -= output.nbytes
        return output


@dataclass(frozen=True)
class _Size:
    """Stands for an output where only room is asked for."""

    nbytes: int

    def to(self, device: torch.device) -> _Size:
        return self


def _own(part: torch.Tensor) -> torch.Tensor:
    """A part of a tensor that does not keep the rest in memory."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


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
