"""Locks between threads, by name. They are safe with forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monai_saliency.storage.backends import guard

__all__ = ["Locks"]


class Locks:
    """Locks by name. Each exists while somebody holds it or waits for it.

    Example::

        locks = Locks()
        with locks.only_one("scan 3"):
            ...  # no other thread is in a block of this name
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], tuple[threading.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": {}}

    @contextmanager
    def only_one(self, name: str) -> Iterator[None]:
        """Let one thread at a time into the block, for each name."""
        # With the process: a forked child inherits locks whose threads do not exist there.
        slot = (os.getpid(), name)
        with guard:
            lock, users = self._held.get(slot, (threading.Lock(), 0))
            self._held[slot] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with guard:
                users = self._held[slot][1] - 1
                if users:
                    self._held[slot] = (lock, users)
                else:
                    del self._held[slot]
