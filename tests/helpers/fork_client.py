"""Asks a fork server for a Python command; as a script it stands in for ``python``. Standard library alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence

NUMBER = struct.Struct("<i")
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def ask(
    address: str, arguments: Sequence[str], cwd: str, env: Mapping[str, str], streams: Sequence[int], executable: str
) -> tuple[socket.socket, int]:
    """Have the server fork a command. It is killed when the connection is closed before it has ended.

    Args:
        address: path of the server's socket.
        arguments: what would stand behind ``python``: ``-m module ...``, ``-c code ...`` or ``script ...``.
        cwd: working directory.
        env: all environment variables.
        streams: file descriptors of standard input, output and error.
        executable: what the command finds as ``sys.executable``.

    Returns:
        The connection, on which the exit status will come, and the process id.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps(
        {"arguments": list(arguments), "cwd": cwd, "env": dict(env), "executable": executable}
    ).encode()
    socket.send_fds(connection, [NUMBER.pack(len(request))], list(streams))
    connection.sendall(request)
    return connection, receive(connection)


def receive(connection: socket.socket) -> int:
    """A number that the server sends.

    Raises:
        ConnectionError: when the server has ended.
    """
    data = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(data) < NUMBER.size:
        raise ConnectionError("the fork server has ended")
    return NUMBER.unpack(data)[0]


def main() -> None:
    """Run the command, with our streams, environment and working directory; forward signals to it; end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    connection, pid = ask(sys.argv[1], sys.argv[2:], os.getcwd(), os.environ, [0, 1, 2], sys.executable)
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = os.waitstatus_to_exitcode(receive(connection))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
