"""Work done beside the caller's thread, so that the network need not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from threading import Thread

__all__ = ["Background"]


class Background:
    """Does pieces of work one after another in a thread, a few of them waiting at the most.

    Each piece is a thread that first waits for the one before it. So no thread outlives its work, however the caller
    ends, and a program that ends without a word to this object still completes what it handed over.

    Where a piece raises, those behind it are not done, until :meth:`check` or :meth:`finish` has raised the error.

    Args:
        limit: pieces at work or waiting, at the most.
    """

    def __init__(self, limit: int = 2) -> None:
        self.limit = limit
        self._pieces: deque[Thread] = deque()
        self._error: BaseException | None = None
        self._cancelled = False

    def submit(self, work: Callable[[], None], held: ExitStack) -> None:
        """Hand over a piece, once there is room for it.

        Args:
            work: it.
            held: emptied, for what it holds is now closed when the piece is done, or is not going to be.
        """
        while len(self._pieces) >= self.limit:
            self._pieces[0].join()
            self._pieces.popleft()
        before = self._pieces[-1] if self._pieces else None
        piece = Thread(target=self._do, args=(work, held.pop_all(), before), name="Background")
        piece.start()
        self._pieces.append(piece)

    def _do(self, work: Callable[[], None], held: ExitStack, before: Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            with held:
                if self._error is None and not self._cancelled:
                    work()
        except BaseException as error:  # the caller raises it: what dies with its thread is lost
            self._error = error

    def check(self) -> None:
        """Raise what a piece has raised so far."""
        if self._error is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until all is done, and raise what a piece has raised."""
        while self._pieces:
            self._pieces[0].join()
            self._pieces.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Like :meth:`finish`, but what waits is not done."""
        self._cancelled = True
        try:
            self.finish()
        finally:
            self._cancelled = False
