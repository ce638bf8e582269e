"""The threads that a test left running."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest


@pytest.fixture
def left() -> Callable[[], list[str]]:
    """Names the background threads that began in this test and still run.

    The thread of an earlier test's run ends only with that run's error, which may still be held.
    """
    earlier = set(threading.enumerate())
    return lambda: [
        each.name for each in threading.enumerate() if each.name.startswith("Background") and each not in earlier
    ]
