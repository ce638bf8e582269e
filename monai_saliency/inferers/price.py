"""What an explanation costs, told before it is paid."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.masks.base import Masks
from monai_saliency.utils.optional_imports import require
from monai_saliency.utils.timing import Timestamp

__all__ = ["Price", "tell", "told_soon"]

logger = logging.getLogger(__name__)

# A map that takes longer is worth a word on how to make it shorter.
_LONG = 300


@dataclass(frozen=True)
class Price:
    """What some forwards of the network come to.

    Attributes:
        forwards: how many; of patches, where their outputs are remembered.
        per_prediction: forwards that one prediction of the image needs.
        seconds_each: how long a forward takes, as far as it has been seen; None where it has not.
        shorter: the setting of the masks that makes it shorter, empty where there is none.

    Example::

        >>> str(Price(1001, 1, 0.09, "num_masks"))
        '1001 predictions, about 90 seconds'
    """

    forwards: int
    per_prediction: int = 1
    seconds_each: float | None = None
    shorter: str = ""

    @property
    def predictions(self) -> float:
        """The same number of forwards, in predictions of the image."""
        return self.forwards / self.per_prediction

    @property
    def seconds(self) -> float | None:
        """How long it takes; None where that is not known."""
        return None if self.seconds_each is None else self.forwards * self.seconds_each

    def __str__(self) -> str:
        words = f"{self.predictions:.{0 if self.predictions >= 10 or self.per_prediction == 1 else 1}f} predictions"
        if self.seconds is None:
            return words
        words += f", {_duration(self.seconds)}"
        if self.seconds > _LONG and self.shorter:
            words += f"; shorter with {self.shorter}"
        return words


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"about {max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"
    if seconds < 7200:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"


def tell(price: Price | None, note: str, states: Sequence[CaseState], masks: Masks, on_screen: bool) -> None:
    """Tell what a round costs, before it begins.

    Args:
        price: of the round; None where nothing is to be run.
        note: the number of forwards in words, where there is more to say.
        states: the cases.
        masks: where images are perturbed.
        on_screen: beside a progress bar, rather than in the log alone.
    """
    if price is not None:
        price = replace(price, shorter=masks.shorter)
        _say(states, f"{note or f'{price.forwards} forwards'}; that is {price}", on_screen)


def told_soon(
    price: Price | None, states: Sequence[CaseState], on_screen: bool, advance: Callable[[int], Any]
) -> Callable[[int], Any]:
    """Where nobody knows yet how long a forward takes: tell it after the second batch. The first one warms up.

    Args:
        price: of the round; None where nothing is to be run.
        states: the cases.
        on_screen: beside a progress bar, rather than in the log alone.
        advance: called with the number of forwards after each batch.

    Returns:
        what to call in its place.
    """
    if price is None or price.seconds_each is not None:
        return advance
    device = states[0].case.image.device
    seen: list[Timestamp] = []

    def advanced(count: int) -> None:
        advance(count)
        if len(seen) < 2:
            seen.append(Timestamp(device))
            if len(seen) == 2:
                took = seen[1].seconds_since(seen[0]) / count
                _say(states, f"it takes {_duration(price.forwards * took)}", on_screen)

    return advanced


def _say(states: Sequence[CaseState], words: str, on_screen: bool) -> None:
    line = f"{', '.join(state.case.name for state in states)}: {words}"
    logger.info(line)
    if on_screen:
        require("tqdm", extra="bundle").tqdm.write(line, file=sys.stderr)
