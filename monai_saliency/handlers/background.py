"""Work in another thread, so that the network does not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

__all__ = ["Background"]


class Background:
    """Runs pieces of work one after another in one thread. At most ``limit`` pieces wait or run."""

    def __init__(self, limit: int = 2) -> None:
        self.limit = limit
        self._thread: ThreadPoolExecutor | None = None
        self._pieces: deque[Future[None]] = deque()
        self._error: BaseException | None = None
        self._cancelled = False

    def submit(self, work: Callable[[], None], held: ExitStack) -> None:
        """Hand over work, and contexts to close when it has run or is skipped. Waits while there is no room."""
        while len(self._pieces) >= self.limit:
            wait([self._pieces[0]])
            self._pieces.popleft()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="Background")
        self._pieces.append(self._thread.submit(self._do, work, held.pop_all()))

    def _do(self, work: Callable[[], None], held: ExitStack) -> None:
        try:
            with held:
                if self._error is None and not self._cancelled:
                    work()
        except BaseException as error:  # kept for the caller: nobody asks the future for it
            self._error = error

    def check(self) -> None:
        """Raise the error of a piece that has failed."""
        if self._error is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until all pieces are done, and raise the error of a piece, if there is one."""
        while self._pieces:
            wait([self._pieces[0]])
            self._pieces.popleft()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Like :meth:`finish`, but skip the pieces that have not begun."""
        self._cancelled = True
        try:
            self.finish()
        finally:
            self._cancelled = False
