"""The arithmetic of masks and networks, in threads and in the processes that they start."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from helpers.cached_cohort import in_children

from monai_saliency.utils import precision
from monai_saliency.utils.precision import chosen_arithmetic, network_arithmetic

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")


def settings() -> list[object]:
    return [getattr(owner, name) for owner, name, _ in precision._NoTF32.switches()]


def test_a_fork_while_threads_use_the_lock() -> None:
    """The child does not wait for a thread that did not follow it."""
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            chosen_arithmetic()

    threads = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            in_children([lambda: chosen_arithmetic() and None] * 2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_fork_while_a_thread_is_inside() -> None:
    """The child has the user's own setting, and its networks wait for nobody."""
    before = settings()
    begun, done = threading.Event(), threading.Event()

    def inside() -> None:
        with precision._no_tf32:
            begun.set()
            done.wait()

    def child() -> None:
        assert settings() == before
        with network_arithmetic(torch.device("cuda")):
            assert settings() == before
        with precision._no_tf32:
            assert settings() == [off for _, _, off in precision._NoTF32.switches()]
        assert settings() == before

    thread = threading.Thread(target=inside)
    thread.start()
    begun.wait()
    try:
        in_children([child])
        assert settings() == [off for _, _, off in precision._NoTF32.switches()]
    finally:
        done.set()
        thread.join()
    assert settings() == before
