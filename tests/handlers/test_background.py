"""Work beside the caller's thread: in order, one at a time, bounded, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from monai_saliency.handlers.background import Background

WAIT = 30  # seconds; reached only by a test that fails


def held(log: list, name: object) -> ExitStack:
    stack = ExitStack()
    stack.callback(log.append, f"closed {name}")
    return stack


def test_submitting_waits_for_room(left: Callable[[], list[str]]) -> None:
    go, log = threading.Event(), []
    background = Background(limit=2)

    def wait() -> None:
        assert go.wait(WAIT)
        log.append("first")

    background.submit(wait, ExitStack())
    background.submit(lambda: log.append("second"), ExitStack())
    assert len(left()) == 1
    third = threading.Thread(target=background.submit, args=(lambda: log.append("third"), ExitStack()))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    assert log == []
    go.set()
    third.join(WAIT)
    background.finish()
    assert log == ["first", "second", "third"]


def test_an_error_is_raised_once_and_what_waits_behind_it_is_not_done(left: Callable[[], list[str]]) -> None:
    go, log = threading.Event(), []
    background = Background(limit=3)

    def fail() -> None:
        assert go.wait(WAIT)
        raise ValueError("the first")

    background.submit(fail, held(log, 0))
    background.submit(lambda: log.append(1), held(log, 1))
    background.submit(lambda: log.append(2), held(log, 2))
    background.check()
    go.set()
    with pytest.raises(ValueError, match="the first"):
        background.finish()
    assert log == ["closed 0", "closed 1", "closed 2"]
    background.check()
    background.submit(lambda: log.append("again"), ExitStack())
    background.finish()
    assert log[-1] == "again"
    assert not left()
