"""Files that appear whole or not at all, and locks."""

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from monai_saliency.errors import OutputError
from monai_saliency.storage import files
from monai_saliency.storage.files import atomic_path, locked, remove_stale

ME = f"process {os.getpid()} on {os.uname().nodename}"


def test_temporary_files_of_killed_processes_go(tmp_path: Path) -> None:
    """Those that nobody has written to for an hour."""
    with atomic_path(tmp_path / "sub" / "x.npy") as temporary:
        temporary.write_bytes(b"mine, and still at work")
        left = temporary.with_name(".tmp-0123456789ab-y.npy")
        left.write_bytes(b"half a file")
        os.utime(left, (1e9, 1e9))
        remove_stale(tmp_path / "sub", "deeper")
        assert left.exists()
        remove_stale(tmp_path)
        assert list(tmp_path.rglob(".tmp*")) == [temporary]
    assert (tmp_path / "sub" / "x.npy").read_bytes() == b"mine, and still at work"
    assert not list(tmp_path.rglob(".tmp*"))


def test_who_does_not_wait_is_told_who_holds(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "lock"
    for _ in range(2):
        with locked(path, wait=False) as holder:
            assert holder is None
            with locked(path, wait=False) as other:
                assert other == ME
            with locked(path, wait=False) as other:  # asking does not take it away
                assert other == ME


def test_a_file_system_without_locks_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def none(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    files._warn_no_locks.cache_clear()
    monkeypatch.setattr(fcntl, "flock", none)
    with caplog.at_level(logging.WARNING):
        for wait in (True, False):
            with locked(tmp_path / "lock", wait) as holder, locked(tmp_path / "lock", wait) as other:
                assert holder is None
                assert other is None
    (record,) = [record for record in caplog.records if record.name.startswith("monai_saliency")]
    assert "no locks ([Errno 37] No locks available)" in record.getMessage()


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(OutputError, match=r"cannot write .*lock: (Not a directory|File exists)\. .* run again"),
        locked(tmp_path / "file" / "lock"),
    ):
        pass
