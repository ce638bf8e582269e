"""The contract of masks: settings that :meth:`Masks.bind` fits to one image, and the masks of that image.

:class:`BoundMasks` draws a small *code* for each mask on the CPU (a window's corner, the bits of a grid) and renders
full-size masks from the codes, a few at a time, on any device. A mask is named by its id and depends only on the seed,
its id, the spatial shape and what the masks are bound to. So every division of the work uses the same masks.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from monai_saliency.cases import Number
from monai_saliency.utils.arguments import written
from monai_saliency.utils.precision import accumulation_dtype, exact_arithmetic
from monai_saliency.utils.tensors import Box, blend, everywhere

#: the name of a mask, opaque to all but its family: a number in families of one round, a tuple of integers in rounds
Id: TypeAlias = Any
Ids: TypeAlias = Sequence[Id]
#: voxel sizes in mm, one per spatial axis
Spacing: TypeAlias = Sequence[float] | None
#: makes a label map ``(1, *spatial)`` of an image ``(C, *spatial)`` and its voxel sizes, such as Supervoxels(200)
MakesRegions: TypeAlias = Callable[[Tensor, Spacing], Tensor]

#: yields ids of masks, is sent their scores ``(n, K)``, and returns what it has observed
Search: TypeAlias = "Generator[Ids, Tensor, Observed]"

# Voxels of masks that are held at a time; one mask at least.
_MOST_VOXELS = 2**23


class Masks(ABC):
    """The settings of a family of masks. A subclass implements :meth:`bind`.

    A mask is 1 where the image is kept and 0 where the fill replaces it.

    Attributes:
        by_region: whether masks hide whole regions, so that a map is flat in each region.
        needs_labels: whether these are the regions of the case's label map, which :meth:`bind` needs then.
        follows_target: whether masks depend on the target that is bound to the case, see :meth:`for_scores`.
    """

    __repr__ = written

    by_region: bool = False
    needs_labels: bool = False
    follows_target: bool = False

    def for_scores(self, additive: bool, linear: bool) -> Masks:
        """The masks for scores that are sums over voxels of the output, or linear in it, or not."""
        return self

    @abstractmethod
    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        """Fit the masks to one image.

        Args:
            image: ``(C, *spatial)``, 2D or 3D. Most masks read only its spatial shape, device and precision.
            labels: the case's label map ``(1, *spatial)``, whole numbers, for masks of its regions.
            spacing: voxel sizes in mm, one per spatial axis, for masks whose sizes are in mm.

        Raises:
            ValueError: when the masks do not fit the image, or when needed labels or voxel sizes are missing.
        """

    def bind_with_numbers(
        self, numbers: Mapping[str, Number], image: Tensor, labels: Tensor | None = None, spacing: Spacing = None
    ) -> BoundMasks:
        """Fit the masks to one image, and to numbers of its case that they hide like regions. Only
        :class:`~monai_saliency.masks.CoalitionMasks` can hide any.
        """
        if numbers:
            raise ValueError(
                f"the `numbers` {list(numbers)} of `inputs` are players, and {type(self).__name__} hide none: use "
                "shapley(...), or leave out `numbers`, so that they stay as they are"
            )
        return self.bind(image, labels=labels, spacing=spacing)


@dataclass(frozen=True)
class Regions:
    """The regions of one image: organs of a label map, or supervoxels.

    Attributes:
        values: the label of each region, ascending.
        index: int32 ``(*spatial)``, the region of each voxel: its position in ``values``, from 1; 0 for no region.
    """

    values: list[int]
    index: Tensor


@dataclass(eq=False)
class Observed:
    """The masks that a search has asked for, with their scores: all that a map is made of.

    Attributes:
        masks: the masks of the case.
        reference_scores: ``(K,)``, the scores of the unperturbed image. K is 1 where masks depend on scores.
        ids: the n masks, in the order in which they were asked for.
        scores: ``(n, K)``, one row a mask.
        words: why no further masks were asked for; empty for masks that do not depend on scores.
        finding: what the search itself has found, such as a region; else None.
        fit: what the map of an estimator shares with its error, such as a regression; else None.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> bound = ms.masks.SlidingWindowMasks(window_size=1).bind(torch.zeros(1, 1, 3))
        >>> observed = Observed(bound, torch.tensor([6.0]), range(3), torch.tensor([[5.0], [4.0], [3.0]]))
        >>> ms.estimators.OcclusionScoring().compute(observed)
        tensor([[[1., 2., 3.]]])
    """

    masks: BoundMasks
    reference_scores: Tensor
    ids: Ids = ()
    scores: Tensor = None  # type: ignore[assignment]  # none yet
    words: str = ""
    finding: Any = None
    fit: Any = None

    def __post_init__(self) -> None:
        if self.scores is None:
            self.scores = self.reference_scores.new_zeros(0, len(self.reference_scores))

    @property
    def by_id(self) -> dict[Id, float]:
        """The score of each mask, where one score is explained."""
        return dict(zip(self.ids, self.scores[:, 0].double().tolist(), strict=True))

    def ask(self, ids: Ids, aside: Ids = ()) -> Generator[Ids, Tensor, None]:
        """A step of a search: ask for masks, and keep their scores. Those that were asked for before are left out. The
        masks ``aside`` are scored with them, and no map is made of them.
        """
        known = set(self.ids)
        unknown = [mask for mask in dict.fromkeys(ids) if mask not in known]
        new = ids if len(unknown) == len(ids) else unknown
        if len(new):
            scores = yield [*aside, *new] if aside else new
            self.scores = torch.cat([self.scores, scores[len(aside) :]])
            self.ids = [*self.ids, *new] if known else new
            self.fit = None

    def ended(self, words: str) -> Observed:
        """The same, with the reason why the search has ended."""
        self.words = words
        return self


class BoundMasks(ABC):
    """The masks of one image. A family of one round implements ``__len__``, its number of masks, and has the ids
    0, 1, 2, ...; a family whose later masks
    depend on scores implements :meth:`first_round`, :meth:`search` and :attr:`at_most`.

    Attributes:
        spatial_shape: the image's spatial shape.
        device: the image's device, where :meth:`render` puts masks by default.
        dtype: float64 for a float64 image, otherwise float32.
        key: everything that decides the masks: objects with equal keys have equal masks.
        channels: the number of channels, where each channel has its own mask; None where one mask serves all channels.
            Where :attr:`layer` is ``"fill"``, the number of fills.
        layer: what has its own mask where not all channels have one: ``"channel"`` or ``"fill"``, a word for tables.
        numbers: the numbers of the case that masks hide like regions, by name; none where the image alone is hidden.
        words: what a user should know of these masks, for the explanation's ``stopped``; mostly empty.
        stop: asks for the masks of one round little by little, until the map is good enough
            (:class:`~monai_saliency.masks.UntilMasks`); None where all are asked for.
    """

    key: tuple
    channels: int | None = None
    layer: str = "channel"
    numbers: Mapping[str, Number] = {}
    words: str = ""
    stop: Any = None

    def __init__(self, image: Tensor) -> None:
        self.spatial_shape = tuple(image.shape[1:])
        self.device = image.device
        self.dtype = torch.float64 if image.dtype == torch.float64 else torch.float32

    @property
    def regions(self) -> Regions | None:
        """The regions that the masks hide as a whole; None for masks that are not made of regions."""
        return None

    def __len__(self) -> int:
        """The number of masks of a family of one round."""
        raise TypeError(f"the number of {type(self).__name__} depends on the scores")

    @property
    def at_most(self) -> int:
        """The largest number of masks that may be scored."""
        return len(self)

    def first_round(self) -> Ids:
        """The ids of the first masks to score, whatever the scores: by default all masks of the family."""
        return range(len(self) if self.stop is None else self.stop.first)

    def search(self, reference_scores: Tensor) -> Search:
        """Ask for masks, round after round, as the scores of the earlier ones decide. Override this for masks that
        depend on scores, such as windows that are refined where the score fell. The first round is
        :meth:`first_round`. What is asked for must follow from the scores alone, so that every worker and every
        resumed run asks for the same masks (law 2).

        Args:
            reference_scores: ``(K,)``, of the unperturbed image. Where this is overridden each explained score has a
                search of its own, and K is 1.

        Yields:
            ids of masks, at least one. Their scores ``(n, K)`` are sent back.

        Returns:
            what the search has observed, and why it ended.
        """
        if self.stop is not None:
            return (yield from self.stop.search(self, reference_scores))
        observed = Observed(self, reference_scores)
        yield from observed.ask(self.first_round())
        return observed.ended(self.words)

    @property
    def drawn(self) -> bool:
        """Whether masks are drawn at random, so that a map has a standard error: those with a ``num_masks`` are."""
        return getattr(self, "num_masks", None) is not None

    @property
    def adaptive(self) -> bool:
        """Whether later masks depend on the scores of earlier ones."""
        return self.stop is not None or type(self).search is not BoundMasks.search

    @abstractmethod
    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """The codes of some masks: small arrays by name, with one row per mask, from which masks are rendered."""

    def hidden_numbers(self, ids: Ids) -> np.ndarray:
        """Which of :attr:`numbers` each mask hides, bool ``(n, numbers)``."""
        return np.zeros((len(ids), 0), dtype=bool)

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> Tensor:
        """Render masks ``(n, channels or 1, *spatial)`` in [0, 1] from n codes. A subclass has this or the next one."""
        return self._render_box(codes, self._whole, device)

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        """The part of masks inside a box. Override this where a part can be rendered alone."""
        inside = (slice(None), *everywhere(box))
        return self._render(codes, device)[inside]

    @property
    def _whole(self) -> Box:
        return tuple(slice(0, size) for size in self.spatial_shape)

    def places(self, ids: Ids) -> list[int]:
        """Which of some masks hide one place and keep all else, by their position in ``ids``; by default none."""
        return []

    def restrict(self, ids: Ids, box: Box) -> tuple[np.ndarray, np.ndarray] | None:
        """Tell which of n masks agree inside a box of the image, so that work on it is done once for all of them.

        Returns:
            bool ``(n,)``: whether a mask hides any voxel of the box; and integers ``(n, width)``: masks with equal rows
            that hide something in the box are equal there. None, the default, where this is unknown.
        """
        return None

    def changed_boxes(self, ids: Ids) -> list[Box] | None:
        """The box that contains all that a mask hides, one a mask; None (the default) if it may hide any voxel."""
        return None

    @property
    def hides_boxes(self) -> bool:
        """Whether each mask hides all voxels of its :meth:`changed_boxes`."""
        return False

    def hidden_sum(self, ids: Ids, weights: Tensor) -> Tensor | None:
        """``sum_i weights[i, k] * (1 - mask_i)`` for weights ``(n, K)``: ``(K, channels or 1, *spatial)``. None, the
        default, where masks must be rendered for it.
        """
        return None

    def render(self, ids: Ids, device: torch.device | str | None = None, box: Box | None = None) -> Tensor:
        """Render n masks in full size, or the part of them inside a box (one slice with start and stop for each spatial
        axis), on :attr:`device` or another one.

        Returns:
            ``(n, 1, *spatial)``, or ``(n, C, *spatial)`` where each channel has its own mask. Values lie in [0, 1]: 1
            keeps the image, 0 hides it.

        Raises:
            IndexError: for masks of one round, when an id is out of range.
        """
        if not self.adaptive:
            for number in {min(ids), max(ids)}:
                if not 0 <= number < len(self):
                    raise IndexError(f"mask ids must be in [0, {len(self)}), got {number}")
        device = torch.device(device) if device is not None else self.device
        box = self._whole if box is None else box
        with exact_arithmetic(device):
            return self._render_box(self.codes(ids), box, device)

    def perturb(
        self, image: Tensor, fill: Tensor, rendered: Tensor, is_finite: bool, out: Tensor, box: Box | None = None
    ) -> None:
        """Write images ``(C, *spatial)``, or the part of them inside a box, that n rendered masks perturb by the case's
        fill to ``out``, ``(n, C, *spatial)``. Override this for masks of several fills.
        """
        blend(fill, image, rendered, is_finite, out=out)

    def kept_share(self, rendered: Tensor) -> Tensor:
        """The share of the image that rendered masks keep, ``(n, 1 or C, *spatial)``."""
        return rendered

    def stream(self, ids: Ids) -> Iterator[tuple[slice, Tensor]]:
        """Render many masks, a few at a time: a slice of ``ids``, and the masks with these ids from :meth:`render`.

        The chunks depend only on the number of ids and the spatial shape, so that sums over them repeat to the bit.
        """
        size = max(1, (self.channels or 1) * int(np.prod(self.spatial_shape)))
        step = int(min(64, max(1, _MOST_VOXELS // size)))
        for start in range(0, len(ids), step):
            chunk = slice(start, min(start + step, len(ids)))
            yield chunk, self.render(ids[chunk])

    def weighted_sum(self, ids: Ids, weights: Tensor) -> Tensor:
        """``sum_i weights[i, k] * mask_i`` for weights ``(n, K)``: ``(K, channels or 1, *spatial)``, summed over chunks
        in float64 (float32 on devices without float64).
        """
        sums = self.zero_sums(weights)
        weights = weights.to(self.device, self.dtype)
        with exact_arithmetic(self.device):
            for chunk, masks in self.stream(ids):
                sums += (weights[chunk].T @ masks.flatten(1)).reshape(sums.shape)
        return sums

    def moments(self, ids: Ids, first: Tensor, second: Tensor, origin: float) -> tuple[Tensor, Tensor]:
        """The sums of ``mask - origin``, and of its square, each multiplied by weights ``(n, K)`` of its own."""
        sums = self.zero_sums(first), self.zero_sums(second)
        first, second = first.to(self.device, self.dtype), second.to(self.device, self.dtype)
        with exact_arithmetic(self.device):
            for chunk, rendered in self.stream(ids):
                power = rendered.flatten(1).sub_(origin)
                sums[0].add_((first[chunk].T @ power).reshape(sums[0].shape))
                power.square_()
                sums[1].add_((second[chunk].T @ power).reshape(sums[1].shape))
        return sums

    def along_axes(self, ids: Ids, matrices: Sequence[Tensor]) -> Tensor:
        """Masks multiplied along each axis by a matrix ``(size, columns)``, ``(n, channels or 1, *columns)``, in double
        precision or the masks' own. Override this for masks that need not be rendered for it.
        """
        shape = (0, self.channels or 1, *(each.shape[1] for each in matrices))
        found = [torch.zeros(shape, dtype=accumulation_dtype(self.device), device=self.device)]
        with exact_arithmetic(self.device):
            for _, masks in self.stream(ids):
                masks = masks.to(found[0])
                for each in matrices:  # the first axis becomes the last
                    masks = torch.tensordot(masks, each.to(masks), dims=([2], [0]))
                found.append(masks)
        return torch.cat(found)

    def zero_sums(self, weights: Tensor) -> Tensor:
        """Zeros to add weighted masks to."""
        shape = (weights.shape[1], self.channels or 1, *self.spatial_shape)
        return torch.zeros(shape, dtype=accumulation_dtype(self.device), device=self.device)


def random_rows(seed: int, numbers: Sequence[Any], width: int) -> np.ndarray:
    """Some rows of ``default_rng(seed).random((n, width))`` with n large enough."""
    rows, wanted = np.empty((len(numbers), width)), np.asarray(numbers, dtype=np.int64)
    begins = np.flatnonzero(np.diff(wanted, prepend=wanted[:1]) != 1)
    stream, place = np.random.PCG64(seed), 0
    draw = np.random.Generator(stream).random
    for begin, end in itertools.pairwise([*begins, len(wanted)]):
        # One float64 takes one step of PCG64, so any row is reached without drawing the earlier ones.
        stream.advance((int(wanted[begin]) - place) * width)
        rows[begin:end] = draw((end - begin, width))
        place = int(wanted[end - 1]) + 1
    return rows
