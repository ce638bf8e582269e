"""Python commands in processes of their own, as users start them."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# A shell starts its background jobs with Ctrl-C ignored, and children would inherit that.
_HEARD = ["env", "--default-signal=INT"] if sys.platform == "linux" else []


def start(arguments: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    """Start ``python ARGUMENTS...`` in a session of its own, with a pipe for its errors."""
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
    command = [*_HEARD, sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, text=True, start_new_session=True, **given)


def run(arguments: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS...``, with what it writes."""
    given = {"check": False} | options
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, **given)
