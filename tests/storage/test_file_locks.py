"""Locks on systems without fcntl."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from monai_saliency.storage import files
from monai_saliency.storage.files import is_running, locked

ME = f"process {os.getpid()} on {os.uname().nodename}"


class Msvcrt(SimpleNamespace):
    """Windows' locks on bytes, for one process: by file and position, each held by one open file."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        super().__init__(held={}, positions=set())

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        place = os.fstat(descriptor).st_ino, position
        self.positions.add(position)
        assert count == 1
        if mode == self.LK_UNLCK:
            assert self.held.pop(place) == descriptor
        elif self.held.setdefault(place, descriptor) != descriptor:
            raise PermissionError(errno.EACCES, "Permission denied")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Msvcrt:
    msvcrt = Msvcrt()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    return msvcrt


def test_windows_locks_a_byte_that_nobody_reads(windows: Msvcrt, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with locked(path, wait=False) as holder, locked(path, wait=False) as other:
            assert holder is None
            assert other == ME
            assert path.read_text().strip() == ME
    assert windows.held == {}
    assert min(windows.positions) > path.stat().st_size


def test_who_waits_on_windows_comes_next(windows: Msvcrt, tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []

    def wait() -> None:
        with locked(path) as holder:
            order.append(("second", holder))

    thread = threading.Thread(target=wait)
    with locked(path):
        thread.start()
        time.sleep(0.3)
        order.append(("first", None))
    thread.join()
    assert order == [("first", None), ("second", None)]


def test_a_system_without_locks_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", None)
    files._warn_no_locks.cache_clear()
    with caplog.at_level(logging.WARNING):
        for wait in (True, False):
            with locked(tmp_path / "lock", wait) as holder, locked(tmp_path / "lock", wait) as other:
                assert holder is None
                assert other is None
    (record,) = [record for record in caplog.records if record.name.startswith("monai_saliency")]
    assert "neither fcntl nor msvcrt" in record.getMessage()


def test_windows_is_not_asked_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """There os.kill with 0 sends Ctrl-C."""
    monkeypatch.setattr(files, "os", SimpleNamespace(name="nt"))
    assert is_running("4194305")
