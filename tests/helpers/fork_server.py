"""Python commands as real processes that need not import torch and MONAI: forked from a server that has done so.

The server is started with the first command, and ends with the tests. It has one thread and no open file, and it has
imported what ``python -m monai.bundle`` imports, and ``monai_saliency`` itself, but none of the modules that only a
config names. A command is a process in a session of its own, with its own arguments, environment, working directory
and streams; signals hit it, and it ends as Python ends. What it shares with the others is the seed of Python's hashes,
which is not that of the tests.

A system without ``pidfd_open`` (all but Linux) starts the same commands with Python itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import IO, Any, NamedTuple

from helpers import fork_client
from helpers.paths import ROOT, TESTS

AVAILABLE = sys.platform == "linux" and hasattr(os, "pidfd_open")


class Process:
    """Like ``subprocess.Popen`` in text mode.

    Attributes:
        args: what stands behind ``python``.
        pid: its number, which is also the number of its session and process group.
        returncode: None while it runs; negative where a signal ended it.
        stdout, stderr: pipes, where they were asked for.
    """

    def __init__(
        self, args: Sequence[str], cwd: str, env: Mapping[str, str], stdout: int, stderr: int, executable: str
    ) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        with contextlib.ExitStack() as opened:
            null = opened.enter_context(open(os.devnull, "r+"))
            ends: list[int] = []
            self.stdout, self.stderr = (self._stream(kind, null.fileno(), ends, opened) for kind in (stdout, stderr))
            self._connection, self.pid = fork_client.ask(_address(), args, cwd, env, [null.fileno(), *ends], executable)

    @staticmethod
    def _stream(kind: int, null: int, ends: list[int], opened: contextlib.ExitStack) -> IO[str] | None:
        """Our end of a pipe, or None; the other end is added to ``ends``."""
        if kind == subprocess.DEVNULL:
            ends.append(null)
            return None
        reading, writing = os.pipe()
        opened.callback(os.close, writing)
        ends.append(writing)
        return open(reading, encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(fork_client.receive(self._connection))
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """What it writes, until it and all that hold its pipes have ended."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        written: dict[Any, str] = {}

        def read(stream: IO[str]) -> None:
            with stream:
                written[stream] = stream.read()

        readers = [Thread(target=read, args=[stream], daemon=True) for stream in (self.stdout, self.stderr) if stream]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if timeout is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if timeout is None else max(0.0, end - time.monotonic()))
        return written.get(self.stdout), written.get(self.stderr)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    arguments: Sequence[object],
    *,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.PIPE,
    executable: str = sys.executable,
) -> Process | subprocess.Popen[str]:
    """Start ``python ARGUMENTS...`` in a session of its own, with Ctrl-C heard.

    Args:
        arguments: ``-m module ...``, ``-c code ...`` or ``script ...``.
        cwd: working directory.
        env: all environment variables; default: ours.
        stdout: ``subprocess.DEVNULL`` or ``subprocess.PIPE``.
        stderr: ``subprocess.DEVNULL`` or ``subprocess.PIPE``.
        executable: what the command finds as ``sys.executable``, with which it starts others.
    """
    words, known = [str(word) for word in arguments], dict(os.environ if env is None else env)
    if AVAILABLE:
        return Process(words, os.path.abspath(cwd), known, stdout, stderr, executable)
    return start_python(words, cwd=cwd, env=known, stdout=stdout, stderr=stderr)


def start_python(
    arguments: Sequence[object],
    *,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.PIPE,
    **options: Any,
) -> subprocess.Popen[str]:
    """The same without the server: Python itself."""
    # A shell starts its background jobs with Ctrl-C ignored, and children would inherit that.
    heard = ["env", "--default-signal=INT"] if sys.platform == "linux" else []
    return subprocess.Popen(
        [*heard, sys.executable, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
        **options,
    )


def run(
    arguments: Sequence[object], *, check: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` of ``python ARGUMENTS...``, with what it wrote."""
    process = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        out, errors = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    done = subprocess.CompletedProcess(process.args, process.returncode or 0, out, errors)
    if check:
        done.check_returncode()
    return done


@lru_cache(maxsize=1)
def python() -> str:
    """A program to give to those who start Python on their own: it has the server fork what it is asked to run."""
    if not AVAILABLE:
        return sys.executable
    address = _address()
    program = Path(address).with_name("python")
    words = [sys.executable, "-I", "-S", fork_client.__file__, address]
    program.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in words) + ' "$@"\n')
    program.chmod(0o755)
    return str(program)


@lru_cache(maxsize=1)
def _address() -> str:
    """Path of the server's socket; starts the server."""
    folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
    # No library shall start threads of its own, nor connect to anybody.
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    server = subprocess.Popen(
        [sys.executable, "-m", "helpers.fork_server", str(folder / "socket")],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        | alone
        | {"PYTHONPATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def stop() -> None:
        server.stdin.close()  # type: ignore[union-attr]
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", "the fork server did not start; what it wrote is above"
    return str(folder / "socket")


# In the server. -------------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """What a child is to run, its standard input, output and error, and where its number is waited for."""

    arguments: list[str]
    cwd: str
    env: dict[str, str]
    executable: str
    streams: list[int]
    connection: socket.socket


def main(address: str) -> None:
    """Serve; in a child, run its command as the interpreter would, whose end is then also that of a command."""
    atexit.register(_leave_modules)  # the last of all that run
    path, opened = list(sys.path), _opened()
    for name in ("torch", "monai.bundle", "ignite.engine", "fire", "monai_saliency"):
        importlib.import_module(name)
    threads = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1 or _opened() != opened:
        sys.exit(f"a library starts threads or opens files when it is imported, which forks would share: {threads}")
    command = _serve(address)
    _become(command, path)
    _execute(command.arguments)


def _leave_modules() -> None:
    """Keep the interpreter from taking apart the large libraries: that would copy all of the server's memory."""
    large = [name for name in sys.modules if name.partition(".")[0] not in {"__main__", *sys.stdlib_module_names}]
    modules = [sys.modules.pop(name) for name in large]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def _opened() -> set[str]:
    """The open file descriptors, without the one that lists them."""
    return {each for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}")}


def _serve(address: str) -> Command:
    """Give a child its command. The server itself does not return, but exits when the tests have ended."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                sys.exit()
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    # A child for each command, which waits for it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, streams, *_ = socket.recv_fds(connection, fork_client.NUMBER.size, 3)
    request = json.loads(connection.recv(*fork_client.NUMBER.unpack(data), socket.MSG_WAITALL))
    pid = os.fork()
    if pid:
        _keep(pid, connection, streams)
    return Command(**request, streams=streams, connection=connection)


def _keep(pid: int, connection: socket.socket, streams: list[int]) -> None:
    """Tell whoever asked for a command how it ended; kill it when nobody asks any more."""
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        connection.sendall(fork_client.NUMBER.pack(status))
    os._exit(0)


def _become(command: Command, path: list[str]) -> None:
    """Make this process what a new one would be: all that it has from its parent, but the imported modules."""
    os.setsid()
    for number, stream in enumerate(command.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.env)
    sys.executable = command.executable
    sys.path[:] = [*filter(None, command.env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()
    if threads := command.env.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    command.connection.sendall(fork_client.NUMBER.pack(os.getpid()))
    command.connection.close()


def _execute(arguments: list[str]) -> None:
    """Run ``-m module ...``, ``-c code ...`` or ``script ...``, where ``-u`` may stand before it."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind, *rest = arguments
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(kind).parent.absolute()))
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
