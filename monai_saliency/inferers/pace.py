"""What an explanation costs, reported before it is paid, and how far it is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.rounds import Plan
from monai_saliency.masks.base import Masks
from monai_saliency.utils.arguments import require

__all__ = ["Pace"]

logger = logging.getLogger(__name__)

#: seconds after which a map takes long enough for a word on how to make it shorter
_LONG = 300
#: batches are timed for this many seconds, or for this share of all forwards, before their time is reported
_SECONDS, _SHARE = 2.0, 0.1


class Pace:
    """Reports what each round of a call costs: predictions before it begins, and seconds once batches are timed."""

    def __init__(self, masks: Masks, on_screen: bool) -> None:
        self._shorter = masks.shorter
        self._on_screen = on_screen
        self._begun = time.monotonic()

    @contextmanager
    def round(self, plan: Plan, states: Sequence[CaseState]) -> Iterator[Callable[[int], None]]:
        """Report a round, and show how far it is."""
        left = plan.total - plan.done
        if left > 0:
            predictions = plan.total / plan.per_prediction
            digits = 0 if predictions >= 10 or plan.per_prediction == 1 else 1
            words = f"{plan.note or f'{plan.total} forwards'}; that is {predictions:.{digits}f} predictions"
            self._say(states, words + _further(states))
        done, first, told = 0, 0.0, False
        with self._bar(plan, states) if self._on_screen else nullcontext() as shown:

            def advance(forwards: int) -> None:
                nonlocal done, first, told
                if shown is not None:
                    shown.update(forwards)
                now = time.monotonic()
                if not first:  # the first batch warms up, and its rows are checked
                    first = now
                    return
                done += forwards
                if not told and (now - first >= _SECONDS or done >= _SHARE * left):
                    told = True
                    rest = max(0, left - done) * (now - first) / max(1, done)
                    self._say(states, f"it takes {self._duration(now - self._begun + rest)}")

            yield advance

    def _bar(self, plan: Plan, states: Sequence[CaseState]) -> Any:
        tqdm = require("tqdm", extra="bundle").tqdm
        name = states[0].case.name if len(states) == 1 else f"{len(states)} cases"
        # A log file is not a screen: there a line every half minute is enough.
        interval = 0.5 if sys.stderr.isatty() else 30
        bar: dict[str, Any] = {"desc": name, "unit": "forward", "leave": False, "mininterval": interval}
        return tqdm(total=plan.total, initial=plan.done, **bar)

    def _duration(self, seconds: float) -> str:
        """How long it takes, in words, and what makes it shorter where that is long."""
        if seconds < 120:
            words = f"about {max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"
        elif seconds < 7200:
            words = f"about {seconds / 60:.0f} minutes"
        else:
            words = f"about {seconds / 3600:.1f} hours"
        return f"{words}; shorter with {self._shorter}" if seconds > _LONG and self._shorter else words

    def _say(self, states: Sequence[CaseState], words: str) -> None:
        line = f"{', '.join(state.case.name for state in states)}: {words}"
        logger.info(line)
        if self._on_screen:
            require("tqdm", extra="bundle").tqdm.write(line, file=sys.stderr)


def _further(states: Sequence[CaseState]) -> str:
    """What later rounds may add, in words."""
    left = sum(state.masks.at_most + 1 - state.num_rows for state in states if state.masks.in_rounds)
    return f"; further rounds, if needed, bring up to {left} more perturbed images" if left > 0 else ""
