"""Ports that no other process is given by chance."""

from __future__ import annotations

import os
import random
import socket


def own_port() -> str:
    """A free port below those that the system hands out by itself (from 32768 on), to begin a process group at.

    A port that was found free, as Lightning looks for one, may be another process's by the time it is used.
    """
    chosen = random.Random(os.urandom(8))
    while True:
        port = chosen.randrange(20000, 32000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(port)
