"""What an explanation costs, told before it is paid."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.masks.base import Masks
from monai_saliency.utils.optional_imports import require
from monai_saliency.utils.timing import Timestamp

__all__ = ["Batches", "Pace", "Price"]

logger = logging.getLogger(__name__)

# A map that takes longer is worth a word on how to make it shorter.
_LONG = 300

# Batches are timed for a second, or for this share of them, before their time is told: one alone may be off.
_SECONDS, _SHARE = 2.0, 0.1


@dataclass(frozen=True)
class Batches:
    """Batches that the network runs.

    Attributes:
        count: how many.
        shape: ``(n, C, *spatial)``, of each.
        by: what runs them, so that those of one network with the same words take as long for a voxel.
    """

    count: int = 0
    shape: Sequence[int] = ()
    by: str = ""


@dataclass(frozen=True)
class Price:
    """What some forwards of the network come to.

    Attributes:
        forwards: how many; of patches, where their outputs are remembered.
        per_prediction: forwards that one prediction of the image needs.
        batches: the batches that are left to run.
        seconds: how long it takes, from the beginning of the call to the end of the round; None where that is not
            known.
        shorter: the setting of the masks that makes it shorter, empty where there is none.

    Example::

        >>> str(Price(1001, seconds=90.0))
        '1001 predictions, about 90 seconds'
    """

    forwards: int
    per_prediction: int = 1
    batches: Batches = Batches()
    seconds: float | None = None
    shorter: str = ""

    @property
    def predictions(self) -> float:
        """The same number of forwards, in predictions of the image."""
        return self.forwards / self.per_prediction

    @property
    def duration(self) -> str:
        """How long it takes, in words, and what makes it shorter where that is long; empty where that is not known."""
        if self.seconds is None:
            return ""
        longer = self.seconds > _LONG and self.shorter
        return _duration(self.seconds) + (f"; shorter with {self.shorter}" if longer else "")

    def __str__(self) -> str:
        words = f"{self.predictions:.{0 if self.predictions >= 10 or self.per_prediction == 1 else 1}f} predictions"
        return ", ".join(filter(None, [words, self.duration]))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"about {max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"
    if seconds < 7200:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"


@dataclass(frozen=True)
class _Timed:
    """Batches that were run one after another. Nothing waits for the device until their time is read."""

    begun: Timestamp
    ended: Timestamp
    batches: Batches

    def seconds(self, batch: Batches) -> float:
        """How long one batch takes."""
        each = self.ended.seconds_since(self.begun) / self.batches.count
        return each * math.prod(batch.shape) / math.prod(self.batches.shape)


#: by network, then by what runs its batches: those of its last call; None where that had a single one, the first of all
_timed: WeakKeyDictionary[Any, dict[tuple[Any, ...], _Timed | None]] = WeakKeyDictionary()


class Pace:
    """How fast the batches of a call go. Tells what each round costs: before it begins, where the network has run such
    batches for a case before, or else as soon as some of its own are timed.

    The first batch of a call is left out, where there are more: with it the network warms up, and rows are checked.

    Args:
        network: runs the batches.
        on_screen: tell it beside a progress bar, rather than in the log alone.
    """

    def __init__(self, network: Any, on_screen: bool) -> None:
        self._clock = torch.device("cpu")
        self._begun = Timestamp(self._clock)
        self._known = _of(network)
        self._on_screen = on_screen

    def begin(self, price: Price | None, note: str, states: Sequence[CaseState], masks: Masks) -> None:
        """Begin a round, and tell what it costs.

        Args:
            price: of the round; None where nothing is to be run.
            note: the number of forwards in words, where there is more to say.
            states: the cases.
            masks: where images are perturbed.
        """
        self._price = price = price and replace(price, shorter=masks.shorter)
        self._states = states
        self._device = states[0].case.image.device
        self._stamps = [Timestamp(self._device)]
        self._count = self._stamped = 0
        self._due: _Timed | None = None
        self._is_told = price is None
        if price is None:
            return
        self._left = price.batches.count
        # Which scores on disk are used, nobody knows before the first batch.
        self._counts_known = not all(state.is_bound for state in states)
        resumes = self._counts_known and any(state.stored is not None and state.stored.ranges() for state in states)
        key = self._key(price.batches)
        self._was_known, timed = key in self._known, self._known.get(key)
        if not resumes and (timed is not None or not price.batches.count):
            price = self._with_seconds(price, timed)
            self._is_told = True
        most = "at the most, since scores are on disk; " if resumes else ""
        self._say(f"{note or f'{price.forwards} forwards'}; {most}that is {price}{_further(states)}")

    @contextmanager
    def bar(self, total: int, done: int) -> Iterator[Callable[..., None]]:
        """Show how far the round is, where that is told on the screen.

        Args:
            total: forwards at the end of the round.
            done: forwards so far.

        Yields:
            what to call after each batch: with its forwards, and False where its scores were known and it was not run.
        """
        with self._tqdm(total, done) if self._on_screen else nullcontext() as shown:

            def advance(forwards: int, ran: bool = True) -> None:
                if shown is not None:
                    shown.update(forwards)
                if self._price is not None:
                    self._pass(self._price, ran)

            yield advance
        if self._price is not None and self._count:
            # Of a single batch nothing is known where it is the network's first.
            timed = self._timed(self._price) if self._count > 1 or self._was_known else None
            self._known[self._key(self._price.batches)] = timed

    def _tqdm(self, total: int, done: int) -> Any:
        tqdm = require("tqdm", extra="bundle").tqdm
        name = self._states[0].case.name if len(self._states) == 1 else f"{len(self._states)} cases"
        # A log file is not a screen: there a line every half minute is enough.
        interval = 0.5 if sys.stderr.isatty() else 30
        return tqdm(total=total, initial=done, desc=name, unit="forward", leave=False, mininterval=interval)

    def _pass(self, price: Price, ran: bool) -> None:
        if not ran:
            self._left -= self._counts_known  # which was not run
            return
        self._left -= 1
        self._count += 1
        if self._count == 1 or self._left <= 0:
            self._stamp()
        if self._count == 1:
            self._first = Timestamp(self._clock)
        if self._is_told or self._count == 1:
            return
        enough = self._count - 1 >= _SHARE * price.batches.count or self._seconds_since(self._first) >= _SECONDS
        if self._due is None and enough:
            self._due = self._timed(price)
        # A later batch tells it where the device is not so far yet: nothing waits for it here.
        if self._due is not None and self._due.ended.passed():
            self._is_told = True
            self._say(f"it takes {self._with_seconds(price, self._due).duration}")

    def _stamp(self) -> None:
        self._stamps = [*self._stamps[:2], Timestamp(self._device)]  # the beginning, the first batch, the last one
        self._stamped = self._count

    def _timed(self, price: Price) -> _Timed:
        """The batches of the round so far, without the first one where there are more."""
        if self._stamped < self._count:  # how many batches there are was not known
            self._stamp()
        begun, ended = self._stamps[-2:]
        return _Timed(begun, ended, replace(price.batches, count=max(1, self._count - 1)))

    def _with_seconds(self, price: Price, timed: _Timed | None) -> Price:
        """A price with the time that the call has taken so far, and that of the batches that are left."""
        rest = 0.0 if timed is None else max(0, self._left) * timed.seconds(price.batches)  # waits for the device
        return replace(price, seconds=self._seconds_since(self._begun) + rest)

    def _seconds_since(self, earlier: Timestamp) -> float:
        return Timestamp(self._clock).seconds_since(earlier)

    def _key(self, batches: Batches) -> tuple[Any, ...]:
        return batches.by, tuple(batches.shape[:2]), len(batches.shape), str(self._device)

    def _say(self, words: str) -> None:
        line = f"{', '.join(state.case.name for state in self._states)}: {words}"
        logger.info(line)
        if self._on_screen:
            require("tqdm", extra="bundle").tqdm.write(line, file=sys.stderr)


def _further(states: Sequence[CaseState]) -> str:
    """What later rounds may add, in words."""
    left = sum(state.masks.at_most + 1 - state.num_rows for state in states if state.masks.in_rounds)
    return f"; further rounds, if needed, bring up to {left} more perturbed images" if left > 0 else ""


def _of(network: Any) -> dict[tuple[Any, ...], _Timed | None]:
    owner = getattr(network, "__self__", network)  # a bound method is made anew each time it is named
    try:
        return _timed.setdefault(owner, {})
    except TypeError:  # it cannot be referred to weakly
        return {}
