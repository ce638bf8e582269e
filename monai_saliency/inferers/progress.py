"""How far an explanation is, and what it is expected to cost: a bar on a terminal, a line a minute in a log file."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from monai.utils import OptionalImportError

from monai_saliency.inferers.walk import Walk
from monai_saliency.utils.arguments import require

logger = logging.getLogger(__name__)

#: a bar that nobody asked for waits for these seconds; in a log file there is a line after the first, then each second
_PATIENCE, _LINES = 5.0, (2.0, 60.0)


class Progress:
    """The progress of some cases, which are scored one group after another.

    Args:
        cases: how many there are; None where this is unknown.
        shown: True shows a bar on a terminal, and lines elsewhere; None shows a bar on a terminal after five seconds.
    """

    def __init__(self, cases: int | None = None, shown: bool | None = True) -> None:
        self.cases, self.shown = cases, shown
        self.done = self.forwards = 0
        self._words, self._expected = "", 0.0
        self._start = self._first = self._said = time.monotonic()
        self._warm = 0
        self._bar: Any = None
        self._around = ExitStack()

    @property
    def place(self) -> str:
        """Which case it is, ``"case 3 of 10"``."""
        return f"case {self.done + 1}" + (f" of {self.cases}" if self.cases is not None else "")

    def begin(self, left: int, per_prediction: int, walks: Sequence[Walk], is_first: bool) -> None:
        """Begin a round of some cases, which takes ``left`` forwards; before the first one, what the cohort costs is
        reported.
        """
        names = ", ".join(walk.case.name for walk in walks)
        adaptive = [walk.masks for walk in walks if walk.masks.adaptive]
        further = sum(masks.at_most - len(masks.first_round()) for masks in adaptive)
        self._words = names if self.cases is None else f"{self.place}, {names}"
        if not is_first or self._expected:
            return
        self._expected = (left + further * per_prediction) / len(walks)
        if self.shown and self.cases is not None and left > 0:
            each, patches = round(self._expected), " of patches" * (per_prediction > 1)
            cases = f"{self.cases} case{'s' * (self.cases != 1)}"
            self.say(f"{cases}, up to {each} forwards{patches} each: up to {each * self.cases} in all")

    def end(self, count: int) -> None:
        """Note that a number of cases are scored."""
        self.done += count
        self._expected = self.forwards / self.done

    def advance(self, forwards: int) -> None:
        """Note that the network has run a number of forwards."""
        now = time.monotonic()
        self.forwards += forwards
        if not self._warm:  # the first batch warms up
            self._first, self._warm = now, self.forwards
        elif self.shown is not False:
            self._show(now)

    def say(self, line: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Remove the bar."""
        self._around.close()
        self._bar = None

    def _show(self, now: float) -> None:
        total = max(self.forwards, round(self._expected * max(self.cases or 1, self.done + 1)))
        if self._bar is not None or sys.stderr.isatty():
            if self._bar is None and now - self._start >= (0 if self.shown else _PATIENCE):
                self._open(total)
            if self._bar is not None:
                self._bar.total, self._bar.desc = total, f"{self._words}: "
                self._bar.update(self.forwards - self._bar.n)
        elif self.shown and now - self._said >= _LINES[self._said > self._start]:
            self._said = now
            seconds = (total - self.forwards) * (now - self._first) / (self.forwards - self._warm)
            left = timedelta(seconds=max(1, round(seconds)))
            self.say(f"scoring {self._words}: {self.forwards} of about {total} forwards, about {left} left")

    def _open(self, total: int) -> None:
        # Several bars of workers would write over each other.
        if self.shown is None and threading.current_thread() is not threading.main_thread():
            return
        try:
            tqdm = require("tqdm", extra="bundle").tqdm
        except OptionalImportError:
            if self.shown:
                raise
            return
        settings = {"unit": "forward", "leave": False, "mininterval": 0.5, "smoothing": 0.1}
        self._bar = self._around.enter_context(tqdm(desc=self._words, total=total, **settings))
        self._around.enter_context(require("tqdm.contrib.logging", extra="bundle").logging_redirect_tqdm())
        logging.captureWarnings(True)
        self._around.callback(logging.captureWarnings, False)


@contextmanager
def following(setting: Progress | bool | None) -> Iterator[Progress]:
    """The progress that an inferer's setting asks for: of a whole cohort, or of one call alone."""
    progress = setting if isinstance(setting, Progress) else Progress(shown=setting)
    try:
        yield progress
    finally:
        if progress is not setting:
            progress.close()
