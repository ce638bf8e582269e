"""Random masks in two rounds: over the whole image, then finer ones where the first show evidence."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from scipy import ndimage
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, adaptive_max_pool3d, avg_pool2d, avg_pool3d, max_pool2d, max_pool3d

from monai_saliency.masks.base import BoundMasks, Id, Ids, Masks, Observed, Search, Spacing, random_rows
from monai_saliency.masks.sliding_window import PatchWindowMasks
from monai_saliency.masks.until import ended, wanted_agreement
from monai_saliency.utils.arguments import instance, number, whole_number
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.utils.tensors import Box, to_device

__all__ = ["BoundFocusedMasks", "FocusedMasks"]

# Cells an axis of masks over the whole image, in turn, and of those in a place: coarse ones find, fine ones show shape.
_COARSE, _FINE = (4, 7), 10
# Cells are kept in a place with p1 times one of these, in turn: much of what is there may be needed, or little; and
# outside with p1 times the last one, since the evidence there is known.
_KEPT, _KEPT_OUTSIDE = (1.2, 1.4, 1.6), 1.8
# The same with the other places hidden: nearly all of the place that is left may be hidden before the score falls.
_KEPT_OF_ONE, _KEPT_OUTSIDE_OF_ONE = (0.6, 1.0, 1.4), 1.5
# However large p1 is, some cells are hidden.
_MOST_KEPT = 0.95
# A place is where the map is above the first share of its largest value; below it is mostly chance. Parts above the
# second one, widened by a cell, may be two lesions. Nothing stands out in more of the image than the third.
_STANDS_OUT, _STRONG, _EVERYWHERE = 0.1, 0.3, 0.25
# The evidence is there more than once where hiding the places leaves more than this of what the image adds.
_LEFT = 0.25
# Places with evidence that is there more than once: each takes a round.
_MOST_PLACES = 4
# Masks that are read on their lattice at once.
_AT_ONCE = 64
# The number of the mask that hides what is hidden, and nothing at random.
_ALONE = -1


class FocusedMasks(Masks):
    """Random masks over the whole image, then finer ones where these show evidence. 2D and 3D.

    - *First round*: RISE masks (:class:`~monai_saliency.masks.RISEMasks`) of 4 and 7 cells an axis. Evidence is
      likely where their map is above a tenth of its largest value: a *place* of any shape, with a soft edge.
    - *Second round*: cells of a tenth of each axis are hidden in the place, and few large ones elsewhere. Where the
      place is more than a quarter of the image, nothing stands out, and there are more masks of the first kind.
    - Where hiding the place leaves more than a quarter of what the image adds to the score, another place gives what it
      gives. A round with the first one hidden finds that, and each place has its masks with the others hidden.
    - With an ``inferer`` that cuts patches, the first round hides windows on the patch grid, and in the second one all
      outside of the place is kept.

    Each explained score asks for its own masks of the later rounds. An id is ``(hidden, place, number)``: the first two
    are sets of cells, as the bits of a number, and the last one counts the random masks of a place (of all, if 0).

    Args:
        regression: makes the maps that show the places, such as :class:`~monai_saliency.estimators.RegressionScoring`.
        num_masks: random masks for each explained score, at least 4.
        p1: probability in (0, 1) that a cell is kept in the first round. In a place it is up to 1.6 times that.
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
        >>> ids = next(search)  # 20 random masks, and all hidden
        >>> scores = bound.render(ids)[:, :, 20:24, 8:12].mean((2, 3))  # of a network that looks there
        >>> later = search.send(scores)  # does hiding the place hide the evidence?
        >>> float(bound.render(later)[0, 0, 22, 10])
        0.0
    """

    def __init__(
        self,
        regression: Any,
        num_masks: int = 340,
        p1: float = 0.5,
        seed: int = 0,
        inferer: SlidingWindowInferer | None = None,
        until: float | None = None,
        budget: int = 4000,
    ) -> None:
        self.regression = regression
        self.num_masks = whole_number("num_masks", num_masks, 4)
        self.p1 = number("p1", p1)
        if not 0 < self.p1 < 1:
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
        self.key = ("FocusedMasks", self.seed, self.p1, self.num_masks, regression, self.on_patches, cells)
        if self.until is not None:
            self.key += ("until", self.until, self.budget)

    @property
    def at_most(self) -> int:
        looks = len(self.first_round()) * (1 + self.on_patches) + 2 * (1 + _MOST_PLACES)
        return looks + max(self.num_masks, self.budget) - self.num_masks // 2

    def first_round(self) -> Ids:
        return [*self._look(0, self.num_masks // 2), (self._all, 0, _ALONE)]

    def _look(self, hidden: int, count: int) -> list[Id]:
        if self.on_patches:
            cells = range(self._all.bit_length())
            return [(hidden | 1 << cell, 0, _ALONE) for cell in cells if not hidden >> cell & 1]
        return [(hidden, 0, number) for number in range(count)]

    def search(self, reference_scores: Tensor) -> Search:
        observed, image = Observed(self, reference_scores), float(reference_scores)
        hidden, before, look = 0, image, self._look(0, self.num_masks // 2)
        left = self.num_masks - self.num_masks // 2
        yield from observed.ask(self.first_round())
        fill = observed.by_id[self._all, 0, _ALONE]
        places: list[int] = []
        while standing_out := self._standing_out(observed, hidden, before, look):
            region, *parts = standing_out
            together = _union([hidden, *parts])
            apart = [(hidden | part, 0, _ALONE) for part in parts] if len(parts) > 1 else []
            yield from observed.ask([(together, 0, _ALONE), *apart])
            scores = observed.by_id
            without = scores[together, 0, _ALONE]
            is_left = without - fill > _LEFT * (image - fill) > 0
            drops = [before - scores[mask] for mask in apart]
            adds_up = not apart or sum(drops) > (1 - _LEFT) * (before - without)
            places += [region] if adds_up and not is_left and not places else parts
            if not is_left or hidden:
                break
            hidden, before, look = together, without, self._look(together, self.num_masks // 4)
            yield from observed.ask(look)
            left -= self.num_masks // 4
        yield from self._last_masks(observed, places, left)
        return observed.ended(self._words(observed))

    def _last_masks(self, observed: Observed, places: list[int], left: int) -> Generator[Ids, Tensor, None]:
        """Random masks of the places, as many as are left; with ``until`` more of them until the map is good enough."""
        contexts = [(_union(places) & ~place, place) for place in places] or [(0, 0)]
        first = 0 if places else self.num_masks // 2
        spare, done, wanted = self.budget - len(observed.ids), 0, left // len(contexts)
        while wanted > done:
            numbers = range(first + done, first + wanted)
            yield from observed.ask([(*context, number) for context in contexts for number in numbers])
            if self.until is None or self._agreement(observed) >= self.until:
                return
            done, wanted = wanted, min(wanted + wanted // 2, spare // len(contexts))

    def _words(self, observed: Observed) -> str:
        count = len({place for _, place, _ in observed.ids if place})
        words = "nothing stood out, so the last masks cover the whole image"
        if count:
            words = f"the last masks look inside {count} place{'s' * (count > 1)} with evidence"
        if count > 1:
            words += "; one place can replace another, so the others were hidden meanwhile"
        return words if self.until is None else f"{words}; {ended(self._agreement(observed), self.until)}"

    def _agreement(self, observed: Observed) -> float:
        """How far the map would agree with one of as many other masks: the share of its variance that is not chance."""
        values, error = self.regression.compute(observed), self.regression.over_seeds(observed)
        spread = float(values.double().var())
        return 1 - float(error.double().square().mean()) / spread if spread else 0.0

    def _standing_out(self, observed: Observed, hidden: int, before: float, look: list[Id]) -> list[int]:
        """The cells where evidence is likely by some masks over the whole image, and their parts where it is strong;
        none where nothing stands out.
        """
        scores = observed.by_id
        values = self._on_grid(look, hidden, [before - scores[mask] for mask in look])
        region = (values > _STANDS_OUT * values.max()) & (values > 0)
        if not region.any() or region.mean() > _EVERYWHERE:
            return []
        around = np.ones([3] * region.ndim)
        numbers, count = ndimage.label(values > _STRONG * values.max(), around)
        parts = [region]
        if count <= _MOST_PLACES:
            parts = [ndimage.binary_dilation(numbers == number, around) for number in range(1, count + 1)]
        places = [_bits(cells) & ~hidden for cells in (region, *parts)]
        return [cells for cells in places if cells]

    def _on_grid(self, look: list[Id], hidden: int, drops: list[float]) -> np.ndarray:
        """The evidence in each cell, by masks that let the score fall so much."""
        if self.on_patches:
            values = np.zeros(self.grid)
            values.flat[[(windows & ~hidden).bit_length() - 1 for windows, *_ in look]] = drops
            return values
        effects = self.regression.effects(self, look, -torch.tensor(drops, dtype=torch.float64))
        pool: Any = adaptive_max_pool2d if effects.ndim == 2 else adaptive_max_pool3d
        return pool(effects[None], self.grid)[0].numpy()

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
            for hidden, place, rows in _grouped(ids):
                part = masks.index_select(0, to_device(np.array(rows), device))
                part = torch.where(self._windows(place or self._all, box, device), part, 1)
                parts.append((rows, part.mul_(~self._windows(hidden, box, device))))
            masks = _joined(parts)
        return masks[:, None]

    def _points(self, ids: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
        """Masks on their lattice, ``(n, *points)``."""
        parts = []
        for hidden, place, rows in _grouped(ids):
            numbers = [ids[row][2] for row in rows]
            if numbers[0] == _ALONE:
                part = torch.ones(len(rows), *self._lattice, dtype=self.dtype, device=device)
            else:
                part = self._random(place, hidden > 0, numbers, device)
            if hidden and not self.on_patches:
                part *= 1 - self._soft(hidden, device)
            parts.append((rows, part))
        return _joined(parts)

    def _random(self, place: int, has_others: bool, numbers: list[int], device: torch.device) -> Tensor:
        if not place:
            parts = []
            for turn, cells in enumerate(_COARSE):
                rows = [row for row, number in enumerate(numbers) if number % len(_COARSE) == turn]
                found = self._cells([numbers[row] for row in rows], cells, turn, [self.p1] * len(rows), device)
                parts.append((rows, found))
            return _joined(parts)
        shares, around = (_KEPT_OF_ONE, _KEPT_OUTSIDE_OF_ONE) if has_others else (_KEPT, _KEPT_OUTSIDE)
        kept = [min(shares[number % len(shares)] * self.p1, _MOST_KEPT) for number in numbers]
        outside = [min(around * self.p1, _MOST_KEPT)] * len(numbers)
        fine = self._cells(numbers, _FINE, len(_COARSE), kept, device)
        if self.on_patches:
            return fine
        inside = self._soft(place, device)
        coarse = self._cells(numbers, _COARSE[0], len(_COARSE) + 1, outside, device)
        return torch.lerp(coarse, fine, inside)

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
            chosen = to_device(self._chosen(cells)[None, None], device, self.dtype)
            widen, soften = (max_pool2d, avg_pool2d) if chosen.ndim == 4 else (max_pool3d, avg_pool3d)
            self._softened[cells, device] = soften(widen(chosen, 3, 1, 1), 3, 1, 1, count_include_pad=False)[0]
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
        for hidden, place, of in _grouped(ids):
            varied = 0 if ids[of[0]][2] == _ALONE else place or self._all
            here = [self._chosen(windows)[cells] for windows in (hidden, varied)]
            hides[of] = here[0].any() or here[1].any()
            digest = hashlib.blake2b(here[0].tobytes() + here[1].tobytes(), digest_size=7).digest()
            rows[of, 0] = int.from_bytes(digest, "little")
            if here[1].any():  # elsewhere masks of one place are alike
                rows[of, 1] = [ids[row][2] for row in of]
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


def _union(places: Sequence[int]) -> int:
    return functools.reduce(operator.or_, places, 0)


def _bits(chosen: np.ndarray) -> int:
    """Cells as the bits of a number."""
    return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")


def _grouped(ids: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """What is hidden, the place, and the rows of the masks that share both: random ones, and one that is not."""
    found: dict[tuple[int, int, bool], list[int]] = {}
    for row, (hidden, place, at) in enumerate(ids):
        found.setdefault((hidden, place, at == _ALONE), []).append(row)
    return [(hidden, place, rows) for (hidden, place, _), rows in found.items()]


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
