"""Cutting rows of perturbed images into batches, of a size that is given, or that is found while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.forward import has_no_mode
from monai_saliency.inferers.whole_images import Rows, WholeImages
from monai_saliency.sharding import Part
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.monai_private import holds_compiled

__all__ = [
    "AUTO_SIZE",
    "AutoSize",
    "GrowingBatches",
    "RoundSizes",
    "batch_size",
    "cut",
    "evenly",
    "first_size",
    "of_part",
]

#: values in a batch of perturbed images, 64 MB in float32
_BATCH_VALUES = 2**24
#: a larger batch must be faster by this share for an image, or it does not pay
_PAYS = 0.03
#: how often a size is timed, of which the fastest counts, and the most images in a batch
_TIMES, _MOST = 2, 512

#: by network, then by image, device and inferer: the size that was found
_found: WeakKeyDictionary[Any, dict[tuple[Any, ...], int]] = WeakKeyDictionary()


class AutoSize(int):
    """A batch size that is found while batches run. As a number it is the one to begin with, for whoever cannot wait.

    Example::

        >>> AutoSize(16) + 0
        16
    """


AUTO_SIZE = AutoSize(16)


def batch_size(value: Any) -> int:
    """Check a setting ``mask_batch_size``.

    Args:
        value: a whole number of at least 1, or ``"auto"``.

    Raises:
        ValueError: when it is something else.

    Example::

        >>> batch_size(8), isinstance(batch_size("auto"), AutoSize)
        (8, True)
    """
    if isinstance(value, AutoSize) or (isinstance(value, str) and value == "auto"):
        return AUTO_SIZE
    return whole_number("mask_batch_size", value, 1)


def first_size(size: int, image: torch.Tensor) -> int:
    """The size of the first batch, by the setting and the image alone.

    Args:
        size: the setting, as :func:`batch_size` gives it.
        image: ``(C, *spatial)``.

    Example::

        >>> first_size(batch_size("auto"), torch.zeros(1, 256, 256, 128)), first_size(32, torch.zeros(1, 256, 256, 128))
        (2, 32)
    """
    return max(1, min(size, _BATCH_VALUES // max(1, image.numel()))) if isinstance(size, AutoSize) else size


def cut(spans: Sequence[tuple[int, int]], size: int | Callable[[], int]) -> Iterator[list[Rows]]:
    """Cut runs of rows, laid end to end, into batches.

    Args:
        spans: for each case the rows [start, stop).
        size: of a batch; a function is asked before each.

    Example::

        >>> list(cut([(0, 5), (0, 2)], 4))
        [[(0, 0, 4)], [(0, 4, 5), (1, 0, 2)]]
    """
    batch: list[Rows] = []
    room = 0
    for index, (start, end) in enumerate(spans):
        while start < end:
            if not batch:
                room = size() if callable(size) else size
            stop = min(end, start + room)
            batch.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch = []
    if batch:
        yield batch


def of_part(batches: list[list[Rows]], part: Part) -> list[list[Rows]]:
    """The batches that a part runs: its share, and all that hold an unperturbed image.

    Args:
        batches: all batches of a round.
        part: the part.

    Example::

        >>> of_part([[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 6)]], Part(0, 2))
        [[(0, 0, 2)], [(0, 2, 4)]]
    """
    shared = [number for number, rows in enumerate(batches) if all(start > 0 for _, start, _ in rows)]
    others = set(shared) - {shared[i] for i in part.of(len(shared))}
    return [rows for number, rows in enumerate(batches) if number not in others]


def evenly(total: int, most: int) -> int:
    """Rows in each of as few batches as ``most`` rows allow, all but the last alike.

    Args:
        total: rows in all, at least 1.
        most: rows that a batch may have.

    Example::

        >>> evenly(17, 16), evenly(16, 16), evenly(33, 16)
        (9, 16, 11)
    """
    return -(-total // -(-total // most))


class RoundSizes:
    """Rows in a batch of each round, so that as few batches as ``most`` rows allow are as full as can be: 17 rows are
    two batches of 9, not two of 16 of which the second is nearly empty.

    Cut alike whatever is stored, and by every worker. A network that may take one batch size only gets that: one that
    is compiled or exported, or is anything but a module.

    - The first round's batches, which are checked for each case, have at least half as many rows as any later one.
    - No later one has a single row: networks may give that without its batch axis. Its second row is the unperturbed
      image, which is looked at again.
    - The first batch of a new size is checked once a network, see :mod:`monai_saliency.inferers.reference`.

    Args:
        most: rows that a batch may have.
        states: the cases.
        network: what is explained.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.hierarchical_occlusion(4, 2, target=ms.ClassScore("all", "softmax"))
        >>> states, _ = explain.start(torch.zeros(1, 1, 16, 16))
        >>> sizes = RoundSizes(12, states, torch.nn.Flatten())  # 16 windows and the unperturbed image
        >>> sizes.first, sizes.of([(17, 21)]), sizes.of([(21, 22)])
        (9, 4, 2)
        >>> RoundSizes(12, states, torch.sum).of([(17, 21)])  # it may take one batch size only
        12
    """

    def __init__(self, most: int, states: Sequence[CaseState], network: Any) -> None:
        self.most = min(most, sum(state.masks.at_most + 1 for state in states))
        is_module = type(network).__call__ is torch.nn.Module.__call__ and not isinstance(
            network, torch.jit.ScriptModule
        )
        self._is_free = is_module and not holds_compiled(network) and not has_no_mode(network)
        self.first = self.of([state.rows_of_round(0) for state in states])

    def of(self, spans: Sequence[tuple[int, int]]) -> int:
        """Rows in each batch of a round.

        Args:
            spans: for each case the rows [start, stop), at least one in all.
        """
        if not self._is_free:
            return self.most
        least = -(-self.most // 2) if any(start == 0 for start, _ in spans) else 2
        return min(self.most, max(least, evenly(sum(stop - start for start, stop in spans), self.most)))


class GrowingBatches:
    """Batches of masks whose size doubles, or halves, as long as that pays. What was timed are batches of the round
    itself, whose scores count.

    The first batch has the same size in every run, so that the unperturbed image scores the same to the bit, and scores
    on disk are used again. Scores do not depend on the size but by the rounding of another batch size, and are stored
    under the masks that they are of.

    Args:
        scoring: runs the batches.
        first: the size to begin with.
    """

    def __init__(self, scoring: WholeImages, first: int) -> None:
        self.scoring = scoring
        self.first = self.size = first
        self._image = image = scoring.states[0].case.image
        self._is_up = True
        self._seconds: list[float] = []  # an image, in batches of the present size
        self._tried: dict[int, float] = {}
        network = scoring.forward.network
        try:
            self._known = _found.setdefault(getattr(network, "__self__", network), {})
        except TypeError:  # it cannot be referred to weakly
            self._known = {}
        inferer = type(scoring.forward.inferer).__name__
        self._key = (tuple(image.shape), image.dtype, str(image.device), inferer, len(scoring.states), first)
        self._settled = self._known.get(self._key)

    @classmethod
    def of(cls, scoring: Any, setting: int, first: int) -> GrowingBatches | None:
        """Batches that grow, where the setting asks for it and the network gains by it.

        A compiled network would be compiled for each size, images that go through one at a time have no other, and
        remembered patches have batches of their own.

        Args:
            scoring: runs the batches.
            setting: the setting, as :func:`batch_size` gives it.
            first: the size to begin with.
        """
        if not isinstance(setting, AutoSize) or not isinstance(scoring, WholeImages):
            return None
        single = scoring.reference.found is not None or holds_compiled(scoring.forward.network)
        return None if single else cls(scoring, first)

    def score(self, spans: Sequence[tuple[int, int]], advance: Callable[..., Any]) -> None:
        """Score a round.

        Args:
            spans: for each case the rows [start, stop).
            advance: as for :meth:`~monai_saliency.inferers.whole_images.Scoring.score`.
        """
        self.scoring.score(self.batches(spans), self.parts(advance))

    def batches(self, spans: Sequence[tuple[int, int]]) -> Iterator[list[Rows]]:
        """The batches of a round, each to be run before the next one is asked for.

        Args:
            spans: for each case the rows [start, stop).
        """
        total = left = sum(stop - start for start, stop in spans)
        begins = any(start == 0 for start, _ in spans)
        even: int | None = None

        def size() -> int:
            nonlocal even
            if begins and left == total:
                chosen = min(self.first, left)
            elif self._settled is None:
                chosen = min(self.size, left)
            else:
                # As many batches as that size needs, all alike, so that the last one is not padded by much.
                chosen = even = even or evenly(left, self._settled)
            self.scoring.resize(chosen, check=False)
            return chosen

        for batch in cut(spans, size):
            count = sum(stop - start for _, start, stop in batch)
            runs, begun = self.scoring.runs, self._time()
            yield batch
            left -= count
            is_timed = count == len(self.scoring.batch) and all(start > 0 for _, start, _ in batch)
            if self._settled is None and is_timed and self.scoring.runs == runs + 1:
                self._note((self._time() - begun) / count, left)
        self.scoring.resize(self.first, check=False)

    def parts(self, advance: Callable[..., Any]) -> Callable[..., None]:
        """What to call after each batch, such that a pace that counts batches of the first size counts as many."""

        def in_parts(forwards: int, ran: bool = True) -> None:
            for start in range(0, forwards, self.first):
                advance(min(self.first, forwards - start), ran)

        return in_parts

    def _note(self, seconds: float, left: int) -> None:
        """Take the time of an image in a batch of the present size, and choose the next size, or the one to stay at."""
        self._seconds.append(seconds)
        if len(self._seconds) < _TIMES:
            return
        best = self._best()
        self._tried[self.size], self._seconds = min(self._seconds), []
        following = self._following(left, best is None or self._best() == self.size)
        if following is not None:
            self.size = following
            return
        self._settled = self.size = self._best() or self.first
        if len(self._tried) > 1:  # there were masks enough to compare
            self._known[self._key] = self._settled

    def _best(self) -> int | None:
        """The smallest size than which no larger one is faster by much, of those on the way so far."""
        best: int | None = None
        for size, seconds in self._tried.items():
            if best is None or seconds < (1 - _PAYS) * self._tried[best]:
                best = size
        return best

    def _following(self, left: int, paid: bool) -> int | None:
        """The next size to try; None where none is left."""
        if self._is_up and paid and self._may_grow(left):
            return 2 * self.size
        if self._is_up:  # smaller ones are tried where no larger one is better
            self._is_up = False
            paid, smaller = self._best() == self.first, self.first // 2
        else:
            smaller = self.size // 2
        return smaller if paid and smaller and left >= 2 * _TIMES * smaller else None

    def _may_grow(self, left: int) -> bool:
        """Whether a batch of twice the size is worth a try: it must be allowed, fit and be filled several times."""
        larger = 2 * self.size
        if larger > _MOST or left < 2 * _TIMES * larger or self.scoring.forward.was_halved(self.scoring.batch):
            return False
        if self._image.is_cuda:
            free, _ = torch.cuda.mem_get_info(self._image.device)
            return free > torch.cuda.memory_reserved(self._image.device)  # it may take as much again
        # The memory of a host ends processes, rather than batches.
        return larger * self._image.numel() <= _BATCH_VALUES

    def _time(self) -> float:
        """Seconds, while sizes are compared: for that, the device is waited for."""
        if self._settled is not None:
            return 0.0
        if self._image.is_cuda:
            torch.cuda.synchronize(self._image.device)
        return time.perf_counter()
