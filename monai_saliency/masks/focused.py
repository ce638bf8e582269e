"""RISE masks that keep so many cells that half of the effect is left, by the scores so far."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from scipy.ndimage import binary_dilation, maximum_filter
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Id, Ids, Masks, Observed, Search, Spacing, random_rows
from monai_saliency.masks.half_effect import half_effect
from monai_saliency.masks.rise import TOGETHER, BoundRISEMasks, RISEMasks
from monai_saliency.masks.sliding_window import PatchWindowMasks
from monai_saliency.masks.until import ended, wanted_agreement
from monai_saliency.utils.arguments import instance, number, per_axis, whole_number
from monai_saliency.utils.tensors import Box, to_device

# Windows with evidence: where the score falls by more than this share of the largest fall, or whose rest does not make
# it fall by more. Below it is mostly chance.
_STANDS_OUT = 0.1
# Cells along an axis of the masks of a part, for each one of the masks of the whole image.
_FINER = 1.5


class FocusedMasks(Masks):
    """RISE masks that keep so many cells that half of the effect is left, by the scores so far. 2D and 3D.

    - They keep few cells where any one of several lesions is enough, and many where all of a shape is needed
      (``monai_saliency.masks.half_effect``). The first sixteenth of the masks keeps half of the cells. The scores of
      all masks so far decide about as many next ones, four times.
    - Where a grid has more cells than there are masks, as in 3D, the scores cannot tell all cells apart. So the later
      half of the masks hides finer cells, and only in a part of the image: there the score goes most with the masks,
      and it holds as many cells of the grid as there are masks left. That is done where hiding this part takes more
      than half of the effect, and showing it alone leaves nine tenths: else there is evidence elsewhere.
    - With an ``inferer`` that cuts patches, windows on the patch grid are hidden first, each alone. If hiding all that
      show evidence leaves half of the effect, each other window is hidden together with these. Random masks, half as
      many, hide cells in the windows with evidence, and keep all else.

    Each explained score asks for masks of its own once scores decide. An id is ``(windows, number, percent)``: a set of
    windows as the bits of a number, 0 for the whole image, the number of a RISE mask
    (:class:`~monai_saliency.masks.RISEMasks`), and how many of 100 cells it keeps there. With 0 percent all is hidden;
    the number is then 1 where that only tells whether a part holds the evidence.

    Args:
        regression: tells how well the map is known, for ``until``, such as
            :class:`~monai_saliency.estimators.RegressionScoring`.
        num_masks: random masks for each explained score, at least 4.
        grid_size: cells along each axis, one number or one per axis, at least 1.
        p1: probability in (0, 1) that a cell is kept, or ``"auto"``: so many that half of the effect is left.
        seed: of the random masks.
        inferer: a sliding-window inferer whose patches are to be spared.
        until: ask for half as many masks again, until the map agrees so well with one of as many other masks, by its
            standard error: above 0 and below 1.
        budget: the largest number of random masks with ``until``.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when the inferer does not fit the image.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> bound = ms.masks.FocusedMasks(ms.estimators.RegressionScoring(), num_masks=40).bind(torch.zeros(1, 32, 32))
        >>> search = bound.search(torch.ones(1))
        >>> ids = next(search)  # all hidden, and two random masks
        >>> scores = bound.render(ids)[:, :, 4:20, 8:24].amin((2, 3))  # of a network that needs all voxels there
        >>> later = search.send(scores)  # so more is kept
        >>> later[0][2] > 50
        True
    """

    def __init__(
        self,
        regression: Any,
        num_masks: int = 340,
        grid_size: int | Sequence[int] = 10,
        p1: float | str = "auto",
        seed: int = 0,
        inferer: SlidingWindowInferer | None = None,
        until: float | None = None,
        budget: int = 4000,
    ) -> None:
        self.regression = regression
        self.num_masks = whole_number("num_masks", num_masks, 4)
        self.p1 = p1 if p1 == "auto" else number("p1", p1)
        if not isinstance(self.p1, str) and not 0 < self.p1 < 1:
            raise ValueError(f"`p1` must be above 0 and below 1, got {p1}: else nothing is hidden, or everything")
        self.until = None if until is None else wanted_agreement(until)
        self.budget = num_masks if until is None else max(num_masks, whole_number("budget", budget, 1))
        self.seed, self.grid_size = seed, grid_size
        RISEMasks(self.budget, grid_size, seed=seed)  # which checks these
        words = "a SlidingWindowInferer, whose patches are spared"
        self.inferer = instance("inferer", inferer, SlidingWindowInferer, words, none=True)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundFocusedMasks:
        return BoundFocusedMasks(self, image)


class BoundFocusedMasks(BoundRISEMasks):
    """The masks of one image: the grids of RISE, whose number of kept cells depends on scores."""

    __len__, weighted_sum, moments = BoundMasks.__len__, BoundMasks.weighted_sum, BoundMasks.moments

    def __init__(self, masks: FocusedMasks, image: Tensor) -> None:
        super().__init__(RISEMasks(masks.budget, masks.grid_size, seed=masks.seed), image)
        self.regression, self.num_masks, self.share = masks.regression, masks.num_masks, masks.p1
        self.until, self.budget = masks.until, masks.budget
        self.on_patches = masks.inferer is not None
        # Without patches, windows tell the place where evidence stands out: half a cell each.
        counts = [min(2 * cells, n) for cells, n in zip(self.grid_shape, self.spatial_shape, strict=True)]
        starts = [np.arange(count) * n // count for count, n in zip(counts, self.spatial_shape, strict=True)]
        if masks.inferer is not None:
            starts = PatchWindowMasks(masks.inferer).bind(image).starts
        self.bounds = [np.append(along, n) for along, n in zip(starts, self.spatial_shape, strict=True)]
        self.windows = tuple(map(len, starts))
        if self._underdetermined:
            self.part = _PartMasks(masks, image, self.bounds)
        regression = type(masks.regression).__name__, *sorted(vars(masks.regression).items())
        grid = tuple(tuple(along.tolist()) for along in self.bounds)
        settings = (self.grid_shape, self.seed, self.share, self.num_masks, self.until, self.budget)
        self.key = ("FocusedMasks", "a part", settings, regression, self.on_patches, grid)

    @property
    def at_most(self) -> int:
        if self.on_patches:
            return 2 * int(np.prod(self.windows)) + 3 + max(self._looks[-1].stop, self.budget)
        return 2 + 2 * self._underdetermined + self.budget

    @property
    def _underdetermined(self) -> bool:
        """Whether a grid has more cells than there are masks."""
        return self._num_cells > self.num_masks and not self.on_patches

    @property
    def _num_cells(self) -> int:
        """The cells of a grid, none of which is smaller than a voxel."""
        return math.prod(min(cells, n) for cells, n in zip(self.grid_shape, self.spatial_shape, strict=True))

    @property
    def _looks(self) -> list[range]:
        """The numbers of random masks that are asked for together: a sixteenth, then as many again as before."""
        count = self.num_masks // 2 if self.on_patches else self.num_masks
        ends = [0, count // 16, count // 8, count // 4, count // 2, count]
        return [range(*pair) for pair in itertools.pairwise(ends)]

    def first_round(self) -> Ids:
        if self.on_patches:
            return [*self._windows_beside(0), (0, 0, 0)]
        return [(0, 0, 0), *self._random_masks(0, self._looks[0])]

    def search(self, reference_scores: Tensor) -> Search:
        observed, windows, alone = Observed(self, reference_scores), 0, []
        looks = self._looks if self.on_patches else self._looks[1:]
        yield from observed.ask(self.first_round())
        if self.on_patches:
            windows = yield from self._windows_with_evidence(observed)
        for look in looks:
            if look is looks[-1] and not self.on_patches:
                together = self._together(observed)
                alone = [(place, 0, 0) for place in self._place(together)]  # tells the score without the place
                if self._underdetermined:
                    windows = yield from self._part_with_evidence(observed, together, len(look))
            yield from observed.ask(self._random_masks(windows, look, observed), alone)
        count = looks[-1].stop
        while self.until is not None and count < self.budget and self._agreement(observed) < self.until:
            look = range(count, min(count + max(count // 2, 1), self.budget))
            yield from observed.ask(self._random_masks(windows, look, observed))
            count = look.stop
        return observed.ended(self._words(observed))

    def _random_masks(self, windows: int, look: range, observed: Observed | None = None) -> list[Id]:
        """Random masks in some windows, which keep as many of 100 cells as the scores so far ask for."""
        kept, left = ([], []) if observed is None else self._left(observed)
        p1 = half_effect(kept, left) if self.share == "auto" else float(self.share)
        percent = min(max(round(100 * p1), 1), 99)
        return [(windows, drawn, percent) for drawn in look]

    def _left(self, observed: Observed) -> tuple[list[float], list[float]]:
        """Of each random mask the share of cells that it keeps, and the share of the effect that is left."""
        scores, image = observed.by_id, float(observed.reference_scores)
        kept: list[float] = []
        left: list[float] = []
        for mask in observed.ids:
            windows, _, percent = mask
            without = scores.get((windows, 0, 0), scores[0, 0, 0])  # a part holds most of the evidence
            if percent and without != image:
                kept.append(percent / 100)
                left.append((scores[mask] - without) / (image - without))
        return kept, left

    def _words(self, observed: Observed) -> str:
        windows, _, percent = observed.ids[-1]
        words = f"the last masks keep {percent}% of the cells"
        if windows:
            words += " in the windows with evidence, and all else"
        return words if self.until is None else f"{words}; {ended(self._agreement(observed), self.until)}"

    def _agreement(self, observed: Observed) -> float:
        """How far the map would agree with one of as many other masks: the share of its variance that is not chance."""
        values, error = self.regression.compute(observed), self.regression.over_seeds(observed)
        spread = float(values.double().var())
        return 1 - float(error.double().square().mean()) / spread if spread else 0.0

    def _windows_beside(self, hidden: int) -> list[Id]:
        """Masks that each hide one window more."""
        bits = (1 << window for window in range(int(np.prod(self.windows))))
        return [(hidden | bit, 0, 0) for bit in bits if not hidden & bit]

    def _windows_with_evidence(self, observed: Observed) -> Generator[Ids, Tensor, int]:
        """Each window hidden alone, and each together with these if half of the effect is left; 0 for all windows."""
        image = float(observed.reference_scores)
        windows = self._standing_out(observed, 0, image)
        if not windows:
            return 0
        yield from observed.ask([(windows, 0, 0)])
        scores = observed.by_id
        fill, before = scores[0, 0, 0], scores[windows, 0, 0]
        if before - fill > (image - fill) / 2 > 0:
            yield from observed.ask(self._windows_beside(windows))
            windows |= self._standing_out(observed, windows, before)
            yield from observed.ask([(windows, 0, 0)])
        return windows

    def _standing_out(self, observed: Observed, hidden: int, before: float) -> int:
        """The windows without which the score falls, as the bits of a number; 0 where there are none."""
        scores = observed.by_id
        falls = {mask[0] & ~hidden: before - scores[mask] for mask in self._windows_beside(hidden)}
        least = _STANDS_OUT * max([0.0, *falls.values()])
        return sum(window for window, fall in falls.items() if fall > least)

    def _part_with_evidence(self, observed: Observed, together: np.ndarray, count: int) -> Generator[Ids, Tensor, int]:
        """The windows that hold as many cells as masks are asked for, where the score goes most with them or with a
        window beside; 0 where there is evidence elsewhere.
        """
        chosen = np.zeros(self.windows, dtype=bool)
        most = np.argsort(-maximum_filter(together, 3).ravel(), kind="stable")
        chosen.ravel()[most[: chosen.size * count // self._num_cells]] = True
        part, rest = _bits(chosen), _bits(~chosen)
        hidden, alone = (yield [(part, 1, 0), (rest, 1, 0)])[:, 0].double().tolist()
        image, fill = float(observed.reference_scores), observed.by_id[0, 0, 0]
        effect = image - fill
        holds_all = effect and (image - hidden) / effect > 0.5 and (alone - fill) / effect > 1 - _STANDS_OUT
        return part if holds_all else 0

    def _place(self, together: np.ndarray) -> list[int]:
        """The windows that go with the score over the masks so far, by more than half of the most (something small is
        as wide at half height), and those beside them. None where no window does.
        """
        if not together.max() > 0:
            return []
        return [_bits(binary_dilation(together > together.max() / 2, np.ones([3] * together.ndim)))]

    def _together(self, observed: Observed) -> np.ndarray:
        """How far the score goes with each window over the random masks so far, ``(*windows)``."""
        score_of = {mask: score for mask, score in observed.by_id.items() if mask[2]}
        ids, scores = list(score_of), torch.tensor(list(score_of.values()), dtype=torch.float64)
        averages = [_averages(bounds) for bounds in self.bounds]
        together = torch.zeros(self.windows, dtype=torch.float64)
        for rows in torch.arange(len(ids)).split(TOGETHER):
            kept = self.along_axes([ids[row] for row in rows], averages)[:, 0].cpu().double()
            together += torch.tensordot(scores[rows] - scores.mean(), kept, dims=1)
        return (together - together.mean()).numpy()

    def places(self, ids: Ids) -> list[int]:
        return [row for row, (windows, number, percent) in enumerate(ids) if windows and not number + percent]

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """Those of :class:`~monai_saliency.masks.RISEMasks`, and ``ids``, objects ``(n,)``."""
        known = np.empty(len(ids), dtype=object)
        known[:] = [tuple(mask) for mask in ids]
        return _drawn(self, ids) | {"ids": known}

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        ids = codes["ids"].tolist()
        if self._in_part(ids):
            return self._of_both(
                ids,
                lambda rows: self._render_box({name: of[rows] for name, of in codes.items()}, box, device),
                lambda some: self.part._render_box(self.part.codes(some), box, device),
            )
        masks = super()._render_box(codes, box, device)
        for windows, rows in _rows_of([mask[0] for mask in ids]).items():
            if windows:
                here = to_device(np.array(rows), device)
                masks[here] = torch.where(self._inside(windows, box, device), masks[here], 1)
        return masks

    def along_axes(self, ids: Ids, matrices: Sequence[Tensor]) -> Tensor:
        if self._in_part(ids):
            return self._of_both(
                ids,
                lambda rows: self.along_axes([ids[row] for row in rows], matrices),
                lambda some: self.part.along_axes(some, matrices),
            )
        if any(windows for windows, *_ in ids):  # parts of their cells
            return BoundMasks.along_axes(self, ids, matrices)
        return super().along_axes(ids, matrices)

    def _in_part(self, ids: Ids) -> list[int]:
        """The rows of the masks that hide finer cells in a part of the image."""
        if not self._underdetermined:
            return []
        return [row for row, (windows, _, percent) in enumerate(ids) if windows and percent]

    def _of_both(self, ids: Ids, whole: Callable[[np.ndarray], Tensor], part: Callable[[list[Id]], Tensor]) -> Tensor:
        """What is made of the rows of masks of the whole image, and of the masks of a part, in the order of ids."""
        in_part = self._in_part(ids)
        others = np.setdiff1d(np.arange(len(ids)), in_part)
        found = part([ids[row] for row in in_part])
        if not len(others):  # as in most batches of these masks
            return found
        found = torch.cat([found, whole(others)])
        return found[to_device(np.argsort([*in_part, *others]), found.device)]

    def _inside(self, windows: int, box: Box, device: torch.device) -> Tensor:
        """Whether each voxel of a box lies in one of some windows."""
        chosen = _chosen(windows, self.windows)
        for axis, (bounds, side) in enumerate(zip(self.bounds, box, strict=True)):
            chosen = chosen.take(np.searchsorted(bounds, np.arange(side.start, side.stop), side="right") - 1, axis)
        return to_device(chosen, device)

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray] | None:
        if not self.on_patches:
            return None
        hides, rows = np.zeros(len(ids), dtype=bool), np.zeros((len(ids), 2), dtype=np.int64)
        axes = zip(self.bounds, box, strict=True)
        cells = tuple(slice(*np.searchsorted(ends, (side.start + 1, side.stop)) - (1, 0)) for ends, side in axes)
        for windows, of in _rows_of([mask[0] for mask in ids]).items():
            here = _chosen(windows, self.windows)[cells]
            hides[of] = here.any()
            rows[of, 0] = int.from_bytes(hashlib.blake2b(here.tobytes(), digest_size=7).digest(), "little")
            if here.any():  # elsewhere masks are alike
                rows[of, 1] = [1 + 100 * ids[row][1] + ids[row][2] for row in of]
        return hides, rows


class _PartMasks(BoundRISEMasks):
    """RISE masks of finer cells, which hide those in some windows alone. Ids are those of :class:`FocusedMasks`."""

    def __init__(self, masks: FocusedMasks, image: Tensor, bounds: Sequence[np.ndarray]) -> None:
        cells = [math.ceil(_FINER * count) for count in per_axis("grid_size", masks.grid_size, image.ndim - 1)]
        super().__init__(RISEMasks(masks.budget, cells, seed=masks.seed), image)
        self.bounds, self.windows = bounds, tuple(len(along) - 1 for along in bounds)

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        found = _drawn(self, ids)
        for windows, rows in _rows_of([mask[0] for mask in ids]).items():
            found["grid"][rows] |= ~_chosen(windows, self.windows)[self._windows_of_cells(found["shift"][rows])]
        return found

    def _windows_of_cells(self, shifts: np.ndarray) -> tuple[np.ndarray, ...]:
        """The window in which the middle of each cell lies, for masks of these shifts: an index of each axis."""
        found = []
        axes = zip(self.grid_shape, self.stretched_shape, self.bounds, shifts.T, strict=True)
        for cells, stretched, bounds, shift in axes:
            middles = (np.arange(cells) + 0.5) * stretched / cells - 0.5 - shift[:, None]
            found.append((np.searchsorted(bounds, middles, side="right") - 1).clip(0, len(bounds) - 2))
        others = len(found) - 1
        return tuple(of.reshape(len(of), *[1] * n, -1, *[1] * (others - n)) for n, of in enumerate(found))


def _drawn(masks: BoundRISEMasks, ids: Ids) -> dict[str, np.ndarray]:
    """The cells and shifts of :class:`FocusedMasks`' ids."""
    numbers = [number for _, number, _ in ids]
    kept = np.array([percent / 100 for *_, percent in ids])
    cells = random_rows(masks.seed, numbers, int(np.prod(masks.grid_shape))) < kept[:, None]
    return {"grid": cells.reshape(-1, *masks.grid_shape), "shift": masks.shifts[numbers]}


def _bits(chosen: np.ndarray) -> int:
    """A set of windows ``(*windows)`` as the bits of a number."""
    return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")


def _chosen(windows: int, shape: tuple[int, ...]) -> np.ndarray:
    """Which windows of a grid are in a set, bool ``(*windows)``; all of them where it is 0."""
    size = int(np.prod(shape))
    if not windows:
        return np.ones(shape, dtype=bool)
    packed = np.frombuffer(windows.to_bytes(-(-size // 8), "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little")[:size].reshape(shape).astype(bool)


def _rows_of(windows: Sequence[int]) -> dict[int, list[int]]:
    """The rows of the masks of each set of windows."""
    found: dict[int, list[int]] = {}
    for row, mask in enumerate(windows):
        found.setdefault(mask, []).append(row)
    return found


def _averages(bounds: np.ndarray) -> Tensor:
    """A matrix ``(size, windows)`` that averages the voxels of each window along an axis."""
    window = torch.from_numpy(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)))
    inside = torch.nn.functional.one_hot(window).double()
    return inside / inside.sum(dim=0)
