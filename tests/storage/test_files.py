"""Files that appear whole or not at all, and locks."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import fork_server

from monai_saliency.errors import OutputError
from monai_saliency.storage import files
from monai_saliency.storage.files import atomic_path, locked, remove_stale

DEAD = 4194305  # above the largest process number
ME = f"process {os.getpid()} on {os.uname().nodename}"


def test_temporary_files_of_killed_processes_go(tmp_path: Path) -> None:
    """Also of one whose number this process has now, as in a container that was restarted."""
    with atomic_path(tmp_path / "sub" / "x.npy") as temporary:
        temporary.write_bytes(b"mine, and still at work")
        prefix = temporary.name.split("-")

        def of(process: str, host: str = prefix[1]) -> Path:
            path = temporary.with_name("-".join([prefix[0], host, process, *prefix[3:]]))
            path.write_bytes(b"half a file")
            return path

        of(f"{DEAD}")
        of(f"{DEAD}.1")
        of(f"{os.getpid()}.1")
        kept = [temporary, of(f"{DEAD}", "elsewhere"), of(f"{os.getpid()}"), of("1.2.3")]
        remove_stale(tmp_path / "sub", "deeper")
        assert len(list(tmp_path.rglob(".tmp*"))) == 7
        remove_stale(tmp_path)
        assert sorted(tmp_path.rglob(".tmp*")) == sorted(kept)
    assert (tmp_path / "sub" / "x.npy").read_bytes() == b"mine, and still at work"


def test_who_does_not_wait_is_told_who_holds(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "lock"
    for _ in range(2):
        with locked(path, wait=False) as holder:
            assert holder is None
            with locked(path, wait=False) as other:
                assert other == ME
            with locked(path, wait=False) as other:  # asking does not take it away
                assert other == ME


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    code = "import sys, time; from monai_saliency.storage.files import locked\n"
    code += "with locked(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    path = tmp_path / "lock"
    process = fork_server.start(["-c", code, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with locked(path, wait=False) as holder:
        assert holder == f"process {process.pid} on {os.uname().nodename}"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with locked(path, wait=False) as holder:
        assert holder is None
    assert path.read_text().strip() == ME


def test_a_file_system_without_locks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
