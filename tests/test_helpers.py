"""The tests' own machinery: what proves something must itself be right."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import fork_server

ENDS = {
    "well": "print('out'); sys.stderr.write('err')",
    "with a status": "sys.exit(7)",
    "by an error": "1 / 0",
    "by a signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "in an exit function": "import atexit; atexit.register(print, 'last'); threading.Timer(0.1, print, ['t']).start()",
    "knowing its words": "print(sys.argv, os.environ['WORD'], os.getcwd(), sys.path[0])",
    "without input": "print(repr(sys.stdin.read()))",
}


@pytest.mark.skipif(not fork_server.AVAILABLE, reason="needs Linux's pidfd_open")
@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_a_forked_command_is_like_a_real_one(code: str, tmp_path: Path) -> None:
    """As Python starts it: what it finds, what it writes, and how it ends."""
    found = []
    for start in (fork_server.start, fork_server.start_python):
        process = start(
            ["-c", f"import os, signal, sys, threading; {code}", "a b", "--c"],
            cwd=tmp_path,
            env=os.environ | {"WORD": "x"},
            stdout=subprocess.PIPE,
        )
        out, errors = process.communicate(timeout=60)
        found.append((process.returncode, out, (errors or "").strip().splitlines()[-1:]))
    assert found[0] == found[1]


WAITS = "import os, time; print(os.getpid(), flush=True); [time.sleep(0.1) for _ in range(600)]"


def test_a_forked_command_is_stopped_and_killed() -> None:
    for stop, code in (
        (lambda process: process.send_signal(signal.SIGINT), -signal.SIGINT),
        (lambda process: os.killpg(process.pid, signal.SIGTERM), -signal.SIGTERM),
        (lambda process: process.kill(), -signal.SIGKILL),
    ):
        process = fork_server.start(["-c", WAITS], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        stop(process)
        assert process.wait(30) == process.poll() == code


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(not fork_server.AVAILABLE, reason="needs Linux's pidfd_open")
def test_a_command_that_nobody_waits_for_is_killed() -> None:
    process = fork_server.start(["-c", WAITS])
    process._connection.close()  # type: ignore[union-attr]
    wait_for(lambda: ended(process.pid))
