"""Random masks in two rounds: over the whole image, then finer ones where the first show evidence."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, adaptive_max_pool3d

from monai_saliency.masks.base import BoundMasks, Id, Ids, Masks, Observed, Search, Spacing, random_rows
from monai_saliency.masks.half_effect import half_effect
from monai_saliency.masks.sliding_window import PatchWindowMasks
from monai_saliency.masks.until import ended, wanted_agreement
from monai_saliency.utils.arguments import instance, number, whole_number
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.utils.tensors import Box, to_device

__all__ = ["BoundFocusedMasks", "FocusedMasks"]

# Cells an axis of masks over the whole image, in turn, and of those in a place: coarse ones find, fine ones show shape.
_COARSE, _FINE = (4, 7), 10
# A place is where the map is above this share of its largest value; below it is mostly chance.
_STANDS_OUT = 0.1
# Masks that are read on their lattice at once.
_AT_ONCE = 64
# The number of the mask that hides a place, and nothing at random.
_ALONE = -1


class FocusedMasks(Masks):
    """Random masks over the whole image, then finer ones where these show evidence. 2D and 3D.

    - *First round*: RISE masks (:class:`~monai_saliency.masks.RISEMasks`) of 4 and 7 cells an axis. Evidence is
      likely where their map is above a tenth of its largest value: a *place* of any shape, with a soft edge.
    - *Second round*: cells of a tenth of each axis are hidden in the place, and few large ones elsewhere. Where no
      value is above 0, there are more masks of the first kind.
    - Masks keep so many cells that half of the effect is left, by the scores so far
      (``monai_saliency.masks.half_effect``): few where any one of several lesions is enough, many where all of a shape
      is needed.
    - With an ``inferer`` that cuts patches, the first round hides windows on the patch grid, each alone. If hiding all
      that they show leaves half of the effect, each other window is hidden together with these. In the second round
      all outside of the place is kept.

    Each explained score asks for its own masks of all looks but the first. An id is ``(place, number, percent)``: a set
    of cells, as the bits of a number, the number of a random mask, and how many of 100 cells it keeps. The number -1
    hides the place, and nothing at random.

    Args:
        regression: makes the maps that show the places, such as :class:`~monai_saliency.estimators.RegressionScoring`.
        num_masks: random masks for each explained score, at least 4.
        p1: probability in (0, 1) that a cell is kept, or ``"auto"``: so many that half of the effect is left.
        seed: of the random masks.
        inferer: a sliding-window inferer whose patches are to be spared.
        until: ask for half as many masks of the last round again, until the map agrees so well with one of as many
            other masks, by its standard error: above 0 and below 1.
        budget: the largest number of random masks with ``until``.

    Raises:
        ValueError: for settings out of range, and (from ``bind``) when the inferer does not fit the image.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> bound = ms.masks.FocusedMasks(ms.estimators.RegressionScoring(), num_masks=40).bind(torch.zeros(1, 32, 32))
        >>> search = bound.search(torch.ones(1))
        >>> ids = next(search)  # all hidden, and three random masks
        >>> scores = bound.render(ids)[:, :, 4:20, 8:24].amin((2, 3))  # of a network that needs all voxels there
        >>> later = search.send(scores)  # so more is kept
        >>> later[0][2] > 50
        True
    """

    def __init__(
        self,
        regression: Any,
        num_masks: int = 340,
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
        self.seed = whole_number("seed", seed, 0)
        self.until = None if until is None else wanted_agreement(until)
        self.budget = max(self.num_masks, whole_number("budget", budget, 1))
        words = "a SlidingWindowInferer, whose patches are spared"
        self.inferer = instance("inferer", inferer, SlidingWindowInferer, words, none=True)

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundFocusedMasks:
        return BoundFocusedMasks(self, image)


class BoundFocusedMasks(BoundMasks):
    """The masks of one image. Each is made on a small grid of points, its lattice, and stretched linearly."""

    def __init__(self, masks: FocusedMasks, image: Tensor) -> None:
        super().__init__(image)
        self.regression, self.num_masks, self.p1, self.seed = masks.regression, masks.num_masks, masks.p1, masks.seed
        self.until, self.budget = masks.until, masks.budget if masks.until else masks.num_masks
        self.on_patches = masks.inferer is not None
        self._softened: dict[tuple[int, torch.device], Tensor] = {}
        self._lattice = [min(2 * _FINE, n) for n in self.spatial_shape]
        starts = [np.arange(points) * n // points for points, n in zip(self._lattice, self.spatial_shape, strict=True)]
        if masks.inferer is not None:
            starts = PatchWindowMasks(masks.inferer).bind(image).starts
        self.bounds = [np.append(each, n) for each, n in zip(starts, self.spatial_shape, strict=True)]
        self.grid = tuple(map(len, starts))
        self._all = (1 << int(np.prod(self.grid))) - 1
        self._stretching = [
            _linear(torch.arange(n), points, n) for n, points in zip(self.spatial_shape, self._lattice, strict=True)
        ]
        regression = type(masks.regression).__name__, *sorted(vars(masks.regression).items())
        cells = tuple(tuple(each.tolist()) for each in self.bounds)
        self.key = (
            "FocusedMasks",
            "half of the effect",
            self.seed,
            self.p1,
            self.num_masks,
            regression,
            self.on_patches,
            cells,
        )
        if self.until is not None:
            self.key += ("until", self.until, self.budget)

    @property
    def at_most(self) -> int:
        looks = 2 * self._all.bit_length() + 3 if self.on_patches else 2 + self.num_masks // 2
        return looks + max(self.num_masks, self.budget) - self.num_masks // 2

    def first_round(self) -> Ids:
        if self.on_patches:
            return [*self._windows_beside(0), (self._all, _ALONE, 0)]
        return [(self._all, _ALONE, 0), *self._random_masks(0, self._looks[0])]

    @property
    def _looks(self) -> list[range]:
        """Half of the random masks, of the first round or on patches: an eighth of them, then at each further look as
        many as before it.
        """
        half = self.num_masks // 2
        ends = [0, half // 8, half // 4, half // 2, half]
        return [range(*pair) for pair in itertools.pairwise(ends)]

    def search(self, reference_scores: Tensor) -> Search:
        observed, half = Observed(self, reference_scores), self.num_masks // 2
        yield from observed.ask(self.first_round())
        if self.on_patches:
            place = yield from self._place_on_patches(observed)
            for look in self._looks[:-1]:
                yield from observed.ask(self._random_masks(place, look, observed))
            start = self._looks[-1].start
        else:
            for look in self._looks[1:]:
                yield from observed.ask(self._random_masks(0, look, observed))
            place = self._standing_out(observed, 0, [mask for mask in observed.ids if mask[1] != _ALONE])
            start = 0 if place else half
        stop = self.num_masks - half if self.on_patches else start + self.num_masks - half
        alone = [(place, _ALONE, 0)] if place else []  # tells the score without the place
        yield from observed.ask(self._random_masks(place, range(start, stop), observed), alone)
        while self.until is not None and len(observed.ids) < self.budget and self._agreement(observed) < self.until:
            more = min(max((stop - start) // 2, 1), self.budget - len(observed.ids))
            yield from observed.ask(self._random_masks(place, range(stop, stop + more), observed))
            stop += more
        return observed.ended(self._words(observed, place))

    def _random_masks(self, place: int, numbers: range, observed: Observed | None = None) -> list[Id]:
        """Random masks of a place, which keep as many of 100 cells as the scores so far ask for."""
        percent = round(100 * float(half_effect(*self._left(observed)) if self.p1 == "auto" else self.p1))
        return [(place, drawn, min(max(percent, 1), 99)) for drawn in numbers]

    def _left(self, observed: Observed | None) -> tuple[list[float], list[float]]:
        """Of each random mask the share of cells that it keeps, and the share of the effect that is left."""
        kept: list[float] = []
        left: list[float] = []
        if observed is not None:
            scores, image = observed.by_id, float(observed.reference_scores)
            for mask in observed.ids:
                place, drawn, percent = mask
                # Under a sliding window, all outside of the place is kept.
                without = scores[place if place and self.on_patches else self._all, _ALONE, 0]
                if drawn != _ALONE and without != image:
                    kept.append(percent / 100)
                    left.append((scores[mask] - without) / (image - without))
        return kept, left

    def _words(self, observed: Observed, place: int) -> str:
        words = "nothing stood out, so the last masks cover the whole image"
        if place:
            words = "the last masks look inside the place with evidence"
        return words if self.until is None else f"{words}; {ended(self._agreement(observed), self.until)}"

    def _agreement(self, observed: Observed) -> float:
        """How far the map would agree with one of as many other masks: the share of its variance that is not chance."""
        values, error = self.regression.compute(observed), self.regression.over_seeds(observed)
        spread = float(values.double().var())
        return 1 - float(error.double().square().mean()) / spread if spread else 0.0

    def _windows_beside(self, hidden: int) -> list[Id]:
        """Masks that each hide one window more."""
        cells = range(self._all.bit_length())
        return [(hidden | 1 << cell, _ALONE, 0) for cell in cells if not hidden >> cell & 1]

    def _place_on_patches(self, observed: Observed) -> Generator[Ids, Tensor, int]:
        """The windows with evidence: each hidden alone, and each together with these if half of the effect is left."""
        place = self._standing_out(observed, 0, self._windows_beside(0))
        if not place:
            return 0
        yield from observed.ask([(place, _ALONE, 0)])
        scores, image = observed.by_id, float(observed.reference_scores)
        fill = scores[self._all, _ALONE, 0]
        if scores[place, _ALONE, 0] - fill > (image - fill) / 2 > 0:
            look = self._windows_beside(place)
            yield from observed.ask(look)
            place |= self._standing_out(observed, place, look)
            yield from observed.ask([(place, _ALONE, 0)])
        return place

    def _standing_out(self, observed: Observed, hidden: int, look: list[Id]) -> int:
        """The cells where evidence is likely by some masks, without those that are hidden; none where nothing is."""
        scores = observed.by_id
        if self.on_patches:
            before = scores.get((hidden, _ALONE, 0), float(observed.reference_scores))
            values = np.zeros(self.grid)
            values.flat[[(windows & ~hidden).bit_length() - 1 for windows, *_ in look]] = [
                before - scores[mask] for mask in look
            ]
        else:
            wanted = torch.tensor([scores[mask] for mask in look], dtype=torch.float64)
            effects = self.regression.effects(self, look, wanted)
            pool: Any = adaptive_max_pool2d if effects.ndim == 2 else adaptive_max_pool3d
            values = pool(effects[None], self.grid)[0].numpy()
        return _bits((values > _STANDS_OUT * values.max()) & (values > 0)) & ~hidden

    def places(self, ids: Ids) -> list[int]:
        return [row for row, (place, number, _) in enumerate(ids) if number == _ALONE and place != self._all]

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """``id``, objects ``(n,)``: the ids."""
        found = np.empty(len(ids), dtype=object)
        found[:] = list(ids)
        return {"id": found}

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        ids = codes["id"].tolist()
        matrices = [each[side] for each, side in zip(self._stretching, box, strict=True)]
        masks = _along_axes(self._points(ids, device), matrices)
        if self.on_patches:
            parts = []
            for place, is_alone, rows in _grouped(ids):
                part = masks.index_select(0, to_device(np.array(rows), device))
                here = self._windows(place or self._all, box, device)
                parts.append((rows, part.mul_(~here) if is_alone else torch.where(here, part, 1)))
            masks = _joined(parts)
        return masks[:, None]

    def _points(self, ids: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
        """Masks on their lattice, ``(n, *points)``."""
        parts = []
        for place, is_alone, rows in _grouped(ids):
            if not is_alone:
                part = self._random(place, [ids[row] for row in rows], device)
            elif self.on_patches:
                part = torch.ones(len(rows), *self._lattice, dtype=self.dtype, device=device)
            else:
                part = (1 - self._soft(place, device)).expand(len(rows), *self._lattice)
            parts.append((rows, part))
        return _joined(parts)

    def _random(self, place: int, ids: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
        numbers, kept = [number for _, number, _ in ids], [percent / 100 for *_, percent in ids]
        if not place:
            parts = []
            for turn, cells in enumerate(_COARSE):
                rows = [row for row, number in enumerate(numbers) if number % len(_COARSE) == turn]
                some = [numbers[row] for row in rows], [kept[row] for row in rows]
                parts.append((rows, self._cells(some[0], cells, turn, some[1], device)))
            return _joined(parts)
        fine = self._cells(numbers, _FINE, len(_COARSE), kept, device)
        if self.on_patches:
            return fine
        coarse = self._cells(numbers, _COARSE[0], len(_COARSE) + 1, kept, device)
        return torch.lerp(coarse, fine, self._soft(place, device))

    def _cells(self, numbers: list[int], cells: int, table: int, kept: list[float], device: torch.device) -> Tensor:
        """Grids of random cells, stretched to the lattice at a random shift of up to one cell."""
        sides = [min(cells, n) for n in self._lattice]
        width = int(np.prod([side + 1 for side in sides]))
        draws = random_rows(self.seed * (len(_COARSE) + 2) + table, numbers, width + len(sides))
        grids = (draws[:, :width] < np.array(kept)[:, None]).reshape(-1, *(side + 1 for side in sides))
        shifts = torch.from_numpy(draws[:, width:, None]).unbind(1)
        axes = zip(sides, self._lattice, shifts, strict=True)
        matrices = [_linear(torch.arange(points), side, points, shift) for side, points, shift in axes]
        return _along_axes(to_device(grids, device, self.dtype), matrices)

    def _chosen(self, cells: int) -> np.ndarray:
        size = int(np.prod(self.grid))
        packed = np.frombuffer(cells.to_bytes(-(-size // 8), "little"), dtype=np.uint8)
        return np.unpackbits(packed, bitorder="little")[:size].reshape(self.grid).astype(bool)

    def _soft(self, cells: int, device: torch.device) -> Tensor:
        """A set of points of the lattice, widened by one and softened by one."""
        if (cells, device) not in self._softened:
            chosen = to_device(self._chosen(cells)[None], device, self.dtype)
            near = [(torch.arange(n)[:, None] - torch.arange(n)).abs() <= 1 for n in chosen.shape[1:]]
            widened = (_along_axes(chosen, near) > 0).to(chosen)
            averaging = [each / each.sum(dim=1, keepdim=True) for each in near]
            self._softened[cells, device] = _along_axes(widened, averaging)
        return self._softened[cells, device]

    def _windows(self, cells: int, box: Box, device: torch.device) -> Tensor:
        """Whether each voxel of a box lies in one of some windows."""
        found = self._chosen(cells)
        for axis, (bounds, side) in enumerate(zip(self.bounds, box, strict=True)):
            found = found.take(np.searchsorted(bounds, np.arange(side.start, side.stop), side="right") - 1, axis)
        return to_device(found, device)

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray] | None:
        if not self.on_patches:
            return None
        hides, rows = np.zeros(len(ids), dtype=bool), np.zeros((len(ids), 2), dtype=np.int64)
        axes = zip(self.bounds, box, strict=True)
        cells = tuple(slice(*np.searchsorted(ends, (side.start + 1, side.stop)) - (1, 0)) for ends, side in axes)
        for place, is_alone, of in _grouped(ids):
            here = self._chosen(place or self._all)[cells]
            hides[of] = here.any()
            digest = hashlib.blake2b(here.tobytes() + bytes([is_alone]), digest_size=7).digest()
            rows[of, 0] = int.from_bytes(digest, "little")
            if here.any() and not is_alone:  # elsewhere masks of one place are alike
                rows[of, 1] = [1 + 100 * ids[row][1] + ids[row][2] for row in of]
        return hides, rows

    def along_axes(self, ids: Ids, matrices: Sequence[Tensor]) -> Tensor:
        if self.on_patches or not len(ids):
            return super().along_axes(ids, matrices)
        # What is read of the lattice need not be stretched first.
        products = [each.to(rows).T @ rows for rows, each in zip(self._stretching, matrices, strict=True)]
        chunks = [ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE)]
        with exact_arithmetic(self.device):
            found = [_along_axes(self._points(chunk, self.device), products) for chunk in chunks]
        return torch.cat(found)[:, None]


def _bits(chosen: np.ndarray) -> int:
    """Cells as the bits of a number."""
    return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")


def _grouped(ids: Sequence[tuple[int, int, int]]) -> list[tuple[int, bool, list[int]]]:
    """The place, whether it is hidden as a whole, and the rows of the masks that share both."""
    rows_of: dict[tuple[int, bool], list[int]] = {}
    for row, (place, drawn, _) in enumerate(ids):
        rows_of.setdefault((place, drawn == _ALONE), []).append(row)
    return [(place, is_alone, rows) for (place, is_alone), rows in rows_of.items()]


def _joined(parts: Sequence[tuple[list[int], Tensor]]) -> Tensor:
    """Parts of some rows each, in the order of the rows. As an index, a list would make the device wait."""
    rows, found = [row for each, _ in parts for row in each], torch.cat([part for _, part in parts])
    return found if rows == sorted(rows) else found.index_select(0, to_device(np.argsort(rows), found.device))


def _linear(places: Tensor, cells: int, size: int, shift: Tensor | float = 0.0) -> Tensor:
    """Matrices ``(..., places, cells)`` that read a line of cells at some places of an axis, linearly between centres.

    The axis has a size in voxels. A shift ``(n, 1)`` in cells, at least 0 and below 1, needs one cell more.
    """
    count = cells + isinstance(shift, Tensor)
    position = ((places.double() + 0.5) * cells / size - 0.5 + shift).clamp(0, count - 1)
    return (1 - (position[..., None] - torch.arange(count)).abs()).clamp_min(0)


def _along_axes(values: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Values ``(n, *cells)``, multiplied along each axis by a matrix ``(size, cells)`` or ``(n, size, cells)``."""
    *others, last = [to_device(matrix.numpy(), values.device, values.dtype) for matrix in matrices]
    values = (values.flatten(1, -2) @ last.mT).unflatten(1, values.shape[1:-1])
    for axis in range(len(others), 0, -1):  # in this order nothing is copied
        matrix, shape = others[axis - 1], [*values.shape[:axis], others[axis - 1].shape[-2], *values.shape[axis + 1 :]]
        each = matrix[:, None] if axis > 1 and matrix.ndim > 2 else matrix
        values = (each @ values.flatten(axis + 1)).reshape(shape)
    return values
