"""Work that one thread does meanwhile, such as writing a case while the network explains the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from monai_saliency.utils.timing import stage


class Background:
    """Runs pieces of work one after another in one thread. At most two wait or run."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pieces: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None], held: ExitStack) -> None:
        """Hand over work, and contexts to close when it has run or is skipped. Waits if the queue is full, and raises
        the error of an earlier piece.
        """
        with stage("wait"):
            while self._pieces and (len(self._pieces) > 1 or self._pieces[0].done()):
                self._pieces.popleft().result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="Background")
        piece, close = self._thread.submit(work), held.pop_all().close
        piece.add_done_callback(lambda _: close())
        self._pieces.append(piece)

    def finish(self, skip: bool = False) -> None:
        """Wait until all pieces are done, or skip those that have not begun, and raise the first error."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=skip)
            self._thread = None
        pieces, self._pieces = self._pieces, deque()
        for piece in pieces:
            if not piece.cancelled():
                piece.result()
